"""OpenAI Responses: `POST /v1/responses`, and `GET /v1/responses/{id}`, which reads a reply again.

An assistant turn comes as several items (reasoning, message, calls); consecutive ones are one canonical message. What
a client echoes are item ids, `encrypted_content` and `call_id`s, so that is where handles travel.

Tools. `function` and `custom` tools are the client's own. A `namespace` holds such tools: the model sees them as
`namespace.name` (`functions`, the vendor's default namespace, as the bare name), and calls are split again on their
way out. Tools may also come inside `input` (`additional_tools`). Tools of the vendor's own servers that harnesses
declare by default (`DROPPED_TOOLS`) are left out of the prompt; all others are refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from rolltap.errors import RolltapError
from rolltap.proxy.conversation.chat import (
    ChatRequest,
    Image,
    Message,
    Part,
    Reasoning,
    ReplyEnded,
    ReplyStarted,
    Sampling,
    Text,
    ToolCall,
)
from rolltap.proxy.dialects import openai_responses_wire as wire
from rolltap.proxy.dialects.arguments import check_arguments
from rolltap.proxy.dialects.base import Route, WireReply, WireRequest
from rolltap.proxy.dialects.hints import read_hints
from rolltap.proxy.dialects.history import Linker
from rolltap.proxy.dialects.items import DERIVED_BYTES, ItemCache, Kept, message_bytes
from rolltap.proxy.dialects.openai_common import model_list, openai_error, openai_key
from rolltap.proxy.dialects.openai_responses_reply import ResponsesWriter, response_body
from rolltap.proxy.dialects.openai_responses_tools import ToolSet, parse_tools, tool_choice, tool_name
from rolltap.proxy.dialects.reading import Cut, check_depth, check_image, cut, decode, invalid

APART = ("input", "instructions", "tools")
REASONING, TEXT, CALL = range(3)


class Piece(msgspec.Struct, frozen=True):
    """An item of an assistant turn, which comes as reasoning, text and calls; text may follow a call."""

    rank: int
    parts: tuple[Part, ...] = ()
    call: ToolCall | None = None
    handle: str | None = None
    recall: bool = False


ParsedItem = Message | Piece | ToolSet


class OpenAIResponses:
    """The dialect of Codex, of the Agents SDK, and of others where they are told so."""

    name = "openai_responses"
    items_field = "input"
    field_names: Mapping[str, str] = {"messages": "input", "response_format": "text.format", "logprobs": "include"}
    routes: Sequence[Route] = (
        Route("POST", "/v1/responses", "generate"),
        Route("GET", "/v1/responses/{reply}", "retrieve"),
    )

    def __init__(self) -> None:
        self._items: ItemCache[ParsedItem] = ItemCache(parse_item)
        self._tools = ItemCache(lambda raw: parse_tools(decode(raw, list[wire.WireTool], "tools"), "tools"))
        self._instructions = ItemCache(_parse_instructions)
        self._turns: Kept[tuple[Piece, ...], Message] = Kept(DERIVED_BYTES, message_bytes)
        self._linker = Linker()

    def key(self, request: WireRequest) -> str | None:
        return openai_key(request.headers)

    def parse(self, request: WireRequest) -> ChatRequest:
        body = cut(request.body, APART)
        head = decode(body.head, wire.Head)
        items, parsed = self._items.all(_input(body), "input")
        tools = self._tools.get(body.fields["tools"])[1] if "tools" in body.fields else ToolSet()
        messages, places, tools = self._messages(parsed, tools)
        if "instructions" in body.fields:
            messages.insert(0, self._instructions.get(body.fields["instructions"])[1])
            places.insert(0, "instructions")
        if not messages:
            raise invalid("input", "at least one item is required")
        recalls = any(message.recall for message in messages)
        whole = head.previous_response_id is None and not recalls
        return ChatRequest(
            dialect=self.name,
            model=head.model,
            messages=self._linker.link(messages, places.__getitem__, whole=whole),
            tools=tools.tools,
            tool_choice=tool_choice(head.tool_choice, head.parallel_tool_calls, tools),
            sampling=sampling(head),
            stream=bool(head.stream),
            hints=read_hints(request.headers, cache_key=head.prompt_cache_key),
            previous=head.previous_response_id,
            recalls=recalls,
            stored=head.store is not False,
            head=body.head,
            items=items,
            fixed=body.fixed("instructions", "tools"),
            wire={"head": head, "namespaces": tools.namespaces},
        )

    def _messages(self, parsed: Sequence[ParsedItem], tools: ToolSet) -> tuple[list[Message], list[str], ToolSet]:
        """The items as messages, the place of each, and all the tools."""
        messages: list[Message] = []
        places: list[str] = []
        turn: list[Piece] = []

        def close_turn() -> None:
            if turn:
                messages.append(self._turns.get(tuple(turn), join_pieces))
                turn.clear()

        for index, item in enumerate(parsed):
            if isinstance(item, Piece):
                if turn and not follows(turn[-1], item):
                    close_turn()
                if not turn:
                    places.append(f"input[{index}]")
                turn.append(item)
                continue
            close_turn()
            if isinstance(item, ToolSet):
                tools = tools.with_more(item)
            else:
                messages.append(item)
                places.append(f"input[{index}]")
        close_turn()
        return messages, places, tools

    def writer(self, request: ChatRequest) -> ResponsesWriter:
        return ResponsesWriter(request)

    def reply(self, request: ChatRequest, started: ReplyStarted, ended: ReplyEnded) -> bytes:
        return response_body(request, started, ended)

    def token_count(self, tokens: int) -> bytes:
        raise NotImplementedError("Responses has no route that counts tokens")

    def models(self, names: Sequence[str], only: str | None) -> bytes:
        return model_list(names, only)

    def error(self, error: RolltapError) -> WireReply:
        return openai_error(error)


def _input(body: Cut) -> bytes:
    """The list of `input`; a string is one user message."""
    raw = body.array("input")
    return b'[{"role":"user","content":' + raw + b"}]" if raw.startswith(b'"') else raw


def _parse_instructions(raw: bytes) -> Message:
    return Message("system", (Text(decode(raw, str, "instructions")),))


def parse_item(raw: bytes) -> ParsedItem:
    """An entry of `input`."""
    kind: Any = wire.Item if decode(raw, wire.ItemKind).type is not None else wire.MessageItem
    match decode(raw, kind):
        case wire.MessageItem() as item if item.role == "assistant":
            return Piece(TEXT, _parts(item.content, "content", images=False), handle=item.id)
        case wire.MessageItem() as item:
            return Message(item.role, _parts(item.content, "content", images=item.role == "user"))
        case wire.ReasoningItem() as item:
            shown = item.content or item.summary
            text = "\n\n".join(part.text for part in shown)
            return Piece(REASONING, (Reasoning(text, item.encrypted_content or item.id),), handle=item.id)
        case wire.FunctionCallItem() as item:
            arguments = check_arguments(item.arguments, "arguments")
            return Piece(CALL, call=ToolCall(item.call_id, tool_name(item.namespace, item.name), arguments))
        case wire.CustomCallItem() as item:
            call = ToolCall(item.call_id, tool_name(item.namespace, item.name), item.input, "custom")
            return Piece(CALL, call=call)
        case wire.FunctionOutputItem() | wire.CustomOutputItem() as item:
            return Message("tool", _parts(item.output, "output"), tool_call_id=item.call_id)
        case wire.AdditionalToolsItem() as item:
            return parse_tools(item.tools, "tools")
        case wire.AgentMessageItem() as item:
            return Message("user", _parts(item.content, "content"))
        case wire.ItemReference() as item:
            rank = {"rs": REASONING, "msg": TEXT}.get(item.id.partition("_")[0], CALL)
            return Piece(rank, handle=item.id, recall=True)
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


def follows(before: Piece, piece: Piece) -> bool:
    """Whether `piece` continues the turn of `before`: reasoning begins one, text may stand after a call."""
    return piece.rank > before.rank or (before.rank == CALL and piece.rank != REASONING)


def join_pieces(turn: tuple[Piece, ...]) -> Message:
    """An assistant turn out of its items."""
    handle = next((piece.handle for piece in turn if piece.handle), None)
    if any(piece.recall for piece in turn):
        return Message("assistant", handle=handle, recall=True)
    parts = tuple(part for piece in turn for part in piece.parts)
    calls = tuple(piece.call for piece in turn if piece.call is not None)
    return Message("assistant", parts, calls, handle=handle)


def sampling(head: wire.Head) -> Sampling:
    """The sampling parameters of a request."""
    effort = head.reasoning.effort if head.reasoning else None
    return Sampling(
        temperature=head.temperature,
        top_p=head.top_p,
        max_tokens=head.max_output_tokens,
        logprobs="message.output_text.logprobs" in (head.include or ()) or bool(head.top_logprobs),
        top_logprobs=head.top_logprobs or 0,
        thinking=None if effort is None else effort != "none",
        effort=effort,
        json_schema=_schema(head.text.format if head.text else None),
    )


def _schema(spec: wire.TextFormat | None) -> dict[str, Any] | None:
    if spec is None or spec.type == "text":
        return None
    if spec.type == "json_object":
        return {}
    if spec.schema is None:
        raise invalid("text.format.schema", "this field is required")
    check_depth(spec.schema, "text.format.schema")
    return spec.schema
