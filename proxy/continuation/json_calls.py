"""Incremental parser for tool calls with JSON arguments.

A block counts as a call once its name is complete and its arguments object has begun. Before that nothing is emitted;
what was emitted is never taken back. The arguments are the sampled text as far as it is valid JSON: to the end of the
object, to where the reply was cut off, or to the first character that is invalid there. Numbers, words and escapes are
emitted only when complete, so that no client sees `12` of a `120` that was cut off.

Valid is what a client can send back in a request: unlike for `json.loads`, `NaN`, numbers beyond a float's range,
half a surrogate pair, and more than `ARGUMENTS_DEPTH` levels are invalid.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any, Literal

from rolltap.protocols.conversation import MAX_DEPTH, MAX_NAME

ARGUMENTS_DEPTH = MAX_DEPTH - 8
"""Maximum nesting of sampled arguments. It leaves room for the levels around them: some messages are checked whole."""

_SPACE = re.compile(r"[ \t\n\r]*")
_HIGH, _LOW = r"\\u[dD][89abAB][0-9a-fA-F]{2}", r"\\u[dD][c-fC-F][0-9a-fA-F]{2}"
_STRING = re.compile(
    r'(?:[^"\\\x00-\x1f\ud800-\udfff]+|\\["\\/bfnrt]'
    rf"|\\u(?:[0-9a-ceA-CEfF][0-9a-fA-F]|[dD][0-7])[0-9a-fA-F]{{2}}|{_HIGH}{_LOW})*"
)
_PART_OF_ESCAPE = re.compile(rf"(?:{_HIGH})?\\(?:u[0-9a-fA-F]{{0,3}})?\Z|{_HIGH}\Z")
_WORD = re.compile(r"[-+.0-9A-Za-z]*")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")

NAME = rf"(?=.{{1,{MAX_NAME}}}(?![\w.:/@+-]))\w(?:[\w.:/@+-]*\w)?"
"""What the name of a tool that is not declared may be."""

HERMES = re.compile(
    r'\s*\{[ \t\n\r]*"name"[ \t\n\r]*:[ \t\n\r]*'
    rf'"(?P<name>{NAME})"'
    r'[ \t\n\r]*,[ \t\n\r]*"arguments"[ \t\n\r]*:[ \t\n\r]*(?=\{)'
)
"""The text before the arguments in a Hermes block, `{"name": NAME, "arguments": {...}}`."""

MISTRAL = re.compile(rf"\s*(?P<name>[\w.-]{{1,{MAX_NAME}}})(?:\[CALL_ID\]\w+)?\[ARGS\]\s*(?=\{{)")
"""The text before the arguments in Mistral's `NAME[ARGS]{...}`."""

Expected = Literal["value", "first value", "key", "first key", "colon", "comma"]


class GrowingObject:
    """A JSON object whose text arrives in pieces.

    `text` is its settled part, always a valid prefix of a JSON object.
    """

    def __init__(self) -> None:
        self._parts: list[str] = []
        self._unsettled = ""
        self._closers: list[str] = []
        self._expected: Expected = "value"
        self._string: Expected | None = None  # inside a string: the token expected after it
        self.over = False  # the object has ended, or the text after `text` is not valid JSON
        self.complete = False

    @property
    def text(self) -> str:
        return "".join(self._parts)

    def feed(self, more: str) -> str:
        """Takes more text; returns what it adds to `text`."""
        text, at = self._unsettled + more, 0
        while not self.over and at < len(text):
            end = self._string_end(text, at) if self._string else self._token_end(text, at)
            if end == at:
                break
            at = end
        self._unsettled = "" if self.over else text[at:]
        self._parts.append(text[:at])
        return text[:at]

    def _string_end(self, text: str, at: int) -> int:
        """The end of the settled part of a string."""
        match = _STRING.match(text, at)
        assert match is not None
        end = match.end()
        if end == len(text) or _PART_OF_ESCAPE.match(text, end):
            return end
        if text[end] == '"':
            assert self._string is not None
            self._expected, self._string = self._string, None
            return end + 1
        self.over = True
        return end

    def _token_end(self, text: str, at: int) -> int:
        """The end of the token at `at`. Returns `at` if the token is not complete yet, or is invalid (`over`)."""
        space = _SPACE.match(text, at)
        assert space is not None
        if space.end() > at:
            return space.end()
        character, expected = text[at], self._expected
        if self._closers and character == self._closers[-1]:
            return self._close(at)
        if expected in ("colon", "comma"):
            self.over = character != (":" if expected == "colon" else ",")
            after_comma: Expected = "key" if self._closers[-1:] == ["}"] else "value"
            self._expected = "value" if expected == "colon" else after_comma
            return at + (not self.over)
        if character == '"' and self._closers:
            self._string = "colon" if expected in ("key", "first key") else "comma"
            return at + 1
        if expected in ("key", "first key"):
            self.over = True
            return at
        return self._value_end(text, at)

    def _value_end(self, text: str, at: int) -> int:
        """The end of the bracket, number or word that begins a value. The outermost value must be an object."""
        if len(self._closers) == ARGUMENTS_DEPTH and text[at] in "{[":
            self.over = True
            return at
        if text[at] == "{":
            self._closers.append("}")
            self._expected = "first key"
            return at + 1
        if text[at] == "[" and self._closers:
            self._closers.append("]")
            self._expected = "first value"
            return at + 1
        word = _WORD.match(text, at)
        assert word is not None
        if word.end() == len(text) and word.end() > at:
            return at
        is_number = _NUMBER.fullmatch(word[0]) is not None
        is_scalar = math.isfinite(float(word[0])) if is_number else word[0] in ("true", "false", "null")
        self.over = not self._closers or not is_scalar
        self._expected = "comma"
        return at if self.over else word.end()

    def _close(self, at: int) -> int:
        """Takes a closing bracket: after a value, or directly after its opening bracket."""
        if self._expected not in ("comma", "first key", "first value"):
            self.over = True
            return at
        self._closers.pop()
        self._expected = "comma"
        self.over = self.complete = not self._closers
        return at + 1


class GrowingCall:
    """A tool call block whose text arrives in pieces. `head` matches a call's beginning; `name` is set once it does."""

    def __init__(self, head: re.Pattern[str]) -> None:
        self._head = head
        self._before = ""
        self._arguments = GrowingObject()
        self.name: str | None = None

    @property
    def arguments(self) -> str:
        return self._arguments.text

    @property
    def complete(self) -> bool:
        """Whether `arguments` is a complete object."""
        return self._arguments.complete

    def feed(self, more: str) -> str:
        """Takes more text; returns what it adds to `arguments`."""
        if self.name is None:
            self._before += more
            match = self._head.match(self._before)
            if match is None:
                return ""
            self.name = json.loads(f'"{match["name"]}"')
            more = self._before[match.end() :]
        return self._arguments.feed(more)


def is_arguments(text: str) -> bool:
    """Whether `text` is a complete arguments object."""
    value = GrowingObject()
    return value.feed(text) == text.rstrip(" \t\n\r") and value.complete


def members_of(text: str) -> dict[str, str] | None:
    """The members of a JSON object as JSON text; None if `text` is no object, or has a key twice."""
    start = _space_end(text, 0)
    if text[start : start + 1] != "{":
        return None
    members: dict[str, str] = {}
    at = _space_end(text, start + 1)
    while text[at : at + 1] == '"':
        key, at = _DECODER.raw_decode(text, at)
        colon = _space_end(text, at)
        if text[colon : colon + 1] != ":" or key in members:
            return None
        value_at = _space_end(text, colon + 1)
        _, end = _DECODER.raw_decode(text, value_at)
        members[key] = text[value_at:end]
        at = _space_end(text, end)
        if text[at : at + 1] == "}":
            break
        if text[at : at + 1] != ",":
            return None
        at = _space_end(text, at + 1)
        if text[at : at + 1] != '"':
            return None
    is_whole = text[at : at + 1] == "}" and not text[at + 1 :].strip(" \t\n\r")
    return members if is_whole else None


def elements_of(text: str) -> list[str] | None:
    """The elements of a JSON list as JSON text; None if `text` is no list."""
    at = _space_end(text, 0)
    if text[at : at + 1] != "[":
        return None
    elements: list[str] = []
    at = _space_end(text, at + 1)
    while text[at : at + 1] != "]":
        _, end = _DECODER.raw_decode(text, at)
        elements.append(text[at:end])
        at = _space_end(text, end)
        if text[at : at + 1] == ",":
            at = _space_end(text, at + 1)
            if text[at : at + 1] == "]":
                return None
        elif text[at : at + 1] != "]":
            return None
    return None if text[at + 1 :].strip(" \t\n\r") else elements


def repeats_key(text: str) -> bool:
    """Whether an object in the JSON `text` has a key twice: readers disagree on which one counts."""

    def check(pairs: list[tuple[str, Any]]) -> None:
        if len(dict(pairs)) < len(pairs):
            raise _RepeatedKey

    try:
        json.loads(text, object_pairs_hook=check)
    except _RepeatedKey:
        return True
    return False


class _RepeatedKey(Exception):
    """A key occurs twice."""


_DECODER = json.JSONDecoder()


def _space_end(text: str, at: int) -> int:
    space = _SPACE.match(text, at)
    assert space is not None
    return space.end()


def read_call(head: re.Pattern[str], block: str) -> GrowingCall:
    """Parses a complete block. `name` is None if it is not a call."""
    call = GrowingCall(head)
    call.feed(block)
    return call
