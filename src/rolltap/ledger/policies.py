"""Policies: their weight versions, and the number of outstanding groups that their trainers allow."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from rolltap.contract.admin import NOTHING_SAMPLED
from rolltap.contract.trainer import OwnerRequest, PolicyState
from rolltap.errors import ConfigError, LedgerError, UnknownPolicy, VersionTaken
from rolltap.ledger.base import NOTHING_TO_TRAIN, PolicyStats
from rolltap.ledger.ownership import check_weights_owner, lock_incarnation
from rolltap.ledger.rows import OUTSTANDING
from rolltap.ledger.schema import abandoned, demands, groups, leases, policies, rollouts, version_digests
from rolltap.ledger.unit_of_work import Tx, UnitOfWork
from rolltap.ledger.version_history import history_of
from rolltap.types import GroupStatus


@dataclass(frozen=True, slots=True)
class ServedWeights:
    """The weights that a policy's engines should have. `folder` is empty if they were sent without one; `paused` is the
    mode of the update under way."""

    version: int
    folder: str = ""
    adapter: str = ""
    paused: str | None = None


class PolicyVersions:
    """A version number stands for one set of weights forever, and only grows (`rolltap.ledger.version_history`)."""

    def __init__(self, uow: UnitOfWork) -> None:
        self._uow = uow

    async def register(self, name: str, *, tokenizer_hash: str = "", version: int = 0) -> PolicyState:
        """Adds the policy; an existing one keeps its version. Raises `ConfigError` if its tokenizer has changed."""

        def work(tx: Tx) -> PolicyState:
            values = {"name": name, "version": version, "given": version, "tokenizer_hash": tokenizer_hash}
            if tx.insert_new(policies, {**values, "paused": None, "created_at": tx.now}):
                return _state_of(locked_policy(tx, name))
            row = locked_policy(tx, name)
            if row.tokenizer_hash and tokenizer_hash and row.tokenizer_hash != tokenizer_hash:
                raise ConfigError(
                    f"policy {name!r} is on record with tokenizer {row.tokenizer_hash[:12]}, not "
                    f"{tokenizer_hash[:12]}; give the new one another name"
                )
            if tokenizer_hash and not row.tokenizer_hash:
                tx.run(_update(name).values(tokenizer_hash=tokenizer_hash))
            return _state_of(locked_policy(tx, name))

        return await self._uow.transact(work)

    async def get(self, name: str) -> PolicyState:
        return await self._uow.query(lambda tx: _state_of(policy_row(tx, name)))

    async def list(self) -> Sequence[PolicyState]:
        statement = sa.select(policies).order_by(policies.c.name)
        return [_state_of(row) for row in await self._uow.select(statement)]

    async def served(self, name: str) -> ServedWeights:
        """The weights that the policy's engines should have."""
        statement = sa.select(policies).where(policies.c.name == name)
        rows = await self._uow.select(statement)
        if not rows:
            raise UnknownPolicy(f"no policy {name!r}", param="policy")
        return ServedWeights(rows[0].version, rows[0].folder or "", rows[0].adapter or "", rows[0].paused)

    async def set_version(self, name: str, version: int, folder: str = "", adapter: str = "") -> PolicyState:
        """Records that the engines serve `version` from now on. Setting the current one again has no effect.

        `folder`: where engines can load it from again, as the adapter of this name if one is given.
        """

        def work(tx: Tx) -> PolicyState:
            _assign(tx, name, version)
            tx.run(_update(name).values(version=version, folder=folder or None, adapter=adapter or None))
            tx.note("policy_version", name, version=version)
            tx.wake_trainers()
            return _state_of(locked_policy(tx, name))

        return await self._uow.transact(work)

    async def check_weights_owner(self, name: str, by: OwnerRequest) -> None:
        """Raises `TrainerFenced` unless this incarnation of the trainer owns the policy."""
        await self._uow.transact(lambda tx: owned_policy(tx, name, by))

    async def assign_version(self, name: str, version: int, digest: str, by: OwnerRequest) -> None:
        """Assigns `version` to the weights with `digest`, before the engines load them.

        Raises `LedgerError` if the number is lower than the served one, is abandoned, or has another digest.
        """

        def work(tx: Tx) -> None:
            owned_policy(tx, name, by)
            _assign(tx, name, version)
            _check_digest(tx, name, version, digest)

        await self._uow.transact(work)

    async def set_paused(self, name: str, mode: str | None) -> None:
        """Records that a weight update has begun in `mode`, or has ended (None)."""

        def work(tx: Tx) -> None:
            locked_policy(tx, name)
            tx.run(_update(name).values(paused=mode))
            tx.note("policy_paused" if mode else "policy_resumed", name, mode=mode)

        await self._uow.transact(work)

    async def stats(self, name: str) -> PolicyStats:
        """The policy's counts."""
        silence = self._uow.settings.trainer_silence
        return await self._uow.query(lambda tx: _stats(tx, policy_row(tx, name), silence))


def _update(name: str) -> sa.Update:
    return sa.update(policies).where(policies.c.name == name)


def _state_of(row: Any) -> PolicyState:
    return PolicyState(row.name, row.version, row.tokenizer_hash, row.paused, row.owner, row.owned_since)


def owned_policy(tx: Tx, name: str, by: OwnerRequest) -> None:
    """Locks the policy. Raises `TrainerFenced` unless this incarnation of the trainer owns it."""
    lock_incarnation(tx, by.trainer, by.incarnation)
    check_weights_owner(locked_policy(tx, name), by.trainer)


def _check_digest(tx: Tx, name: str, version: int, digest: str) -> None:
    if tx.insert_new(version_digests, {"policy": name, "version": version, "digest": digest}):
        return
    of_version = sa.and_(version_digests.c.policy == name, version_digests.c.version == version)
    known = tx.scalar(sa.select(version_digests.c.digest).where(of_version))
    if known != digest:
        raise VersionTaken(
            f"version {version} of policy {name!r} is assigned to weights with digest {known[:12]}, and these have "
            f"{digest[:12]}: push them with the next number",
            param="version",
        )


def restore(tx: Tx, name: str, version: int) -> int:
    """Abandons all versions after `version`, whose weights the policy's trainer has restored.

    Returns the number with which these weights continue: `version` itself if there are no later versions.
    """
    _check_number(version)
    policy = locked_policy(tx, name)
    if version <= policy.given:  # a number from an earlier rewind that no engine was asked to load is free again
        tx.run(sa.delete(abandoned).where(abandoned.c.policy == name, abandoned.c.last >= policy.given))
    if version >= policy.given:
        return version
    tx.run(abandoned.insert().values(policy=name, first=version + 1, last=policy.given))
    tx.note("versions_abandoned", name, first=version + 1, last=policy.given)
    return policy.given + 1


def _assign(tx: Tx, name: str, version: int) -> None:
    _check_number(version)
    policy = locked_policy(tx, name)
    last_abandoned = [last for _, last in history_of(tx, policy).abandoned]
    lowest = max([policy.version, *(last + 1 for last in last_abandoned)])
    if version < lowest:
        raise LedgerError(
            f"policy {name!r} can't go to version {version}: numbers only grow, and it is at {policy.version}"
            + (f", with all up to {last_abandoned[-1]} abandoned" if lowest > policy.version else "")
            + "; push as the number that rewind returned, or a later one",
            param="version",
        )
    tx.run(_update(name).values(given=max(policy.given, version)))


def _check_number(version: int) -> None:
    if version < 0:
        raise LedgerError(f"weight versions are counted from 0, not {version}", param="version")


def policy_row(tx: Tx, name: str) -> Any:
    row = tx.first(sa.select(policies).where(policies.c.name == name))
    if row is None:
        raise _unknown(tx, name)
    return row


def locked_policy(tx: Tx, name: str) -> Any:
    """The policy's row, locked until the transaction ends."""
    row = tx.first(sa.select(policies).where(policies.c.name == name).with_for_update(key_share=True))
    if row is None:
        raise _unknown(tx, name)
    return row


def shared_policy(tx: Tx, name: str) -> Any:
    """The policy's row, share-locked: its owner cannot change until the transaction ends."""
    row = tx.first(sa.select(policies).where(policies.c.name == name).with_for_update(read=True))
    if row is None:
        raise _unknown(tx, name)
    return row


def _unknown(tx: Tx, name: str) -> UnknownPolicy:
    known = ", ".join(tx.connection.execute(sa.select(policies.c.name).order_by(policies.c.name)).scalars())
    return UnknownPolicy(f"no policy {name!r}; known: {known or 'none'}", param="policy")


def outstanding(tx: Tx, policy: str) -> int:
    """The number of the policy's open, complete and leased groups."""
    statement = sa.select(sa.func.count()).where(groups.c.policy == policy, groups.c.status.in_(OUTSTANDING))
    return tx.scalar(statement)


def demands_of(tx: Tx, policy: str, silence: float) -> Sequence[Any]:
    """The demands of the policy's trainers that were active in the last `silence` seconds or hold a lease."""
    of_demand = sa.and_(leases.c.trainer == demands.c.trainer, leases.c.policy == demands.c.policy)
    holds = sa.exists().where(of_demand, leases.c.status == "open", leases.c.expires_at > tx.now)
    active = sa.or_(demands.c.seen_at > tx.now - silence, holds)
    return tx.all(sa.select(demands).where(demands.c.policy == policy, active).order_by(demands.c.trainer))


def room(tx: Tx, policy: str, silence: float) -> int | None:
    """The number of groups that may be opened: the sum of (max_staleness + 1) · batch over the policy's trainers, minus
    the outstanding groups. None if no trainer is active (`demands_of`) or one accepts any staleness.
    """
    demands_now = demands_of(tx, policy, silence)
    if not demands_now or any(row.max_staleness is None for row in demands_now):
        return None
    limit = sum((row.max_staleness + 1) * row.batch for row in demands_now)
    return max(0, limit - outstanding(tx, policy))


def _stats(tx: Tx, policy: Any, silence: float) -> PolicyStats:
    of_policy = groups.c.policy == policy.name
    by_status = tx.all(sa.select(groups.c.status, sa.func.count()).where(of_policy).group_by(groups.c.status))
    of_rollouts = (
        sa.select(rollouts.c.status, sa.func.count())
        .join(groups, groups.c.id == rollouts.c.group_id)
        .where(of_policy)
        .group_by(rollouts.c.status)
    )
    unanswered = (
        sa.select(sa.func.count())
        .select_from(rollouts.join(groups, groups.c.id == rollouts.c.group_id))
        .where(of_policy, rollouts.c.finished_at.is_not(None), rollouts.c.reason.startswith(NOTHING_SAMPLED))
    )
    untrained = sa.select(sa.func.count()).where(
        of_policy, groups.c.status == GroupStatus.DROPPED, groups.c.reason == NOTHING_TO_TRAIN
    )
    ready = sa.select(groups.c.oldest_version, groups.c.newest_version).where(
        of_policy, groups.c.status == GroupStatus.COMPLETE, groups.c.oldest_version >= 0
    )
    history = history_of(tx, policy)
    rows = tx.all(ready)
    kept = [row for row in rows if not history.meets_abandoned(row.oldest_version, row.newest_version)]
    ages = Counter(history.behind(row.oldest_version) for row in kept)
    return PolicyStats(
        policy=policy.name,
        version=policy.version,
        groups=dict(map(tuple, by_status)),
        rollouts=dict(map(tuple, tx.all(of_rollouts))),
        outstanding=outstanding(tx, policy.name),
        room=room(tx, policy.name, silence),
        zero_variance=tx.scalar(sa.select(sa.func.count()).where(of_policy, groups.c.zero_variance.is_(True))),
        staleness=dict(sorted(ages.items())),
        abandoned=len(rows) - len(kept),
        untrained=tx.scalar(untrained),
        unanswered=tx.scalar(unanswered),
    )
