"""The binary form of leases and trajectories, sent and stored: msgpack with arrays as raw buffers, compressed by zstd.

Arrays are little-endian and C-ordered: `{"dtype", "shape", "data"}`. Decoding constructs the types of `rolltap.types`,
so a misaligned payload raises `AlignmentError` at decoding and does not reach a trainer.
"""

from __future__ import annotations

from typing import Any, TypeVar, get_origin

import msgspec
import numpy as np
import zstandard

from rolltap.decoding import msgpack_decoder
from rolltap.errors import AlignmentError

T = TypeVar("T")

CONTENT_TYPE = "application/vnd.rolltap+msgpack+zstd"
COMPRESSION_LEVEL = 1
MAX_DECODED_BYTES = 8 << 30


def _encode_array(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        array = np.ascontiguousarray(value)
        if array.dtype.byteorder == ">":
            array = array.astype(array.dtype.newbyteorder("<"))
        return {"dtype": array.dtype.str, "shape": list(array.shape), "data": array.tobytes()}
    raise NotImplementedError(f"rolltap's wire format has no form for {type(value).__name__}")


def _decode_array(expected: type, value: Any) -> Any:
    if get_origin(expected) is np.ndarray or expected is np.ndarray:
        array = np.frombuffer(value["data"], dtype=np.dtype(value["dtype"]))
        return array.reshape(value["shape"])
    raise NotImplementedError(f"rolltap's wire format can't make a {expected}")


def pack(value: Any) -> bytes:
    """Any type of `rolltap.types` (or a plain structure of them) as compressed bytes."""
    raw = msgspec.msgpack.encode(value, enc_hook=_encode_array)
    return zstandard.ZstdCompressor(level=COMPRESSION_LEVEL).compress(raw)


def unpack(data: bytes, kind: type[T]) -> T:
    """The `kind` that `pack` made `data` from; `AlignmentError` if it does not hold together."""
    try:
        raw = zstandard.ZstdDecompressor().decompress(data, max_output_size=MAX_DECODED_BYTES)
        return msgpack_decoder(kind, _decode_array).decode(raw)
    except (zstandard.ZstdError, msgspec.MsgspecError, KeyError, TypeError, ValueError) as error:
        raise AlignmentError(f"not a rolltap {kind.__name__} payload: {error}") from error
