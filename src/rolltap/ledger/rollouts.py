"""Rollouts: starting attempts, finishing each rollout in exactly one terminal state, and acts of tampering.

Attempts are numbered from 1, and each has its own session. A new attempt closes the previous session, and calls from
older attempts are refused. An attempt that failed because of the infrastructure does not end the rollout: it waits for
a new attempt, up to `infra_retries` times. The other rollouts of its group are not affected.

Each act of tampering is a row of its session. A rollout gets the counts of its session when it ends.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import sqlalchemy as sa

from rolltap.calllog.codec import pack_bytes
from rolltap.contract.admin import LATE, NOTHING_SAMPLED, FinishRollout
from rolltap.contract.keys import SERVER, Caller
from rolltap.errors import AlignmentError, Forbidden, LeaseLost, LedgerError, RecordCorrupt, RecordTooLarge
from rolltap.ledger.groups import FREE, pending_again, settle
from rolltap.ledger.rebuilding import Rebuilder, TrainedVersions
from rolltap.ledger.rows import load_group, locked_group, no_rollout, rule_of
from rolltap.ledger.schema import attempts, evaluations, rollout_policies, rollouts, tampering
from rolltap.ledger.unit_of_work import LedgerSettings, Tx, UnitOfWork
from rolltap.tampering import TamperingAct, TamperingKind, count_by_kind
from rolltap.types import Cause, Group, GroupStatus, Rollout, RolloutStatus, Scoring, reward_scopes

log = logging.getLogger("rolltap.ledger")

LatePeers = Callable[[float], Awaitable[Sequence[str]]]
"""Waits for the calls of other processes; returns the processes that may still have some outside the store, of those
that lived at the given time (seconds since the epoch, by the store's clock)."""


async def no_late_peers(began: float) -> Sequence[str]:
    """For a ledger with one process: see `LatePeers`."""
    return ()


@dataclass(frozen=True, slots=True)
class StartedRollout:
    """A rollout with a new attempt, its policy, and the scopes of the rewards that its group waits for: one of each."""

    rollout: Rollout
    policy: str
    reward_scopes: tuple[tuple[str, ...], ...] = ()


class Rollouts:
    def __init__(self, uow: UnitOfWork, rebuilder: Rebuilder, late_peers: LatePeers) -> None:
        self._uow = uow
        self._rebuilder = rebuilder
        self._late_peers = late_peers

    async def get(self, rollout_id: str) -> Rollout:
        group = await self.group_of(rollout_id)
        return next(rollout for rollout in group.rollouts if rollout.id == rollout_id)

    async def group_of(self, rollout_id: str) -> Group:
        """The rollout's group."""

        def work(tx: Tx) -> Group:
            group_id = tx.scalar(sa.select(rollouts.c.group_id).where(rollouts.c.id == rollout_id))
            if group_id is None:
                raise no_rollout(tx, rollout_id)
            return load_group(tx, group_id)

        return await self._uow.query(work)

    async def check_own(self, rollout_id: str, by: Caller, node_token: str = "") -> None:
        """`rolltap.ledger.rollouts.check_own` in its own transaction."""
        if by.only_own:
            await self._uow.query(lambda tx: check_own(tx, rollout_id, by, node_token))

    async def check_own_session(self, session_id: str, rollout_id: str | None, by: Caller) -> None:
        """Raises `Forbidden` if a runner's key reads or closes the session of an attempt that it did not start."""
        of_rollout = sa.and_(attempts.c.rollout_id == rollout_id, attempts.c.session_id == session_id)
        own = sa.select(attempts.c.key_id).where(of_rollout)  # uses the primary key, as every rollout's end runs this
        if by.only_own and await self._uow.query(lambda tx: tx.scalar(own)) != by.id:
            raise Forbidden("a runner's key can read and close only the sessions of attempts that it started")

    async def start(
        self, rollout_id: str, session_id: str, *, runner: str = "", node_token: str = "", by: Caller = SERVER
    ) -> StartedRollout:
        """Starts a new attempt with `session_id`; closes the session of the previous attempt.

        Raises `LedgerError` if the rollout has ended, `LeaseLost` if another node has claimed it.
        """

        def work(tx: Tx) -> StartedRollout:
            rollout, group = locked_group(tx, rollout_id)
            if RolloutStatus(rollout.status).terminal:
                raise LedgerError(f"rollout {rollout_id} has ended as {rollout.status}; it can't be started again")
            _check_claim(rollout, node_token)
            check_own(tx, rollout_id, by)
            is_numbered = rollout.attempt > 0 and rollout.session_id is None  # see `pending_again`
            attempt = rollout.attempt if is_numbered else rollout.attempt + 1
            tx.end_session(rollout.session_id)
            values = {"status": RolloutStatus.RUNNING, "attempt": attempt, "session_id": session_id}
            tx.run(sa.update(rollouts).where(rollouts.c.id == rollout_id).values(values))
            row = {"rollout_id": rollout_id, "attempt": attempt, "session_id": session_id, "runner": runner}
            tx.run(attempts.insert().values(**row, started_at=tx.now, key_id=by.id))
            tx.note("rollout_started", rollout_id, group_id=group.id, attempt=attempt, session_id=session_id)
            loaded = load_group(tx, group.id)
            started = next(item for item in loaded.rollouts if item.id == rollout_id)
            waits = "rollout" in rule_of(group).scopes
            scopes = reward_scopes(loaded.roles, list(loaded.trains) or [group.policy]) if waits else ()
            return StartedRollout(started, group.policy, scopes)

        return await self._uow.transact(work)

    async def finish(self, rollout_id: str, ending: FinishRollout, by: Caller = SERVER) -> Rollout:
        """Ends the rollout in a terminal state and closes its session. The same ending again has no effect.

        After an infrastructure failure the rollout may be pending again, with the next attempt's number. A rollout in
        which nothing was sampled, or whose calls can't be reconstructed, says nothing about its policies: it becomes
        unscorable, with a reason, and where its runner reports a success, the ledger records a failure. Raises
        `LedgerError` if the rollout has ended differently or the attempt is not the last one, `LeaseLost` if another
        node has claimed it.
        """
        await self.check_own(rollout_id, by, ending.node_token)
        its_group = await self.group_of(rollout_id)
        rollout = next(rollout for rollout in its_group.rollouts if rollout.id == rollout_id)
        if not _check_ending(rollout, ending):
            return rollout
        if rollout.session_id is not None:
            await self._uow.close_session(rollout.session_id)
        late: Sequence[str] = ()
        trained: TrainedByPolicy = {}
        reported = ending
        if ending.counts_as is not Scoring.UNSCORABLE or ending.status is not RolloutStatus.CANCELLED:
            late = await self._late_peers(await self._began(rollout))
            trained, ending = await self._trained(rollout, list(its_group.trains) or [its_group.policy], ending)
        if late:
            log.warning("rollout %s ends while calls may be out of reach, of proxies %s", rollout_id, ", ".join(late))
            ending = msgspec.structs.replace(ending, reason="; ".join(filter(None, (LATE, ending.reason))))

        def work(tx: Tx) -> None:
            row, group = locked_group(tx, rollout_id)
            if _check_ending(row, ending):
                _check_claim(row, ending.node_token)
                check_own(tx, rollout_id, by)
                if row.session_id is not None:
                    append(tx, row.session_id, ending.tampering)
                if _may_retry(row, group, reported, self._uow.settings):
                    values = pending_again(row, failed=True, reason=ending.reason)
                    tx.run(sa.update(rollouts).where(rollouts.c.id == row.id).values(values))
                    why = {"status": values["status"], "attempt": row.attempt, "reason": ending.reason}
                    tx.note("rollout_returned", row.id, group_id=row.group_id, **why)
                    return
                _end(tx, row, group.policy, ending, trained)
                settle(tx, group, self._uow.settings)

        await self._uow.transact(work)
        return await self.get(rollout_id)

    async def _began(self, rollout: Rollout) -> float:
        """When the rollout's attempt was started; now, if it never was."""
        of_attempt = sa.and_(attempts.c.rollout_id == rollout.id, attempts.c.attempt == rollout.attempt)
        started_at = sa.select(attempts.c.started_at).where(of_attempt)
        return await self._uow.query(lambda tx: tx.scalar(started_at) or tx.now)

    async def _trained(
        self, rollout: Rollout, policies: Sequence[str], ending: FinishRollout
    ) -> tuple[TrainedByPolicy, FinishRollout]:
        """What the rollout has to train of each of `policies`, and its ending: unscorable if none of them sampled
        anything or nothing can be read."""
        if rollout.session_id is None:
            return {}, _without_result(ending, NOTHING_SAMPLED, Cause.AGENT)
        try:
            trained = {
                policy: await self._rebuilder.trained_versions(rollout.session_id, policy) for policy in policies
            }
        except (RecordCorrupt, AlignmentError) as error:
            cause = Cause.AGENT if isinstance(error, RecordTooLarge) else Cause.INFRASTRUCTURE
            return {}, _without_result(ending, f"{error.code}: {error.message}", cause)
        if not any(versions.sampled for versions in trained.values()):
            return {}, _without_result(ending, NOTHING_SAMPLED, Cause.AGENT)
        if ending.counts_as is Scoring.SCORED:
            return trained, ending
        return {policy: TrainedVersions(sampled=versions.sampled) for policy, versions in trained.items()}, ending


TrainedByPolicy = Mapping[str, TrainedVersions]
"""What a rollout has to train of each trained policy; empty if nothing."""


NO_RESULT = (NOTHING_SAMPLED, RecordCorrupt.code, RecordTooLarge.code, AlignmentError.code)
"""How the reasons begin for which a rollout says nothing about the policy, whatever its runner reports."""


def _without_result(ending: FinishRollout, reason: str, cause: Cause) -> FinishRollout:
    """The ending of a rollout without a result: unscorable, and a failure if it was reported as a success."""
    if ending.reason.startswith(reason):  # its runner has asked, too
        reason = ending.reason
    elif ending.reason:
        reason = f"{reason}; {ending.reason}"
    ending = msgspec.structs.replace(ending, reason=reason, scoring=Scoring.UNSCORABLE)
    is_success = ending.status is RolloutStatus.SUCCEEDED
    return msgspec.structs.replace(ending, status=RolloutStatus.FAILED, cause=cause) if is_success else ending


def _check_ending(rollout: Any, ending: FinishRollout) -> bool:
    """Whether `ending` can be applied to a rollout (or its row); False if it is applied already. Raises otherwise."""
    if ending.attempt != rollout.attempt:
        raise LedgerError(
            f"rollout {rollout.id} is at attempt {rollout.attempt}; attempt {ending.attempt} can't end it",
            param="attempt",
        )
    if not RolloutStatus(rollout.status).terminal:
        return True
    was_corrected = (ending.status, rollout.status) == (RolloutStatus.SUCCEEDED, RolloutStatus.FAILED) and any(
        reason.startswith(NO_RESULT) for reason in rollout.reason.split("; ")
    )
    if (rollout.status, rollout.cause) != (ending.status, ending.caused_by) and not was_corrected:
        recorded, requested = _describe(rollout.status, rollout.cause), _describe(ending.status, ending.caused_by)
        raise LedgerError(f"rollout {rollout.id} has ended as {recorded}, not {requested}", param="status")
    return False


def _describe(status: str, cause: str | None) -> str:
    return f"{status} ({cause})" if cause else f"{status}"


def _check_claim(row: Any, node_token: str) -> None:
    if (row.node_token or "") != node_token:
        raise LeaseLost(f"this node has lost rollout {row.id}: its claim expired, or another node has claimed it")


def check_own(tx: Tx, rollout_id: str, by: Caller, node_token: str = "") -> None:
    """Raises for a runner that neither claims the rollout nor, if nobody does, began its current attempt.

    `LeaseLost` where it had the rollout once (it began an attempt, or shows a claim that is over), else `Forbidden`.
    """
    if not by.only_own:
        return
    began = sa.and_(attempts.c.rollout_id == rollouts.c.id, attempts.c.attempt == rollouts.c.attempt)
    owner = sa.func.coalesce(rollouts.c.node_key, attempts.c.key_id).label("owner")
    rollout = sa.select(rollouts, owner).select_from(rollouts.outerjoin(attempts, began))
    row = tx.first(rollout.where(rollouts.c.id == rollout_id))
    if row is not None and row.owner == by.id:
        return
    own_attempts = sa.select(attempts.c.attempt).where(attempts.c.rollout_id == rollout_id, attempts.c.key_id == by.id)
    if row is not None and tx.first(own_attempts) is not None:
        raise LeaseLost(f"this key has lost rollout {rollout_id}: its claim expired, and {_holder(row)}")
    if row is not None and node_token not in ("", row.node_token):
        raise LeaseLost(f"this node has lost rollout {rollout_id}: its claim expired, or another node has claimed it")
    raise Forbidden(f"this key has not claimed rollout {rollout_id}: another key or no key has claimed it")


def _holder(row: Any) -> str:
    """The current holder of the rollout, as text."""
    if row.node is not None:
        return f"node {row.node!r} has it, with key {row.node_key}"
    return f"it has ended as {row.status}" if RolloutStatus(row.status).terminal else "nobody has it now"


def _may_retry(row: Any, group: Any, ending: FinishRollout, settings: LedgerSettings) -> bool:
    """Whether a failed attempt is retried: only the infrastructure failed, not too often, and the group is open."""
    failed = ending.status in (RolloutStatus.FAILED, RolloutStatus.TIMED_OUT)
    blameless = ending.caused_by is Cause.INFRASTRUCTURE and ending.counts_as is Scoring.UNSCORABLE
    waited_for = group.status == GroupStatus.OPEN
    return waited_for and failed and blameless and row.infra_failures < settings.infra_retries


def _end(tx: Tx, row: Any, policy: str, ending: FinishRollout, trained: TrainedByPolicy) -> None:
    """Ends a rollout whose group is of `policy`."""
    own = trained.get(policy, TrainedVersions())
    tx.run(
        sa.update(rollouts)
        .where(rollouts.c.id == row.id)
        .values(
            status=ending.status,
            scoring=ending.counts_as,
            reason=ending.reason,
            cause=ending.caused_by,
            finished_at=tx.now,
            oldest_version=own.oldest,
            newest_version=own.newest,
            trained_calls=[call for versions in trained.values() for call in versions.calls],
            **FREE,
            tampering=counted(tx, row.session_id),
        )
    )
    if len(trained) > 1:
        by_policy = [
            {"policy": policy, "oldest_version": one.oldest, "newest_version": one.newest, "sampled": one.sampled}
            for policy, one in trained.items()
        ]
        tx.run(rollout_policies.insert(), [{"rollout_id": row.id, **values} for values in by_policy])
    if ending.evaluation:
        tx.run(evaluations.insert().values(rollout_id=row.id, seen=pack_bytes(ending.evaluation.encode())))
    outcome = {"status": ending.status, "cause": ending.caused_by, "reason": ending.reason}
    tx.note("rollout_finished", row.id, group_id=row.group_id, **outcome)


class Tampering:
    def __init__(self, uow: UnitOfWork) -> None:
        self._uow = uow

    async def append(self, session_id: str, act: TamperingAct) -> None:
        await self._uow.transact(lambda tx: append(tx, session_id, [act]))


def append(tx: Tx, session_id: str, acts: Iterable[TamperingAct]) -> None:
    rows = [{"at": tx.now, "session_id": session_id, "kind": each.kind.value, "detail": each.detail} for each in acts]
    tx.run(tampering.insert(), rows)


def counted(tx: Tx, session_id: str | None) -> dict[str, int]:
    """The number of a session's acts by kind."""
    if session_id is None:
        return {}
    mine = sa.select(tampering).where(tampering.c.session_id == session_id).order_by(tampering.c.seq)
    return count_by_kind(TamperingAct(TamperingKind(row.kind), row.detail) for row in tx.all(mine))
