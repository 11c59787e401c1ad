"""Converts the ledger's rows to the glossary's types. No other module does that."""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec
import sqlalchemy as sa

from rolltap.calllog.schema import sessions
from rolltap.contract.admin import GroupRule
from rolltap.errors import NotFound
from rolltap.ledger.schema import OWNER, groups, pruned_groups, rewards, rollouts, tasks
from rolltap.ledger.unit_of_work import Tx
from rolltap.types import Cause, Group, GroupStatus, Reward, Rollout, RolloutParent, RolloutStatus, Scoring, Task
from rolltap.wording import utc_text


def reward_of(row: Any) -> Reward:
    return Reward(
        id=row.id,
        rollout_id=row.rollout_id,
        value=row.value,
        scope=row.scope,
        source=row.source,
        detail=row.detail,
        created_at=row.created_at,
        key_id=row.key_id,
    )


def rollout_of(row: Any, task_id: str, rewards: Sequence[Reward]) -> Rollout:
    return Rollout(
        id=row.id,
        group_id=row.group_id,
        task_id=task_id,
        index=row.position,
        status=RolloutStatus(row.status),
        attempt=row.attempt,
        session_id=row.session_id,
        scoring=Scoring(row.scoring),
        reason=row.reason,
        rewards=tuple(rewards),
        cause=None if row.cause is None else Cause(row.cause),
        tampering=row.tampering or {},
        parent=None if row.parent is None else RolloutParent(**row.parent),
    )


def group_of(row: Any, members: Sequence[Rollout], trains: Mapping[str, str]) -> Group:
    return Group(
        id=row.id,
        task_id=row.task_id,
        policy=row.policy,
        status=GroupStatus(row.status),
        rollouts=tuple(replace(one, group_id=row.id) for one in members) if row.shares else tuple(members),
        created_at=row.created_at,
        failures=row.failures,
        tags=tuple(row.tags),
        roles=row.roles or {},
        trains=trains,
    )


def task_of(row: Any) -> Task:
    return Task(id=row.id, instruction=row.instruction, spec=row.spec, tags=tuple(row.tags))


def rule_of(row: Any) -> GroupRule:
    return GroupRule(**{**row.rule, "scopes": tuple(row.rule["scopes"])})


def rule_json(rule: GroupRule) -> dict[str, Any]:
    return msgspec.structs.asdict(rule)


def task_digest(task: Task) -> str:
    """SHA-256 of the task's content: a task id may get another content later."""
    content = [task.id, task.instruction, task.spec, list(task.tags)]
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=list).encode()).hexdigest()


def rollout_rows(tx: Tx, group_ids: Sequence[str]) -> dict[str, list[tuple[Any, Rollout]]]:
    """The rollouts of groups with rollouts of their own, by group, in order, as (row, rollout). Their rewards are those
    of the last attempt."""
    rewards_of: defaultdict[str, list[Reward]] = defaultdict(list)
    current = (
        sa.select(rewards)
        .join(rollouts, rollouts.c.id == rewards.c.rollout_id)
        .where(rollouts.c.group_id.in_(group_ids), rewards.c.attempt == rollouts.c.attempt)
        .order_by(rewards.c.rollout_id, rewards.c.number)
    )
    for row in tx.all(current):
        rewards_of[row.rollout_id].append(reward_of(row))
    by_group: dict[str, list[tuple[Any, Rollout]]] = {group_id: [] for group_id in group_ids}
    members = (
        sa.select(rollouts, groups.c.task_id)
        .join(groups, groups.c.id == rollouts.c.group_id)
        .where(rollouts.c.group_id.in_(group_ids))
        .order_by(rollouts.c.group_id, rollouts.c.position)
    )
    for row in tx.all(members):
        by_group[row.group_id].append((row, rollout_of(row, row.task_id, rewards_of[row.id])))
    return by_group


def load_groups(tx: Tx, group_ids: Sequence[str]) -> list[Group]:
    """The groups in the order of `group_ids`. Unknown ids are left out."""
    if not group_ids:
        return []
    by_id = {row.id: row for row in tx.all(sa.select(groups).where(groups.c.id.in_(group_ids)))}
    owners = {row.id: row.shares or row.id for row in by_id.values()}
    members = rollout_rows(tx, list(dict.fromkeys(owners.values())))
    trains = _trained_policies(tx, {owners[row.id] for row in by_id.values() if row.roles})
    return [
        group_of(by_id[id], [rollout for _, rollout in members[owners[id]]], trains.get(owners[id], {}))
        for id in group_ids
        if id in by_id
    ]


def _trained_policies(tx: Tx, owners: Collection[str]) -> dict[str, dict[str, str]]:
    """The group of each trained policy, by the id of the group that owns the rollouts, which is the first one's.

    Groups whose rollouts no other group shares are left out.
    """
    sharing = sa.select(groups.c.id, groups.c.policy, groups.c.shares).where(groups.c.shares.in_(owners))
    by_owner: defaultdict[str, dict[str, str]] = defaultdict(dict)
    for row in tx.all(sharing.order_by(groups.c.id)) if owners else ():
        by_owner[row.shares][row.policy] = row.id
    own = sa.select(groups.c.id, groups.c.policy).where(groups.c.id.in_(by_owner))
    return {row.id: {row.policy: row.id, **by_owner[row.id]} for row in tx.all(own)} if by_owner else {}


def no_group(tx: Tx, group_id: str) -> NotFound:
    """The error for a group that is not on record: it says whether it was pruned."""
    at = tx.scalar(sa.select(pruned_groups.c.at).where(pruned_groups.c.group_id == group_id))
    text = f"no group {group_id!r}" if at is None else f"group {group_id!r} was pruned on {utc_text(at)}"
    return NotFound(text, param="group_id")


def no_rollout(tx: Tx, rollout_id: str) -> NotFound:
    """The error for a rollout that is not on record: it says if sessions of it are."""
    of_it = tx.first(sa.select(sessions.c.id).where(sessions.c.rollout_id == rollout_id).limit(1))
    more = "" if of_it is None else ": it was pruned with its group, or its session was imported"
    return NotFound(f"no rollout {rollout_id!r}{more}", param="rollout_id")


def load_group(tx: Tx, group_id: str) -> Group:
    loaded = load_groups(tx, [group_id])
    if not loaded:
        raise no_group(tx, group_id)
    return loaded[0]


def load_tasks(tx: Tx, group_ids: Sequence[str]) -> dict[str, Task]:
    """The tasks by group id."""
    statement = (
        sa.select(tasks, groups.c.id.label("group_id"))
        .join(groups, groups.c.task_digest == tasks.c.digest)
        .where(groups.c.id.in_(group_ids))
    )
    return {row.group_id: task_of(row) for row in tx.all(statement)}


def load_for_training(
    tx: Tx, group_ids: Sequence[str]
) -> tuple[list[Group], dict[str, Task], dict[str, tuple[str, ...]]]:
    """The groups; their tasks by group id; and the calls that each rollout had to train when it ended, by its id."""
    statement = sa.select(rollouts.c.id, rollouts.c.trained_calls).join(groups, rollouts.c.group_id == OWNER)
    statement = statement.where(groups.c.id.in_(group_ids))
    trained = {row.id: tuple(row.trained_calls) for row in tx.all(statement)}
    return load_groups(tx, group_ids), load_tasks(tx, group_ids), trained


def locked_group(tx: Tx, rollout_id: str) -> tuple[Any, Any]:
    """The rows of a rollout and its group. The group is locked until the transaction ends."""
    group_id = tx.scalar(sa.select(rollouts.c.group_id).where(rollouts.c.id == rollout_id))
    group = tx.first(sa.select(groups).where(groups.c.id == group_id).with_for_update(key_share=True))
    if group is None:
        raise no_rollout(tx, rollout_id)
    return tx.first(sa.select(rollouts).where(rollouts.c.id == rollout_id)), group
