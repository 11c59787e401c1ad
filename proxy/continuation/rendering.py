"""Renders messages to token ids and parses replies, for one model family.

`FamilyRenderer` uses the `renderers` package. `render` makes a whole prompt. `bridge` makes the next prompt from the
parent's prompt and output ids and the ids of only the new messages; it returns None if the family does not allow that.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

from cachetools import LRUCache

from rolltap.errors import ConfigError, InvalidRequest
from rolltap.extras import install_line
from rolltap.proxy.continuation.json_calls import HERMES, is_arguments, read_call
from rolltap.proxy.continuation.tokenizer import HubTokenizer
from rolltap.proxy.conversation.chat import MAX_NAME, TOOL_MEDIA, Image, Message, Text, Tool
from rolltap.proxy.conversation.effort import Efforts, find_efforts

KNOWN_TOOLS = 256
"""Number of tool lists whose rendered form is cached."""

PROBE = (Message("user", (Text("question"),)),)
"""A conversation that is rendered to find out which options change a prompt."""

Guard = Callable[[str], str]
HistoryThinking = Literal["tool_cycle", "keep"]


@dataclass(frozen=True, slots=True)
class ParsedCall:
    """A tool call as sampled. `arguments` is JSON text. `ok` is False if the family's parser could not read the block.

    `block` is the number of its block, if a block of this format may hold several calls, or none.

    A block that has `begun` counts as a call even if it is not `ok`; `arguments` may be incomplete then (`json_calls`).
    """

    name: str
    arguments: str
    ok: bool
    raw: str
    begun: bool = False
    complete: bool = False
    block: int | None = None

    def as_begun(self, head: re.Pattern[str] | None) -> ParsedCall:
        """The call with name and arguments from its sampled text, if the text begins with `head`."""
        begun = read_call(head, self.raw) if head is not None else None
        if begun is None or begun.name is None:
            return self
        ok, complete = self.ok and begun.complete, begun.complete
        return replace(self, name=begun.name, arguments=begun.arguments, ok=ok, begun=True, complete=complete)


@dataclass(frozen=True, slots=True)
class ParsedReply:
    """An assistant message parsed from its token ids."""

    text: str
    reasoning: str
    tool_calls: tuple[ParsedCall, ...]


@dataclass(frozen=True, slots=True)
class Markers:
    """The token ids that separate a family's channels; None if the family has no such token.

    `beginnings`: how the text of a reply begins that is a tool call in plain text; None if that is unknown.
    `call_head` matches the text between a call's opening token and its arguments, if these are JSON.
    """

    reasoning_open: int | None
    reasoning_close: int | None
    tool_open: int | None
    tool_close: int | None
    beginnings: tuple[str, ...] | None = ()
    call_head: re.Pattern[str] | None = None

    def opens_in_reasoning(self, prompt: Sequence[int]) -> bool:
        """Whether the generation prompt opens a thinking block."""
        for token in reversed(prompt[-64:]):
            if token == self.reasoning_open:
                return True
            if token == self.reasoning_close:
                return False
        return False


class TokenRenderer(Protocol):
    """Renders and parses for one model family; used by continuation and the reply parser."""

    tokenizer: HubTokenizer
    stop_token_ids: tuple[int, ...]
    markers: Markers
    efforts: Efforts
    switches_thinking: bool
    """Whether `thinking` changes the prompt."""

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

    def parse(self, output: Sequence[int], prompt: Sequence[int], tools: Sequence[Tool]) -> ParsedReply: ...


class FamilyRenderer:
    """A `TokenRenderer` for a family of the `renderers` package ("qwen3", "glm-4.5", "gpt-oss", ...)."""

    def __init__(self, family: str, tokenizer: HubTokenizer) -> None:
        try:
            import renderers
        except ImportError as error:
            raise ConfigError(f"token mode needs {error.name}: {install_line('tokens')}") from error
        self.tokenizer = tokenizer
        self.family = family
        self._by_thinking = self._renderers("")
        self.stop_token_ids = tuple(self._by_thinking[True].get_stop_token_ids())
        self._guard = self._find_guard()
        tool_open = tokenizer.convert_tokens_to_ids("<tool_call>")
        self._known_specs: LRUCache[int, tuple[Sequence[Tool], list[Any] | None]] = LRUCache(KNOWN_TOOLS)
        self.markers = Markers(
            reasoning_open=tokenizer.convert_tokens_to_ids("<think>"),
            reasoning_close=tokenizer.convert_tokens_to_ids("</think>"),
            tool_open=tool_open,
            tool_close=tokenizer.convert_tokens_to_ids("</tool_call>"),
            beginnings=("{",) if family == "llama-3" else () if tool_open is not None else None,
        )
        if self._reads_hermes():
            self.markers = replace(self.markers, call_head=HERMES)
        takes_levels = "reasoning_effort" in type(renderers.config_from_name(family)).model_fields
        self.efforts = find_efforts(self._probe) if takes_levels else Efforts()
        self.switches_thinking = self.render(PROBE, (), thinking=True) != self.render(PROBE, (), thinking=False)

    def at_effort(self, level: str) -> FamilyRenderer:
        renderer = copy.copy(self)
        renderer._by_thinking = self._renderers(level)
        return renderer

    def render(self, messages: Sequence[Message], tools: Sequence[Tool], *, thinking: bool) -> list[int]:
        rows = [self._row(message) for message in messages]
        specs = self._specs(tools)
        try:
            return self._by_thinking[thinking].render_ids(rows, tools=specs, add_generation_prompt=True)
        except (ValueError, KeyError) as error:
            raise InvalidRequest(f"{self.family} cannot render these messages: {error}") from error

    def bridge(
        self, prompt: list[int], output: list[int], new: Sequence[Message], tools: Sequence[Tool], *, thinking: bool
    ) -> list[int] | None:
        rows = [self._row(message) for message in new]
        specs = self._specs(tools)
        family, closing = self._by_thinking[thinking], self.markers.reasoning_close
        try:
            rendered = family.bridge_to_next_turn(prompt, output, rows, tools=specs)
            if rendered is not None:
                return rendered.token_ids
            if closing is None or not output or output[-1] not in self.stop_token_ids:
                return None
            # The package does not bridge a reply that ends while thinking. So close the thinking, bridge, and take
            # only what follows the reply's end, which is the same.
            closed = [*prompt, closing, output[-1]]
            rendered = family.bridge_to_next_turn(prompt, closed[len(prompt) :], rows, tools=specs)
        except (ValueError, KeyError):
            return None  # the full render that follows reports the error
        if rendered is None or rendered.token_ids[: len(closed)] != closed:
            return None
        return [*prompt, *output, *rendered.token_ids[len(closed) :]]

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
        rows = [self._row(message) for message in messages]
        try:
            whole = self._by_thinking[thinking].render(rows, tools=self._specs(tools), add_generation_prompt=True)
        except (ValueError, KeyError):
            return None
        turn_close = [
            index
            for index, (owner, sampled) in enumerate(zip(whole.message_indices, whole.sampled_mask, strict=True))
            if owner == covered - 1 and sampled
        ]
        if not turn_close or whole.token_ids[turn_close[-1]] not in self.stop_token_ids:
            return None
        closed = output if output and output[-1] in self.stop_token_ids else [*output, whole.token_ids[turn_close[-1]]]
        return [*prompt, *closed, *whole.token_ids[turn_close[-1] + 1 :]]

    def parse(self, output: Sequence[int], prompt: Sequence[int], tools: Sequence[Tool]) -> ParsedReply:
        if self.markers.beginnings and not tools:  # without tools, a plain-text JSON object is no call
            content_ids = [token for token in output if token not in self.stop_token_ids]
            return ParsedReply(self.tokenizer.decode(content_ids).strip(), "", ())
        # Some parsers take it from their options, not from the prompt, where a reply begins (GLM's).
        thinks = begins_with(self.markers.reasoning_open, output, self.tokenizer) or (
            self.markers.opens_in_reasoning(prompt)
        )
        parsed = self._by_thinking[thinks].parse_response(
            list(output), tools=self._specs(tools), prompt_ids=list(prompt[-64:])
        )
        return ParsedReply(
            text=parsed.content,
            reasoning=parsed.reasoning_content or "",
            tool_calls=tuple(parsed_call(call).as_begun(self.markers.call_head) for call in parsed.tool_calls),
        )

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

    def _reads_hermes(self) -> bool:
        """Whether the family's parser reads Hermes blocks correctly."""
        block = '<tool_call>\n{"name": "look", "arguments": {"name": "x"}}\n</tool_call>'
        calls = self.parse(self.tokenizer.encode(block), [], ()).tool_calls
        return [(call.name, call.arguments, call.ok) for call in calls] == [("look", '{"name": "x"}', True)]

    def _specs(self, tools: Sequence[Tool]) -> list[Any] | None:
        """The tools in the family's form. Dialects return equal tools as the same object, so its id is the key."""
        entry = self._known_specs.get(id(tools))
        if entry is not None:
            return entry[1]
        specs = [template_tool(tool, self._guard) for tool in tools] or None
        self._known_specs[id(tools)] = tools, specs  # keeping the tools prevents reuse of their id
        return specs

    def _row(self, message: Message) -> Any:
        return template_row(message, self._guard)


def begins_with(token: int | None, ids: Sequence[int], tokenizer: HubTokenizer) -> bool:
    """Whether `token` is the first of `ids` that is not white space."""
    return token is not None and token == next((id for id in ids if tokenizer.decode(id).strip()), None)


def template_row(message: Message, guard: Guard) -> dict[str, Any]:
    """A message in the form for chat templates, with all text guarded against special-token literals."""
    if TOOL_MEDIA not in message.marks and any(isinstance(part, Image) for part in message.parts):
        raise InvalidRequest("this policy's model does not accept images")
    row: dict[str, Any] = {
        "role": "system" if message.role == "developer" else message.role,
        "content": guard(message.described),
    }
    if message.reasoning:
        row["reasoning_content"] = guard(message.reasoning)
    if message.tool_calls:
        row["tool_calls"] = [
            {"id": guard(call.id), "type": "function", "function": {"name": guard(call.name), "arguments": args}}
            for call in message.tool_calls
            for args in [_guarded(_arguments(call.arguments), guard)]
        ]
    if message.role == "tool":
        row["tool_call_id"] = guard(message.tool_call_id or "")
        if message.name:
            row["name"] = guard(message.name)
    return row


def template_tool(tool: Tool, guard: Guard) -> dict[str, Any]:
    """A tool in the form for chat templates. A custom tool's text becomes one string argument, `input`."""
    parameters = tool.parameters
    if tool.kind == "custom":
        parameters = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
    function = {"name": tool.name, "description": tool.description, "parameters": parameters or {}}
    return {"type": "function", "function": _guarded(function, guard)}


def parsed_call(call: Any) -> ParsedCall:
    """Converts a call of the `renderers` package. A call with a name and an arguments object is usable, even if a value
    does not have its declared type."""
    return sampled_call(
        call.name, call.arguments, call.status.value == "ok" or isinstance(call.arguments, dict), call.raw
    )


def sampled_call(name: object, arguments: object, ok: bool, raw: str) -> ParsedCall:
    """A call from sampled JSON; None for `arguments` means none. It is `ok` only if a client can send it back: with a
    name of at most `MAX_NAME` characters that UTF-8 can encode, and an arguments object as in `json_calls`."""
    valid_name = name if isinstance(name, str) and len(name) <= MAX_NAME and _is_encodable(name) else ""
    value = {} if arguments is None else arguments
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    if not is_arguments(text):
        return ParsedCall(valid_name, "", False, raw)
    return ParsedCall(valid_name, text, ok and bool(valid_name), raw)


def _make(family: str, tokenizer: HubTokenizer, *, thinking: bool, level: str) -> Any:
    """A renderer of the package. Raises `ConfigError` if the family has no such effort level."""
    import renderers as package

    try:
        config = package.config_from_name(family)
    except (KeyError, ValueError) as error:
        raise ConfigError(f"no renderer family {family!r}: {error}") from error
    update: dict[str, Any] = {"thinking_retention": "all"}
    if "enable_thinking" in type(config).model_fields:
        update["enable_thinking"] = thinking
    if level:
        update["reasoning_effort"] = level
    try:
        config = type(config)(**update)
        return package.create_renderer(tokenizer, config)
    except (AssertionError, ValueError, KeyError, RuntimeError) as error:
        message = f"tokenizer {tokenizer.name_or_path!r} does not fit the renderer family {family!r}: {error}"
        raise ConfigError(message) from error


def _arguments(text: str) -> Any:
    """Arguments in the form for templates: a dict if the text is a JSON object, else the text."""
    try:
        value = json.loads(text or "{}")
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, dict) else text


def _guarded(value: Any, guard: Guard) -> Any:
    if isinstance(value, str):
        return guard(value)
    if isinstance(value, dict):
        return {guard(key): _guarded(item, guard) for key, item in value.items()}
    if isinstance(value, list):
        return [_guarded(item, guard) for item in value]
    return value


def _is_encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
