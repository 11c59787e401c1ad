"""Decoders of msgspec types that are safe at their first use in several threads. No other module makes a decoder.

When a type is first decoded, msgspec (at least up to 0.22) builds a description of it and of the types inside, and
publishes the description before it is complete. If a second thread decodes the type meanwhile, it follows a null
pointer: the process ends with a segmentation fault. So types are described here, one at a time, before any decoding.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import RLock
from typing import Any, TypeVar, overload

import msgspec
import pydantic_core

T = TypeVar("T")

DecodeHook = Callable[[type, Any], Any]
"""Makes a value of a type that msgspec does not know."""

_description_lock = RLock()
_json: dict[Any, msgspec.json.Decoder[Any]] = {}
_msgpack: dict[Any, msgspec.msgpack.Decoder[Any]] = {}


@overload
def json_decoder(kind: type[T]) -> msgspec.json.Decoder[T]: ...
@overload
def json_decoder(kind: Any) -> msgspec.json.Decoder[Any]: ...
def json_decoder(kind: Any) -> msgspec.json.Decoder[Any]:
    """The decoder of JSON for `kind`, a type or a union of types. Its `decode` raises `msgspec.MsgspecError`."""
    decoder = _json.get(kind)
    if decoder is None:
        with _description_lock:
            decoder = _json.setdefault(kind, msgspec.json.Decoder(kind))
    return decoder


@overload
def msgpack_decoder(kind: type[T], hook: DecodeHook | None = None) -> msgspec.msgpack.Decoder[T]: ...
@overload
def msgpack_decoder(kind: Any, hook: DecodeHook | None = None) -> msgspec.msgpack.Decoder[Any]: ...
def msgpack_decoder(kind: Any, hook: DecodeHook | None = None) -> msgspec.msgpack.Decoder[Any]:
    """The decoder of MessagePack for `kind`, a type or a union of types. Its `decode` raises `msgspec.MsgspecError`."""
    decoder = _msgpack.get((kind, hook))
    if decoder is None:
        with _description_lock:
            decoder = _msgpack.setdefault((kind, hook), msgspec.msgpack.Decoder(kind, dec_hook=hook))
    return decoder


def from_json(data: bytes | str | msgspec.Raw, kind: type[T]) -> T:
    """`data` decoded as `kind`. Raises `msgspec.MsgspecError`."""
    return json_decoder(kind).decode(data)


def from_msgpack(data: bytes, kind: type[T]) -> T:
    """`data` decoded as `kind`. Raises `msgspec.MsgspecError`."""
    return msgpack_decoder(kind).decode(data)


def any_json(data: bytes) -> Any:
    """Parsed JSON of any shape. Raises `msgspec.MsgspecError`, also for what is no UTF-8, and for a nesting that this
    thread's stack has no room for: what was taken at one depth of the stack is read at another.
    """
    try:
        return msgspec.json.decode(data)
    except (UnicodeDecodeError, RecursionError) as error:
        raise msgspec.DecodeError(str(error)) from None


def parse_json(data: bytes) -> Any:
    """Parsed JSON, as fast for every number: msgspec reads one like 2e-308 in 24 µs. Raises `ValueError`.

    A number that no float can hold becomes an infinity.
    """
    return pydantic_core.from_json(data, allow_inf_nan=False)


STRUCTURE = b",:[{"
"""One of them precedes each value of JSON but the first."""


def values_in(raw: bytes) -> int:
    """An upper estimate of the number of values in a piece of JSON, without parsing it."""
    return len(raw) - len(raw.translate(None, STRUCTURE))


def convert(value: Any, kind: type[T], hook: DecodeHook | None = None, *, strict: bool = True) -> T:
    """Parsed JSON as `kind`. Raises `msgspec.ValidationError`.

    Unless it is `strict`, text of a number or a boolean is read as one, and 1.0 as an integer.
    """
    json_decoder(kind)  # describes the type
    return msgspec.convert(value, kind, dec_hook=hook, strict=strict)
