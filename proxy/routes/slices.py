"""Long request bodies are read in slices, between which agents' calls go on.

Decoding and checking 8 MB of JSON in one piece holds the event loop for more than half a second. Here a long body is
cut in small steps (`cutting.py`); its fields, and the items of its lists, are decoded, looked at and validated one by
one. What the route sees, and what it refuses in which words, is the same: an item that is refused here is left as it
is, and refused with the whole body. What would take long in one piece is refused: any key that is known gets this far.
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
from rolltap.proxy.cache_space import values_in
from rolltap.proxy.routes.cutting import Part, cut
from rolltap.proxy.routes.values import VALUES_CHECKED, check_item

T = TypeVar("T")

LONG_BODY = 256 << 10
PIECE_BYTES = 8 << 20
PIECE_VALUES = 500_000
"""How large a piece may be that is decoded at once, and how many values it may hold: those cost the time, not text."""
PARTS = 100_000
"""How many fields and items a long body may have."""

SLICE_S = 0.002
"""How long the event loop is held at a time, about, and for how long it is then left to others."""


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
    """The body as `Request.json` would give it, but for items that are valid: they are objects of their type.

    None where it has to be read whole: it is no JSON object, or holds a value that is refused. Of a list with an item
    that is refused it has no more than that one and those before.
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
        """The lists with an item that is refused."""

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
    """Refuses what would hold the event loop for long; `name` is the field, or the list whose item it is."""
    if len(raw) > LONG_BODY and (len(raw) > PIECE_BYTES or values_in(raw) > PIECE_VALUES):
        raise BodyTooLarge(
            f"{name}: at most {PIECE_BYTES >> 20} MiB and {PIECE_VALUES:,} values in one piece; send less at a time"
        )
