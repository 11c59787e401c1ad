"""The ledger's events as a stream of server-sent events, on the admin plane."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import asdict
from typing import Annotated, Any

from fastapi import APIRouter, Query
from fastapi.responses import StreamingResponse

from rolltap.proxy.routes import answers
from rolltap.proxy.routes.services import Services


def sse_event(kind: str, data: Any, id: int | None = None) -> bytes:
    """One event of a stream."""
    numbered = "" if id is None else f"id: {id}\n"
    return f"{numbered}event: {kind}\ndata: {json.dumps(data)}\n\n".encode()


def event_router(services: Services) -> APIRouter:
    routes = APIRouter(tags=["events"])
    ledger = services.ledger

    @routes.get("/events", response_class=StreamingResponse, responses=answers.events("what happens, as `Event`"))
    async def events(after: Annotated[int | None, Query(ge=0, lt=2**63)] = None) -> StreamingResponse:
        """Streams new events. With `after` (the number of the last event received), also those since then."""
        start = await ledger.events.last() if after is None else after

        async def sse_events() -> AsyncIterator[bytes]:
            async for event in ledger.events.follow(start):
                yield sse_event(event.kind, asdict(event), event.seq)

        return StreamingResponse(sse_events(), media_type="text/event-stream")

    return routes
