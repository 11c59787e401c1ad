"""A recipe controls the rollouts of its next step, from the trainer to the engine: docs/recipes.md."""

from __future__ import annotations

import json
import sqlite3
import threading
import time
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from rolltap.demo.stack import Stack
from rolltap.engine.tiny import FOLDER
from rolltap.trainer_client.lease.client import TrainerClient
from rolltap.trainer_client.model.ranks import Ranks
from rolltap.trainer_client.run.loop import Trainer
from rolltap.trainer_client.run.sinks import JsonLines
from rolltap.trainer_client.settings import load_trainer_settings

from .playing import POLICIES, POLICY, Player

RECIPE = """
from dataclasses import dataclass

from rolltap.contract.control import RolloutControl
from rolltap.trainer_client.recipes.base import Recipe


@dataclass
class Steered(Recipe):
    def after(self, step):
        if step == 0:
            return RolloutControl(n=2, curriculum={"easy": 1.0})
        return RolloutControl(n=3, temperature=0.6, priority=step, curriculum={"hard": 1.0}, max_turns=1)
"""


class Node(Player):
    """Plays queued tasks as a node does: claims one rollout after the other."""

    def play(self) -> str | None:
        claim = self._http.post("/nodes/node/claim", json={"capacity": 1, "ttl": 60}).raise_for_status().json()
        if not claim["rollouts"]:
            return None
        (given,) = claim["rollouts"]
        with ExitStack() as stack:
            body = {"ttl": 600, "node_token": given["token"]}
            begun = self._http.post(f"/rollouts/{given['rollout_id']}/start", json=body).raise_for_status().json()
            stack.callback(self._end, given, begun["attempt"])
            self.say(begun["base_url"], begun["key"])
            reward = {"rollout_id": given["rollout_id"], "value": time.monotonic() % 1}
            self._http.post("/rewards", json=reward).raise_for_status()
        return given["rollout_id"]

    def _end(self, given: dict[str, Any], attempt: int) -> None:
        body = {"status": "succeeded", "attempt": attempt, "node_token": given["token"]}
        self._http.post(f"/rollouts/{given['rollout_id']}/finish", json=body).raise_for_status()


def submit(stack: Stack) -> None:
    """Twenty tasks, of which the hard ones stand first."""
    spec = {"harness": "command", "argv": ["true"], "evaluator": {"kind": "session_completed"}}
    tasks = [
        {"id": f"{tag}{number}", "instruction": "say something", "spec": spec, "tags": [tag]}
        for tag in ("hard", "easy")
        for number in range(10)
    ]
    headers = {"Authorization": f"Bearer {stack.keys['admin']}"}
    body = {"policy": POLICY, "n": 4, "tasks": tasks}
    answer = httpx.post(f"{stack.admin_url}/tasks", json=body, headers=headers)
    assert answer.status_code == 200, answer.text


@pytest.mark.timeout(240)
def test_the_next_step_is_as_the_recipe_wants_it(tmp_path: Path) -> None:
    recipe = tmp_path / "steered.py"
    recipe.write_text(RECIPE, encoding="utf-8")
    with Stack(tmp_path, FOLDER, POLICIES) as stack:
        settings = load_trainer_settings(
            url=stack.trainer_url, key=stack.keys["trainer"], policy=POLICY, model=FOLDER, out=tmp_path / "run",
            recipe=str(recipe), groups=2, steps=3, max_staleness=0, optimiser={"lr": 1e-3},
            loss={"drop_zero_variance": False}, compute={"device": "cpu"},
        )  # fmt: skip
        client = TrainerClient(settings.url, settings.key, "trainer")
        trainer = Trainer(settings, client, Ranks(0, 1, torch.device("cpu")), [JsonLines(tmp_path, "", "")])
        training = threading.Thread(target=trainer.run)
        training.start()
        try:
            await_control(stack)
            submit(stack)
            with Node(stack):
                training.join(200)
        finally:
            trainer.stopping = True
            training.join()
        assert trainer.step == 3
        with closing(sqlite3.connect(stack.database)) as database:
            groups = database.execute(
                "SELECT acked_step, task_id, n, priority FROM groups WHERE status = 'acknowledged' ORDER BY 1, 2"
            ).fetchall()
            sent = dict(
                database.execute(
                    "SELECT g.acked_step, group_concat(DISTINCT json_extract(i.detail, '$.sampling_sent.temperature')) "
                    "FROM call_intents i JOIN attempts a ON a.session_id = i.session_id "
                    "JOIN rollouts r ON r.id = a.rollout_id JOIN groups g ON g.id = r.group_id "
                    "WHERE g.status = 'acknowledged' GROUP BY 1"
                ).fetchall()
            )
    assert [(step, task[:4], n, priority) for step, task, n, priority in groups] == [
        (1, "easy", 2, 0), (1, "easy", 2, 0),
        (2, "hard", 3, 1), (2, "hard", 3, 1),
        (3, "hard", 3, 2), (3, "hard", 3, 2),
    ]  # fmt: skip
    assert sent == {1: "1.0", 2: "0.6", 3: "0.6"}
    for line in (tmp_path / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
        assert json.loads(line)["mismatch_max"] < 1e-4, "engine and trainer are of one distribution"


def await_control(stack: Stack) -> None:
    """Waits until the trainer has begun, and made its demand known."""
    headers = {"Authorization": f"Bearer {stack.keys['trainer']}"}
    while True:
        policy = httpx.get(f"{stack.trainer_url}/policies/{POLICY}", headers=headers).raise_for_status().json()
        if policy["control"]["n"] and policy["room"] is not None:
            return
        time.sleep(0.05)
