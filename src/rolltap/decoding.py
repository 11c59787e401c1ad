"""Decoders of msgspec types, safe at their first use in several threads; nothing else asks msgspec for one.

When a type is first decoded, msgspec (up to 0.22 at least) describes it and the types within it, and enters the
description before it is complete. A second thread that decodes the type meanwhile follows a null pointer, and the
process ends with a segmentation fault. So types are described here, one at a time, before anything is decoded.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import RLock
from typing import Any, TypeVar, overload

import msgspec

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


def convert(value: Any, kind: type[T], hook: DecodeHook | None = None) -> T:
    """Parsed JSON as `kind`. Raises `msgspec.ValidationError`."""
    json_decoder(kind)  # describes the type
    return msgspec.convert(value, kind, dec_hook=hook)
