"""The language of `--where`, parsed by lark: conditions with `and`, `or`, `not`, `in (...)`, brackets and quotes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import UTC, datetime
from functools import cache
from typing import Any

from lark import Lark, Token, Transformer, UnexpectedInput, UnexpectedToken
from lark.exceptions import VisitError

from rolltap.errors import DatasetError
from rolltap.reconstructor.exporters.conditions import COMPARE, AllOf, AnyOf, Expression, FilterCondition, Kind, NotOf
from rolltap.wording import did_you_mean

GRAMMAR = r"""
    ?start: either
    ?either: both (_OR both)*
    ?both: negated (_AND negated)*
    ?negated: _NOT negated -> no
        | "(" either ")"
        | FIELD OP VALUE -> condition
        | FIELD _IN "(" VALUE ("," VALUE)* ")" -> within
        | FIELD _NOT _IN "(" VALUE ("," VALUE)* ")" -> without

    _OR.2: /or(?=[\s(])/
    _AND.2: /and(?=[\s(])/
    _NOT.2: /not(?=[\s(])/
    _IN.2: /in(?=[\s(])/
    OP: "!=" | ">=" | "<=" | "=" | "<" | ">" | "~"
    FIELD: /[A-Za-z_][\w.\-]*/
    VALUE: /"[^"]*"/ | /'[^']*'/ | /[^\s()"',]+/
    %ignore /\s+/
"""
EXPECTED = "FIELD OP VALUE, as in reward>=0.5 or task in (a, 'b c'), joined by and, or, not and brackets"


def parse(text: str, kinds: Mapping[str, Kind]) -> Expression:
    """Parses a text over fields of these kinds. Raises `DatasetError`, with the place and the reason."""
    try:
        return _Builder(text, kinds).transform(_parser().parse(text))
    except UnexpectedInput as error:
        ended = isinstance(error, UnexpectedToken) and error.token.type == "$END"
        at = len(text) if ended or error.pos_in_stream is None else error.pos_in_stream
        raise DatasetError(
            f"where: can't read {text!r} from character {at + 1} on ({text[at : at + 20]!r}); expected {EXPECTED}; "
            f"fields: {', '.join(sorted(kinds))}, tag.NAME"
        ) from None
    except VisitError as error:
        raise error.orig_exc from None


@cache
def _parser() -> Lark:
    return Lark(GRAMMAR, parser="lalr")


class _Builder(Transformer[Token, Expression]):
    """Builds the expression from the parse tree."""

    def __init__(self, text: str, kinds: Mapping[str, Kind]) -> None:
        super().__init__()
        self._text = text
        self._kinds = kinds

    def either(self, parts: list[Expression]) -> Expression:
        return AnyOf(tuple(parts))

    def both(self, parts: list[Expression]) -> Expression:
        return AllOf(tuple(parts))

    def no(self, parts: list[Expression]) -> Expression:
        return NotOf(parts[0])

    def condition(self, tokens: list[Token]) -> Expression:
        field, op, value = tokens
        return self._comparison(field, str(op), value)

    def within(self, tokens: list[Token]) -> Expression:
        return AnyOf(tuple(self._comparison(tokens[0], "=", value) for value in tokens[1:]))

    def without(self, tokens: list[Token]) -> Expression:
        return NotOf(self.within(tokens))

    def _comparison(self, field: Token, op: str, value: Token) -> FilterCondition:
        name = str(field)
        kind = self._kinds.get("tag" if name.startswith("tag.") else name)
        if kind is None:
            known = ", ".join(sorted(self._kinds))
            raise DatasetError(
                f"where: no field {name!r} (character {(field.start_pos or 0) + 1}); known: {known}, tag.NAME"
                f"{did_you_mean(name, self._kinds)}"
            )
        operators = ("=", "!=", "~") if kind in ("text", "tags", "list") else tuple(COMPARE)
        if op not in operators:
            raise DatasetError(f"where: {name} knows {' '.join(operators)}, not {op}")
        plain = str(value)
        plain = plain[1:-1] if plain[0] in "\"'" else plain
        return FilterCondition(f"{name}{op}{value}", name, op, _value(name, kind, plain))


def _value(name: str, kind: Kind, text: str) -> Any:
    """A condition's value by its kind. A date without a time stays a text, which is compared with the day."""
    try:
        if kind == "number":
            return float(text)
        if kind == "date":
            moment = datetime.fromisoformat(text)
            if re.fullmatch(r"\d{4}-\d\d-\d\d", text):
                return text
            return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
    except ValueError:
        expected = "a number" if kind == "number" else "an ISO date, as in 2026-03-01"
        raise DatasetError(f"where: {name} needs {expected}, not {text!r}") from None
    return text
