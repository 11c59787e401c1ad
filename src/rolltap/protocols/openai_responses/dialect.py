"""OpenAI Responses: `POST /v1/responses`, and `GET /v1/responses/{id}`, which returns a recorded reply.

`recall` handles `/v1/responses/compact` and `compaction_trigger`.

An assistant turn is several items (reasoning, message, calls); consecutive ones become one canonical message. Clients
echo item ids, `encrypted_content` and `call_id`s, so these carry the handles.

Tools. `function` and `custom` tools are the client's own. A `namespace` contains such tools: the model sees them as
`namespace.name` (for `functions`, the vendor's default namespace, as the bare name), and replies split the names again.
Tools may also be inside `input` (`additional_tools`). Vendor-hosted tools that harnesses declare by default
(`DROPPED_TOOLS`) are left out of the prompt; all others are refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rolltap.errors import RolltapError
from rolltap.protocols.base import Dialect, FindCall, Route, WireReply, WireRequest
from rolltap.protocols.cache_space import CacheSpace, WeighedCache, message_bytes
from rolltap.protocols.conversation import ChatRequest, Message, ReplyEnded, ReplyStarted, Sampling
from rolltap.protocols.hints import read_hints
from rolltap.protocols.history import Linker
from rolltap.protocols.openai_chat.wire import token_limit
from rolltap.protocols.openai_responses import wire
from rolltap.protocols.openai_responses.parse import (
    ContentPiece,
    EffortUpdate,
    ParsedItem,
    ResponsesToolSet,
    follows,
    join_pieces,
    parse_instructions,
    parse_item,
    parse_tools,
    tool_choice,
)
from rolltap.protocols.openai_responses.read import ResponsesReader
from rolltap.protocols.openai_responses.recall import COMPACT, CompactionWriter, compacted_body, compacting, recall
from rolltap.protocols.openai_responses.write import ResponsesWriter, response_body
from rolltap.protocols.replies import OPENAI_ENVIRONMENT, encode, openai_error, openai_key
from rolltap.protocols.request_cache import ItemCache
from rolltap.protocols.requests import check_depth, cut, decode, invalid
from rolltap.protocols.thinking import read_switches

APART = ("input", "instructions", "tools")


class OpenAIResponses(Dialect):
    """The dialect of Codex, of the Agents SDK, and of other clients that are configured for it."""

    name = "openai_responses"
    items_field = "input"
    field_names: Mapping[str, str] = {
        "messages": "input",
        "response_format": "text.format",
        "logprobs": "include",
        "max_tokens": "max_output_tokens",
        "reasoning_effort": "reasoning.effort",
    }
    routes: Sequence[Route] = (
        Route("POST", "/v1/responses", "generate"),
        Route("POST", COMPACT, "generate"),
        Route("POST", "/v1/responses/input_tokens", "count_tokens"),
        Route("GET", "/v1/responses/{reply}", "retrieve"),
    )
    stream_url = "/v1/responses"
    client_environment = OPENAI_ENVIRONMENT
    reply_reader = ResponsesReader

    def __init__(self, space: CacheSpace) -> None:
        self._items: ItemCache[ParsedItem] = ItemCache(parse_item, space)
        self._tools = ItemCache(lambda raw: parse_tools(decode(raw, list[wire.WireTool], "tools"), "tools"), space)
        self._instructions = ItemCache(parse_instructions, space)
        self._turns: WeighedCache[tuple[ContentPiece, ...], Message] = WeighedCache(message_bytes, space)
        self._linker = Linker(space)

    def key(self, request: WireRequest) -> str | None:
        return openai_key(request.headers)

    def parse(self, request: WireRequest) -> ChatRequest:
        body = cut(request.body, APART)
        head = decode(body.head, wire.Head)
        raw = body.array("input")
        # A string is one user message.
        listed = b'[{"role":"user","content":' + raw + b"}]" if raw.startswith(b'"') else raw
        items, parsed = self._items.all(listed, "input")
        tools = self._tools.get(body.fields["tools"])[1] if "tools" in body.fields else ResponsesToolSet()
        messages, places, tools = self._messages(parsed, tools)
        if "instructions" in body.fields:
            messages.insert(0, self._instructions.get(body.fields["instructions"])[1])
            places.insert(0, "instructions")
        if not messages:
            raise invalid("input", "at least one item is required")
        recalls = any(message.recall for message in messages)
        whole = head.previous_response_id is None and not recalls
        triggers = [index for index, item in enumerate(parsed) if isinstance(item, wire.CompactionTrigger)]
        if triggers and triggers[0] < len(parsed) - 1:
            raise invalid(f"input[{triggers[0]}]", "compaction_trigger must be the last item")
        chat = ChatRequest(
            dialect=self.name,
            model=head.model,
            messages=self._linker.link(messages, places.__getitem__, whole=whole),
            tools=tools.tools,
            tool_choice=tool_choice(head.tool_choice, head.parallel_tool_calls, tools),
            sampling=sampling(head, effort_update(parsed)),
            stream=bool(head.stream),
            hints=read_hints(request.headers, cache_key=head.prompt_cache_key),
            previous=head.previous_response_id,
            recalls=recalls,
            stored=head.store is not False,
            head=body.head,
            items=items,
            fixed=body.fixed("instructions", "tools"),
            wire={"head": head, "namespaces": tools.namespaces, "compacts": ""},
        )
        by_path = request.route == COMPACT and not triggers
        return compacting(chat, by_path=by_path) if triggers or by_path else chat

    def _messages(
        self, parsed: Sequence[ParsedItem], tools: ResponsesToolSet
    ) -> tuple[list[Message], list[str], ResponsesToolSet]:
        """Returns the items as messages, the path of each message, and all tools."""
        messages: list[Message] = []
        places: list[str] = []
        turn: list[ContentPiece] = []

        def close_turn() -> None:
            if turn:
                messages.append(self._turns.get(tuple(turn), join_pieces))
                turn.clear()

        for index, item in enumerate(parsed):
            if isinstance(item, ContentPiece):
                if item.is_empty:
                    continue
                if turn and not follows(turn[-1], item):
                    close_turn()
                if not turn:
                    places.append(f"input[{index}]")
                turn.append(item)
                continue
            close_turn()
            if isinstance(item, ResponsesToolSet):
                tools = tools.with_more(item)
            elif isinstance(item, EffortUpdate | wire.CompactionTrigger):
                continue
            else:
                messages.append(item)
                places.append(f"input[{index}]")
        close_turn()
        return messages, places, tools

    async def recall(self, request: ChatRequest, find: FindCall) -> ChatRequest:
        return await recall(request, find, self._linker)

    def writer(self, request: ChatRequest) -> ResponsesWriter:
        return CompactionWriter(request) if request.wire["compacts"] else ResponsesWriter(request)

    def reply(self, request: ChatRequest, started: ReplyStarted, ended: ReplyEnded) -> bytes:
        if request.wire["compacts"]:
            return compacted_body(request, started, ended)
        return response_body(request, started, ended)

    def token_count(self, tokens: int) -> bytes:
        return encode({"object": "response.input_tokens", "input_tokens": tokens})

    def error(self, error: RolltapError) -> WireReply:
        return openai_error(error)


def effort_update(parsed: Sequence[ParsedItem]) -> str | bool | None:
    """The effort of the last `configuration_update` that has one."""
    efforts = [item.effort for item in parsed if isinstance(item, EffortUpdate) and item.effort is not None]
    return efforts[-1] if efforts else None


def sampling(head: wire.Head, effort: str | bool | None) -> Sampling:
    """Returns the sampling parameters of a request. `effort`: that of its last `configuration_update`."""
    asked = head.reasoning or wire.ReasoningConfig()
    demand = read_switches(head, asked.effort if effort is None else effort)
    demand.think(asked.enabled)
    demand.spend(asked.max_tokens)
    demand.settle()
    return Sampling(
        temperature=head.temperature,
        top_p=head.top_p,
        max_tokens=token_limit(head.max_output_tokens, "max_output_tokens"),
        logprobs="message.output_text.logprobs" in (head.include or ()) or bool(head.top_logprobs),
        top_logprobs=head.top_logprobs or 0,
        thinking=demand.thinking,
        effort=demand.effort,
        thinking_budget=demand.budget,
        keep_thinking=demand.keep,
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
