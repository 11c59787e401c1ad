"""Converts facts of the call log to table rows and back. No other module does that.

A row is a tuple in the order of its table's columns. Text that a database cannot hold (lone surrogates, NUL) raises
`ValueError` before any row is written.
"""

from __future__ import annotations

import hashlib
import logging
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any, TypeVar

import msgspec

from rolltap.calllog.base import CallCompletion, CallIntent, RequestParts
from rolltap.calllog.codec import (
    pack_arrays,
    pack_bytes,
    pack_floats,
    pack_ids,
    unpack_arrays,
    unpack_bytes,
    unpack_floats,
    unpack_ids,
)
from rolltap.calllog.facts import Delivery, same_fact
from rolltap.calllog.schema import call_intents
from rolltap.decoding import convert, from_json, msgpack_decoder
from rolltap.errors import RecordCorrupt
from rolltap.log_check import UNCHECKED, LogCheck
from rolltap.types import Break, BreakReason, CallKind, CallShape, Finish, Flaw, Outcome, Session, VersionSpan

Row = tuple[Any, ...]
S = TypeVar("S", bound=msgspec.Struct)

LARGE = 1024
"""Request parts of this many bytes or more are stored once, by content hash."""


class IntentDetail(msgspec.Struct, frozen=True, omit_defaults=True):
    """The fields of an intent that no query needs."""

    dialect: str
    body_hash: str = ""
    sampling_asked: dict[str, Any] = {}
    sampling_sent: dict[str, Any] = {}
    hints: dict[str, str] = {}
    break_: tuple[str, str, str | None, int, int | None] | None = None
    shape: dict[str, Any] = {}  # the fields of `CallShape` that are not its defaults


class CompletionDetail(msgspec.Struct, frozen=True, omit_defaults=True):
    """The fields of a completion that no query needs."""

    versions: list[tuple[int, int, int]] = []
    usage: dict[str, int] = {}
    error: str = ""
    engine: str = ""
    logprobs_mode: str = ""


class StoredRequest(msgspec.Struct, frozen=True, array_like=True):
    """`RequestParts` without its large parts: the parts at `item_refs` and `fixed_refs` are empty here.

    The row's `part_hashes` has their hashes, in this order.
    """

    head: bytes
    items: list[bytes]
    item_refs: list[int]
    fixed: dict[str, bytes]
    fixed_refs: list[str]


log = logging.getLogger("rolltap.calllog")

HASH_BYTES = 32
_INTENT_COLUMNS = [column.name for column in call_intents.columns]
INTENT_PROCESS, INTENT_HASHES = map(_INTENT_COLUMNS.index, ("process", "part_hashes"))

NOT_READ = RequestParts(b"")
"""Placeholder for the request of an intent that was read without it."""

_json = msgspec.json.Encoder(order="deterministic")
_msgpack = msgspec.msgpack.Encoder()
_request_decoder = msgpack_decoder(StoredRequest)


def session_row(session: Session) -> Row:
    row = (
        session.id,
        session.policy,
        session.key_hash,
        float(session.created_at),
        float(session.expires_at),
        session.rollout_id,
        session.closed_at,
        _json.encode(dict(session.tags)).decode(),
        None if session.log_check == UNCHECKED else log_check_text(session.log_check),
    )
    _key_text(row)
    return row


def read_session(row: Row) -> Session:
    *columns, tags, log_check = row
    return Session(
        *columns,
        tags=_decode(tags, dict[str, str], "session", row[0]),
        log_check=_decode(log_check, LogCheck, "session", row[0]) if log_check else UNCHECKED,
    )


def readable_sessions(rows: Iterable[Row]) -> Iterator[Session]:
    """The sessions for a list: one that can't be read is left out, and logged, so that the others are shown."""
    for row in rows:
        try:
            yield read_session(tuple(row))
        except RecordCorrupt as error:
            log.warning("a list leaves out a session: %s", error.message)


def log_check_text(check: LogCheck) -> str:
    """A log check as text for its column."""
    return _json.encode(check).decode()


def split_request(request: RequestParts) -> tuple[StoredRequest, list[bytes]]:
    """The stored form of a request, and its large parts."""
    items, fixed = list(request.items), dict(request.fixed)
    item_refs = [index for index, item in enumerate(items) if len(item) >= LARGE]
    fixed_refs = [name for name, part in fixed.items() if len(part) >= LARGE]
    parts = [items[index] for index in item_refs] + [fixed[name] for name in fixed_refs]
    for index in item_refs:
        items[index] = b""
    for name in fixed_refs:
        fixed[name] = b""
    return StoredRequest(request.head, items, item_refs, fixed, fixed_refs), parts


def join_request(request: StoredRequest, items_shared: int, parts: Sequence[bytes]) -> RequestParts:
    """The request with its large parts: the inverse of `split_request`."""
    items, fixed = list(request.items), dict(request.fixed)
    for index, part in zip(request.item_refs, parts, strict=False):
        items[index] = part
    for name, part in zip(request.fixed_refs, parts[len(request.item_refs) :], strict=True):
        fixed[name] = part
    return RequestParts(request.head, tuple(items), items_shared, fixed)


def part_hash(part: bytes) -> bytes:
    return hashlib.sha256(part).digest()


def split_hashes(part_hashes: bytes) -> list[bytes]:
    """The hashes of a row's `part_hashes`."""
    return [part_hashes[start : start + HASH_BYTES] for start in range(0, len(part_hashes), HASH_BYTES)]


def read_request(call_id: str, row: tuple[int, bytes, bytes], parts: Mapping[bytes, bytes]) -> RequestParts:
    """The request of a row (`items_shared`, `part_hashes`, `request`), with its large parts from `parts`."""
    items_shared, part_hashes, packed = row
    try:
        stored = _request_decoder.decode(unpack_bytes(packed))
        large = [parts[digest] for digest in split_hashes(part_hashes)]
        return join_request(stored, items_shared, large)
    except (msgspec.MsgspecError, IndexError, ValueError) as error:
        raise RecordCorrupt(f"call {call_id}: cannot decode its request: {error}") from error
    except KeyError as error:
        raise RecordCorrupt(f"call {call_id}: request part {error.args[0].hex()} is not in the log") from None


def intent_row(intent: CallIntent) -> tuple[Row, dict[bytes, bytes]]:
    """The row of an intent, and the large parts of its request by hash."""
    request, parts = split_request(intent.request)
    hashes = [part_hash(part) for part in parts]
    at = intent.break_
    detail = IntentDetail(
        dialect=intent.dialect,
        body_hash=intent.body_hash,
        sampling_asked=dict(intent.sampling_asked),
        sampling_sent=dict(intent.sampling_sent),
        hints=dict(intent.hints),
        break_=(at.reason, at.call_id, at.parent_id, at.token_index, at.message_index) if at else None,
        shape=_packed_shape(intent.shape),
    )
    key = (
        intent.id,
        intent.session_id,
        intent.process,
        float(intent.created_at),
        intent.policy,
        intent.kind.value,
        intent.agent,
        intent.parent_id,
        int(intent.shared),
        int(intent.request.items_shared),
    )
    body = (
        _json.encode(detail).decode(),
        b"".join(hashes),
        pack_bytes(intent.lineage),
        pack_ids(intent.new_ids),
        pack_bytes(_msgpack.encode(request)),
    )
    return (*key, checksum(key, body), *body), dict(zip(hashes, parts, strict=True))


def read_intent(row: Row, parts: Mapping[bytes, bytes] | None) -> CallIntent:
    """The intent of a row, without its request if `parts` is None. Raises `RecordCorrupt` for a wrong checksum."""
    (call_id, session_id, process, created_at, policy, kind, agent, parent_id, shared, items_shared) = row[:10]
    check("call", row, 10)
    packed_detail, part_hashes, lineage, new_ids, request = row[11:]
    detail = _decode(packed_detail, IntentDetail, "call", call_id)
    break_ = Break(BreakReason(detail.break_[0]), *detail.break_[1:]) if detail.break_ else None
    return CallIntent(
        id=call_id,
        session_id=session_id,
        process=process,
        created_at=created_at,
        policy=policy,
        dialect=detail.dialect,
        new_ids=unpack_ids(new_ids),
        request=NOT_READ if parts is None else read_request(call_id, (items_shared, part_hashes, request), parts),
        parent_id=parent_id,
        shared=shared,
        break_=break_,
        kind=CallKind(kind),
        agent=agent,
        body_hash=detail.body_hash,
        sampling_asked=detail.sampling_asked,
        sampling_sent=detail.sampling_sent,
        hints=detail.hints,
        shape=_read_shape(detail.shape),
        lineage=unpack_bytes(lineage),
    )


def _packed_shape(shape: CallShape) -> dict[str, Any]:
    return {field.name: value for field in fields(shape) if (value := getattr(shape, field.name)) != field.default}


def _read_shape(packed: Mapping[str, Any]) -> CallShape:
    return convert(packed, CallShape)


def delivery_row(delivery: Delivery) -> Row:
    return (delivery.call_id, bool(delivery.delivered))


def read_delivery(row: Row) -> Delivery:
    call_id, delivered = row
    return Delivery(call_id, bool(delivered))


def completion_row(completion: CallCompletion, *, presumed: bool = False) -> Row:
    detail = CompletionDetail(
        versions=[(span.version, span.start, span.end) for span in completion.versions],
        usage=dict(completion.usage),
        error=completion.error,
        engine=completion.engine,
        logprobs_mode=completion.logprobs_mode,
    )
    key = (
        completion.call_id,
        bool(presumed),
        float(completion.finished_at),
        completion.outcome.value,
        completion.finish.value,
        completion.flaw.value if completion.flaw else None,
    )
    body = (
        _json.encode(detail).decode(),
        pack_ids(completion.output_ids),
        pack_floats(completion.logprobs),
        pack_bytes(completion.message),
        pack_arrays(completion.extras),
    )
    return (*key, checksum(key, body), *body)


def read_completion(row: Row) -> CallCompletion:
    """The completion of a row. Raises `RecordCorrupt` for a wrong checksum."""
    call_id, _presumed, finished_at, outcome, finish, flaw = row[:6]
    check("completion of call", row, 6)
    packed_detail, output_ids, logprobs, message, extras = row[7:]
    detail = _decode(packed_detail, CompletionDetail, "completion of call", call_id)
    return CallCompletion(
        call_id=call_id,
        finished_at=finished_at,
        outcome=Outcome(outcome),
        finish=Finish(finish),
        output_ids=unpack_ids(output_ids),
        logprobs=unpack_floats(logprobs),
        versions=_spans(detail.versions),
        flaw=Flaw(flaw) if flaw else None,
        message=unpack_bytes(message),
        usage=detail.usage,
        error=detail.error,
        engine=detail.engine,
        logprobs_mode=detail.logprobs_mode,
        extras=unpack_arrays(extras),
    )


def _spans(stored: Sequence[tuple[int, int, int]]) -> tuple[VersionSpan, ...]:
    """The version spans of a call. If a version does not fit into int32, they are empty, as if unknown."""
    spans = tuple(VersionSpan(*span) for span in stored)
    return spans if all(span.version < 1 << 31 for span in spans) else ()


def checksum(key: Row, body: Row) -> int:
    """CRC-32 of a row's columns."""
    columns = [column.encode() if isinstance(column, str) else column for column in body]
    return zlib.crc32(b"".join([_key_text(key), *columns]))


def _key_text(key: Row) -> bytes:
    text = "\x1f".join(map(str, key)).encode()
    if b"\0" in text:
        raise ValueError("a NUL character")
    return text


def check(what: str, row: Row, crc_at: int) -> None:
    """Raises `RecordCorrupt` if the checksum in column `crc_at` does not match the other columns."""
    if checksum(row[:crc_at], row[crc_at + 1 :]) != row[crc_at]:
        raise RecordCorrupt(f"{what} {row[0]}: the stored row does not match its checksum")


def _decode(text: str, kind: type[Any], what: str, row_id: str) -> Any:
    try:
        return from_json(text, kind)
    except msgspec.MsgspecError as error:
        raise RecordCorrupt(f"{what} {row_id}: {error}") from error


def same_row(table: str, stored: Row, offered: Row) -> bool:
    """Whether the offered row of `table` repeats the stored one.

    A session's closing time and log check do not count. A stored delivery of True agrees with an offered False, as an
    earlier attempt may have failed.
    """
    if stored == offered:
        return True
    if table == "sessions":
        return stored[:6] == offered[:6] and stored[7] == offered[7]
    if table == "deliveries":
        return stored[0] == offered[0] and bool(stored[1])
    if table == "call_completions":
        return same_fact(read_completion(stored), read_completion(offered))
    if table == "call_intents":  # the large parts are equal if their hashes are
        absent = dict.fromkeys(split_hashes(offered[INTENT_HASHES]), b"")
        same_parts = stored[INTENT_HASHES] == offered[INTENT_HASHES]
        return same_parts and same_fact(read_intent(stored, absent), read_intent(offered, absent))
    return False
