"""What recorded calls said, as messages in OpenAI's chat form, whatever protocol they came in."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from rolltap.calllog.facts import CallCompletion, CallRow, RequestParts, all_injected, extend_items
from rolltap.decoding import from_json
from rolltap.errors import RecordCorrupt
from rolltap.protocols.base import RecordedCall
from rolltap.protocols.conversation import ChatRequest, Image, Message, Text, Tool
from rolltap.reading.decoded import parse_call, recalled
from rolltap.reconstructor.exporters.base import CallText
from rolltap.types import InjectedMessage


async def call_texts(rows: Sequence[CallRow]) -> dict[str, CallText]:
    """What each call of a session said, by its id. A request that can't be read has no text, a reply is an error.

    Messages that calls share are the same objects, so a long session costs its messages once.
    """
    texts: dict[str, CallText] = {}
    items: dict[str, tuple[bytes, ...]] = {}
    calls: dict[str, tuple[ChatRequest, Message | None]] = {}
    injected: dict[str, tuple[InjectedMessage, ...]] = {}

    async def find(call_id: str) -> RecordedCall | None:
        request, reply = calls.get(call_id, (None, None))
        return RecordedCall(request, reply) if request is not None and reply is not None else None

    plain = _Plain()
    for row in rows:
        intent, done = row.intent, row.completion
        items[intent.id] = extend_items(intent.id, items.get(intent.parent_id or "", ()), intent.request)
        injected[intent.id] = all_injected(intent, injected.get(intent.parent_id or "", ()))
        whole = RequestParts(intent.request.head, items[intent.id], 0, intent.request.fixed)
        chat = parse_call(intent, whole, calls)
        if chat is None:
            continue
        chat = await recalled(chat, find)
        reply = _reply(done) if done is not None and done.message else None
        calls[intent.id] = (chat, reply)
        texts[intent.id] = CallText(
            messages=[plain.message(message) for message in chat.messages],
            reply=plain.message(reply) if reply is not None else None,
            tools=plain.tools(chat.tools),
            created_at=intent.created_at,
            finished_at=done.finished_at if done is not None else None,
            dialect=intent.dialect,
            sampling=intent.sampling_sent,
            usage=done.usage if done is not None else {},
            injected=[(each.message_index, plain.injected(each)) for each in injected[intent.id]],
        )
    return texts


def _reply(done: CallCompletion) -> Message:
    """The call's reply. Raises `RecordCorrupt` if it can't be read: then its session is left out of a dataset."""
    try:
        return from_json(done.message, Message)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise RecordCorrupt(f"call {done.call_id}: its reply can't be read: {error}") from error


class _Plain:
    """Messages and tools in OpenAI's chat form, one object for each of the dialect's."""

    def __init__(self) -> None:
        self._messages: dict[int, tuple[Message, dict[str, Any]]] = {}
        self._injected: dict[tuple[int, int], dict[str, Any]] = {}
        self._tools: dict[int, tuple[Sequence[Tool], list[dict[str, Any]]]] = {}

    def message(self, message: Message) -> dict[str, Any]:
        known = self._messages.get(id(message))
        if known is None:
            known = self._messages[id(message)] = (message, plain_message(message))
        return known[1]

    def injected(self, message: InjectedMessage) -> dict[str, Any]:
        return self._injected.setdefault((message.rule, message.place), {"role": message.role, "content": message.text})

    def tools(self, tools: Sequence[Tool]) -> list[dict[str, Any]]:
        known = self._tools.get(id(tools))
        if known is None:
            known = self._tools[id(tools)] = (tools, [plain_tool(tool) for tool in tools])
        return known[1]


def plain_message(message: Message) -> dict[str, Any]:
    """A message as OpenAI's chat form has it; reasoning as `reasoning_content`."""
    plain: dict[str, Any] = {"role": "system" if message.role == "developer" else message.role}
    plain["content"] = list(_parts(message)) if any(isinstance(p, Image) for p in message.parts) else message.text
    if message.reasoning:
        plain["reasoning_content"] = message.reasoning
    if message.tool_calls:
        plain["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": _arguments(call.arguments)},
            }
            for call in message.tool_calls
        ]
    for name in ("tool_call_id", "name"):
        if value := getattr(message, name):
            plain[name] = value
    return plain


def plain_tool(tool: Tool) -> dict[str, Any]:
    """A tool's schema; a tool of free text takes one text called `input`."""
    free = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
    parameters = tool.parameters if tool.parameters is not None else free
    function = {"name": tool.name, "description": tool.description, "parameters": parameters}
    return {"type": "function", "function": function}


def _parts(message: Message) -> Iterator[dict[str, Any]]:
    for part in message.parts:
        if isinstance(part, Text):
            yield {"type": "text", "text": part.text}
        elif isinstance(part, Image):
            yield {"type": "image_url", "image_url": {"url": part.url}}


def _arguments(text: str) -> Any:
    """The arguments as an object; what is not a JSON object stays the text that was sampled.

    Also with a number that JSON has no form of: NaN, infinity, or 1e400, which is one to us. It would become null.
    """
    try:
        value = json.loads(text, parse_constant=_finite, parse_float=_finite)
    except ValueError:
        return text
    return value if isinstance(value, dict) else text


def _finite(text: str) -> float:
    if not math.isfinite(value := float(text)):
        raise ValueError(f"{text} is not finite")
    return value
