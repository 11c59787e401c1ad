"""OpenAI Chat Completions request types. Reference: `openai.types.chat.completion_create_params`.

Unknown fields are refused by name. Fields under "no effect" are accepted and recorded, and change nothing.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from rolltap.protocols.conversation import MAX_NAME
from rolltap.protocols.requests import invalid
from rolltap.protocols.thinking import Budget, Effort, ThinkingSwitches

MAX_CHOICES = 32
MAX_STOPS = 16
MAX_TOP_LOGPROBS = 20

Count = Annotated[int, Meta(ge=1, le=2**31 - 1)]
TokenLimit = Annotated[int, Meta(ge=-1, le=2**31 - 1)]
"""-1: no limit. 0 is refused (`token_limit`)."""
Penalty = Annotated[float, Meta(ge=-2, le=2)]
StopText = Annotated[str, Meta(min_length=1, max_length=1024)]
Name = Annotated[str, Meta(min_length=1, max_length=MAX_NAME)]


def token_limit(value: int | None, where: str) -> int | None:
    """The most tokens of a reply; None for no limit. Raises `InvalidRequest` for 0."""
    if value == 0:
        raise invalid(where, "expected `int` >= 1, or -1 for no limit")
    return None if value == -1 else value


class ImageUrl(Struct):
    url: str
    detail: Literal["auto", "low", "high", "original"] | None = None


class TextPart(Struct, tag_field="type", tag="text"):
    text: str


class ImagePart(Struct, tag_field="type", tag="image_url"):
    image_url: ImageUrl


class RefusalPart(Struct, tag_field="type", tag="refusal"):
    refusal: str


class File(Struct):
    filename: str | None = None
    file_data: str | None = None
    file_id: str | None = None


class FilePart(Struct, tag_field="type", tag="file"):
    file: File


class Audio(Struct):
    format: str | None = None


class AudioPart(Struct, tag_field="type", tag="input_audio"):
    input_audio: Audio


class MediaUrl(Struct):
    url: str


class AudioUrlPart(Struct, tag_field="type", tag="audio_url"):
    audio_url: MediaUrl


class VideoUrlPart(Struct, tag_field="type", tag="video_url"):
    video_url: MediaUrl


ContentPart = TextPart | ImagePart | RefusalPart | FilePart | AudioPart | AudioUrlPart | VideoUrlPart


class FunctionCall(Struct):
    name: Name
    arguments: str = ""


class CustomCall(Struct):
    name: Name
    input: str = ""


class WireToolCall(Struct):
    id: Annotated[str, Meta(min_length=1, max_length=512)]
    type: Literal["function", "custom"] = "function"
    function: FunctionCall | None = None
    custom: CustomCall | None = None


class WireMessage(Struct):
    """An entry of `messages`. Unknown fields are echoes of another server's reply (`provider_specific_fields`)."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[WireToolCall] | None = None
    tool_call_id: str | None = None
    id: str | None = None  # qwen-agent puts the tool call's id here
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    function_call: Any = None
    audio: Any = None
    prefix: bool | None = None  # some vendors: the reply continues this message
    partial: bool | None = None


class FunctionSpec(Struct):
    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class CustomSpec(Struct):
    name: Name
    description: str | None = None
    format: dict[str, Any] | None = None


class WireTool(Struct):
    type: Literal["function", "custom"]
    function: FunctionSpec | None = None
    custom: CustomSpec | None = None


class NamedTool(Struct):
    name: str


class AllowedTools(Struct):
    mode: Literal["auto", "required"]
    tools: list[WireChoice]


class WireChoice(Struct):
    type: Literal["function", "custom", "allowed_tools", "none", "auto", "required", "any"]
    function: NamedTool | None = None
    custom: NamedTool | None = None
    allowed_tools: AllowedTools | None = None


class SchemaSpec(Struct):
    schema: dict[str, Any] | None = None
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(Struct):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: SchemaSpec | None = None


class StreamOptions(Struct, forbid_unknown_fields=True):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None
    continuous_usage_stats: bool | None = None  # no effect: usage comes once, at the end


class ReasoningSwitch(Struct, forbid_unknown_fields=True):
    """OpenRouter's."""

    enabled: bool | None = None
    effort: Effort | bool | None = None
    max_tokens: Budget | None = None
    exclude: bool | None = None
    summary: str | None = None  # no effect: thinking is sent whole


class Head(ThinkingSwitches):
    """The body without `messages` and `tools`."""

    model: Annotated[str, Meta(min_length=1, max_length=256)]
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    tool_choice: Literal["none", "auto", "required", "any"] | WireChoice | None = None
    parallel_tool_calls: bool | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    max_tokens: TokenLimit | None = None
    max_completion_tokens: TokenLimit | None = None
    stop: StopText | Annotated[list[StopText], Meta(max_length=MAX_STOPS)] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=10)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    response_format: ResponseFormat | None = None
    reasoning_effort: Effort | bool | None = None
    reasoning: bool | str | ReasoningSwitch | None = None
    include_reasoning: bool | None = None
    prompt_cache_key: str | None = None
    # accepted only with a value that requests nothing
    modalities: list[Literal["text"]] | None = None
    logit_bias: Annotated[dict[str, float], Meta(max_length=0)] | None = None
    # no effect
    store: bool | None = None
    metadata: Any = None
    user: str | None = None
    safety_identifier: str | None = None
    service_tier: str | None = None
    verbosity: str | None = None
    prediction: Any = None
    prompt_cache_retention: Any = None
    prompt_cache_options: Any = None


class TokenLogprobOut(Struct):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprobOut]


class TopLogprobOut(Struct):
    token: str
    logprob: float
    bytes: list[int]


class LogprobsOut(Struct):
    content: list[TokenLogprobOut]
    refusal: None = None


class FunctionOut(Struct, omit_defaults=True):
    arguments: str
    name: str | None = None


class CustomOut(Struct, omit_defaults=True):
    input: str
    name: str | None = None


class ToolCallOut(Struct, omit_defaults=True):
    index: int | None = None  # in deltas only
    id: str | None = None
    type: str | None = None
    function: FunctionOut | None = None
    custom: CustomOut | None = None


class Delta(Struct, omit_defaults=True):
    role: str | None = None
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCallOut] | None = None


class ChunkChoice(Struct):
    index: int
    delta: Delta
    finish_reason: str | None = None
    logprobs: LogprobsOut | None = None


class MessageOut(Struct, omit_defaults=True):
    role: str
    content: str | msgspec.UnsetType | None
    refusal: msgspec.UnsetType | None = msgspec.UNSET
    reasoning_content: str | None = None
    tool_calls: list[ToolCallOut] | None = None


class ChoiceOut(Struct):
    index: int
    message: MessageOut
    finish_reason: str
    logprobs: LogprobsOut | None = None


class PromptDetails(Struct):
    cached_tokens: int


class OutputDetails(Struct):
    reasoning_tokens: int


class UsageOut(Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: OutputDetails


class Completion(Struct):
    id: str
    created: int
    model: str
    choices: list[ChoiceOut]
    usage: UsageOut
    object: str = "chat.completion"


class Chunk(Struct, omit_defaults=True):
    id: str
    object: str
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: UsageOut | msgspec.UnsetType | None = msgspec.UNSET
