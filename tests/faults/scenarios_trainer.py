"""The trainer dies or refuses, a node comes back from the dead, clocks jump."""

from __future__ import annotations

import asyncio
import signal
import sys
from asyncio.subprocess import PIPE, Process
from pathlib import Path
from typing import Any

from .clients import turn
from .processes import fake_clock
from .world import World

ACTORS = Path(__file__).with_name("actors.py")
TTL_S = 4.0
"""Of the lease that its trainer dies with: long enough for an acknowledgement on a machine that is busy."""


async def _actor(*arguments: str) -> Process:
    return await asyncio.create_subprocess_exec(sys.executable, str(ACTORS), *arguments, stdin=PIPE, stdout=PIPE)


async def _says(actor: Process) -> list[str]:
    assert actor.stdout is not None
    return (await asyncio.wait_for(actor.stdout.readline(), 20)).decode().split()


async def _bury(actor: Process) -> None:
    if actor.returncode is None:
        actor.kill()
    await actor.wait()


async def trainer_dies(world: World) -> None:
    """Killed with a lease, while acknowledging it, or after: leased again or not at all, and late words are fenced."""
    clients = world.clients
    rollouts = [one for _ in range(2) for one in await clients.open_group(2)]
    await asyncio.gather(*(clients.roll_out(one, calls=1) for one in rollouts))
    actor = await _actor("trainer", world.proxy.urls["trainer"], "mortal", "1", str(TTL_S))
    _, lease_id, token, *groups = await _says(actor)
    assert len(groups) == 2
    phase = world.rng.choice(["leased", "acknowledging", "acked"])
    assert actor.stdin is not None
    if phase != "leased":
        actor.stdin.write(b"\n")
    if phase == "acknowledging":
        await asyncio.sleep(world.rng.uniform(0, 0.02))
    elif phase == "acked":
        assert await _says(actor) == ["acked"]
    await _bury(actor)
    await asyncio.sleep(0.2)  # a word that was under way has arrived
    body = {"token": int(token), "step": 1}
    statuses = await _statuses(world)
    world.note(f"{phase}: {'/'.join(sorted(set(statuses.values())))}")
    acked = set(statuses.values()) == {"acknowledged"}
    await asyncio.sleep(TTL_S + 0.2)  # the lease's time is over
    status, _ = await clients.call("trainer", f"/leases/{lease_id}/ack", body)
    assert status == (200 if acked else 409), (phase, status)
    if acked:
        assert await clients.lease("other") is None, "what was acknowledged was leased again"
        await clients.take_over("mortal")  # its checkpoint of step 1 was never written
        await clients.take_over()
    await clients.learn(2)
    status, _ = await clients.call("trainer", f"/leases/{lease_id}/ack", body)
    assert status == 409, "the dead trainer's word was taken after its groups went to another"
    await world.check()


async def _statuses(world: World) -> dict[str, str]:
    groups = await world.clients.admin("/read/groups?limit=1000", method="GET")
    return {group["id"]: group["status"] for group in groups}


async def trajectory_is_poison(world: World) -> None:
    """A group that no trainer can use: after three failures it is a dead letter, and the others go on."""
    clients = world.clients
    poison = await clients.open_group(1)
    await clients.roll_out(poison[0], calls=1)
    (bad,) = clients.told.groups
    for attempt in range(3):
        lease = await clients.lease(f"trainer-{world.rng.randrange(2)}")
        assert lease is not None, attempt
        body = {"token": lease.token, "reason": "loss is NaN"}
        status, _ = await clients.call("trainer", f"/leases/{lease.id}/nack", body)
        assert status == 200
    assert await clients.lease() is None
    _, letters = await clients.call("trainer", "/dead-letters", method="GET")
    assert bad.encode() in letters
    good = await clients.open_group(1)
    await clients.roll_out(good[0], calls=1)
    await clients.learn(1)
    assert bad not in clients.told.acked
    await world.check()


async def zombie_returns(world: World) -> None:
    """A halted agent's rollout is given to another; when it wakes, its key and its last word are refused."""
    clients = world.clients
    (rollout,) = await clients.open_group(1)
    old_key, old_attempt = await clients.start(rollout)
    zombie = await _actor("agent", world.proxy.urls["agent"], old_key)
    assert await _says(zombie) == ["200"]
    await asyncio.sleep(world.rng.random() / 10)
    zombie.send_signal(signal.SIGSTOP)
    work = asyncio.create_task(clients.roll_out(rollout))
    if world.rng.random() < 0.5:
        await work
    else:
        await asyncio.sleep(0.2)
    zombie.send_signal(signal.SIGCONT)
    said: list[str] = []
    while "409" not in said:
        said += await _says(zombie)
    await _bury(zombie)
    ending = {"status": "failed", "attempt": old_attempt}
    status, _ = await clients.call("admin", f"/rollouts/{rollout}/finish", ending)
    assert status == 409
    await work
    await clients.learn(1)
    await world.check()


async def clocks_jump(world: World) -> None:
    """The proxy's clock jumps by hours: on Postgres nobody's lease ends, and no child comes before its parent."""
    await world.proxy.kill()
    clock = world.proxy.folder / "clock"
    assert await world.proxy.start(env=fake_clock(clock)), world.proxy.tail()
    clients = world.clients
    key = await clients.open_session()
    messages: list[dict[str, Any]] = []
    await asyncio.gather(*(clients.roll_out(one) for one in await clients.open_group(2)))
    lease = await clients.lease(ttl=30)
    assert lease is not None
    jumps = [0, *world.rng.sample([-3600, 3600, 600, -60, 7200], 2), 0]
    for jump in jumps:
        clock.write_text(f"{jump:+d}")
        await asyncio.sleep(1.1)  # the fake clock looks at its file once a second
        messages.append(turn(f"at {jump}", say=f"it is {jump}"))
        reply = await clients.insist(key, messages)
        messages.append({"role": "assistant", "content": reply.text})
        await asyncio.gather(*(clients.roll_out(one, calls=1) for one in await clients.open_group(1)))
        if world.store != "sqlite":
            assert await clients.holds(lease), f"the lease ended when the clock jumped to {jump:+d} s"
    clock.write_text("+0")
    status = await clients.ack(lease, 1)
    world.note("the lease held" if status == 200 else "the lease ended")
    await clients.learn(len(clients.told.groups) - len(clients.told.acked))
    session = await clients.admin(f"/read/sessions/{clients.session_of[key]}", method="GET")
    ids = [call["id"] for call in session["calls"]]
    assert len(ids) == len(jumps)
    for call in session["calls"][1:]:
        assert call["parent_id"] in ids
    served = [entry for entry in await world.journal() if entry["session"] == clients.session_of[key]]
    assert not [entry for entry in served if entry["extends"] is False], "a jump broke the conversation"
    await world.check()
