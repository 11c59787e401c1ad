"""Conversations out of items: which ones a session holds, and their forms as other tools want them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rolltap.errors import DatasetError
from rolltap.reconstructor.exporters.base import CallText, ExportItem, Message, Rendered, Skipped, last_span
from rolltap.types import CallKind, Outcome, Segment

ReasoningUse = Literal["keep", "drop"]


@dataclass(frozen=True, slots=True, eq=False)
class Conversation:
    """A whole conversation: the text of its last call, and the segment behind it where there are tokens."""

    call_id: str
    text: CallText
    segment: Segment | None
    agent: str

    def rendered(self) -> Rendered | None:
        if self.segment is None:
            return None
        end = last_span(self.segment).end
        return Rendered(self.text.conversation, self.text.tools, self.segment.token_ids[:end])


def conversations(item: ExportItem) -> Iterator[Conversation]:
    """One for each segment with loss; where the session has no tokens at all, one for each call that none goes on."""
    if item.trajectory.segments:
        for segment in item.rows:
            turn = last_span(segment)
            text = item.texts.get(turn.call_id)
            if text is not None and text.reply is not None:
                yield Conversation(turn.call_id, text, segment, segment.agent)
        return
    for call_id in _ends(item):
        yield Conversation(call_id, item.texts[call_id], None, item.calls[call_id].agent)


def main_conversation(item: ExportItem) -> Conversation | None:
    """The one conversation of the session's main agent; None where there are several (compaction, edits) or none."""
    found = [conversation for conversation in conversations(item) if not conversation.agent]
    return found[0] if len(found) == 1 else None


def rewarded(item: ExportItem) -> tuple[float, Conversation] | Skipped:
    """The item's reward and main conversation, or which of them it lacks."""
    if item.reward is None:
        return Skipped("no reward")
    conversation = main_conversation(item)
    return Skipped("not one main conversation") if conversation is None else (item.reward, conversation)


def opening(item: ExportItem, conversation: Conversation) -> Sequence[Message]:
    """The messages before the first reply of a conversation."""
    if conversation.segment is not None:
        first = item.texts.get(conversation.segment.turns[0].call_id)
        return first.messages if first is not None else ()
    messages = conversation.text.conversation
    first_reply = next(index for index, message in enumerate(messages) if message["role"] == "assistant")
    return messages[:first_reply]


def with_reasoning(messages: Iterable[Message], use: ReasoningUse) -> list[Message]:
    """The messages with their reasoning kept or dropped."""
    if use == "keep":
        return list(messages)
    return [{key: value for key, value in message.items() if key != "reasoning_content"} for message in messages]


def content_text(message: Message) -> str:
    """The text of a message; images stand as `<image>`."""
    content = message.get("content") or ""
    if isinstance(content, str):
        return content
    return "".join(part["text"] if part["type"] == "text" else "<image>" for part in content)


def tools_text(tools: Sequence[Mapping[str, Any]]) -> str:
    """Tool schemas as a JSON text: a column of them can't be typed, and trainers read the text."""
    return json.dumps(list(tools), ensure_ascii=False)


def one_of(name: str, value: str, known: Sequence[str]) -> None:
    """Refuses an option's value that is not known."""
    if value not in known:
        raise DatasetError(f"--option {name}: want {' or '.join(known)}, not {value!r}")


def _ends(item: ExportItem) -> list[str]:
    """The text-only calls that no later one goes on from: by recorded parent, else by their messages."""
    usable = [
        call_id
        for call_id in sorted(item.texts)
        if item.texts[call_id].reply is not None
        and item.calls[call_id].outcome is Outcome.COMPLETED
        and item.calls[call_id].kind is CallKind.MAIN
    ]
    parents = {item.calls[call_id].parent_id for call_id in usable}
    ends = [call_id for call_id in usable if call_id not in parents]
    return [end for end in ends if not any(_goes_on(item.texts[end], item.texts[later]) for later in usable)]


def _goes_on(text: CallText, later: CallText) -> bool:
    whole = text.conversation
    return len(later.messages) >= len(whole) and list(later.messages[: len(whole)]) == whole
