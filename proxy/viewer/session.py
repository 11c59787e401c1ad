"""Values for a session's pages: its outline, its turns, a timeline of engine and harness, and news while it runs."""

from __future__ import annotations

import hashlib
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import quote, urlencode

import msgspec

from rolltap.reading.types import CallLine, CallTurn, MessageView, SessionDetail, SessionSummary
from rolltap.types import BreakReason, CallKind, Outcome, RolloutStatus

TURNS = 40
"""Calls on a page of the transcript. The browser loads more while the user scrolls."""

MAIN = "main agent"

WHY = {
    "session": "the whole session is a judge's or a simulated user's",
    "stated": "the harness's own header, or the policy, says so",
    "role": "the session's owner gave the caller this role",
    "replaces_history": "its reply replaced the history",
    "aside": "it offers no tools and nothing goes on from it",
    "agent": "an agent's own call",
}
"""Why a call has its kind, by the rule that decided it."""

BREAKS = {
    "new_conversation": "a new conversation: nothing recorded precedes it",
    "history_edited": "the harness changed a message of the history",
    "system_changed": "the system text differs",
    "tools_changed": "the tool schemas differ",
    "compaction": "the harness replaced its history by a summary",
    "thinking_dropped": "the template drops the thinking of former turns",
    "ids_unknown": "the reply before has ids that no tokenizer knows",
    "template_not_bridgeable": "the chat template can't be continued token for token",
    "parent_unfinished": "the parent's turn was not completed",
    "ambiguous_parent": "several recorded calls match and nothing decides",
    "tokens_differ": "the engine's own prompt ids do not extend the parent",
    "parent_not_read": "the store did not answer in time, so calls of other proxies were not known",
    "policy_changed": "another policy, tokenizer or template renders this call",
}
"""Breaks in words, by reason."""


MASKS = {
    "aborted": "the call was cut off before its end",
    "engine_error": "the engine failed",
    "refused": "the call was refused before the engine was asked",
    "ids_unknown": "the engine sampled an id that the policy's tokenizer does not have",
    "images_unknown": "the prompt shows images, and which tokens stand for which is not known",
    "tokens_missing": "no token ids are on record: passed on as text, or nothing was sampled",
    "undelivered": "the reply did not reach the harness",
    "logprobs_missing": "the engine gave no log-probs",
    "logprobs_not_finite": "a log-prob is not a finite number",
    "judge": "a judge's call, not the agent's",
    "simulator": "a simulated user's call, not the agent's",
    "other_policy": "another policy sampled it",
    "late": "it came to the store after its rollout's end was settled",
    "evaluation": "the session measures, and is never trained",
    "origin": "the fork's origin sampled it, and trains it",
    "rule": "a rule of the session masks all of it",
    "abandoned": "the harness asked again with the same prompt, and went on with the other reply",
    "auxiliary": "a side call, for example for a title: no call of the agent goes on from it",
    "summary": "a summary that replaces the history",
    "constrained": "a grammar or a forced tool call limited what could be sampled",
    "length_truncated": "the token limit cut it off",
    "tool_call_unparsable": "its tool call can't be parsed",
    "version_unknown": "the weight version that sampled it is not on record",
    "sampling_truncated": "sampled greedily, with penalties or cut without a mask: no trainer can compute these odds",
    "logprobs_untempered": "its log-probs are of another temperature than it was sampled with",
    "log_mismatch": "the harness's own log differs from the record",
}
"""Why sampled tokens carry no loss, in words, by reason."""


@dataclass(frozen=True, slots=True)
class OutlineEntry:
    """A call in the outline. `depth` is 0 for the main agent. `branch`: an earlier call continues the same parent."""

    number: int
    line: CallLine
    depth: int
    branch: bool
    look: str
    label: str
    why: str

    @property
    def broken(self) -> bool:
        """True if the call leaves a recorded conversation; a new conversation leaves none."""
        return self.line.break_ is not None and self.line.break_.reason is not BreakReason.NEW_CONVERSATION


@dataclass(frozen=True, slots=True)
class ShownTurn:
    """What a call added to the transcript. `tools_of` names the tool of each result in `new`, by tool-call id."""

    entry: OutlineEntry
    new: Sequence[MessageView]
    reply: MessageView | None
    tools_of: Mapping[str, str]


def entries_of(detail: SessionDetail) -> list[OutlineEntry]:
    entries: list[OutlineEntry] = []
    continued_parents: set[str] = set()
    for number, line in enumerate(detail.calls, 1):
        side = line.kind != CallKind.MAIN
        depth = 2 if side and line.agent else 1 if side or line.agent else 0
        branch = line.parent_id is not None and line.parent_id in continued_parents and line.outcome != Outcome.REFUSED
        if line.parent_id and not side:
            continued_parents.add(line.parent_id)
        entries.append(
            OutlineEntry(number, line, depth, branch, _look(line), label_of(line), WHY.get(line.rule, line.rule))
        )
    return entries


def _look(line: CallLine) -> str:
    if line.outcome == "open":
        return "open"
    if line.outcome != Outcome.COMPLETED or line.flaw:
        return "bad"
    if line.kind != CallKind.MAIN:
        return line.kind
    return "masked" if line.mask else "trained"


def label_of(line: CallLine) -> str:
    """Describes in a few words what a call did."""
    if line.outcome not in (Outcome.COMPLETED, "open"):
        return line.outcome.replace("_", " ")
    tools = ", ".join(dict.fromkeys(line.tool_calls))
    text = " ".join(line.preview.split())
    return f"{tools}: {text}" if tools and text else tools or text or ("…" if line.outcome == "open" else "no text")


def turns_of(
    entries: Sequence[OutlineEntry], transcript: Sequence[CallTurn], start: int, limit: int = TURNS
) -> list[ShownTurn]:
    """Returns the turns of calls `start` to `start + limit`, counted from 0."""
    by_call = {turn.call_id: turn for turn in transcript}
    names = {
        part.id: part.name
        for turn in transcript
        for message in (*turn.new, turn.reply)
        if message is not None
        for part in message.parts
        if part.kind == "tool_call" and part.id
    }
    turns = []
    for entry in entries[start : start + limit]:
        turn = by_call.get(entry.line.id)
        turns.append(ShownTurn(entry, turn.new if turn else (), turn.reply if turn else None, names))
    return turns


@dataclass(frozen=True, slots=True)
class Bar:
    """A span of time in a lane, as shares of the whole."""

    start: float
    width: float
    kind: str
    title: str
    call_id: str


@dataclass(frozen=True, slots=True)
class Lane:
    name: str
    bars: Sequence[Bar]


@dataclass(frozen=True, slots=True)
class Timeline:
    """`engine_s`: seconds that the main agent waited for the engine. `harness_s`: seconds between its calls.

    `kinds`: the styles of its bars, for the legend; all side calls have one style.
    """

    lanes: Sequence[Lane]
    seconds: float
    engine_s: float
    harness_s: float
    slowest: Sequence[OutlineEntry]

    @property
    def kinds(self) -> set[str]:
        known = ("engine", "harness", "bad")
        return {bar.kind if bar.kind in known else "auxiliary" for lane in self.lanes for bar in lane.bars}


def timeline_of(entries: Sequence[OutlineEntry], now: float) -> Timeline | None:
    """Returns bars for the engine's time and the harness's between calls, one lane per agent; None without calls."""
    if not entries:
        return None
    ends = {entry.line.id: entry.line.finished_at or now for entry in entries}
    first, last = min(entry.line.created_at for entry in entries), max(ends.values())
    whole = max(last - first, 1e-3)
    by_lane: defaultdict[str, list[OutlineEntry]] = defaultdict(list)
    for entry in entries:
        line = entry.line
        by_lane[(line.agent or MAIN) if line.kind == CallKind.MAIN else f"{line.kind} calls"].append(entry)
    lanes, engine_s, harness_s = [], 0.0, 0.0
    for name, members in sorted(by_lane.items(), key=lambda lane: lane[0] != MAIN):
        bars: list[Bar] = []
        free_at = 0.0
        previous: OutlineEntry | None = None
        for entry in members:
            line = entry.line
            end = ends[line.id]
            if previous is not None and line.created_at > free_at:
                activity = ", ".join(previous.line.tool_calls) or "harness"
                gap = line.created_at - free_at
                harness_s += gap if not lanes else 0.0
                bars.append(Bar((free_at - first) / whole, gap / whole, "harness", f"{activity}: {gap:.2f} s", line.id))
            kind = "bad" if entry.look == "bad" else line.kind if line.kind != CallKind.MAIN else "engine"
            title = f"call {entry.number}, {line.outcome}: {end - line.created_at:.2f} s, {line.output_tokens} tokens"
            bars.append(Bar((line.created_at - first) / whole, (end - line.created_at) / whole, kind, title, line.id))
            engine_s += max(0.0, end - max(line.created_at, free_at)) if not lanes else 0.0
            free_at, previous = max(free_at, end), entry
        lanes.append(Lane(name, bars))
    slowest = sorted(entries, key=lambda entry: entry.line.created_at - ends[entry.line.id])[:8]
    return Timeline(lanes, whole, engine_s, harness_s, slowest)


def state_of(summary: SessionSummary) -> str:
    """Returns a hash of all that the list of sessions shows: calls, labels, the reward, the end."""
    return hashlib.sha256(msgspec.json.encode(summary)).hexdigest()[:16]


def goes_on(summary: SessionSummary, now: float | None = None) -> bool:
    """True if more may come: the session accepts calls, or its rollout has not ended."""
    if summary.status == RolloutStatus.RUNNING or summary.open_calls:
        return True
    return summary.closed_at is None and summary.expires_at > (time.time() if now is None else now)


def news_address(detail: SessionDetail) -> str:
    """Returns the address where a page of this state asks for news; empty if none can come."""
    if not goes_on(detail.summary):
        return ""
    query = urlencode({"seen": state_of(detail.summary)})
    return f"/view/sessions/{quote(detail.summary.id, safe='')}/news?{query}"
