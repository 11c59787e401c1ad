"""Policies: weight versions and their staleness, owners, controls, and room for more groups.

Versions. A number stands for one set of weights forever, and numbers only grow. A trainer that restores an older
checkpoint abandons the later versions, and its weights continue with the next free number. Example: after 6 to 8 are
abandoned, 9 stands for the weights of 5. A token of 5 is as fresh as one of 9; a token of 7 comes from abandoned
weights.

Owners. One incarnation of one trainer owns a policy. A trainer's name belongs to one run: one folder of checkpoints,
which contains the run's id. Each rewind starts a new incarnation of the run and makes it the owner of the restored
policies. From then on every call for them contains the trainer's name and incarnation. Calls of an older incarnation
are refused; the error names the owner and its start. So are calls of another trainer, and of another run with the same
name, unless it takes over. A policy without an owner can be leased by any trainer that has not rewound (incarnation 0).
Only an owner may change weights.

Controls are what a policy's trainer has set for the rollouts to come (`rolltap.contract.control`). A control that a
trainer set belongs to its run: when another run takes the policy, it ends. One that was set on the admin plane stands
until it is replaced.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import sqlalchemy as sa

from rolltap.contract.base import values_of
from rolltap.contract.control import RolloutControl
from rolltap.contract.rules import parse_rules
from rolltap.contract.trainer import OwnerRequest, PolicyState, Rewind
from rolltap.errors import ConfigError, LedgerError, RewindOvertaken, TrainerFenced, UnknownPolicy, VersionTaken
from rolltap.ledger.counts import counted
from rolltap.ledger.schema import (
    OWNER,
    abandoned,
    controls,
    demands,
    groups,
    leases,
    policies,
    trainers,
    version_digests,
)
from rolltap.ledger.unit_of_work import LedgerSettings, Tx, UnitOfWork
from rolltap.types import GroupStatus
from rolltap.wording import utc_text

OUTSTANDING = (GroupStatus.OPEN, GroupStatus.COMPLETE, GroupStatus.LEASED)
"""States of groups that count for backpressure: open, ready for a trainer, or leased."""


@dataclass(frozen=True, slots=True)
class PolicyStats:
    """Counts of one policy. `room`: the number of groups that may still be opened; None if there is no limit.

    `staleness`: the number of ready groups by the staleness of their oldest trained token. `abandoned`: the number of
    those with a token of weights that a rewind abandoned, which are in no `staleness`. `untrained`: the number of
    groups that were dropped because no reply in them is trained. `unanswered`: the number of ended rollouts in which
    the policy sampled nothing.
    """

    policy: str
    version: int
    groups: Mapping[str, int]
    rollouts: Mapping[str, int]
    outstanding: int
    room: int | None
    zero_variance: int
    staleness: Mapping[int, int] = field(default_factory=dict)
    abandoned: int = 0
    untrained: int = 0
    unanswered: int = 0


@dataclass(frozen=True, slots=True)
class ServedWeights:
    """The weights that a policy's engines should have. `folder` is empty if they were sent without one; `paused` is the
    mode of the update under way; `digest` is the trainer's, made in whatever way."""

    version: int
    folder: str = ""
    adapter: str = ""
    paused: str | None = None
    digest: str = ""


class PolicyVersions:
    """A version number stands for one set of weights forever, and only grows (`rolltap.ledger.policies`)."""

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
        is_its = sa.and_(version_digests.c.policy == policies.c.name, version_digests.c.version == policies.c.version)
        joined = policies.outerjoin(version_digests, is_its)
        statement = sa.select(policies, version_digests.c.digest).select_from(joined).where(policies.c.name == name)

        def read(tx: Tx) -> Any:
            policy_row(tx, name)
            return tx.first(statement)

        rows = await self._uow.select(statement)
        row = rows[0] if rows else await self._uow.query(read)
        return ServedWeights(row.version, row.folder or "", row.adapter or "", row.paused, row.digest or "")

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

    async def leave(self, name: str, by: OwnerRequest) -> None:
        """Forgets what the trainer wants of the policy, until its next lease: it does not count for backpressure."""

        def work(tx: Tx) -> None:
            owned_policy(tx, name, by)
            mine = sa.and_(demands.c.policy == name, demands.c.trainer == by.trainer)
            tx.run(sa.delete(demands).where(mine))
            tx.note("trainer_left", name, trainer=by.trainer)

        await self._uow.transact(work)

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


def lock_policies(tx: Tx, policy: str, also: Sequence[str] = ()) -> None:
    """Locks the rows of the policies that a group trains, in the order of their names."""
    for name in sorted({policy, *also}):
        locked_policy(tx, name)


def first_behind(tx: Tx, names: Sequence[str], settings: LedgerSettings) -> str:
    """The first of the policies that the barrier waits for (`is_behind`); "" if none, or if there is no barrier."""
    if not settings.barrier:
        return ""
    return next((name for name in names if is_behind(tx, name, settings.trainer_silence)), "")


def is_behind(tx: Tx, name: str, silence: float) -> bool:
    """Whether the policy has yet to make a step, or to serve the weights of one, on rollouts that others train, too:
    another policy's trainer has acknowledged the same rollouts, and there are enough groups for this one's next step.

    A policy without an active trainer is not waited for, and neither are weights if no trainer owns it.
    """
    demands_now = demands_of(tx, name, silence)
    if not demands_now:
        return False
    policy = policy_row(tx, name)
    last = last_acknowledged(tx, policy.owner, name)
    if last is not None and last.served == policy.version:
        return True
    others = groups.alias()
    same_rollouts = sa.or_(others.c.id == OWNER, others.c.shares == OWNER)
    is_trained = sa.exists().where(same_rollouts, others.c.status == GroupStatus.ACKNOWLEDGED)
    waiting = sa.and_(groups.c.policy == name, groups.c.status.in_((GroupStatus.COMPLETE, GroupStatus.LEASED)))
    count = sa.select(sa.func.count()).where(waiting)
    if tx.scalar(count) < sum(row.batch for row in demands_now):
        return False
    return tx.scalar(count.where(is_trained)) > 0


def last_acknowledged(tx: Tx, trainer: str | None, policy: str) -> Any:
    """The row of the last lease of fresh groups of `policy` that the trainer acknowledged; None if there is none."""
    mine = sa.and_(leases.c.trainer == trainer, leases.c.policy == policy, leases.c.status == "acknowledged")
    fresh_ones = sa.select(leases).where(mine, leases.c.replay.is_(False))
    return tx.first(fresh_ones.order_by(leases.c.token.desc()).limit(1))


def _stats(tx: Tx, policy: Any, silence: float) -> PolicyStats:
    counts = counted(tx, policy.name)
    history = history_of(tx, policy)
    ages: Counter[int] = Counter()
    of_abandoned = 0
    for versions, n in counts["ready"].items():
        oldest, newest = map(int, versions.split())
        if history.meets_abandoned(oldest, newest):
            of_abandoned += n
        else:
            ages[history.behind(oldest)] += n
    return PolicyStats(
        policy=policy.name,
        version=policy.version,
        groups=counts["groups"],
        rollouts=counts["rollouts"],
        outstanding=sum(counts["groups"].get(status, 0) for status in OUTSTANDING),
        room=room(tx, policy.name, silence),
        zero_variance=counts["zero_variance"].get("", 0),
        staleness=dict(sorted(ages.items())),
        abandoned=of_abandoned,
        untrained=counts["untrained"].get("", 0),
        unanswered=counts["unanswered"].get("", 0),
    )


@dataclass(frozen=True, slots=True)
class VersionHistory:
    """A policy's `version`, and its abandoned spans (first, last) in order. The number after a span stands for the
    weights of the version before it."""

    version: int
    abandoned: tuple[tuple[int, int], ...] = ()

    def behind(self, version: int) -> int:
        """The number of updates between the weights of `version` and the current ones."""
        for first, last in self.abandoned:
            if first <= version <= last:
                return version - first + 1 + self.behind(first - 1)
        skipped = sum(last - first + 2 for first, last in self.abandoned if first > version)
        return max(0, self._newest - version - skipped)

    def oldest(self, behind: int) -> int:
        """The lowest version that is at most `behind` updates behind, ignoring abandoned ones."""
        version = self._newest - behind
        for first, last in reversed(self.abandoned):
            if version > last + 1:
                break
            version -= last - first + 2
        return version

    def meets_abandoned(self, oldest: int, newest: int) -> bool:
        """Whether a version from `oldest` to `newest` is abandoned."""
        return any(oldest <= last and first <= newest for first, last in self.abandoned)

    def is_fresh(self, version: int, max_staleness: int) -> bool:
        """Whether `version` is at most `max_staleness` updates behind, and not abandoned."""
        return not self.meets_abandoned(version, version) and self.behind(version) <= max_staleness

    @property
    def _newest(self) -> int:
        """The served version, or the number with which restored weights will be pushed."""
        return max(self.version, self.abandoned[-1][1] + 1) if self.abandoned else self.version


def history_of(tx: Tx, policy: Any) -> VersionHistory:
    """The history of the policy with the row `policy`.

    Only rewinds on the current weights' history count: a later rewind may have undone an earlier one.
    """
    spans = sa.select(abandoned.c.first, abandoned.c.last).where(abandoned.c.policy == policy.name)
    effective: list[tuple[int, int]] = []
    for row in tx.all(spans.order_by(abandoned.c.last.desc())):
        if not effective or row.last < effective[-1][0] - 1:
            effective.append((row.first, row.last))
    return VersionHistory(policy.version, tuple(reversed(effective)))


def admit(tx: Tx, name: str, trainer: str, incarnation: int) -> VersionHistory:
    """The history of a policy that the trainer wants to lease; its owner cannot change until the transaction ends.

    Raises `TrainerFenced` if another incarnation of the trainer is current, or another trainer owns the policy.
    """
    lock_incarnation(tx, trainer, incarnation)
    policy = tx.first(sa.select(policies).where(policies.c.name == name).with_for_update(read=True))
    if policy is None:
        raise _unknown(tx, name)
    check_owner(policy, trainer)
    return history_of(tx, policy)


def lock_trainer(tx: Tx, name: str) -> Any:
    """The trainer's row, created if it is new, and locked until the transaction ends."""
    tx.insert_new(trainers, {"name": name, "step": None, "incarnation": 0})
    return tx.first(sa.select(trainers).where(trainers.c.name == name).with_for_update(key_share=True))


def lock_incarnation(tx: Tx, name: str, incarnation: int) -> Any:
    """Like `lock_trainer`. Raises `TrainerFenced` unless `incarnation` is the trainer's current one."""
    row = lock_trainer(tx, name)
    if row.incarnation != incarnation:
        raise TrainerFenced(
            f"trainer {name!r} has the newer incarnation {row.incarnation}{_since(row.started_at)}; this call is from "
            + (
                f"incarnation {incarnation}: stop this process"
                if incarnation
                else "a process that has not rewound: stop this process, or send `incarnation` from rewind's reply"
            ),
            param="incarnation",
        )
    return row


TAKE_OVER = "rolltap train --take-over; in a client, rewind(..., take_over=True)"


def check_owner(policy: Any, trainer: str) -> None:
    """Raises `TrainerFenced` if another trainer owns the policy with the row `policy`."""
    if policy.owner not in (None, trainer):
        raise TrainerFenced(
            f"policy {policy.name!r} is trained by {policy.owner!r}{_since(policy.owned_since)}: stop that trainer "
            f"first, then let this one take over ({TAKE_OVER})",
            param="trainer",
        )


def check_weights_owner(policy: Any, trainer: str) -> None:
    """Raises `TrainerFenced` unless the trainer owns the policy with the row `policy`, as weight changes require."""
    if policy.owner is None:
        raise TrainerFenced(f"policy {policy.name!r} has no trainer yet: rewind before changing its weights")
    check_owner(policy, trainer)


def new_incarnation(tx: Tx, name: str, rewind: Rewind) -> Any:
    """Starts a new incarnation; returns the trainer's row.

    Raises `TrainerFenced` if another run has the name, `RewindOvertaken` if there was one after `rewind.after`.
    """
    row = lock_trainer(tx, name)
    if rewind.after not in (None, row.incarnation):
        raise RewindOvertaken(
            f"trainer {name!r} is in incarnation {row.incarnation}{_since(row.started_at)}, and this process read "
            f"{rewind.after}: it reads it again if it is the newer one",
            param="after",
        )
    if row.run not in (None, rewind.run) and not rewind.take_over:
        raise TrainerFenced(
            f"the name {name!r} belongs to another run{_since(row.started_at)}, with other checkpoints: give this "
            f"trainer another name, or let it take over ({TAKE_OVER})",
            param="run",
        )
    values = {"run": rewind.run, "incarnation": row.incarnation + 1, "started_at": tx.now}
    tx.run(sa.update(trainers).where(trainers.c.name == name).values(values))
    return tx.first(sa.select(trainers).where(trainers.c.name == name))


def own(tx: Tx, policy: Any, trainer: str, *, take_over: bool) -> Sequence[Any]:
    """Makes the trainer the owner of the policy with the locked row `policy`; returns the others' open leases on it."""
    if not take_over:
        check_owner(policy, trainer)
    foreign = sa.and_(leases.c.policy == policy.name, leases.c.trainer != trainer, leases.c.status == "open")
    # Lock leases before demands, in the same order as an acknowledgement.
    others = tx.all(sa.select(leases).where(foreign).order_by(leases.c.token).with_for_update(key_share=True))
    if policy.owner != trainer:
        values = {"owner": trainer, "owned_since": tx.now}
        tx.run(sa.update(policies).where(policies.c.name == policy.name).values(values))
        tx.run(sa.delete(demands).where(demands.c.policy == policy.name, demands.c.trainer != trainer))
        tx.note("policy_owned", policy.name, trainer=trainer, before=policy.owner)
    return others


def _since(at: float | None) -> str:
    return "" if at is None else f" since {utc_text(at)}"


class Controls:
    def __init__(self, uow: UnitOfWork) -> None:
        self._uow = uow

    async def set(self, policy: str, control: RolloutControl, by: OwnerRequest | None = None) -> None:
        """Replaces the policy's control. Raises `TrainerFenced` unless `by`, if given, owns the policy."""

        def work(tx: Tx) -> None:
            run = None
            if by is None:
                locked_policy(tx, policy)
            else:
                owned_policy(tx, policy, by)
                run = tx.scalar(sa.select(trainers.c.run).where(trainers.c.name == by.trainer))
            tx.run(sa.delete(controls).where(controls.c.policy == policy))
            told = {**values_of(control), "rules": msgspec.to_builtins(control.rules)}
            values = {**told, "curriculum": control.curriculum or None, "rules": told["rules"] or None}
            tx.run(controls.insert().values(policy=policy, run=run, **values))
            tx.note("control_set", policy, trainer=by.trainer if by else None, **told)

        await self._uow.transact(work)

    async def of(self, policy: str) -> RolloutControl:
        """The policy's control; an empty one if none is in force."""
        return (await self.with_run(policy))[0]

    async def with_run(self, policy: str) -> tuple[RolloutControl, str | None]:
        """The policy's control, an empty one if none is in force; and the run that set it, None for the admin plane."""
        silence = self._uow.settings.trainer_silence
        rows = await self._uow.query(lambda tx: _in_force(tx, silence))
        row = next((row for row in rows if row.policy == policy), None)
        return (_control(row), row.run) if row is not None else (RolloutControl(), None)


def end_foreign_control(tx: Tx, policy: str, run: str) -> None:
    """Ends the policy's control if another run than `run` set it."""
    foreign = sa.and_(controls.c.policy == policy, controls.c.run != run)
    row = tx.first(sa.select(controls).where(foreign))
    if row is not None:
        tx.run(sa.delete(controls).where(foreign))
        tx.note("control_ended", policy, run=row.run)


def controls_in_force(tx: Tx, silence: float) -> Mapping[str, RolloutControl]:
    """The control of each policy for which something is set."""
    by_policy = {row.policy: _control(row) for row in _in_force(tx, silence)}
    return {policy: control for policy, control in by_policy.items() if control != RolloutControl()}


def _in_force(tx: Tx, silence: float) -> list[Any]:
    """The rows of controls, without those of runs that were not heard of for `silence` seconds: a killed run ends
    none. It is in force again if the run goes on."""
    return [row for row in tx.all(sa.select(controls)) if row.run is None or _is_heard(tx, row, silence)]


def _is_heard(tx: Tx, control: Any, silence: float) -> bool:
    """Whether the run that set a control began in the last `silence` seconds, or was active."""
    row = tx.first(sa.select(trainers).where(trainers.c.run == control.run))
    has_begun = row is not None and (row.started_at or 0.0) > tx.now - silence
    return has_begun or any(row and each.trainer == row.name for each in demands_of(tx, control.policy, silence))


def _control(row: Any) -> RolloutControl:
    return RolloutControl(
        row.max_turns, row.temperature, row.n, row.priority, row.curriculum or {}, parse_rules(row.rules or {})
    )
