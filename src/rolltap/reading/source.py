"""Where a record is read from: a store, or a running server. Both answer in the types of `rolltap.reading`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol, TypeVar
from urllib.parse import quote

from rolltap import wire
from rolltap.calllog.notes import Note
from rolltap.contract.admin import NewNote
from rolltap.decoding import from_json
from rolltap.http_client import AsyncHttpClient, Request
from rolltap.reading.runs import VersionComparison, VersionRange
from rolltap.reading.types import (
    CallDetail,
    CallTokens,
    CallTurn,
    GroupDetail,
    HarnessMismatch,
    RolloutDetail,
    RunPoint,
    SessionDetail,
    SessionPage,
    SessionQuery,
)
from rolltap.types import Trajectory

T = TypeVar("T")
ASK_AGAIN_S = 0.3


class RecordSource(Protocol):
    """What a `Record` asks. For a store, `rolltap.reading.RecordReader` answers."""

    async def sessions(self, query: SessionQuery) -> SessionPage: ...

    async def settle(self, *, texts: bool = False, show: Callable[[float], None] = ...) -> None:
        """Waits until the list of sessions holds the whole record; `show` is told the share."""
        ...

    async def session(self, session_id: str) -> SessionDetail: ...

    async def transcript(self, session_id: str) -> tuple[CallTurn, ...]: ...

    async def trajectory(self, session_id: str) -> Trajectory: ...

    async def call(self, call_id: str) -> CallDetail: ...

    async def tokens(self, call_id: str, start: int = 0, end: int | None = None) -> CallTokens: ...

    async def group(self, group_id: str) -> GroupDetail: ...

    async def rollout(self, rollout_id: str) -> RolloutDetail: ...

    async def run(self, policy: str, limit: int = 2000) -> tuple[RunPoint, ...]: ...

    async def mismatch(self, policy: str) -> tuple[HarnessMismatch, ...]: ...

    async def compare(self, policy: str, first: VersionRange, second: VersionRange) -> VersionComparison: ...

    async def note(self, note: NewNote) -> Note: ...


class ServerSource:
    """A running server's admin plane, with an admin's or viewer's key."""

    def __init__(self, client: AsyncHttpClient) -> None:
        self._client = client

    async def sessions(self, query: SessionQuery) -> SessionPage:
        fields = {
            "search": query.search,
            "where": " and ".join(query.where),
            "sort": query.sort,
            "descending": str(query.descending).lower(),
            "limit": str(query.limit),
            "offset": str(query.offset),
        }
        return await self._get("/read/sessions", SessionPage, **fields)

    async def settle(self, *, texts: bool = False, show: Callable[[float], None] = lambda share: None) -> None:
        query = SessionQuery(search="a" if texts else "", limit=1)
        while (share := (await self.sessions(query)).indexed) < 1.0:
            show(share)
            await asyncio.sleep(ASK_AGAIN_S)
        show(1.0)

    async def session(self, session_id: str) -> SessionDetail:
        return await self._get(f"/read/sessions/{quote(session_id)}", SessionDetail)

    async def transcript(self, session_id: str) -> tuple[CallTurn, ...]:
        return await self._get(f"/read/sessions/{quote(session_id)}/transcript", tuple[CallTurn, ...])

    async def trajectory(self, session_id: str) -> Trajectory:
        path = f"/read/sessions/{quote(session_id)}/trajectory"
        return await self._client.send(Request("GET", path, parse=lambda body: wire.unpack(body, Trajectory)))

    async def call(self, call_id: str) -> CallDetail:
        return await self._get(f"/read/calls/{quote(call_id)}", CallDetail)

    async def tokens(self, call_id: str, start: int = 0, end: int | None = None) -> CallTokens:
        """The server gives 200,000 at once."""
        path = f"/read/calls/{quote(call_id)}/tokens"
        first = await self._get(path, CallTokens, start=str(start), **({} if end is None else {"end": str(end)}))
        last = first.total if end is None else min(end, first.total)
        tokens = first.tokens
        while first.start + len(tokens) < last:
            more = await self._get(path, CallTokens, start=str(first.start + len(tokens)), end=str(last))
            tokens += more.tokens
        return replace(first, tokens=tokens)

    async def group(self, group_id: str) -> GroupDetail:
        return await self._get(f"/read/groups/{quote(group_id)}", GroupDetail)

    async def rollout(self, rollout_id: str) -> RolloutDetail:
        return await self._get(f"/read/rollouts/{quote(rollout_id)}", RolloutDetail)

    async def run(self, policy: str, limit: int = 2000) -> tuple[RunPoint, ...]:
        return await self._get(f"/read/runs/{quote(policy)}", tuple[RunPoint, ...], limit=str(limit))

    async def mismatch(self, policy: str) -> tuple[HarnessMismatch, ...]:
        return await self._get(f"/read/runs/{quote(policy)}/mismatch", tuple[HarnessMismatch, ...])

    async def compare(self, policy: str, first: VersionRange, second: VersionRange) -> VersionComparison:
        texts = {name: f"{side.first}-{side.last}" for name, side in (("first", first), ("second", second))}
        return await self._get(f"/read/runs/{quote(policy)}/compare", VersionComparison, **texts)

    async def note(self, note: NewNote) -> Note:
        return await self._client.send(
            Request("POST", "/read/notes", note, parse=lambda body: from_json(body, Note), once=True)
        )

    async def _get(self, path: str, kind: type[T], **query: str) -> T:
        parameters = {name: value for name, value in query.items() if value}
        return await self._client.send(Request("GET", path, query=parameters, parse=lambda body: from_json(body, kind)))
