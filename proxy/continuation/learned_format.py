"""Learns how a chat template writes tool calls, where no known format reads them.

Known calls are rendered. What lies around and between them is the block's text; how a call's name and arguments stand
in it says which notation it has. A format is taken only if it reads the rendered calls back.

    OPEN  LEAD call TAIL  SEPARATOR  LEAD call TAIL  CLOSE        white space between the parts does not count

If the block begins with an added token of the vocabulary, replies are read as they come, and only that token opens a
block, which goes to the token that ends it or, without one, to the next one or the reply's end. Else its text opens it,
and a reply is read when it is complete.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

from rolltap.protocols.conversation import Tool, ToolCall
from rolltap.proxy.continuation.block_formats import CallBlock, SampledCall, TextTags, checked_calls, match_element
from rolltap.proxy.continuation.json_calls import NAME, members_of
from rolltap.proxy.continuation.parsed import ParsedCall, ReplyPiece
from rolltap.proxy.continuation.tool_formats import IdIndex, ToolFormat
from rolltap.proxy.continuation.typed_values import Parameters, object_of
from rolltap.tokenizer import HubTokenizer

_DECODER = json.JSONDecoder()
SHORTEST = 3
"""Characters that must begin a block, so that no ordinary text does."""

BROKEN = 64
"""Blocks that can't be read, of which the last one takes the rest of the reply: to read one can take a pass over it."""

_PART_OF_TAG = re.compile(r"^[|｜]?>\s*")
"""The end of a tag that begins before the text."""

_VALUES = re.compile(r"[{\[]")


class Found(NamedTuple):
    """A call in a text, and where it ends."""

    call: SampledCall
    end: int


class Notation(Protocol):
    """How one call stands in a block. `begins` and `ends` are its own first and last text, if that is fixed."""

    @property
    def begins(self) -> str: ...
    @property
    def ends(self) -> str: ...
    def match(self, text: str, at: int, tools: Sequence[Tool]) -> Found | None:
        """The call at `at`; None if there is none."""
        ...

    def may_begin(self, text: str, at: int) -> bool:
        """Whether a call, perhaps a broken one, begins at `at`."""
        ...


@dataclass(frozen=True, slots=True)
class JsonObject:
    """`{NAME_KEY: name, ARGUMENTS_KEY: {...}}` with any members besides; without keys `{name: {...}}`."""

    name: str = ""
    arguments: str = ""
    id: str = ""
    begins: str = ""
    ends: str = ""

    def match(self, text: str, at: int, tools: Sequence[Tool]) -> Found | None:
        if text[at : at + 1] != "{":
            return None
        _, end = _DECODER.raw_decode(text, at)
        members = members_of(text[at:end]) or {}
        if not self.name:
            return Found(SampledCall(*next(iter(members.items()))), end) if len(members) == 1 else None
        if self.name not in members or self.arguments not in members:
            return None
        name, id = (json.loads(members.get(key, '""')) for key in (self.name, self.id))
        body = members[self.arguments]
        if not isinstance(name, str) or not isinstance(id, str):
            return None
        return Found(SampledCall(name, json.loads(body) if body.startswith('"') else body, id), end)

    def may_begin(self, text: str, at: int) -> bool:
        return text.startswith("{", at)


@dataclass(frozen=True, slots=True)
class Headed:
    """The name, `between`, and the arguments as JSON; before the name perhaps the call's id and `after_id`."""

    between: str
    after_id: str = ""
    begins: str = ""
    ends: str = ""

    def match(self, text: str, at: int, tools: Sequence[Tool]) -> Found | None:
        head = self._head.match(text, at)
        if head is None:
            return None
        _, end = _DECODER.raw_decode(text, head.end())
        return Found(SampledCall(head["name"], text[head.end() : end], head["id"] or ""), end)

    def may_begin(self, text: str, at: int) -> bool:
        return self._head.match(text, at) is not None

    @property
    def _head(self) -> re.Pattern[str]:
        id = rf"(?P<id>[\w.:-]+){_pattern(self.after_id)}" if self.after_id else "(?P<id>)"
        return re.compile(rf"{id}(?P<name>{NAME}){_pattern(self.between)}(?=\{{)")


@dataclass(frozen=True, slots=True)
class Elements:
    """An element of the name, with an element for each argument's value."""

    tags: TextTags

    @property
    def begins(self) -> str:
        return f"<{self.tags.call}{self.tags.naming}"

    @property
    def ends(self) -> str:
        return f"</{self.tags.call}>"

    def match(self, text: str, at: int, tools: Sequence[Tool]) -> Found | None:
        found = match_element(text, at, self.tags, tools)
        return None if found is None else Found(*found)

    def may_begin(self, text: str, at: int) -> bool:
        return text.startswith(self.begins, at)


@dataclass(frozen=True, slots=True)
class Marked:
    """The name, and each value behind its key: `NAME after_name (before_key KEY before_value VALUE after_value)*`.

    `after_value` may repeat the key, as `{key}`. Attributes in these texts may have any value. A value that holds the
    next key, or `after_value`, is none: the model may have forgotten a tag.
    """

    after_name: str
    before_key: str
    before_value: str
    after_value: str
    begins: str = ""
    ends: str = ""

    def match(self, text: str, at: int, tools: Sequence[Tool]) -> Found | None:
        head = self._head.match(text, at)
        if head is None:
            return None
        parameters = Parameters(head["name"], tools)
        own_key = rf"(?P<key>(?!/)[^\s\"'<>=]+){_pattern(self.before_value)}"
        key = re.compile(_pattern(self.before_key) + own_key)
        inner = re.compile(_pattern(self.before_key).removeprefix(r"\s*") + own_key)
        values: dict[str, str] = {}
        end = head.end()
        while named := key.match(text, end):
            closing = self.after_value.rstrip().replace("{key}", named["key"])
            stop = text.find(closing, named.end())
            if stop < 0 or named["key"] in values:
                return None
            written = text[named.end() : stop]
            value = parameters.read(named["key"], written)
            is_next = any(parameters.may_be(found["key"]) for found in inner.finditer(written))
            if value is None or is_next or closing.lstrip() in written:
                return None
            values[named["key"]] = value
            end = stop + len(closing)
        return Found(SampledCall(head["name"], object_of(values)), end)

    def may_begin(self, text: str, at: int) -> bool:
        return self._head.match(text, at) is not None

    @property
    def _head(self) -> re.Pattern[str]:
        return re.compile(rf"(?P<name>{NAME}){_pattern(self.after_name)}")


def _pattern(literal: str) -> str:
    """Matches the text with any values of its attributes, and any white space at its ends."""
    parts = map(re.escape, re.split(r'(?<==")[^"]*(?=")', literal.strip()))
    inner = r'[^"<>]*'.join(parts)
    return rf"\s*{inner}\s*" if inner else r"\s*"


@dataclass(frozen=True, slots=True)
class CallSyntax:
    """How a template writes a block of calls: the texts around and between them."""

    notation: Notation
    opening: str
    lead: str
    tail: str
    separator: str
    closing: str

    def match(self, text: str, at: int, tools: Sequence[Tool]) -> tuple[list[SampledCall], int] | None:
        """The calls of the block that begins at `at`, and its end; None if it is none."""
        calls: list[SampledCall] = []
        place = _after(text, at, self.opening)
        while place is not None:
            begin = _after(text, place, self.lead)
            found = None if begin is None else self.notation.match(text, begin, tools)
            end = None if found is None else _after(text, found.end, self.tail)
            if found is None or end is None:
                return None
            calls.append(found.call)
            closed = _after(text, end, self.closing) if self.closing else None
            if closed is not None:
                return calls, closed
            place = _after(text, end, self.separator)
            begins = self.separator + self.lead or self.notation.begins
            if not self.closing and not text.startswith(begins or "\0", end):
                return calls, end
        return None

    def _may_begin(self, text: str, at: int) -> bool:
        """Whether a call, perhaps a broken one, stands behind the opening at `at`."""
        place = _after(text, at, self.opening)
        place = None if place is None else _after(text, place, self.lead)
        return place is not None and self.notation.may_begin(text, place)

    @property
    def begins(self) -> str:
        """The text that begins a block."""
        return self.opening + self.lead or self.notation.begins

    @property
    def ends(self) -> str:
        """The text that ends a block, or its last call; empty if nothing does."""
        return self.tail + self.closing or self.notation.ends

    def format(self, tokenizer: HubTokenizer) -> ToolFormat | None:
        """The format for replies; None if nothing shows where a block begins, or if other tokens do."""
        if len(self.begins) < SHORTEST:
            return None
        tokens = sorted(tokenizer.added_tokens.values(), key=len, reverse=True)
        opening = next((token for token in tokens if token and self.begins.startswith(token)), "")
        closing = next((token for token in tokens if token and self.ends.endswith(token)), "")
        if not opening or (self.ends and not closing):
            rest = repr(replace(self, closing="")).replace(opening, "", 1)
            if any(token and token in rest for token in tokens):
                return None  # it is of channels, as Harmony
            if not opening:
                return ToolFormat(find_pieces=self.find_pieces)
            closing = ""  # the block goes to the reply's end

        def read(block: CallBlock) -> list[SampledCall] | None:
            return self.read(replace(block, written=f"{opening}{block.text}{closing}"))

        return ToolFormat(read, opening, closing)

    def read(self, block: CallBlock) -> list[SampledCall] | None:
        """The calls of a block with its opening and closing text."""
        found = self.match(block.text, _space_end(block.text, 0), block.tools)
        return found[0] if found is not None and _space_end(block.text, found[1]) == len(block.text) else None

    def find_pieces(
        self, tokenizer: HubTokenizer, ids: Sequence[int], start: int, tools: Sequence[Tool]
    ) -> list[ReplyPiece]:
        """The text and the blocks in `ids` from `start`. Without tools all is text: a summary may quote calls."""
        rest = ids[start:]
        text = tokenizer.decode(rest)
        if not tools:
            return [ReplyPiece(text, start)]
        begins = _words(self.opening or self.lead or self.notation.begins)
        ends = _words(self.closing or self.tail or self.notation.ends)
        index = IdIndex(tokenizer, rest)
        pieces: list[ReplyPiece] = []

        def add(begin: int, end: int, calls: tuple[ParsedCall, ...] | None = None) -> None:
            pieces.append(ReplyPiece(text[begin:end], start + index.of(begin), calls))

        at, broken = 0, 0
        while opened := begins.search(text, at):
            begin = opened.start()
            try:
                found = self.match(text, begin, tools)
            except (ValueError, RecursionError):  # JSON that Python can't read
                found = None
            broken += found is None
            closed = ends.search(text, opened.end()) if broken < BROKEN else None
            end = found[1] if found is not None else closed.end() if closed is not None else len(text)
            if found is None and not self._may_begin(text, begin):  # the model speaks of calls: one may follow
                later = begins.search(text, begin + 1, end)
                end = end if later is None else later.start()
            own = CallBlock(tokenizer, (), tools, is_tagged=False, written=text[begin:end])
            calls = checked_calls(lambda _, found=found: found and found[0], own)
            add(at, begin)
            add(begin, end, (ParsedCall("", "", False, text[begin:end]),) if calls is None else calls)
            at = end
        add(at, len(text))
        return pieces


def _words(part: str) -> re.Pattern[str]:
    """Finds `part` with any white space between its words; nothing, if it is empty."""
    return re.compile(r"\s*".join(map(re.escape, part.split())) or r"(?!)")


def _after(text: str, at: int, part: str) -> int | None:
    """The place behind `part`, with any white space around it and between its words."""
    at = _space_end(text, at)
    for word in part.split():
        if not text.startswith(word, at):
            return None
        at = _space_end(text, at + len(word))
    return at


def _space_end(text: str, at: int) -> int:
    while at < len(text) and text[at].isspace():
        at += 1
    return at


@dataclass(frozen=True, slots=True)
class RenderedTurn:
    """What a template writes for a turn with these calls and no text."""

    text: str
    calls: Sequence[ToolCall]
    marked: Marked | None = None

    def notations(self) -> Iterator[tuple[Notation, slice]]:
        """Notations in which the first call may stand, and where it does."""
        call = self.calls[0]
        arguments = json.loads(call.arguments)
        for value in _VALUES.finditer(self.text):
            try:
                found, end = _DECODER.raw_decode(self.text, value.start())
            except ValueError:
                continue
            except RecursionError:  # no call's, and there may be as many more
                break
            if isinstance(found, dict) and (notation := _keys(found, call, arguments)) is not None:
                yield notation, slice(value.start(), end)
            if found == arguments:
                yield from self._headed(call, value.start(), end)
        yield from self._elements(call, arguments)
        for named in re.finditer(re.escape(call.name), self.text):
            marked = self.marked
            found = None if marked is None else marked.match(self.text, named.start(), ())
            if marked is not None and found is not None and json.loads(found.call.arguments) == arguments:
                yield marked, slice(named.start(), found.end)

    def _headed(self, call: ToolCall, start: int, end: int) -> Iterator[tuple[Notation, slice]]:
        named = self.text.rfind(call.name, 0, start)
        between = self.text[named + len(call.name) : start]
        if named < 0 or not between or "\n\n" in between:
            return
        id_at = self.text.rfind(call.id, 0, named)
        after_id = self.text[id_at + len(call.id) : named].strip() if id_at >= 0 else ""
        if after_id:
            yield Headed(between.strip(), after_id), slice(id_at, end)
        yield Headed(between.strip()), slice(named, end)

    def _elements(self, call: ToolCall, arguments: Mapping[str, Any]) -> Iterator[tuple[Notation, slice]]:
        ((key, value),) = arguments.items()
        element = re.search(
            rf'<(?P<call>[\w:.-]+)(?P<naming>=| [\w-]+="){re.escape(call.name)}"?>\s*'
            rf'<(?P<value>[\w:.-]+)(?P<own>=| [\w-]+="){re.escape(key)}"?>(?P<break>\n?){re.escape(value)}\n?'
            r"</(?P=value)>\s*</(?P=call)>",
            self.text,
        )
        if element is not None and element["own"] == element["naming"]:
            tags = TextTags(element["call"], element["value"], element["naming"], line_breaks=bool(element["break"]))
            yield Elements(tags), slice(element.start(), element.end())


def _keys(found: Mapping[str, Any], call: ToolCall, arguments: Any) -> JsonObject | None:
    """The keys of a call's object; None if it is not the call."""
    if found == {call.name: arguments}:
        return JsonObject()
    names = [key for key, value in found.items() if value == call.name]
    bodies = [key for key, value in found.items() if value == arguments or _is_text_of(arguments, value)]
    ids = [key for key, value in found.items() if value == call.id]
    return JsonObject(names[0], bodies[0], "".join(ids[:1])) if len(names) == len(bodies) == 1 else None


def _is_text_of(arguments: Any, value: Any) -> bool:
    try:
        return isinstance(value, str) and json.loads(value) == arguments
    except (ValueError, RecursionError):
        return False


def learn_syntaxes(one: RenderedTurn, two: RenderedTurn | None = None) -> Iterator[CallSyntax]:
    """The syntaxes in which a template may have written a turn of one call, and one of `two`, None if it takes one."""
    for notation, place in one.notations():
        places = None if two is None else _second(notation, two)
        if places is None or two is None:
            syntax = CallSyntax(notation, one.text[: place.start].strip(), "", "", "", one.text[place.stop :].strip())
        else:
            syntax = _repeated(notation, two.text, *places)
        if not any(re.search(rf"\b{word}\b", repr(syntax)) for word in (one.calls[0].name, one.calls[0].id)):
            yield syntax


def _repeated(notation: Notation, text: str, first: slice, last: slice) -> CallSyntax:
    """The syntax of a turn whose two calls stand at these places."""
    before, between = text[: first.start].strip(), text[first.stop : last.start].strip()
    after = text[last.stop :].strip()
    lead = _common(before[::-1], between[::-1])[::-1]
    lead = lead if lead == before else _PART_OF_TAG.sub("", lead)
    rest = between[: len(between) - len(lead)].rstrip()
    tail = _common(after, rest)
    opening, separator, closing = before[: len(before) - len(lead)], rest[len(tail) :], after[len(tail) :]
    return CallSyntax(notation, opening.strip(), lead.strip(), tail.strip(), separator.strip(), closing.strip())


def learn_marked(wide: RenderedTurn) -> Marked | None:
    """What stands around the name, the keys and the values of a turn's one call, which has two arguments."""
    (call,) = wide.calls
    pairs = list(json.loads(call.arguments).items())
    gaps, at = list[str](), 0
    for word in (call.name, *pairs[0], *pairs[1]):
        place = wide.text.find(word, at)
        if place < 0:
            return None
        gaps.append(wide.text[at:place])
        at = place + len(word)
    _, first, before_value, between, again = gaps
    before_key = _common(first[::-1], between[::-1])[::-1]
    after_value = between[: len(between) - len(before_key)].replace(pairs[0][0], "{key}")
    is_closed = wide.text.startswith(after_value.replace("{key}", pairs[1][0]), at)
    if before_value != again or not before_value.strip() or not after_value.strip() or not is_closed:
        return None
    return Marked(first[: len(first) - len(before_key)], before_key, before_value, after_value)


def _second(notation: Notation, two: RenderedTurn) -> tuple[slice, slice] | None:
    """Where the two calls of a turn stand."""
    first = next((place for own, place in two.notations() if own == notation), None)
    if first is None:
        return None
    later = RenderedTurn(two.text[first.stop :], two.calls[1:], two.marked)
    place = next((place for own, place in later.notations() if own == notation), None)
    return None if place is None else (first, slice(place.start + first.stop, place.stop + first.stop))


def _common(one: str, other: str) -> str:
    """What both texts begin with."""
    pairs = enumerate(zip(one, other, strict=False))
    return one[: next((at for at, (left, right) in pairs if left != right), min(len(one), len(other)))]
