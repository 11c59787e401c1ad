"""Reads long request bodies in slices, so that agents' calls can run in between.

Decoding and checking 8 MB of JSON at once blocks the event loop for more than half a second. Here a long body is cut
in small steps (`cutting.py`), and its fields and list items are decoded, checked and validated one by one. The route
sees the same body and gives the same errors: an invalid item is left as it is and refused with the whole body. A single
field or item that would take long to decode is refused, because any caller with a known key gets this far.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping
from typing import Any, TypeVar

from fastapi import Request, Response
from fastapi.routing import APIRoute
from pydantic import TypeAdapter, ValidationError

from rolltap.errors import BodyTooLarge, InvalidRequest
from rolltap.protocols.cache_space import values_in
from rolltap.proxy.routes.cutting import Part, cut
from rolltap.proxy.routes.values import VALUES_CHECKED, check_item

T = TypeVar("T")

LONG_BODY = 16 << 10
"""Shorter bodies are read whole."""
PIECE_BYTES = 8 << 20
PIECE_VALUES = 500_000
"""Limits of a piece that is decoded at once: bytes, and values (values take the time, text does not)."""
PARTS = 100_000
"""Limit of fields and items in a long body."""

SLICE_S = 0.002
"""About how long the event loop is blocked at a time, and how long it is then free for others."""


def sliced(items: Mapping[str, Any]) -> type[APIRoute]:
    """A route class; `items` has the type of an item by the name of the list."""
    adapters = {name: TypeAdapter(kind) for name, kind in items.items()}

    class SlicedRoute(APIRoute):
        def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
            handle = super().get_route_handler()

            async def handler(request: Request) -> Response:
                raw = await request.body()
                if len(raw) > LONG_BODY:
                    body = await _read(raw, adapters)
                    if body is not None:
                        request._json = body
                        setattr(request.state, VALUES_CHECKED, True)
                    else:
                        _check_piece(raw, "the body")
                return await handle(request)

            return handler

    return SlicedRoute


async def pausing(items: Iterable[T], each: Callable[[T], Any]) -> None:
    """Calls `each` with every item, and lets others run now and then."""
    began = time.perf_counter()
    for item in items:
        each(item)
        if time.perf_counter() - began > SLICE_S:
            await asyncio.sleep(SLICE_S)
            began = time.perf_counter()


async def _read(raw: bytes, adapters: Mapping[str, TypeAdapter[Any]]) -> dict[str, Any] | None:
    """The body as `Request.json` returns it, except that valid items are objects of their type.

    None if the body must be read as a whole, because it is not a JSON object or contains a refused value. A list with a
    refused item ends with that item.
    """
    fields = _Fields(raw, adapters)
    try:
        await pausing(cut(raw, fields.lists), fields.take)
    except BodyTooLarge:
        raise
    except (ValueError, RecursionError, InvalidRequest):
        return None
    return fields.body


class _Fields:
    """Takes the parts of a body into `body`."""

    def __init__(self, raw: bytes, adapters: Mapping[str, TypeAdapter[Any]]) -> None:
        self.body: dict[str, Any] = {}
        self.lists = {json.dumps(name).encode(): adapter for name, adapter in adapters.items()}
        self._raw = raw
        self._count = 0
        self._ended: set[bytes] = set()
        """The lists that have a refused item."""

    def take(self, part: Part | None) -> None:
        if part is None:
            return
        self._count += 1
        if self._count > PARTS:
            raise BodyTooLarge(f"the body has over {PARTS:,} fields and items; send fewer at a time")
        if part.name in self._ended:
            return
        name = json.loads(part.name.decode())
        if part.is_item and part.start == part.end:
            self.body[name] = []
            return
        raw = self._raw[part.start : part.end]
        _check_piece(raw, name)
        value = json.loads(raw.decode())
        check_item(raw, value, name)
        if not part.is_item:
            self.body[name] = value
            return
        try:
            self.body[name].append(self.lists[part.name].validate_python(value))
        except (ValidationError, InvalidRequest):
            self.body[name].append(value)
            self._ended.add(part.name)


def _check_piece(raw: bytes, name: str) -> None:
    """Refuses a piece that would block the event loop for long. `name` is the field or, for an item, its list."""
    if len(raw) > LONG_BODY and (len(raw) > PIECE_BYTES or values_in(raw) > PIECE_VALUES):
        raise BodyTooLarge(
            f"{name}: at most {PIECE_BYTES >> 20} MiB and {PIECE_VALUES:,} values in one piece; send less at a time"
        )
