"""What stands around a proxy: a harness that asks, a runner that works on rollouts, a trainer that learns.

Each remembers what it was told (`Told`): that is what must be true afterwards. All are patient: what a dead or refusing
proxy did not answer is tried again.
"""

from __future__ import annotations

import asyncio
import io
import json
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from rolltap import wire
from rolltap.contract.trainer import Lease

from .processes import KEYS, Proxy
from .turns import MARK

PATIENCE_S = 150.0
"""Longer than any outage: on a busy machine the calls of an outage, and the server's recovery, take over 40 s."""

PAUSE_S = 0.05
Messages = list[dict[str, Any]]


@dataclass(slots=True)
class Reply:
    """`ended` is True if the terminal frame came: the call is acknowledged. Status 0: nothing came."""

    status: int = 0
    call_id: str = ""
    text: str = ""
    ended: bool = False
    frames: int = 0
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""


@dataclass(slots=True)
class Told:
    """What clients were told."""

    calls: dict[str, str] = field(default_factory=dict)  # acknowledged call → its text
    sessions: list[str] = field(default_factory=list)
    groups: dict[str, int] = field(default_factory=dict)  # group → n
    finished: dict[str, str] = field(default_factory=dict)  # rollout → status
    rewards: list[str] = field(default_factory=list)
    acked: dict[str, str] = field(default_factory=dict)  # group → lease
    trained: list[str] = field(default_factory=list)  # trained calls of acknowledged leases
    twice: list[str] = field(default_factory=list)  # groups that came again after their acknowledgement


def turn(text: str, **fields: Any) -> dict[str, Any]:
    """A message that the engine answers with `fields` (see `rolltap.engine.scripted.ScriptedReply`)."""
    return {"role": "user", "content": f"{text} {MARK}{json.dumps(fields or {'say': 'ok'})}"}


class Clients:
    """All clients of one proxy."""

    def __init__(self, proxy: Proxy, http: aiohttp.ClientSession) -> None:
        self.proxy = proxy
        self.told = Told()
        self.session_of: dict[str, str] = {}  # by key
        self.incarnation = 0  # of the trainer that owns the policy
        self._http = http

    async def ask(
        self,
        key: str,
        messages: Messages,
        *,
        headers: Mapping[str, str] | None = None,
        leave_after: int | None = None,
        stream: bool = True,
        timeout: float = 30.0,
        **fields: Any,
    ) -> Reply:
        """One call; with `leave_after` the client hangs up after so many frames. Connection errors end the reply."""
        reply = Reply()
        body = {"model": "tiny", "messages": messages, "stream": stream, **fields}
        url = self.proxy.urls["agent"] + "/v1/chat/completions"
        sent = {"authorization": f"Bearer {key}", "content-type": "application/json", **(headers or {})}
        data = io.BytesIO(json.dumps(body).encode())
        limit = aiohttp.ClientTimeout(total=timeout)
        try:
            async with self._http.post(url, data=data, headers=sent, timeout=limit) as response:
                reply.status, reply.headers = response.status, response.headers
                if response.status != 200 or not stream:
                    reply.body = await response.read()
                    _whole(reply)
                    return self._heard(reply)
                if leave_after == 0:
                    return reply
                async for line in response.content:
                    if line.startswith(b"data: "):
                        _frame(reply, line[6:])
                        self._heard(reply)
                        if reply.frames == leave_after:
                            return reply
        except (aiohttp.ClientError, TimeoutError, ConnectionError):
            return reply
        return reply

    def _heard(self, reply: Reply) -> Reply:
        if reply.ended:
            self.told.calls[reply.call_id] = reply.text
        return reply

    async def insist(self, key: str, messages: Messages, **fields: Any) -> Reply:
        """Asks until it is answered to the end, or told that the session is closed."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            reply = await self.ask(key, messages, **fields)
            if reply.ended or reply.status == 409:
                return reply
            assert reply.status in (0, 200, 429, 500, 502, 503, 504), reply
            assert time.monotonic() < deadline, f"no answer within {PATIENCE_S:g} s: {reply}; {self.proxy.tail()}"
            await asyncio.sleep(PAUSE_S)

    async def call(self, plane: str, path: str, body: Any = None, *, method: str = "POST") -> tuple[int, bytes]:
        """A request to the admin or trainer plane, until it is answered with anything but 503."""
        url = self.proxy.urls[plane] + path
        headers = {"authorization": f"Bearer {KEYS[plane]}"}
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                async with self._http.request(method, url, json=body, headers=headers) as response:
                    data = await response.read()
                    if response.status != 503:
                        return response.status, data
            except (aiohttp.ClientError, TimeoutError, ConnectionError) as error:
                data = str(error).encode()
            if time.monotonic() > deadline:
                raise AssertionError(f"{path}: no answer within {PATIENCE_S:g} s: {data!r}; {self.proxy.tail()}")
            await asyncio.sleep(PAUSE_S)

    async def admin(self, path: str, body: Any = None, *, method: str = "POST") -> Any:
        status, data = await self.call("admin", path, body, method=method)
        assert status == 200, (path, status, data)
        return json.loads(data)

    async def open_session(self) -> str:
        """The key."""
        opened = await self.admin("/sessions", {})
        self.told.sessions.append(opened["session_id"])
        self.session_of[opened["key"]] = opened["session_id"]
        return opened["key"]

    async def open_group(self, n: int = 2, **fields: Any) -> Sequence[str]:
        """The ids of its rollouts."""
        group_id = f"group-{uuid.uuid4().hex}"
        body = {"policy": "tiny", "n": n, "task": {"id": "task", "instruction": "do"}, "id": group_id, **fields}
        group = await self.admin("/groups", body)
        self.told.groups[group_id] = n
        return [rollout["id"] for rollout in group["rollouts"]]

    async def start(self, rollout: str) -> tuple[str, int]:
        """A new attempt: its key and number."""
        started = await self.admin(f"/rollouts/{rollout}/start", {})
        self.told.sessions.append(started["session_id"])
        return started["key"], started["attempt"]

    async def roll_out(self, rollout: str, *, calls: int = 2) -> None:
        """One rollout from start to reward and end; an attempt that was overtaken is left."""
        key, attempt = await self.start(rollout)
        messages: Messages = []
        for number in range(calls):
            messages.append(turn(f"step {number} of {rollout}", say=f"answer {number} of {rollout[-6:]}"))
            reply = await self.insist(key, messages)
            if not reply.ended:
                return
            messages.append({"role": "assistant", "content": reply.text})
        reward = {"rollout_id": rollout, "value": float(len(rollout) % 2), "id": f"reward-{rollout}-{attempt}"}
        await self.admin("/rewards", {**reward, "attempt": attempt})
        self.told.rewards.append(reward["id"])
        await self.finish(rollout, attempt)

    async def finish(self, rollout: str, attempt: int) -> None:
        await self.admin(f"/rollouts/{rollout}/finish", {"status": "succeeded", "attempt": attempt})
        self.told.finished[rollout] = "succeeded"

    async def take_over(self, trainer: str = "trainer") -> None:
        """The trainer starts from nothing and owns the policy."""
        body = {"step": 0, "versions": {"tiny": 0}, "run": trainer, "take_over": True}
        status, data = await self.call("trainer", f"/trainers/{trainer}/rewind", body)
        assert status == 200, data
        self.incarnation = json.loads(data)["incarnation"]

    async def lease(self, trainer: str = "trainer", *, groups: int = 4, ttl: float = 60.0) -> Lease | None:
        """What is ready; notes a group that comes again although it was acknowledged."""
        body = {"trainer": trainer, "policy": "tiny", "groups": groups, "wait": 0.2, "at_least": 1, "ttl": ttl}
        body["incarnation"] = self.incarnation
        status, data = await self.call("trainer", "/leases", body)
        assert status in (200, 204), (status, data)
        if status == 204:
            return None
        lease = wire.unpack(data, Lease)
        self.told.twice += [leased.group.id for leased in lease.groups if leased.group.id in self.told.acked]
        return lease

    async def ack(self, lease: Lease, step: int) -> int:
        """The status: 200, or 409 if the lease was lost."""
        body = {"token": lease.token, "step": step, "incarnation": self.incarnation}
        status, _ = await self.call("trainer", f"/leases/{lease.id}/ack", body)
        assert status in (200, 409)
        if status == 200:
            for leased in lease.groups:
                self.told.acked[leased.group.id] = lease.id
                trajectories = [record.trajectory for record in leased.rollouts]
                segments = [segment for trajectory in trajectories for segment in trajectory.segments]
                self.told.trained += [one.call_id for segment in segments for one in segment.turns if one.trained]
        return status

    async def holds(self, lease: Lease) -> bool:
        """Whether the lease is still its trainer's: it can be extended."""
        body = {"token": lease.token, "ttl": 30.0, "incarnation": self.incarnation}
        status, _ = await self.call("trainer", f"/leases/{lease.id}/extend", body)
        return status == 200

    async def learn(self, groups: int, *, ttl: float = 2.0) -> None:
        """Leases and acknowledges until so many more groups are acknowledged."""
        goal, step = len(self.told.acked) + groups, len(self.told.acked)
        deadline = time.monotonic() + PATIENCE_S
        while len(self.told.acked) < goal:
            assert time.monotonic() < deadline, f"{goal - len(self.told.acked)} groups never came"
            lease = await self.lease(ttl=ttl)
            if lease is not None and lease.groups:
                step += 1
                await self.ack(lease, step)


def _whole(reply: Reply) -> None:
    """A reply that was not streamed, or an error."""
    if reply.status == 200:
        value = json.loads(reply.body)
        choice = value["choices"][0]
        reply.call_id, reply.text = value["id"].removeprefix("chatcmpl-"), choice["message"]["content"] or ""
        reply.ended = choice["finish_reason"] is not None


def _frame(reply: Reply, data: bytes) -> None:
    reply.frames += 1
    if data.strip() == b"[DONE]":
        return
    value = json.loads(data)
    if "error" in value:
        reply.body = data
        return
    reply.call_id = value["id"].removeprefix("chatcmpl-")
    for choice in value["choices"]:
        reply.text += choice["delta"].get("content") or ""
        reply.ended = reply.ended or choice["finish_reason"] is not None
