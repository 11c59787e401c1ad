"""Compresses column values of the call log, and decompresses them.

* `pack_bytes`: a mark byte, then the plain bytes (mark 0) or a zstd frame (mark 1). Empty stays empty.
* `pack_ids`, `pack_floats`: the same, or (mark 2) a zstd frame of the little-endian array's byte planes: all lowest
  bytes first, then the next ones. That makes token ids about a third smaller. One dimension, 4-byte items.
* `pack_arrays`: named arrays of any type and shape, as msgpack of their buffers inside `pack_bytes`.

Bytes that cannot be decoded raise `RecordCorrupt`.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np
import zstandard

from rolltap.decoding import msgpack_decoder
from rolltap.errors import RecordCorrupt
from rolltap.types import Float32, Int32

LEVEL = 1
TINY = 512
"""Minimum size for compression. zstd takes 4 µs for any input and would save under 200 bytes below this."""

MAX_DECODED_BYTES = 8 << 30

_PLAIN, _ZSTD, _PLANES = b"\0", b"\1", b"\2"


class _Tools(threading.local):
    """One compressor and one decompressor per thread: they are not thread-safe and slow to create."""

    def __init__(self) -> None:
        self.compress = zstandard.ZstdCompressor(level=LEVEL, write_content_size=True).compress
        self.decompress = zstandard.ZstdDecompressor().decompress


_tools = _Tools()


def pack_bytes(data: bytes) -> bytes:
    if not data:
        return b""
    if len(data) >= TINY:
        packed = _tools.compress(data)
        if len(packed) < len(data):
            return _ZSTD + packed
    return _PLAIN + data


def unpack_bytes(packed: bytes) -> bytes:
    if not packed:
        return b""
    mark, body = packed[:1], memoryview(packed)[1:]
    if mark == _PLAIN:
        return bytes(body)
    if mark == _ZSTD:
        return _decompress(body)
    raise RecordCorrupt(f"a stored value begins with an unknown mark {packed[0]}")


def pack_ids(ids: Int32) -> bytes:
    return _pack_array(np.ascontiguousarray(ids, "<i4"))


def unpack_ids(packed: bytes) -> Int32:
    """[n], read-only."""
    return _unpack_array(packed, np.dtype("<i4"))


def pack_floats(values: Float32) -> bytes:
    return _pack_array(np.ascontiguousarray(values, "<f4"))


def unpack_floats(packed: bytes) -> Float32:
    """[n], read-only. NaNs keep their bits."""
    return _unpack_array(packed, np.dtype("<f4"))


def count_packed(head: bytes, size: int) -> int:
    """The number of ids in a value of `pack_ids` of `size` bytes, from its `head`: the first 32 bytes or more."""
    if not size:
        return 0
    if head[:1] == _PLAIN:
        return (size - 1) // 4
    if head[:1] == _PLANES:
        return zstandard.frame_content_size(head[1:]) // 4
    raise RecordCorrupt(f"a stored array of {size} bytes begins with an unknown mark {head[0]}")


def _pack_array(array: np.ndarray[Any, Any]) -> bytes:
    if array.ndim != 1:
        raise RecordCorrupt(f"the array has {array.ndim} dimensions instead of one")
    raw = array.tobytes()
    if len(raw) < TINY:
        return _PLAIN + raw if raw else b""
    planes = np.frombuffer(raw, np.uint8).reshape(-1, array.itemsize).T.tobytes()
    return _PLANES + _tools.compress(planes)


def _unpack_array(packed: bytes, dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    if not packed:
        return np.empty(0, dtype)
    mark, body = packed[:1], memoryview(packed)[1:]
    if mark == _PLANES:
        planes = np.frombuffer(_decompress(body), np.uint8)
        if len(planes) % dtype.itemsize:
            raise RecordCorrupt(f"the {len(planes)} bytes of a stored array are no multiple of a {dtype} item")
        array = np.ascontiguousarray(planes.reshape(dtype.itemsize, -1).T).view(dtype).reshape(-1)
        array.flags.writeable = False
        return array
    if mark == _PLAIN and len(body) % dtype.itemsize == 0:
        return np.frombuffer(body, dtype)
    raise RecordCorrupt(f"a stored value of {len(packed)} bytes is not an array of {dtype}")


def _decompress(body: memoryview) -> bytes:
    try:
        size = zstandard.frame_content_size(body)
        if size > MAX_DECODED_BYTES:
            raise RecordCorrupt(f"a stored value declares {size} bytes, over the limit of {MAX_DECODED_BYTES}")
        return _tools.decompress(body)
    except zstandard.ZstdError as error:
        raise RecordCorrupt(f"cannot decompress a stored value: {error}") from error


class _Array(msgspec.Struct, array_like=True, frozen=True):
    dtype: str
    shape: tuple[int, ...]
    data: bytes


_arrays_decoder = msgpack_decoder(dict[str, _Array])


def pack_arrays(arrays: Mapping[str, np.ndarray[Any, Any]]) -> bytes:
    if not arrays:
        return b""
    encoded = {}
    for name, array in sorted(arrays.items()):
        ordered = np.ascontiguousarray(array)
        ordered = ordered.astype(ordered.dtype.newbyteorder("<"), copy=False)
        encoded[name] = _Array(ordered.dtype.str, ordered.shape, ordered.tobytes())
    return pack_bytes(msgspec.msgpack.encode(encoded))


def unpack_arrays(packed: bytes) -> dict[str, np.ndarray[Any, Any]]:
    """Read-only arrays."""
    if not packed:
        return {}
    try:
        encoded = _arrays_decoder.decode(unpack_bytes(packed))
        return {
            name: np.frombuffer(item.data, np.dtype(item.dtype)).reshape(item.shape) for name, item in encoded.items()
        }
    except (msgspec.MsgspecError, TypeError, ValueError) as error:
        raise RecordCorrupt(f"cannot decode stored arrays: {error}") from error
