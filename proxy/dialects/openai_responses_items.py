"""OpenAI Responses: parses `instructions` and entries of `input` into canonical messages.

An assistant turn is several items (reasoning, message, calls). Each is parsed to a `ContentPiece`; `join_pieces` makes
one message of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from rolltap.proxy.continuation.handles import PREFIX
from rolltap.proxy.conversation.chat import (
    Message,
    Part,
    Reasoning,
    Text,
    ToolCall,
)
from rolltap.proxy.dialects import openai_responses_wire as wire
from rolltap.proxy.dialects.arguments import check_arguments
from rolltap.proxy.dialects.json_request import decode, invalid
from rolltap.proxy.dialects.media import attachment, file_type, image_part
from rolltap.proxy.dialects.openai_responses_compaction import ITEM_PREFIX, compaction
from rolltap.proxy.dialects.openai_responses_tools import ResponsesToolSet, parse_tools, tool_name

REASONING, TEXT, CALL = range(3)

ENCRYPTED = "gAAAA"
"""The beginning of what the vendor encrypted. Other "encrypted" text is our model's: an argument that it wrote and the
harness takes for encrypted."""

UNREADABLE = "[encrypted text, which this model can't read]"
"""Stands for text that the vendor encrypted."""


class ContentPiece(msgspec.Struct, frozen=True):
    """An item of an assistant turn. The order is reasoning, text, calls; text may also follow a call."""

    rank: int
    parts: tuple[Part, ...] = ()
    call: ToolCall | None = None
    handle: str | None = None
    recall: bool = False

    @property
    def is_empty(self) -> bool:
        """True for a message without text, or reasoning without text, that is not a reply of ours, which may have none.

        Some clients put these between other items; they are skipped.
        """
        handles = [self.handle, *(part.handle for part in self.parts if isinstance(part, Reasoning))]
        is_ours = any(PREFIX in (handle or "") for handle in handles)
        has_text = any(not isinstance(part, Reasoning) or part.text for part in self.parts)
        return self.rank != CALL and not has_text and not self.recall and not is_ours


@dataclass(frozen=True, slots=True)
class EffortUpdate:
    """Another effort for the turns that follow."""

    effort: str | bool | None


ParsedItem = Message | ContentPiece | ResponsesToolSet | EffortUpdate | wire.CompactionTrigger


def parse_instructions(raw: bytes) -> Message:
    return Message("system", (Text(decode(raw, str, "instructions")),))


def parse_item(raw: bytes) -> ParsedItem:
    """Parses an entry of `input`."""
    kind: Any = wire.Item if decode(raw, wire.ItemKind).type is not None else wire.MessageItem
    match decode(raw, kind):
        case wire.MessageItem() as item if item.role == "assistant":
            return ContentPiece(TEXT, _parts(item.content, "content"), handle=item.id)
        case wire.MessageItem() as item:
            takes: Any = "media" if item.role == "user" else "text"
            return Message(item.role, _parts(item.content, "content", takes=takes))
        case wire.ReasoningItem() as item:
            text_parts = item.content or item.summary
            text = "\n\n".join(part.text for part in text_parts)
            return ContentPiece(REASONING, (Reasoning(text, item.encrypted_content or item.id),), handle=item.id)
        case wire.FunctionCallItem() as item:
            arguments = check_arguments(item.arguments, "arguments")
            return ContentPiece(CALL, call=ToolCall(item.call_id, tool_name(item.namespace, item.name), arguments))
        case wire.CustomCallItem() as item:
            call = ToolCall(item.call_id, tool_name(item.namespace, item.name), item.input, "custom")
            return ContentPiece(CALL, call=call)
        case wire.FunctionOutputItem() | wire.CustomOutputItem() as item:
            return Message("tool", _parts(item.output, "output", takes="results"), tool_call_id=item.call_id)
        case wire.AdditionalToolsItem() as item:
            return parse_tools(item.tools, "tools")
        case wire.AgentMessageItem() as item:
            return Message("user", _parts(item.content, "content", takes="media"))
        case wire.ConfigurationUpdate() as item:
            return EffortUpdate(item.reasoning.effort if item.reasoning is not None else None)
        case wire.CompactionItem() | wire.CompactionSummaryItem() as item:
            return compaction(item.encrypted_content or item.id or "")
        case wire.CompactionTrigger() as item:
            return item
        case wire.ItemReference() as item if item.id.startswith(ITEM_PREFIX):
            return compaction(item.id)
        case wire.ItemReference() as item:
            rank = {"rs": REASONING, "msg": TEXT}.get(item.id.partition("_")[0], CALL)
            return ContentPiece(rank, handle=item.id, recall=True)
    raise invalid("type", "this item is not supported")


def _parts(
    content: str | list[wire.ContentPart], where: str, *, takes: Literal["text", "media", "results"] = "text"
) -> tuple[Part, ...]:
    """Content as parts. A message takes text only, or a user's media, or what a tool returned."""
    if isinstance(content, str):
        return (Text(content),) if content else ()
    out: list[Part] = []
    for index, part in enumerate(content):
        place = f"{where}[{index}]"
        match part:
            case wire.InputText(text) | wire.OutputText(text) | wire.PlainText(text) | wire.Refusal(text):
                out.append(Text(text))
            case wire.EncryptedContent(encrypted_content=data):
                out.append(Text(UNREADABLE if data.startswith(ENCRYPTED) or not data else data))
            case _ if takes == "text":
                raise invalid(f"{place}.type", "this message takes no images and files")
            case wire.InputImage():
                out.append(_image(part, place, from_tool=takes == "results"))
            case wire.InputFile():
                out.append(attachment(file_type(part.filename or part.file_url, part.file_data), place))
            case wire.InputAudio(input_audio=audio):
                out.append(attachment(f"audio/{audio.format or 'unknown'}", place))
    return tuple(out)


def _image(part: wire.InputImage, where: str, *, from_tool: bool) -> Part:
    if part.image_url is not None and part.file_id is None:
        return image_part(part.image_url, f"{where}.image_url", detail=part.detail, from_tool=from_tool)
    if from_tool:
        return attachment("image/unknown", where)
    raise invalid(f"{where}.image_url", "this field is required; file_id is not supported")


def follows(before: ContentPiece, piece: ContentPiece) -> bool:
    """True if `piece` continues the turn of `before`. Reasoning begins a turn; text may follow a call."""
    return piece.rank > before.rank or (before.rank == CALL and piece.rank != REASONING)


def join_pieces(turn: tuple[ContentPiece, ...]) -> Message:
    """Joins the items of an assistant turn into one message. One that names recorded items has the items beside them,
    too."""
    recalled = next((piece.handle for piece in turn if piece.recall), None)
    handle = recalled or next((piece.handle for piece in turn if piece.handle), None)
    parts = tuple(part for piece in turn for part in piece.parts)
    calls = tuple(piece.call for piece in turn if piece.call is not None)
    return Message("assistant", parts, calls, handle=handle, recall=recalled is not None)
