"""Questions about the record, answered in this process or in the reading process.

A question is a method of one of the objects that answer (`RecordReader`, `Pages`, `SessionEnds`, `LocalRebuilder`)
with its arguments, which are plain values. An answer is bytes: a page as HTML, a folder as a zip, arrays in the wire
form, all else as JSON.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from inspect import isfunction
from typing import Any, Concatenate, ParamSpec, Protocol

import msgspec
from starlette.responses import StreamingResponse

from rolltap import wire
from rolltap.calllog.facts import CallLog
from rolltap.contract.admin import ClosedSession, HarnessLog
from rolltap.contract.trainer import Lease, LeaseRequest
from rolltap.decoding import from_json
from rolltap.errors import RecordTooLarge
from rolltap.ledger.rebuilding import (
    BrokenGroups,
    LocalRebuilder,
    OpenedLease,
    TrainedVersions,
    TrajectoriesOf,
    answered,
)
from rolltap.proxy.call.budget import REACHED
from rolltap.reading.log_check import compare, recorded_replies
from rolltap.types import Grade, LogCheck, LogVerdict, SessionFinding, Trajectory

P = ParamSpec("P")
Question = Callable[Concatenate[Any, P], Awaitable[Any]]

TENANT_HEADER = "rolltap-tenant"
"""Header of a question to another process: the tenant that asks."""

TIMELINE_HEADER = "rolltap-timeline"
"""Header of a question to another process: `Database.timeline` of the process that asks."""

JSON, HTML, ZIP = "application/json", "text/html; charset=utf-8", "application/zip"


class Answer:
    """An answer's bytes, as they arrive. Can be read once."""

    def __init__(self, media_type: str, length: int, parts: AsyncIterator[bytes]) -> None:
        self.media_type = media_type
        self._length = length
        self._parts = parts

    async def read(self) -> bytes:
        return b"".join([part async for part in self._parts])

    def response(self) -> StreamingResponse:
        """Returns the answer as the response to a client that asked the same."""
        headers = {"content-length": str(self._length)}
        return StreamingResponse(self._parts, media_type=self.media_type, headers=headers)


class AskRecord(Protocol):
    """Answers questions. Raises what the question's method raises."""

    async def __call__(self, question: Question[P], *args: P.args, **kwargs: P.kwargs) -> Answer: ...


class AskHere:
    """Answers in this process."""

    def __init__(self, *responders: Any) -> None:
        self._responders = {type(each): each for each in responders}

    async def __call__(self, question: Question[P], *args: P.args, **kwargs: P.kwargs) -> Answer:
        responder = next(each for kind, each in self._responders.items() if name_of(question) in names_of(kind))
        media_type, body = await asyncio.to_thread(encode, await question(responder, *args, **kwargs))
        return Answer(media_type, len(body), _once(body))


def name_of(question: Callable[..., Any]) -> str:
    """Returns `Class.method`."""
    return question.__qualname__


def names_of(kind: type) -> dict[str, Callable[..., Any]]:
    """Returns the questions that a class answers, by name."""
    return {
        name_of(method): method
        for name, method in vars(kind).items()
        if isfunction(method) and not name.startswith("_")
    }


def encode(value: Any) -> tuple[str, bytes]:
    """Returns an answer's media type and bytes."""
    if isinstance(value, bytes):
        return ZIP, value
    if isinstance(value, str):
        return HTML, value.encode()
    if isinstance(value, Trajectory | Lease):
        return wire.CONTENT_TYPE, wire.pack(value)
    return JSON, msgspec.json.encode(value)


async def _once(body: bytes) -> AsyncIterator[bytes]:
    yield body


class RemoteRebuilder:
    """See `rolltap.ledger.rebuilding`."""

    def __init__(self, ask: AskRecord) -> None:
        self._ask = ask

    async def trained_versions(self, session_id: str, policy: str) -> TrainedVersions:
        answer = await self._ask(LocalRebuilder.trained_versions, session_id, policy)
        return from_json(await answer.read(), TrainedVersions)

    async def lease(self, request: LeaseRequest, opened: OpenedLease, opened_at: float) -> Lease | BrokenGroups:
        lease = await self.packed_lease(request, opened, opened_at)
        return lease if isinstance(lease, BrokenGroups) else wire.unpack(await lease.read(), Lease)

    async def packed_lease(self, request: LeaseRequest, opened: OpenedLease, opened_at: float) -> Answer | BrokenGroups:
        """Returns the lease as `rolltap.wire` packs it: this process only passes it on."""
        answer = await self._ask(LocalRebuilder.lease, request, opened, opened_at)
        if answer.media_type == wire.CONTENT_TYPE:
            return answer
        return from_json(await answer.read(), BrokenGroups)


class SessionEnds:
    """What the admin plane asks of a session that ends: how it ended, and whether its harness's log agrees.

    Every method takes the id of an existing session.
    """

    def __init__(self, call_log: CallLog, trajectories: TrajectoriesOf) -> None:
        self._log = call_log
        self._trajectories = trajectories

    async def ended(self, session_id: str, has_cap: bool, also: list[str]) -> ClosedSession:
        """Returns how the session ended. `has_cap`: it has a cap of turns, which may have refused calls.

        `also`: the policies that are trained in it beside its own.
        """
        try:
            rows = await self._log.rows(session_id) if has_cap else ()
            (trajectory,) = await self._trajectories([session_id])
        except RecordTooLarge as error:
            finding = SessionFinding(error.code, Grade.FATAL, 1, error.message)
            return ClosedSession(session_id, capped=False, answered=True, findings=(finding,))
        capped = any(REACHED in row.completion.error for row in rows if row.completion)
        others = [(await self._trajectories([session_id], policy))[0] for policy in also if not answered(trajectory)]
        return ClosedSession(session_id, capped, any(map(answered, (trajectory, *others))), trajectory.findings)

    async def compared(self, session_id: str, log: HarnessLog) -> LogCheck:
        """Returns whether `log` agrees with the record."""
        try:
            rows, session = await self._log.rows(session_id), await self._log.session(session_id)
            if session is not None and session.origin is not None:
                rows = [*await self._log.chain(session.origin), *rows]
            (trajectory,) = await self._trajectories([session_id])
            return await asyncio.to_thread(lambda: compare(log, recorded_replies(rows, trajectory)))
        except RecordTooLarge as error:
            return LogCheck(LogVerdict.NONE, error.message)
