"""Rollouts on a Ray cluster: one actor per node, which runs the node agent. Ray only places the actors.

Tokens and results never go through Ray: each actor talks to the server over HTTP, like a node started by hand.
Losing actors, nodes or the whole cluster costs only the running attempts.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rolltap.harnesses.client import AdminClient
from rolltap.harnesses.runner.attempts import DEFAULT_SLOTS, Slots
from rolltap.harnesses.runner.node import NodeAgent, NodeSettings
from rolltap.harnesses.runner.specs import Defaults

log = logging.getLogger("rolltap.ray")

LOOK_S = 2.0
"""Seconds between checks for new and lost nodes of the cluster."""

STOP_S = 10.0
"""Seconds for actors to confirm a stop; those of a lost node or cluster never do."""

LEAVE_S = 30.0
"""Seconds for actors that confirmed to release their claims."""


@dataclass(frozen=True, slots=True)
class RaySettings:
    """`key` is a runner's key. `cpus`: declared for each node's actor. `slots`: its concurrent rollouts."""

    admin_url: str
    key: str
    address: str | None = None
    cpus: float = 1.0
    slots: Slots = DEFAULT_SLOTS
    ttl: float = 15.0
    defaults: Defaults = field(default_factory=Defaults)


class NodeActor:
    """The node agent as a Ray actor."""

    def __init__(self, settings: RaySettings, name: str) -> None:
        self._settings = settings
        self._name = name
        self._stop = asyncio.Event()

    async def run(self) -> None:
        """Runs until `stop`."""
        async with AdminClient(self._settings.admin_url, self._settings.key) as client:
            node = NodeSettings(self._name, self._settings.slots, self._settings.ttl)
            await NodeAgent(client, node, self._settings.defaults).run(self._stop)

    async def stop(self) -> None:
        self._stop.set()


class RayRunner:
    """Keeps one actor on every live node of the cluster."""

    def __init__(self, settings: RaySettings) -> None:
        self._settings = settings
        self._actors: dict[str, tuple[Any, Any]] = {}  # node → its actor's handle, the future of its run

    def connect(self) -> None:
        """Joins the cluster at `address`, or starts one on this machine."""
        if not ray.is_initialized():
            ray.init(address=self._settings.address, include_dashboard=False, log_to_driver=False)

    def place(self) -> int:
        """Starts missing actors and forgets dead ones. Returns the number of actors."""
        alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
        for node_id, (_, running) in list(self._actors.items()):
            ended, _ = ray.wait([running], timeout=0)
            if node_id not in alive or ended:
                log.warning("the actor on node %s has ended", node_id)
                del self._actors[node_id]
        for node_id in alive - self._actors.keys():
            self._actors[node_id] = self._start(node_id)
        return len(self._actors)

    def _start(self, node_id: str) -> tuple[Any, Any]:
        strategy = NodeAffinitySchedulingStrategy(node_id=node_id, soft=False)
        actor_class: Any = ray.remote(num_cpus=self._settings.cpus)(NodeActor)
        actor = actor_class.options(scheduling_strategy=strategy).remote(
            self._settings, f"ray-{node_id[:12]}-{time.time_ns() % 10**6:06d}"
        )
        return actor, actor.run.remote()

    def run(self, seconds: float | None = None) -> None:
        """Maintains the actors for `seconds`, or until interrupted; then stops them.

        A thread of its own does it: a call to a lost cluster blocks for a minute and can't be interrupted by a signal.
        """
        thread = threading.Thread(target=self._maintain, name="ray-nodes", daemon=True)
        thread.start()
        try:
            thread.join(seconds)
        finally:
            self.stop()

    def _maintain(self) -> None:
        while True:
            self.place()
            time.sleep(LOOK_S)

    def stop(self) -> None:
        """Asks every actor to stop and release its claims, and waits for those that confirm."""
        with contextlib.suppress(RayError):
            stops = {actor.stop.remote(): running for actor, running in list(self._actors.values())}
            confirmed = _wait(list(stops), STOP_S)
            _wait([stops[stop] for stop in confirmed], LEAVE_S)
        self._actors.clear()


def _wait(results: list[Any], seconds: float) -> list[Any]:
    """Waits for all results, at most `seconds`. Returns those that are ready."""
    return ray.wait(results, num_returns=len(results), timeout=seconds)[0] if results else []
