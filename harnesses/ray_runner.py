"""Rollouts on a Ray cluster: one actor per node, which runs the node agent. Ray only places the actors.

No tokens and no results travel through Ray: each actor talks to the server over HTTP, as a node started by hand does.
Losing actors, nodes or the whole cluster costs only the attempts under way.
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

from rolltap.harnesses.attempts import DEFAULT_SLOTS, Slots
from rolltap.harnesses.client import AdminClient
from rolltap.harnesses.node import NodeAgent, NodeSettings
from rolltap.harnesses.specs import Defaults

log = logging.getLogger("rolltap.ray")

LOOK_S = 2.0
"""How often the cluster is looked at for nodes that came or went, in seconds."""

STOP_S = 10.0
"""How long actors have to hear that they are to stop: those of a node or cluster that is gone never do."""

LEAVE_S = 30.0
"""How long those that heard it have to give back what they hold."""


@dataclass(frozen=True, slots=True)
class RaySettings:
    """`key` is a runner's. `cpus` are declared for each node's actor, `slots` are what it runs at once."""

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
        """Until `stop`."""
        async with AdminClient(self._settings.admin_url, self._settings.key) as client:
            node = NodeSettings(self._name, self._settings.slots, self._settings.ttl)
            await NodeAgent(client, node, self._settings.defaults).run(self._stop)

    async def stop(self) -> None:
        self._stop.set()


class RayRunner:
    """Keeps one actor on every node of the cluster that lives."""

    def __init__(self, settings: RaySettings) -> None:
        self._settings = settings
        self._actors: dict[str, tuple[Any, Any]] = {}  # node → its actor's handle, and the run's result to come

    def connect(self) -> None:
        """Joins the cluster at `address`, or starts one on this machine."""
        if not ray.is_initialized():
            ray.init(address=self._settings.address, include_dashboard=False, log_to_driver=False)

    def place(self) -> int:
        """Starts actors where there is none, forgets those that died; returns how many there are."""
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
        where = NodeAffinitySchedulingStrategy(node_id=node_id, soft=False)
        make: Any = ray.remote(num_cpus=self._settings.cpus)(NodeActor)
        actor = make.options(scheduling_strategy=where).remote(
            self._settings, f"ray-{node_id[:12]}-{time.time_ns() % 10**6:06d}"
        )
        return actor, actor.run.remote()

    def run(self, seconds: float | None = None) -> None:
        """Looks after the actors for `seconds`, or until interrupted; then stops them.

        Looking is another thread's: a call to a cluster that is gone blocks for a minute and hears no signal.
        """
        looking = threading.Thread(target=self._look_after, name="ray-nodes", daemon=True)
        looking.start()
        try:
            looking.join(seconds)
        finally:
            self.stop()

    def _look_after(self) -> None:
        while True:
            self.place()
            time.sleep(LOOK_S)

    def stop(self) -> None:
        """Asks every actor to give back what it holds, and waits for those that hear it."""
        with contextlib.suppress(RayError):
            stops = {actor.stop.remote(): running for actor, running in list(self._actors.values())}
            confirmed = _wait(list(stops), STOP_S)
            _wait([stops[stop] for stop in confirmed], LEAVE_S)
        self._actors.clear()


def _wait(results: list[Any], seconds: float) -> list[Any]:
    """The results that are ready once all are, or after `seconds`."""
    return ray.wait(results, num_returns=len(results), timeout=seconds)[0] if results else []
