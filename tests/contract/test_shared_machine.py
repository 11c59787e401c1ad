"""Two trainers of two policies on the same rollouts, against a simple model, over every database.

Each policy's trainer leases, acknowledges, refuses, releases, checkpoints, dies and rewinds at any time, and its zombie
tries what it can. The model holds each policy's groups by itself, as if there were no other policy: the ledger must
agree with it after every step. So nothing is trained twice or lost for a policy, and nothing that one trainer does
changes the other's groups.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from rolltap.contract.admin import NewReward
from rolltap.contract.trainer import Lease, LeaseRequest, Rewind
from rolltap.errors import LedgerError
from rolltap.ids import new_id
from rolltap.ledger.groups import GroupSpec
from rolltap.ledger.leases import LeaseKey
from rolltap.ledger.unit_of_work import LedgerSettings
from rolltap.types import GroupStatus, Scoring, Task

from ..unit.ledger.world import StillClock, World, empty
from .ledger_trainers import Runner

POLICIES = ("a", "b")
ROLES = {"solver": "a", "critic": "b"}
TTL = 60.0

policies = st.sampled_from(POLICIES)
played_by = st.sampled_from([("a",), ("b",), ("a", "b"), ("a", "b")])


@dataclass
class Held:
    """A lease of a trainer's process, and when it ends."""

    lease: Lease
    key: LeaseKey
    ends_at: float

    @property
    def groups(self) -> list[str]:
        return [group.group.id for group in self.lease.groups]


@dataclass
class Trainer:
    """A policy's trainer and what became of the policy's groups, as if there were no other policy."""

    policy: str
    incarnation: int = 0
    step: int = 0
    durable: int = 0
    held: list[Held] = field(default_factory=list)
    dead_processes: list[Held] = field(default_factory=list)
    ready: set[str] = field(default_factory=set)
    empty: set[str] = field(default_factory=set)  # the policy sampled nothing: dropped at the next lease
    acknowledged: dict[str, int] = field(default_factory=dict)  # by group, the step
    ended: dict[str, GroupStatus] = field(default_factory=dict)
    failures: dict[str, int] = field(default_factory=dict)

    @property
    def leased(self) -> set[str]:
        return {group for held in self.held for group in held.groups}

    def give_back(self, held: Held) -> None:
        self.held.remove(held)
        self.ready |= set(held.groups)

    def expected(self) -> dict[str, GroupStatus]:
        return {
            **dict.fromkeys(self.ready | self.empty, GroupStatus.COMPLETE),
            **dict.fromkeys(self.leased, GroupStatus.LEASED),
            **dict.fromkeys(self.acknowledged, GroupStatus.ACKNOWLEDGED),
            **self.ended,
        }


class Machine(RuleBasedStateMachine):
    world: World

    def __init__(self, runner: Runner) -> None:
        super().__init__()
        self.run = runner
        self.trainers = {policy: Trainer(policy) for policy in POLICIES}
        self.rollouts: dict[str, list[tuple[str, tuple[str, ...]]]] = {}  # by group, ids and who played

    @property
    def ledger(self):  # type: ignore[no-untyped-def]
        return self.world.ledger.trainers

    @initialize()
    def begin(self) -> None:
        self.run(empty(self.run.database))
        self.world = World(self.run.database, clock=StillClock())
        for policy in POLICIES:
            self.run(self.world.ledger.policies.register(policy))
            self.start_again(policy)

    @rule(played=st.lists(played_by, min_size=1, max_size=3))
    def rollouts_end(self, played: list[tuple[str, ...]]) -> None:
        spec = GroupSpec("a", len(played), Task(new_id(), "debate"), roles=ROLES, also=("b",))
        group = self.run(self.world.ledger.groups.open(spec))
        for rollout, policies in zip(group.rollouts, played, strict=True):
            began = self.run(self.world.play(rollout, **dict.fromkeys(policies, (0,))))
            self.run(self.world.ledger.rewards.append(NewReward(rollout.id, float(rollout.index))))
            self.run(self.world.finish(began, None))
        by_rollout = [(rollout.id, policies) for rollout, policies in zip(group.rollouts, played, strict=True)]
        for policy, id in group.trains.items():
            self.rollouts[id] = by_rollout
            trainer = self.trainers[policy]
            (trainer.ready if any(policy in policies for policies in played) else trainer.empty).add(id)

    @rule(policy=policies, count=st.integers(1, 3))
    def lease(self, policy: str, count: int) -> None:
        trainer = self.trainers[policy]
        request = LeaseRequest(policy, policy, count, ttl=TTL, incarnation=trainer.incarnation)
        lease = self.run(self.ledger.lease(request))
        trainer.ended |= dict.fromkeys(trainer.empty, GroupStatus.DROPPED)
        trainer.empty.clear()
        assert len(lease.groups) == min(count, len(trainer.ready))
        for leased in lease.groups:
            assert leased.group.id in trainer.ready, "it is leased, trained, or another policy's"
            assert leased.group.policy == policy
            ids = self.rollouts[leased.group.id]
            assert [record.rollout.id for record in leased.rollouts] == [id for id, _ in ids]
            for record, (_, played) in zip(leased.rollouts, ids, strict=True):
                has_loss = any(segment.loss_mask.any() for segment in record.trajectory.segments)
                assert (record.rollout.scoring is Scoring.SCORED) == has_loss == (policy in played)
        if lease.groups:
            key = LeaseKey(lease.id, lease.token, trainer.incarnation)
            trainer.held.append(Held(lease, key, self.world.clock.ahead + TTL))
            trainer.ready -= set(trainer.held[-1].groups)

    @rule(policy=policies, makes_weights=st.booleans())
    def acknowledge(self, policy: str, makes_weights: bool) -> None:
        trainer = self.trainers[policy]
        if not trainer.held:
            return
        for held in list(trainer.held):
            assert self.run(self.ledger.acknowledge(held.key, trainer.step + 1)) == len(held.groups)
            trainer.held.remove(held)
            trainer.acknowledged |= dict.fromkeys(held.groups, trainer.step + 1)
        trainer.step += 1
        if not makes_weights:  # it dies before the update
            self.start_again(policy)

    @rule(policy=policies)
    def refuse(self, policy: str) -> None:
        trainer = self.trainers[policy]
        for held in list(trainer.held):
            dead = self.run(self.ledger.refuse(held.key, "not finite"))
            trainer.give_back(held)
            for group in held.groups:
                trainer.failures[group] = trainer.failures.get(group, 0) + 1
            died = {group for group in held.groups if trainer.failures[group] >= LedgerSettings().max_failures}
            assert dead == len(died)
            trainer.ready -= died
            trainer.ended |= dict.fromkeys(died, GroupStatus.DEAD)

    @rule(policy=policies)
    def release(self, policy: str) -> None:
        trainer = self.trainers[policy]
        for held in list(trainer.held):
            self.run(self.ledger.release(held.key))
            trainer.give_back(held)

    @rule(policy=policies)
    def revive(self, policy: str) -> None:
        trainer = self.trainers[policy]
        for group in [id for id, status in trainer.ended.items() if status is GroupStatus.DEAD]:
            self.run(self.world.ledger.groups.revive(group))
            del trainer.ended[group], trainer.failures[group]
            trainer.ready.add(group)

    @rule(policy=policies)
    def checkpoint(self, policy: str) -> None:
        self.trainers[policy].durable = self.trainers[policy].step

    @rule(policy=policies)
    def start_again(self, policy: str) -> None:
        """Killed at any time; its next process rewinds to the last checkpoint."""
        trainer = self.trainers[policy]
        trainer.dead_processes += trainer.held
        back = {group for group, step in trainer.acknowledged.items() if step > trainer.durable}
        rewound = self.run(self.ledger.rewind(policy, Rewind(trainer.durable, {policy: 0}, policy)))
        assert (rewound.acknowledged, rewound.leased) == (len(back), len(trainer.leased))
        for held in list(trainer.held):
            trainer.give_back(held)
        trainer.acknowledged = {group: step for group, step in trainer.acknowledged.items() if group not in back}
        trainer.ready |= back
        trainer.step, trainer.incarnation = trainer.durable, rewound.incarnation

    @rule(policy=policies, other=policies, as_new=st.booleans())
    def a_zombie_tries(self, policy: str, other: str, as_new: bool) -> None:
        """With its old incarnation, the current one, or the other trainer's."""
        for held in self.trainers[policy].dead_processes:
            incarnation = self.trainers[other].incarnation if as_new else held.key.incarnation
            key = LeaseKey(held.key.id, held.key.token, incarnation)
            for attempt in (self.ledger.acknowledge(key, 9), self.ledger.refuse(key, "no"), self.ledger.release(key)):
                with pytest.raises(LedgerError):
                    self.run(attempt)

    @rule(policy=policies)
    def a_trainer_asks_for_the_others_policy(self, policy: str) -> None:
        other = POLICIES[1 - POLICIES.index(policy)]
        request = LeaseRequest(policy, other, 3, ttl=TTL, incarnation=self.trainers[policy].incarnation)
        with pytest.raises(LedgerError):
            self.run(self.ledger.lease(request))

    @rule(seconds=st.sampled_from([TTL / 2, TTL + 1]))
    def time_passes(self, seconds: float) -> None:
        self.world.clock.ahead += seconds
        self.run(self.world.ledger.sweep())
        for trainer in self.trainers.values():
            for held in [one for one in trainer.held if one.ends_at <= self.world.clock.ahead]:
                trainer.give_back(held)
                trainer.dead_processes.append(held)

    @invariant()
    def the_ledger_agrees_with_the_model(self) -> None:
        if not hasattr(self, "world"):
            return
        known = self.run(self.world.groups())
        for policy, trainer in self.trainers.items():
            assert {one.id: one.status for one in known if one.policy == policy} == trainer.expected()
        assert sum(len(one.rollouts) for one in known) == 2 * len({r.id for one in known for r in one.rollouts})

    @invariant()
    def the_kept_counts_are_right(self) -> None:
        if hasattr(self, "world"):
            self.run(self.world.check_counts())

    def teardown(self) -> None:
        """Both come back and train what there is: nothing is left over."""
        if not hasattr(self, "world"):
            return
        for policy, trainer in self.trainers.items():
            self.start_again(policy)
            while trainer.ready or trainer.empty:
                self.lease(policy, 3)
                self.acknowledge(policy, makes_weights=True)
        self.the_ledger_agrees_with_the_model()


@pytest.mark.parametrize(
    "examples",
    [
        pytest.param(5, marks=pytest.mark.timeout(300)),
        pytest.param(200, marks=[pytest.mark.long, pytest.mark.timeout(3600)]),
    ],
)
def test_two_trainers_of_the_same_rollouts_never_touch_each_other(runner: Runner, examples: int) -> None:
    run_state_machine_as_test(
        lambda: Machine(runner),  # type: ignore[arg-type]
        settings=settings(
            max_examples=examples, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
        ),
    )
