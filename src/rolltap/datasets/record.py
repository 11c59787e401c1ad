"""What exports are made of: the call log and the ledger as `ExportItem`s, a group at a time.

Everything is streamed: one group's sessions are in memory at once, and no more.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

from rolltap.calllog import open_call_log
from rolltap.calllog.sql import SqlCallLog
from rolltap.datasets.texts import call_texts
from rolltap.errors import DatasetError
from rolltap.ledger.archive import all_groups
from rolltap.reading.summaries import harness_of
from rolltap.reconstructor.exporters.base import ExportItem
from rolltap.reconstructor.reconstruct import reconstruct
from rolltap.reconstructor.rules import Rules
from rolltap.types import Group, Rollout, Session, Task


@dataclass(frozen=True, slots=True)
class Reading:
    """How sessions are reconstructed: the strategy's name, and the rules of each session's policy."""

    strategy: str
    rules: Callable[[Session], Rules]


def open_record(store: str) -> SqlCallLog:
    """The call log and the ledger of a store, for reading; not yet started."""
    call_log = open_call_log(store, writable=False)
    if not isinstance(call_log, SqlCallLog):
        raise DatasetError(f"--store: {store} holds no record to read; want sqlite:///PATH or postgresql://...")
    return call_log


async def recorded_groups(call_log: SqlCallLog, reading: Reading) -> AsyncIterator[list[ExportItem]]:
    """The rollouts of each group, oldest first; then each session that belongs to no rollout, by itself."""
    in_groups: set[str] = set()
    async for group, task in all_groups(call_log.database):
        items = []
        for rollout in group.rollouts:
            session = await call_log.session(rollout.session_id) if rollout.session_id else None
            if session is not None:
                in_groups.add(session.id)
                items.append(await _item(call_log, session, reading, (group, rollout, task)))
        if items:
            yield items
    async for session in call_log.all_sessions():
        if session.id not in in_groups and session.rollout_id is None:
            yield [await _item(call_log, session, reading, None)]


async def _item(
    call_log: SqlCallLog, session: Session, reading: Reading, of: tuple[Group, Rollout, Task] | None
) -> ExportItem:
    rows = await call_log.rows(session.id)
    calls = [row.call() for row in rows]
    group, rollout, task = of or (None, None, None)
    rewards = rollout.rewards if rollout is not None else ()
    totals = [reward.value for reward in rewards if reward.scope == "rollout"]
    return ExportItem(
        session=session,
        trajectory=reconstruct(calls, strategy=reading.strategy, rules=reading.rules(session)),
        calls={call.id: call for call in calls},
        texts=call_texts(rows),
        rollout=rollout,
        task=task,
        reward=sum(totals) if totals else None,
        rewards=rewards,
        harness=harness_of(session.tags.get("harness"), task),
        tags=group.tags if group is not None else (),
    )
