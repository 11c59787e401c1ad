"""OpenAI Responses request types. Reference: `openai.types.responses.response_create_params`.

Unknown fields of the body are refused by name. Unknown fields of items are echoes (`status`, `phase`,
`internal_chat_message_metadata_passthrough`) and are ignored.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from rolltap.protocols.openai_chat.wire import MAX_TOP_LOGPROBS, Audio, Name, TokenLimit
from rolltap.protocols.thinking import Budget, Effort, ThinkingSwitches

CallId = Annotated[str, Meta(min_length=1, max_length=512)]


class InputText(Struct, tag_field="type", tag="input_text"):
    text: str


class OutputText(Struct, tag_field="type", tag="output_text"):
    text: str


class PlainText(Struct, tag_field="type", tag="text"):
    text: str


class Refusal(Struct, tag_field="type", tag="refusal"):
    refusal: str


class InputImage(Struct, tag_field="type", tag="input_image"):
    image_url: str | None = None
    detail: Literal["auto", "low", "high", "original"] | None = None
    file_id: str | None = None


class InputFile(Struct, tag_field="type", tag="input_file"):
    filename: str | None = None
    file_data: str | None = None
    file_id: str | None = None
    file_url: str | None = None


class InputAudio(Struct, tag_field="type", tag="input_audio"):
    input_audio: Audio


class EncryptedContent(Struct, tag_field="type", tag="encrypted_content"):
    """Text that only the vendor can read. Codex's agents send it to each other with the vendor's models."""

    encrypted_content: str = ""


ContentPart = InputText | OutputText | PlainText | Refusal | InputImage | InputFile | InputAudio | EncryptedContent


class SummaryText(Struct, tag_field="type", tag="summary_text"):
    text: str


class ReasoningText(Struct, tag_field="type", tag="reasoning_text"):
    text: str


class MessageItem(Struct, tag_field="type", tag="message"):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[ContentPart]
    id: str | None = None


class ReasoningItem(Struct, tag_field="type", tag="reasoning"):
    summary: list[SummaryText] = []
    content: list[ReasoningText | PlainText] | None = None
    encrypted_content: str | None = None
    id: str | None = None


class FunctionCallItem(Struct, tag_field="type", tag="function_call"):
    call_id: CallId
    name: Name
    arguments: str
    namespace: str | None = None


class CustomCallItem(Struct, tag_field="type", tag="custom_tool_call"):
    call_id: CallId
    name: Name
    input: str
    namespace: str | None = None


class FunctionOutputItem(Struct, tag_field="type", tag="function_call_output"):
    call_id: CallId
    output: str | list[ContentPart]


class CustomOutputItem(Struct, tag_field="type", tag="custom_tool_call_output"):
    call_id: CallId
    output: str | list[ContentPart]


class AdditionalToolsItem(Struct, tag_field="type", tag="additional_tools"):
    tools: list[WireTool]


class AgentMessageItem(Struct, tag_field="type", tag="agent_message"):
    """A message from one of Codex's agents to another: user input for the model that reads it."""

    content: str | list[ContentPart]


class ConfigurationUpdate(Struct, tag_field="type", tag="configuration_update"):
    """Another effort from here on, until the next one. The request's own `reasoning.effort` stays what it was."""

    reasoning: ReasoningUpdate | None = None


class ReasoningUpdate(Struct):
    effort: Effort | bool | None = None


class CompactionItem(Struct, tag_field="type", tag="compaction"):
    """Stands for a history that was replaced by a summary."""

    encrypted_content: str | None = None
    id: str | None = None


class CompactionSummaryItem(Struct, tag_field="type", tag="compaction_summary"):
    """Older releases of Codex: a `compaction`."""

    encrypted_content: str | None = None
    id: str | None = None


class CompactionTrigger(Struct, tag_field="type", tag="compaction_trigger"):
    """The last item of a request for a compaction."""


class ItemReference(Struct, tag_field="type", tag="item_reference"):
    id: str


Item = (
    MessageItem
    | ReasoningItem
    | FunctionCallItem
    | CustomCallItem
    | FunctionOutputItem
    | CustomOutputItem
    | AdditionalToolsItem
    | AgentMessageItem
    | ConfigurationUpdate
    | CompactionItem
    | CompactionSummaryItem
    | CompactionTrigger
    | ItemReference
)


class ItemKind(Struct):
    """Only an item's type, which a message may omit."""

    type: str | None = None


class WireTool(Struct):
    """A tool of any type. `function` and `custom` are the client's own; `namespace` contains such tools."""

    type: str
    name: Name | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    format: dict[str, Any] | None = None
    tools: list[WireTool] | None = None


class WireChoice(Struct, omit_defaults=True):
    type: str
    name: str | None = None
    namespace: str | None = None
    mode: Literal["auto", "required"] | None = None
    tools: list[WireChoice] | None = None


class TextFormat(Struct, omit_defaults=True):
    type: Literal["text", "json_object", "json_schema"]
    schema: dict[str, Any] | None = None
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class TextConfig(Struct, forbid_unknown_fields=True, omit_defaults=True):
    format: TextFormat | None = None
    verbosity: str | None = None


class ReasoningConfig(Struct, forbid_unknown_fields=True, omit_defaults=True):
    effort: Effort | bool | None = None
    enabled: bool | None = None
    max_tokens: Budget | None = None
    mode: Literal["standard"] | None = None
    summary: str | None = None
    generate_summary: str | None = None
    context: str | None = None


class StreamOptions(Struct, forbid_unknown_fields=True):
    include_obfuscation: bool | None = None
    include_usage: bool | None = None


Include = Literal[
    "reasoning.encrypted_content",
    "message.output_text.logprobs",
    "message.input_image.image_url",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
]


class Head(ThinkingSwitches):
    """The body without `input`, `instructions` and `tools`."""

    model: Annotated[str, Meta(min_length=1, max_length=256)]
    stream: bool | None = None
    previous_response_id: str | None = None
    include: list[Include] | None = None
    tool_choice: Literal["none", "auto", "required", "any"] | WireChoice | None = None
    parallel_tool_calls: bool | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    max_output_tokens: TokenLimit | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    reasoning: ReasoningConfig | None = None
    text: TextConfig | None = None
    prompt_cache_key: str | None = None
    # accepted only with a value that requests nothing
    truncation: Literal["disabled"] | None = None
    background: Literal[False] | None = None
    context_management: Annotated[list[Any], Meta(max_length=0)] | None = None
    # no effect
    store: bool | None = None
    metadata: dict[str, Any] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    service_tier: str | None = None
    stream_options: StreamOptions | None = None
    max_tool_calls: int | None = None
    client_metadata: Any = None
    prompt_cache_retention: Any = None
    prompt_cache_options: Any = None
