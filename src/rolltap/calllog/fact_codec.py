"""One fact as self-contained bytes: what the spool, the ingest stream and exported sessions hold.

msgpack of `[kind, row, parts]`: the row as its table stores it, and the large parts of an intent's request.
"""

from __future__ import annotations

from typing import Any

import msgspec

from rolltap.calllog.base import CallCompletion, CallIntent
from rolltap.calllog.codec import pack_bytes, unpack_bytes
from rolltap.calllog.facts import Delivery, Fact
from rolltap.calllog.records import (
    Row,
    completion_row,
    delivery_row,
    intent_row,
    part_hash,
    read_completion,
    read_delivery,
    read_intent,
    read_session,
    session_row,
)
from rolltap.errors import RecordCorrupt
from rolltap.types import Session


class _Packed(msgspec.Struct, array_like=True, frozen=True):
    kind: str
    row: list[Any]
    parts: list[bytes] = []


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_Packed)


def pack_fact(fact: Fact) -> bytes:
    """`ValueError` or `TypeError` for what no store can hold."""
    return _encoder.encode(_packed(fact))


def _packed(fact: Fact) -> _Packed:
    match fact:
        case CallIntent():
            row, parts = intent_row(fact)
            return _Packed("intent", list(row), [pack_bytes(part) for part in parts.values()])
        case CallCompletion():
            return _Packed("completion", list(completion_row(fact)))
        case Delivery():
            return _Packed("delivery", list(delivery_row(fact)))
        case Session():
            return _Packed("session", list(session_row(fact)))


def unpack_fact(data: bytes) -> Fact:
    """`RecordCorrupt` if the bytes are not those of a fact, or its checksum does not hold."""
    try:
        packed = _decoder.decode(data)
        row: Row = tuple(packed.row)
        match packed.kind:
            case "intent":
                unpacked = [unpack_bytes(part) for part in packed.parts]
                return read_intent(row, {part_hash(part): part for part in unpacked})
            case "completion":
                return read_completion(row)
            case "delivery":
                return read_delivery(row)
            case "session":
                return read_session(row)
    except (msgspec.MsgspecError, ValueError, TypeError, IndexError) as error:
        raise RecordCorrupt(f"not a packed fact: {error}") from error
    raise RecordCorrupt(f"not a packed fact: kind {packed.kind!r}")
