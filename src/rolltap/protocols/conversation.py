"""The common form of model requests and replies, independent of the protocol.

A dialect parses its wire format to a `ChatRequest` and writes a stream of `ReplyEvent`s back. Continuation, engines and
the recorder use only these types. They are immutable, so calls that repeat a message can share the parsed object.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

Role = Literal["system", "developer", "user", "assistant", "tool"]

MAX_DEPTH = 64
"""Maximum nesting of client-given JSON (tool schemas, arguments): later readers recurse."""

MAX_NAME = 256
"""Maximum length of a tool's name, declared or sampled."""

TOOL_ERROR = "[tool error]"
"""Prefix of the text of a failed tool."""


class Text(msgspec.Struct, frozen=True, tag="text"):
    text: str


class Image(msgspec.Struct, frozen=True, tag="image"):
    """An image as a data URL, or as a remote URL if the policy allows its host."""

    url: str
    detail: str | None = None


class Attachment(msgspec.Struct, frozen=True, tag="attachment"):
    """A document, or other media that no engine takes. `where` is its path in its message.

    `dialects.history` replaces it by its `text` where a tool returned it, and refuses it elsewhere.
    """

    kind: Literal["image", "document", "audio", "video"]
    media_type: str = ""
    where: str = ""

    @property
    def text(self) -> str:
        """The line that the model reads instead."""
        return f"[{self.name}, not shown to this model]"

    @property
    def name(self) -> str:
        kind = self.media_type[:80] if self.media_type.isprintable() else ""
        return f"{self.kind} ({kind})" if kind and self.kind != "image" else self.kind


class Reasoning(msgspec.Struct, frozen=True, tag="reasoning"):
    """Thinking that the harness sends back. `handle` is the signature or encrypted content that came with it.

    In a recorded reply, `details` are the blocks in which a chat upstream gave it, which it wants back as they were.
    """

    text: str
    handle: str | None = None
    details: tuple[dict[str, Any], ...] = ()

    def __hash__(self) -> int:
        return hash((self.text, self.handle))  # `details` has no hash


class ToolCall(msgspec.Struct, frozen=True):
    """A tool invocation. `arguments` is the text as written: JSON for functions, free text for `custom` tools.

    In a recorded reply, `id` is our handle and `given_id` the id that the model sampled or the upstream gave ("":
    none). `extra` has the upstream's further fields, which it wants back (a thought signature).
    """

    id: str
    name: str
    arguments: str
    kind: Literal["function", "custom"] = "function"
    given_id: str = ""
    extra: dict[str, Any] = {}

    def __hash__(self) -> int:
        return hash((self.id, self.name, self.arguments, self.kind, self.given_id))  # `extra` has no hash


Part = Text | Image | Attachment | Reasoning

IMAGE_LINE = Attachment("image").text
"""What a model that takes no images reads in the place of an image."""

TOOL_MEDIA, TOOL_DOCUMENT = "tool_media", "tool_document"
TOOL_RESULT_REPEATED, TOOL_RESULT_UNMATCHED = "tool_result_repeated", "tool_result_unmatched"


class Message(msgspec.Struct, frozen=True):
    """One message of a conversation. `handle` is an item id that rolltap minted and the client sent back, if any.

    With `recall` the client sent only the handle: the message stands for the recorded reply with this handle.
    `call_offset` of a tool message: the number of calls from the one that is next in order to the one that it answers.
    `dialects.history` sets it; it is 0 if the results are in the order of the calls. It also sets `marks`: what is
    unusual about the message and may be answered otherwise than asked (`TOOL_MEDIA`, ...).
    """

    role: Role
    parts: tuple[Part, ...] = ()
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    name: str | None = None
    handle: str | None = None
    is_error: bool = False
    recall: bool = False
    call_offset: int = 0
    marks: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """The text for the model. Parts become lines, except a reply's, which clients split arbitrarily.

        A failed tool's text gets a prefix, as templates have no field for failures.
        """
        between = "" if self.role == "assistant" else "\n"
        text = between.join([part.text for part in self.parts if isinstance(part, Text)])
        return f"{TOOL_ERROR}\n{text}" if self.is_error else text

    @property
    def described(self) -> str:
        """The text for a model that takes no images: a line stands for each."""
        if TOOL_MEDIA not in self.marks:
            return self.text
        parts = tuple(Text(IMAGE_LINE) if isinstance(part, Image) else part for part in self.parts)
        return msgspec.structs.replace(self, parts=parts, marks=()).text

    @property
    def reasoning(self) -> str:
        """The reasoning parts, joined."""
        return "".join(part.text for part in self.parts if isinstance(part, Reasoning))

    @property
    def reasoning_details(self) -> tuple[dict[str, Any], ...]:
        """The upstream's own blocks of the reasoning."""
        return tuple(block for part in self.parts if isinstance(part, Reasoning) for block in part.details)


class Tool(msgspec.Struct, frozen=True):
    """A tool that the model may call. `parameters` is a JSON schema; None for a `custom` (free text) tool."""

    name: str
    description: str = ""
    parameters: dict[str, Any] | None = None
    kind: Literal["function", "custom"] = "function"
    format: dict[str, Any] | None = None  # the grammar of a custom tool


class ToolChoice(msgspec.Struct, frozen=True):
    """`mode` "named" forces one of the tools in `names`; "auto" and "required" with `names` allow only those."""

    mode: Literal["auto", "none", "required", "named"] = "auto"
    names: tuple[str, ...] = ()
    parallel: bool = True


class Sampling(msgspec.Struct, frozen=True, omit_defaults=True):
    """Sampling parameters. None: not requested."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    seed: int | None = None
    n: int = 1
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logprobs: bool = False
    top_logprobs: int = 0
    thinking: bool | None = None
    effort: str | None = None
    thinking_budget: int | None = None  # tokens of thinking
    keep_thinking: bool | None = None  # earlier thinking stays in the prompt (a policy's `history_thinking`)
    json_schema: dict[str, Any] | None = None  # structured output; {} asks for any JSON object

    def choice_seed(self, index: int) -> int | None:
        """The seed of choice `index`, signed 64 bits. With one seed, all choices would be the same sample."""
        if self.seed is None:
            return None
        return (self.seed + index + 2**63) % 2**64 - 2**63


class Hints(msgspec.Struct, frozen=True):
    """A call's conversation, agent and kind from the harness's headers. They never identify the caller."""

    conversation: str | None = None
    agent: str | None = None
    kind: str | None = None  # "main", "auxiliary", "summary"
    retry: int = 0
    raw: dict[str, str] = msgspec.field(default_factory=dict)


class ChatRequest(msgspec.Struct, frozen=True):
    """A parsed request.

    The call log stores `items`, `fixed` and `head`. `items`: the history items as JSON bytes (one per `messages` entry
    or input item). `fixed`: large recurring parts (tool schemas, system text). `head`: the rest of the body. `wire`:
    values that the dialect needs for its reply.
    """

    dialect: str
    model: str
    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()
    tool_choice: ToolChoice = ToolChoice()
    sampling: Sampling = Sampling()
    stream: bool = False
    hints: Hints = Hints()
    previous: str | None = None  # the handle of the reply that this request continues (`previous_response_id`)
    recalls: bool = False
    remarks: tuple[str, ...] = ()  # names of what was taken and is not done as asked (`CallShape.unapplied`)
    stored: bool = True  # False: the client will not ask for the reply again (`store`)
    head: bytes = b"{}"
    items: tuple[bytes, ...] = ()
    fixed: dict[str, bytes] = msgspec.field(default_factory=dict)
    wire: dict[str, Any] = msgspec.field(default_factory=dict)


class Usage(msgspec.Struct, frozen=True):
    """Token counts of a call. `cached` counts prompt tokens that continue a recorded context."""

    prompt: int = 0
    output: int = 0
    cached: int = 0
    reasoning: int = 0


class TokenLogprob(msgspec.Struct, frozen=True):
    """A sampled token as a client that asked for log-probs sees it.

    `bytes`: the token's own bytes, which are no text where it is a part of a character. None: those of `token`.
    """

    token: str
    logprob: float
    top: tuple[tuple[str, float], ...] = ()
    bytes: bytes | None = None


# The stream of a reply. Every `index` is the 0-based choice (`n > 1`).


class ReplyStarted(msgspec.Struct, frozen=True):
    """The first event. `call_id` is in every handle of the reply."""

    call_id: str
    created: int
    model: str
    prompt_tokens: int = 0
    handle: str = ""  # identifies the call in fields that the protocol makes the client send back


class ReasoningDelta(msgspec.Struct, frozen=True):
    text: str
    index: int = 0


class TextDelta(msgspec.Struct, frozen=True):
    text: str
    index: int = 0


class ToolCallStarted(msgspec.Struct, frozen=True):
    position: int  # 0-based among the reply's tool calls
    id: str
    name: str
    kind: Literal["function", "custom"] = "function"
    index: int = 0


class ToolCallDelta(msgspec.Struct, frozen=True):
    position: int
    arguments: str
    index: int = 0


class ToolCallEnded(msgspec.Struct, frozen=True):
    position: int
    index: int = 0


class Choice(msgspec.Struct, frozen=True):
    """A complete reply: the assistant message and its finish reason. `stop` is the stop string that ended it."""

    message: Message
    finish: Literal["stop", "length", "tool_calls", "abort", "error"]
    stop: str | None = None
    logprobs: tuple[TokenLogprob, ...] | None = None
    index: int = 0


class ReplyEnded(msgspec.Struct, frozen=True):
    """The terminal event. It is sent only when the call is durable."""

    choices: tuple[Choice, ...]
    usage: Usage


ReplyEvent = ReplyStarted | ReasoningDelta | TextDelta | ToolCallStarted | ToolCallDelta | ToolCallEnded | ReplyEnded
