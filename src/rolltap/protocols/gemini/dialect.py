"""Gemini: `generateContent`, `streamGenerateContent?alt=sse` and `countTokens`, under `/v1beta` and `/v1`.

Clients echo `thoughtSignature`s and function-call ids, so these carry the handles. Some clients drop the ids: calls
without an id are numbered in order, and a response without an id answers the first open call of its name. The Gemini
CLI repeats function responses when it resumes; exact repetitions are dropped. The `chats` of Google's own SDK keep
every chunk of a stream as a content: consecutive contents of the model are one turn.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

import msgspec

from rolltap.errors import NotFound, RolltapError
from rolltap.protocols.base import NO_CONTEXTS, ClientEnvironment, Dialect, Route, WireReply, WireRequest, model_list
from rolltap.protocols.cache_space import CacheSpace, WeighedCache, message_bytes
from rolltap.protocols.conversation import ChatRequest, Message, ReplyEnded, ReplyStarted, Sampling, Tool, ToolChoice
from rolltap.protocols.gemini import wire
from rolltap.protocols.gemini.parse import Identifier, join_contents, json_schema, parse_content, parse_system
from rolltap.protocols.gemini.read import GeminiReader
from rolltap.protocols.gemini.write import GeminiWriter, gemini_error, response_body
from rolltap.protocols.hints import read_hints
from rolltap.protocols.history import Linker, unknown_tool
from rolltap.protocols.openai_chat.wire import token_limit
from rolltap.protocols.replies import bearer, encode
from rolltap.protocols.request_cache import ItemCache
from rolltap.protocols.requests import MAX_TOOLS, BodyParts, check_depth, cut, decode, invalid
from rolltap.protocols.thinking import EFFORTS

MODELS = ("/v1beta/models", "/v1/models")
STREAM = "streamGenerateContent"
COUNT = "countTokens"
APART = ("contents", "systemInstruction", "tools")
TOOLS = {field.encode_name for field in msgspec.structs.fields(wire.WireTool)}
KNOWN = {*APART, "generateContentRequest", *(field.encode_name for field in msgspec.structs.fields(wire.Head))}


class Gemini(Dialect):
    """The dialect of the Gemini CLI."""

    name = "gemini"
    items_field = "contents"
    field_names: Mapping[str, str] = {
        "messages": "contents",
        "response_format": "generationConfig.responseJsonSchema",
        **{
            name: f"generationConfig.{wire.camel_key(name)}"
            for name in ("temperature", "top_p", "top_k", "seed", "presence_penalty", "frequency_penalty")
        },
        "max_tokens": "generationConfig.maxOutputTokens",
        "stop": "generationConfig.stopSequences",
        "reasoning_effort": "generationConfig.thinkingConfig",
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
    stream_url = "/v1beta/models/{model}:streamGenerateContent?alt=sse"
    client_environment = ClientEnvironment("GOOGLE_GEMINI_BASE_URL", "", "GEMINI_API_KEY")
    reply_reader = GeminiReader

    def __init__(self, space: CacheSpace) -> None:
        self._contents = ItemCache(parse_content, space)
        self._tools = ItemCache(parse_tools, space)
        self._system = ItemCache(parse_system, space)
        self._turns: WeighedCache[tuple[Message, ...], Message] = WeighedCache(message_bytes, space)
        self._identify = Identifier(space)
        self._linker = Linker(space)

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
        for index, entry in enumerate(self._join_model_turns(contents)):
            messages += entry
            places += [f"contents[{index}]"] * len(entry)
        if messages[-1].role == "assistant" and not request.path.endswith(f":{COUNT}"):
            raise invalid(places[-1], "prefill is not supported; the conversation must end with a user's content")
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
            wire={"thoughts": thoughts, "names": _schema_name(config)},
        )

    def _join_model_turns(self, contents: Sequence[tuple[Message, ...]]) -> list[tuple[Message, ...]]:
        """Joins consecutive contents of the model into the first one. The others become empty: indices stay."""
        turns: list[tuple[Message, ...]] = []
        for is_model, run in groupby(contents, key=lambda entry: entry[0].role == "assistant"):
            entries = list(run)
            if is_model and len(entries) > 1:
                turn = self._turns.get(tuple(entry[0] for entry in entries), join_contents)
                entries = [(turn,), *[()] * (len(entries) - 1)]
            turns += entries
        return turns

    def writer(self, request: ChatRequest) -> GeminiWriter:
        return GeminiWriter(request)

    def reply(self, request: ChatRequest, started: ReplyStarted, ended: ReplyEnded) -> bytes:
        return response_body(request, started, ended)

    def token_count(self, tokens: int) -> bytes:
        return encode({"totalTokens": tokens})

    def models(self, names: Sequence[str], only: str | None, contexts: Mapping[str, int] = NO_CONTEXTS) -> bytes:
        return model_list(names, only and only.removeprefix("models/"), contexts)

    def error(self, error: RolltapError) -> WireReply:
        return gemini_error(error)


def _body(request: WireRequest) -> BodyParts:
    """Returns the body with the URL's model as a field and its top-level keys in camelCase."""
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
    """Returns the fields of a body. Known fields get their camelCase name."""
    fields = decode(body, dict[str, msgspec.Raw], where)
    camel = {name: wire.camel_key(name) for name in fields}
    return {camel[name] if camel[name] in KNOWN else name: raw for name, raw in fields.items()}


def parse_tools(raw: bytes) -> tuple[Tool, ...]:
    """Parses the `tools` field. The vendor's own search tools are left out."""
    _check_hosted_tools(raw)
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


def _check_hosted_tools(raw: bytes) -> None:
    """Refuses unknown tools. An empty object declares one, so it is not a field that asks for nothing."""
    for index, entry in enumerate(decode(raw, list[dict[str, msgspec.Raw]], "tools")):
        for name, value in entry.items():
            if wire.camel_key(name) not in TOOLS and bytes(value) not in (b"null", b"false"):
                raise invalid(f"tools[{index}].{name}", "this tool is not supported; leave it out")


def _tool(declared: wire.FunctionDeclaration, where: str) -> Tool:
    if declared.parameters is not None and declared.parameters_json_schema is not None:
        raise invalid(f"{where}.parametersJsonSchema", "give this or parameters, not both")
    check_depth(declared.parameters_json_schema or declared.parameters or {}, f"{where}.parameters")
    parameters = declared.parameters_json_schema or json_schema(declared.parameters or {})
    return Tool(declared.name, declared.description or "", parameters)


def tool_choice(config: wire.ToolConfig | None, tools: Sequence[Tool]) -> ToolChoice:
    """Parses `toolConfig.functionCallingConfig`. Raises `InvalidRequest` if an allowed function is not declared."""
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
    """Returns the sampling parameters of a request."""
    thinking = config.thinking_config or wire.ThinkingConfig()
    level = thinking.thinking_level.lower() if thinking.thinking_level else None
    if level == "thinking_level_unspecified":
        level = None
    elif level is not None and level not in EFFORTS:
        raise invalid("generationConfig.thinkingConfig.thinkingLevel", f"unknown level; known: {', '.join(EFFORTS)}")
    if config.logprobs and not config.response_logprobs:
        raise invalid("generationConfig.logprobs", "needs responseLogprobs: true")
    return Sampling(
        temperature=config.temperature,
        top_p=config.top_p,
        top_k=None if config.top_k is None else int(config.top_k),
        max_tokens=token_limit(config.max_output_tokens, "generationConfig.maxOutputTokens"),
        stop=tuple(config.stop_sequences or ()),
        seed=config.seed,
        n=config.candidate_count or 1,
        presence_penalty=config.presence_penalty,
        frequency_penalty=config.frequency_penalty,
        logprobs=bool(config.response_logprobs),
        top_logprobs=config.logprobs or 0,
        thinking=False if thinking.thinking_budget == 0 else (True if config.thinking_config else None),
        effort=level,
        thinking_budget=thinking.thinking_budget
        if (thinking.thinking_budget or 0) > 0
        else None,  # -1: the model decides
        json_schema=_schema(config),
    )


def _schema_name(config: wire.GenerationConfig) -> dict[str, str]:
    """The field that asks for structured output, where it is not `responseJsonSchema`."""
    if config.response_schema is not None:
        return {"response_format": "generationConfig.responseSchema"}
    if config.response_json_schema is None and config.response_mime_type == "application/json":
        return {"response_format": "generationConfig.responseMimeType"}
    return {}


def _schema(config: wire.GenerationConfig) -> dict[str, Any] | None:
    for name in ("response_schema", "response_json_schema"):
        if (schema := getattr(config, name)) is not None:
            check_depth(schema, f"generationConfig.{wire.camel_key(name)}")
            return json_schema(schema) if name == "response_schema" else schema
    return {} if config.response_mime_type == "application/json" else None
