"""The contract that every adapter keeps, tried on its trainer's own code and real steps on a CPU."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from trl.trainer.grpo_config import GRPOConfig

from rolltap.contract.leases import LeasedGroup
from rolltap.errors import CheckpointMismatch, ConfigError
from rolltap.trainer_client import attention
from rolltap.trainer_client.adapters import ADAPTERS, UntestedTrainer
from rolltap.trainer_client.adapters.trl_grpo import check_arguments
from rolltap.trainer_client.collate import collate
from rolltap.trainer_client.loss import PolicyLoss
from rolltap.trainer_client.network import PolicyNetwork
from rolltap.trainer_client.packing import Packer
from rolltap.trainer_client.weights import tokenizer_hash

from ..unit.trainer_client.making import group, record, rows_of, segment
from ..unit.trainer_client.plane import Plane, running
from .driver import Driver, Killed, Run, TrainedToken, tokens_of
from .proofs import proves
from .trl_async import TrlAsync
from .trl_grpo import TrlGrpo
from .world import branching_group, policy_folder, trained_rows

pytestmark = pytest.mark.filterwarnings("ignore")  # of transformers, accelerate and TRL about themselves


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return policy_folder(tmp_path_factory.mktemp("policy") / "model")


@pytest.fixture
def plane(model: Path) -> Plane:
    return Plane(tokenizer_hash=tokenizer_hash(model))


@pytest.fixture
def run(plane: Plane, model: Path, tmp_path: Path) -> Iterator[Run]:
    with running(plane) as url:
        yield Run(url, model, tmp_path / "out", steps=1)


def groups(count: int, start: int = 0) -> list[LeasedGroup]:
    return [branching_group(f"g{index}", index) for index in range(start, start + count)]


def expected_tokens(of: list[LeasedGroup]) -> list[TrainedToken]:
    return [one for row in trained_rows(of) for one in tokens_of(row.token_ids, row.loss_mask, row.logprobs)]


def counted(tokens: list[TrainedToken]) -> Counter[Any]:
    return Counter((one.context, one.token, round(one.logprob, 5)) for one in tokens)


def our_gradient(driver: Driver, model: Path, of: list[LeasedGroup]) -> dict[str, torch.Tensor]:
    attention.register()
    policy = PolicyNetwork(AutoModelForCausalLM.from_pretrained(model, attn_implementation=attention.NAME))
    for pack in Packer(500, share=True)(rows_of(of, driver.advantage, normalise=driver.normalise, length=100)):
        batch = collate(pack)
        PolicyLoss(0.1, 0.15)(policy(batch), batch).loss.backward()
    return {name: weight.grad for name, weight in policy.model.named_parameters() if weight.grad is not None}


@proves("tokens")
def test_every_trained_token_is_in_the_loss_once_with_its_log_prob(driver: Driver, plane: Plane, run: Run) -> None:
    plane.offer(*groups(2))
    seen = driver.run(run)
    assert counted(seen.tokens[0]) == counted(expected_tokens(groups(2)))


@proves("gradient")
def test_the_gradient_is_our_trainers_so_a_rollout_weighs_once(driver: Driver, plane: Plane, run: Run) -> None:
    plane.offer(*groups(2))
    theirs = driver.run(run).gradient
    for name, gradient in our_gradient(driver, run.model, groups(2)).items():
        torch.testing.assert_close(theirs[name], gradient, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    "driver",
    [
        pytest.param(TrlGrpo("grpo", "rollout"), marks=pytest.mark.long),
        pytest.param(TrlGrpo("dr_grpo", "constant", passes=5), marks=pytest.mark.long),
        TrlGrpo("grpo", "rollout", passes=5),
        pytest.param(TrlAsync(passes=5), marks=pytest.mark.long),
        TrlAsync(passes=14),
    ],
    ids=["grpo", "dr_grpo in 5 passes", "grpo in 5 passes", "async in 5 passes", "async in 14 passes"],
)
def test_in_any_loss_and_any_passes_rollouts_weigh_once(driver: Driver, plane: Plane, run: Run) -> None:
    """12 rows: where they don't fill the passes, rows without effect do."""
    plane.offer(*groups(2))
    theirs = driver.run(run).gradient
    for name, gradient in our_gradient(driver, run.model, groups(2)).items():
        torch.testing.assert_close(theirs[name], gradient, atol=1e-5, rtol=1e-4)


@proves("order")
def test_groups_are_acknowledged_before_the_step_and_weights_pushed_after(
    driver: Driver, plane: Plane, run: Run
) -> None:
    plane.offer(*groups(4))
    driver.run(replace(run, steps=2))
    assert plane.acked == {"g0": 1, "g1": 1, "g2": 2, "g3": 2}
    assert [version for _, version in plane.pushed][-2:] == [1, 2]
    names = [name for name in plane.names() if name in ("ack", "push")]
    assert names[-4:] == ["ack", "push", "ack", "push"]
    before, after = (load_file(Path(path) / "model.safetensors") for path, _ in plane.pushed[-2:])
    assert any(not torch.equal(before[name], after[name]) for name in before)
    assert plane.paused is None


@proves("killed")
def test_killed_between_ack_and_step_and_resumed_every_group_is_trained_once(
    driver: Driver, plane: Plane, run: Run
) -> None:
    plane.offer(*groups(6))
    with pytest.raises(Killed):
        driver.run(replace(run, steps=3, die_at=2))
    assert plane.acked == {"g0": 1, "g1": 1, "g2": 2, "g3": 2}
    seen = driver.run(replace(run, steps=3))
    assert plane.acked == {"g0": 1, "g1": 1, "g2": 2, "g3": 2, "g4": 3, "g5": 3}
    resumed = [one for step in seen.tokens for one in step]
    assert counted(resumed) == counted(expected_tokens(groups(4, start=2)))
    assert plane.version == 3


@proves("lost")
def test_groups_that_somebody_else_has_now_change_no_weight(driver: Driver, plane: Plane, run: Run) -> None:
    plane.offer(*groups(6))
    plane.lose = {"lease-1"}
    seen = driver.run(replace(run, steps=2))
    if driver.spends_steps:
        assert plane.acked == {"g2": 2, "g3": 2}
        (folder,) = [path for path, version in plane.pushed if version == 1]
        first, model = (load_file(Path(path) / "model.safetensors") for path in (folder, run.model))
        assert all(torch.equal(first[name], model[name]) for name in model)
    else:
        assert plane.acked == {"g2": 1, "g3": 1, "g4": 2, "g5": 2}
        trained = [one for step in seen.tokens for one in step]
        assert counted(trained) == counted(expected_tokens(groups(4, start=2)))


@proves("refused")
def test_a_group_that_cannot_be_trained_is_refused_with_the_reason(driver: Driver, plane: Plane, run: Run) -> None:
    odd = group("odd", [record("odd", index, [segment([5, 900, 6], [1])], float(index)) for index in range(2)])
    plane.offer(odd, *groups(2))
    driver.run(run)
    assert plane.acked == {"g0": 1, "g1": 1}
    assert [blamed for _, blamed in plane.refused] == [("odd",)]
    assert "vocabulary of 64" in plane.refused[0][0]


@proves("tokenizer")
def test_another_tokenizer_or_template_is_refused_at_connect(driver: Driver, plane: Plane, run: Run) -> None:
    plane.tokenizer_hash = "another"
    plane.offer(*groups(2))
    with pytest.raises(CheckpointMismatch, match="tokenizer and chat template"):
        driver.run(run)
    assert plane.acked == {}
    assert plane.leases == {}


@proves("staleness")
def test_staleness_is_told_in_the_trainers_own_log(driver: Driver, plane: Plane, run: Run) -> None:
    plane.offer(*groups(4))
    seen = driver.run(replace(run, steps=2))
    assert seen.logged["staleness"][-1] == 1.0


def test_an_untested_version_warns_and_names_the_tested_ones() -> None:
    with pytest.warns(UntestedTrainer, match=r"trl 1\.16\.0 was not tested with rolltap; tested: 0\.1, 0\.2"):
        replace(ADAPTERS["trl-grpo"], tested=("0.1", "0.2")).check_installed()


def test_a_missing_package_names_the_extra() -> None:
    with pytest.raises(ConfigError, match=r"pip install 'rolltap\[trl\]'"):
        replace(ADAPTERS["trl-grpo"], package="no-such-trainer").check_installed()


@pytest.mark.parametrize("setting", [{"beta": 0.1}, {"num_iterations": 2}, {"importance_sampling_level": "sequence"}])
def test_settings_that_would_train_something_else_are_refused(setting: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=next(iter(setting))):
        check_arguments(GRPOConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, **setting))
