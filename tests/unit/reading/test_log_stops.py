"""A true log never differs from the record, wherever its writer was stopped; a log that was changed does."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest

from rolltap.contract.admin import HarnessLog, LogEntry
from rolltap.harnesses.left_files import LeftFiles
from rolltap.harnesses.logs.check import LOG_READERS
from rolltap.harnesses.logs.formats import RunFolders
from rolltap.ids import new_id
from rolltap.reading.log_check import RecordedReply, compare

from .log_writers import RESUMED, WRITERS, Reply

SESSIONS = 6
"""Sessions of each format; each is stopped at all of its writes."""

TOKENS = (3, 3, 3, 5)
"""The counts are often equal: a policy that always ends with the same word."""


def test_every_format_that_is_read_has_a_writer() -> None:
    assert sorted(WRITERS) == sorted(LOG_READERS)


@dataclass(frozen=True)
class Step:
    """A reply and its record. `aside`: a side call, which is recorded and not logged."""

    reply: Reply
    record: RecordedReply
    aside: bool = False


def new_reply(dice: random.Random, calls: int, *, cut: bool = False) -> Reply:
    id = new_id()
    return Reply(id, dice.choice(TOKENS), tuple(f"call_{id}000123456789a{n}" for n in range(calls)), cut)


def record_of(reply: Reply, parent: str, roles: frozenset[str] | None, *, main: bool, open_: bool) -> RecordedReply:
    if reply.cut and open_:
        return RecordedReply(reply.call_id, None, (), None, required=False, completed=False)
    tokens = None if reply.cut else reply.tokens
    return RecordedReply(
        reply.call_id, tokens, reply.calls, roles, required=main, completed=not reply.cut, parent=parent
    )


def new_run(dice: random.Random, parent: str, turns: int) -> list[Step]:
    """A run that continues the call `parent`, or nothing that is recorded: "".

    Calls that the next one continues are required, and so is the last answer, when the session is over.
    """
    steps: list[Step] = []
    roles: frozenset[str] = frozenset({"user"})
    for turn in range(turns):
        if dice.random() < 0.2:
            side = new_reply(dice, 0)
            steps.append(Step(side, record_of(side, "", None, main=False, open_=False), aside=True))
        if dice.random() < 0.2:
            cut = new_reply(dice, dice.choice((0, 1)), cut=True)
            steps.append(Step(cut, record_of(cut, parent, roles, main=False, open_=dice.random() < 0.5)))
        reply = new_reply(dice, 0 if turn == turns - 1 else dice.choice((1, 1, 2)))
        steps.append(Step(reply, record_of(reply, parent, roles if parent else None, main=False, open_=False)))
        parent, roles = reply.call_id, frozenset({"tool"})
    return steps


def with_requirements(records: Sequence[RecordedReply]) -> list[RecordedReply]:
    """What `recorded_replies` requires: every call that another continues, and the last answer without tool calls."""
    parents = {record.parent for record in records if record.parent}
    main = [record for record in records if record.completed]
    last = main[-1].call_id if main and not main[-1].tool_calls else ""
    return [
        replace(record, required=record.completed and (record.call_id in parents or record.call_id == last))
        for record in records
    ]


def entries_of(name: str, home: Path) -> list[LogEntry]:
    return list(LOG_READERS[name](RunFolders(LeftFiles(home), LeftFiles(home))))


def new_session(name: str, dice: random.Random) -> list[list[Step]]:
    runs: list[list[Step]] = []
    for _ in range(dice.choice((1, 2, 3)) if name in RESUMED else 1):
        previous = [step.reply for step in runs[-1] if not step.aside] if runs else []
        resumes = bool(previous) and dice.random() < 0.5  # else the history is rewritten
        runs.append(new_run(dice, previous[-1].call_id if resumes else "", dice.choice((1, 2, 3))))
    return runs


def recorded(steps: Sequence[Step], at: int, logged: Sequence[int]) -> list[RecordedReply]:
    """The record when the run was stopped at a write of the reply `at`; `logged` are the indices of the logged ones."""
    last = logged[at] if at >= 0 else -1
    return [step.record for step in steps[: last + 1]]


@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.parametrize("seed", range(SESSIONS))
def test_a_log_that_ends_anywhere_matches(name: str, seed: int, tmp_path: Path) -> None:
    dice = random.Random(f"{name}-{seed}")
    runs = new_session(name, dice)
    done: list[RecordedReply] = []
    for number, steps in enumerate(runs):
        logged = [index for index, step in enumerate(steps) if not step.aside]
        writes = list(WRITERS[name](number, [steps[index].reply for index in logged]))
        for (at, write), (following, _) in pairwise([*writes, (len(logged), write_nothing)]):
            write(tmp_path)
            entries = entries_of(name, tmp_path)
            # The harness asks for the next reply when this one is written; it may not have written that yet.
            for reached in {at, min(following, len(logged) - 1)}:
                records = with_requirements([*done, *recorded(steps, reached, logged)])
                check = compare(HarnessLog(entries, complete=False), records)
                assert check.verdict != "mismatch", "\n".join(map(str, (check.text, *entries, *records)))
        done += [step.record for step in steps]
        records = with_requirements(done)
        check = compare(HarnessLog(entries_of(name, tmp_path)), records)
        assert check.verdict == "match", (check.text, entries_of(name, tmp_path), records)


@pytest.mark.parametrize("name", RESUMED)
@pytest.mark.parametrize("seed", range(SESSIONS))
def test_a_run_goes_on_where_another_was_stopped(name: str, seed: int, tmp_path: Path) -> None:
    """The second run rewrites the history, so it continues nothing; its end is complete."""
    dice = random.Random(f"{name}-{seed}")
    steps = new_run(dice, "", 3)
    logged = [index for index, step in enumerate(steps) if not step.aside]
    writes = list(WRITERS[name](0, [steps[index].reply for index in logged]))
    stop = dice.randrange(len(writes))
    for _, write in writes[: stop + 1]:
        write(tmp_path)
    records = recorded(steps, writes[stop][0], logged)
    second = new_run(dice, "", 2)
    for _, write in WRITERS[name](1, [step.reply for step in second if not step.aside]):
        write(tmp_path)
    records += [step.record for step in second]
    check = compare(HarnessLog(entries_of(name, tmp_path)), with_requirements(records))
    assert check.verdict == "match", (check.text, entries_of(name, tmp_path), records)


def write_nothing(home: Path) -> None:
    """Follows the last write."""


NAMED = ("codex", "claude-code", "claude-agent-sdk", "pi", "mini-swe-agent")
"""Those whose replies have ids. In the others a log that ends early may have lost the last reply or the one before."""

CHANGES = ("missing", "made up", "altered")


@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("seed", range(SESSIONS))
def test_a_reply_that_is_missing_made_up_or_altered_is_noticed(
    name: str, change: str, seed: int, tmp_path: Path
) -> None:
    dice = random.Random(f"{name}-{seed}")
    steps = [step for step in new_run(dice, "", 4) if not step.aside and not step.reply.cut]
    for _, write in WRITERS[name](0, [step.reply for step in steps]):
        write(tmp_path)
    entries = entries_of(name, tmp_path)
    records = with_requirements([step.record for step in steps])
    assert compare(HarnessLog(entries), records).verdict == "match"
    replies = [index for index, entry in enumerate(entries) if entry.role == "assistant"]
    at = dice.choice(replies[:-1])
    entry = entries[at]
    changed = {
        "missing": [],
        "made up": [entry, LogEntry("assistant", tokens=4)],
        "altered": [msgspec.structs.replace(entry, tokens=(entry.tokens or 0) + 1)],
    }[change]
    for complete in (True, False) if name in NAMED else (True,):
        log = HarnessLog([*entries[:at], *changed, *entries[at + 1 :]], complete=complete)
        assert compare(log, records).verdict == "mismatch", (log, records)
