"""The deployment of a soak: `rolltap up --local`, with a relay on each link between a proxy and what it needs,
and between nginx and each proxy.

Proxies reach the other services by names, which a name server of the soak's own answers. Each service that writes has a
disk of its own, of a few hundred MB, in memory. A node takes the tasks of a queue. All this needs root.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from rolltap.deployment.description import PLANES, PROXIES
from rolltap.deployment.local import Child, LocalDeployment, LocalOptions

from ..faults import turns
from ..faults.clients import Clients, Told
from ..faults.local import free_ports, open_folder
from ..faults.relay import Relay, relayed
from .disks import mounted
from .names import DOMAIN, NameServer, asking, name_server

LOOK_EVERY_S = 0.2
COLLECT_EVERY_S = 1.0
LINKS = ("postgres", "redis", "engine")
"""Of a proxy."""

HOMES = {"postgres": ("postgres", "postgres-2"), "redis": ("redis", "redis-2")}
"""After a failover the second is the primary's."""

DISKS_MB = {
    **dict.fromkeys(HOMES["postgres"], 384),
    **dict.fromkeys(HOMES["redis"], 96),
    **dict.fromkeys(PROXIES, 128),
}


@dataclass(frozen=True)
class Variant:
    """`pinned`: nginx keeps a session with one proxy. `redis`: calls are durable in Redis, before Postgres."""

    pinned: bool
    redis: bool

    def __str__(self) -> str:
        return f"{'pinned' if self.pinned else 'round robin'}, {'Redis' if self.redis else 'Postgres alone'}"


VARIANTS = (Variant(False, True), Variant(True, False), Variant(False, False), Variant(True, True))


@dataclass
class Phase:
    """A stretch of a round with one fault, and what clients felt in it. Several may be under way at once."""

    name: str
    began: float = -math.inf  # seconds since the epoch, as the end
    ended: float = math.inf
    felt: Counter[str] = field(default_factory=Counter)


@dataclass(eq=False)
class SoakDeployment(LocalDeployment):
    """Its proxies ask the name server of `resolv_conf`."""

    resolv_conf: Path = Path("/etc/resolv.conf")

    def _child(self, name: str, command: list[str], **options: Any) -> Child:
        if name in PROXIES:
            command = asking(self.resolv_conf, command)
        return super()._child(name, command, **options)

    def start_node(self) -> None:
        """It works on the tasks of `Submitter`, through nginx."""
        command = [sys.executable, "-m", "rolltap", "node", "--name", "soak", "--slots", "2", "--runtime", "process"]
        command += ["--workspaces", str(self.folder / "workspaces"), "--url", self.urls["admin"]]
        super()._child("node", command, env={"ROLLTAP_RUNNER_KEY": self.secrets["runner"]})


def named(phases: Sequence[Phase]) -> str:
    return " + ".join(phase.name for phase in phases)


class Front:
    """nginx, as `Clients` see a proxy."""

    def __init__(self, deployment: LocalDeployment) -> None:
        self.urls = deployment.urls
        self._deployment = deployment

    def tail(self, size: int = 2000) -> str:
        return "\n".join(child.tail(5)[-size:] for name, child in self._deployment.children.items() if name in PROXIES)


@dataclass(eq=False)
class World:
    """One round: a deployment, its clients, and what was noted of them."""

    folder: Path
    deployment: SoakDeployment
    names: NameServer
    relays: dict[tuple[str, str], Relay]  # by a proxy or nginx, and what it reaches
    http: aiohttp.ClientSession
    rng: random.Random
    told: Told = field(default_factory=Told)
    calls_of: dict[str, list[str]] = field(default_factory=dict)  # acknowledged calls, by session
    phases: list[Phase] = field(default_factory=list)
    between: Phase = field(default_factory=lambda: Phase("between faults"))
    violations: list[str] = field(default_factory=list)
    totals: Counter[str] = field(default_factory=Counter)
    standstill_s: float = 0.0  # the longest time in which this process, which relays everything, got no processor
    _journal: dict[tuple[int, int], dict[str, Any]] = field(default_factory=dict)  # by the engine's life and index
    _next_entry: int = 0

    @property
    def secrets(self) -> dict[str, str]:
        return self.deployment.secrets

    @property
    def store_url(self) -> str:
        """That of the first proxy, for a process that has the machine's names."""
        return self.deployment.store_url.replace(f"postgres.{DOMAIN}", "127.0.0.1")

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        phase = Phase(name, time.time())
        self.phases.append(phase)
        try:
            yield
        finally:
            phase.ended = time.time()

    def phases_at(self, moment: float) -> list[Phase]:
        return [phase for phase in self.phases if phase.began <= moment < phase.ended] or [self.between]

    @property
    def now(self) -> str:
        """The names of the phases that are under way."""
        return named(self.phases_at(time.time()))

    def violated(self, text: str) -> None:
        """Notes a violation of this moment."""
        self.violations.append(f"in {self.now}: {text}")

    def clients(self) -> Clients:
        clients = Clients(Front(self.deployment), self.http)  # type: ignore[arg-type]
        clients.told = self.told
        return clients

    def child(self, name: str) -> Child:
        return self.deployment.children[name]

    # The engine's journal: what it was asked and what it sampled

    async def collect(self) -> None:
        """Fetches what is new in the engine's journal. An engine that restarts begins another one."""
        process = self.child("engine").process
        life = process.pid if process is not None else 0
        if life not in {one for one, _ in self._journal}:
            self._next_entry = 0
        with suppress(aiohttp.ClientError, TimeoutError):
            value = await self.engine("GET", f"/scripted/log?first={self._next_entry}")
            for entry in value["requests"]:
                self._journal[(life, entry["index"])] = entry
            running = (entry["index"] for entry in value["requests"] if entry["outcome"] == "running")
            self._next_entry = min(running, default=value["count"])

    @property
    def journal(self) -> list[dict[str, Any]]:
        """The entries that are whole."""
        return [entry for entry in self._journal.values() if entry["outcome"] != "running"]

    @property
    def cut_short(self) -> dict[str, list[int]]:
        """By call, what an engine had sampled when it was last asked, before it was killed."""
        return {entry["id"]: entry["output_ids"] for entry in self._journal.values() if entry["outcome"] == "running"}

    async def engine(self, method: str, path: str, body: Any = None) -> Any:
        """A request to the engine, past all proxies."""
        url = self.deployment.layout.url("engine") + path
        headers = {"authorization": f"Bearer {self.secrets['engine_password']}"}
        limit = aiohttp.ClientTimeout(total=10)
        async with self.http.request(method, url, json=body, headers=headers, timeout=limit) as response:
            return json.loads(await response.read() or b"null")


@asynccontextmanager
async def a_world(variant: Variant, seed: str) -> AsyncIterator[World]:
    """The deployment, up and watched over, in a folder that goes with it."""
    async with AsyncExitStack() as stack:
        folder = stack.enter_context(open_folder())
        ports = free_ports()
        stack.enter_context(mounted({folder / "data" / name: size for name, size in DISKS_MB.items()}))
        names = await stack.enter_async_context(name_server())
        ends = [(proxy, link) for proxy in PROXIES for link in LINKS]
        ends += [("nginx", f"{proxy}.{plane}") for proxy in PROXIES for plane in PLANES]
        relays = {
            (one, other): await stack.enter_async_context(relayed("127.0.0.1", ports[other])) for one, other in ends
        }
        options = LocalOptions(
            folder / "data",
            script=Path(turns.__file__),
            ports=ports,
            redis=variant.redis,
            pinned=variant.pinned,
            elsewhere={
                **{
                    proxy: {link: f"{link}.{DOMAIN}:{relays[proxy, link].own_port}" for link in LINKS}
                    for proxy in PROXIES
                },
                "nginx": {
                    other: f"127.0.0.1:{relay.own_port}" for (one, other), relay in relays.items() if one == "nginx"
                },
            },
            environment={
                "ROLLTAP_ENGINES__MAIN__FIRST_BYTE_S": "15",
                "ROLLTAP_ENGINES__MAIN__IDLE_S": "10",
                "ROLLTAP_LIMITS__DRAIN_S": "60",
            },
        )
        deployment = SoakDeployment(options, resolv_conf=names.configuration(folder))
        await asyncio.to_thread(deployment.start, lambda name: None)
        deployment.start_node()
        http = await stack.enter_async_context(aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)))
        world = World(folder, deployment, names, relays, http, random.Random(seed))
        watching = [asyncio.create_task(_watch(world)), asyncio.create_task(_collect(world))]
        try:
            yield world
        finally:
            for task in watching:
                task.cancel()
            await asyncio.gather(*watching, return_exceptions=True)
            await asyncio.to_thread(deployment.stop)


async def _watch(world: World) -> None:
    looked_at = time.monotonic()
    while True:
        world.totals["started again"] += len(world.deployment.look())
        await asyncio.sleep(LOOK_EVERY_S)
        before, looked_at = looked_at, time.monotonic()
        world.standstill_s = max(world.standstill_s, looked_at - before - LOOK_EVERY_S)


async def _collect(world: World) -> None:
    while True:
        await world.collect()
        await asyncio.sleep(COLLECT_EVERY_S)
