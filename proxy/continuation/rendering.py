"""Renders messages to token ids and parses whole replies (thinking, then text and blocks of tool calls in their order),
for one model family.

`FamilyRenderer` uses the `renderers` package. `render` makes a whole prompt. `bridge` makes the next prompt from the
parent's prompt and output ids and the ids of only the new messages; it returns None if the family does not allow that.
"""

from __future__ import annotations

import copy
import json
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Literal, Protocol

from cachetools import LRUCache

from rolltap.errors import ConfigError, InvalidRequest
from rolltap.extras import import_renderers
from rolltap.protocols.conversation import TOOL_ERROR, Image, Message, Text, Tool, ToolCall
from rolltap.protocols.thinking import Efforts, find_efforts
from rolltap.proxy.continuation.block_formats import CallBlock, checked_calls
from rolltap.proxy.continuation.parsed import ParsedCall, ParsedReply, ReplyPiece
from rolltap.proxy.continuation.tool_formats import TOOL_FORMATS, Markers, ToolFormat, format_of_family
from rolltap.tokenizer import HubTokenizer

KNOWN_TOOLS = 256
"""Number of tool lists whose rendered form is cached."""

THOUGHT_ENDS = ("</think>", "</think:opensource>", "<channel|>", "<|end|>", "<|end_message|>")
"""The tokens that end thinking in the package's families."""

PROBE = (Message("user", (Text("question"),)),)
"""A conversation that is rendered to find out which options change a prompt."""

Guard = Callable[[str], str]
HistoryThinking = Literal["tool_cycle", "keep"]


class TokenRenderer(Protocol):
    """Renders and parses for one model family; used by continuation and the reply parser."""

    tokenizer: HubTokenizer
    stop_token_ids: tuple[int, ...]
    silent_token_ids: tuple[int, ...]
    """The tokens without text at a turn's end: those that end it, and those that the family writes before them."""
    markers: Markers
    efforts: Efforts
    switches_thinking: bool
    """Whether `thinking` changes the prompt."""
    opens_thinking: bool
    """Whether a reply begins with thinking even if the prompt asks for none."""
    image_roles: frozenset[str]
    """The roles in whose messages the family writes images: one placeholder token for each."""

    def at_effort(self, level: str) -> TokenRenderer:
        """A renderer for prompts with effort level `level`, one of the family's `efforts`."""
        ...

    def render(self, messages: Sequence[Message], tools: Sequence[Tool], *, thinking: bool) -> list[int]:
        """A whole prompt, including the generation prompt."""
        ...

    def bridge(
        self, prompt: list[int], output: list[int], new: Sequence[Message], tools: Sequence[Tool], *, thinking: bool
    ) -> list[int] | None:
        """The next prompt, which begins with `prompt` and `output`; None if the family cannot be bridged here."""
        ...

    def splice(
        self,
        prompt: list[int],
        output: list[int],
        messages: Sequence[Message],
        covered: int,
        tools: Sequence[Tool],
        *,
        thinking: bool,
    ) -> list[int] | None:
        """Like `bridge`, if the new messages contain assistant messages that were not sampled here (edited or foreign).

        `messages` is the whole request; its first `covered` messages are in `prompt` and `output`.
        """
        ...

    def follow(
        self,
        prompt: list[int],
        output: list[int],
        messages: Sequence[Message],
        covered: int,
        tools: Sequence[Tool],
        *,
        thinking: bool,
    ) -> list[int] | None:
        """Like `bridge`, if what the family writes for new messages depends on those before them: `messages` is as in
        `splice`. None if it does not, or if the new messages change what is written before them."""
        ...

    def parse(self, output: Sequence[int], prompt: Sequence[int], tools: Sequence[Tool]) -> ParsedReply:
        """The whole reply to `prompt`."""
        ...

    def read_block(self, block: Sequence[int], tools: Sequence[Tool]) -> tuple[ParsedCall, ...]:
        """The calls of a block, from its opening token to its closing one or to the reply's end."""
        ...


@dataclass(frozen=True, slots=True)
class DeclaredTools:
    """Tools in the form of a family of the package: `specs` for its renderer, or `rows` before the conversation."""

    specs: list[Any] | None
    rows: tuple[Any, ...] = ()


class FamilyRenderer:
    """A `TokenRenderer` for a family of the `renderers` package ("qwen3", "glm-4.5", "gpt-oss", ...). It writes no
    images: a model's own chat template does."""

    image_roles: frozenset[str] = frozenset()

    def __init__(self, family: str, tokenizer: HubTokenizer) -> None:
        renderers = import_renderers("token mode")
        self.tokenizer = tokenizer
        self.family = family
        form = format_of_family(family)
        self._by_thinking = self._renderers("")
        own_stops = self._by_thinking[True].get_stop_token_ids()
        self.stop_token_ids = tuple(dict.fromkeys((*own_stops, *tokenizer.end_token_ids)))
        self.silent_token_ids = self.stop_token_ids
        self._guard = self._find_guard()
        self._known_tools: LRUCache[int, tuple[Sequence[Tool], DeclaredTools]] = LRUCache(KNOWN_TOOLS)
        self.markers = form.markers(tokenizer)
        ends = (tokenizer.convert_tokens_to_ids(end) for end in THOUGHT_ENDS)
        self._thought_ends = tuple(end for end in ends if end is not None)
        self._reader = TokenReader(tokenizer, form, self.stop_token_ids)
        takes_levels = "reasoning_effort" in type(renderers.config_from_name(family)).model_fields
        self.efforts = find_efforts(self._probe) if takes_levels else Efforts()
        unthinking = self.render(PROBE, (), thinking=False)
        self.switches_thinking = self.render(PROBE, (), thinking=True) != unthinking
        self.opens_thinking = self._reader.begins_thinking(unthinking)

    def at_effort(self, level: str) -> FamilyRenderer:
        renderer = copy.copy(self)
        renderer._by_thinking = self._renderers(level)
        return renderer

    def render(self, messages: Sequence[Message], tools: Sequence[Tool], *, thinking: bool) -> list[int]:
        declared = self._declared(tools)
        rows = [*declared.rows, *map(self._row, messages)]
        try:
            return self._by_thinking[thinking].render_ids(rows, tools=declared.specs, add_generation_prompt=True)
        except (ValueError, KeyError, TypeError) as error:
            raise InvalidRequest(f"{self.family} cannot render these messages: {error}") from error

    def bridge(
        self, prompt: list[int], output: list[int], new: Sequence[Message], tools: Sequence[Tool], *, thinking: bool
    ) -> list[int] | None:
        rows = [self._row(message) for message in new]
        specs, family = self._declared(tools).specs, self._by_thinking[thinking]
        try:
            rendered = family.bridge_to_next_turn(prompt, output, rows, tools=specs)
            if rendered is not None:
                return rendered.token_ids
            # The package does not bridge a reply that ends while thinking. So close the thinking, bridge, and take
            # only what follows the reply's end, which is the same.
            for closing in self._thought_ends if output and output[-1] in self.stop_token_ids else ():
                closed = [*prompt, closing, output[-1]]
                rendered = family.bridge_to_next_turn(prompt, closed[len(prompt) :], rows, tools=specs)
                if rendered is not None and rendered.token_ids[: len(closed)] == closed:
                    return [*prompt, *output, *rendered.token_ids[len(closed) :]]
        except (ValueError, KeyError):
            return None  # the full render that follows reports the error
        # Nor several results, where a whole rendering sorts them: so take what it writes behind a turn that has the
        # calls which the results answer.
        results = [message for message in new if message.role == "tool"]
        calls = (ToolCall(result.tool_call_id or "aaaaaaaaa", result.name or "look", "{}") for result in results)
        calling = Message("assistant", () if results else (Text("t"),), tuple(calls))
        stand_in = [Message("user", (Text("q"),)), calling]
        return self.splice(prompt, output, [*stand_in, *new], len(stand_in), tools, thinking=thinking)

    def splice(
        self,
        prompt: list[int],
        output: list[int],
        messages: Sequence[Message],
        covered: int,
        tools: Sequence[Tool],
        *,
        thinking: bool,
    ) -> list[int] | None:
        declared = self._declared(tools)
        rows = [*declared.rows, *map(self._row, messages)]
        try:
            whole = self._by_thinking[thinking].render(rows, tools=declared.specs, add_generation_prompt=True)
        except (ValueError, KeyError):
            return None
        turn_close = [
            index
            for index, (owner, sampled) in enumerate(zip(whole.message_indices, whole.sampled_mask, strict=True))
            if owner == len(declared.rows) + covered - 1 and sampled
        ]
        if not turn_close or whole.token_ids[turn_close[-1]] not in self.stop_token_ids:
            return None
        end = whole.token_ids[turn_close[-1]]
        if not output or output[-1] not in self.stop_token_ids:
            output = [*output, end]
        elif output[-1] != end:  # the reply ended as turns of another kind do
            return None
        return [*prompt, *output, *whole.token_ids[turn_close[-1] + 1 :]]

    def follow(
        self,
        prompt: list[int],
        output: list[int],
        messages: Sequence[Message],
        covered: int,
        tools: Sequence[Tool],
        *,
        thinking: bool,
    ) -> list[int] | None:
        return None  # the package's bridges know only the end of a prompt

    def parse(self, output: Sequence[int], prompt: Sequence[int], tools: Sequence[Tool]) -> ParsedReply:
        return self._reader.read(output, prompt, tools)

    def read_block(self, block: Sequence[int], tools: Sequence[Tool]) -> tuple[ParsedCall, ...]:
        return self._reader.read_block(block, tools)

    def _renderers(self, level: str) -> dict[bool, Any]:
        """The package's renderers at effort `level`, by `thinking`."""
        return {on: _make(self.family, self.tokenizer, thinking=on, level=level) for on in (True, False)}

    def _probe(self, level: str) -> tuple[int, ...] | None:
        try:
            return tuple(self.at_effort(level).render(PROBE, (), thinking=True))
        except ConfigError:
            return None

    def _find_guard(self) -> Guard:
        """The function that keeps special tokens out of text: the tokenizer's `guard`. If the family's own encoder
        encodes every text as text (Harmony's does), it is `str`, as the guard's marks would remain in the text."""

        def specials(text: str) -> list[int]:
            rows: Any = [{"role": "user", "content": text}]
            ids = self._by_thinking[True].render_ids(rows, add_generation_prompt=True)
            return [token for token in ids if token in self.tokenizer.special_ids]

        literal = self.tokenizer.token(self.stop_token_ids[0])
        return str if specials(literal) == specials("question") else self.tokenizer.guard

    def _declared(self, tools: Sequence[Tool]) -> DeclaredTools:
        """The tools in the family's form. Dialects return equal tools as the same object, so its id is the key."""
        entry = self._known_tools.get(id(tools))
        if entry is not None:
            return entry[1]
        specs = [template_tool(tool, self._guard) for tool in tools]
        declared = DeclaredTools(specs or None)
        if specs and not self._takes(declared):
            others = [DeclaredTools(_with_objects(specs))]
            if self.family == "kimi-k2.5":  # its tokenizer writes JSON if it can't write a tool in TypeScript
                text = json.dumps(specs, ensure_ascii=False, separators=(",", ":"), sort_keys=True)
                others.append(DeclaredTools(None, ({"role": "tool_declare", "content": text},)))
            declared = next(filter(self._takes, others), declared)
        self._known_tools[id(tools)] = tools, declared  # keeping the tools prevents reuse of their id
        return declared

    def _takes(self, declared: DeclaredTools) -> bool:
        """Whether the package can write these tools. It refuses some schemas that the models' own tokenizers take."""
        rows = [*declared.rows, *map(self._row, PROBE)]
        try:
            self._by_thinking[True].render_ids(rows, tools=declared.specs, add_generation_prompt=True)
        except (ValueError, KeyError, TypeError):
            return False
        return True

    def _row(self, message: Message) -> Any:
        return template_row(message, self._guard)


def template_row(message: Message, guard: Guard) -> dict[str, Any]:
    """A message in the form for chat templates, with all text guarded against special-token literals."""
    row: dict[str, Any] = {
        "role": "system" if message.role == "developer" else message.role,
        "content": _content(message, guard),
    }
    if message.reasoning:
        row["reasoning_content"] = guard(message.reasoning)
    if message.tool_calls:
        row["tool_calls"] = [
            {"id": guard(call.id), "type": "function", "function": {"name": guard(call.name), "arguments": args}}
            for call in message.tool_calls
            for args in [_guarded(_arguments(call), guard)]
        ]
    if message.role == "tool":
        row["tool_call_id"] = guard(message.tool_call_id or "")
        if message.name:
            row["name"] = guard(message.name)
    return row


def _content(message: Message, guard: Guard) -> str | list[dict[str, Any]]:
    """The text of a message, or its texts and images in their order."""
    if not any(isinstance(part, Image) for part in message.parts):
        return guard(message.text)
    runs = groupby(message.parts, lambda part: isinstance(part, Image))
    parts: list[dict[str, Any]] = []
    for are_images, run in runs:
        if are_images:
            parts += [{"type": "image"} for _ in run]
        elif text := Message(message.role, tuple(run)).text:
            parts.append({"type": "text", "text": guard(text)})
    if message.is_error:
        parts.insert(0, {"type": "text", "text": f"{TOOL_ERROR}\n"})
    return parts


def template_tool(tool: Tool, guard: Guard) -> dict[str, Any]:
    """A tool in the form for chat templates. A custom tool's text becomes one string argument, `input`."""
    parameters = tool.parameters
    if tool.kind == "custom":
        parameters = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
    function = {"name": tool.name, "description": tool.description, "parameters": parameters or {}}
    return {"type": "function", "function": _guarded(function, guard)}


def _with_objects(value: Any) -> Any:
    """A tool or a schema with objects in the place of boolean schemas of properties, which mean the same."""
    if isinstance(value, list):
        return [_with_objects(item) for item in value]
    if not isinstance(value, dict):
        return value
    schemas = {True: {}, False: {"not": {}}}
    return {
        key: {name: schemas[item] if isinstance(item, bool) else _with_objects(item) for name, item in inner.items()}
        if key == "properties" and isinstance(inner, dict)
        else _with_objects(inner)
        for key, inner in value.items()
    }


def _make(family: str, tokenizer: HubTokenizer, *, thinking: bool, level: str) -> Any:
    """A renderer of the package. Raises `ConfigError` if the family has no such effort level."""
    package = import_renderers("token mode")
    try:
        config = package.config_from_name(family)
    except (KeyError, ValueError) as error:
        raise ConfigError(f"no renderer family {family!r}: {error}") from error
    update: dict[str, Any] = {"thinking_retention": "all"}
    switches = type(config).model_fields.keys() & {"enable_thinking", "thinking"}  # the latter is Kimi K2.5's
    update |= dict.fromkeys(switches, thinking)
    if level:
        update["reasoning_effort"] = level
    try:
        config = type(config)(**update)
        return package.create_renderer(tokenizer, config)
    except (AssertionError, ValueError, KeyError, RuntimeError) as error:
        message = f"tokenizer {tokenizer.name_or_path!r} does not fit the renderer family {family!r}: {error}"
        raise ConfigError(message) from error


def _arguments(call: ToolCall) -> Any:
    """Arguments in the form for templates: a dict if the text is a JSON object, else the text. A custom tool's text is
    the one argument that `template_tool` declares."""
    if call.kind == "custom":
        return {"input": call.arguments}
    try:
        value = json.loads(call.arguments or "{}")
    except (ValueError, RecursionError):
        return call.arguments
    return value if isinstance(value, dict) else call.arguments


def is_object(text: str) -> bool:
    """Whether `text` is a JSON object, or empty."""
    try:
        return isinstance(json.loads(text or "{}"), dict)
    except (ValueError, RecursionError):
        return False


def _guarded(value: Any, guard: Guard) -> Any:
    if isinstance(value, str):
        return guard(value)
    if isinstance(value, dict):
        return {guard(key): _guarded(item, guard) for key, item in value.items()}
    if isinstance(value, list):
        return [_guarded(item, guard) for item in value]
    return value


THINK, END_THINK = "<think>", "</think>"
"""The tags of thinking in vocabularies that have no tokens for them."""


class TokenReader:
    """Reads replies of one model family in `form`.

    A call inside closed thinking is part of the thinking. Unclosed thinking ends at the first call. Only the tag that a
    reply begins with, after white space, opens thinking.
    """

    def __init__(self, tokenizer: HubTokenizer, form: ToolFormat, silent_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._markers = form.markers(tokenizer)
        self._form = form
        self._silent_ids = frozenset(silent_ids)

    def read(self, output: Sequence[int], prompt: Sequence[int], tools: Sequence[Tool]) -> ParsedReply:
        ids = list(output)
        if self._form.read_reply is not None:
            return self._form.read_reply(self._tokenizer, ids, prompt, tools)
        start, skipped, reasoning = self._thinking(ids, prompt, tools)
        if self._form.find_pieces is not None:
            rest = list(ids)
            while rest and rest[-1] in self._silent_ids:
                rest.pop()
            return ParsedReply(tuple(self._form.find_pieces(self._tokenizer, rest, start, tools)), reasoning)
        pieces: list[ReplyPiece] = []
        text_at = start
        for block in self._blocks(ids, start, tools):
            pieces.append(ReplyPiece(self._decode(ids[text_at : block.start]), text_at))
            pieces.append(ReplyPiece(self._decode(ids[block]), block.start, self.read_block(ids[block], tools)))
            text_at = block.stop
        pieces.append(ReplyPiece(self._decode(ids[text_at:]), text_at))
        first = pieces[0]
        pieces[0] = ReplyPiece(first.text[skipped:], first.start, first.calls)
        return ParsedReply(tuple(piece for piece in pieces if piece.text or piece.calls is not None), reasoning)

    def begins_thinking(self, prompt: Sequence[int]) -> bool:
        """Whether a reply to `prompt` begins with thinking that the prompt opens."""
        return self.read(self._tokenizer.encode("text"), prompt, ()).reasoning is not None

    def read_block(self, block: Sequence[int], tools: Sequence[Tool]) -> tuple[ParsedCall, ...]:
        """The calls of a block, which begins with its opening token. A block that can't be read is one broken call."""
        ids = [token for token in block if token not in self._silent_ids]
        opening, closing = self._markers.tool_open, self._markers.tool_close
        is_closed = closing is None or ids[-1:] == [closing]
        inner = ids[ids[:1] == [opening] : len(ids) - (closing is not None and is_closed)]
        content = CallBlock(self._tokenizer, inner, tools, is_tagged=ids[:1] == [opening])
        calls = checked_calls(self._form.read, content) if is_closed else None
        if calls is None:
            calls = (ParsedCall("", "", False, self._tokenizer.decode(inner)),)
        return tuple(call.as_begun(self._form.head) for call in calls)

    def _blocks(self, ids: Sequence[int], start: int, tools: Sequence[Tool]) -> list[slice]:
        """The places of the blocks in `ids` from `start`.

        A block begins with the opening token. It ends with the closing one or, if the format has none, before the next
        opening. The last block may be unclosed. In plain text, a block is the whole reply, if there are tools to call.
        """
        opening, closing = self._markers.tool_open, self._markers.tool_close
        beginnings = self._markers.beginnings if tools else ()
        if beginnings and self._decode(ids[start:]).lstrip().startswith(beginnings):
            whole = slice(start, len(ids))
            return [whole] if self.read_block(ids[whole], tools) else []
        blocks: list[slice] = []
        opened: int | None = None
        for at in range(start, len(ids)):
            if ids[at] == closing and opened is not None:
                blocks.append(slice(opened, at + 1))
                opened = None
            elif ids[at] == opening and (opened is None or closing is None):
                blocks += [] if opened is None else [slice(opened, at)]
                opened = at
        return blocks if opened is None else [*blocks, slice(opened, len(ids))]

    def _thinking(
        self, ids: Sequence[int], prompt: Sequence[int], tools: Sequence[Tool]
    ) -> tuple[int, int, str | None]:
        """Where the rest begins: the index of its first id, and the number of characters of that text to skip. And the
        thinking, None if there is none."""
        markers = self._markers
        if self._form.thinks_in_text and markers.reasoning_open is None:
            return self._text_thinking(ids, prompt)
        opening = next((at for at, id in enumerate(ids) if self._tokenizer.decode(id).strip()), len(ids))
        begins = markers.reasoning_open is not None and ids[opening : opening + 1] == [markers.reasoning_open]
        if not begins and not markers.opens_in_reasoning(prompt):
            return 0, 0, None
        start = opening + 1 if begins else 0
        if markers.reasoning_close in ids[start:]:
            end = ids.index(markers.reasoning_close, start)
            after = end + 1
        else:
            end = after = self._first_call(ids, start, tools)
        return after, 0, self._decode(ids[start:end]).lstrip().removeprefix(markers.reasoning_label).strip()

    def _first_call(self, ids: Sequence[int], start: int, tools: Sequence[Tool]) -> int:
        """Where the first call begins in `ids` from `start`; their number if there is none."""
        if self._form.find_pieces is not None:
            pieces = self._form.find_pieces(self._tokenizer, ids, start, tools)
            return next((piece.start for piece in pieces if any(call.ok for call in piece.calls or ())), len(ids))
        opening = self._markers.tool_open
        return ids.index(opening, start) if opening in ids[start:] else len(ids)

    def _text_thinking(self, ids: Sequence[int], prompt: Sequence[int]) -> tuple[int, int, str | None]:
        """`_thinking`, if its tags are spelled in ordinary tokens."""
        text = self._decode(ids)
        begins = text.lstrip().startswith(THINK)
        tail = self._tokenizer.decode(list(prompt[-64:]))
        if not begins and tail.rfind(THINK) <= tail.rfind(END_THINK):
            return 0, 0, None
        start = text.index(THINK) + len(THINK) if begins else 0
        close = text.find(END_THINK, start)
        if close < 0:
            end = ids.index(self._markers.tool_open) if self._markers.tool_open in ids else len(ids)
            return end, 0, self._decode(ids[:end])[start:].strip()
        after = close + len(END_THINK)
        count = bisect_left(range(len(ids)), True, key=lambda count: len(self._decode(ids[:count])) >= after)
        before = self._decode(ids[: count - 1])
        return count - 1, after - len(before), text[start:close].strip()

    def _decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode([token for token in ids if token not in self._silent_ids])


def reads(tokenizer: HubTokenizer, form: ToolFormat, turn: Sequence[int], calls: Sequence[ToolCall]) -> bool:
    """Whether `form` reads a turn as these calls of declared tools, and as no others."""
    names = dict.fromkeys(call.name for call in calls) or ("look",)
    found = TokenReader(tokenizer, form, ()).read(turn, (), tuple(map(Tool, names))).tool_calls
    return [(call.name, call.ok) for call in found] == [(call.name, True) for call in calls] and all(
        json.loads(one.arguments) == json.loads(other.arguments) for one, other in zip(found, calls, strict=True)
    )


def detect_format(tokenizer: HubTokenizer, turns: Sequence[tuple[Sequence[int], ToolCall]]) -> str:
    """The name of the known format that reads each turn as its call; "none" if none does."""
    for name, form in TOOL_FORMATS.items():
        if all(reads(tokenizer, form, turn, [call]) for turn, call in turns):
            return name
    return "none"
