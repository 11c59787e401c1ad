"""The trainer's side of the contract: typed clients of the trainer plane, blocking and asynchronous.

Our own trainer uses nothing else, so any other trainer can do what it does (docs/bring-your-own-trainer.md). Delivery
is at least once, the effect exactly once, if a trainer

1. acknowledges a lease *before* it applies the update made from it, and forgets the update where that is refused;
2. calls `rewind(step, versions)` after restoring the checkpoint of `step`, before anything else;
3. keeps its name over restarts and shares it with no other running trainer.

A server that can't be reached, or whose store or engine can't, is tried again for `patience` seconds. That is safe for
every call: repeating one that was carried out changes nothing, except that a repeated `lease` may leave groups claimed
until their time is over, and a repeated `nack` or `release` of a lease that has ended raises `LeaseLost`. `receive`
alone is sent once.
"""

from __future__ import annotations

import asyncio
import http.client
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import TypeVar

import aiohttp

from rolltap.errors import EngineUnavailable, RolltapError, ServerUnreachable, StoreUnavailable
from rolltap.trainer_client import protocol
from rolltap.trainer_client.protocol import Broadcast, LeaseOptions, PauseMode, PolicyInfo, Request, Rewound
from rolltap.types import Lease

T = TypeVar("T")


class TrainerClient:
    """Blocking calls to one server, as the trainer called `trainer`. May be shared by threads.

    `timeout` is how long one answer may take, in seconds.
    """

    def __init__(self, url: str, key: str, trainer: str, *, timeout: float = 120.0, patience: float = 60.0) -> None:
        self.url = url.rstrip("/")
        self.trainer = trainer
        self._headers = _headers(key)
        self._timeout = timeout
        self._patience = patience
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def lease(self, policy: str, *, groups: int, options: LeaseOptions | None = None) -> Lease | None:
        """Up to `groups` whole groups; None if there are none within `options.wait` seconds."""
        return self._send(protocol.lease(self.trainer, policy, groups, options or LeaseOptions()))

    def extend(self, lease: Lease, ttl: float = 600.0) -> float:
        """Keeps the lease for `ttl` seconds from now, which it returns; `LeaseLost` if it is no longer ours."""
        return self._send(protocol.extend(lease, ttl))

    def ack(self, lease: Lease, step: int) -> int:
        """The groups become part of `step`; returns how many. `LeaseLost`: they are somebody else's, forget them."""
        return self._send(protocol.ack(lease, step))

    def nack(self, lease: Lease, reason: str, blamed: tuple[str, ...] = ()) -> int:
        """The groups can't be trained. The `blamed` ones (default: all) count a failure; returns how many died."""
        return self._send(protocol.nack(lease, reason, blamed))

    def release(self, lease: Lease) -> None:
        """The groups were not used: others may have them, and no failure is counted."""
        self._send(protocol.release(lease))

    def rewind(self, step: int, versions: Mapping[str, int]) -> Rewound:
        """The checkpoint of `step` was restored, of `versions` by policy: what was acknowledged after it can be leased
        again, and later versions are abandoned. The reply says under which number the restored weights go on.
        """
        return self._send(protocol.rewind(self.trainer, step, versions))

    def policy(self, name: str) -> PolicyInfo:
        """The policy; `UnknownPolicy` lists the known ones."""
        return self._send(protocol.policy(name))

    def begin_update(self, policy: str, mode: PauseMode = "keep") -> None:
        """Pauses the policy's engines."""
        self._send(protocol.begin_update(policy, mode))

    def push(self, policy: str, path: str, version: int, *, adapter: bool = False) -> None:
        """The engines load the safetensors folder `path` (as they see it), a model's or a peft adapter's; if that fails
        the old version serves on."""
        self._send(protocol.push(policy, path, version, adapter))

    def ranks(self, policy: str) -> int:
        """How many processes of the policy's engines would receive a broadcast now."""
        return self._send(protocol.ranks(policy))

    def receive(self, policy: str, version: int, broadcast: Broadcast) -> None:
        """The engines join the group and receive the weights while the trainer sends them; returns when they serve
        them. `WeightsLost`: no engine serves until a whole push. Any other error: the old version serves on."""
        self._send(protocol.receive(policy, version, broadcast))

    def finish_update(self, policy: str) -> None:
        """The policy's engines go on; `WeightsLost` if the last transfer of weights broke off."""
        self._send(protocol.finish_update(policy))

    def _send(self, request: Request[T]) -> T:
        pause, deadline = protocol.FIRST_RETRY_S, time.monotonic() + self._patience
        while True:
            try:
                return request.parse(self._once(request))
            except (OSError, http.client.HTTPException, StoreUnavailable, EngineUnavailable) as error:
                if request.once or time.monotonic() + pause > deadline:
                    raise _given_up(self.url, error) from error
                time.sleep(pause)
                pause = min(2 * pause, protocol.LONGEST_RETRY_S)

    def _once(self, request: Request[T]) -> bytes:
        outgoing = urllib.request.Request(
            self.url + request.path, method=request.method, data=request.content, headers=self._headers
        )
        try:
            with self._opener.open(outgoing, timeout=self._timeout + request.wait) as response:
                return response.read()
        except urllib.error.HTTPError as error:
            raise protocol.error_of(error.code, error.read()) from None


class AsyncTrainerClient:
    """The same calls for asyncio, over one connection pool: `async with AsyncTrainerClient(...) as client`."""

    def __init__(self, url: str, key: str, trainer: str, *, timeout: float = 120.0, patience: float = 60.0) -> None:
        self.url = url.rstrip("/")
        self.trainer = trainer
        self._headers = _headers(key)
        self._timeout = timeout
        self._patience = patience
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> AsyncTrainerClient:
        self._session = aiohttp.ClientSession(headers=self._headers)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Closes the connections."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def lease(self, policy: str, *, groups: int, options: LeaseOptions | None = None) -> Lease | None:
        """See `TrainerClient.lease`; the same holds for every method here."""
        return await self._send(protocol.lease(self.trainer, policy, groups, options or LeaseOptions()))

    async def extend(self, lease: Lease, ttl: float = 600.0) -> float:
        return await self._send(protocol.extend(lease, ttl))

    async def ack(self, lease: Lease, step: int) -> int:
        return await self._send(protocol.ack(lease, step))

    async def nack(self, lease: Lease, reason: str, blamed: tuple[str, ...] = ()) -> int:
        return await self._send(protocol.nack(lease, reason, blamed))

    async def release(self, lease: Lease) -> None:
        await self._send(protocol.release(lease))

    async def rewind(self, step: int, versions: Mapping[str, int]) -> Rewound:
        return await self._send(protocol.rewind(self.trainer, step, versions))

    async def policy(self, name: str) -> PolicyInfo:
        return await self._send(protocol.policy(name))

    async def begin_update(self, policy: str, mode: PauseMode = "keep") -> None:
        await self._send(protocol.begin_update(policy, mode))

    async def push(self, policy: str, path: str, version: int, *, adapter: bool = False) -> None:
        await self._send(protocol.push(policy, path, version, adapter))

    async def ranks(self, policy: str) -> int:
        return await self._send(protocol.ranks(policy))

    async def receive(self, policy: str, version: int, broadcast: Broadcast) -> None:
        await self._send(protocol.receive(policy, version, broadcast))

    async def finish_update(self, policy: str) -> None:
        await self._send(protocol.finish_update(policy))

    async def _send(self, request: Request[T]) -> T:
        pause, deadline = protocol.FIRST_RETRY_S, time.monotonic() + self._patience
        while True:
            try:
                body = await self._once(request)
                return await asyncio.to_thread(request.parse, body)
            except (OSError, aiohttp.ClientError, StoreUnavailable, EngineUnavailable) as error:
                if request.once or time.monotonic() + pause > deadline:
                    raise _given_up(self.url, error) from error
                await asyncio.sleep(pause)
                pause = min(2 * pause, protocol.LONGEST_RETRY_S)

    async def _once(self, request: Request[T]) -> bytes:
        if self._session is None:
            raise RuntimeError("use AsyncTrainerClient as a context manager: async with AsyncTrainerClient(...)")
        limit = aiohttp.ClientTimeout(total=self._timeout + request.wait)
        url = self.url + request.path
        async with self._session.request(request.method, url, data=request.content, timeout=limit) as response:
            body = await response.read()
            if response.status >= 400:
                raise protocol.error_of(response.status, body)
            return body


def _headers(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}", "content-type": "application/json"}


def _given_up(url: str, error: Exception) -> RolltapError:
    if isinstance(error, RolltapError):
        return error
    reason = getattr(error, "reason", None) or error or type(error).__name__
    return ServerUnreachable(f"no rolltap server at {url} ({reason}); start one with `rolltap serve`, or check --url")
