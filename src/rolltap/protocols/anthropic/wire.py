"""Anthropic Messages request types. Reference: `anthropic.types.message_create_params` and its beta twin.

Unknown fields of the body are refused by name. Unknown fields of messages and blocks (`cache_control`, `citations`, a
system message's `output_config`) have no effect and are ignored.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from rolltap.protocols.openai_chat.wire import MAX_STOPS, Name, StopText, TokenLimit
from rolltap.protocols.thinking import Budget, Effort

ToolUseId = Annotated[str, Meta(min_length=1, max_length=512)]


class TextBlock(Struct, tag_field="type", tag="text"):
    text: str


class Base64Source(Struct, tag_field="type", tag="base64"):
    media_type: str
    data: str


class UrlSource(Struct, tag_field="type", tag="url"):
    url: str


class TextSource(Struct, tag_field="type", tag="text"):
    data: str


class ContentSource(Struct, tag_field="type", tag="content"):
    content: str | list[TextBlock | ImageBlock]


class FileSource(Struct, tag_field="type", tag="file"):
    file_id: str


class ImageBlock(Struct, tag_field="type", tag="image"):
    source: Base64Source | UrlSource | FileSource


class DocumentBlock(Struct, tag_field="type", tag="document"):
    """A document. Only its text is read: engines can't read other types (PDF)."""

    source: TextSource | ContentSource | Base64Source | UrlSource | FileSource
    title: str | None = None


class SearchResultBlock(Struct, tag_field="type", tag="search_result"):
    source: str
    title: str
    content: list[TextBlock]


class ThinkingBlock(Struct, tag_field="type", tag="thinking"):
    thinking: str
    signature: str | None = None


class RedactedThinkingBlock(Struct, tag_field="type", tag="redacted_thinking"):
    data: str


class ToolUseBlock(Struct, tag_field="type", tag="tool_use"):
    id: ToolUseId
    name: Name
    input: msgspec.Raw


class ToolReferenceBlock(Struct, tag_field="type", tag="tool_reference"):
    """In a tool search's result: stands for the full definition of a deferred tool."""

    tool_name: str


ResultBlock = TextBlock | ImageBlock | DocumentBlock | SearchResultBlock | ToolReferenceBlock


class ToolResultBlock(Struct, tag_field="type", tag="tool_result"):
    tool_use_id: ToolUseId
    content: str | list[ResultBlock] | None = None
    is_error: bool | None = None


Block = (
    TextBlock
    | ImageBlock
    | DocumentBlock
    | SearchResultBlock
    | ThinkingBlock
    | RedactedThinkingBlock
    | ToolUseBlock
    | ToolResultBlock
    | ToolReferenceBlock
)


class WireMessage(Struct):
    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class WireTool(Struct):
    """A tool. `type` is absent or "custom" for the client's own tools."""

    name: Name | None = None
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    defer_loading: bool | None = None


class WireChoice(Struct):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Struct):
    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: Budget | None = None
    display: str | None = None


class OutputFormat(Struct):
    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(Struct, forbid_unknown_fields=True):
    effort: Effort | bool | None = None
    format: OutputFormat | None = None
    task_budget: dict[str, Any] | None = None  # a hint for the model, which is not given to it; findings count it


class Metadata(Struct):
    user_id: str | None = None


class Edit(Struct):
    """A vendor-side edit of the history. It has no effect: the policy decides which thinking stays, and the model sees
    all tool results (findings count it)."""

    type: Literal["clear_thinking_20251015", "clear_tool_uses_20250919"]


class ContextManagement(Struct, forbid_unknown_fields=True):
    edits: list[Edit] = []


class Head(Struct, forbid_unknown_fields=True):
    """The body without `messages`, `system` and `tools`."""

    model: Annotated[str, Meta(min_length=1, max_length=256)]
    max_tokens: TokenLimit | None = None
    stream: bool | None = None
    tool_choice: WireChoice | None = None
    temperature: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=0)] | None = None
    stop_sequences: Annotated[list[StopText], Meta(max_length=MAX_STOPS)] | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    metadata: Metadata | None = None
    # accepted only with a value that requests nothing
    context_management: ContextManagement | None = None
    mcp_servers: Annotated[list[Any], Meta(max_length=0)] | None = None
    # no effect
    service_tier: str | None = None
    inference_geo: str | None = None
    speed: str | None = None
    cache_control: Any = None
    diagnostics: Any = None
    user_profile_id: str | None = None
    workspace_id: str | None = None
