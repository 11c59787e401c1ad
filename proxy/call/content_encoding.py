"""Decodes compressed request bodies within the limit of `limits.body_mb`.

A body is decoded in pieces and refused above the limit: a bomb costs little more than a body of the limit.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from typing import Any

import zstandard

from rolltap.errors import BodyTooLarge, InvalidRequest, UnsupportedEncoding

HEADER = "content-encoding"
PIECE = 1 << 18
"""Bytes that are decoded at a time."""

WINDOW = 1 << 23
"""The most bytes of history that a zstd frame may need (RFC 9659)."""

FED = 256
"""Bytes of a zstd frame that are decoded at a time. Four bytes may become 128 kB, so this may become 8 MB."""

MAX_ENCODINGS = 2


def encodings_of(header: str) -> list[str]:
    """The encodings in the header's order, without `identity`. Raises `UnsupportedEncoding` for an unknown one."""
    names = [name.strip().lower() for name in header.split(",")]
    names = [name for name in names if name not in ("", "identity")]
    unknown = next((name for name in names if name not in DECODERS), None)
    if unknown is not None or len(names) > MAX_ENCODINGS:
        message = f"Content-Encoding: {header[:80]!r} is not supported; send gzip, deflate or zstd, or none"
        raise UnsupportedEncoding(message, param=HEADER)
    return names


def decoded(body: bytes, encodings: list[str], limit: int) -> bytes:
    """The body without its encodings. Raises `BodyTooLarge` above `limit` bytes, `InvalidRequest` for a broken one."""
    for name in reversed(encodings):
        pieces: list[bytes] = []
        size = 0
        try:
            for piece in DECODERS[name](body):
                size += len(piece)
                if size > limit:
                    raise BodyTooLarge(f"the request body is over {limit} bytes without its Content-Encoding")
                pieces.append(piece)
        except (zlib.error, zstandard.ZstdError, EOFError) as error:
            raise InvalidRequest(f"Content-Encoding: the body is not valid {name}: {error}", param=HEADER) from None
        body = b"".join(pieces)
    return body


def _gzip(body: bytes) -> Iterator[bytes]:
    """A gzip file may have several members."""
    while body:
        yield from (inflater := _Inflater(zlib.MAX_WBITS | 16)).pieces(body)
        body = inflater.rest


def _deflate(body: bytes) -> Iterator[bytes]:
    """By the standard a zlib stream; some clients send a bare one."""
    is_zlib = len(body) >= 2 and body[0] & 0x0F == 8 and (body[0] << 8 | body[1]) % 31 == 0
    inflater = _Inflater(zlib.MAX_WBITS if is_zlib else -zlib.MAX_WBITS)
    yield from inflater.pieces(body)
    if inflater.rest:
        raise EOFError("more bytes follow its end")


class _Inflater:
    """One stream of zlib's. `rest`: what follows its end."""

    def __init__(self, wbits: int) -> None:
        self._stream: Any = zlib.decompressobj(wbits)
        self.rest = b""

    def pieces(self, data: bytes) -> Iterator[bytes]:
        while not self._stream.eof:
            piece = self._stream.decompress(data, PIECE)
            data = self._stream.unconsumed_tail
            if not piece and not data and not self._stream.eof:
                raise EOFError("it ends too early")
            yield piece
        self.rest = self._stream.unused_data


def _zstd(body: bytes) -> Iterator[bytes]:
    """A body may have several frames."""
    while body:
        stream: Any = zstandard.ZstdDecompressor(max_window_size=WINDOW).decompressobj()
        fed = 0
        while not stream.eof:
            if fed >= len(body):
                raise EOFError("it ends too early")
            yield stream.decompress(body[fed : fed + FED])
            fed += FED
        body = body[min(fed, len(body)) - len(stream.unused_data) :]


DECODERS: dict[str, Callable[[bytes], Iterator[bytes]]] = {
    "gzip": _gzip,
    "x-gzip": _gzip,
    "deflate": _deflate,
    "zstd": _zstd,
}
