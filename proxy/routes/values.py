"""Request validation: rejects values that a database can't store or JSON can't round-trip."""

from __future__ import annotations

import math
import re
from typing import Annotated, Any

from fastapi import Query, Request

from rolltap.errors import InvalidRequest

MAX_DEPTH = 64
"""Maximum nesting of a body, because later readers recurse."""

SUSPECT_TEXT = (b"\\u0000", b"\\ud", b"\\uD", b"\xed", b"\0", b"NaN", b"Infinity")
SUSPECT_NUMBER = re.compile(rb"[0-9](?:[0-9]{18}|[eE]\+?[0-9]{3})")
"""One of these is in every body with a value to refuse, and in few others: NUL, surrogates, encodings that have NUL
bytes, long integers, infinities."""

INTEGERS = range(-(2**63), 2**63)

VALUES_CHECKED = "values_checked"
"""Request state: the body was already checked while it was read (`rolltap.proxy.routes.slices`)."""

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
