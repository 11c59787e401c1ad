"""A trainer that waits long says for what."""

from __future__ import annotations

import threading
from io import StringIO
from pathlib import Path

import pytest
import torch
from rich.console import Console

from rolltap.trainer_client.lease import holder
from rolltap.trainer_client.lease.client import TrainerClient
from rolltap.trainer_client.lease.holder import WaitNotice
from rolltap.trainer_client.model.ranks import Ranks
from rolltap.trainer_client.run import loop
from rolltap.trainer_client.run.loop import Trainer
from rolltap.trainer_client.run.sinks import Terminal
from rolltap.trainer_client.settings import load_trainer_settings

from .acting import acted_group
from .making import model_folder, random_group
from .plane import KEY, Plane


@pytest.fixture
def plane() -> Plane:
    return Plane(stale=2)


def test_the_trainer_says_what_it_waits_for_until_groups_come(
    plane: Plane, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(holder, "FIRST_S", 0.0)
    monkeypatch.setattr(loop, "LEASE_WAIT_S", 0.05)
    values = {"url": url, "key": KEY, "policy": "policy", "model": model_folder(tmp_path / "model")}
    settings = load_trainer_settings(
        **values, out=tmp_path / "out", groups=2, steps=1, compute={"device": "cpu"}, report={"sinks": ()}
    )
    lines: list[str] = []
    told = threading.Event()

    def say(line: str) -> None:
        lines.append(line)
        told.set()

    client = TrainerClient(url, KEY, "trainer", patience=2)
    thread = threading.Thread(target=Trainer(settings, client, Ranks(0, 1, torch.device("cpu")), (), say).run)
    thread.start()
    assert told.wait(timeout=30)
    plane.offer(*(random_group(f"g{index}", [1.0, 0.0], seed=index) for index in range(2)))
    thread.join(timeout=60)
    assert not thread.is_alive()
    assert lines == ["waiting for 2 groups of policy: 0 ready, 0 under way, 2 stale"]
    assert plane.acked == {"g0": 1, "g1": 1}


def test_the_trainer_waits_for_an_engine_that_its_control_needs(plane: Plane, url: str, tmp_path: Path) -> None:
    """Beside a cold engine, and with a gradient that waits for its acknowledgement."""
    settings = load_trainer_settings(
        url=url, key=KEY, policy="policy", model=model_folder(tmp_path / "model"), out=tmp_path / "out",
        recipe="agentgym_rl", options={"every": 1, "rounds": (4, 9)}, groups=2, steps=1, optimiser={"lr": 1e-3},
        compute={"device": "cpu", "token_budget": 90}, report={"sinks": ()},
    )  # fmt: skip
    lines: list[str] = []
    plane.cold = 4  # a call is tried twice
    client = TrainerClient(url, KEY, "trainer", patience=0.0)
    thread = threading.Thread(target=Trainer(settings, client, Ranks(0, 1, torch.device("cpu")), (), lines.append).run)
    thread.start()
    with plane.changed:
        assert plane.changed.wait_for(lambda: plane.controls, timeout=30)
        assert lines == ["waiting to set the control of policy: engine e has not answered yet"] * 2
        plane.cold = 2
    plane.offer(*(acted_group(f"g{index}", index) for index in range(2)))
    thread.join(timeout=60)
    assert not thread.is_alive()
    assert len(lines) == 3
    assert plane.controls == [{"max_turns": 4}, {"max_turns": 9}, {}]
    assert plane.acked == {"g0": 1, "g1": 1}


def test_a_line_comes_after_some_seconds_and_then_now_and_then(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(holder.time, "monotonic", lambda: now)
    lines: list[str] = []
    notice = WaitNotice(TrainerClient(url, KEY, "trainer"), "policy", lines.append)
    counts = []
    for now in (105.0, 111.0, 116.0, 172.0, 177.0):  # noqa: B007  the clock reads it
        notice.report_wait(1)
        counts.append(len(lines))
    assert counts == [0, 1, 1, 2, 2]


def test_the_line_is_one_line_of_the_terminal() -> None:
    out = StringIO()
    Terminal(Console(file=out, width=20)).say("waiting for 8 groups of [coder]: 0 ready")
    assert out.getvalue() == "waiting for 8 groups of [coder]: 0 ready\n"
