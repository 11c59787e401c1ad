"""A running server as the source of a record."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from rolltap.contract.operations import Operation
from rolltap.http_client import AsyncHttpClient
from rolltap.reading.operations import ReadPlane
from rolltap.reading.types import SessionQuery

ASK_AGAIN_S = 0.3


class ServerSource(ReadPlane):
    """A server's admin plane, with an admin's or viewer's key."""

    def __init__(self, client: AsyncHttpClient) -> None:
        self._client = client

    async def perform(self, operation: Operation, arguments: Sequence[Any]) -> Any:
        return await self._client.send(operation.request(arguments))

    async def settle(self, *, texts: bool = False, show: Callable[[float], None] = lambda share: None) -> None:
        query = SessionQuery(search="a" if texts else "", limit=1)
        while (share := (await self.sessions(query)).indexed) < 1.0:
            show(share)
            await asyncio.sleep(ASK_AGAIN_S)
        show(1.0)
