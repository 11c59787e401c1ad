"""The grammar of a family's tool calls, for engines that take grammars (in llguidance's dialect of Lark).

A call is rendered in the family's own form with different arguments. The ids that all have in common begin it, as
tokens; the arguments behind them are JSON by the tool's schema. A family whose arguments are no JSON has no grammar.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import msgspec
from cachetools import LRUCache

from rolltap.errors import InvalidRequest
from rolltap.protocols.conversation import Message, Text, Tool, ToolCall
from rolltap.proxy.continuation.fit import ID_FORMS, Fitting
from rolltap.proxy.continuation.rendering import TokenRenderer

KNOWN = 256
ARGUMENTS = ("{}", '{"name": "x"}', '{"other": [1]}')
"""What the ids before the arguments are found by: they are the same for all of these."""

GUIDED = {"lenient": True, "whitespace_pattern": r"(?: |\r?\n[ \t]{0,40})?"}
"""llguidance's options for arguments: keywords that it does not know say nothing, as without a grammar."""


class RenderedCalls:
    """Calls as a family writes them."""

    def __init__(self, renderer: TokenRenderer, fitting: Fitting) -> None:
        self._renderer = renderer
        self._fitting = fitting

    @property
    def numbers(self) -> bool:
        """Whether a call's ids have its number in the conversation."""
        return bool(self._fitting.id_form)

    def call(self, name: str, number: int, arguments: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """What the family writes before such a call's block, and the block; empty if it is not read as that call."""
        tools = (Tool(name, "", {"type": "object", "properties": {}}),)
        id_form = ID_FORMS.get(self._fitting.id_form)
        call = ToolCall(f"{name} {number}", name, arguments)
        call = ToolCall(id_form(call, number), name, arguments) if id_form is not None else call
        question = Message("user", (Text("q"),))
        try:
            prompt, whole = (
                self._renderer.render(self._fitting.whole(messages).messages, tools, thinking=False)
                for messages in ([question], [question, Message("assistant", (), (call,))])
            )
        except InvalidRequest:
            return (), ()
        start = len(common([tuple(prompt), tuple(whole)]))
        turn = list(takewhile(lambda token: token not in self._renderer.stop_token_ids, whole[start:]))
        pieces = self._renderer.parse(turn, prompt[:start], tools).pieces
        block = next((piece for piece in pieces if piece.calls), None)
        if block is None or [(called.name, called.ok) for called in block.calls or ()] != [(name, True)]:
            return (), ()
        before = turn[: block.start] if start == len(prompt) else []  # else the turn begins otherwise than a reply
        said = self._renderer.parse(before, prompt, tools)
        is_empty = not said.text.strip() and not said.reasoning
        return tuple(before if is_empty else ()), tuple(turn[block.start :])


@dataclass(frozen=True, slots=True)
class CallForm:
    """A call of one tool: the ids that begin it, the text before and after its arguments, and the ids that close it."""

    beginning: tuple[int, ...]
    before: str
    after: str
    closing: tuple[int, ...]

    def rule(self, schema: dict[str, Any]) -> str:
        parts = [*_tokens(self.beginning), *_literal(self.before), f"%json {json.dumps(schema)}"]
        return " ".join([*parts, *_literal(self.after), *_tokens(self.closing)])


class CallGrammars:
    """Grammars for the calls of one family."""

    def __init__(self, renderer: TokenRenderer, fitting: Fitting) -> None:
        self._renderer = renderer
        self._rendered = RenderedCalls(renderer, fitting)
        self._forms: LRUCache[tuple[str, int], CallForm | None] = LRUCache(KNOWN)
        self._grammars: LRUCache[bytes, str | None] = LRUCache(KNOWN)

    def find(self, tools: Sequence[Tool], number: int = 0, *, must_call: bool = True) -> str | None:
        """The grammar of one call of one of `tools`, the conversation's call `number`; unless one `must` be made, also
        of text, before a call or without one. None if the family has no such grammar.
        """
        key = msgspec.msgpack.encode((tools, number if self._rendered.numbers else 0, must_call))
        if key not in self._grammars:
            self._grammars[key] = self._make(tools, number, must_call=must_call)
        return self._grammars[key]

    def _make(self, tools: Sequence[Tool], number: int, *, must_call: bool) -> str | None:
        forms = [self._form(tool, number) for tool in tools]
        opening = self._renderer.markers.tool_open
        rules = []
        for at, (tool, form) in enumerate(zip(tools, forms, strict=True)):
            if form is None or tool.parameters is None or (not must_call and form.beginning[0] != opening):
                return None
            schema = {**(tool.parameters or {}), "x-guidance": GUIDED}
            rules.append(f"call_{at}: {form.rule(schema if tool.parameters else {**schema, 'type': 'object'})}")
        if not rules:
            return None
        calls = " | ".join(f"call_{at}" for at in range(len(rules)))
        start = "BREAK? call" if must_call else "TEXT call? | call"
        texts = r"BREAK: /[ \n]{1,4}/" if must_call else r"TEXT: /(.|\n)+/"
        return "\n".join((f"start: {start}", texts, f"call: {calls}", *rules, ""))

    def _form(self, tool: Tool, number: int) -> CallForm | None:
        key = tool.name, number if self._rendered.numbers else 0
        if key not in self._forms:
            self._forms[key] = self._find_form(*key)
        return self._forms[key]

    def _find_form(self, name: str, number: int) -> CallForm | None:
        """The form; None unless it is the same around all `ARGUMENTS`."""
        blocks = [self._rendered.call(name, number, arguments)[1] for arguments in ARGUMENTS]
        beginning = common(blocks)
        if not beginning or self._renderer.markers.beginnings is None:
            return None
        forms = {self._split(beginning, block, arguments) for block, arguments in zip(blocks, ARGUMENTS, strict=True)}
        return forms.pop() if len(forms) == 1 else None

    def _split(self, beginning: tuple[int, ...], block: tuple[int, ...], arguments: str) -> CallForm | None:
        """A block whose ids after `beginning` are text with the arguments' JSON, then special tokens."""
        special = self._renderer.tokenizer.special_ids
        rest = list(block[len(beginning) :])
        closing = tuple(takewhile(lambda token: token in special, reversed(rest)))[::-1]
        inner = rest[: len(rest) - len(closing)]
        if not special.isdisjoint(inner):
            return None
        before, opened, tail = self._renderer.tokenizer.decode(inner).partition("{")
        try:
            value, end = json.JSONDecoder().raw_decode(opened + tail)
        except ValueError:
            return None
        return CallForm(beginning, before, (opened + tail)[end:], closing) if value == json.loads(arguments) else None


def common(rows: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """The ids that all `rows` begin with."""
    return tuple(ids[0] for ids in takewhile(lambda ids: len(set(ids)) == 1, zip(*rows, strict=False)))


def _tokens(ids: Sequence[int]) -> list[str]:
    return [f"<[{id}]>" for id in ids]


def _literal(text: str) -> list[str]:
    return [json.dumps(text, ensure_ascii=False)] if text else []
