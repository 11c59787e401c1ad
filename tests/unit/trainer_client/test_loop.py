"""The loop against a trainer plane over real HTTP: what is trained, acknowledged, checkpointed and pushed, and when."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rolltap.contract.control import RolloutControl
from rolltap.contract.trainer import LeasedGroup, LeaseOptions
from rolltap.errors import CheckpointMismatch, TrainerError, UnknownPolicy
from rolltap.trainer_client.data.scoring import informative, trainable
from rolltap.trainer_client.data.step import view
from rolltap.trainer_client.lease.client import TrainerClient
from rolltap.trainer_client.lease.holder import LeaseHolder, PrintLine
from rolltap.trainer_client.model.ranks import Ranks
from rolltap.trainer_client.model.weights import digest_of_folder
from rolltap.trainer_client.run import loop
from rolltap.trainer_client.run.loop import Trainer
from rolltap.trainer_client.run.sinks import JsonLines
from rolltap.trainer_client.settings import TrainerSettings, load_trainer_settings

from .making import group, random_group, record, segment
from .plane import KEY, Plane


@pytest.fixture
def settings(url: str, model: Path, tmp_path: Path) -> TrainerSettings:
    return made(url, model, tmp_path)


def made(url: str, model: Path, tmp_path: Path, **more: Any) -> TrainerSettings:
    base = {
        "url": url, "key": KEY, "policy": "policy", "model": model, "out": tmp_path / "out", "groups": 2,
        "steps": 2, "optimiser": {"lr": 1e-3}, "compute": {"device": "cpu"},
    }  # fmt: skip
    return load_trainer_settings(**{**base, **more})


def trainer(settings: TrainerSettings, print_line: PrintLine = lambda line: None) -> Trainer:
    client = TrainerClient(settings.url, settings.key, settings.name, patience=2)
    sinks = [JsonLines(settings.out, "project", "run")]
    return Trainer(settings, client, Ranks(0, 1, torch.device("cpu")), sinks, print_line)


def offer(plane: Plane, count: int, start: int = 0) -> None:
    plane.offer(*(random_group(f"g{index}", [1.0, 0.0, 0.5], seed=index) for index in range(start, start + count)))


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one)


def test_every_step_is_acknowledged_checkpointed_and_pushed(plane: Plane, settings: TrainerSettings) -> None:
    offer(plane, 4)
    trainer(settings).run()
    assert plane.acked == {"g0": 1, "g1": 1, "g2": 2, "g3": 2}
    folder = settings.out / "checkpoints" / "step-2"
    assert plane.pushed == [(str(settings.out / "checkpoints" / "step-1"), 1), (str(folder), 2)]
    assert not same(weights(settings.model), weights(folder))
    lines = [json.loads(line) for line in (settings.out / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2]
    assert lines[0]["reward"] == pytest.approx(0.5)
    assert lines[0]["staleness"] == {"0": 2}
    assert lines[1]["staleness"] == {"1": 2}


@pytest.mark.parametrize("every", [1, 2])
def test_weights_may_be_pushed_in_bfloat16_beside_a_checkpoint_in_float32(
    plane: Plane, url: str, model: Path, tmp_path: Path, every: int
) -> None:
    """A resumed run pushes the same bytes again, which stand under their version's digest."""
    offer(plane, 4)
    settings = made(url, model, tmp_path, push={"dtype": "bfloat16"}, checkpoint_every=every)
    trainer(settings).run()
    pushed = settings.out / "weights" / "step-2"
    assert plane.pushed == [(str(settings.out / "weights" / "step-1"), 1), (str(pushed), 2)]
    assert [folder.name for folder in pushed.parent.iterdir()] == ["step-2"]
    kept, served = weights(settings.out / "checkpoints" / "step-2"), weights(pushed)
    assert {one.dtype for one in kept.values()} == {torch.float32}
    assert same({name: one.bfloat16() for name, one in kept.items()}, served)
    digest = digest_of_folder(pushed)
    plane.pushed.clear()
    plane.version = 0  # an engine that was restarted with its first weights
    trainer(settings).run()
    assert plane.pushed == [(str(pushed), 2)]
    assert digest_of_folder(pushed) == digest


def test_a_run_may_push_only_its_adapters(plane: Plane, url: str, model: Path, tmp_path: Path) -> None:
    """Those of step 0 first, which change nothing: until then no engine knows the policy's name."""
    offer(plane, 4)
    adapted = made(url, model, tmp_path, lora={"rank": 4, "push": "adapter"}, checkpoint_every=2)
    trainer(adapted).run()
    folders = [adapted.out / "weights" / f"step-{step}" for step in range(3)]
    assert plane.pushed == [(str(folder), step) for step, folder in enumerate(folders)]
    assert plane.adapters == [True, True, True]
    assert [folder.name for folder in (adapted.out / "weights").iterdir()] == ["step-2"]
    assert (adapted.out / "checkpoints" / "step-2" / "model.safetensors").exists()
    plane.pushed.clear()
    trainer(adapted).run()
    assert plane.pushed == [(str(folders[2]), 2)]


def test_adapters_follow_those_of_a_run_that_made_no_step(plane: Plane, url: str, model: Path, tmp_path: Path) -> None:
    """Its version 0 stands for other ones, by another rank: these are version 1."""
    adapters = {"push": "adapter"}
    offer(plane, 2)
    first = trainer(made(url, model, tmp_path, lora={**adapters, "rank": 4}))
    first._workers.gradient = dying(first._workers.gradient, at=0)  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        first.run()
    other = made(url, model, tmp_path, steps=1, lora={**adapters, "rank": 2}, out=tmp_path / "other")
    trainer(other).run()
    assert [version for _, version in plane.pushed] == [0, 1, 2]


def test_groups_are_acknowledged_before_they_change_the_weights(plane: Plane, settings: TrainerSettings) -> None:
    offer(plane, 2)
    trainer(settings.model_copy(update={"steps": 1})).run()
    names = [name for name in plane.names() if name not in ("extend", "policy")]
    assert names == ["rewind", "leases", "ack", "begin_update", "push", "finish_update"]


def test_a_restarted_trainer_rewinds_to_its_checkpoint_and_goes_on(plane: Plane, url: str, model: Path, tmp_path: Path):
    every_two = made(url, model, tmp_path, steps=3, checkpoint_every=2)
    offer(plane, 6)
    first = trainer(every_two)
    first.checkpoints.save = dying(first.checkpoints.save, at=3)  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        first.run()
    assert plane.acked == {"g0": 1, "g1": 1, "g2": 2, "g3": 2, "g4": 3, "g5": 3}
    second = trainer(every_two)
    assert second.step == 2
    second.run()
    assert plane.acked == {"g0": 1, "g1": 1, "g2": 2, "g3": 2, "g4": 3, "g5": 3}
    assert plane.version == 3


def test_versions_made_after_the_checkpoint_are_not_made_again(plane: Plane, url: str, model: Path, tmp_path: Path):
    """Version 3 was pushed and is lost: what is restored goes on as 4, also for a run that dies once more."""
    every_two = made(url, model, tmp_path, steps=4, checkpoint_every=2)
    offer(plane, 8)
    for lost in (4, 3):
        dies = trainer(every_two)
        dies.checkpoints.save = dying(dies.checkpoints.save, at=4)  # type: ignore[method-assign]
        dies.checkpoints.save_weights = dying(dies.checkpoints.save_weights, at=lost)  # type: ignore[method-assign]
        with pytest.raises(KeyboardInterrupt):
            dies.run()
    trainer(every_two).run()
    assert [(Path(path).name, version) for path, version in plane.pushed] == [
        ("step-1", 1), ("step-2", 2), ("step-3", 3), ("step-2", 4), ("step-3", 5), ("step-4", 6),
    ]  # fmt: skip
    assert set(plane.acked.values()) == {1, 2, 3, 4}
    again = trainer(every_two)
    assert (again.step, again.version) == (4, 6)
    again.run()
    assert plane.version == 6


@pytest.mark.parametrize("every", [1, 2])
def test_a_step_whose_push_was_killed_has_its_line(
    every: int, plane: Plane, url: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its checkpoint was written, so no later run makes it again; one without a checkpoint is made again."""
    run = made(url, model, tmp_path, steps=4, checkpoint_every=every)
    offer(plane, 8)
    for died in (1, 2, 3):
        dies = trainer(run)
        push = partial(_pushes_until, died, dies, dies._push)
        monkeypatch.setattr(dies, "_push", push)
        with pytest.raises(KeyboardInterrupt):
            dies.run()
    trainer(run).run()
    lines = [json.loads(line) for line in (run.out / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert [line["version"] for line in lines] == sorted(line["version"] for line in lines)
    assert "push" in lines[-1]["seconds"]
    assert all(math.isfinite(line["grad_norm"]) for line in lines)


def _pushes_until(step: int, run: Trainer, push: Callable[..., None], *state: Any) -> None:
    if run.step == step:
        raise KeyboardInterrupt
    push(*state)


def dying(save: Any, at: int) -> Any:
    def saves(step: int, *rest: Any) -> Path:
        if step == at:
            raise KeyboardInterrupt
        return save(step, *rest)

    return saves


def test_killed_and_resumed_ends_in_the_same_weights(plane: Plane, url: str, model: Path, tmp_path: Path) -> None:
    straight = made(url, model, tmp_path, steps=3, out=tmp_path / "straight")
    offer(plane, 6)
    trainer(straight).run()
    plane.forget()
    broken = made(url, model, tmp_path, steps=3, out=tmp_path / "broken")
    offer(plane, 6)
    first = trainer(broken)
    first.checkpoints.save = dying(first.checkpoints.save, at=2)  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        first.run()
    trainer(broken).run()
    ends = [weights(out / "checkpoints" / "step-3") for out in (straight.out, broken.out)]
    assert all(torch.allclose(ends[0][name], ends[1][name], atol=1e-6) for name in ends[0])


def test_a_policy_left_paused_by_a_dead_run_goes_on(plane: Plane, url: str, model: Path, tmp_path: Path) -> None:
    offer(plane, 4)
    trainer(made(url, model, tmp_path, steps=1)).run()
    plane.paused = "keep"  # it died after its push, before finish_update
    trainer(made(url, model, tmp_path, steps=2)).run()
    assert plane.paused is None
    assert plane.names().count("finish_update") == 3


def test_a_lost_lease_does_not_reach_the_weights(plane: Plane, url: str, model: Path, tmp_path: Path) -> None:
    plane.lose = {"lease-1"}
    offer(plane, 4)
    lost = made(url, model, tmp_path, steps=1, out=tmp_path / "lost")
    trainer(lost).run()
    assert plane.acked == {"g2": 1, "g3": 1}
    plane.forget()
    offer(plane, 2, start=2)
    alone = made(url, model, tmp_path, steps=1, out=tmp_path / "alone")
    trainer(alone).run()
    assert same(*(weights(out / "checkpoints" / "step-1") for out in (lost.out, alone.out)))


def test_what_is_acknowledged_comes_back_where_no_weights_come_of_it(
    plane: Plane, settings: TrainerSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of two leases is lost, the gradient is made again, and is not finite: the other was acknowledged already."""
    run = trainer(settings)
    run._resume()
    norms = iter([1.0, math.nan])
    monkeypatch.setattr(run._workers, "gradient", lambda index: next(norms))
    options = LeaseOptions(wait=0)
    with LeaseHolder(
        run.client, "policy", options, keep_zero_variance=True, trainable=partial(trainable, vocabulary=1000)
    ) as leases:
        for wanted in (1, 2):
            offer(plane, 1, start=wanted)
            assert leases.gather(wanted, lambda: False)
        plane.lose = {"lease-2"}
        assert run._train(leases) is None
        assert leases.groups == ()
    assert plane.acked == {}
    assert "g1" in {group.group.id for group in plane.ready}
    assert plane.refused == []


NOT_A_NUMBER = """
from dataclasses import dataclass
import numpy as np
from rolltap.trainer_client.recipes.base import Recipe

@dataclass
class Broken(Recipe):
    def credit(self, step):
        found = super().credit(step)
        found.advantages[1][:] = np.nan
        return found
"""


def test_credit_that_is_no_number_ends_the_run_before_anything_is_acknowledged(
    plane: Plane, url: str, model: Path, tmp_path: Path
) -> None:
    file = tmp_path / "broken.py"
    file.write_text(NOT_A_NUMBER)
    offer(plane, 2)
    run = trainer(made(url, model, tmp_path, steps=1, recipe=str(file)))
    with pytest.raises(TrainerError, match=r"recipe '.*broken\.py', step 1: .*rollout g0-r1: .*advantages is nan"):
        run.run()
    assert plane.acked == {}
    assert plane.refused == []
    assert {group.group.id for group in plane.ready} == {"g0", "g1"}


def test_updates_that_are_left_out_are_counted(
    plane: Plane, url: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = made(url, model, tmp_path, steps=1, optimiser={"lr": 1e-3, "minibatches": 3})
    run = trainer(settings)
    gradient = run._workers.gradient
    monkeypatch.setattr(run._workers, "gradient", lambda index: math.inf if index == 1 else gradient(index))
    offer(plane, 2)
    run.run()
    (line,) = [json.loads(line) for line in (settings.out / "metrics.jsonl").read_text().splitlines()]
    assert (line["updates"], line["updates_skipped"]) == (3, 1)


@pytest.mark.parametrize("version", [0, -3])
def test_a_run_whose_engine_computes_another_model_ends_before_it_trains(
    plane: Plane, url: str, model: Path, tmp_path: Path, version: int
) -> None:
    settings = made(url, model, tmp_path)
    assert settings.report.mismatch_stop == 0.5
    one = random_group("far", [1.0, 0.0], seed=1, version=version)
    for rollout in one.rollouts:
        for part in rollout.trajectory.segments:
            part.logprobs[part.loss_mask] -= 4.0
    plane.offer(one, random_group("g1", [1.0, 0.0], seed=2))
    with pytest.raises(
        TrainerError, match=r"step 1: log-probs of engine and trainer differ by .*mismatch_stop is 0\.5"
    ):
        trainer(settings).run()
    assert plane.acked == {}
    assert plane.pushed == []
    assert {group.group.id for group in plane.ready} == {"far", "g1"}


def test_told_to_stop_it_ends_with_a_checkpoint(plane: Plane, url: str, model: Path, tmp_path: Path) -> None:
    run = trainer(made(url, model, tmp_path, steps=50, checkpoint_every=50))
    offer(plane, 2)
    thread = threading.Thread(target=run.run)
    thread.start()
    with plane.changed:
        assert plane.changed.wait_for(lambda: plane.acked, timeout=30)
    run.stopping = True
    offer(plane, 2, start=2)
    thread.join(timeout=30)
    assert not thread.is_alive()
    resumed = trainer(made(url, model, tmp_path))
    assert resumed.step == max(plane.acked.values())


def test_told_to_stop_while_it_waits_it_ends_with_a_checkpoint(
    plane: Plane, url: str, model: Path, tmp_path: Path
) -> None:
    run = trainer(made(url, model, tmp_path, steps=50, checkpoint_every=50))
    offer(plane, 2)
    thread = threading.Thread(target=run.run)
    thread.start()
    with plane.changed:
        assert plane.changed.wait_for(lambda: plane.version == 1 and plane.paused is None, timeout=30)
    run.stopping = True
    thread.join(timeout=30)
    assert not thread.is_alive()
    assert trainer(made(url, model, tmp_path)).step == 1


def test_a_group_that_cannot_be_trained_is_refused_and_the_others_are_trained(
    plane: Plane, settings: TrainerSettings
) -> None:
    plane.offer(random_group("bad", [1.0, float("nan")]), random_group("g0", [1.0, 0.0], seed=1))
    offer(plane, 1, start=1)
    trainer(settings.model_copy(update={"steps": 1})).run()
    assert plane.refused == [("group bad, rollout bad-r1: the reward is nan", ("bad",))]
    assert plane.acked == {"g0": 1, "g1": 1}


def test_even_groups_are_leased_beyond_when_asked(plane: Plane, url: str, model: Path, tmp_path: Path) -> None:
    plane.offer(random_group("even", [1.0, 1.0]), random_group("g0", [1.0, 0.0]))
    offer(plane, 1, start=1)
    trainer(made(url, model, tmp_path, steps=1, loss={"drop_zero_variance": True})).run()
    assert plane.acked == {"even": 1, "g0": 1, "g1": 1}


def masked(name: str) -> LeasedGroup:
    """A group in which no reply carries loss."""
    return group(name, [record(name, index, [segment([1, 2, 3], [])], float(index)) for index in range(2)])


def test_groups_without_loss_make_no_step_and_do_not_come_back(
    plane: Plane, url: str, model: Path, tmp_path: Path
) -> None:
    plane.offer(*(masked(f"m{number}") for number in range(9)))
    offer(plane, 2)
    lines: list[str] = []
    run = trainer(made(url, model, tmp_path, steps=1), lines.append)
    run.run()
    assert (plane.version, plane.pushed[-1][1]) == (1, 1)
    assert plane.acked == {f"m{number}": int(number > 7) for number in range(9)} | {"g0": 1, "g1": 1}
    assert lines == ["no step of 8 groups: no reply in them carries loss"]
    (report,) = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert (report["groups"], report["groups_without_loss"]) == (3, 1)


def test_a_rollout_without_a_token_of_the_policy_is_no_baseline() -> None:
    called = [record("g", index, [segment([1, 2, 3], [2])], 1.0) for index in range(3)]
    silent = record("g", 3, [], 0.0)
    assert [rollout.reward for rollout in view([group("g", [*called, silent])]).rollouts] == [1.0] * 3
    assert not informative(group("g", [*called, silent]))


def test_a_run_in_which_no_model_answers_ends_with_the_reason(
    plane: Plane, settings: TrainerSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "LEASE_WAIT_S", 0.1)
    plane.rollouts, plane.unanswered = {"failed": 50, "succeeded": 50}, 100  # of an earlier run
    lines: list[str] = []
    failing = trainer(settings, lines.append)
    failing._control = RolloutControl(max_turns=1)  # as a recipe sets one
    thread = Ended(failing)
    thread.start()
    with plane.changed:
        assert plane.changed.wait_for(lambda: "leases" in plane.names(), timeout=30)
        plane.rollouts, plane.unanswered, plane.untrained = {"failed": 58, "succeeded": 53, "running": 9}, 106, 2
    thread.join(timeout=30)
    assert lines == [
        "2 groups of policy dropped: no reply in them carries loss",
        "6 rollouts of policy without a model's answer: not trained",
    ]
    assert "no model answered in 6 of the 11 rollouts of policy that ended since this run began" in thread.reason
    assert not plane.pushed
    assert plane.controls == [{}], "its control has ended with it"


class Ended(threading.Thread):
    """A run, and the error that it ended with."""

    def __init__(self, run: Trainer) -> None:
        super().__init__()
        self._run, self.reason = run, ""

    def run(self) -> None:
        try:
            self._run.run()
        except TrainerError as error:
            self.reason = error.message


@pytest.mark.parametrize(
    ("run", "controls", "said"),
    [
        (
            None,
            [],
            ["policy has a control from the admin plane, which holds for this run's rollouts: {'max_turns': 1}"],
        ),
        ("this run, with another recipe", [{}], []),
    ],
)
def test_a_run_begins_without_a_control_of_a_run_or_says_what_it_found(
    plane: Plane, settings: TrainerSettings, run: str | None, controls: list[dict[str, Any]], said: list[str]
) -> None:
    plane.control, plane.control_run = RolloutControl(max_turns=1), run
    offer(plane, 2)
    lines: list[str] = []
    trainer(settings.model_copy(update={"steps": 1}), lines.append).run()
    assert (plane.controls, lines) == (controls, said)


def test_a_store_that_is_older_than_the_checkpoint_is_said(plane: Plane, url: str, model: Path, tmp_path: Path) -> None:
    offer(plane, 4)
    trainer(made(url, model, tmp_path)).run()
    for last_step, known in ((1, "step 1 as the last"), (None, "no step"), (2, "")):
        plane.last_step, lines = last_step, list[str]()
        trainer(made(url, model, tmp_path), lines.append).run()
        assert [f"it knows {known} of this run" in line for line in lines] == ([True] if known else [])


OF_PAID_GROUPS = """
from dataclasses import dataclass
from rolltap.trainer_client.recipes.base import Recipe

@dataclass
class OfPaidGroups(Recipe):
    def admits(self, group):
        return any(one.reward for one in group.rollouts)

    def check(self, step):
        assert step.rollouts
"""


def test_groups_that_the_recipe_does_not_admit_fill_no_step(
    plane: Plane, url: str, model: Path, tmp_path: Path
) -> None:
    """They are acknowledged, and the weights are those that come of the others alone."""
    file = tmp_path / "admitting.py"
    file.write_text(OF_PAID_GROUPS)
    ends = []
    for unpaid in (1, 0):
        plane.offer(*(random_group("unpaid", [0.0, 0.0]) for _ in range(unpaid)))
        offer(plane, 2)
        one = made(url, model, tmp_path, steps=1, recipe=str(file), out=tmp_path / f"unpaid-{unpaid}")
        trainer(one).run()
        assert plane.acked == {"g0": 1, "g1": 1} | ({"unpaid": 1} if unpaid else {})
        ends.append(weights(one.out / "checkpoints" / "step-1"))
        plane.forget()
    assert same(*ends)
    plane.offer(*(random_group(f"u{number}", [0.0, 0.0]) for number in range(8)))
    trainer(made(url, model, tmp_path, steps=1, recipe=str(file), out=tmp_path / "none")).run()
    assert same(weights(model), weights(tmp_path / "none" / "checkpoints" / "step-1"))


def test_an_unreachable_server_is_tried_again(plane: Plane, settings: TrainerSettings) -> None:
    offer(plane, 4)
    plane.fail_next = 3
    trainer(settings).run()
    assert plane.version == 2


def test_another_tokenizer_than_the_engines_is_refused(plane: Plane, settings: TrainerSettings) -> None:
    (settings.model / "tokenizer.json").write_text("{}")
    plane.tokenizer_hash = "0" * 64
    with pytest.raises(CheckpointMismatch, match="tokenizer"):
        trainer(settings).run()
    assert "leases" not in plane.names()


def test_a_checkpoint_of_another_policy_is_refused(plane: Plane, url: str, model: Path, tmp_path: Path) -> None:
    offer(plane, 2)
    trainer(made(url, model, tmp_path, steps=1)).run()
    with pytest.raises(CheckpointMismatch, match="is of policy 'policy', not 'other'"):
        trainer(made(url, model, tmp_path, policy="other"))


def test_an_unknown_policy_is_named(plane: Plane, url: str, model: Path, tmp_path: Path) -> None:
    with pytest.raises(UnknownPolicy, match="no policy 'other'; known: policy"):
        trainer(made(url, model, tmp_path, policy="other")).run()
