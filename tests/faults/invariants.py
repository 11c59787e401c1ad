"""The four invariants, asserted after every fault against the store itself, not through the proxy.

1. What was acknowledged is durable: calls whole and with the text that the client has, token for token what the engine
   says it saw and sampled; groups, rewards, endings and acknowledged leases too.
2. Nothing is delivered to a trainer as new after it was acknowledged, and no call is trained twice.
3. Every rollout is open or in exactly one terminal state.
4. Accepted = terminal + open: every request that reached the engine has an intent, every intent one completion or a
   living process, every rollout a state.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import sqlalchemy as sa

from rolltap.calllog.database import Database
from rolltap.calllog.facts import CallLog, CallRow
from rolltap.calllog.sql import open_call_log
from rolltap.engine.scripted import logprob_of
from rolltap.protocols.conversation import Message
from rolltap.types import Outcome, RolloutStatus

from .clients import Told

RECOVERS_WITHIN_S = 10.0


async def check(url: str, told: Told, journal: Sequence[Mapping[str, Any]]) -> float:
    """Raises `AssertionError` with every violation; returns when (`monotonic`) all that was acknowledged was there."""
    log = open_call_log(url, writable=False, newer=True)
    database = Database(url, writable=False)
    await log.start()
    await database.start()
    try:
        rows = await _rows_once_there(log, told, journal)
        there_at = time.monotonic()
        violations = [*_calls(rows, told), *_fidelity(rows, told, journal)]
        violations += await database.query(lambda connection: [*_ledger(connection, told), *_accounts(connection)])
    finally:
        await database.close()
        await log.close()
    assert not violations, "\n".join(violations)
    return there_at


async def _rows_once_there(log: CallLog, told: Told, journal: Sequence[Mapping[str, Any]]) -> dict[str, CallRow]:
    """All rows of the clients' sessions, once what must be there is there or the time is over.

    That is every acknowledged call with its completion, and every call of the engine's journal with its intent. A
    living proxy may still hold both outside the store: in its spool, or in the ingest stream. There they are as
    durable, but this reader can't see them.
    """
    deadline = time.monotonic() + RECOVERS_WITHIN_S
    asked = {entry["id"] for entry in _of_sessions(told, journal)}
    while True:
        rows = {row.intent.id: row for session in told.sessions for row in await log.rows(session)}
        completed = all(call in rows and rows[call].completion is not None for call in told.calls)
        if (completed and asked <= rows.keys()) or time.monotonic() > deadline:
            return rows
        await asyncio.sleep(0.05)


def _calls(rows: Mapping[str, CallRow], told: Told) -> list[str]:
    out: list[str] = []
    for call_id, text in told.calls.items():
        row = rows.get(call_id)
        if row is None or row.completion is None:
            out.append(f"I1: call {call_id} was acknowledged and is {'lost' if row is None else 'open'}")
        elif row.completion.outcome is not Outcome.COMPLETED:
            out.append(f"I1: call {call_id} was acknowledged and is {row.completion.outcome}")
        elif msgspec.json.decode(row.completion.message, type=Message).text != text:
            out.append(f"I1: call {call_id} does not say what its client was told")
    return out


def _of_sessions(told: Told, journal: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The journal's entries that are of the clients' sessions: other worlds share the engine."""
    sessions = set(told.sessions)
    return [entry for entry in journal if entry["session"] in sessions]


def _fidelity(rows: Mapping[str, CallRow], told: Told, journal: Sequence[Mapping[str, Any]]) -> list[str]:
    out: list[str] = []
    served = _of_sessions(told, journal)
    for entry in served:
        row = rows.get(entry["id"])
        if row is None:
            out.append(f"I4: the engine was asked for {entry['id']}, which has no intent")
            continue
        if row.prompt_ids.tolist() != entry["prompt_ids"]:
            out.append(f"I1: call {row.intent.id} has another prompt than the engine saw")
    last = {entry["id"]: entry for entry in served}
    for call_id in told.calls:
        row, entry = rows.get(call_id), last.get(call_id)
        if row is None or row.completion is None or entry is None:
            continue
        done, sampled = row.completion, entry["output_ids"]
        if done.output_ids.tolist() != sampled:
            out.append(f"I1: call {call_id} has other tokens than the engine sampled")
        elif done.flaw is None:
            wanted = [logprob_of(token, at) for at, token in enumerate(sampled)]
            if not np.array_equal(done.logprobs, np.asarray(wanted, np.float32)):
                out.append(f"I1: call {call_id} has other log-probs than the engine gave")
    return out


def _ledger(connection: sa.Connection, told: Told) -> list[str]:
    groups = {row.id: row for row in connection.execute(sa.text("SELECT id, n, status FROM groups"))}
    out = [f"I1: group {one} was opened and is lost" for one in told.groups if one not in groups]
    rewards = {row.id for row in connection.execute(sa.text("SELECT id FROM rewards"))}
    out += [f"I1: reward {one} is lost" for one in told.rewards if one not in rewards]
    out += [f"I2: group {one} was delivered after it was acknowledged" for one in told.twice]
    trained = Counter(told.trained)
    out += [f"I2: call {one} was trained {count} times" for one, count in trained.items() if count > 1]
    for one in told.acked:
        if groups[one].status != "acknowledged":
            out.append(f"I1: the acknowledgement of group {one} is lost: it is {groups[one].status}")
    rollouts = connection.execute(sa.text("SELECT id, group_id, status FROM rollouts")).all()
    statuses = {row.id: RolloutStatus(row.status) for row in rollouts}
    for one, status in told.finished.items():
        if statuses.get(one) != status:
            out.append(f"I1: rollout {one} ended as {status} and is {statuses.get(one)}")
    ends = sa.text("SELECT subject FROM events WHERE kind = 'rollout_finished'")
    ended = Counter(row.subject for row in connection.execute(ends))
    for one, status in statuses.items():
        if ended[one] != int(status.terminal):
            out.append(f"I3: rollout {one} is {status} and ended {ended[one]} times")
    members = Counter(row.group_id for row in rollouts)
    out += [
        f"I4: group {one} has {members[one]} of {n} rollouts" for one, n in told.groups.items() if members[one] != n
    ]
    return out


def _accounts(connection: sa.Connection) -> list[str]:
    """Of calls: those without completion are of processes that the log still watches."""
    orphans = connection.execute(
        sa.text(
            "SELECT i.id FROM call_intents i LEFT JOIN call_completions c ON c.call_id = i.id "
            "LEFT JOIN processes p ON p.id = i.process WHERE c.call_id IS NULL AND p.id IS NULL"
        )
    )
    out = [f"I4: call {row.id} is open, and its process is not watched" for row in orphans]
    strays = connection.execute(
        sa.text(
            "SELECT c.call_id FROM call_completions c LEFT JOIN call_intents i ON i.id = c.call_id WHERE i.id IS NULL"
        )
    )
    return out + [f"I4: call {row.call_id} is complete and has no intent" for row in strays]
