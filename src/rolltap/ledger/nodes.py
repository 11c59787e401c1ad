"""Nodes' claims on rollouts: a node claims work, extends its claims by heartbeats, and loses them when it dies.

Only rollouts of submitted tasks can be claimed; a runner runs the groups that it opened itself. A claim has a token and
expires by the database's clock. Starting and finishing a rollout needs the token, so a node that lost its claim cannot
disturb the next one. When a claim expires, the session of its attempt is closed. The rollout gets a new attempt, or is
lost after `infra_retries` failures.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence

import sqlalchemy as sa

from rolltap.contract.admin import AssignedRollout, ClaimRollouts
from rolltap.contract.base import check_ttl
from rolltap.contract.keys import SERVER, Caller
from rolltap.ids import new_id
from rolltap.ledger.groups import FREE, pending_again, settle
from rolltap.ledger.rows import load_tasks
from rolltap.ledger.schema import groups, nodes, rollouts
from rolltap.ledger.submissions import TaskQueue, has_queued, open_queued, opens_any
from rolltap.ledger.unit_of_work import LedgerSettings, Tx, UnitOfWork
from rolltap.types import Cause, GroupStatus, RolloutStatus, Scoring


class Nodes:
    def __init__(self, uow: UnitOfWork) -> None:
        self._uow = uow

    async def claim(self, node: str, request: ClaimRollouts, by: Caller = SERVER) -> Sequence[AssignedRollout]:
        """Claims rollouts for the node: highest priority first, then the longest waiting."""
        settings = self._uow.settings
        deadline, silence = time.monotonic() + request.wait, settings.trainer_silence
        submission, ticket = request.submission, self._uow.changed.ticket()
        assigned = await self._uow.transact(lambda tx: _claim(tx, node, request, settings, by))
        while not assigned and (remaining_s := deadline - time.monotonic()) > 0:
            await ticket.wait_at_most(min(remaining_s, self._uow.settings.poll))
            ticket = self._uow.changed.ticket()
            # Work that a curriculum holds back is not worth a write transaction.
            if await self._uow.query(lambda tx: _has_free(tx, submission) or opens_any(tx, submission, silence)):
                assigned = await self._uow.transact(lambda tx: _claim(tx, node, request, settings, by))
        return assigned

    async def has_work(self, submission: str | None = None) -> bool:
        """True while unclaimed work exists, including work blocked by backpressure or held back by a curriculum."""
        return await self._uow.query(lambda tx: _has_free(tx, submission) or has_queued(tx, submission))

    async def heartbeat(self, tokens: Collection[str], ttl: float, by: Caller = SERVER) -> Sequence[str]:
        """Extends the claims with `tokens` to `ttl` seconds from now; returns the rollouts that they still hold."""
        check_ttl(ttl)
        return await self._uow.transact(lambda tx: _heartbeat(tx, tokens, ttl, by))

    async def release(self, node: str, by: Caller = SERVER) -> int:
        """Gives back all rollouts of the node, without counting failures; returns their number."""

        def work(tx: Tx) -> int:
            tx.run(sa.delete(nodes).where(nodes.c.name == node))
            return _give_back(tx, sa.and_(rollouts.c.node == node, claimed_by(by)), None)

        return await self._uow.transact(work)

    async def expire(self) -> int:
        """Ends expired claims; returns their number."""

        def over(tx: Tx) -> sa.ColumnElement[bool]:
            return rollouts.c.node_expires_at <= tx.now

        if not await self._uow.query(lambda tx: tx.scalar(sa.select(sa.exists().where(over(tx))))):
            return 0
        return await self._uow.transact(lambda tx: _give_back(tx, over(tx), self._uow.settings))


def claimed_by(by: Caller) -> sa.ColumnElement[bool]:
    """The condition for rollouts whose claims `by` may extend and give back."""
    return rollouts.c.node_key == by.id if by.only_own else sa.true()


FREE_ROLLOUTS = sa.and_(rollouts.c.status == RolloutStatus.PENDING, rollouts.c.node_token.is_(None))


def _open_groups(submission: str | None) -> sa.ColumnElement[bool]:
    """The condition for the groups whose rollouts nodes may claim."""
    of_tasks = groups.c.submission_id.is_not(None) if submission is None else groups.c.submission_id == submission
    return sa.and_(groups.c.status == GroupStatus.OPEN, of_tasks)


def _waiting(submission: str | None) -> sa.ColumnElement[bool]:
    """The condition for unclaimed rollouts, joined with their groups."""
    return sa.and_(_open_groups(submission), FREE_ROLLOUTS)


JOINED = rollouts.join(groups, groups.c.id == rollouts.c.group_id)


def _has_free(tx: Tx, submission: str | None) -> bool:
    return tx.first(sa.select(rollouts.c.id).select_from(JOINED).where(_waiting(submission)).limit(1)) is not None


def _claim(
    tx: Tx, node: str, request: ClaimRollouts, settings: LedgerSettings, by: Caller
) -> Sequence[AssignedRollout]:
    note_node(tx, node, request.submission)
    _open_what_is_due(tx, request, settings)
    candidates = (
        sa.select(groups.c.id, groups.c.policy)
        .where(_open_groups(request.submission))
        .where(sa.exists().where(rollouts.c.group_id == groups.c.id, FREE_ROLLOUTS))
        .order_by(groups.c.priority.desc(), groups.c.created_at, groups.c.id)
        .limit(request.capacity)
        .with_for_update(skip_locked=True, key_share=True)
    )
    policies = {row.id: row.policy for row in tx.all(candidates)}
    order = {group_id: place for place, group_id in enumerate(policies)}
    free = sa.select(rollouts).select_from(JOINED).where(rollouts.c.group_id.in_(order), _waiting(request.submission))
    waiting = sorted(tx.all(free), key=lambda row: (order[row.group_id], row.position))[: request.capacity]
    if not waiting:
        return ()
    token = new_id()
    claim = {"node": node, "node_token": token, "node_expires_at": tx.now + request.ttl, "node_key": by.id}
    tx.run(sa.update(rollouts).where(rollouts.c.id.in_([row.id for row in waiting])).values(claim))
    tasks = load_tasks(tx, list({row.group_id for row in waiting}))
    return [AssignedRollout(row.id, token, policies[row.group_id], tasks[row.group_id]) for row in waiting]


def _open_what_is_due(tx: Tx, request: ClaimRollouts, settings: LedgerSettings) -> None:
    """Opens groups of queued tasks until enough rollouts wait to fill the node."""
    waiting = sa.select(sa.func.count()).select_from(JOINED).where(_waiting(request.submission))

    queue, count, counted_at = TaskQueue(tx, request.submission, settings, request.capacity), 0, None
    while (head := queue.next()) is not None:
        if head.priority != counted_at:  # those of a lower priority are due later than this task
            count, counted_at = tx.scalar(waiting.where(groups.c.priority >= head.priority)), head.priority
        if count >= request.capacity:
            return
        opened = open_queued(tx, head, settings)
        count += opened
        if not opened or count >= request.capacity:
            return


def _heartbeat(tx: Tx, tokens: Collection[str], ttl: float, by: Caller) -> list[str]:
    claimed = sa.and_(rollouts.c.node_token.in_(tokens), rollouts.c.node_expires_at > tx.now, claimed_by(by))
    own = [row.id for row in tx.all(sa.select(rollouts.c.id).where(claimed))]
    # Rows that another transaction is changing are extended by the next heartbeat.
    lockable = sa.select(rollouts.c.id).where(claimed).order_by(rollouts.c.id).with_for_update(skip_locked=True)
    ids = [row.id for row in tx.all(lockable)]
    tx.run(sa.update(rollouts).where(rollouts.c.id.in_(ids)).values(node_expires_at=tx.now + ttl))
    return own


def _give_back(tx: Tx, which: sa.ColumnElement[bool], settings: LedgerSettings | None) -> int:
    """Ends the claims `which`. With `settings`, each counts a failure; too many failures lose the rollout."""
    concerned = sa.select(rollouts.c.group_id).where(rollouts.c.node_token.is_not(None), which)
    lock = sa.select(groups).where(groups.c.id.in_(concerned)).order_by(groups.c.id)
    locked = {row.id: row for row in tx.all(lock.with_for_update(skip_locked=True, key_share=True))}
    claimed = sa.select(rollouts).where(rollouts.c.node_token.is_not(None), which, rollouts.c.group_id.in_(locked))
    rows = tx.all(claimed.order_by(rollouts.c.id))
    for row in rows:
        is_lost = settings is not None and row.infra_failures >= settings.infra_retries
        values = pending_again(row, failed=settings is not None)
        if is_lost:
            values = {
                **FREE,
                "status": RolloutStatus.LOST,
                "scoring": Scoring.UNSCORABLE,
                "reason": f"{row.infra_failures + 1} nodes died under it, the last one was {row.node}",
                "cause": Cause.INFRASTRUCTURE,
                "infra_failures": row.infra_failures + 1,
                "finished_at": tx.now,
            }
        tx.run(sa.update(rollouts).where(rollouts.c.id == row.id).values(values))
        tx.end_session(row.session_id)
        kind = "rollout_finished" if is_lost else "rollout_returned"
        tx.note(kind, row.id, group_id=row.group_id, status=values["status"], node=row.node, attempt=row.attempt)
    if settings is not None:
        for group_id in dict.fromkeys(row.group_id for row in rows):
            settle(tx, locked[group_id], settings)
    return len(rows)


FORGOTTEN_AFTER = 86_400.0


def note_node(tx: Tx, name: str, submission: str | None) -> None:
    """Records that the node asks for work now. A new one's first claim deletes those that have not asked for a day."""
    values = {"submission_id": submission, "asked_at": tx.now}
    if not tx.run(sa.update(nodes).where(nodes.c.name == name).values(values)):
        tx.run(sa.delete(nodes).where(nodes.c.asked_at < tx.now - FORGOTTEN_AFTER))
        tx.insert_new(nodes, {"name": name, **values})
