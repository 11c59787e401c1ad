"""Trainers that die, lag and come back, on clocks that jump, over every database.

The machine holds what each trainer's weights were made of, in memory and in its last durable checkpoint, and drives the
ledger by the rules of `rolltap.ledger.leases`. Whatever happens: no group is in the weights twice, none that is
acknowledged is missing from them, none comes in parts, none with a token of weights that were given up counts as fresh,
and in the end every group has been trained, died or gone stale. Of two trainers one owns the policy; the other may take
it over, and what is then a zombie is refused, whatever it tries.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, rule, run_state_machine_as_test

from rolltap.contract.trainer import BeginUpdate, LeaseRequest, Replay, Rewind
from rolltap.errors import LeaseLost, LedgerError, TrainerFenced
from rolltap.ledger.leases import LeaseKey
from rolltap.ledger.unit_of_work import LedgerSettings
from rolltap.types import Cause, GroupStatus, Rollout, RolloutStatus

from ..unit.ledger.world import StillClock, World, empty
from .ledger_trainers import LONG, NAMES, TTL, Runner, Trainers

trainers = st.sampled_from(NAMES)


class Machine(Trainers):
    @initialize()
    def begin(self) -> None:
        self.run(empty(self.run.database))
        self.world = World(self.run.database, clock=StillClock())
        self.run(self.world.ledger.policies.register("policy"))
        self.rewind(self.trainers[self.owner])

    @rule(n=st.integers(1, 3), behind=st.integers(0, 3), ahead=st.integers(0, 1))
    def a_group_is_complete(self, n: int, behind: int, ahead: int = 0) -> None:
        """Sampled from what was served some pushes ago, or while it changed."""
        given = sorted(self.lines)
        first = max(0, len(given) - 1 - behind)
        versions = tuple(given[first : first + 1 + ahead])
        group = self.run(self.world.complete(n, *versions))
        self.sizes[group.id], self.sampled[group.id] = n, versions

    @rule(n=st.integers(1, 3), failures=st.integers(1, LedgerSettings().infra_retries + 1))
    def a_rollout_fails_for_the_infrastructure(self, n: int, failures: int) -> None:
        """Its siblings stay; it comes back until the ledger has had enough, and each time a zombie tries its luck."""
        group = self.run(self.world.open(n))
        version = max(self.lines)
        siblings = [self.run(self.ended(rollout, version)) for rollout in group.rollouts[1:]]
        rollout = group.rollouts[0]
        for failure in range(1, failures + 1):
            began = self.run(self.world.start(rollout, version))
            rollout = self.run(self.world.finish(began, None, status=RolloutStatus.FAILED, cause=Cause.INFRASTRUCTURE))
            last = failure > LedgerSettings().infra_retries
            assert rollout.status is (RolloutStatus.FAILED if last else RolloutStatus.PENDING)
            late = self.result(self.world.finish(began, 9.0))
            assert isinstance(late, LedgerError), "a zombie's result was taken"
            assert began.attempt == failure
        if failures <= LedgerSettings().infra_retries:
            assert self.run(self.world.ledger.groups.get(group.id)).status is GroupStatus.OPEN
            self.run(self.ended(rollout, version))
        ended = self.run(self.world.ledger.groups.get(group.id))
        assert list(ended.rollouts[1:]) == siblings
        # One that has failed for good may still be judged, and is not trained; of the others no zombie's reward counts.
        succeeded = [rollout for rollout in ended.rollouts if rollout.status is RolloutStatus.SUCCEEDED]
        assert all(reward.value == 1.0 for rollout in succeeded for reward in rollout.rewards)
        trained = failures <= LedgerSettings().infra_retries or n > 1
        assert ended.status is (GroupStatus.COMPLETE if trained else GroupStatus.DROPPED)
        self.sizes[group.id], self.sampled[group.id] = n, (version,)

    async def ended(self, rollout: Rollout, version: int) -> Rollout:
        return await self.world.finish(await self.world.start(rollout, version))

    @rule(name=trainers, groups=st.integers(1, 3), staleness=st.sampled_from([None, 0, 1]))
    def lease(self, name: str, groups: int, staleness: int | None) -> None:
        trainer = self.trainers[name]
        if trainer.up:
            options: dict[str, Any] = {"max_staleness": staleness, "ttl": TTL, "batch": 100}
            stale = self.stale()
            request = LeaseRequest(name, "policy", groups, incarnation=trainer.incarnation, **options)
            lease = self.result(self.ledger.lease(request))
            if isinstance(lease, LedgerError):
                self.is_fenced(trainer, lease)
                return
            self.whole(lease)
            self.keys[lease.id] = LeaseKey(lease.id, lease.token, trainer.incarnation)
            if staleness is not None:
                self.fresh(lease, staleness, self.stale() - stale)
            if lease.groups:
                trainer.held.append(lease)

    @rule(name=trainers, n=st.integers(1, 2))
    def a_group_is_complete_and_leased(self, name: str, n: int) -> None:
        self.a_group_is_complete(n, 0)
        self.lease(name, 2, None)

    @rule(name=trainers)
    def train_and_start_again(self, name: str) -> None:
        """Dies with its update in memory only."""
        self.train(name, dies=False)
        self.start_again(name)

    @rule(names=st.permutations(NAMES))
    def a_slow_trainer_is_overtaken(self, names: list[str]) -> None:
        """Its leases run out, another one takes over and trains the groups first."""
        self.world.clock.ahead += TTL + 1
        self.start_again(names[1])
        self.lease(names[1], 3, None)
        self.train(names[1], dies=False)
        self.train(names[0], dies=False)

    @rule(name=trainers)
    def look_again_at_what_was_trained(self, name: str) -> None:
        """Replay is another thing than training: it changes nothing here."""
        trainer = self.trainers[name]
        if trainer.up:
            request = LeaseRequest(name, "policy", 2, ttl=TTL, replay=Replay(), incarnation=trainer.incarnation)
            replay = self.result(self.ledger.lease(request))
            if isinstance(replay, LedgerError):
                self.is_fenced(trainer, replay)
                return
            self.whole(replay)
            if replay.groups:
                key = LeaseKey(replay.id, replay.token, trainer.incarnation)
                self.run(self.ledger.acknowledge(key, trainer.memory.step))

    @rule(name=trainers, dies=st.booleans())
    def train(self, name: str, dies: bool) -> None:
        """Acknowledges, then applies; or dies between the two."""
        trainer = self.trainers[name]
        if not trainer.up or not trainer.held:
            return
        step, kept = trainer.memory.step + 1, []
        for lease in trainer.held:
            count = self.result(self.ledger.acknowledge(self.keys[lease.id], step))
            if isinstance(count, TrainerFenced):
                self.is_fenced(trainer, count)
                return
            if isinstance(count, LeaseLost):
                trainer.abandoned.append(lease)
                continue
            assert count == len(lease.groups)
            trainer.acknowledged.append((lease, step))
            kept.append(lease)
        trainer.held = []
        if dies:
            self.die(trainer)
        elif kept:
            trained = tuple(group.group.id for lease in kept for group in lease.groups)
            trainer.memory = replace(trainer.memory, step=step, groups=trainer.memory.groups + trained)

    @rule(name=trainers)
    def checkpoint(self, name: str) -> None:
        trainer = self.trainers[name]
        if trainer.up:
            trainer.durable = trainer.memory

    @rule(name=trainers)
    def die_at_any_time(self, name: str) -> None:
        if self.trainers[name].up:
            self.die(self.trainers[name])

    @rule(name=trainers)
    def start_again(self, name: str) -> None:
        """From the checkpoint. A trainer that is up does so too: its supervisor may replace it."""
        trainer = self.trainers[name]
        if trainer.up:
            self.die(trainer)
        self.rewind(trainer)

    @rule(name=trainers)
    def it_dies_before_it_restored_the_engines(self, name: str) -> None:
        pusher = self.trainers[name]
        self.start_again(name)
        self.updates += 1
        self.line = (*self.line, self.updates)
        self.push(pusher, pusher.durable.version + 1)
        self.die(pusher)
        self.claim(pusher)
        self.line = self.lines[pusher.durable.version]

    @rule(name=trainers)
    def an_intruder_is_refused(self, name: str) -> None:
        """Who is not the owner changes nothing without being told to take over; nor does another run of the name."""
        trainer = self.trainers[name]
        run = "another run" if name == self.owner else "run"
        rewind = Rewind(trainer.durable.step, {"policy": trainer.durable.version}, run)
        assert isinstance(self.result(self.ledger.rewind(name, rewind)), TrainerFenced)

    @rule()
    def a_zombie_of_the_owner_goes_on(self) -> None:
        """An incarnation that was replaced: paused, or forgotten."""
        older = self.trainers[self.owner].incarnation - 1
        request = LeaseRequest(self.owner, "policy", 3, ttl=TTL, incarnation=older)
        assert isinstance(self.result(self.ledger.lease(request)), TrainerFenced)
        by = BeginUpdate(trainer=self.owner, incarnation=older)
        pushed = self.result(self.world.ledger.policies.assign_version("policy", max(self.lines) + 1, "other", by))
        assert isinstance(pushed, TrainerFenced)

    @rule(name=trainers, step=st.integers(1, 9))
    def a_dead_process_acknowledges_late(self, name: str, step: int) -> None:
        """A packet that was on its way: before the rewind it may still count, after it never."""
        trainer = self.trainers[name]
        for lease in trainer.abandoned:
            late = max(step, self.seen(trainer))
            if isinstance(self.result(self.ledger.acknowledge(self.keys[lease.id], late)), LedgerError):
                continue
            assert not trainer.up
            trainer.acknowledged.append((lease, late))

    @rule(name=trainers)
    def an_acknowledgement_is_repeated(self, name: str) -> None:
        """The reply was lost, the request is sent again: the same, or refused where it was taken back."""
        for lease, step in self.trainers[name].acknowledged:
            found = self.result(self.ledger.acknowledge(self.keys[lease.id], step))
            assert found == len(lease.groups) or isinstance(found, TrainerFenced)

    @rule(name=trainers, refuse=st.booleans())
    def give_back(self, name: str, refuse: bool) -> None:
        trainer = self.trainers[name]
        for lease in trainer.held:
            if refuse:
                self.result(self.ledger.refuse(self.keys[lease.id], "not finite"))
            else:
                self.result(self.ledger.release(self.keys[lease.id]))
        trainer.abandoned += trainer.held
        trainer.held = []

    @rule(name=trainers)
    def extend(self, name: str) -> None:
        for lease in self.trainers[name].held:
            found = self.result(self.ledger.extend(self.keys[lease.id], TTL))
            assert found == TTL or "expired" in str(found) or isinstance(found, TrainerFenced)

    @rule(seconds=st.sampled_from([-LONG, -1.0, TTL / 2, TTL + 1, LONG]))
    def the_clock_jumps(self, seconds: float) -> None:
        self.world.clock.ahead += seconds

    @rule()
    def the_server_sweeps(self) -> None:
        self.run(self.world.ledger.sweep())

    @rule()
    def the_server_starts_again(self) -> None:
        """The ledger's process holds nothing: another one on the same rows goes on."""
        again = World(self.run.database, clock=self.world.clock)
        again.versions = self.world.versions
        self.world = again

    @rule(name=trainers, fails=st.booleans(), checkpoint=st.booleans())
    def weights_are_pushed(self, name: str, fails: bool, checkpoint: bool) -> None:
        """A push that fails may have reached some engines, which have sampled from the new weights."""
        pusher = self.trainers[name]
        if not pusher.up:
            return
        version = pusher.memory.version + 1
        if name != self.owner:
            by = BeginUpdate(trainer=name, incarnation=pusher.incarnation)
            refused = self.result(self.world.ledger.policies.assign_version("policy", version, "other", by))
            self.is_fenced(pusher, refused)
            return
        self.updates += 1
        self.line = (*self.line, self.updates)
        self.push(pusher, version, fails=fails)
        pusher.memory = replace(pusher.memory, version=version)
        if checkpoint:
            pusher.durable = pusher.memory

    @invariant()
    def nothing_is_trained_twice_or_lost(self) -> None:
        if not hasattr(self, "world"):
            return
        inside = Counter(group for trainer in self.trainers.values() for group in trainer.memory.groups)
        assert not [group for group, times in inside.items() if times > 1]
        known = {group.id: group for group in self.groups()}
        promised = {id for id, group in known.items() if group.status is GroupStatus.ACKNOWLEDGED}
        assert set(inside) <= promised, "a group in the weights can be leased again"
        undecided = {
            group.group.id
            for trainer in self.trainers.values()
            if not trainer.up
            for lease, _ in trainer.acknowledged
            for group in lease.groups
        }
        assert promised - set(inside) <= undecided, "an acknowledged group is in nobody's weights"
        assert all(len(group.rollouts) == self.sizes[id] for id, group in known.items())

    @invariant()
    def the_kept_counts_are_right(self) -> None:
        if hasattr(self, "world"):
            self.run(self.world.check_counts())

    def teardown(self) -> None:
        """Everybody comes back and trains what there is: nothing is left over."""
        if not hasattr(self, "world"):
            return
        for trainer in self.trainers.values():
            self.die(trainer)
            self.rewind(trainer)
        last = self.trainers[self.owner]
        self.lease(last.name, 3, None)
        while last.held:
            self.train(last.name, dies=False)
            self.lease(last.name, 3, None)
        self.nothing_is_trained_twice_or_lost()
        inside = {group for trainer in self.trainers.values() for group in trainer.memory.groups}
        left = {group.status for group in self.groups() if group.id not in inside}
        assert left <= {GroupStatus.DEAD, GroupStatus.STALE, GroupStatus.DROPPED}


@pytest.mark.parametrize(
    "examples",
    [
        pytest.param(5, marks=pytest.mark.timeout(300)),
        pytest.param(200, marks=[pytest.mark.long, pytest.mark.timeout(3600)]),
    ],
)
def test_nothing_is_trained_twice_lost_or_split(runner: Runner, examples: int) -> None:
    """On Postgres, where examples are long, two hundred take 100 CPU seconds."""
    run_state_machine_as_test(
        lambda: Machine(runner),  # type: ignore[arg-type]
        settings=settings(
            max_examples=examples, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
        ),
    )
