"""Tool calls in a notation of their own: Gemma 4's, and LFM2's Python."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from rolltap.proxy.continuation.json_calls import ARGUMENTS_DEPTH
from rolltap.proxy.continuation.sampled_blocks import Block, SampledCall

QUOTE = '<|"|>'
"""The token around Gemma 4's strings."""

_MARK = "\ufdd1"
"""Stands for `QUOTE` while a block is read: a Unicode non-character, which should not occur in text."""

_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?(?![\w.])")
_WORD = re.compile(r"[A-Za-z]+(?!\w)")
_BARE_KEY = re.compile(r"[^\s{}\[\]:,\"'<>\ufdd1](?:[^\n{}\[\]:,\"'<>\ufdd1]*[^\s{}\[\]:,\"'<>\ufdd1])?")
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t", "b": "\b", "f": "\f", "\\": "\\", "'": "'", '"': '"', "/": "/"}
_ESCAPE = re.compile(r"\\(u[0-9a-fA-F]{4}|[nrtbf\\'\"/])")


@dataclass(slots=True)
class _Scanner:
    """Reads values of a notation from `at`; each `take` method returns JSON text, or None if its value is not there."""

    text: str
    string: re.Pattern[str]
    words: Mapping[str, str]
    bare_keys: bool
    at: int = 0
    depth: int = 0

    def take_value(self) -> str | None:
        if self.takes("{"):
            return self.take_items("{}", self._take_member)
        if self.takes("["):
            return self.take_items("[]", self.take_value)
        if (text := self.take_string()) is not None:
            return text
        number = self.take(_NUMBER)
        return number if number is not None else self.words.get(self.take(_WORD) or "")

    def take_items(self, brackets: str, take: Callable[[], str | None]) -> str | None:
        """Items up to the closing bracket."""
        items: list[str] = []
        self.depth += 1
        if self.depth > ARGUMENTS_DEPTH:
            return None
        while not self.takes(brackets[1]):
            if items and not self.takes(","):
                return None
            if (item := take()) is None:
                return None
            items.append(item)
        self.depth -= 1
        return f"{brackets[0]}{', '.join(items)}{brackets[1]}"

    def take_string(self) -> str | None:
        literal = self.take(self.string)
        if literal is None:
            return None
        return json.dumps(literal[1:-1] if literal[0] == _MARK else _unescaped(literal[1:-1]), ensure_ascii=False)

    def _take_member(self) -> str | None:
        key = self.take_string()
        if key is None and self.bare_keys and (bare := self.take(_BARE_KEY)) is not None:
            key = json.dumps(bare, ensure_ascii=False)
        value = self.take_value() if key is not None and self.takes(":") else None
        return None if value is None else f"{key}: {value}"

    def take(self, pattern: re.Pattern[str]) -> str | None:
        match = pattern.match(self.text, self._token_at())
        self.at = match.end() if match is not None else self.at
        return match[0] if match is not None else None

    def takes(self, character: str) -> bool:
        at = self._token_at()
        is_next = self.text.startswith(character, at)
        self.at = at + 1 if is_next else self.at
        return is_next

    @property
    def is_over(self) -> bool:
        return self._token_at() == len(self.text)

    def _token_at(self) -> int:
        at = self.at
        while at < len(self.text) and self.text[at].isspace():
            at += 1
        return at


def read_gemma(block: Block) -> list[SampledCall] | None:
    """Gemma 4: `call:NAME{KEY:VALUE,...}`; strings stand between tokens (`<|"|>`), keys may."""
    parts = block.parts((QUOTE,))
    if any(_MARK in part.text for part in parts):
        return None
    text = "".join(_MARK if part.is_tag else part.text for part in parts)
    words = {word: word for word in ("true", "false", "null")}
    scanner = _Scanner(text, re.compile(f"{_MARK}[^{_MARK}]*{_MARK}"), words, bare_keys=True)
    name = scanner.take(re.compile(r"call:[^\s{}]+(?=\{)"))
    arguments = scanner.take_value() if name is not None else None
    if name is None or arguments is None or not scanner.is_over:
        return None
    return [SampledCall(name.removeprefix("call:"), arguments)]


_PYTHON_STRING = re.compile(
    r"'(?:[^'\\\n]|\\(?:u[0-9a-fA-F]{4}|[nrtbf\\'\"/]))*'|\"(?:[^\"\\\n]|\\(?:u[0-9a-fA-F]{4}|[nrtbf\\'\"/]))*\""
)
_PYTHON_WORDS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}


def read_lfm2(block: Block) -> list[SampledCall] | None:
    """LFM2: a Python list of calls with keywords, `[NAME(KEY='text', KEY=1)]`; objects in it are JSON or Python."""
    return _read_python(block, _PYTHON_STRING)


def read_lfm2_unescaped(block: Block) -> list[SampledCall] | None:
    """LFM2.5: like LFM2, but its template escapes nothing, so a backslash may be one or the beginning of an escape."""
    return None if "\\" in block.text else _read_python(block, re.compile("'[^']*'|\"[^\"]*\""))


def _read_python(block: Block, string: re.Pattern[str]) -> list[SampledCall] | None:
    scanner = _Scanner(block.text, string, _PYTHON_WORDS, bare_keys=False)
    calls: list[SampledCall] = []

    def take_call() -> str | None:
        name = scanner.take(re.compile(r"[\w.-]+(?=\()"))
        scanner.takes("(")
        arguments = scanner.take_items("()", take_keyword) if name is not None else None
        if name is None or arguments is None:
            return None
        calls.append(SampledCall(name, f"{{{arguments[1:-1]}}}"))
        return name

    def take_keyword() -> str | None:
        key = scanner.take(re.compile(r"\w+(?=\s*=)"))
        value = scanner.take_value() if key is not None and scanner.takes("=") else None
        return None if value is None else f"{json.dumps(key, ensure_ascii=False)}: {value}"

    is_list = scanner.takes("[") and scanner.take_items("[]", take_call) is not None
    return calls if is_list and calls and scanner.is_over else None


def _unescaped(text: str) -> str:
    """The text of a string literal."""

    def character(escape: re.Match[str]) -> str:
        return chr(int(escape[1][1:], 16)) if escape[1][0] == "u" else _ESCAPES[escape[1]]

    return _ESCAPE.sub(character, text).encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")
