"""Who uses the deployment of a soak: agents that converse through a harness's retries, tasks for a node, a trainer.

Both use nginx only. An agent asks again as SDKs do (2 marked retries, `Retry-After`), then as harnesses do. The trainer
is `AsyncTrainerClient`; it pushes weights, and begins anew from its last checkpoint when it was killed.
"""

from __future__ import annotations

import asyncio
import logging
import random
import sys
import time
import uuid
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from rolltap.contract.admin import FinishRollout, NewReward, SubmitTasks
from rolltap.contract.trainer import Lease, LeaseOptions
from rolltap.errors import LeaseLost, RateLimited, RolltapError
from rolltap.harnesses.client import AdminClient, ClaimedRollout
from rolltap.trainer_client.lease.client import AsyncTrainerClient
from rolltap.types import RolloutStatus, Scoring, Task

from ..faults.clients import Clients, Messages, Reply, turn
from .world import World

log = logging.getLogger("rolltap.soak")

POLICY = "tiny"
PATIENCE_S = 120.0
SDK_RETRIES, HARNESS_RETRIES = 2, 8
LONGEST_PAUSE_S = 8.0
WORDS = ("a", "soak", "asks", "for", "many", "words", "that", "no", "two", "calls", "have", "in", "common")
CHECKPOINT_EVERY = 3
ROLLOUTS = 2
"""Of a group."""


@dataclass(eq=False)
class Agents:
    """`count` agents, each with one conversation after another until `stop` is set."""

    world: World
    count: int
    stop: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self) -> None:
        async with (
            AdminClient(self.world.deployment.urls["admin"], self.world.secrets["admin"], patience=PATIENCE_S) as admin,
            asyncio.TaskGroup() as group,
        ):
            for number in range(self.count):
                group.create_task(self._agent(admin, random.Random(f"{self.world.rng.random()} {number}")))

    async def _agent(self, admin: AdminClient, rng: random.Random) -> None:
        await asyncio.sleep(rng.uniform(0, 2))
        while not self.stop.is_set():
            try:
                await self._group(admin, rng)
            except RateLimited:
                await asyncio.sleep(1)
            except RolltapError as error:
                self.world.totals["conversations that our client gave up"] += 1
                self.world.violated(f"our client gave up: {error}")

    async def _group(self, admin: AdminClient, rng: random.Random) -> None:
        """A group of two rollouts with different rewards, one after the other."""
        group_id = f"soak-{uuid.uuid4().hex}"
        group = await admin.open_group(Task("soak", "converse"), policy=POLICY, n=ROLLOUTS, group_id=group_id)
        self.world.told.groups[group.id] = ROLLOUTS
        for number, rollout_id in enumerate(group.rollout_ids):
            await self._rollout(admin, rollout_id, float(number), rng)

    async def _rollout(self, admin: AdminClient, rollout_id: str, value: float, rng: random.Random) -> None:
        world = self.world
        opened = await admin.start_rollout(ClaimedRollout(rollout_id), ttl=600)
        world.told.sessions.append(opened.session_id)
        world.totals["conversations"] += 1
        whole = await self._converse(opened.session_id, opened.endpoint.key, rng)
        status = RolloutStatus.SUCCEEDED if whole else RolloutStatus.FAILED
        if whole:
            reward_id = f"reward-{rollout_id}-{opened.attempt}"
            await admin.reward(NewReward(rollout_id, value, attempt=opened.attempt, id=reward_id))
            world.told.rewards.append(reward_id)
        ended = await admin.finish_rollout(rollout_id, FinishRollout(status, opened.attempt))
        if ended.status.terminal:
            world.told.finished[rollout_id] = ended.status

    async def _converse(self, session_id: str, key: str, rng: random.Random) -> bool:
        """Whether every turn was answered."""
        messages: Messages = []
        clients = self.world.clients()
        for number in range(rng.randint(3, 8)):
            said = " ".join(rng.choice(WORDS) for _ in range(rng.randint(5, 25)))
            answer = " ".join(rng.choice(WORDS) for _ in range(rng.randint(3, 15)))
            text = f"{number} {rng.random()} {said}"
            fields = {"say": f"{rng.random()} {answer}", "delay_s": rng.uniform(0, 0.4), "token_delay_s": 0.005}
            messages.append(turn(text, **fields))
            reply = await self._ask(clients, session_id, key, messages, rng)
            if reply is None:
                return False
            self.world.calls_of.setdefault(session_id, []).append(reply.call_id)
            messages.append({"role": "assistant", "content": reply.text})
            await asyncio.sleep(rng.uniform(0.2, 1.5))  # its tools
        return True

    async def _ask(
        self, clients: Clients, session_id: str, key: str, messages: Messages, rng: random.Random
    ) -> Reply | None:
        """The reply, however often it had to be asked for; None if the harness gave up."""
        begun_in = self.world.phases_at(time.time())
        felt = Counter[str](calls=1)
        reply = await self._ask_patiently(clients, session_id, key, messages, rng, felt)
        for phase in begun_in:
            phase.felt.update(felt)
        return reply

    async def _ask_patiently(
        self, clients: Clients, session_id: str, key: str, messages: Messages, rng: random.Random, felt: Counter[str]
    ) -> Reply | None:
        for attempt in range(1 + SDK_RETRIES + HARNESS_RETRIES):
            marked = {"x-stainless-retry-count": str(attempt)} if attempt <= SDK_RETRIES else {}
            stream = rng.random() < 0.85
            reply = await clients.ask(key, messages, headers=marked, stream=stream)
            if reply.ended:
                return reply
            if attempt == 0:
                felt["failed a try"] += 1
            elif attempt == SDK_RETRIES:
                felt["beyond an SDK's retries"] += 1
            felt[f"status {reply.status or 'none'}"] += 1
            if reply.status in (400, 401, 404, 409, 410):
                self.world.violated(f"session {session_id}: {reply.status} {reply.body[:200]!r}")
                break
            asked = reply.headers.get("retry-after", "")
            pause = float(asked) if asked.replace(".", "").isdigit() else min(LONGEST_PAUSE_S, 0.5 * 2**attempt)
            await asyncio.sleep(min(pause, LONGEST_PAUSE_S) * rng.uniform(0.75, 1))
        felt["given up"] += 1
        return None


@dataclass(eq=False)
class Submitter:
    """Keeps a few tasks in the queue for the node until `stop` is set; its agent is `agent.py`."""

    world: World
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    submitted: list[str] = field(default_factory=list)

    async def run(self) -> None:
        spec = {
            "harness": "command",
            "argv": [sys.executable, str(Path(__file__).with_name("agent.py"))],
            "evaluator": {"kind": "session_completed"},
            "limits": {"agent_s": 240},
        }
        urls, secrets = self.world.deployment.urls, self.world.secrets
        async with AdminClient(urls["admin"], secrets["admin"], patience=PATIENCE_S) as admin:
            while not self.stop.is_set():
                name = f"tasks-{len(self.submitted)}"
                try:
                    await admin.submit(SubmitTasks(POLICY, ROLLOUTS, [Task(name, "converse", spec)], id=name))
                    self.submitted.append(name)
                    while not self.stop.is_set() and not await self.is_over(admin, name):  # noqa: ASYNC110  polled
                        await asyncio.sleep(1)
                except RolltapError as error:
                    self.world.violated(f"the queue's client gave up: {error}")
                    await asyncio.sleep(5)

    async def is_over(self, admin: AdminClient, name: str) -> bool:
        rollouts = (await admin.get(f"/tasks/{name}"))["rollouts"]
        return sum(count for status, count in rollouts.items() if RolloutStatus(status).terminal) == ROLLOUTS

    async def finish(self, within: float) -> None:
        """The node comes to the end of all that was submitted: rollouts under which it died too often are lost."""
        urls, secrets = self.world.deployment.urls, self.world.secrets
        deadline = time.monotonic() + within
        async with AdminClient(urls["admin"], secrets["admin"], patience=PATIENCE_S) as admin:
            for name in self.submitted:
                while not await self.is_over(admin, name):
                    if time.monotonic() > deadline:
                        self.world.violations.append(f"the node did not end {name} within {within:g} s")
                        return
                    await asyncio.sleep(1)
                for status, count in (await admin.get(f"/tasks/{name}"))["rollouts"].items():
                    self.world.totals[f"of the node {status}"] += count


@dataclass(eq=False)
class Trainer:
    """Takes leases, acknowledges them, pushes weights; `kill` ends it as SIGKILL would, `start` begins anew."""

    world: World
    step: int = 0
    version: int = 0
    pushed: int = 0  # the version that the policy serves
    checkpoint: tuple[int, int] = (0, 0)  # step and version
    done: list[tuple[int, str, str, tuple[str, ...]]] = field(default_factory=list)  # step, group, lease, trained calls
    run: str = field(default_factory=lambda: uuid.uuid4().hex)
    unsure: set[str] = field(default_factory=set)  # groups whose acknowledgement was under way when it was killed
    _task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run())

    async def kill(self) -> None:
        assert self._task is not None
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def settle(self, within: float) -> None:
        """Goes on until nothing is ready for three leases in a row, at most so many seconds."""
        deadline = time.monotonic() + within
        before = -1
        while time.monotonic() < deadline and before != self.step:
            before = self.step
            await asyncio.sleep(4)
        await self.kill()

    async def _run(self) -> None:
        try:
            await self._learn()
        except RolltapError as error:
            self.world.violated(f"the trainer ended: {type(error).__name__}: {error}")

    async def _learn(self) -> None:
        url, key = self.world.deployment.urls["trainer"], self.world.secrets["trainer"]
        async with AsyncTrainerClient(url, key, "soak", run=self.run, patience=PATIENCE_S) as client:
            self.step, version = self.checkpoint
            rewound = await client.rewind(self.step, {POLICY: version}, take_over=True)
            self.version = rewound.versions[POLICY]
            self.done = [each for each in self.done if each[0] <= self.step]
            self._tell()
            await self._push(client)
            while True:
                lease = await client.lease(POLICY, groups=4, options=LeaseOptions(wait=1.0, ttl=30.0))
                if lease is not None and lease.groups:
                    await self._train(client, lease)

    async def _train(self, client: AsyncTrainerClient, lease: Lease) -> None:
        told = self.world.told
        told.twice += [leased.group.id for leased in lease.groups if leased.group.id in told.acked]
        self._look_for_missing_calls(lease)
        await asyncio.sleep(self.world.rng.uniform(0.1, 0.5))  # the update
        self.unsure = {leased.group.id for leased in lease.groups}
        try:
            await client.ack(lease, self.step + 1)
        except LeaseLost:
            self.world.totals["leases lost"] += 1
            return
        self.step += 1
        for leased in lease.groups:
            segments = [segment for record in leased.rollouts for segment in record.trajectory.segments]
            trained = tuple(one.call_id for segment in segments for one in segment.turns if one.trained)
            self.done.append((self.step, leased.group.id, lease.id, trained))
        self.unsure = set()
        self._tell()
        self.world.totals["steps"] += 1
        self.version += 1
        await self._push(client)
        if self.step % CHECKPOINT_EVERY == 0:
            self.checkpoint = (self.step, self.version)

    async def _push(self, client: AsyncTrainerClient) -> None:
        await client.begin_update(POLICY)
        await client.push(POLICY, f"/weights/{self.version}", self.version, digest=f"weights-{self.version}")
        await client.finish_update(POLICY)
        self.pushed = self.version

    def _look_for_missing_calls(self, lease: Lease) -> None:
        """Every call that a client saw complete is in its rollout's trajectory, or the rollout says `late`.

        One whose agent gave up is unscorable, and has none.
        """
        for leased in lease.groups:
            for record in (one for one in leased.rollouts if one.rollout.scoring is not Scoring.UNSCORABLE):
                segments = record.trajectory.segments
                there = {one.call_id for segment in segments for one in segment.turns}
                missing = set(self.world.calls_of.get(record.rollout.session_id or "", ())) - there
                if record.rollout.reason.startswith("late"):
                    self.world.totals["rollouts late"] += 1
                elif missing:
                    self.world.violated(f"the lease of group {leased.group.id} lacks {len(missing)} calls")

    def _tell(self) -> None:
        """What is in effect now: after a rewind less than was acknowledged."""
        told = self.world.told
        told.acked = {group: lease for _, group, lease, _ in self.done}
        told.trained = [call for _, _, _, calls in self.done for call in calls]
