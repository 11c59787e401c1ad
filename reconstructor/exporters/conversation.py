"""Conversations rebuilt from the record: an assistant message is the sampled reply, not the client's echo of it.

A harness may send a reply back without its thinking, edited, or cut, although all of it was sampled. So each call of a
proven chain contributes the new messages of its request, then its own recorded reply. Assistant messages that no call
of the chain sampled are context.

Openings of conversations are compared without volatile text: clocks, working directories, billing headers. It is
ignored in the harness's own text (`system`), and in the user's messages, too, if both conversations are known to be of
one task. Text that a policy declares as volatile (`policies.NAME.ignore`) is ignored in all messages but the
assistant's.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b, sha256
from typing import Any, ClassVar, Literal

from rolltap.errors import DatasetError
from rolltap.reconstructor.exporters.base import (
    CallText,
    ExportItem,
    Message,
    Rendered,
    SkippedItem,
    last_span,
    trained_whole,
)
from rolltap.types import NO_VERSION, Call, CallKind, Finish, Flaw, Outcome, Segment

ReasoningUse = Literal["keep", "drop", "tags"]
ImageUse = Literal["skip", "parts", "column"]
Targets = Literal["whole", "split", "weight"]
"""How a row marks the trained replies. whole: all are trained; split: the last one; weight: each has a `weight`."""

SHORT_ID = "call{:05d}"
"""Tool-call ids in datasets: 9 letters and digits, which every chat template accepts. Numbered per conversation."""


def one_of(name: str, value: str, known: Iterable[str]) -> None:
    """Raises `DatasetError` if an option's value is not in `known`."""
    if value not in known:
        raise DatasetError(f"--option {name}: expected {' or '.join(known)}, not {value!r}")


@dataclass(frozen=True, slots=True)
class MessageForm:
    """The form of written messages.

    `reasoning` is kept (as `reasoning_content`), dropped, or put before the content in `<think>` tags, for readers that
    ignore `reasoning_content`.

    `arguments` of tool calls: an object if they are JSON (most chat templates), or a text (DeepSeek-V3's template).

    `images`: a conversation that shows some has no row, or has them as OpenAI's parts (`image_url`), or in a column of
    their own, with `{"type": "image"}` in their places; then every content is a list of parts.
    """

    reasoning: ReasoningUse = "keep"
    arguments: Literal["object", "text"] = "object"
    images: ImageUse = "skip"

    image_uses: ClassVar[tuple[ImageUse, ...]] = ("skip", "parts")

    @property
    def column(self) -> str:
        """The type of a column of messages, as in `writers.TYPES`."""
        kind = "messages" if self.arguments == "object" else "messages_text"
        return f"{kind}_parts" if self.images == "column" else kind

    def __post_init__(self) -> None:
        one_of("reasoning", self.reasoning, ("keep", "drop", "tags"))
        one_of("arguments", self.arguments, ("object", "text"))
        one_of("images", self.images, self.image_uses)


AS_RECORDED = MessageForm()
UNTRAINED = SkippedItem("a reply that may not be trained")
SHOWS_IMAGES = SkippedItem("its messages show images")


@dataclass(frozen=True, slots=True, eq=False)
class RecordedMessage:
    """One message of a conversation. `call_id` is the call that sampled it; None for context.

    `train`: this row trains it. `version`: the newest weight version of its tokens.
    """

    message: Message
    call_id: str | None = None
    train: bool = False
    finish: Finish | None = None
    tokens: int = 0
    version: int = NO_VERSION


@dataclass(frozen=True, slots=True, eq=False)
class Conversation:
    """A whole conversation up to its last trained reply, with its segment if there are tokens."""

    recorded: Sequence[RecordedMessage]
    tools: Sequence[Mapping[str, Any]]
    segment: Segment | None
    agent: str

    @property
    def opening(self) -> int:
        """The number of messages before the first sampled one."""
        return next(index for index, message in enumerate(self.recorded) if message.call_id is not None)

    @property
    def all_trained(self) -> bool:
        """True if this row trains every assistant message after the opening."""
        later = self.recorded[self.opening :]
        return all(reply.train for reply in later if reply.message["role"] == "assistant")

    @property
    def image_urls(self) -> list[str]:
        """The URLs of the images that its messages show, in their order."""
        return [url for recorded in self.recorded for url in image_urls(recorded.message)]

    def image_files(self) -> list[bytes] | SkippedItem:
        """The files of its images, or why a column can't have them: TRL's has no place for those of tools."""
        if any(each.message["role"] == "tool" and image_urls(each.message) for each in self.recorded):
            return SkippedItem("a tool's result shows images")
        files = [_file_of(url) for url in self.image_urls]
        found = [file for file in files if file is not None]
        if len(found) < len(files):
            return SkippedItem("an image's file is not on record")
        if self.segment is not None:
            end = last_span(self.segment).end
            shown = [image.digest for image in self.segment.images if image.end <= end]
            if [sha256(file).hexdigest() for file in found] != shown:
                return SkippedItem("an image that the model was not shown")
        return found

    def messages(self, form: MessageForm = AS_RECORDED) -> list[dict[str, Any]]:
        """The messages with short tool-call ids."""
        ids: dict[str, str] = {}
        return [_plain(recorded.message, form, ids) for recorded in self.recorded]

    def weighted(self, form: MessageForm = AS_RECORDED) -> list[dict[str, Any]]:
        """The messages. Each assistant message has a `weight`: 1 if it is trained, else 0."""
        pairs = zip(self.messages(form), self.recorded, strict=True)
        return [
            {**message, "weight": int(recorded.train)} if message["role"] == "assistant" else message
            for message, recorded in pairs
        ]

    def targets(self, targets: Targets, form: MessageForm = AS_RECORDED) -> list[list[dict[str, Any]]]:
        """The messages of each row. `whole` has no row if this row may not train one of the replies."""
        if targets == "weight":
            return [self.weighted(form)]
        messages = self.messages(form)
        if targets == "split":
            return [messages[: index + 1] for index, message in enumerate(self.recorded) if message.train]
        replies = (message for message in self.recorded if message.message["role"] == "assistant")
        return [messages] if all(reply.train for reply in replies) else []

    def rendered(self) -> Rendered | None:
        """None without tokens, and with images, whose tokens no chat template writes."""
        if self.segment is None or self.image_urls:
            return None
        end = last_span(self.segment).end
        return Rendered([recorded.message for recorded in self.recorded], self.tools, self.segment.token_ids[:end])


def recorded_messages(item: ExportItem, chain: Sequence[tuple[str, bool]]) -> list[RecordedMessage] | None:
    """The messages of a chain of (call id, whether this row trains its reply). Those of a fork's origin are context.

    None if a call has no text, or a trained one no reply. Of an interrupted reply, the next request holds what the
    client kept.
    """
    messages: list[RecordedMessage] = []
    known, replied = 0, False
    for call_id, train in chain:
        text, sampled_by = item.texts.get(call_id), item.calls[call_id].sampled_by
        if sampled_by and text is not None and text.reply is None:
            continue  # a fork goes on inside this reply, with the same request
        if text is None or (train and text.reply is None):
            return None
        if replied and not (known <= len(text.messages) and text.messages[known - 1]["role"] == "assistant"):
            known -= 1  # the client omitted the previous reply from its history
        new = list(text.messages[known:])
        for index, message in reversed([each for each in text.injected if each[0] >= known]):
            new.insert(index - known, message)
        messages += map(RecordedMessage, new)
        known, replied = len(text.messages), text.reply is not None
        if text.reply is None:
            continue
        call = item.calls[call_id]
        version = max((span.version for span in call.versions), default=NO_VERSION)
        sampler = None if sampled_by else call_id
        messages.append(RecordedMessage(text.reply, sampler, train, call.finish, len(call.output_ids), version))
        known += 1
    return messages


def conversations(item: ExportItem) -> Iterator[Conversation]:
    """One for each segment with loss. If the session has no tokens at all: one for each call that no call continues."""
    if item.trajectory.segments:
        for segment in item.rows:
            last = last_span(segment)
            spans = [turn for turn in segment.turns if turn.end <= last.end]
            recorded = recorded_messages(item, [(turn.call_id, trained_whole(segment, turn)) for turn in spans])
            if recorded is not None and any(each.train for each in recorded):
                yield Conversation(recorded, item.texts[last.call_id].tools, segment, segment.agent)
        return
    trained: set[str] = set()
    for call_id in _last_calls(item):
        chain = _text_chain(item, call_id)
        marked = [(link, link not in trained and _is_whole(item.calls[link])) for link in chain]
        trained.update(chain)
        recorded = recorded_messages(item, marked)
        if recorded is not None and any(train for _, train in marked):
            yield Conversation(recorded, item.texts[call_id].tools, None, item.agents.get(call_id, ""))


def counted_conversations(item: ExportItem) -> Iterator[Conversation | SkippedItem]:
    """The item's conversations, then a `SkippedItem` for each segment with loss that has none, or for the item."""
    readable = list(conversations(item))
    yield from readable
    for _ in range(max(len(item.rows) - len(readable), int(not readable))):
        yield SkippedItem("no conversation that may be trained")


def rewarded(item: ExportItem, images: ImageUse) -> tuple[float, Conversation] | SkippedItem:
    """The item's reward and its only main conversation, or the reason why a format of whole conversations skips it."""
    if item.reward is None:
        return SkippedItem("no reward")
    main = [conversation for conversation in conversations(item) if not conversation.agent]
    if len(main) != 1:
        return SkippedItem("not one main conversation")
    if images == "skip" and main[0].image_urls:
        return SHOWS_IMAGES
    return (item.reward, main[0]) if main[0].all_trained else UNTRAINED


def content_text(message: Message) -> str:
    """The text of a message, with `<image>` for each image."""
    content = message.get("content") or ""
    if isinstance(content, str):
        return content
    return "".join(part["text"] if part["type"] == "text" else "<image>" for part in content)


def image_urls(message: Message) -> list[str]:
    """The URLs of the images that a message shows."""
    content = message.get("content") or ""
    return [] if isinstance(content, str) else [part["image_url"]["url"] for part in content if part["type"] != "text"]


def _file_of(url: str) -> bytes | None:
    """The file in a data URL; None for another URL."""
    head, _, data = url.partition(",")
    try:
        return base64.b64decode(data, validate=True) if head.lower().startswith("data:") else None
    except (binascii.Error, ValueError):
        return None


def _plain(message: Message, form: MessageForm, ids: dict[str, str]) -> dict[str, Any]:
    plain = {key: value for key, value in message.items() if form.reasoning == "keep" or key != "reasoning_content"}
    if form.reasoning == "tags" and (reasoning := message.get("reasoning_content")):
        plain["content"] = f"<think>\n{reasoning}\n</think>\n\n{content_text(message)}"
    if form.images == "column":
        plain["content"] = _parts(plain)
    if calls := message.get("tool_calls"):
        plain["tool_calls"] = [{**call, "id": _short(call["id"], ids)} for call in calls]
        if form.arguments == "text":
            plain["tool_calls"] = [{**call, "function": as_text(call["function"])} for call in plain["tool_calls"]]
    if call_id := message.get("tool_call_id"):
        plain["tool_call_id"] = _short(call_id, ids)
    return plain


def _parts(message: Message) -> list[dict[str, Any]]:
    """The content as parts, with a placeholder for each image."""
    content = message.get("content") or ""
    if isinstance(content, str):
        return [{"type": "text", "text": content}] if content else []
    return [part if part["type"] == "text" else {"type": "image"} for part in content]


def as_text(function: Mapping[str, Any]) -> dict[str, Any]:
    """A tool call's function with its arguments as a text."""
    arguments = function["arguments"]
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return {**function, "arguments": text}


def _short(call_id: str, ids: dict[str, str]) -> str:
    return ids.setdefault(call_id, SHORT_ID.format(len(ids) + 1))


def _is_whole(call: Call) -> bool:
    """True unless a text-only reply was cut, has a bad tool call, or was imported with weight 0. `Rules` mask the first
    two by default for token calls."""
    return call.finish is not Finish.LENGTH and call.flaw not in (Flaw.TOOL_CALL_UNPARSABLE, Flaw.WEIGHT_ZERO)


def _last_calls(item: ExportItem) -> list[str]:
    """The agent's text-only calls that no later call continues, by recorded parent or by their messages."""
    usable = [
        call_id
        for call_id in sorted(item.texts)
        if item.texts[call_id].reply is not None
        and item.calls[call_id].outcome is Outcome.COMPLETED
        and item.kinds.get(call_id, CallKind.MAIN) is CallKind.MAIN
    ]
    parents = {item.calls[call_id].parent_id for call_id in usable}
    ends = [call_id for call_id in usable if call_id not in parents]
    return [end for end in ends if not any(_continues(item.texts[later], item.texts[end]) for later in usable)]


def _continues(later: CallText, text: CallText) -> bool:
    prefix = text.conversation
    return len(later.messages) >= len(prefix) and list(later.messages[: len(prefix)]) == prefix


def _text_chain(item: ExportItem, call_id: str) -> list[str]:
    """A text-only call, preceded by the calls that it continues. Ends at a break or a call without a text parent."""
    chain = [call_id]
    while True:
        call = item.calls[chain[-1]]
        parent = item.texts.get(call.parent_id or "")
        if call.break_ is not None or call.parent_id in chain or parent is None or parent.reply is None:
            return chain[::-1]
        if len(item.texts[chain[-1]].messages) < len(parent.messages):
            return chain[::-1]
        chain.append(call.parent_id or "")


def tools_text(tools: Sequence[Mapping[str, Any]]) -> str:
    """Tool schemas as a JSON text: a column of schemas can't be typed, and trainers parse the text."""
    return json.dumps(list(tools), ensure_ascii=False)


_MONTH = r"(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)[a-z]*"
VOLATILE = tuple(
    re.compile(pattern)
    for pattern in (
        r"x-anthropic-billing-header:[^\n]*",
        r"\b[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}\b",
        r"\b\d{4}-\d\d-\d\d(?:[T ]\d\d:\d\d(?::\d\d(?:\.\d+)?)?(?:Z|[+-]\d\d:?\d\d)?)?",
        r"\b\d{1,2}/\d{1,2}/\d{4}\b",
        r"\b\d{1,2}:\d\d(?::\d\d)?(?:\s?[AaPp]\.?[Mm]\b\.?)?",
        rf"\b(?:{_MONTH} \d{{1,2}}(?:,? \d{{4}})?|\d{{1,2}} {_MONTH}(?: \d{{4}})?)\b",
        r"\b(?:Mon|Tues|Wednes|Thurs|Fri|Satur|Sun)day\b|\b(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun)\b",
        r"(?<![\w/.:])(?:/[\w.@+~-]+){2,}/?",
    )
)
"""Billing headers, UUIDs, dates, times, names of days, absolute paths."""


def opening_key(item: ExportItem) -> str:
    """A hash of the opening of the session's main conversation; "" unless it has exactly one.

    Only the policy's patterns apply to user messages: a path or a date there may be the task.
    """
    main = [conversation for conversation in conversations(item) if not conversation.agent]
    if len(main) != 1:
        return ""
    data = json.dumps(_beginning(main[0], item, ("system", "developer")), ensure_ascii=False)
    return blake2b(data.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


def begin_alike(one: tuple[ExportItem, Conversation], other: tuple[ExportItem, Conversation]) -> bool:
    """True if two conversations of one task begin with the same messages, apart from volatile text."""
    roles = ("system", "developer", "user", "tool")
    return _beginning(one[1], one[0], roles) == _beginning(other[1], other[0], roles)


def _beginning(conversation: Conversation, item: ExportItem, roles: Sequence[str]) -> list[Any]:
    """The opening messages. Those of `roles` are without volatile text."""
    opening = [each.message for each in conversation.recorded[: conversation.opening]]
    return [_steady(message, item.ignore, message["role"] in roles) for message in opening]


def _steady(message: Message, ignore: Sequence[re.Pattern[str]], everything: bool) -> Any:
    patterns = (*ignore, *VOLATILE) if everything else tuple(ignore)
    if message["role"] == "assistant":
        patterns = ()
    content = message.get("content") or ""
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    steady = [{**part, "text": _without(part["text"], patterns)} if part["type"] == "text" else part for part in parts]
    role = "system" if message["role"] == "developer" else message["role"]
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    return [role, steady, calls]


def _without(text: str, patterns: Sequence[re.Pattern[str]]) -> str:
    for pattern in patterns:
        text = pattern.sub("", text)
    return text
