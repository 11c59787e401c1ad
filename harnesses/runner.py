"""Runs whole groups: opens them in the ledger while there is room, and runs every rollout to its end."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, replace

from rolltap.contract.admin import PolicyOrRoles
from rolltap.errors import RateLimited
from rolltap.harnesses.attempts import AttemptRunner, RolloutSummary, RolloutWork, W
from rolltap.harnesses.client import AdminClient, ClaimedRollout, OpenedGroup

BACKPRESSURE_WAIT_S = 1.0
"""Seconds to wait if the ledger limits the rate without a `retry_after`."""


@dataclass(frozen=True, slots=True)
class GroupSummary:
    group_id: str
    task_id: str
    rollouts: tuple[RolloutSummary, ...]

    @property
    def rewards(self) -> tuple[float, ...]:
        """The rewards of the rollouts that have one, in order."""
        return tuple(rollout.reward for rollout in self.rollouts if rollout.reward is not None)


async def run_groups(
    runner: AttemptRunner[W],
    assignments: Iterable[W],
    *,
    policy: PolicyOrRoles,
    n: int,
    tags: tuple[str, ...] = (),
) -> list[GroupSummary]:
    """Opens a group of `n` rollouts for each assignment and runs it. Returns the summaries in the assignments' order.

    `assignments` is read while there is room, so it may be a generator that runs until the training ends. While the
    ledger reports too many outstanding groups, no more are opened. Cancelling this call ends every running rollout as
    cancelled.
    """
    room = asyncio.Semaphore(max(2, -(-2 * runner.at_once // n)))
    running: list[asyncio.Task[GroupSummary]] = []
    try:
        async with asyncio.TaskGroup() as tasks:
            feed = iter(assignments)
            while True:
                await room.acquire()
                assignment = next(feed, None)
                if assignment is None:
                    break
                group = await _open(runner.client, assignment, policy=policy, n=n, tags=tags)
                task = tasks.create_task(_run_group(runner, group, assignment))
                task.add_done_callback(lambda _: room.release())
                running.append(task)
    except ExceptionGroup as errors:
        raise first_of(errors) from None
    finally:
        await asyncio.shield(runner.settle())
    return [task.result() for task in running]


def first_of(errors: ExceptionGroup) -> Exception:
    """The first error that is not a group itself."""
    first = errors.exceptions[0]
    return first_of(first) if isinstance(first, ExceptionGroup) else first


async def _open(
    client: AdminClient, assignment: RolloutWork, *, policy: PolicyOrRoles, n: int, tags: tuple[str, ...]
) -> OpenedGroup:
    """Opens a group of the assignment's task, with the harness in its spec. Waits while the ledger limits the rate."""
    spec = {"harness": assignment.harness.name, **assignment.task.spec}
    task = replace(assignment.task, spec=spec)
    while True:
        try:
            return await client.open_group(task, policy=policy, n=n, tags=tags)
        except RateLimited as error:
            await asyncio.sleep(error.retry_after or BACKPRESSURE_WAIT_S)


async def _run_group(runner: AttemptRunner[W], group: OpenedGroup, assignment: W) -> GroupSummary:
    async with asyncio.TaskGroup() as tasks:
        rollouts = [tasks.create_task(runner.run(ClaimedRollout(rollout), assignment)) for rollout in group.rollout_ids]
    return GroupSummary(group.id, assignment.task.id, tuple(task.result() for task in rollouts))
