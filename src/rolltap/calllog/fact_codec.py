"""Encodes facts as table rows, and table rows as bytes.

A fact is encoded once to a row of its table. The large parts of an intent's request are separate. The spool, the ingest
stream and the tables all use this form.

As bytes, a fact is the msgpack of `[kind, row, parts]`. It is decoded completely before it is used, so a damaged fact
raises `RecordCorrupt`.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
import sqlalchemy as sa

from rolltap.calllog.base import CallCompletion, CallIntent
from rolltap.calllog.codec import pack_bytes, unpack_bytes
from rolltap.calllog.facts import Delivery, Fact, name_of
from rolltap.calllog.records import (
    INTENT_HASHES,
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
    split_hashes,
)
from rolltap.calllog.schema import call_completions, call_intents, deliveries, sessions
from rolltap.decoding import msgpack_decoder
from rolltap.errors import RecordCorrupt, RolltapError
from rolltap.types import Session

_TABLES = {"session": sessions, "intent": call_intents, "completion": call_completions, "delivery": deliveries}
_KINDS = {table.name: kind for kind, table in _TABLES.items()}
_READ = {"session": read_session, "completion": read_completion, "delivery": read_delivery}


@dataclass(slots=True, eq=False)
class EncodedFact:
    """A row of `table`, and the large parts of an intent's request by hash.

    A store sets `failure` if it refuses this fact but accepts others of the same write.
    """

    table: sa.Table
    row: Row
    parts: Mapping[bytes, bytes] = field(default_factory=dict)
    failure: RolltapError | None = None

    @property
    def name(self) -> str:
        kind = _KINDS[self.table.name]
        return f"session {self.row[0]}" if kind == "session" else f"the {kind} of call {self.row[0]}"


class _Packed(msgspec.Struct, array_like=True, frozen=True):
    kind: str
    row: list[Any]
    parts: list[bytes] = []


_encoder = msgspec.msgpack.Encoder()
_decoder = msgpack_decoder(_Packed)


def encode_fact(fact: Fact) -> EncodedFact:
    """Encodes a fact. Raises `RecordCorrupt` for one that no store can hold."""
    try:
        match fact:
            case CallIntent():
                return EncodedFact(call_intents, *intent_row(fact))
            case CallCompletion():
                return EncodedFact(call_completions, completion_row(fact))
            case Delivery():
                return EncodedFact(deliveries, delivery_row(fact))
            case Session():
                return EncodedFact(sessions, session_row(fact))
    except (TypeError, ValueError, msgspec.MsgspecError) as error:
        raise RecordCorrupt(f"cannot store {name_of(fact)}: {error}") from error


def pack_fact(fact: EncodedFact, without: Container[bytes] = ()) -> bytes:
    """The fact as bytes, without the parts whose hashes are in `without`."""
    parts = [pack_bytes(part) for digest, part in fact.parts.items() if digest not in without]
    return _encoder.encode(_Packed(_KINDS[fact.table.name], list(fact.row), parts))


def unpack_fact(data: bytes) -> EncodedFact:
    """Decodes a fact. Raises `RecordCorrupt` if the bytes are not a fact or a checksum differs."""
    try:
        packed = _decoder.decode(data)
        row: Row = tuple(packed.row)
        if packed.kind == "intent":
            read_intent(row, None)
            parts = {part_hash(part): part for part in map(unpack_bytes, packed.parts)}
            if not parts.keys() <= set(split_hashes(row[INTENT_HASHES])):
                raise RecordCorrupt(f"not a packed fact: call {row[0]} has a request part with another hash")
            return EncodedFact(call_intents, row, parts)
        _READ[packed.kind](row)
        return EncodedFact(_TABLES[packed.kind], row)
    except KeyError as error:
        raise RecordCorrupt(f"not a packed fact: kind {error}") from error
    except (msgspec.MsgspecError, ValueError, TypeError, IndexError) as error:
        raise RecordCorrupt(f"not a packed fact: {error}") from error
