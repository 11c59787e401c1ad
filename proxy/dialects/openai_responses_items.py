"""OpenAI Responses: parses `instructions` and entries of `input` into canonical messages.

An assistant turn is several items (reasoning, message, calls). Each is parsed to a `ContentPiece`; `join_pieces` makes
one message of them.
"""

from __future__ import annotations

from typing import Any

import msgspec

from rolltap.proxy.continuation.handles import PREFIX
from rolltap.proxy.conversation.chat import (
    Image,
    Message,
    Part,
    Reasoning,
    Text,
    ToolCall,
)
from rolltap.proxy.dialects import openai_responses_wire as wire
from rolltap.proxy.dialects.arguments import check_arguments
from rolltap.proxy.dialects.json_request import check_image, decode, invalid
from rolltap.proxy.dialects.openai_responses_tools import ResponsesToolSet, parse_tools, tool_name

REASONING, TEXT, CALL = range(3)


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


ParsedItem = Message | ContentPiece | ResponsesToolSet


def parse_instructions(raw: bytes) -> Message:
    return Message("system", (Text(decode(raw, str, "instructions")),))


def parse_item(raw: bytes) -> ParsedItem:
    """Parses an entry of `input`."""
    kind: Any = wire.Item if decode(raw, wire.ItemKind).type is not None else wire.MessageItem
    match decode(raw, kind):
        case wire.MessageItem() as item if item.role == "assistant":
            return ContentPiece(TEXT, _parts(item.content, "content", images=False), handle=item.id)
        case wire.MessageItem() as item:
            return Message(item.role, _parts(item.content, "content", images=item.role == "user"))
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
            return Message("tool", _parts(item.output, "output"), tool_call_id=item.call_id)
        case wire.AdditionalToolsItem() as item:
            return parse_tools(item.tools, "tools")
        case wire.AgentMessageItem() as item:
            return Message("user", _parts(item.content, "content"))
        case wire.ItemReference() as item:
            rank = {"rs": REASONING, "msg": TEXT}.get(item.id.partition("_")[0], CALL)
            return ContentPiece(rank, handle=item.id, recall=True)
    raise invalid("type", "this item is not supported")


def _parts(content: str | list[wire.ContentPart], where: str, *, images: bool = True) -> tuple[Part, ...]:
    if isinstance(content, str):
        return (Text(content),) if content else ()
    out: list[Part] = []
    for index, part in enumerate(content):
        match part:
            case wire.InputText(text) | wire.OutputText(text) | wire.PlainText(text) | wire.Refusal(text):
                out.append(Text(text))
            case wire.InputImage():
                if not images:
                    raise invalid(f"{where}[{index}].type", "this message takes no images")
                if part.file_id is not None or part.image_url is None:
                    raise invalid(f"{where}[{index}].image_url", "this field is required; file_id is not supported")
                out.append(Image(check_image(part.image_url, f"{where}[{index}].image_url"), part.detail))
    return tuple(out)


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
