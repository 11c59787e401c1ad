"""The order of requests, and what became of them.

A client numbers the requests to a model, sends some of them at once, and sends one again when its answer was lost. So a
model's requests are done in the order of their numbers, each once, and their results are kept for a while.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import msgspec
from pydantic import BaseModel
from tinker import types

from rolltap.errors import ConfigError, InvalidRequest, NotFound, RequestError, RolltapError, TrainerError
from rolltap.trainer_client.endpoint.messages import PROTOBUF

log = logging.getLogger("rolltap.tinker")

USERS_FAULT = (RequestError, ConfigError, TrainerError)
MOST_BYTES = 256 << 20
"""Of results that are kept for clients that ask again."""


class ResultGone(RequestError):
    """The result was kept for a while, and is no longer. The SDK makes the request anew."""

    status = 410
    code = "result_gone"


@dataclass(frozen=True, slots=True)
class ResultBody:
    """A body as it is sent."""

    body: bytes
    media_type: str = "application/json"

    @classmethod
    def of(cls, value: BaseModel) -> ResultBody:
        return cls(value.model_dump_json(exclude_none=True).encode())

    @classmethod
    def protobuf(cls, body: bytes) -> ResultBody:
        return cls(body, PROTOBUF)

    @classmethod
    def failed(cls, error: Exception) -> ResultBody:
        """What the SDK's `RequestFailedError` is made of."""
        category = (
            types.RequestErrorCategory.User if isinstance(error, USERS_FAULT) else (types.RequestErrorCategory.Server)
        )
        message = error.message if isinstance(error, RolltapError) else f"{type(error).__name__}: {error}"
        return cls(msgspec.json.encode({"error": message, "category": str(category)}))


class Promises:
    """Requests by their ids. Of those that are done, the newest `MOST_BYTES` of results are kept."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "tinker-training")
        self._pending: dict[str, asyncio.Future[ResultBody]] = {}
        self._done: OrderedDict[str, ResultBody] = OrderedDict()
        self._digests: dict[str, bytes] = {}
        self._settling: set[asyncio.Task[None]] = set()
        self._bytes = 0

    def expect(self, id: str, body: bytes) -> bool:
        """Whether the request is new, and now waited for. `InvalidRequest` if another one had its id."""
        digest = hashlib.sha256(body).digest()
        known = self._digests.setdefault(id, digest)
        if known != digest:
            raise InvalidRequest(f"{id}: another request had this number")
        if known is not digest:
            return False
        self._pending[id] = asyncio.get_running_loop().create_future()
        return True

    def compute(self, id: str, work: Callable[[], ResultBody]) -> None:
        """Has `work` done in the training thread, after what was given to it before."""
        self.settle(id, asyncio.wrap_future(self._thread.submit(work)))

    def settle(self, id: str, answer: Awaitable[ResultBody]) -> asyncio.Task[None]:
        """Keeps the answer when it is there. Cancelling the task cancels the work, which is an answer, too."""
        task = asyncio.ensure_future(self._settle(id, answer))
        self._settling.add(task)
        task.add_done_callback(self._settling.discard)
        return task

    async def wait(self, id: str, seconds: float) -> ResultBody | None:
        """The answer; None if it isn't there in time. `NotFound` for an unknown id, `ResultGone` for an old one."""
        if id in self._done:
            return self._done[id]
        if id in self._pending:
            done, _ = await asyncio.wait([self._pending[id]], timeout=seconds)
            return next(iter(done)).result() if done else None
        if id in self._digests:
            raise ResultGone(f"{id}: the result was kept for a while, and is no longer")
        raise NotFound(f"{id}: no such request; the service may have been started anew")

    def forget(self, session: str) -> None:
        """What a session that has ended was told apart by."""
        for id in [id for id in self._digests if id.startswith(f"{session}:")]:
            del self._digests[id]

    async def close(self) -> None:
        await asyncio.to_thread(self._thread.shutdown, cancel_futures=True)

    async def _settle(self, id: str, answer: Awaitable[ResultBody]) -> None:
        try:
            result = await answer
        except RolltapError as error:
            result = ResultBody.failed(error)
        except asyncio.CancelledError:
            result = ResultBody.failed(InvalidRequest("it was cancelled"))
        except Exception as error:
            log.exception("request %s failed", id)
            result = ResultBody.failed(error)
        self._pending.pop(id).set_result(result)
        self._done[id] = result
        self._bytes += len(result.body)
        while self._bytes > MOST_BYTES and len(self._done) > 1:
            self._bytes -= len(self._done.popitem(last=False)[1].body)


@dataclass(slots=True)
class RequestLane:
    """Requests to one model, each begun when those of lower numbers have been."""

    _next: int = 1
    _early: dict[int, Callable[[], None]] = field(default_factory=dict)

    def add(self, number: int, begin: Callable[[], None]) -> None:
        self._early[number] = begin
        while (ready := self._early.pop(self._next, None)) is not None:
            self._next += 1
            ready()
