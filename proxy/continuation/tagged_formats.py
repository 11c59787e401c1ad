"""Tool calls whose values are bare text between tags: each function reads the blocks of one format.

Where the tags are ordinary text, a value may contain them. It is taken for text only if no other reading is possible:
otherwise a tag that the model forgot, or wrote twice, would move text from one value to another.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from rolltap.proxy.continuation.sampled_blocks import Block, Part, SampledCall
from rolltap.proxy.continuation.typed_values import Parameters, object_of


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


def read_qwen_xml(block: Block) -> list[SampledCall] | None:
    """Qwen3.5, Nemotron 3: `<function=NAME>`, and values between `<parameter=KEY>`, line breaks and `</parameter>`."""
    calls = _read_elements(block, QWEN)
    return calls if calls is not None and len(calls) == 1 else None


def read_minimax(block: Block) -> list[SampledCall] | None:
    """MiniMax M2: any number of `<invoke name="NAME">`, with values in `<parameter name="KEY">`."""
    return _read_elements(block, MINIMAX)


def _read_elements(block: Block, tags: TextTags) -> list[SampledCall] | None:
    text, calls = block.text, list[SampledCall]()
    opening, naming, closing = tags.opening(tags.call), tags.opening(tags.value), f"</{tags.call}>"
    at = _space_end(text, 0)
    while call := opening.match(text, at):
        parameters = Parameters(call[1], block.tools)
        values: dict[str, str] = {}
        at = _space_end(text, call.end())
        while named := naming.match(text, at):
            place = _value_place(text, named.end(), tags, parameters)
            value = parameters.read(named[1], text[place.value]) if place is not None else None
            if place is None or value is None or named[1] in values or named[1] != named[1].strip():
                return None
            values[named[1]] = value
            at = _space_end(text, place.end)
        if not text.startswith(closing, at):
            return None
        calls.append(SampledCall(call[1], object_of(values)))
        at = _space_end(text, at + len(closing))
    return calls if calls and at == len(text) else None


@dataclass(frozen=True, slots=True)
class _Place:
    value: slice
    end: int  # after the closing tag


def _value_place(text: str, start: int, tags: TextTags, parameters: Parameters) -> _Place | None:
    """Where the value that begins at `start` stands; None if that is not certain."""
    if tags.line_breaks and text.startswith("\n", start):
        place = _place(text, start, tags, parameters, exact=True)
        if place is not None:
            return place
    return _place(text, start, tags, parameters, exact=False)


def _place(text: str, start: int, tags: TextTags, parameters: Parameters, *, exact: bool) -> _Place | None:
    """Reads tags in the value as text if the model can't have meant them: of a name that is no parameter and closed
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
            after = text[text.find(">", tag.end()) + 1 :][:1] if ">" in text[tag.end() :] else ""
            is_within_lines = is_within_lines and text[tag.start() - 1] != "\n" and after not in ("", "\n")
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


def read_glm(block: Block) -> list[SampledCall] | None:
    """GLM, Laguna: the name, then a key and a value between tags, which are tokens in GLM's vocabulary."""
    call = _read_pairs(block, [*block.parts(GLM_TAGS)], GLM_TAGS)
    return None if call is None else [call]


def read_hy3(block: Block) -> list[SampledCall] | None:
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


def _read_pairs(block: Block, parts: list[Part], tags: tuple[str, ...]) -> SampledCall | None:
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
