"""Compares a harness's own log with the record: the only check of a session that does not share our assumptions.

The rules:

* Every reply of the log is a call of the record. It is found by the id or a tool-call id that the server gave it; where
  the protocol carries none, by its place, tool calls and token count: the one that continues the reply above it, else
  the agent's next reply, else the next one of any conversation, else an earlier one that begins a conversation or a
  fork of one, or need not be in the log. If that choice leads to a difference, the next is tried.
* Replies of a conversation have the same order (a harness that runs inside another has its own log, which may be read
  before or after it), the same tool calls and the same count of sampled tokens.
* Every call from which the agent's main conversation continued is in the log, and the answer with which it ended.
* A message between two replies has the same role in the record as in the log, if one plainly continues the other.

The record may hold more: side calls, subagents, samples that nothing continued. If the harness was stopped, its last
reply may be missing in the log, or be there in part. Any reply without a token count may be there in part: an earlier
run of a resumed session was stopped there. A last reply with tool calls may be missing, too: a harness that sees a loop
throws it away.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

from rolltap.calllog.facts import CallRow
from rolltap.contract.admin import HarnessLog, LogEntry
from rolltap.decoding import from_json
from rolltap.ids import ALPHABET, ID_LENGTH
from rolltap.protocols.conversation import Message
from rolltap.protocols.handles import HANDLE_LENGTH, PREFIX
from rolltap.reading.decoded import turns
from rolltap.reconstructor.rules import MaskReason
from rolltap.types import CallKind, LogCheck, LogVerdict, Outcome, Trajectory

TOOL_CALL = re.compile(rf"call_[{ALPHABET}]{{{HANDLE_LENGTH - len(PREFIX)}}}")
"""A handle as a tool call's id; harnesses may put text before it."""

_END = "(?![0-9A-Za-z])"
HANDLE = re.compile(
    rf"(?:(?={TOOL_CALL.pattern}{_END})call_|chatcmpl-(?=[{ALPHABET}]{{{ID_LENGTH}}}{_END}))([{ALPHABET}]{{{ID_LENGTH}}})"
)
"""The part of a handle that names its call (`rolltap.protocols.handles`). A vendor's own ids in relayed
replies begin alike but have other lengths."""


TRIES = 300
"""How often a choice is taken back at most. An honest log needs only a few."""


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
    """Returns the calls of a session that were sent to an engine, in order, behind those of a fork's origin."""
    purposes = {purpose.call_id: purpose for purpose in trajectory.classifications}
    added = {turn.call_id: turn for turn in turns(rows)}
    replies: list[RecordedReply] = []
    parent_ids = {row.intent.parent_id for row in rows if row.intent.break_ is None}
    toolset = next((row.intent.shape.toolset for row in rows if row.intent.id in parent_ids), None)
    ended_ids = [row.intent.id for row in rows if row.completion is not None and row.intent.shape.toolset == toolset]
    for row in rows:
        completion, purpose = row.completion, purposes.get(row.intent.id)
        if completion is None:  # its proxy was killed: the harness may have seen any part of it
            replies.append(RecordedReply(row.intent.id, None, (), None, required=False, completed=False))
            continue
        if completion.outcome is Outcome.REFUSED:
            continue
        completed = completion.outcome is Outcome.COMPLETED
        message = from_json(completion.message, Message) if completion.message else Message("assistant")
        continues = row.intent.parent_id is not None and row.intent.break_ is None
        is_needed = row.intent.id in parent_ids or (row.intent.id in ended_ids[-1:] and not message.tool_calls)
        main = (
            not row.sampled_by
            and purpose is not None
            and purpose.kind is CallKind.MAIN
            and not purpose.agent
            and purpose.mask != MaskReason.ABANDONED
        )
        token_count = len(completion.output_ids) or completion.usage.get("output", 0)
        replies.append(
            RecordedReply(
                call_id=row.intent.id,
                tokens=token_count if row.intent.shape.choices == 1 else None,
                tool_calls=tuple(call.id for call in message.tool_calls),
                roles=frozenset(message.role for message in added[row.intent.id].new) if continues else None,
                required=main and completed and row.delivered is not False and is_needed,
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
    if difference := _difference_of_results(log, replies) or _Pairing(log, replies).difference():
        return LogCheck(LogVerdict.MISMATCH, difference)
    with_counts = sum(entry.tokens is not None for entry in logged_replies)
    ids = sum(len(entry.tool_calls) for entry in logged_replies)
    text = f"{len(logged_replies)} replies ({with_counts} with token counts) and {ids} tool calls are as recorded"
    return LogCheck(LogVerdict.MATCH, text)


@dataclass(frozen=True, slots=True)
class _LoggedReply:
    """Reply number `number` of the log. `roles`: those of the messages since the reply above it. `call_id`: the call
    that an id of ours names; "" without one.

    The harness may have been stopped while it wrote the reply: `is_last` marks the last reply of an incomplete log, and
    `is_left` one that a user's message follows.
    """

    number: int
    entry: LogEntry
    roles: frozenset[str]
    call_id: str
    is_last: bool
    is_left: bool

    @property
    def is_uncounted(self) -> bool:
        return self.is_last or self.entry.tokens is None

    def may_be(self, reply: RecordedReply) -> bool:
        """True if `reply` matches, apart from the order. Any part of an interrupted reply may be in the log."""
        return (not reply.completed and self.is_uncounted) or (reply.completed and not self.difference(reply))

    def difference(self, reply: RecordedReply) -> str:
        """The first difference to the recorded reply, "" if there is none."""
        if not reply.completed:
            return ""
        entry = self.entry
        where = f"reply {self.number} of the log (call {reply.call_id[-6:]})"
        ours = [_tool_call(call_id) for call_id in entry.tool_calls if _ours(call_id)]
        count, recorded_count = len(entry.tool_calls), len(reply.tool_calls)
        may_lack = self.is_uncounted or self.is_left
        has_all = count == recorded_count or (may_lack and count < recorded_count)
        if not has_all or not set(ours) <= set(reply.tool_calls):
            calls, recorded = ", ".join(map(_short, entry.tool_calls)), ", ".join(map(_short, reply.tool_calls))
            return f"{where} makes the tool calls [{calls}], recorded are [{recorded}]"
        if not self.is_uncounted and reply.tokens is not None and entry.tokens != reply.tokens:
            return f"{where} has {entry.tokens} tokens, recorded are {reply.tokens}"
        if reply.roles is not None and (unrecorded := self.roles - reply.roles):
            return f"before {where} the log has a message of role {', '.join(sorted(unrecorded))}, the record none"
        return ""


def _logged_replies(log: HarnessLog) -> list[_LoggedReply]:
    last = max((index for index, entry in enumerate(log.entries) if entry.role == "assistant"), default=-1)
    logged: list[_LoggedReply] = []
    roles: set[str] = set()
    for index, entry in enumerate(log.entries):
        if entry.role != "assistant":
            roles.add(entry.role)
            continue
        matches = (HANDLE.search(text) for text in (entry.id, *entry.tool_calls))
        call_id = next((match.group(1) for match in matches if match), "")
        is_last = index == last and not log.complete
        is_left = any(following.role == "user" for following in log.entries[index + 1 : index + 2])
        logged.append(_LoggedReply(len(logged) + 1, entry, frozenset(roles), call_id, is_last, is_left))
        roles = set()
    return logged


class _Pairing:
    """Pairs the replies of the log with recorded ones, in the log's order.

    A reply without an id of ours may be one of several, so a choice that leads to a difference is taken back, at most
    `TRIES` times: the log matches if any pairing has no difference.
    """

    def __init__(self, log: HarnessLog, replies: Sequence[RecordedReply]) -> None:
        self.logged = _logged_replies(log)
        self.replies = replies
        self._may_lack_last = not log.complete
        self._position = {reply.call_id: index for index, reply in enumerate(replies)}
        self._named = {logged.call_id for logged in self.logged}
        self._children: dict[str, list[RecordedReply]] = {}
        for reply in replies:
            self._children.setdefault(reply.parent, []).append(reply)
        self._chosen: list[RecordedReply] = []
        self._matched: set[str] = set()
        self._continued: Counter[str] = Counter()

    def difference(self) -> str:
        """The first difference of the likeliest pairing, "" if there is a pairing without one."""
        if problem := self._difference_of_named():
            return problem
        first, tries = "", TRIES
        ways: list[Iterator[RecordedReply]] = []
        while True:
            index = len(self._chosen)
            if index == len(self.logged):
                problem = self._missing()
            else:
                if index == len(ways):
                    ways.append(self._candidates(self.logged[index]))
                problem = self._take(self.logged[index], ways[index])
                if not problem:
                    continue
                ways.pop()
            if not problem:
                return ""
            first = first or problem
            while self._chosen and self.logged[len(self._chosen) - 1].call_id:  # there was no choice
                self._take_back()
                ways.pop()
            if not self._chosen or not tries:
                return first
            self._take_back()
            tries -= 1

    def _difference_of_named(self) -> str:
        numbers: dict[str, int] = {}
        for logged in self.logged:
            if not logged.call_id:
                continue
            where = f"reply {logged.number} of the log"
            if logged.call_id not in self._position:
                return f"{where} ({_described(logged.entry)}) is not in the record"
            if logged.call_id in numbers:
                return f"{where} is call {logged.call_id[-6:]} a second time"
            numbers[logged.call_id] = logged.number
            if problem := logged.difference(self.replies[self._position[logged.call_id]]):
                return problem
        return ""

    def _take(self, logged: _LoggedReply, way: Iterator[RecordedReply]) -> str:
        """Pairs the logged reply with the next candidate; what speaks against the first one if none is left."""
        problem = ""
        for reply in way:
            if not self._is_late(reply):
                self._chosen.append(reply)
                self._matched.add(reply.call_id)
                self._continued[reply.parent] += 1
                return ""
            late = f"is call {reply.call_id[-6:]}, which was made before the reply above it"
            problem = problem or f"reply {logged.number} of the log {late}"
        return problem or f"reply {logged.number} of the log ({_described(logged.entry)}) is not in the record"

    def _take_back(self) -> None:
        reply = self._chosen.pop()
        self._matched.remove(reply.call_id)
        self._continued[reply.parent] -= 1

    def _candidates(self, logged: _LoggedReply) -> Iterator[RecordedReply]:
        """Yields the replies that the logged one may be, the likeliest first."""
        if logged.call_id:
            yield self.replies[self._position[logged.call_id]]
            return
        previous = self._chosen[-1].call_id if self._chosen else ""
        last = self._position[previous] if previous else -1
        later = self.replies[last + 1 :]
        due = next((reply for reply in later if reply.required and self._is_free(reply)), None)
        likely = [*(self._children.get(previous, ()) if previous else ()), *([due] if due is not None else [])]
        if due is not None and due.parent not in ("", previous):
            likely.pop()
        yielded: set[str] = set()
        for reply in chain(likely, later, self._earlier(logged, last)):
            if reply.call_id not in yielded and self._is_free(reply) and logged.may_be(reply):
                yielded.add(reply.call_id)
                yield reply

    def _earlier(self, logged: _LoggedReply, last: int) -> Iterator[RecordedReply]:
        """Yields earlier replies that another conversation's log may have next. Both token counts must be known."""
        for reply in self.replies[: last + 1]:
            elsewhere = reply.roles is None or not reply.required or self._is_fork(reply)
            if elsewhere and None not in (logged.entry.tokens, reply.tokens):
                yield reply

    def _is_free(self, reply: RecordedReply) -> bool:
        return reply.call_id not in self._matched and reply.call_id not in self._named

    def _is_fork(self, reply: RecordedReply) -> bool:
        """True if the log had another reply that continues the same one: a fork has its own log, read later."""
        return bool(reply.parent) and self._continued[reply.parent] > 0

    def _is_late(self, reply: RecordedReply) -> bool:
        """True if the log already had a reply that was made after `reply` in its conversation."""
        last = self._position[self._chosen[-1].call_id] if self._chosen else -1
        is_behind = self._position[reply.call_id] <= last and reply.required and reply.roles is not None
        return (is_behind and not self._is_fork(reply)) or self._continued[reply.call_id] > 0

    def _missing(self) -> str:
        required = [reply for reply in self.replies if reply.required]
        missing = [reply for reply in required if reply.call_id not in self._matched]
        if self._may_lack_last and missing and missing[-1] is required[-1]:
            missing.pop()
        if not missing:
            return ""
        ids = ", ".join(reply.call_id[-6:] for reply in missing[:3])
        return f"{len(missing)} recorded replies are not in the log: {ids}{', ...' if len(missing) > 3 else ''}"


def _difference_of_results(log: HarnessLog, replies: Sequence[RecordedReply]) -> str:
    recorded = {call_id for reply in replies for call_id in reply.tool_calls}
    cut = {reply.call_id for reply in replies if not reply.completed}  # a harness may have run the part that arrived
    for entry in log.entries:
        answered = _tool_call(entry.id) if entry.role != "assistant" else ""
        handle = HANDLE.search(answered)
        if handle is not None and answered not in recorded and handle.group(1) not in cut:
            return f"the log has a result of tool call {_short(entry.id)}, which no recorded reply made"
    return ""


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
