"""Runs requests in order, each of them once, and keeps their results.

A client numbers its requests to a model, has several in flight, and repeats a request if its answer is lost. So a
model's requests run in the order of their numbers, a repeat runs nothing, and results are kept until they take too much
memory.
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
"""Errors that the SDK reports as the user's. All others are the server's."""

MOST_BYTES = 256 << 20
"""The most memory for results. The newest result is kept even if it alone is larger."""


class ResultGone(RequestError):
    """The result was dropped to save memory. The SDK sends the original request again."""

    status = 410
    code = "result_gone"


@dataclass(frozen=True, slots=True)
class ResultBody:
    """A result as the bytes of the reply that delivers it."""

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
        """The result of a request that failed. The SDK raises it as `RequestFailedError`."""
        category = (
            types.RequestErrorCategory.User if isinstance(error, USERS_FAULT) else (types.RequestErrorCategory.Server)
        )
        message = error.message if isinstance(error, RolltapError) else f"{type(error).__name__}: {error}"
        return cls(msgspec.json.encode({"error": message, "category": str(category)}))


class PendingResults:
    """The requests of all clients by id, and their results.

    Results over `MOST_BYTES` in total are dropped, the oldest first. Has the thread that does all training.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "tinker-training")
        self._pending: dict[str, asyncio.Future[ResultBody]] = {}
        self._done: OrderedDict[str, ResultBody] = OrderedDict()
        self._digests: dict[str, bytes] = {}
        self._settling: set[asyncio.Task[None]] = set()
        self._bytes = 0

    def expect(self, id: str, body: bytes) -> bool:
        """Registers a request. False if it repeats an earlier one with the same body.

        Raises `InvalidRequest` if an earlier request with this id had another body.
        """
        digest = hashlib.sha256(body).digest()
        known = self._digests.setdefault(id, digest)
        if known != digest:
            raise InvalidRequest(f"{id}: another request had this number")
        if known is not digest:  # an equal digest, but not this object: it was stored earlier
            return False
        self._pending[id] = asyncio.get_running_loop().create_future()
        return True

    def compute(self, id: str, work: Callable[[], ResultBody]) -> None:
        """Queues `work` for the training thread and settles the request with its result."""
        self.settle(id, asyncio.wrap_future(self._thread.submit(work)))

    def settle(self, id: str, answer: Awaitable[ResultBody]) -> asyncio.Task[None]:
        """Stores the result of `answer` once it is available. An error becomes a failed result.

        Cancelling the returned task cancels `answer`; the request's result then says so.
        """
        task = asyncio.ensure_future(self._settle(id, answer))
        self._settling.add(task)
        task.add_done_callback(self._settling.discard)
        return task

    async def wait(self, id: str, seconds: float) -> ResultBody | None:
        """The result, or None if there is none within `seconds`.

        Raises `NotFound` if the id is unknown, `ResultGone` if the result was dropped.
        """
        if id in self._done:
            return self._done[id]
        if id in self._pending:
            done, _ = await asyncio.wait([self._pending[id]], timeout=seconds)
            return next(iter(done)).result() if done else None
        if id in self._digests:
            raise ResultGone(f"{id}: the result has expired")
        raise NotFound(f"{id}: no such request; the service may have been started anew")

    def forget(self, session: str) -> None:
        """Removes the digests of the requests of a session that has ended."""
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
    """The requests to one model. Each starts after those with lower numbers have started. Numbers begin at 1."""

    _next: int = 1
    _early: dict[int, Callable[[], None]] = field(default_factory=dict)

    def add(self, number: int, begin: Callable[[], None]) -> None:
        self._early[number] = begin
        while (ready := self._early.pop(self._next, None)) is not None:
            self._next += 1
            ready()
