"""`rolltap run --harbor`: groups of Harbor's trials, run here."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rolltap.cli.client import PlaneClient
from rolltap.cli.common import refuse_relayed
from rolltap.cli.screen import Screen
from rolltap.cli.tasks import bars, groups_table, only, policy_or_roles, print_failures
from rolltap.errors import TaskInvalid
from rolltap.harnesses.attempts import Slots, Stage
from rolltap.harnesses.client import AdminClient
from rolltap.harnesses.harbor import check_installed
from rolltap.harnesses.runner import run_groups
from rolltap.wording import counted

console = Screen(highlight=False)
JOBS = Path("jobs")
"""Where Harbor, too, puts its trials, below this folder."""


@dataclass(frozen=True, slots=True)
class TrialOrder:
    """What `rolltap run --harbor` is to do."""

    target: str
    agent: str
    n: int
    slots: int
    policy: str
    dialect: str
    runtime: str
    reward_key: str


def check_alone(agent: str, others: Sequence[str]) -> None:
    """`TaskInvalid` for options that Harbor's trials do not take, and without an agent."""
    if others or not agent:
        raise TaskInvalid(
            f"--harbor can't be with {others[0]}" if others else "--harbor needs one of its agents: -a NAME"
        )


async def run_harbor(plane: PlaneClient, order: TrialOrder) -> bool:
    """Runs the trials with a progress bar, and prints the groups; True if a rollout did not succeed."""
    check_installed()
    os.environ.setdefault(
        "LITELLM_LOCAL_MODEL_COST_MAP", "True"
    )  # else LiteLLM, which Harbor imports, asks the network
    from rolltap.harnesses.harbor.runner import Grader, HarborRunner, Player, work_on

    jobs = JOBS / time.strftime("%Y-%m-%d__%H-%M-%S")  # as Harbor names a job
    player = Player(order.agent, order.dialect)
    works = await work_on(order.target, player, Grader(order.reward_key), runtime=order.runtime, jobs=jobs)
    async with AdminClient(plane.url, plane.key) as client:
        served = (await client.get("/policies"))["policies"]
        names = [policy["name"] for policy in served]
        policy = policy_or_roles(order.policy) or only(names)
        refuse_relayed(served, [policy] if isinstance(policy, str) else list(policy.values()))
        summary = f"{counted(len(works), 'task')}, {counted(order.n, 'trial')} each · {order.agent} · {policy}"
        console.print(f"{summary} · {jobs}")
        started = time.monotonic()
        with bars() as shown:
            bar = shown.add_task("trials", total=len(works) * order.n, waits="")
            runner = HarborRunner(
                client,
                Slots(run=order.slots),
                progress=lambda step: shown.advance(bar) if step.stage is Stage.ENDED else None,
            )
            done = await run_groups(runner, works, policy=policy, n=order.n)
        groups = await asyncio.gather(*(client.get(f"/groups/{group.group_id}") for group in done))
    console.print(groups_table(groups))
    failed = print_failures(groups)
    count = sum(len(group["rollouts"]) for group in groups)
    console.print(f"{counted(count, 'rollout')} in {time.monotonic() - started:.1f} s, {failed} not succeeded")
    return bool(failed)
