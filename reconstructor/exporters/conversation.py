"""Conversations rebuilt from the record: an assistant message is the reply that was sampled, not the client's echo.

A harness may send a reply back without its thinking, edited, or cut; what it left out was still sampled. So each call
of a proven chain gives the messages that are new in its request, then its own recorded reply. Assistant messages that
no call of the chain sampled are context.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rolltap.errors import DatasetError
from rolltap.reconstructor.exporters.base import CallText, ExportItem, Message, Rendered, Skipped, last_span
from rolltap.types import NO_VERSION, Call, CallKind, Finish, Flaw, Outcome, Segment

ReasoningUse = Literal["keep", "drop"]
Targets = Literal["whole", "split", "weight"]
"""How a row says which replies are trained: all are; its last one is; by the `weight` of each."""

SHORT_ID = "call{:05d}"
"""Tool-call ids in datasets: 9 letters and digits, which every chat template accepts, counted in each conversation."""


def one_of(name: str, value: str, known: Iterable[str]) -> None:
    """Refuses an option's value that is not known."""
    if value not in known:
        raise DatasetError(f"--option {name}: want {' or '.join(known)}, not {value!r}")


@dataclass(frozen=True, slots=True)
class MessageForm:
    """How messages are written. `reasoning` is kept (as `reasoning_content`) or dropped.

    `arguments` of tool calls are an object where they are JSON, as most chat templates want, or a text (DeepSeek-V3's).
    """

    reasoning: ReasoningUse = "keep"
    arguments: Literal["object", "text"] = "object"

    def __post_init__(self) -> None:
        one_of("reasoning", self.reasoning, ("keep", "drop"))
        one_of("arguments", self.arguments, ("object", "text"))


AS_RECORDED = MessageForm()
UNTRAINED = Skipped("a reply that may not be trained")


@dataclass(frozen=True, slots=True, eq=False)
class RecordedMessage:
    """One message of a conversation. `call_id` is the call that sampled it; None for context.

    `train` says whether this row is the one that trains it; `version` is the newest weight version of its tokens.
    """

    message: Message
    call_id: str | None = None
    train: bool = False
    finish: Finish | None = None
    tokens: int = 0
    version: int = NO_VERSION


@dataclass(frozen=True, slots=True, eq=False)
class Conversation:
    """A whole conversation up to its last trained reply, and the segment behind it where there are tokens."""

    recorded: Sequence[RecordedMessage]
    tools: Sequence[Mapping[str, Any]]
    segment: Segment | None
    agent: str

    @property
    def opening(self) -> int:
        """How many messages stand before the first sampled one."""
        return next(index for index, each in enumerate(self.recorded) if each.call_id is not None)

    @property
    def all_trained(self) -> bool:
        """Whether every assistant message behind the opening is trained by this row."""
        later = self.recorded[self.opening :]
        return all(each.train for each in later if each.message["role"] == "assistant")

    def messages(self, form: MessageForm = AS_RECORDED) -> list[dict[str, Any]]:
        """The messages with short tool-call ids."""
        ids: dict[str, str] = {}
        return [_plain(each.message, form, ids) for each in self.recorded]

    def weighted(self, form: MessageForm = AS_RECORDED) -> list[dict[str, Any]]:
        """The messages, with a `weight` of 1 or 0 on each assistant message: whether it is to be trained."""
        pairs = zip(self.messages(form), self.recorded, strict=True)
        return [
            {**message, "weight": int(each.train)} if message["role"] == "assistant" else message
            for message, each in pairs
        ]

    def targets(self, targets: Targets, form: MessageForm = AS_RECORDED) -> list[list[dict[str, Any]]]:
        """The messages of each row. No row for `whole` where a reply may not be trained or another row trains it."""
        if targets == "weight":
            return [self.weighted(form)]
        messages = self.messages(form)
        if targets == "split":
            return [messages[: index + 1] for index, each in enumerate(self.recorded) if each.train]
        replies = (each for each in self.recorded if each.message["role"] == "assistant")
        return [messages] if all(each.train for each in replies) else []

    def rendered(self) -> Rendered | None:
        if self.segment is None:
            return None
        end = last_span(self.segment).end
        return Rendered([each.message for each in self.recorded], self.tools, self.segment.token_ids[:end])


def recorded_messages(item: ExportItem, chain: Sequence[tuple[str, bool]]) -> list[RecordedMessage] | None:
    """The messages of a chain of calls, each with whether its reply is trained here; None where a call has no text."""
    messages: list[RecordedMessage] = []
    known = 0
    for call_id, train in chain:
        text = item.texts.get(call_id)
        if text is None or text.reply is None:
            return None
        if known and not _echoes_a_reply(text, known):
            known -= 1  # the client left the reply out of the history that it sent back
        messages += [RecordedMessage(message) for message in text.messages[known:]]
        call = item.calls[call_id]
        version = max((span.version for span in call.versions), default=NO_VERSION)
        messages.append(RecordedMessage(text.reply, call_id, train, call.finish, len(call.output_ids), version))
        known = len(text.messages) + 1
    return messages


def conversations(item: ExportItem) -> Iterator[Conversation]:
    """One for each segment with loss; where the session has no tokens at all, one for each call that none goes on."""
    if item.trajectory.segments:
        for segment in item.rows:
            last = last_span(segment)
            spans = [turn for turn in segment.turns if turn.end <= last.end]
            recorded = recorded_messages(item, [(turn.call_id, turn.trained) for turn in spans])
            if recorded is not None:
                yield Conversation(recorded, item.texts[last.call_id].tools, segment, segment.agent)
        return
    trained: set[str] = set()
    for call_id in _ends(item):
        chain = _text_chain(item, call_id)
        fresh = [(each, each not in trained and _finished(item.calls[each])) for each in chain]
        trained.update(chain)
        recorded = recorded_messages(item, fresh)
        if recorded is not None and any(train for _, train in fresh):
            yield Conversation(recorded, item.texts[call_id].tools, None, item.agents.get(call_id, ""))


def rewarded(item: ExportItem) -> tuple[float, Conversation] | Skipped:
    """The item's reward and its main conversation, or why a format that judges whole conversations can't use it."""
    if item.reward is None:
        return Skipped("no reward")
    main = [conversation for conversation in conversations(item) if not conversation.agent]
    if len(main) != 1:
        return Skipped("not one main conversation")
    return (item.reward, main[0]) if main[0].all_trained else UNTRAINED


def content_text(message: Message) -> str:
    """The text of a message; images stand as `<image>`."""
    content = message.get("content") or ""
    if isinstance(content, str):
        return content
    return "".join(part["text"] if part["type"] == "text" else "<image>" for part in content)


def _echoes_a_reply(text: CallText, known: int) -> bool:
    return known <= len(text.messages) and text.messages[known - 1]["role"] == "assistant"


def _plain(message: Message, form: MessageForm, ids: dict[str, str]) -> dict[str, Any]:
    plain = {key: value for key, value in message.items() if form.reasoning == "keep" or key != "reasoning_content"}
    if calls := message.get("tool_calls"):
        plain["tool_calls"] = [{**call, "id": _short(call["id"], ids)} for call in calls]
        if form.arguments == "text":
            plain["tool_calls"] = [{**call, "function": as_text(call["function"])} for call in plain["tool_calls"]]
    if call_id := message.get("tool_call_id"):
        plain["tool_call_id"] = _short(call_id, ids)
    return plain


def as_text(function: Mapping[str, Any]) -> dict[str, Any]:
    """A tool call's function with its arguments as a text."""
    arguments = function["arguments"]
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return {**function, "arguments": text}


def _short(call_id: str, ids: dict[str, str]) -> str:
    return ids.setdefault(call_id, SHORT_ID.format(len(ids) + 1))


def _finished(call: Call) -> bool:
    """Whether a reply of text is whole: what `Rules` mask by default where there are tokens."""
    return call.finish is not Finish.LENGTH and call.flaw is not Flaw.TOOL_CALL_UNPARSABLE


def _ends(item: ExportItem) -> list[str]:
    """The agent's calls of text that no later one goes on from: by recorded parent, else by their messages."""
    usable = [
        call_id
        for call_id in sorted(item.texts)
        if item.texts[call_id].reply is not None
        and item.calls[call_id].outcome is Outcome.COMPLETED
        and item.kinds.get(call_id, CallKind.MAIN) is CallKind.MAIN
    ]
    parents = {item.calls[call_id].parent_id for call_id in usable}
    ends = [call_id for call_id in usable if call_id not in parents]
    return [end for end in ends if not any(_goes_on(item.texts[end], item.texts[later]) for later in usable)]


def _goes_on(text: CallText, later: CallText) -> bool:
    whole = text.conversation
    return len(later.messages) >= len(whole) and list(later.messages[: len(whole)]) == whole


def _text_chain(item: ExportItem, call_id: str) -> list[str]:
    """A call of text behind those that it goes on from, as far as the record names plain parents."""
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
    """Tool schemas as a JSON text: a column of them can't be typed, and trainers read the text."""
    return json.dumps(list(tools), ensure_ascii=False)
