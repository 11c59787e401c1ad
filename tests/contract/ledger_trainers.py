"""What a state machine of trainers knows: their memories and disks, what they hold, the weights of each version."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from hypothesis.stateful import RuleBasedStateMachine

from rolltap.calllog.database import Database
from rolltap.contract.trainer import BeginUpdate, Lease, Rewind
from rolltap.errors import LedgerError, TrainerFenced
from rolltap.ledger.leases import LeaseKey
from rolltap.types import Group, GroupStatus, Scoring

from ..unit.ledger.world import World

T = TypeVar("T")

NAMES = ("one", "two")
TTL = 60.0
LONG = 600.0


@dataclass(frozen=True)
class Weights:
    """A step, the groups that made it, in order, and the weight version that they are pushed as."""

    step: int = 0
    groups: tuple[str, ...] = ()
    version: int = 0


@dataclass
class Trainer:
    """One trainer's memory and disk. `up` is False between its death and its rewind."""

    name: str
    memory: Weights = Weights()
    durable: Weights = Weights()
    held: list[Lease] = field(default_factory=list)
    acknowledged: list[tuple[Lease, int]] = field(default_factory=list)  # of dead processes too, for late retries
    abandoned: list[Lease] = field(default_factory=list)
    incarnation: int = 0
    up: bool = False


class Runner:
    """A database and the event loop that it lives in."""

    def __init__(self, loop: asyncio.Runner, database: Database) -> None:
        self.loop = loop
        self.database = database

    def __call__(self, work: Coroutine[Any, Any, T]) -> T:
        return self.loop.run(work)


class Trainers(RuleBasedStateMachine):
    """The trainers of one policy on one ledger, and what each does without being chosen by a rule."""

    world: World

    def __init__(self, runner: Runner) -> None:
        super().__init__()
        self.run = runner
        self.trainers = {name: Trainer(name) for name in NAMES}
        self.sizes: dict[str, int] = {}
        self.lines: dict[int, tuple[int, ...]] = {0: ()}  # by version, the updates that made it
        self.line: tuple[int, ...] = ()  # of the weights that the owner goes on with
        self.owner = NAMES[0]
        self.keys: dict[str, LeaseKey] = {}
        self.updates = 0
        self.sampled: dict[str, tuple[int, ...]] = {}

    @property
    def ledger(self) -> Any:
        return self.world.ledger.trainers

    def rewind(self, trainer: Trainer) -> None:
        """From the checkpoint, as the owner; its weights go on under the number that it is told."""
        version = self.claim(trainer)
        self.line = self.lines[trainer.durable.version]
        trainer.durable = replace(trainer.durable, version=version)
        self.push(trainer, version)
        trainer.memory, trainer.up = trainer.durable, True

    def claim(self, trainer: Trainer) -> int:
        rewind = Rewind(trainer.durable.step, {"policy": trainer.durable.version}, "run", take_over=True)
        rewound = self.run(self.ledger.rewind(trainer.name, rewind))
        self.owner, trainer.incarnation = trainer.name, rewound.incarnation
        return rewound.versions["policy"]

    def push(self, trainer: Trainer, version: int, *, fails: bool = False) -> None:
        assert self.lines.setdefault(version, self.line) == self.line, "a number stands for two sets of weights"
        by = BeginUpdate(trainer=trainer.name, incarnation=trainer.incarnation)
        self.run(self.world.ledger.policies.assign_version("policy", version, str(self.line), by))
        other = self.result(self.world.ledger.policies.assign_version("policy", version, "other weights", by))
        assert isinstance(other, LedgerError)
        if not fails:
            self.run(self.world.ledger.policies.set_version("policy", version))

    def fresh(self, lease: Lease, staleness: int, dropped: set[str]) -> None:
        """What is leased is of weights that the pusher goes on from, so many updates behind; what is not, is not."""
        served = self.lines[lease.policy_version]
        newest = len(served) if served == self.line[: len(served)] else len(self.line)

        def usable(version: int) -> bool:
            line = self.lines[version]
            return line == self.line[: len(line)] and newest - len(line) <= staleness

        for group in lease.groups:
            assert all(map(usable, self.sampled[group.group.id])), "a token is stale, or of weights that were given up"
        for id in dropped:
            assert not all(map(usable, range(self.sampled[id][0], self.sampled[id][-1] + 1))), (
                "a fresh group went stale"
            )

    def stale(self) -> set[str]:
        return {group.id for group in self.groups() if group.status is GroupStatus.STALE}

    def whole(self, lease: Lease) -> None:
        for group in lease.groups:
            assert len(group.rollouts) == len(group.group.rollouts) == self.sizes[group.group.id]
            scored = [record for record in group.rollouts if record.rollout.scoring is Scoring.SCORED]
            assert scored
            assert all(record.trajectory.segments for record in scored)

    def result(self, work: Coroutine[Any, Any, T]) -> T | LedgerError:
        """What `work` returns, or why the ledger refuses it."""
        try:
            return self.run(work)
        except LedgerError as error:
            return error

    def is_fenced(self, trainer: Trainer, refused: object) -> None:
        """It is refused because the policy is the other's: it stops."""
        assert isinstance(refused, TrainerFenced)
        assert trainer.name != self.owner
        self.die(trainer)

    def die(self, trainer: Trainer) -> None:
        trainer.abandoned += trainer.held
        trainer.held, trainer.memory, trainer.up = [], trainer.durable, False

    def seen(self, trainer: Trainer) -> int:
        return max((step for _, step in trainer.acknowledged), default=0)

    def groups(self) -> list[Group]:
        return self.run(self.world.groups())
