"""Types of argument values in formats that write a value as bare text between tags.

One rule: a value is the text, if its schema allows only strings. If the schema allows other types, too, the text is a
value of another type if it is written exactly like one: JSON, or as Python writes it (`True`, `['a']`), which some
templates do. Otherwise it is the text, if a string is allowed, and else does not fit. Where nothing is declared,
text that is JSON is that value.
"""

from __future__ import annotations

import ast
import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from rolltap.protocols.conversation import Tool

Types = frozenset[str]
Schema = Mapping[str, Any] | bool | None

_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?")
_WORDS = {"true": "true", "True": "true", "false": "false", "False": "false", "null": "null", "None": "null"}

_ESCAPED = r"""\\(?:[\\'"nrt]|x[0-9a-f]{2}|u(?!d[89a-f])[0-9a-f]{4}|U00(?:0[0-9a-f]|10)[0-9a-f]{4})"""
_PYTHONS = re.compile(rf"""'(?:[^'\\\n]|{_ESCAPED})*'|"(?:[^"\\\n]|{_ESCAPED})*"|\b(?:True|False|None)\b""")
"""Strings and words in what Python writes for a list or a dict."""


class Parameters:
    """The declared parameters of a tool; nothing is declared if the tool is unknown.

    A client makes the schema, so each part of it is looked at once, however it refers to itself.
    """

    def __init__(self, name: str, tools: Sequence[Tool]) -> None:
        tool = next((tool for tool in tools if tool.name == name), None)
        self._root: Schema = tool.parameters if tool is not None else None
        if tool is not None and tool.kind == "custom":
            self._root = {"properties": {"input": {"type": "string"}}}
        self._known: dict[int, Types | None] = {}
        self._properties: dict[str, Schema] = {}
        for schema in self._all_of(self._root):
            properties = schema.get("properties")
            self._properties |= properties if isinstance(properties, dict) else {}

    def may_be(self, key: str) -> bool:
        """Whether `key` may be a parameter: it is declared, or nothing is."""
        return key in self._properties or not self._properties

    def read(self, key: str, text: str) -> str | None:
        """The value of `key` as JSON text; None if `text` is no value of its declared type."""
        schema = self._properties.get(key)
        if schema is None and isinstance(self._root, Mapping):
            schema = self._root.get("additionalProperties")
        try:
            types = self._types(schema)
            if types is None:
                return _undeclared(text)
            literal = _literal(text if "string" in types else text.strip())
            if literal is not None and not literal[0].isdisjoint(types) and not self._lists(schema, text):
                return literal[1]
        except (ValueError, RecursionError):  # JSON that Python can't read, or too long a chain of references
            return None
        return json.dumps(text, ensure_ascii=False) if "string" in types else None

    def _types(self, schema: Schema) -> Types | None:
        """The types of the values that a schema allows; None if it allows any."""
        if not isinstance(schema, Mapping):
            return None
        if id(schema) not in self._known:
            self._known[id(schema)] = frozenset()  # a choice that refers to itself adds nothing to it
            types: Types | None = None
            for part in self._all_of(schema):
                types = _both(types, self._own_types(part))
            self._known[id(schema)] = types
        return self._known[id(schema)]

    def _own_types(self, part: Mapping[str, Any]) -> Types | None:
        """The types that one schema allows, without those that it refers to."""
        declared, types = part.get("type"), None
        if isinstance(declared, str | list):
            names = [declared] if isinstance(declared, str) else declared
            types = frozenset(name.lower() for name in names if isinstance(name, str))
        elif "properties" in part:
            types = frozenset({"object"})
        for listed in (part.get("enum"), [part["const"]] if "const" in part else None):
            if isinstance(listed, list):
                types = _both(types, frozenset().union(*map(_types_of, listed)))
        for choice in ("anyOf", "oneOf"):
            if isinstance(branches := part.get(choice), list):
                types = _both(types, _either([self._types(branch) for branch in branches]))
        return types | {"null"} if part.get("nullable") is True and types is not None else types

    def _all_of(self, schema: Schema) -> list[Mapping[str, Any]]:
        """The schemas that hold together: the schema, what it refers to, and the members of its `allOf`."""
        parts: dict[int, Mapping[str, Any]] = {}
        left: list[Any] = [schema]
        while left:
            part = left.pop()
            if isinstance(part, Mapping) and id(part) not in parts:
                parts[id(part)] = part
                members = part.get("allOf")
                left += [*(members if isinstance(members, list) else []), self._referred(part.get("$ref"))]
        return list(parts.values())

    def _referred(self, pointer: object) -> Any:
        """What `$ref` points to within the tool's schema; None if nothing is there."""
        if not isinstance(pointer, str) or not pointer.startswith("#"):
            return None
        at: Any = self._root
        for step in pointer[1:].split("/")[1:]:
            at = at.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(at, Mapping) else None
        return at

    def _lists(self, schema: Schema, text: str) -> bool:
        """Whether a schema lists the string `text` as a value."""
        seen: set[int] = set()
        left: list[Any] = [schema]
        while left:
            for part in self._all_of(left.pop()):
                if id(part) in seen:
                    continue
                seen.add(id(part))
                enum = part.get("enum")
                if part.get("const") == text or (isinstance(enum, list) and text in enum):
                    return True
                for choice in ("anyOf", "oneOf"):
                    left += part[choice] if isinstance(part.get(choice), list) else []
        return False


def object_of(values: Mapping[str, str]) -> str:
    """The arguments object of values that are JSON text."""
    return f"{{{', '.join(f'{json.dumps(key, ensure_ascii=False)}: {value}' for key, value in values.items())}}}"


def _undeclared(text: str) -> str:
    try:
        json.loads(text)
    except json.JSONDecodeError:
        return json.dumps(text, ensure_ascii=False)
    return text


def _literal(text: str) -> tuple[Types, str] | None:
    """The types of the value that `text` writes, and its JSON; None if it writes no value but a string."""
    if text in _WORDS:
        word = _WORDS[text]
        return frozenset({"null" if word == "null" else "boolean"}), word
    if number := _NUMBER.fullmatch(text):
        value = float(text)
        is_integer = not (number[1] or number[2]) or (math.isfinite(value) and value.is_integer())
        return frozenset({"integer", "number"} if is_integer else {"number"}), text
    if text[:1] not in ("{", "["):
        return None
    for write in (str, _json_of_python):
        try:
            value = json.loads(written := write(text))
        except json.JSONDecodeError:
            continue
        return frozenset({"object" if isinstance(value, dict) else "array"}), written
    return None


def _json_of_python(text: str) -> str:
    return _PYTHONS.sub(_as_json, text)


def _as_json(token: re.Match[str]) -> str:
    return _WORDS.get(token[0]) or json.dumps(ast.literal_eval(token[0]), ensure_ascii=False)


def _types_of(value: object) -> Types:
    if value is None:
        return frozenset({"null"})
    if isinstance(value, bool):
        return frozenset({"boolean"})
    if isinstance(value, int):
        return frozenset({"integer", "number"})
    names = {float: "number", str: "string", list: "array", dict: "object"}
    return frozenset({names[type(value)]})


def _both(first: Types | None, second: Types | None) -> Types | None:
    if first is None or second is None:
        return second if first is None else first
    common = first & second
    return common | {"integer"} if "integer" in first ^ second and "number" in first | second else common


def _either(branches: Sequence[Types | None]) -> Types | None:
    known = [types for types in branches if types is not None]
    return frozenset().union(*known) if len(known) == len(branches) else None
