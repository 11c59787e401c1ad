"""Weights that a trainer sends over a process group, to real engines through a real proxy, with gloo on the CPU.

What an engine holds is told from its log-probs: those of the same weights are the same numbers, to the last bit.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from rolltap.demo.stack import Stack
from rolltap.engine.tiny import FOLDER
from rolltap.errors import EngineError, LedgerError, WeightsLost
from rolltap.trainer_client.lease import push
from rolltap.trainer_client.lease.client import TrainerClient
from rolltap.trainer_client.lease.push import WeightSender, push_folder
from rolltap.trainer_client.settings import PushSettings

from ..conftest import ROOT
from .playing import POLICIES, POLICY, Player

CPU = torch.device("cpu")
PROMPT = list(range(40, 90))


def changed(by: float) -> dict[str, Tensor]:
    """The tiny model's weights, all of them a little other."""
    return {name: tensor * by for name, tensor in load_file(FOLDER / "model.safetensors").items()}


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with Stack(tmp_path_factory.mktemp("transfer"), FOLDER, POLICIES, replicas=2) as running:
        yield running


@pytest.fixture(scope="module")
def client(stack: Stack) -> TrainerClient:
    return owner(stack)


def owner(stack: Stack) -> TrainerClient:
    """A client that owns the policy as it is served now."""
    made = TrainerClient(stack.trainer_url, stack.keys["trainer"], "trainer", run="tests", patience=5)
    made.rewind(0, {POLICY: made.policy(POLICY).version}, take_over=True)
    return made


@pytest.fixture
def sender() -> Iterator[WeightSender]:
    made = WeightSender(PushSettings(timeout_s=20), CPU)  # type: ignore[call-arg]
    yield made
    made.close()


def sampled(stack: Stack, engine: str, tokens: int = 30) -> tuple[list[float], list[dict[str, Any]]]:
    """The log-probs of a greedy answer straight from an engine, and its versions."""
    params = {"temperature": 0.0, "max_tokens": tokens, "logprobs": 0, "ignore_eos": True}
    reply = httpx.post(
        f"{stack.engine_url(engine)}/inference/v1/generate",
        json={"token_ids": PROMPT, "sampling_params": params},
        timeout=60,
    )
    (choice,) = reply.raise_for_status().json()["choices"]
    return [entry["logprob"] for entry in choice["logprobs"]["content"]], choice["weight_versions"]


def test_what_was_sent_is_served_to_the_last_bit_by_all_replicas(
    stack: Stack, client: TrainerClient, sender: WeightSender, tmp_path: Path
) -> None:
    state = changed(1.01)
    shutil.copytree(FOLDER, tmp_path / "same")
    save_file(state, tmp_path / "same" / "model.safetensors", metadata={"format": "pt"})
    version = client.policy(POLICY).version + 1
    push_folder(client, POLICY, tmp_path / "same", version, "keep")
    from_disk, _ = sampled(stack, "engine")
    sender.push(client, POLICY, changed(0.99), version + 1, "keep")
    other, _ = sampled(stack, "engine")
    sender.push(client, POLICY, state, version + 2, "drain")
    for engine in stack.engine_names:
        sent, versions = sampled(stack, engine)
        assert sent == from_disk != other
        assert [span["version"] for span in versions] == [str(version + 2)]
    assert client.policy(POLICY).version == version + 2
    assert client.policy(POLICY).paused is None


def stands(stack: Stack, client: TrainerClient, version: int) -> None:
    """The policy is at `version` and its engines go on; what they serve they serve as that."""
    policy = client.policy(POLICY)
    assert (policy.version, policy.paused) == (version, None)
    for engine in stack.engine_names:
        _, spans = sampled(stack, engine, tokens=3)
        assert [span["version"] for span in spans] == [str(version)]


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.fixture
def version(client: TrainerClient, sender: WeightSender) -> int:
    """The version that all replicas serve now."""
    for number in range(client.policy(POLICY).version + 1, sys.maxsize):
        with suppress(LedgerError):  # the number was tried with other weights
            sender.push(client, POLICY, changed(1.0), number, "keep")
            return number
    raise AssertionError


def test_a_swap_in_mid_answer(stack: Stack, client: TrainerClient, sender: WeightSender, version: int) -> None:
    params = {"max_tokens": 1500, "ignore_eos": True, "logprobs": 0}
    body = {"token_ids": PROMPT, "sampling_params": params, "stream": True}
    url = f"{stack.engine_url('engine')}/inference/v1/generate"
    with httpx.stream("POST", url, json=body, timeout=60) as reply:
        lines = (line for line in reply.iter_lines() if line.startswith("data: {"))
        next(lines)
        sender.push(client, POLICY, changed(1.02), version + 1, "keep")
        last = json.loads(list(lines)[-1][6:])
    (old, new) = last["choices"][0]["weight_versions"]
    assert (old["version"], old["start"]) == (str(version), 0)
    assert (new["version"], new["start"], new["end"]) == (str(version + 1), old["end"], 1500)
    assert old["end"] > 0


def of_another_shape(state: dict[str, Tensor]) -> str:
    state["model.norm.weight"] = torch.ones(7)
    return r"shape of model.norm.weight is \[7\]"


def of_another_name(state: dict[str, Tensor]) -> str:
    state["model.head.weight"] = state.pop("lm_head.weight")
    return "the model has no tensor model.head.weight"


def not_finite(state: dict[str, Tensor]) -> str:
    state["model.norm.weight"] = torch.full_like(state["model.norm.weight"], float("nan"))
    return "not finite"


def incomplete(state: dict[str, Tensor]) -> str:
    del state["lm_head.weight"]
    return "tensors don't match the model; first difference: lm_head.weight"


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with Stack(tmp_path_factory.mktemp("alone"), FOLDER, POLICIES) as running:
        yield running


@pytest.mark.parametrize("spoil", [of_another_shape, of_another_name, not_finite, incomplete])
def test_one_engine_that_refuses_serves_the_old_weights(alone: Stack, sender: WeightSender, spoil: Any) -> None:
    client = owner(alone)
    version = client.policy(POLICY).version
    before, _ = sampled(alone, "engine")
    state = changed(1.1)
    message = spoil(state)
    with pytest.raises(EngineError, match=message) as raised:
        sender.push(client, POLICY, state, version + 1, "keep")
    assert not isinstance(raised.value, WeightsLost)
    # Rounding depends on how an answer's steps are cut and what stands in the cache: other weights differ by far more.
    assert sampled(alone, "engine")[0] == pytest.approx(before, abs=1e-4)
    assert (client.policy(POLICY).version, client.policy(POLICY).paused) == (version, None)
    sender.push(client, POLICY, changed(1.0 + version), version + 2, "keep")
    stands(alone, client, version + 2)


def test_what_one_replica_refuses_stands_still_until_a_whole_push(
    stack: Stack, client: TrainerClient, sender: WeightSender, version: int
) -> None:
    """The other replica was cut short in the middle: nobody knows what it has."""
    state = changed(1.1)
    of_another_shape(state)
    with pytest.raises(WeightsLost, match=r"whole push.*shape of model\.norm\.weight"):
        sender.push(client, POLICY, state, version + 1, "keep")
    assert (client.policy(POLICY).version, client.policy(POLICY).paused) == (version, "lost")
    with pytest.raises(WeightsLost, match="push whole weights to continue"):
        client.finish_update(POLICY)
    client.begin_update(POLICY, "keep")
    with pytest.raises(WeightsLost):
        client.finish_update(POLICY)
    with pytest.raises(WeightsLost):
        client.push(POLICY, str(FOLDER), version + 2, digest="adapter", adapter=True)
    sender.push(client, POLICY, changed(1.1), version + 2, "keep")
    stands(stack, client, version + 2)


def test_a_whole_folder_ends_it_too(stack: Stack, client: TrainerClient, sender: WeightSender, version: int) -> None:
    state = changed(1.1)
    of_another_shape(state)
    with pytest.raises(WeightsLost):
        sender.push(client, POLICY, state, version + 1, "keep")
    push_folder(client, POLICY, FOLDER, version + 2, "keep")
    stands(stack, client, version + 2)


TRAINER = """
import sys, time, torch
from rolltap.trainer_client.lease import push
from rolltap.trainer_client.lease.client import TrainerClient
from rolltap.trainer_client.settings import PushSettings
from tests.acceptance.test_transfer import POLICY, changed, half_fed

push._feed = half_fed
url, key, version, incarnation = sys.argv[1:]
client = TrainerClient(url, key, "trainer")
client.caller["incarnation"] = int(incarnation)
sender = push.WeightSender(PushSettings(timeout_s=60), torch.device("cpu"))
sender.push(client, POLICY, changed(1.3), int(version), "keep")
"""


def half_fed(pipe: Any, state: Mapping[str, Tensor]) -> None:
    """Writes the first half of the weights' bytes, says so, and stops."""
    half = list(state.items())[: len(state) // 2]
    _FEED(pipe, dict(half))
    print("half", flush=True)


_FEED = push._feed


def test_a_trainer_killed_in_mid_broadcast(
    stack: Stack, client: TrainerClient, sender: WeightSender, version: int, tmp_path: Path
) -> None:
    before = [sampled(stack, engine)[0] for engine in stack.engine_names]
    command = [sys.executable, "-c", TRAINER, stack.trainer_url, stack.keys["trainer"], str(version + 1)]
    command.append(str(client.caller["incarnation"]))
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as trainer:
        assert trainer.stdout is not None
        assert trainer.stdout.readline() == "half\n"
        trainer.kill()
    until(lambda: client.policy(POLICY).paused == "lost")
    assert client.policy(POLICY).version == version
    # its next start pushes what it has, since the policy is paused
    sender.push(client, POLICY, changed(1.0), version, "keep")
    stands(stack, client, version)
    assert [sampled(stack, engine)[0] for engine in stack.engine_names] == [
        pytest.approx(one, abs=1e-4) for one in before
    ]


def test_a_replica_killed_in_mid_broadcast(
    stack: Stack, client: TrainerClient, sender: WeightSender, version: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The push is tried again without it; when it is back, it gets the weights with the next push."""
    engine = next(process for process in stack.processes if process.name == "engine-1")

    def feed(pipe: Any, state: Mapping[str, Tensor]) -> None:
        monkeypatch.setattr(push, "_feed", _FEED)
        half = len(state) // 2
        _FEED(pipe, dict(list(state.items())[:half]))
        os.kill(engine.child.pid, signal.SIGKILL)
        engine.child.wait()
        _FEED(pipe, dict(list(state.items())[half:]))

    monkeypatch.setattr(push, "_feed", feed)
    sender.push(client, POLICY, changed(1.2), version + 1, "keep")
    assert (client.policy(POLICY).version, client.policy(POLICY).paused) == (version + 1, None)
    assert [span["version"] for span in sampled(stack, "engine")[1]] == [str(version + 1)]
    stack.processes.remove(engine)
    stack.start_engine("engine-1").wait_for(f"{stack.engine_url('engine-1')}/health")
    sender.push(client, POLICY, changed(1.2), version + 2, "keep")
    stands(stack, client, version + 2)


def test_a_trainer_that_nobody_reaches_leaves_the_old_weights(
    stack: Stack, client: TrainerClient, version: int
) -> None:
    lost = WeightSender(PushSettings(address="nowhere.invalid", timeout_s=5), CPU)  # type: ignore[call-arg]
    with pytest.raises(EngineError, match="did not join the trainer's group"):
        lost.push(client, POLICY, changed(1.2), version + 1, "keep")
    lost.close()
    stands(stack, client, version)


@pytest.mark.timeout(300)
def test_a_run_sends_its_weights(tmp_path: Path) -> None:
    """`rolltap train` with `push.transfer = "distributed"`: no folder but checkpoints; the engine serves the last.

    20 CPU seconds: a whole run with real engines and a trainer.
    """
    out = tmp_path / "train"
    with Stack(tmp_path, FOLDER, POLICIES) as alone, Player(alone):
        options = {"policy": POLICY, "model": FOLDER, "out": out, "steps": 3, "groups": 1, "lr": 1e-4, "threads": 1}
        environment = {
            "ROLLTAP_TRAINER__PUSH__TRANSFER": "distributed",
            "ROLLTAP_TRAINER__CHECKPOINT_EVERY": "3",
            "OMP_NUM_THREADS": "1",
        }
        trainer = alone.start_trainer([text for k, v in options.items() for text in (f"--{k}", str(v))], environment)
        assert trainer.child.wait(200) == 0, trainer.log.read_text()
        client = owner(alone)
        stands(alone, client, 3)
        push_folder(client, POLICY, out / "checkpoints" / "step-3", 3, "keep")  # what was sent, in a folder
        sent, _ = sampled(alone, "engine")
        push_folder(client, POLICY, out / "checkpoints" / "step-3", 4, "keep")
        assert sampled(alone, "engine")[0] == sent
    assert not list((out / "weights").glob("*"))
