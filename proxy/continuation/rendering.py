"""Messages to token ids and back, for one model family.

`FamilyRenderer` stands on the `renderers` package. `render` makes a whole prompt; `bridge` makes the next prompt out
of the tokens that the engine saw and sampled plus the ids of only the new messages, and refuses (None) where that
can't be proven for the family.
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
from rolltap.proxy.continuation.json_calls import HERMES, read_call
from rolltap.proxy.continuation.tokenizer import HubTokenizer
from rolltap.proxy.conversation.chat import Image, Message, Text, Tool
from rolltap.proxy.conversation.effort import Efforts, find_efforts

KNOWN_TOOLS = 256
"""Lists of tools whose form for the family is kept."""

PROBE = (Message("user", (Text("question"),)),)
"""Rendered to find out what changes a prompt."""

Guard = Callable[[str], str]
HistoryThinking = Literal["tool_cycle", "keep"]


@dataclass(frozen=True, slots=True)
class ParsedCall:
    """A tool call as sampled. `arguments` is JSON text; `ok` is False where the block could not be read.

    One that has `begun` is a call all the same, with `arguments` as far as they go (`json_calls`): `complete`, or not.
    """

    name: str
    arguments: str
    ok: bool
    raw: str
    begun: bool = False
    complete: bool = False

    def as_begun(self, head: re.Pattern[str] | None) -> ParsedCall:
        """The call in its sampled text, where the family's calls begin with `head` and this one does."""
        begun = read_call(head, self.raw) if head is not None else None
        if begun is None or begun.name is None:
            return self
        return replace(self, name=begun.name, arguments=begun.arguments, begun=True, complete=begun.complete)


@dataclass(frozen=True, slots=True)
class ParsedReply:
    """An assistant turn read from its token ids."""

    text: str
    reasoning: str
    tool_calls: tuple[ParsedCall, ...]


@dataclass(frozen=True, slots=True)
class Markers:
    """Token ids that separate a family's channels in the sampled stream; None where the family has no such token.

    `beginnings` are those of replies that are tool calls in plain text; None where it is not known how they begin.
    `call_head` is what stands between a call's opening token and its arguments, where these are JSON.
    """

    reasoning_open: int | None
    reasoning_close: int | None
    tool_open: int | None
    tool_close: int | None
    beginnings: tuple[str, ...] | None = ()
    call_head: re.Pattern[str] | None = None

    def opens_in_reasoning(self, prompt: Sequence[int]) -> bool:
        """Whether the generation prompt itself opened a thinking block."""
        for token in reversed(prompt[-64:]):
            if token == self.reasoning_open:
                return True
            if token == self.reasoning_close:
                return False
        return False


class TokenRenderer(Protocol):
    """What continuation and the reply parser ask of a model family."""

    tokenizer: HubTokenizer
    stop_token_ids: tuple[int, ...]
    markers: Markers
    efforts: Efforts
    switches_thinking: bool
    """Whether a prompt that asks for thinking differs from one that asks for none."""

    def at_effort(self, level: str) -> TokenRenderer:
        """A renderer whose prompts say `level`, one of the family's `efforts`."""
        ...

    def render(self, messages: Sequence[Message], tools: Sequence[Tool], *, thinking: bool) -> list[int]:
        """A whole prompt, the generation prompt included."""
        ...

    def bridge(
        self, prompt: list[int], output: list[int], new: Sequence[Message], tools: Sequence[Tool], *, thinking: bool
    ) -> list[int] | None:
        """The next prompt, beginning with `prompt` and `output`; None where it can't be proven."""
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
        """Like `bridge` for new messages that hold assistant turns nobody sampled here (edited or foreign ones).

        `messages` is the whole request, of which the first `covered` are in `prompt` and `output`.
        """
        ...

    def parse(self, output: Sequence[int], prompt: Sequence[int], tools: Sequence[Tool]) -> ParsedReply: ...


class FamilyRenderer:
    """A family that the `renderers` package knows, by its name there ("qwen3", "glm-4.5", "gpt-oss", ...)."""

    def __init__(self, family: str, tokenizer: HubTokenizer) -> None:
        try:
            import renderers
        except ImportError as error:
            raise ConfigError(f"token mode needs the tokenizer packages: {install_line('tokens')}") from error
        self.tokenizer = tokenizer
        self.family = family
        self._by_thinking = self._made("")
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
        renderer._by_thinking = self._made(level)
        return renderer

    def render(self, messages: Sequence[Message], tools: Sequence[Tool], *, thinking: bool) -> list[int]:
        rows = [self._row(message) for message in messages]
        specs = self._specs(tools)
        try:
            return self._by_thinking[thinking].render_ids(rows, tools=specs, add_generation_prompt=True)
        except (ValueError, KeyError) as error:
            raise InvalidRequest(f"{self.family} can't render these messages: {error}") from error

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
            # A turn may end while it thinks, which the package does not bridge. What follows a turn's end is the same.
            closed = [*prompt, closing, output[-1]]
            rendered = family.bridge_to_next_turn(prompt, closed[len(prompt) :], rows, tools=specs)
        except (ValueError, KeyError):
            return None  # the whole render that follows says what is wrong with them
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
        if self.markers.beginnings and not tools:  # in plain text nothing but the tools tells a call from an object
            content_ids = [token for token in output if token not in self.stop_token_ids]
            return ParsedReply(self.tokenizer.decode(content_ids).strip(), "", ())
        parsed = self._by_thinking[True].parse_response(
            list(output), tools=self._specs(tools), prompt_ids=list(prompt[-64:])
        )
        return ParsedReply(
            text=parsed.content,
            reasoning=parsed.reasoning_content or "",
            tool_calls=tuple(parsed_call(call).as_begun(self.markers.call_head) for call in parsed.tool_calls),
        )

    def _made(self, level: str) -> dict[bool, Any]:
        """The package's renderers, by whether they ask for thinking."""
        return {on: _make(self.family, self.tokenizer, thinking=on, level=level) for on in (True, False)}

    def _probe(self, level: str) -> tuple[int, ...] | None:
        try:
            return tuple(self.at_effort(level).render(PROBE, (), thinking=True))
        except ConfigError:
            return None

    def _find_guard(self) -> Guard:
        """What keeps special tokens out of text: the tokenizer's guard, or nothing where the family's own encoder takes
        every text for text (Harmony's does) and would leave the guard's marks in it."""

        def specials(text: str) -> list[int]:
            rows: Any = [{"role": "user", "content": text}]
            ids = self._by_thinking[True].render_ids(rows, add_generation_prompt=True)
            return [token for token in ids if token in self.tokenizer.special_ids]

        literal, nothing = self.tokenizer.token(self.stop_token_ids[0]), "question"
        return str if specials(literal) == specials(nothing) else self.tokenizer.guard

    def _reads_hermes(self) -> bool:
        """Whether the family's parser takes a Hermes block for the call that it is."""
        block = '<tool_call>\n{"name": "look", "arguments": {"name": "x"}}\n</tool_call>'
        calls = self.parse(self.tokenizer.encode(block), [], ()).tool_calls
        return [(call.name, call.arguments, call.ok) for call in calls] == [("look", '{"name": "x"}', True)]

    def _specs(self, tools: Sequence[Tool]) -> list[Any] | None:
        """The tools as the family renders them. Dialects give the same tools as the same object, so it is the key."""
        entry = self._known_specs.get(id(tools))
        if entry is not None:
            return entry[1]
        specs = [template_tool(tool, self._guard) for tool in tools] or None
        self._known_specs[id(tools)] = tools, specs  # holding the tools keeps their id theirs
        return specs

    def _row(self, message: Message) -> Any:
        return template_row(message, self._guard)


def template_row(message: Message, guard: Guard) -> dict[str, Any]:
    """A message as chat templates want it, with every text guarded against special-token literals."""
    if any(isinstance(part, Image) for part in message.parts):
        raise InvalidRequest("this policy's model takes no images")
    row: dict[str, Any] = {
        "role": "system" if message.role == "developer" else message.role,
        "content": guard(message.text),
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
    """A tool as chat templates want it. A custom tool's free text becomes one string argument, `input`."""
    parameters = tool.parameters
    if tool.kind == "custom":
        parameters = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
    function = {"name": tool.name, "description": tool.description, "parameters": parameters or {}}
    return {"type": "function", "function": _guarded(function, guard)}


def parsed_call(call: Any) -> ParsedCall:
    """A call as the `renderers` package parsed it. One with a name and an object of arguments is usable as it is, also
    where a value did not have its declared type."""
    return sampled_call(
        call.name, call.arguments, call.status.value == "ok" or isinstance(call.arguments, dict), call.raw
    )


def sampled_call(name: object, arguments: object, ok: bool, raw: str) -> ParsedCall:
    """A call of what the model wrote as JSON. Without a name that a client can be sent, or with arguments that are text
    and no JSON, it is none (not `ok`)."""
    named = name if isinstance(name, str) and _is_encodable(name) else ""
    text = arguments if isinstance(arguments, str) else json.dumps(arguments or {}, ensure_ascii=False)
    try:
        return ParsedCall(named, _encodable(text), ok and bool(named), raw)
    except ValueError:
        return ParsedCall(named, "", False, raw)


def _make(family: str, tokenizer: HubTokenizer, *, thinking: bool, level: str) -> Any:
    """`ConfigError` where the family has no such level."""
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
    """Arguments as templates want them: an object where the text is one, else the text."""
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


def _encodable(text: str) -> str:
    """JSON text without lone surrogates, which a model can write as escapes and UTF-8 can't carry. `ValueError` for
    other text."""
    value = json.loads(text)
    return text if _is_encodable(text) else json.dumps(value)


def _is_encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
