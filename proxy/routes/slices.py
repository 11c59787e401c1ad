"""Long request bodies are read in slices, between which agents' calls go on.

Decoding and checking 8 MB of JSON in one piece holds the event loop for more than half a second. Here the items of a
long body's lists are decoded, looked at and validated one by one. What the route sees, and what it refuses in which
words, is the same: an item that is refused here is left as it is, and refused with the whole body. What would take long
in one piece is refused: any key that is known gets this far.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping
from typing import Any, TypeVar

import msgspec
from fastapi import Request, Response
from fastapi.routing import APIRoute
from pydantic import TypeAdapter, ValidationError

from rolltap.errors import BodyTooLarge, InvalidRequest
from rolltap.proxy.cache_space import values_in
from rolltap.proxy.routes.values import VALUES_CHECKED, check_item

T = TypeVar("T")

LONG_BODY = 256 << 10
PIECE_BYTES = 8 << 20
PIECE_VALUES = 500_000
"""How large a piece may be that is decoded at once, and how many values it may hold: those cost the time, not text."""

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

    None where it has to be read whole: it is no JSON object, or holds a value that is refused.
    """
    try:
        fields = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
        body: dict[str, Any] = {}
        for name, value in fields.items():
            if name in adapters and memoryview(value)[:1] == b"[":
                body[name] = []
                entries = msgspec.json.decode(value, type=list[msgspec.Raw])
                await pausing(entries, _adder(body[name], adapters[name], name))
            else:
                _check_piece(bytes(value), name)
                body[name] = json.loads(bytes(value))
                check_item(bytes(value), body[name], name)
    except BodyTooLarge:
        raise
    except (ValueError, RecursionError, InvalidRequest):
        return None
    return body


def _check_piece(raw: bytes, name: str) -> None:
    """Refuses what would hold the event loop for long; `name` is the field, or the list whose item it is."""
    if len(raw) > LONG_BODY and (len(raw) > PIECE_BYTES or values_in(raw) > PIECE_VALUES):
        raise BodyTooLarge(
            f"{name}: at most {PIECE_BYTES >> 20} MiB and {PIECE_VALUES:,} values in one piece; send less at a time"
        )


def _adder(to: list[Any], adapter: TypeAdapter[Any], name: str) -> Callable[[msgspec.Raw], None]:
    def add(entry: msgspec.Raw) -> None:
        raw = bytes(entry)
        _check_piece(raw, name)
        item = json.loads(raw)
        check_item(raw, item, name)
        try:
            to.append(adapter.validate_python(item))
        except (ValidationError, InvalidRequest):
            to.append(item)

    return add
