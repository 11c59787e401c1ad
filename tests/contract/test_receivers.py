"""Weights over a process group, from the trainer's own sender to a process that speaks SGLang's wire, by gloo."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from rolltap.contract.trainer import Transfer
from rolltap.errors import EngineError, WeightsLost
from rolltap.proxy.engines.receivers import Receiver
from rolltap.proxy.engines.registry import open_engine
from rolltap.settings import EngineSettings
from rolltap.trainer_client.lease import push as pushing
from rolltap.trainer_client.lease.push import WeightSender
from rolltap.trainer_client.settings import PushSettings

from ..conftest import free_port
from .sglang_peer import digest

PEER = Path(__file__).with_name("sglang_peer.py")
WEIGHTS = {
    "embed": torch.randn(50, 8),
    "layer.0": torch.randn(3, 5, 7).to(torch.bfloat16),
    "layer.1": torch.randn(16, 16).T,  # not contiguous
    "scale": torch.tensor(2.5),
    "steps": torch.arange(9),
}


class Plane:
    """The trainer plane's calls, straight to the clients of engines at `urls`."""

    def __init__(self, kind: str, *urls: str) -> None:
        self.settings = EngineSettings.model_validate({"kind": kind, "url": ",".join(urls)})

        self.caller = {"trainer": "trainer", "incarnation": 1}

    def begin_update(self, policy: str, mode: str) -> None: ...

    def finish_update(self, policy: str) -> None: ...

    def ranks(self, policy: str) -> int:
        return asyncio.run(self._with(lambda receiver: receiver.ranks()))

    def receive(self, policy: str, transfer: Transfer) -> None:
        async def both(receiver: Receiver) -> None:
            await receiver.join(transfer)
            await receiver.receive(transfer)

        asyncio.run(self._with(both))

    async def _with(self, work: Any) -> Any:
        engine = open_engine("main", self.settings)
        assert engine.receiver is not None
        try:
            return await work(engine.receiver)
        finally:
            await engine.close()


@pytest.fixture(scope="module")
def start_peer() -> Iterator[Any]:
    processes: list[subprocess.Popen[bytes]] = []

    def start(*flags: str) -> str:
        port = free_port()
        processes.append(subprocess.Popen([sys.executable, str(PEER), str(port), *flags]))
        url = f"http://127.0.0.1:{port}"
        for _ in range(600):
            try:
                httpx.get(f"{url}/held")
                return url
            except httpx.TransportError:
                processes[-1].poll()
                asyncio.run(asyncio.sleep(0.1))
        raise AssertionError("the peer did not start")

    yield start
    for process in processes:
        process.terminate()
        process.wait()


@pytest.fixture(scope="module")
def peers(start_peer: Any) -> tuple[str, str]:
    return start_peer(), start_peer("--without-sessions")


@pytest.fixture(scope="module")
def sender() -> Iterator[WeightSender]:
    made = WeightSender(PushSettings(timeout_s=10), torch.device("cpu"))  # type: ignore[call-arg]
    yield made
    made.close()


def held(url: str) -> dict[str, Any]:
    return httpx.get(f"{url}/held").json()


def push(sender: WeightSender, plane: Plane, weights: dict[str, torch.Tensor], version: int) -> None:
    client: Any = plane
    sender.push(client, "policy", weights, version, "keep")


def test_every_bit_arrives_at_every_replica(
    sender: WeightSender, peers: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pushing, "BUCKET_BYTES", 1250)
    push(sender, Plane("sglang", *peers), WEIGHTS, 7)
    for url in peers:
        found = held(url)
        assert found["held"] == {name: digest(tensor) for name, tensor in WEIGHTS.items()}
        assert (found["version"], found["session"], found["groups"]) == ("7", False, [])
        assert [part["names"] for part in found["updates"][-3:]] == [
            ["embed"],
            ["layer.0", "layer.1", "scale"],
            ["steps"],
        ]
        assert [part["flush_cache"] for part in found["updates"][-3:]] == [False, False, True]
        assert [part["weight_version"] for part in found["updates"][-3:]] == [None, None, "7"]


@pytest.mark.acceptance
def test_a_transfer_that_breaks_off_is_told_and_the_next_one_is_whole(
    sender: WeightSender, peers: tuple[str, str]
) -> None:
    alone = Plane("sglang", peers[0])
    push(sender, alone, WEIGHTS, 8)
    with pytest.raises(WeightsLost, match="Please discard the whole weights"):
        push(sender, alone, {**WEIGHTS, "bad": torch.ones(3)}, 9)
    assert held(peers[0])["version"] == "8"
    push(sender, alone, WEIGHTS, 9)
    found = held(peers[0])
    assert (found["version"], found["session"], found["groups"]) == ("9", False, [])


@pytest.mark.acceptance
def test_what_does_not_come_together_changes_nothing(peers: tuple[str, str]) -> None:
    before = held(peers[0])
    nowhere = PushSettings(address="nowhere.invalid", timeout_s=5)  # type: ignore[call-arg]
    lost = WeightSender(nowhere, torch.device("cpu"))
    with pytest.raises(EngineError, match=r"did not join the trainer's group.*the old weights serve") as raised:
        push(lost, Plane("sglang", peers[0]), WEIGHTS, 10)
    lost.close()
    assert not isinstance(raised.value, WeightsLost)
    assert held(peers[0]) == before
