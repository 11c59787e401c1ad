"""Gemini `generateContent` request types. Reference: `google.genai.types` and the REST reference (v1beta).

JSON names are camelCase. Google's servers also accept snake_case, and its own examples use it; so does `decode_either`.
Unknown fields are refused by name at every level, except inside schemas and arguments.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct

from rolltap.errors import InvalidRequest
from rolltap.protocols.openai_chat.wire import MAX_STOPS, MAX_TOP_LOGPROBS, Name, Penalty, StopText, TokenLimit
from rolltap.protocols.requests import check_depth, decode

T = TypeVar("T")

MAX_CANDIDATES = 8

_OPAQUE = frozenset({"args", "response", "parameters", "parametersJsonSchema", "responseSchema", "responseJsonSchema"})


class Wire(Struct, rename="camel", forbid_unknown_fields=True):
    """A JSON object of Google's: camelCase names, unknown fields refused."""


class Blob(Wire):
    mime_type: str
    data: str
    display_name: str | None = None


class FileData(Wire):
    file_uri: str
    mime_type: str | None = None
    display_name: str | None = None


class FunctionCall(Wire):
    name: Name
    args: msgspec.Raw = msgspec.Raw(b"{}")
    id: str | None = None


class FunctionResponsePart(Wire):
    inline_data: Blob | None = None
    file_data: FileData | None = None


class FunctionResponse(Wire):
    name: Name
    response: msgspec.Raw = msgspec.Raw(b"{}")
    id: str | None = None
    parts: list[FunctionResponsePart] | None = None
    will_continue: Literal[False] | None = None
    scheduling: str | None = None


class WirePart(Wire):
    """A part holds one kind of data."""

    text: str | None = None
    thought: bool | None = None
    thought_signature: str | None = None
    inline_data: Blob | None = None
    file_data: FileData | None = None
    function_call: FunctionCall | None = None
    function_response: FunctionResponse | None = None
    # no effect
    media_resolution: Any = None
    part_metadata: Any = None


class Content(Wire):
    parts: list[WirePart] = []
    role: Literal["user", "model", "function", "system"] | None = None


class FunctionDeclaration(Wire):
    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    parameters_json_schema: dict[str, Any] | None = None
    # no effect
    response: Any = None
    response_json_schema: Any = None
    behavior: Literal["BLOCKING", "UNSPECIFIED"] | None = None


class WireTool(Wire):
    """Functions, or tools of the vendor's own. Search tools are left out of the prompt; others are refused."""

    function_declarations: list[FunctionDeclaration] | None = None
    google_search: Any = None
    google_search_retrieval: Any = None
    url_context: Any = None


class CallingConfig(Wire):
    mode: Literal["MODE_UNSPECIFIED", "AUTO", "ANY", "NONE", "VALIDATED"] | None = None
    allowed_function_names: list[str] | None = None
    stream_function_call_arguments: bool | None = None


class ToolConfig(Wire):
    function_calling_config: CallingConfig | None = None
    retrieval_config: Any = None
    include_server_side_tool_invocations: bool | None = None


class ThinkingConfig(Wire):
    include_thoughts: bool | None = None
    thinking_budget: int | None = None
    thinking_level: str | None = None


class GenerationConfig(Wire):
    candidate_count: Annotated[int, Meta(ge=1, le=MAX_CANDIDATES)] | None = None
    max_output_tokens: TokenLimit | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[float, Meta(ge=0, le=2**31)] | None = None
    stop_sequences: Annotated[list[StopText], Meta(max_length=MAX_STOPS)] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    response_logprobs: bool | None = None
    logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    response_mime_type: Literal["text/plain", "application/json"] | None = None
    response_schema: dict[str, Any] | None = None
    response_json_schema: dict[str, Any] | None = None
    thinking_config: ThinkingConfig | None = None
    # accepted only with a value that requests nothing
    response_modalities: list[Literal["TEXT"]] | None = None
    # no effect
    media_resolution: str | None = None
    enable_enhanced_civic_answers: bool | None = None


class Head(Wire):
    """The body without `contents`, `systemInstruction` and `tools`."""

    model: str
    tool_config: ToolConfig | None = None
    generation_config: GenerationConfig | None = None
    # no effect
    safety_settings: Any = None
    labels: Any = None
    service_tier: str | None = None
    store: bool | None = None


def decode_either(data: bytes, kind: type[T], where: str = "") -> T:
    """Like `decode`, but retries with snake_case keys converted. If both fail, the error names the field as sent."""
    try:
        return decode(data, kind, where)
    except InvalidRequest as error:
        first_error = error
    value = decode(data, object, where)
    try:
        check_depth(value, where)
        return decode(msgspec.json.encode(camel_keys(value)), kind, where)
    except InvalidRequest as error:
        is_same_field = error.param in (where or None, camel_key(first_error.param or ""))
        raise first_error if is_same_field else error from None


def camel_keys(value: Any) -> Any:
    """Converts keys to camelCase. Schemas and arguments are the client's own and stay unchanged."""
    if isinstance(value, dict):
        out = {}
        for key, item in value.items():
            name = camel_key(key)
            out[name] = item if name in _OPAQUE else camel_keys(item)
        return out
    if isinstance(value, list):
        return [camel_keys(item) for item in value]
    return value


def camel_key(key: str) -> str:
    """Converts `system_instruction` to `systemInstruction`."""
    head, *rest = key.split("_")
    return head + "".join(word[:1].upper() + word[1:] for word in rest) if rest else key
