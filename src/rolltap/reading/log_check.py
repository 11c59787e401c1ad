"""Compares a harness's own log with the record: the only check of a session that does not share our assumptions.

The rules:

* Every reply of the log is a call of the record. It is found by the id or a tool-call id that the server gave it; where
  the protocol carries none, by its position and token count: the agent's next reply if that fits, else the next one of
  any conversation, else an earlier one that begins a conversation or need not be in the log.
* Replies of a conversation have the same order (a harness that runs inside another has its own log, which may be read
  before or after it), the same tool calls and the same count of sampled tokens.
* Every call from which the agent's main conversation continued, or with which it ended, is in the log.
* A message between two replies has the same role in the record as in the log, if one plainly continues the other.

The record may hold more: side calls, subagents, samples that nothing continued. If the harness was stopped, its last
reply may be missing in the log.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rolltap.calllog.base import CallRow
from rolltap.contract.harness_log import HarnessLog, LogEntry
from rolltap.decoding import from_json
from rolltap.ids import ALPHABET, ID_LENGTH
from rolltap.log_check import LogCheck, LogVerdict
from rolltap.proxy.continuation.handles import HANDLE_LENGTH, PREFIX
from rolltap.proxy.conversation.chat import Message
from rolltap.reading.conversations import turns
from rolltap.reconstructor.rules import MaskReason
from rolltap.types import CallKind, Outcome, Trajectory

TOOL_CALL = re.compile(rf"call_[{ALPHABET}]{{{HANDLE_LENGTH - len(PREFIX)}}}")
"""A handle as a tool call's id; harnesses may put text before it."""

_END = "(?![0-9A-Za-z])"
HANDLE = re.compile(
    rf"(?:(?={TOOL_CALL.pattern}{_END})call_|chatcmpl-(?=[{ALPHABET}]{{{ID_LENGTH}}}{_END}))([{ALPHABET}]{{{ID_LENGTH}}})"
)
"""The part of a handle that names its call (`rolltap.proxy.continuation.handles`). A vendor's own ids in relayed
replies begin alike but have other lengths."""


@dataclass(frozen=True, slots=True)
class RecordedReply:
    """A recorded reply, in the form that a log is compared with. `roles`: those of the messages that its call added;
    None if it does not plainly continue another call. `parent`: the id of that other call.

    `tokens`: None if they are of several samples at once. `required`: the harness must have it in its log. If it is not
    `completed`, the harness may have seen any part of it.
    """

    call_id: str
    tokens: int | None
    tool_calls: tuple[str, ...]
    roles: frozenset[str] | None
    required: bool
    completed: bool = True
    parent: str = ""


def recorded_replies(rows: Sequence[CallRow], trajectory: Trajectory) -> list[RecordedReply]:
    """Returns the calls of a session that were sent to an engine, in order."""
    purposes = {purpose.call_id: purpose for purpose in trajectory.classifications}
    added = {turn.call_id: turn for turn in turns(rows)}
    replies: list[RecordedReply] = []
    parent_ids = {row.intent.parent_id for row in rows if row.intent.break_ is None}
    toolset = next((row.intent.shape.toolset for row in rows if row.intent.id in parent_ids), None)
    ended_ids = [row.intent.id for row in rows if row.completion is not None and row.intent.shape.toolset == toolset]
    required_ids = {*parent_ids, *ended_ids[-1:]}
    for row in rows:
        completion, purpose = row.completion, purposes[row.intent.id]
        if completion is None or completion.outcome is Outcome.REFUSED:
            continue
        completed = completion.outcome is Outcome.COMPLETED
        message = from_json(completion.message, Message) if completion.message else Message("assistant")
        continues = row.intent.parent_id is not None and row.intent.break_ is None
        main = purpose.kind is CallKind.MAIN and not purpose.agent and purpose.mask != MaskReason.ABANDONED
        token_count = len(completion.output_ids) or completion.usage.get("output", 0)
        replies.append(
            RecordedReply(
                call_id=row.intent.id,
                tokens=token_count if row.intent.shape.choices == 1 else None,
                tool_calls=tuple(call.id for call in message.tool_calls),
                roles=frozenset(message.role for message in added[row.intent.id].new) if continues else None,
                required=main and completed and row.delivered is not False and row.intent.id in required_ids,
                completed=completed,
                parent=row.intent.parent_id or "" if continues else "",
            )
        )
    return replies


def compare(log: HarnessLog, replies: Sequence[RecordedReply]) -> LogCheck:
    """Returns the verdict on a log, given the replies of its session."""
    if log.problem:
        return LogCheck(LogVerdict.NONE, log.problem)
    logged_replies = [entry for entry in log.entries if entry.role == "assistant"]
    if not logged_replies:
        return LogCheck(LogVerdict.NONE, "the harness's log holds no reply")
    difference = next(_differences(log, replies), "")
    if difference:
        return LogCheck(LogVerdict.MISMATCH, difference)
    with_counts = sum(entry.tokens is not None for entry in logged_replies)
    ids = sum(len(entry.tool_calls) for entry in logged_replies)
    text = f"{len(logged_replies)} replies ({with_counts} with token counts) and {ids} tool calls are as recorded"
    return LogCheck(LogVerdict.MATCH, text)


class _Pairs:
    """The replies of the log that were found in the record so far."""

    def __init__(self, replies: Sequence[RecordedReply]) -> None:
        self.replies = replies
        self.position = {reply.call_id: index for index, reply in enumerate(replies)}
        self.matched: set[str] = set()
        self.continued: set[str] = set()
        self.last = -1

    def find(self, entry: LogEntry) -> RecordedReply | None:
        """Returns the recorded reply of a logged one; None if there is none."""
        call_ids = [match.group(1) for text in (entry.id, *entry.tool_calls) if (match := HANDLE.search(text))]
        if call_ids:
            return self.replies[self.position[call_ids[0]]] if call_ids[0] in self.position else None
        open_ = [reply for reply in self.replies[self.last + 1 :] if reply.call_id not in self.matched]
        due = next((reply for reply in open_ if reply.required), None)
        previous = self.replies[self.last].call_id if self.last >= 0 else ""
        if due is not None and due.parent in ("", previous) and _may_be(entry, due):
            return due
        later = next((reply for reply in open_ if reply.completed and _may_be(entry, reply)), None)
        return later or next(self._earlier(entry), None)

    def _earlier(self, entry: LogEntry) -> Iterator[RecordedReply]:
        """Yields earlier replies that another conversation's log may have next. Both token counts must be known."""
        for reply in self.replies[: self.last + 1]:
            is_free = (
                reply.completed and reply.call_id not in self.matched and (reply.roles is None or not reply.required)
            )
            if is_free and None not in (entry.tokens, reply.tokens) and _may_be(entry, reply):
                yield reply

    def is_late(self, reply: RecordedReply) -> bool:
        """True if the log already had a reply that was made after `reply` in its conversation."""
        is_behind = self.position[reply.call_id] <= self.last and reply.required and reply.roles is not None
        return is_behind or reply.call_id in self.continued

    def add(self, reply: RecordedReply) -> None:
        self.matched.add(reply.call_id)
        self.continued.add(reply.parent)
        self.last = self.position[reply.call_id]


def _differences(log: HarnessLog, replies: Sequence[RecordedReply]) -> Iterator[str]:
    reply_by_tool_call = {call_id: reply for reply in replies for call_id in reply.tool_calls}
    pairs = _Pairs(replies)
    number = 0
    roles_between: set[str] = set()
    for entry in log.entries:
        if entry.role != "assistant":
            roles_between.add(entry.role)
            answered = _tool_call(entry.id)
            if _ours(answered) and answered not in reply_by_tool_call and not _is_of_cut_reply(answered, replies):
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
        yield from _reply_differences(number, entry, reply, roles_between)
        pairs.add(reply)
        roles_between = set()
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


def _reply_differences(number: int, entry: LogEntry, reply: RecordedReply, roles_between: set[str]) -> Iterator[str]:
    """Yields the differences between a logged reply and the recorded one."""
    if not reply.completed:
        return
    where = f"reply {number} of the log (call {reply.call_id[-6:]})"
    ours = [_tool_call(call_id) for call_id in entry.tool_calls if _ours(call_id)]
    if len(entry.tool_calls) != len(reply.tool_calls) or not set(ours) <= set(reply.tool_calls):
        calls, recorded = ", ".join(map(_short, entry.tool_calls)), ", ".join(map(_short, reply.tool_calls))
        yield f"{where} makes the tool calls [{calls}], recorded are [{recorded}]"
    if None not in (entry.tokens, reply.tokens) and entry.tokens != reply.tokens:
        yield f"{where} has {entry.tokens} tokens, recorded are {reply.tokens}"
    if reply.roles is not None and (unrecorded := roles_between - reply.roles):
        yield f"before {where} the log has a message of role {', '.join(sorted(unrecorded))}, the record none"


def _is_of_cut_reply(tool_call_id: str, replies: Sequence[RecordedReply]) -> bool:
    """True if the tool call is of a reply that broke off: a harness may have run the part that arrived."""
    handle = HANDLE.search(tool_call_id)
    return handle is not None and any(not one.completed and one.call_id == handle.group(1) for one in replies)


def _tool_call(logged: str) -> str:
    """Returns the id that the server gave the call, also if the log has it inside another one."""
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
