"""Rollouts without a harness: a few calls over HTTP, as an agent would make them, scored by what was sampled."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import httpx

from rolltap.demo.stack import Stack

POLICY = "tiny"
POLICIES: dict[str, dict[str, Any]] = {
    POLICY: {"pin": {"temperature": 1.0, "max_tokens": 24}, "train": ["tool_call_unparsable", "length_truncated"]}
}


class Player:
    """Plays groups in a thread for as long as the ledger wants any, as a context manager.

    `policy`: the one that plays, or one for each role; each role makes a call.
    """

    def __init__(self, stack: Stack, *, rollouts: int = 3, policy: str | Mapping[str, str] = POLICY) -> None:
        self._rollouts = rollouts
        self._policy = policy
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._play_on, name="player")
        self._http = httpx.Client(
            base_url=stack.admin_url, headers={"Authorization": f"Bearer {stack.keys['admin']}"}, timeout=30
        )
        self.failure: Exception | None = None

    def __enter__(self) -> Player:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        self._http.close()
        if self.failure is not None:
            raise self.failure

    def play(self) -> str | None:
        """One group from its opening to its rewards; None while the ledger has enough."""
        task = {"id": f"task-{time.monotonic_ns()}", "instruction": "say something", "spec": {}, "tags": []}
        opened = self._http.post("/groups", json={"policy": self._policy, "n": self._rollouts, "task": task})
        if opened.status_code == 429:
            return None
        group = opened.raise_for_status().json()
        for number, rollout in enumerate(group["rollouts"]):
            self._rollout(rollout["id"], number)
        return group["id"]

    def say(self, base_url: str, key: str, model: str = POLICY) -> dict[str, Any]:
        """One chat completion."""
        body = {"model": model, "messages": [{"role": "user", "content": "List the files."}]}
        reply = httpx.post(
            f"{base_url}/v1/chat/completions", json=body, headers={"Authorization": f"Bearer {key}"}, timeout=30
        )
        return reply.raise_for_status().json()

    def _rollout(self, rollout_id: str, number: int) -> None:
        with ExitStack() as stack:
            begun = self._http.post(f"/rollouts/{rollout_id}/start", json={"ttl": 600}).raise_for_status().json()
            stack.callback(self._finish, rollout_id, begun["attempt"])
            for model in begun["roles"] or [POLICY]:
                self.say(begun["base_url"], begun["key"], model)
            reward = {"rollout_id": rollout_id, "value": float(number % 2)}
            self._http.post("/rewards", json=reward).raise_for_status()

    def _finish(self, rollout_id: str, attempt: int) -> None:
        body = {"status": "succeeded", "attempt": attempt}
        self._http.post(f"/rollouts/{rollout_id}/finish", json=body).raise_for_status()

    def _play_on(self) -> None:
        try:
            while not self._over.is_set():
                if self.play() is None:
                    self._over.wait(0.1)
        except httpx.HTTPError as error:
            self.failure = error
