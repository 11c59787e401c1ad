"""Request bodies of the trainer and admin planes: read as the types of `rolltap.contract`, and refused in one shape.

Reading a body blocks the event loop. So a long one is read in pieces, each item of its lists of structs (tasks, calls,
entries) by itself, and agents' calls run in between. A piece that would take long is refused, because any caller with a
known key gets this far.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Sequence
from functools import cache
from typing import Annotated, Any, TypeVar, get_args, get_origin

import msgspec
from fastapi import Request
from msgspec.inspect import EnumType, LiteralType, UnionType, type_info

from rolltap.contract.base import MAX_DEPTH, RequestBody
from rolltap.decoding import convert, from_json, parse_json
from rolltap.errors import BodyTooLarge, InvalidRequest
from rolltap.protocols.cache_space import values_in

T = TypeVar("T")
B = TypeVar("B", bound=RequestBody)

LONG_BODY = 16 << 10
"""Shorter bodies are read whole."""
PIECE_BYTES = 8 << 20
"""Limit of a piece that is read in one go; types have a limit of values, which take the time, besides."""
MOST_VALUES = 1_000_000
"""Limit of the values of a body that is read in pieces."""

SLICE_S = 0.002
"""About how long the event loop is blocked at a time, and how long it is then free for others."""

NO_OBJECT = "the body must be a JSON object, sent with Content-Type: application/json"
NUL = re.compile(r"(?<!\\)(?:\\\\)*+\\u0000")
PLACE = " - at `$"
FIELD = re.compile(r"Object (?P<problem>missing required|contains unknown) field `(?P<name>.*)`", re.DOTALL)
NAMES = {int: "int", float: "float", str: "str", bool: "bool", type(None): "null", list: "array", dict: "object"}
FIELD_PROBLEMS = {"missing required": "this field is required", "contains unknown": "there is no such field"}


async def check_parameters(request: Request) -> None:
    """A dependency that refuses text of the path and the query that a database can't store."""
    for name, text in [*request.path_params.items(), *request.query_params.items()]:
        if "\0" in text or any("\ud800" <= character <= "\udfff" for character in text):
            raise InvalidRequest(f"{name}: text with a NUL character or a lone surrogate", param=name)


def body_of(kind: type[B]) -> Callable[[Request], Coroutine[Any, Any, B]]:
    """A dependency that reads the body as `kind`. It raises `InvalidRequest` or `BodyTooLarge`."""

    async def body(request: Request) -> B:
        raw = await request.body()
        media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if not raw or not (media_type == "application/json" or media_type.endswith("+json")):
            raise InvalidRequest(NO_OBJECT)
        return await read_body(raw, kind)

    return body


async def read_body(raw: bytes, kind: type[B]) -> B:
    """The body as `kind`."""
    if len(raw) <= LONG_BODY or (head := _head_of(kind)) is None:
        return _read(raw, kind)
    if values_in(raw) > MOST_VALUES:
        raise BodyTooLarge(f"the body has over {MOST_VALUES:,} values; send fewer at a time")
    try:
        pieces = from_json(raw, head)
    except (ValueError, RecursionError) as error:
        raise _refusal(error, head, "") from None
    values: dict[str, Any] = {}
    for field in msgspec.structs.fields(kind):
        name, piece, item = field.name, getattr(pieces, field.name), _item_of(field.type)
        if item is not None and piece is not msgspec.UNSET:
            values[name] = [_read(bytes(one), item, f"{name}.{at}") async for at, one in paused(enumerate(piece))]
        elif piece is not msgspec.UNSET:
            values[name] = _read(bytes(piece), field.type, name)
    return kind(**values)


async def paused(items: Iterable[T]) -> AsyncIterator[T]:
    """Yields the items, and lets others run now and then."""
    began = time.perf_counter()
    for item in items:
        yield item
        if time.perf_counter() - began > SLICE_S:
            await asyncio.sleep(SLICE_S)
            began = time.perf_counter()


@cache
def _head_of(kind: type[RequestBody]) -> type[msgspec.Struct] | None:
    """`kind` with raw JSON in the place of its fields and of the items of its lists of bodies; None if it has none."""
    fields = []
    for field in msgspec.structs.fields(kind):
        limits = field.type.__metadata__ if get_origin(field.type) is Annotated else (msgspec.Meta(),)
        raw: Any = msgspec.Raw if _item_of(field.type) is None else Annotated[(list[msgspec.Raw], *limits)]
        fields.append((field.name, raw) if field.required else (field.name, raw, msgspec.UNSET))
    if not any(_item_of(field.type) for field in msgspec.structs.fields(kind)):
        return None
    return msgspec.defstruct(kind.__name__, fields, forbid_unknown_fields=True, kw_only=True)


def _item_of(kind: Any) -> type[RequestBody] | None:
    """The type of a list's items, if they are bodies."""
    if get_origin(kind) is Annotated:
        kind = get_args(kind)[0]
    item = get_args(kind)[0] if get_origin(kind) in (list, Sequence) else None
    return item if isinstance(item, type) and issubclass(item, RequestBody) else None


def _read(raw: bytes, kind: Any, name: str = "") -> Any:
    """One piece: the body, or its field or item `name`."""
    most = getattr(kind, "MOST_VALUES", RequestBody.MOST_VALUES)
    if len(raw) > LONG_BODY and (len(raw) > PIECE_BYTES or values_in(raw) > most):
        limits = f"at most {PIECE_BYTES >> 20} MiB and {most:,} values in one piece"
        raise BodyTooLarge(f"{name or 'the body'}: {limits}; send less at a time")
    value = None
    try:
        value = parse_json(raw)
        if b"\\u0000" in raw:
            for field, part in value.items() if isinstance(value, dict) and not name else [(name, value)]:
                if NUL.search(json.dumps({field: part})) is not None:
                    raise InvalidRequest(f"{field}: text with a NUL character", param=field)
        return convert(value, kind, strict=False)
    except ValueError as error:
        raise _refusal(error, kind, name, value) from None


def _refusal(error: Exception, kind: Any, name: str, value: Any = None) -> InvalidRequest:
    """What msgspec says of a piece of the body, with the names of the whole body. `value` is the parsed piece."""
    problem, is_placed, place = str(error).rpartition(PLACE)
    problem, place = (problem, place[:-1]) if is_placed else (place, "")
    path = re.findall(r"[^.\[\]]+|\.\.\.", place)
    if not isinstance(error, msgspec.ValidationError):
        deep = f"nested deeper than {MAX_DEPTH} levels"
        return InvalidRequest(
            f"the body is {deep if 'recursion' in problem else f'not JSON (which has no NaN): {problem}'}"
        )
    if (field := FIELD.fullmatch(problem)) is not None:
        problem, path = FIELD_PROBLEMS[field["problem"]], [*path, field["name"]]
    elif choices := _choices(type_info(kind), path):
        problem += f"; known: {', '.join(choices)}"
    where = ".".join([*([name] if name else []), *_named(path, problem, value)])
    if not where:
        return InvalidRequest(NO_OBJECT)
    return InvalidRequest(f"{where}: {problem}", param=where)


def _named(path: list[str], problem: str, value: Any) -> Iterator[str]:
    """The steps of a path in the parsed `value`. msgspec says `...` for a key: the first with such a value is meant."""
    for step in path:
        if step == "..." and isinstance(value, dict):
            step = next((key for key, each in value.items() if problem.endswith(f"got `{NAMES[type(each)]}`")), "*")
        yield step
        value = value.get(step) if isinstance(value, dict) else value[int(step)] if isinstance(value, list) else None


def _choices(info: Any, path: list[str]) -> list[str]:
    """The values of the enumeration at a path of `info`, a type."""
    if isinstance(info, UnionType):
        return [choice for each in info.types for choice in _choices(each, path)]
    if isinstance(info, LiteralType):
        return list(map(str, info.values))
    if isinstance(info, EnumType):
        return [str(each.value) for each in info.cls]
    if not path:
        return []
    fields = {field.encode_name: field.type for field in getattr(info, "fields", ())}
    inner = fields.get(path[0]) or getattr(info, "item_type", None) or getattr(info, "value_type", None)
    return _choices(inner, path[1:])
