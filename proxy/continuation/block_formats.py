"""Reads the blocks of tool calls that stand between two tokens: one function for each format.

The values of a call are bare text between tags (Qwen, MiniMax, GLM, Hunyuan), JSON (Hermes, Llama, Mistral, Inkling,
DeepSeek, Kimi), or a notation of their own (Gemma 4's, and LFM2's Python).

Where tags are ordinary text, a value may contain them. It is taken for text only if no other reading is possible:
otherwise a tag that the model forgot, or wrote twice, would move text from one value to another.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from rolltap.protocols.conversation import Tool
from rolltap.proxy.continuation.json_calls import (
    ARGUMENTS_DEPTH,
    NAME,
    elements_of,
    is_arguments,
    members_of,
    repeats_key,
)
from rolltap.proxy.continuation.parsed import ParsedCall
from rolltap.proxy.continuation.typed_values import Parameters, object_of
from rolltap.tokenizer import HubTokenizer


class SampledCall(NamedTuple):
    """A call as its block says: `arguments` is JSON text. `id` is empty in formats without ids."""

    name: str
    arguments: str
    id: str = ""


class BlockPart(NamedTuple):
    """A tag of the format, or the text between two."""

    text: str
    is_tag: bool


@dataclass(frozen=True, slots=True)
class CallBlock:
    """A closed block: the ids between its tokens. `is_tagged` is False for a call in plain text.

    `written` is its text, if that is not the ids' alone.
    """

    tokenizer: HubTokenizer
    ids: Sequence[int]
    tools: Sequence[Tool] = ()
    is_tagged: bool = True
    written: str | None = None

    @property
    def text(self) -> str:
        return self.tokenizer.decode(self.ids) if self.written is None else self.written

    def parts(self, tags: Sequence[str]) -> list[BlockPart]:
        """The block cut at its tags, without the empty texts.

        If all tags are tokens of the vocabulary, only these tokens are tags. Else their text is.
        """
        numbers = [self.tokenizer.convert_tokens_to_ids(tag) for tag in tags]
        if None in numbers:
            texts = re.split(f"({'|'.join(map(re.escape, tags))})", self.text)
            return [BlockPart(text, at % 2 == 1) for at, text in enumerate(texts) if text]
        parts: list[BlockPart] = []
        run_at = 0
        for at, id in enumerate([*self.ids, None]):
            if id is not None and id not in numbers:
                continue
            if at > run_at:
                parts.append(BlockPart(self.tokenizer.decode(self.ids[run_at:at]), False))
            if id is not None:
                parts.append(BlockPart(tags[numbers.index(id)], True))
            run_at = at + 1
        return parts

    def declares(self, name: str) -> bool:
        return any(tool.name == name for tool in self.tools)


_HALF = re.compile(r"[\ud800-\udfff]")
"""Half a surrogate pair."""

Read = Callable[[CallBlock], list[SampledCall] | None]
"""Reads a block to its end; None if something is left over, or is not as the format writes it."""


def checked_calls(read: Read, block: CallBlock) -> tuple[ParsedCall, ...] | None:
    """The calls that `read` finds in a block; None if it can't be read. A call that no client can take is not `ok`."""
    try:
        calls, raw = read(block), block.text  # one text for all calls of a block
        return None if calls is None else tuple(_checked(call, block, raw) for call in calls)
    except (ValueError, RecursionError):  # JSON that Python can't read
        return None


def _checked(call: SampledCall, block: CallBlock, raw: str) -> ParsedCall:
    """A client can take a call of a name, which may have odd characters if it is declared, and an arguments object
    without repeated keys. An id must be text, as the next prompt has it."""
    is_name = re.fullmatch(NAME, call.name) is not None
    is_whole = is_arguments(call.arguments) and not repeats_key(call.arguments)
    ok = is_whole and (is_name or block.declares(call.name)) and _HALF.search(call.id) is None
    return ParsedCall(call.name, call.arguments, ok, raw, id=call.id)


@dataclass(frozen=True, slots=True)
class TextTags:
    """A format with elements `call` and `value`, whose names begin after `naming` in the opening tag.

    With `line_breaks`, the format puts one line break at each end of a value.
    """

    call: str
    value: str
    naming: str
    line_breaks: bool

    def opening(self, element: str) -> re.Pattern[str]:
        quote = '"' if self.naming.endswith('"') else ""
        return re.compile(rf'<{element}{self.naming}([^\n<>"]+){quote}>')

    @property
    def any_tag(self) -> re.Pattern[str]:
        """A tag of one of the elements: is it a closing one, the element, and its name if it is of the format."""
        return re.compile(rf'<(/?)({self.value}|{self.call})\b(?:{self.naming}([^\n<>"]*))?')

    def closing(self, *, exact: bool) -> re.Pattern[str]:
        """What ends a value: the closing tag before the format's next one, with `exact`ly the format's line breaks."""
        before, between = (r"\n", r"\n") if exact else ("", r"\s*")
        return re.compile(rf"{before}</{self.value}>(?={between}(?:<{self.value}{self.naming}|</{self.call}>))")


QWEN = TextTags("function", "parameter", "=", line_breaks=True)
MINIMAX = TextTags("invoke", "parameter", ' name="', line_breaks=False)


def read_qwen_xml(block: CallBlock) -> list[SampledCall] | None:
    """Qwen3.5, Nemotron 3: `<function=NAME>`, and values between `<parameter=KEY>`, line breaks and `</parameter>`."""
    calls = _read_elements(block, QWEN)
    return calls if calls is not None and len(calls) == 1 else None


def read_minimax(block: CallBlock) -> list[SampledCall] | None:
    """MiniMax M2: any number of `<invoke name="NAME">`, with values in `<parameter name="KEY">`."""
    return _read_elements(block, MINIMAX)


def _read_elements(block: CallBlock, tags: TextTags) -> list[SampledCall] | None:
    text, calls = block.text, list[SampledCall]()
    at = _space_end(text, 0)
    while found := match_element(text, at, tags, block.tools):
        calls.append(found[0])
        at = _space_end(text, found[1])
    return calls if calls and at == len(text) else None


def match_element(text: str, at: int, tags: TextTags, tools: Sequence[Tool]) -> tuple[SampledCall, int] | None:
    """The call whose element begins at `at`, and where it ends; None if it is not as the format writes it."""
    naming, closing = tags.opening(tags.value), f"</{tags.call}>"
    call = tags.opening(tags.call).match(text, at)
    if call is None:
        return None
    parameters = Parameters(call[1], tools)
    values: dict[str, str] = {}
    misses = 0
    at = _space_end(text, call.end())
    while named := naming.match(text, at):
        place = None
        if tags.line_breaks and misses < _MISSES and text.startswith("\n", named.end()):
            place = _place(text, named.end(), tags, parameters, exact=True)
            misses += place is None
        if place is None:
            place = _place(text, named.end(), tags, parameters, exact=False)
        value = parameters.read(named[1], text[place.value]) if place is not None else None
        if place is None or value is None or named[1] in values or named[1] != named[1].strip():
            return None
        values[named[1]] = value
        at = _space_end(text, place.end)
    return (SampledCall(call[1], object_of(values)), at + len(closing)) if text.startswith(closing, at) else None


_REST_OF_TAG = re.compile(r"[^<>]*>[^\n]")
"""The rest of a tag behind which its line goes on."""

_MISSES = 64
"""Values of a call without the format's line breaks, behind which none is expected any more: to look for one can take a
pass over the whole block."""


@dataclass(frozen=True, slots=True)
class _Place:
    value: slice
    end: int  # after the closing tag


def _place(text: str, start: int, tags: TextTags, parameters: Parameters, *, exact: bool) -> _Place | None:
    """Where the value that begins at `start` stands; None if that is not certain.

    Reads tags in the value as text if the model can't have meant them: of a name that is no parameter and closed
    again; of other elements (`<parameter name="a">` in XML) with as many openings as closings; within a line."""
    closing = tags.closing(exact=exact)
    inner = 0  # opened values of the format that are text
    openings, closings, is_within_lines = 0, 0, exact
    for tag in tags.any_tag.finditer(text, start):
        is_closing, element, name = tag.groups()
        if is_closing and element == tags.value and inner:
            inner -= 1
        elif is_closing:
            end = closing.match(text, tag.start() - exact)
            if element == tags.value and end is not None and tag.start() - exact >= start:
                is_certain = closings == 0 or closings == openings or (is_within_lines and openings == 0)
                return (
                    _Place(_without_breaks(text, start, end.start(), tags, exact=exact), end.end())
                    if is_certain
                    else None
                )
            closings += 1
            is_inside_line = text[tag.start() - 1] != "\n" and _REST_OF_TAG.match(text, tag.end()) is not None
            is_within_lines = is_within_lines and is_inside_line
        elif name is not None:
            if element == tags.call or parameters.may_be(name):
                return None
            inner += 1
        else:
            openings += 1
    return None


def _without_breaks(text: str, start: int, end: int, tags: TextTags, *, exact: bool) -> slice:
    """The value's place without the line breaks of the format."""
    if exact:
        return slice(min(start + 1, end + 1), max(start + 1, end))
    if tags.line_breaks and text.startswith("\n", start, end):
        start += 1
    if tags.line_breaks and text.endswith("\n", start, end):
        end -= 1
    return slice(start, end)


GLM_TAGS = ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
HY3_TAGS = tuple(tag.replace(">", ":opensource>") for tag in ("<tool_call>", "</tool_call>", "<tool_sep>", *GLM_TAGS))


def read_glm(block: CallBlock) -> list[SampledCall] | None:
    """GLM, Laguna: the name, then a key and a value between tags, which are tokens in GLM's vocabulary."""
    call = _read_pairs(block, [*block.parts(GLM_TAGS)], GLM_TAGS)
    return None if call is None else [call]


def read_hy3(block: CallBlock) -> list[SampledCall] | None:
    """Hy3: calls between tags of their own, each with a tag after the name and then keys and values as in GLM."""
    opening, closing, separator, *pair_tags = HY3_TAGS
    parts, calls = [*block.parts(HY3_TAGS)], list[SampledCall]()
    while parts:
        if not parts[0].is_tag and not parts[0].text.strip():
            parts.pop(0)
            continue
        ends = [at for at, part in enumerate(parts) if part.is_tag and part.text == closing]
        if parts[0].text != opening or not parts[0].is_tag or not ends:
            return None
        inner, parts = parts[1 : ends[0]], parts[ends[0] + 1 :]
        if [part.text for part in inner[1:2] if part.is_tag] != [separator]:
            return None
        call = _read_pairs(block, [inner[0], *inner[2:]], tuple(pair_tags))
        if call is None:
            return None
        calls.append(call)
    return calls


def _read_pairs(block: CallBlock, parts: list[BlockPart], tags: tuple[str, ...]) -> SampledCall | None:
    """A name, and keys and values between `tags`, with white space around them."""
    if not parts or parts[0].is_tag:
        return None
    name, left = parts[0].text.strip(), parts[1:]
    parameters = Parameters(name, block.tools)
    values: dict[str, str] = {}
    while left:
        texts: list[str] = []
        for at, tag in enumerate(tags):
            between = left.pop(0).text if left and not left[0].is_tag else ""
            if not left or left[0].text != tag or (at % 2 == 0 and between.strip()):
                return None
            left.pop(0)
            texts.append(between)
        _, key, _, text = texts
        value = parameters.read(key, text)
        if value is None or not key or key != key.strip() or key in values:
            return None
        values[key] = value
        if len(left) == 1 and not left[0].is_tag and not left[0].text.strip():
            left.pop()
    return SampledCall(name, object_of(values))


def _space_end(text: str, at: int) -> int:
    while at < len(text) and text[at].isspace():
        at += 1
    return at


def read_hermes(block: CallBlock) -> list[SampledCall] | None:
    """`{"name": NAME, "arguments": {...}}`. The arguments may also be JSON text in a string."""
    call = _call(block.text, "name", "arguments")
    return None if call is None else [call]


def read_llama(block: CallBlock) -> list[SampledCall] | None:
    """Llama 3: `{"name": NAME, "parameters": {...}}`, the whole reply. Another object is text, if it calls no tool."""
    call = _call(block.text, "name", "parameters")
    if call is not None:
        return [call]
    named = re.match(r'\s*\{\s*"name"\s*:\s*"([^"\\]*)"', block.text)
    return None if block.is_tagged or (named is not None and block.declares(named[1])) else []


def read_mistral(block: CallBlock) -> list[SampledCall] | None:
    """A JSON list of calls, or (since version 11) `NAME[ARGS]{...}`, with `[CALL_ID]ID` after the name in some."""
    named = re.fullmatch(r"\s*([\w.-]+)(?:\[CALL_ID\](\w+))?\[ARGS\](.*)", block.text, re.DOTALL)
    if named is not None:
        return [SampledCall(named[1], named[3].strip(), named[2] or "")]
    elements = elements_of(block.text)
    calls = [_call(element, "name", "arguments", "id") for element in elements or ["null"]]
    return None if None in calls else [call for call in calls if call is not None]


def read_inkling(block: CallBlock) -> list[SampledCall] | None:
    """`NAME<|content_invoke_tool_json|>{"name": NAME, "args": {...}}`."""
    match block.parts(["<|content_invoke_tool_json|>"]):
        case [(name, False), (_, True), (body, False)]:
            call = _call(body, "name", "args")
            return [call] if call is not None and call.name == name else None
    return None


DEEPSEEK_TAGS = ("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>")


def read_deepseek(block: CallBlock) -> list[SampledCall] | None:
    """DeepSeek-V3: calls of `function<｜tool▁sep｜>NAME` and a fenced JSON block; V3.1: `NAME<｜tool▁sep｜>{...}`."""
    calls: list[SampledCall] = []
    for call in _tagged_calls(block, *DEEPSEEK_TAGS) or ():
        fenced = re.fullmatch(r"([^\n]+)\n```json\n(.*)\n```\s*", call.arguments, re.DOTALL)
        if fenced is not None and call.name == "function":
            calls.append(SampledCall(fenced[1], fenced[2].strip()))
        elif call.arguments.lstrip().startswith("{"):
            calls.append(SampledCall(call.name, call.arguments.strip()))
        else:
            return None
    return calls if calls or not block.text.strip() else None


KIMI_TAGS = ("<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>")


def read_kimi(block: CallBlock) -> list[SampledCall] | None:
    """Kimi K2: calls of `functions.NAME:NUMBER` and JSON. The prefix may be missing if the tool is declared."""
    calls: list[SampledCall] = []
    for call in _tagged_calls(block, *KIMI_TAGS) or ():
        named = re.fullmatch(r"(functions\.)?(.+):[0-9]+", call.name.strip(), re.DOTALL)
        if named is None or not (named[1] or block.declares(named[2])):
            return None
        calls.append(SampledCall(named[2], call.arguments.strip(), named[0]))
    return calls if calls or not block.text.strip() else None


def _tagged_calls(block: CallBlock, opening: str, middle: str, closing: str) -> list[SampledCall] | None:
    """Calls of a name and arguments between tags, with white space between the calls; None if more is there."""
    calls: list[SampledCall] = []
    parts = [part for part in block.parts((opening, middle, closing)) if part.is_tag or part.text.strip()]
    for at in range(0, len(parts), 5):
        match parts[at : at + 5]:
            case [(first, True), (name, False), (second, True), (arguments, False), (third, True)]:
                if (first, second, third) != (opening, middle, closing):
                    return None
                calls.append(SampledCall(name, arguments))
            case _:
                return None
    return calls


def _call(text: str, name: str, arguments: str, id: str = "") -> SampledCall | None:
    """A call that is a JSON object with exactly these keys; that of the id may be missing."""
    members = members_of(text)
    if members is None or {name, arguments} != members.keys() - {id}:
        return None
    values = {key: json.loads(members[key]) for key in (name, id) if key in members}
    if not all(isinstance(value, str) for value in values.values()):
        return None
    body = members[arguments]
    return SampledCall(values[name], json.loads(body) if body.startswith('"') else body, values.get(id, ""))


QUOTE, ESCAPE = '<|"|>', "<escape>"
"""The tokens around the strings of Gemma 4 and FunctionGemma."""

_MARK = "\ufdd1"
"""Stands for such a token while a block is read: a Unicode non-character, which should not occur in text."""

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


def read_gemma(block: CallBlock) -> list[SampledCall] | None:
    """Gemma 4: `call:NAME{KEY:VALUE,...}`; strings stand between tokens (`<|"|>`), keys may."""
    return _read_gemma(block, QUOTE)


def read_function_gemma(block: CallBlock) -> list[SampledCall] | None:
    """FunctionGemma: as Gemma 4, with other tokens around strings."""
    return _read_gemma(block, ESCAPE)


def _read_gemma(block: CallBlock, quote: str) -> list[SampledCall] | None:
    parts = block.parts((quote,))
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


_PYTHON_LONG_STRING = re.compile(_PYTHON_STRING.pattern.replace(r"\n]|", "]|"))
"""A string that may hold line breaks, as templates write them that escape nothing."""


def read_pythonic(block: CallBlock) -> list[SampledCall] | None:
    """Llama 4, Gemma 3: a Python list of calls, the whole reply. Another list is text, if it calls no tool."""
    calls = _read_python(block, _PYTHON_LONG_STRING)
    if calls is not None:
        return calls
    named = re.match(r"\s*\[\s*([\w.-]+)\(", block.text)
    return None if block.is_tagged or (named is not None and block.declares(named[1])) else []


def read_lfm2(block: CallBlock) -> list[SampledCall] | None:
    """LFM2: a Python list of calls with keywords, `[NAME(KEY='text', KEY=1)]`; objects in it are JSON or Python."""
    return _read_python(block, _PYTHON_STRING)


def read_lfm2_unescaped(block: CallBlock) -> list[SampledCall] | None:
    """LFM2.5: like LFM2, but its template escapes nothing, so a backslash may be one or the beginning of an escape."""
    return None if "\\" in block.text else _read_python(block, re.compile("'[^']*'|\"[^\"]*\""))


def _read_python(block: CallBlock, string: re.Pattern[str]) -> list[SampledCall] | None:
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
