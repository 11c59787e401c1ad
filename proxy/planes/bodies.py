"""Request bodies of the trainer and admin planes: long ones are read in slices, and values that a database can't store
or JSON can't round-trip are refused.

Decoding and checking 8 MB of JSON at once blocks the event loop for more than half a second. Here a long body is cut
in small steps, and its fields and list items are decoded, checked and validated one by one; agents' calls run in
between. The route sees the same body and gives the same errors: an invalid item is left as it is and refused with the
whole body. A single field or item that would take long to decode is refused, because any caller with a known key gets
this far.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
import time
from collections.abc import Callable, Collection, Coroutine, Generator, Iterable, Mapping
from typing import Annotated, Any, NamedTuple, TypeVar

from fastapi import Query, Request, Response
from fastapi.routing import APIRoute
from pydantic import TypeAdapter, ValidationError

from rolltap.errors import BodyTooLarge, InvalidRequest
from rolltap.protocols.cache_space import values_in

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


STEP_BYTES = 64 << 10
STEP_MARKS = 256
"""After this many bytes of one search, or quotes and brackets of one value, other tasks may run."""

SPACE = re.compile(rb"[ \t\r\n]*+")
SCALAR = re.compile(rb'[^ \t\r\n,:"\[\]{}]*+')
MARK = re.compile(rb'"[^"\\]*+"|["\[\]{}]')
"""Text without an escape is one mark."""
TEXT_MARK = re.compile(rb'["\\]')
QUOTE, BACKSLASH, LIST, OBJECT = b'"\\[{'


class Part(NamedTuple):
    """Position of a field's value or, with `is_item`, of an item of its list. An empty item marks the list's start."""

    name: bytes  # the field's, as JSON
    start: int
    end: int
    is_item: bool = False


class MalformedBody(ValueError):
    """The body is not a JSON object, or is malformed."""


Steps = Generator[Part | None, None, int]
"""Yields parts, and None after each step. Returns the end position."""


def cut(body: bytes, lists: Collection[bytes]) -> Steps:
    """Cuts a body of JSON into its parts, in order and without parsing them. `lists`: the names (as JSON) of the fields
    that are cut into items.

    Only the characters between the parts are checked. If all parts are valid JSON, so is the body: the caller must
    decode each part strictly.
    """
    at = yield from _space(body, 0)
    if body[at : at + 1] != b"{":
        raise MalformedBody
    at = yield from _members(body, at + 1, b"}", lists)
    at = yield from _space(body, at)
    if at < len(body):
        raise MalformedBody
    return at


def _members(body: bytes, at: int, closing: bytes, lists: Collection[bytes], name: bytes = b"") -> Steps:
    """The fields of the object that starts before `at` or, with `name`, the items of the list."""
    at = yield from _space(body, at)
    if body[at : at + 1] == closing:
        return at + 1
    while True:
        if name:
            start, at = at, (yield from _value(body, at))
            yield Part(name, start, at, is_item=True)
        else:
            at = yield from _field(body, at, lists)
        at = yield from _space(body, at)
        after, at = body[at : at + 1], at + 1
        if after == closing:
            return at
        if after != b",":
            raise MalformedBody
        at = yield from _space(body, at)


def _field(body: bytes, at: int, lists: Collection[bytes]) -> Steps:
    start, at = at, (yield from _value(body, at))
    name = body[start:at]
    at = yield from _space(body, at)
    if not name.startswith(b'"') or body[at : at + 1] != b":":
        raise MalformedBody
    at = yield from _space(body, at + 1)
    if name in lists and body[at : at + 1] == b"[":
        yield Part(name, at, at, is_item=True)
        return (yield from _members(body, at + 1, b"]", lists, name))
    start, at = at, (yield from _value(body, at))
    yield Part(name, start, at)
    return at


def _value(body: bytes, at: int) -> Steps:
    """Skips one value: a string, a scalar, or an object or list up to its closing bracket."""
    first = body[at : at + 1]
    if first not in (b'"', b"[", b"{"):
        match = SCALAR.match(body, at, at + STEP_BYTES)
        if match is None or not 0 < match.end() - at < STEP_BYTES:
            raise MalformedBody
        return match.end()
    depth, marks, in_text = 0, 0, False
    while at < len(body):
        match = (TEXT_MARK if in_text else MARK).search(body, at, at + STEP_BYTES)
        marks += 1
        if match is None:
            at, marks = at + STEP_BYTES, STEP_MARKS
        else:
            mark, at = body[match.start()], match.end()
            if mark == BACKSLASH:
                at += 1
            elif mark == QUOTE:
                in_text = not in_text and match.end() == match.start() + 1
            else:
                depth += 1 if mark in (LIST, OBJECT) else -1
            if not depth and not in_text:
                return at
        if marks >= STEP_MARKS:
            marks = 0
            yield None
    raise MalformedBody


def _space(body: bytes, at: int) -> Steps:
    while True:
        match = SPACE.match(body, at, at + STEP_BYTES)
        end = match.end() if match else at
        if end < at + STEP_BYTES:
            return end
        at = end
        yield None


MAX_DEPTH = 64
"""Maximum nesting of a body, because later readers recurse."""

SUSPECT_TEXT = (b"\\u0000", b"\\ud", b"\\uD", b"\xed", b"\0", b"NaN", b"Infinity")
SUSPECT_NUMBER = re.compile(rb"[0-9](?:[0-9]{18}|[eE]\+?[0-9]{3})")
"""One of these is in every body with a value to refuse, and in few others: NUL, surrogates, encodings that have NUL
bytes, long integers, infinities."""

INTEGERS = range(-(2**63), 2**63)

VALUES_CHECKED = "values_checked"
"""Request state: the body was already checked while it was read (`rolltap.proxy.planes.bodies`)."""

Limit = Annotated[int, Query(ge=1)]
"""Maximum number of rows in a page."""


async def check_values(request: Request) -> None:
    """A dependency that refuses integers over 64 bits, NaN and infinities, text with NUL or lone surrogates, and bodies
    nested deeper than `MAX_DEPTH`. The route itself checks that the body is JSON."""
    for name, text in [*request.path_params.items(), *request.query_params.items()]:
        _check(text, name)
    if getattr(request.state, VALUES_CHECKED, False):
        return
    raw = await request.body()
    try:
        body = await request.json()
    except RecursionError:
        raise InvalidRequest(f"the body is nested deeper than {MAX_DEPTH} levels") from None
    except ValueError:
        return
    check_body(raw, body)


def check_body(raw: bytes, body: Any) -> None:
    if is_suspect(raw):
        _check_inside(body)
    else:
        _check_depth(body)


def check_item(raw: bytes, item: Any, name: str) -> None:
    """Like `check_body`, for a part of a body: field `name`, or one item of that list."""
    check_body(raw, {name: [item]})


def is_suspect(body: bytes) -> bool:
    """Whether every value of a JSON body must be checked."""
    return any(text in body for text in SUSPECT_TEXT) or SUSPECT_NUMBER.search(body) is not None


def _check_depth(body: Any) -> None:
    """Only looks at objects and lists, not at every value: agents' calls wait meanwhile."""
    level = [body]
    for _ in range(MAX_DEPTH):
        level = [
            inner
            for outer in level
            for inner in (outer.values() if type(outer) is dict else outer if type(outer) is list else ())
            if type(inner) is dict or type(inner) is list
        ]
        if not level:
            return
    raise InvalidRequest(f"the body is nested deeper than {MAX_DEPTH} levels")


def _check_inside(body: Any) -> None:
    """Looks at every value, and at the names of objects."""
    level = [("", body)]
    for _ in range(MAX_DEPTH):
        level = [inner for name, value in level for inner in _inside(name, value)]
        if not level:
            return
        for name, value in level:
            _check(value, name)
    raise InvalidRequest(f"the body is nested deeper than {MAX_DEPTH} levels", param=level[0][0])


def _inside(name: str, value: Any) -> list[tuple[str, Any]]:
    """What an object or a list holds, by the name of the body's field that it is in; an object's names among it."""
    if isinstance(value, dict):
        return [(name or key, part) for key, inner in value.items() for part in (key, inner)]
    return [(name, inner) for inner in value] if isinstance(value, list) else []


def _check(value: Any, name: str) -> None:
    problem = None
    if isinstance(value, str):
        problem = _text_problem(value)
    elif isinstance(value, int) and value not in INTEGERS:
        problem = "an integer of more than 64 bits"
    elif isinstance(value, float) and not math.isfinite(value):
        problem = "not a finite number"
    if problem is not None:
        param = name.encode("ascii", "replace").decode()
        raise InvalidRequest(f"{param}: {problem}", param=param)


def _text_problem(text: str) -> str | None:
    if "\0" in text:
        return "text with a NUL character"
    try:
        text.encode()
    except UnicodeEncodeError:
        return "text with a lone surrogate"
    return None
