"""Reads the pieces of an OpenAI-style reply as servers write them, which is not always as OpenAI's types say.

Servers and gateways leave out a tool call's index or give every call the index 0, send arguments as an object, content
as a list of parts, nulls where a list or an object is due, the old `function_call`, and thinking under several names.
Chat upstreams and the readers of vendors' replies share these types, so a reply has one meaning, streamed or whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec

from rolltap.decoding import from_json
from rolltap.protocols.conversation import Usage

PART_TEXTS = ("text", "thinking", "reasoning", "refusal", "content")
"""The fields of a part that hold its text."""

DETAIL_TEXTS = ("text", "summary", "data")
"""The fields of a block of thinking that arrive in pieces."""

ABSENT = msgspec.Raw()  # with the type `Raw | None`, msgspec accepts only null


class FunctionPiece(msgspec.Struct):
    """A function's name and arguments (of a custom tool: its `input`), or a part of them."""

    name: str | None = None
    arguments: msgspec.Raw = ABSENT
    input: str | None = None


class CallPiece(msgspec.Struct):
    """A tool call, or a part of it. `extra_content` is what Google's servers want back with it: a thought signature."""

    index: int | None = None
    id: str | int | None = None
    function: FunctionPiece | None = None
    custom: FunctionPiece | None = None
    extra_content: dict[str, Any] | None = None


class MessagePiece(msgspec.Struct):
    """A delta, or the whole message of a reply that is not streamed."""

    content: Any = None
    refusal: str | None = None
    reasoning: Any = None
    reasoning_content: Any = None
    thinking: Any = None
    reasoning_details: list[dict[str, Any] | None] | None = None
    tool_calls: list[CallPiece | None] | None = None
    function_call: FunctionPiece | None = None

    def texts(self) -> tuple[str, str]:
        """The thinking and the text. Of several names for the thinking the first that has any counts."""
        own, text = _channels(self.content)
        named = next((value for value in (self.reasoning, self.reasoning_content, self.thinking) if value), None)
        blocks = [block.get("text") or block.get("summary") for block in self.details()]
        thought = "".join(_channels(named)) or own or "".join(block for block in blocks if isinstance(block, str))
        return thought, text or self.refusal or ""

    def details(self) -> list[dict[str, Any]]:
        """The blocks of the thinking, or parts of them, which OpenRouter wants back."""
        return [block for block in self.reasoning_details or () if block is not None]

    def call_pieces(self) -> Iterable[CallPiece]:
        """The pieces of tool calls; an old `function_call` is one without index and id."""
        yield from (piece for piece in self.tool_calls or () if piece is not None)
        if self.function_call is not None:
            yield CallPiece(function=self.function_call)


def _channels(content: Any) -> tuple[str, str]:
    """The thinking and the text in a content: a string, or a list of strings and parts."""
    if content is None or isinstance(content, str):
        return "", content or ""
    if isinstance(content, dict):
        content = [content]
    if not isinstance(content, list):
        raise msgspec.ValidationError(f"a content is {type(content).__name__}, not text or parts")
    thinking, text = "", ""
    for part in content:
        if not isinstance(part, dict):
            text += "".join(_channels(part))
            continue
        value = next((part[name] for name in PART_TEXTS if name in part), None)
        if value is None:
            raise msgspec.ValidationError(f"a content has a part of type {part.get('type')!r}, which is no text")
        if str(part.get("type")).partition(".")[0] in ("thinking", "reasoning", "reasoning_text"):
            thinking += "".join(_channels(value))
        else:
            text += "".join(_channels(value))
    return thinking, text


def join_details(blocks: list[dict[str, Any]], pieces: Iterable[Mapping[str, Any]]) -> None:
    """Adds the pieces of a stream to the blocks. A piece of the last block's type and index continues it."""
    for piece in pieces:
        last = blocks[-1] if blocks else {}
        if not last or any(last.get(name) != piece.get(name) for name in ("type", "index")):
            blocks.append(dict(piece))
            continue
        for name, value in piece.items():
            if name in DETAIL_TEXTS and isinstance(value, str) and isinstance(last.get(name), str):
                last[name] += value
            elif value is not None:
                last[name] = value


class ReplyChoice(msgspec.Struct):
    """A choice of an event (`delta`), or of a reply that is not streamed (`message`)."""

    index: int | None = None
    delta: MessagePiece | None = None
    message: MessagePiece | None = None
    finish_reason: str | None = None


class CallDelta(NamedTuple):
    """The next piece of the call at `position`. Its first piece has the name, and the id if there is one."""

    position: int
    name: str
    id: str
    arguments: str
    is_custom: bool
    extra: dict[str, Any]


@dataclass(slots=True)
class _Call:
    index: int | None
    id: str
    is_custom: bool
    name: str = ""
    arguments: list[str] = field(default_factory=list)
    extra: dict[str, Any] = field(default_factory=dict)
    position: int | None = None  # None: its name has not come, so nobody has seen it

    @property
    def is_complete(self) -> bool:
        return is_object("".join(self.arguments))

    def is_repeated_by(self, piece: CallPiece, name: str, arguments: str) -> bool:
        """Whether the piece is the whole call once more, as some servers end a call."""
        repeats = piece.id is not None and name == self.name
        return repeats and "".join(self.arguments) == arguments and is_object(arguments)


class CallAssembler:
    """Decides which tool call a piece belongs to, and puts the pieces in order.

    Another id is another call, whatever its index; the same id, or none, continues. A piece without an id that repeats
    a name where the arguments are complete, or that has another name, begins a call. A call is given out when its name
    has come.
    """

    def __init__(self) -> None:
        self._calls: list[_Call] = []
        self._named = 0

    @property
    def has_nameless(self) -> bool:
        """Whether a call never got a name, so that nobody has seen it."""
        return self._named < len(self._calls)

    def take(self, pieces: Iterable[CallPiece], *, whole: bool) -> Sequence[CallDelta]:
        """The pieces that may be given out. Each piece of a `whole` message is a call of its own."""
        deltas: list[CallDelta] = []
        for piece in pieces:
            function = piece.function or piece.custom or FunctionPiece()
            name, arguments = function.name or "", function.input or arguments_text(function.arguments)
            call_id = "" if piece.id is None else str(piece.id)
            call = None if whole else self._continued(piece.index, call_id, name)
            if call is None:
                call = _Call(piece.index, call_id, piece.custom is not None)
                self._calls.append(call)
            elif call.is_repeated_by(piece, name, arguments):
                continue
            call.id = call.id or call_id
            if piece.extra_content:
                call.extra["extra_content"] = piece.extra_content
            begins = call.position is None and bool(name or call.name)
            call.name = call.name or name
            call.arguments.append(arguments)
            if begins:
                call.position, self._named = self._named, self._named + 1
                text = "".join(call.arguments)
                deltas.append(CallDelta(call.position, call.name, call.id, text, call.is_custom, call.extra))
            elif call.position is not None:
                deltas.append(CallDelta(call.position, "", "", arguments, call.is_custom, call.extra))
        return deltas

    def _continued(self, index: int | None, call_id: str, name: str) -> _Call | None:
        """The call that a piece continues; None if it begins one."""
        same_index = [call for call in self._calls if index is None or call.index is None or call.index == index]
        if call_id:
            by_id = next((call for call in reversed(same_index) if call.id == call_id), None)
            if by_id is not None:
                return by_id
        if not same_index:
            return None
        last = same_index[-1]
        if call_id and last.id:
            # A call has a name. Some servers make up a new id for every delta.
            return None if name or index is None else last
        if not name or not last.name:
            return last
        return None if name != last.name or last.is_complete else last


def arguments_text(raw: msgspec.Raw) -> str:
    """The arguments as text: the text itself, or the JSON that stands in its place."""
    data = bytes(raw)
    if not data or data == b"null":
        return ""
    return from_json(data, str) if data.startswith(b'"') else data.decode()


def is_object(arguments: str) -> bool:
    """Whether arguments are a complete JSON object."""
    try:
        from_json(arguments, dict[str, msgspec.Raw])
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return False
    return True


class PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class OutputDetails(msgspec.Struct):
    reasoning_tokens: int | None = None


class OpenAIUsage(msgspec.Struct):
    """Token counts. None: the server did not count."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: PromptDetails | None = None
    completion_tokens_details: OutputDetails | None = None

    def usage(self) -> Usage:
        cached = self.prompt_tokens_details.cached_tokens if self.prompt_tokens_details else 0
        reasoning = self.completion_tokens_details.reasoning_tokens if self.completion_tokens_details else 0
        return Usage(self.prompt_tokens or 0, self.completion_tokens or 0, cached or 0, reasoning or 0)
