"""Compares a harness's own log with the record: the only check of a session that does not share our assumptions.

What must hold:

* every reply of the log is a call of the record: by the id or a tool-call id that the server gave it, else, where the
  protocol carries none, by its place and its count of tokens: the agent's next reply if it may be that, else the next
  one of any conversation, else an earlier one that begins a conversation or need not be in the log;
* replies of a conversation come in the same order (a harness that runs within another has a log of its own, which may
  be read before or after it), with the same tool calls and the same count of sampled tokens;
* every call that the agent's main conversation went on from, or ended with, is in the log;
* a message between two replies has the role in the record that it has in the log, where one plainly continues the
  other.

The record may hold more: side calls, subagents, samples that nothing followed. Where the harness was ended, its last
reply may be missing in the log.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec

from rolltap.calllog.base import CallRow
from rolltap.contract.harness_log import HarnessLog, LogEntry
from rolltap.ids import ALPHABET, ID_LENGTH
from rolltap.log_check import LogCheck, LogVerdict
from rolltap.proxy.continuation.handles import HANDLE_LENGTH, PREFIX
from rolltap.proxy.conversation.chat import Message
from rolltap.reading.conversations import turns
from rolltap.reconstructor.rules import MaskReason
from rolltap.types import CallKind, Outcome, Trajectory

TOOL_CALL = re.compile(rf"call_[{ALPHABET}]{{{HANDLE_LENGTH - len(PREFIX)}}}")
"""A handle where it is a tool call's id; harnesses may write something before it."""

_END = "(?![0-9A-Za-z])"
HANDLE = re.compile(
    rf"(?:(?={TOOL_CALL.pattern}{_END})call_|chatcmpl-(?=[{ALPHABET}]{{{ID_LENGTH}}}{_END}))([{ALPHABET}]{{{ID_LENGTH}}})"
)
"""The part of a handle that names its call (`rolltap.proxy.continuation.handles`). A vendor's own ids, where its
replies are relayed, begin alike and have other lengths."""


@dataclass(frozen=True, slots=True)
class RecordedReply:
    """A reply of the record as a log can be compared with it. `roles` are those of the messages that its call added,
    None where it does not plainly continue another one; `parent` is that other's id.

    `tokens` is None where they are of several samples at once. `required`: the harness must have it in its log. Of a
    call that was not `completed` the harness may have seen any part.
    """

    call_id: str
    tokens: int | None
    tool_calls: tuple[str, ...]
    roles: frozenset[str] | None
    required: bool
    completed: bool = True
    parent: str = ""


def recorded_replies(rows: Sequence[CallRow], trajectory: Trajectory) -> list[RecordedReply]:
    """The calls of a session that were sent to an engine, in order."""
    purposes = {purpose.call_id: purpose for purpose in trajectory.classifications}
    added = {turn.call_id: turn for turn in turns(rows)}
    replies: list[RecordedReply] = []
    followed = {row.intent.parent_id for row in rows if row.intent.break_ is None}
    toolset = next((row.intent.shape.toolset for row in rows if row.intent.id in followed), None)
    ended = [row.intent.id for row in rows if row.completion is not None and row.intent.shape.toolset == toolset]
    needed = {*followed, *ended[-1:]}
    for row in rows:
        done, purpose = row.completion, purposes[row.intent.id]
        if done is None or done.outcome is Outcome.REFUSED:
            continue
        completed = done.outcome is Outcome.COMPLETED
        message = msgspec.json.decode(done.message, type=Message) if done.message else Message("assistant")
        plain = row.intent.parent_id is not None and row.intent.break_ is None
        main = purpose.kind is CallKind.MAIN and not purpose.agent and purpose.mask != MaskReason.ABANDONED
        counted = len(done.output_ids) or done.usage.get("output", 0)
        replies.append(
            RecordedReply(
                call_id=row.intent.id,
                tokens=counted if row.intent.shape.choices == 1 else None,
                tool_calls=tuple(call.id for call in message.tool_calls),
                roles=frozenset(message.role for message in added[row.intent.id].new) if plain else None,
                required=main and completed and row.delivered is not False and row.intent.id in needed,
                completed=completed,
                parent=row.intent.parent_id or "" if plain else "",
            )
        )
    return replies


def compare(log: HarnessLog, replies: Sequence[RecordedReply]) -> LogCheck:
    """The verdict over a log and the replies of its session."""
    if log.problem:
        return LogCheck(LogVerdict.NONE, log.problem)
    logged = [entry for entry in log.entries if entry.role == "assistant"]
    if not logged:
        return LogCheck(LogVerdict.NONE, "the harness's log holds no reply")
    difference = next(_differences(log, replies), "")
    if difference:
        return LogCheck(LogVerdict.MISMATCH, difference)
    counted = sum(entry.tokens is not None for entry in logged)
    ids = sum(len(entry.tool_calls) for entry in logged)
    text = f"{len(logged)} replies ({counted} with token counts) and {ids} tool calls are as recorded"
    return LogCheck(LogVerdict.MATCH, text)


class _Pairs:
    """The replies of the log that were found in the record, so far."""

    def __init__(self, replies: Sequence[RecordedReply]) -> None:
        self.replies = replies
        self.position = {reply.call_id: index for index, reply in enumerate(replies)}
        self.matched: set[str] = set()
        self.continued: set[str] = set()
        self.last = -1

    def find(self, entry: LogEntry) -> RecordedReply | None:
        """The recorded reply that a logged one is."""
        named = [found.group(1) for text in (entry.id, *entry.tool_calls) if (found := HANDLE.search(text))]
        if named:
            return self.replies[self.position[named[0]]] if named[0] in self.position else None
        open_ = [reply for reply in self.replies[self.last + 1 :] if reply.call_id not in self.matched]
        due = next((reply for reply in open_ if reply.required), None)
        previous = self.replies[self.last].call_id if self.last >= 0 else ""
        if due is not None and due.parent in ("", previous) and _may_be(entry, due):
            return due
        later = next((reply for reply in open_ if reply.completed and _may_be(entry, reply)), None)
        return later or next(self._earlier(entry), None)

    def _earlier(self, entry: LogEntry) -> Iterator[RecordedReply]:
        """Replies above the last one that another conversation's log may go on with; the tokens must be known."""
        for reply in self.replies[: self.last + 1]:
            free = reply.completed and reply.call_id not in self.matched and (reply.roles is None or not reply.required)
            if free and None not in (entry.tokens, reply.tokens) and _may_be(entry, reply):
                yield reply

    def is_late(self, reply: RecordedReply) -> bool:
        """Whether the log had what was made after `reply` in its conversation already."""
        behind = self.position[reply.call_id] <= self.last and reply.required and reply.roles is not None
        return behind or reply.call_id in self.continued

    def add(self, reply: RecordedReply) -> None:
        self.matched.add(reply.call_id)
        self.continued.add(reply.parent)
        self.last = self.position[reply.call_id]


def _differences(log: HarnessLog, replies: Sequence[RecordedReply]) -> Iterator[str]:
    reply_by_tool_call = {call_id: reply for reply in replies for call_id in reply.tool_calls}
    pairs = _Pairs(replies)
    number = 0
    between: set[str] = set()
    for entry in log.entries:
        if entry.role != "assistant":
            between.add(entry.role)
            answered = _tool_call(entry.id)
            if _ours(answered) and answered not in reply_by_tool_call and not _of_cut_call(answered, replies):
                yield f"the log has a result of tool call {_short(entry.id)}, which no recorded reply made"
            continue
        number += 1
        reply = pairs.find(entry)
        if reply is None:
            yield f"reply {number} of the log ({_described(entry)}) is not in the record"
            return
        if reply.call_id in pairs.matched:
            yield f"reply {number} of the log is call {reply.call_id[-6:]} a second time"
        elif pairs.is_late(reply):
            yield f"reply {number} of the log is call {reply.call_id[-6:]}, which was made before the reply above it"
        yield from _unlike(number, entry, reply, between)
        pairs.add(reply)
        between = set()
    required = [reply for reply in replies if reply.required]
    missing = [reply for reply in required if reply.call_id not in pairs.matched]
    if not log.complete and missing and missing[-1] is required[-1]:
        missing.pop()
    if missing:
        ids = ", ".join(reply.call_id[-6:] for reply in missing[:3])
        yield f"{len(missing)} recorded replies are not in the log: {ids}{', ...' if len(missing) > 3 else ''}"


def _may_be(entry: LogEntry, reply: RecordedReply) -> bool:
    same_tokens = None in (entry.tokens, reply.tokens) or entry.tokens == reply.tokens
    return same_tokens and len(reply.tool_calls) == len(entry.tool_calls)


def _unlike(number: int, entry: LogEntry, reply: RecordedReply, between: set[str]) -> Iterator[str]:
    """What differs between a logged reply and the recorded one."""
    if not reply.completed:
        return
    where = f"reply {number} of the log (call {reply.call_id[-6:]})"
    ours = [_tool_call(call_id) for call_id in entry.tool_calls if _ours(call_id)]
    if len(entry.tool_calls) != len(reply.tool_calls) or not set(ours) <= set(reply.tool_calls):
        calls, recorded = ", ".join(map(_short, entry.tool_calls)), ", ".join(map(_short, reply.tool_calls))
        yield f"{where} makes the tool calls [{calls}], recorded are [{recorded}]"
    if None not in (entry.tokens, reply.tokens) and entry.tokens != reply.tokens:
        yield f"{where} has {entry.tokens} tokens, recorded are {reply.tokens}"
    if reply.roles is not None and (strange := between - reply.roles):
        yield f"before {where} the log has a message of role {', '.join(sorted(strange))}, the record none"


def _of_cut_call(tool_call_id: str, replies: Sequence[RecordedReply]) -> bool:
    """Whether the tool call is of a reply that broke off: a harness may have run what had come of it."""
    named = HANDLE.search(tool_call_id)
    return named is not None and any(not one.completed and one.call_id == named.group(1) for one in replies)


def _tool_call(logged: str) -> str:
    """The id that the server gave the call, where the log has it within another one."""
    inner = TOOL_CALL.search(logged)
    return inner.group() if inner is not None else logged


def _ours(call_id: str) -> bool:
    return HANDLE.search(call_id) is not None


def _described(entry: LogEntry) -> str:
    tokens = "tokens unknown" if entry.tokens is None else f"{entry.tokens} tokens"
    return f"{tokens}, {len(entry.tool_calls)} tool calls"


def _short(call_id: str) -> str:
    handle = HANDLE.search(call_id)
    return f"{handle.group(1)[-6:]}..." if handle else call_id[:40]
