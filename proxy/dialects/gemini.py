"""Gemini: `generateContent`, `streamGenerateContent?alt=sse` and `countTokens`, under `/v1beta` and `/v1`.

What a client echoes are `thoughtSignature`s and function-call ids, so that is where handles travel. Some clients drop
the ids: calls without one are numbered in their order, and a response without one answers the first open call of its
name. The Gemini CLI repeats function responses when it resumes; a repetition to the letter is dropped. The `chats` of
Google's own SDK keep every chunk of a stream as a content: a model's contents that follow each other are one turn.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

import msgspec

from rolltap.errors import NotFound, RolltapError
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
    Tool,
    ToolCall,
    ToolChoice,
)
from rolltap.proxy.dialects import gemini_wire as wire
from rolltap.proxy.dialects.arguments import text_of
from rolltap.proxy.dialects.base import Route, WireReply, WireRequest
from rolltap.proxy.dialects.gemini_ids import Identifier
from rolltap.proxy.dialects.gemini_reply import GeminiWriter, gemini_error, response_body
from rolltap.proxy.dialects.gemini_schema import json_schema
from rolltap.proxy.dialects.hints import read_hints
from rolltap.proxy.dialects.history import Linker, unknown_tool
from rolltap.proxy.dialects.items import DERIVED_BYTES, ItemCache, Kept, message_bytes
from rolltap.proxy.dialects.openai_common import model_list
from rolltap.proxy.dialects.reading import MAX_TOOLS, Cut, check_depth, check_image, cut, decode, invalid
from rolltap.proxy.dialects.writing import bearer, encode

MODELS = ("/v1beta/models", "/v1/models")
STREAM = "streamGenerateContent"
COUNT = "countTokens"
APART = ("contents", "systemInstruction", "tools")
KNOWN = {*APART, "generateContentRequest", *(field.encode_name for field in msgspec.structs.fields(wire.Head))}
_ANSWER_KEYS = ("output", "result", "content", "error")


class Gemini:
    """The dialect of the Gemini CLI."""

    name = "gemini"
    items_field = "contents"
    field_names: Mapping[str, str] = {
        "messages": "contents",
        "response_format": "generationConfig.responseJsonSchema",
        "tool_choice": "toolConfig.functionCallingConfig",
        "logprobs": "generationConfig.responseLogprobs",
        "top_logprobs": "generationConfig.logprobs",
    }
    routes: Sequence[Route] = (
        *(
            Route("POST", f"{models}/{{model:path}}:{method}", "count_tokens" if method == COUNT else "generate")
            for models in MODELS
            for method in ("generateContent", STREAM, COUNT)
        ),
        Route("GET", "/v1beta/models", "models"),
        Route("GET", "/v1beta/models/{model:path}", "model"),
    )

    def __init__(self) -> None:
        self._contents = ItemCache(parse_content)
        self._tools = ItemCache(parse_tools)
        self._system = ItemCache(parse_system)
        self._turns: Kept[tuple[Message, ...], Message] = Kept(DERIVED_BYTES, message_bytes)
        self._identify = Identifier()
        self._linker = Linker()

    def key(self, request: WireRequest) -> str | None:
        return request.headers.get("x-goog-api-key") or request.query.get("key") or bearer(request.headers)

    def parse(self, request: WireRequest) -> ChatRequest:
        stream = request.path.endswith(f":{STREAM}")
        if stream and request.query.get("alt") != "sse":
            raise invalid("alt", "streamGenerateContent is served as server-sent events only; add ?alt=sse")
        body = _body(request)
        head = wire.decode_either(body.head, wire.Head)
        config = head.generation_config or wire.GenerationConfig()
        items, contents = self._contents.all(body.array("contents"), "contents")
        if not contents:
            raise invalid("contents", "at least one content is required")
        messages: list[Message] = []
        places: list[str] = []
        if "systemInstruction" in body.fields:
            messages.append(self._system.get(body.fields["systemInstruction"])[1])
            places.append("systemInstruction")
        for index, entry in enumerate(self._whole_turns(contents)):
            messages += entry
            places += [f"contents[{index}]"] * len(entry)
        messages, places = self._identify(messages, places)
        tools = self._tools.get(body.fields["tools"])[1] if "tools" in body.fields else ()
        thoughts = config.thinking_config is not None and bool(config.thinking_config.include_thoughts)
        return ChatRequest(
            dialect=self.name,
            model=head.model.removeprefix("models/"),
            messages=self._linker.link(messages, places.__getitem__),
            tools=tools,
            tool_choice=tool_choice(head.tool_config, tools),
            sampling=sampling(config),
            stream=stream,
            hints=read_hints(request.headers),
            head=body.head,
            items=items,
            fixed=body.fixed("systemInstruction", "tools"),
            wire={"thoughts": thoughts},
        )

    def _whole_turns(self, contents: Sequence[tuple[Message, ...]]) -> list[tuple[Message, ...]]:
        """The contents with each run of a model's as one; the places of those that joined another are empty."""
        whole: list[tuple[Message, ...]] = []
        for is_model, run in groupby(contents, key=lambda entry: entry[0].role == "assistant"):
            entries = list(run)
            if is_model and len(entries) > 1:
                turn = self._turns.get(tuple(entry[0] for entry in entries), _joined)
                entries = [(turn,), *[()] * (len(entries) - 1)]
            whole += entries
        return whole

    def writer(self, request: ChatRequest) -> GeminiWriter:
        return GeminiWriter(request)

    def reply(self, request: ChatRequest, started: ReplyStarted, ended: ReplyEnded) -> bytes:
        return response_body(request, started, ended)

    def token_count(self, tokens: int) -> bytes:
        return encode({"totalTokens": tokens})

    def models(self, names: Sequence[str], only: str | None) -> bytes:
        return model_list(names, only and only.removeprefix("models/"))

    def error(self, error: RolltapError) -> WireReply:
        return gemini_error(error)


def _body(request: WireRequest) -> Cut:
    """The body with the model of the URL in it, and top-level keys in camelCase."""
    fields = _top_level(request.body, "")
    if request.path.endswith(f":{COUNT}") and "generateContentRequest" in fields:
        fields = _top_level(fields["generateContentRequest"], "generateContentRequest")
    model = request.path_params.get("model")
    if model is None and "model" not in fields:
        raise NotFound("the URL names no model", param="model")
    if model is not None:
        fields["model"] = msgspec.Raw(encode(model))
    return cut(encode(fields), APART)


def _top_level(body: bytes | msgspec.Raw, where: str) -> dict[str, msgspec.Raw]:
    """The fields of a body; those that are known in camelCase have their name in it."""
    fields = decode(body, dict[str, msgspec.Raw], where)
    camel = {name: wire.camel_key(name) for name in fields}
    return {camel[name] if camel[name] in KNOWN else name: raw for name, raw in fields.items()}


def parse_system(raw: bytes) -> Message:
    """The whole of `systemInstruction`."""
    content = wire.decode_either(raw, wire.Content, "systemInstruction")
    parts = [_text_part(part, f"systemInstruction.parts[{index}]") for index, part in enumerate(content.parts)]
    return Message("system", tuple(part for part in parts if part.text))


def _text_part(part: wire.WirePart, where: str) -> Text:
    if part.text is None:
        raise invalid(where, "only text is allowed here")
    return Text(part.text)


def parse_content(raw: bytes) -> tuple[Message, ...]:
    """An entry of `contents`. Calls and responses that came without an id have an empty one."""
    content = wire.decode_either(raw, wire.Content)
    if content.role == "model":
        return (_model_turn(content),)
    messages: list[Message] = []
    parts: list[Part] = []
    for index, part in enumerate(content.parts):
        where = f"parts[{index}]"
        if part.function_response is not None:
            if parts:
                messages.append(Message("user", tuple(parts)))
                parts = []
            messages.append(_response(part.function_response, f"{where}.functionResponse"))
        elif part.function_call is not None:
            raise invalid(f"{where}.functionCall", "only a model's content takes function calls")
        elif part.inline_data is not None:
            parts.append(_image(part.inline_data, f"{where}.inlineData"))
        elif part.text:
            parts.append(Text(part.text))
    if parts or not messages:
        messages.append(Message("system" if content.role == "system" else "user", tuple(parts)))
    return tuple(messages)


def _model_turn(content: wire.Content) -> Message:
    parts: list[Part] = []
    calls: list[ToolCall] = []
    handle: str | None = None
    for index, part in enumerate(content.parts):
        where = f"parts[{index}]"
        signed = _signature(part.thought_signature)
        handle = handle or signed
        if part.function_call is not None:
            call = part.function_call
            calls.append(ToolCall(call.id or "", call.name, text_of(call.args, f"{where}.functionCall.args")))
        elif part.function_response is not None or part.inline_data is not None:
            raise invalid(where, "a model's content takes text, thoughts and function calls")
        elif part.thought:
            parts.append(Reasoning(part.text or "", signed))
        elif part.text:
            parts.append(Text(part.text))
    return Message("assistant", tuple(parts), tuple(calls), handle=handle)


def _joined(turn: tuple[Message, ...]) -> Message:
    """A model's turn that came as several contents."""
    parts = tuple(part for message in turn for part in message.parts)
    calls = tuple(call for message in turn for call in message.tool_calls)
    return Message("assistant", parts, calls, handle=next((m.handle for m in turn if m.handle), None))


def _signature(text: str | None) -> str | None:
    """What a signature encodes; clients that keep it as bytes may send it in the other base64 alphabet."""
    if not text:
        return None
    try:
        data = base64.b64decode(text.replace("-", "+").replace("_", "/") + "=" * (-len(text) % 4), validate=True)
        return data.decode("ascii")
    except (binascii.Error, ValueError):
        return text


def _response(response: wire.FunctionResponse, where: str) -> Message:
    parts: list[Part] = []
    text, is_error = _answer(response.response, f"{where}.response")
    if text:
        parts.append(Text(text))
    for index, part in enumerate(response.parts or ()):
        parts.append(_image(part.inline_data, f"{where}.parts[{index}].inlineData"))
    return Message("tool", tuple(parts), tool_call_id=response.id or "", name=response.name, is_error=is_error)


def _answer(raw: msgspec.Raw, where: str) -> tuple[str, bool]:
    """A response as text: the one string in it, where there is only that under a usual key; else its JSON."""
    value = decode(raw, dict[str, msgspec.Raw], where)
    if len(value) == 1:
        key, inner = next(iter(value.items()))
        if key in _ANSWER_KEYS and bytes(inner).startswith(b'"'):
            return decode(inner, str, where), key == "error"
    return text_of(raw, where), "error" in value


def _image(blob: wire.Blob, where: str) -> Image:
    data = blob.data.replace("-", "+").replace("_", "/")
    return Image(check_image(f"data:{blob.mime_type};base64,{data}", f"{where}.data"))


def parse_tools(raw: bytes) -> tuple[Tool, ...]:
    """The whole of `tools`; the vendor's own searches are left out."""
    tools: dict[str, Tool] = {}
    for index, entry in enumerate(wire.decode_either(raw, list[wire.WireTool], "tools")):
        for inner, declared in enumerate(entry.function_declarations or ()):
            where = f"tools[{index}].functionDeclarations[{inner}]"
            if declared.name in tools:
                raise invalid(f"{where}.name", f"a second tool named {declared.name!r}")
            tools[declared.name] = _tool(declared, where)
    if len(tools) > MAX_TOOLS:
        raise invalid("tools", f"at most {MAX_TOOLS} tools")
    return tuple(tools.values())


def _tool(declared: wire.FunctionDeclaration, where: str) -> Tool:
    if declared.parameters is not None and declared.parameters_json_schema is not None:
        raise invalid(f"{where}.parametersJsonSchema", "give this or parameters, not both")
    check_depth(declared.parameters_json_schema or declared.parameters or {}, f"{where}.parameters")
    parameters = declared.parameters_json_schema or json_schema(declared.parameters or {})
    return Tool(declared.name, declared.description or "", parameters)


def tool_choice(config: wire.ToolConfig | None, tools: Sequence[Tool]) -> ToolChoice:
    """`toolConfig.functionCallingConfig`; every function allowed must be declared."""
    calling = config.function_calling_config if config else None
    if calling is None:
        return ToolChoice()
    where = "toolConfig.functionCallingConfig"
    names = tuple(calling.allowed_function_names or ())
    known = [tool.name for tool in tools]
    for name in names:
        if name not in known:
            raise unknown_tool(name, known, f"{where}.allowedFunctionNames")
    match calling.mode:
        case "NONE":
            return ToolChoice("none")
        case "ANY":
            if not tools:
                raise invalid(f"{where}.mode", "ANY, but no functions are declared")
            return ToolChoice("named" if names else "required", names)
        case _:
            return ToolChoice("auto", names)


def sampling(config: wire.GenerationConfig) -> Sampling:
    """The sampling parameters of a request."""
    thinking = config.thinking_config or wire.ThinkingConfig()
    level = thinking.thinking_level.lower() if thinking.thinking_level else None
    if config.logprobs and not config.response_logprobs:
        raise invalid("generationConfig.logprobs", "needs responseLogprobs: true")
    return Sampling(
        temperature=config.temperature,
        top_p=config.top_p,
        top_k=None if config.top_k is None else int(config.top_k),
        max_tokens=config.max_output_tokens,
        stop=tuple(config.stop_sequences or ()),
        seed=config.seed,
        n=config.candidate_count or 1,
        presence_penalty=config.presence_penalty,
        frequency_penalty=config.frequency_penalty,
        logprobs=bool(config.response_logprobs),
        top_logprobs=config.logprobs or 0,
        thinking=False if thinking.thinking_budget == 0 else (True if config.thinking_config else None),
        effort=level,
        json_schema=_schema(config),
    )


def _schema(config: wire.GenerationConfig) -> dict[str, Any] | None:
    for name in ("response_schema", "response_json_schema"):
        if (schema := getattr(config, name)) is not None:
            check_depth(schema, f"generationConfig.{wire.camel_key(name)}")
            return json_schema(schema) if name == "response_schema" else schema
    return {} if config.response_mime_type == "application/json" else None
