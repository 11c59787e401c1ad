"""What a soak breaks. Each injection returns when what it broke is whole again, or is being started again.

`LANES` go on side by side: those of one lane break the same things, and follow each other.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress

import aiohttp

from rolltap.deployment.description import PLANES, PROXIES
from rolltap.deployment.local import Child

from ..faults.processes import children_of, fake_clock
from ..faults.relay import Relay
from .disks import clear, fill
from .failover import KINDS, fail_over, fail_over_redis, home_of
from .people import Trainer
from .world import LINKS, World

Inject = Callable[[World, Trainer], Awaitable[None]]
UP_WITHIN_S = 120.0


async def proxy_killed(world: World, trainer: Trainer) -> None:
    await _ended(world, _proxy(world), signal.SIGKILL)


async def proxy_stopped_in_order(world: World, trainer: Trainer) -> None:
    """As a rolling restart: it drains, and the next one begins when it is back."""
    for name in PROXIES:
        child = world.child(name)
        await _ended(world, child, signal.SIGTERM, within=90)
        await _answers(world, name)


async def proxy_halted(world: World, trainer: Trainer) -> None:
    """It stands still, as in a swapping machine, and comes back believing what it knew."""
    child = _proxy(world)
    child.signal(signal.SIGSTOP)
    await asyncio.sleep(world.rng.uniform(4, 9))
    child.signal(signal.SIGCONT)


async def postgres_killed(world: World, trainer: Trainer) -> None:
    await _ended(world, world.child("postgres"), signal.SIGQUIT, away_s=world.rng.uniform(0, 5))


async def postgres_restarted(world: World, trainer: Trainer) -> None:
    await _ended(world, world.child("postgres"), signal.SIGINT, away_s=world.rng.uniform(0, 2))


async def postgres_silent(world: World, trainer: Trainer) -> None:
    """It answers nothing for longer than the 2 s after which proxies once went on alone."""
    process = world.child("postgres").process
    assert process is not None
    halted = [process.pid, *children_of(process.pid)]
    _send(halted, signal.SIGSTOP)
    await asyncio.sleep(world.rng.uniform(2.5, 5))
    _send(halted, signal.SIGCONT)


async def redis_killed(world: World, trainer: Trainer) -> None:
    await _ended(world, world.child("redis"), signal.SIGKILL, away_s=world.rng.uniform(0, 4))


async def redis_failed_over(world: World, trainer: Trainer) -> None:
    """What the old one acknowledged last may be in the proxies' memory only."""
    await fail_over_redis(world)


async def engine_replaced(world: World, trainer: Trainer) -> None:
    """It comes back with its base weights, as after the eviction of a pod."""
    await world.collect()
    await _ended(world, world.child("engine"), signal.SIGKILL)
    async with asyncio.timeout(UP_WITHIN_S):
        while True:
            with suppress(aiohttp.ClientError, TimeoutError):
                await world.engine("GET", "/weight_info")
                return
            await asyncio.sleep(0.1)


async def engine_given_other_weights(world: World, trainer: Trainer) -> None:
    await world.engine("POST", "/update_weight_version", {"new_version": "99"})
    await asyncio.sleep(4)


async def reading_process_killed(world: World, trainer: Trainer) -> None:
    process = _proxy(world).process
    assert process is not None
    _send(list(children_of(process.pid)), signal.SIGKILL)
    await asyncio.sleep(2)


async def nginx_restarted(world: World, trainer: Trainer) -> None:
    await _ended(world, world.child("nginx"), signal.SIGKILL)
    # Its workers keep the port until they see that it has gone.


async def trainer_killed(world: World, trainer: Trainer) -> None:
    await trainer.kill()
    await asyncio.sleep(1)
    trainer.start()
    await asyncio.sleep(3)


async def store_slow(world: World, trainer: Trainer) -> None:
    relays = [world.relays[proxy, "postgres"] for proxy in PROXIES]
    for relay in relays:
        relay.delay_s = 0.1
    await asyncio.sleep(6)
    for relay in relays:
        relay.delay_s = 0.0


def failover(kind: str) -> Inject:
    async def inject(world: World, trainer: Trainer) -> None:
        await fail_over(world, kind)

    inject.__name__ = f"failover_with_the_old_primary_{kind.replace('-', '_')}"
    return inject


def disk_full(service: str) -> Inject:
    async def inject(world: World, trainer: Trainer) -> None:
        name = world.rng.choice(PROXIES) if service == "proxy" else service
        home = world.deployment.folder / name if service == "proxy" else home_of(world.child(name))
        await asyncio.to_thread(fill, home)
        await asyncio.sleep(world.rng.uniform(5, 9))
        await asyncio.to_thread(clear, home)
        async with asyncio.timeout(UP_WITHIN_S):
            while not world.child(name).alive:  # noqa: ASYNC110  the event is another process's
                await asyncio.sleep(0.1)

    inject.__name__ = f"disk_of_{service}_full"
    return inject


async def clock_stepped(world: World, trainer: Trainer) -> None:
    """One proxy's clock goes by hours and days to and fro."""
    child = _proxy(world)
    clock = world.folder / f"clock-{child.name}"
    true, child.env = child.env, {**child.env, **fake_clock(clock)}
    await _ended(world, child, signal.SIGTERM, within=90)
    await _answers(world, child.name)
    for jump in world.rng.sample([-3600, 3600, 600, -60, 7200, 172_800], 2):
        clock.write_text(f"{jump:+d}")
        await asyncio.sleep(4)
    clock.write_text("+0")
    child.env = true
    await _ended(world, child, signal.SIGTERM, within=90)
    await _answers(world, child.name)


def names_lost(fault: str) -> Inject:
    """Names are not found while the services are, as when a cluster's name server is overloaded; and then again."""

    async def inject(world: World, trainer: Trainer) -> None:
        world.names.fault = fault
        for proxy in PROXIES:
            for link in LINKS:
                relay = world.relays[proxy, link]
                relay.cut()
                relay.is_cut = False  # new connections are wanted
        await asyncio.sleep(world.rng.uniform(5, 8))
        world.names.fault = ""

    inject.__name__ = f"names_{fault}"
    return inject


async def node_killed(world: World, trainer: Trainer) -> None:
    await _ended(world, world.child("node"), signal.SIGKILL)


async def node_halted(world: World, trainer: Trainer) -> None:
    child = world.child("node")
    child.signal(signal.SIGSTOP)
    await asyncio.sleep(6)
    child.signal(signal.SIGCONT)


def link_cut(link: str) -> Inject:
    async def inject(world: World, trainer: Trainer) -> None:
        relay = _link(world, link)
        relay.cut()
        await asyncio.sleep(world.rng.uniform(2, 6))
        relay.is_cut = False

    inject.__name__ = f"link_to_{link}_cut"
    return inject


def link_half_open(link: str) -> Inject:
    """The connections of now carry nothing any more, and nobody is told."""

    async def inject(world: World, trainer: Trainer) -> None:
        _link(world, link).vanish()
        await asyncio.sleep(8)

    inject.__name__ = f"link_to_{link}_half_open"
    return inject


def link_silent(link: str) -> Inject:
    """Packets are lost, of new connections too: a partition."""

    async def inject(world: World, trainer: Trainer) -> None:
        relay = _link(world, link)
        relay.hush()
        await asyncio.sleep(world.rng.uniform(4, 9))
        relay.is_silent = False

    inject.__name__ = f"link_to_{link}_silent"
    return inject


async def link_from_nginx_cut(world: World, trainer: Trainer) -> None:
    """nginx loses one of its proxies, which goes on."""
    relays = _links_from_nginx(world)
    for relay in relays:
        relay.cut()
    await asyncio.sleep(world.rng.uniform(2, 6))
    for relay in relays:
        relay.is_cut = False


async def link_from_nginx_held(world: World, trainer: Trainer) -> None:
    """What nginx and one of its proxies say to each other comes late, all of it."""
    relays = _links_from_nginx(world)
    for relay in relays:
        relay.flowing.clear()
    await asyncio.sleep(world.rng.uniform(4, 9))
    for relay in relays:
        relay.flowing.set()


LANES: Mapping[str, Sequence[Inject]] = {
    "proxies": (
        proxy_killed,
        proxy_stopped_in_order,
        proxy_halted,
        reading_process_killed,
        disk_full("proxy"),
        clock_stepped,
    ),
    "stores": (
        postgres_killed,
        postgres_restarted,
        postgres_silent,
        redis_killed,
        redis_failed_over,
        store_slow,
        *(failover(kind) for kind in KINDS),
        *(disk_full(service) for service in ("postgres", "redis")),
        *(names_lost(fault) for fault in ("silent", "servfail", "nxdomain")),
    ),
    "links": (
        *(link_cut(link) for link in LINKS),
        *(link_half_open(link) for link in LINKS),
        *(link_silent(link) for link in LINKS),
        link_from_nginx_cut,
        link_from_nginx_held,
    ),
    "the rest": (
        engine_replaced,
        engine_given_other_weights,
        nginx_restarted,
        trainer_killed,
        node_killed,
        node_halted,
    ),
}

PAUSES_S = {"proxies": 5.0, "stores": 8.0}
"""After an injection of the lane, where not `PAUSE_S`: without the store, or any proxy, nothing goes on."""

PAUSE_S = 2.0


def needs_redis(inject: Inject) -> bool:
    return "redis" in inject.__name__


def _proxy(world: World) -> Child:
    return world.child(world.rng.choice(PROXIES))


def _link(world: World, link: str) -> Relay:
    return world.relays[world.rng.choice(PROXIES), link]


def _links_from_nginx(world: World) -> list[Relay]:
    """Those to one proxy."""
    proxy = world.rng.choice(PROXIES)
    return [world.relays["nginx", f"{proxy}.{plane}"] for plane in PLANES]


def _send(pids: Sequence[int], number: signal.Signals) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


async def _ended(
    world: World, child: Child, number: signal.Signals, *, away_s: float = 0.0, within: float = 30.0
) -> None:
    """Ends the process; after `away_s` it is started again as any that has ended."""
    child.wanted = False
    child.signal(number)
    process = child.process
    assert process is not None
    if not await asyncio.to_thread(child.wait, within):
        world.violations.append(f"{child.name} did not end within {within:g} s after {number.name}")
        await asyncio.to_thread(child.kill)
    await asyncio.sleep(away_s)
    child.wanted = True
    async with asyncio.timeout(UP_WITHIN_S):
        while child.process is process or not child.alive:  # noqa: ASYNC110  the event is another process's
            await asyncio.sleep(0.05)


async def _answers(world: World, proxy: str) -> None:
    url, said = world.deployment.layout.url(f"{proxy}.admin") + "/ready", "nothing"
    deadline = time.monotonic() + UP_WITHIN_S
    while time.monotonic() < deadline:
        with suppress(aiohttp.ClientError, TimeoutError):
            async with world.http.get(url, timeout=aiohttp.ClientTimeout(total=5)) as response:
                if response.status == 200:
                    return
                said = await response.text()
        await asyncio.sleep(0.1)
    raise TimeoutError(f"{proxy} says {said} after {UP_WITHIN_S:g} s")
