"""Annotations: trainers' values for sampled tokens, by call and lease. Append-only, until the call is pruned.

Tokens that the trainer masked have no value: NaN (or -1) in the stored streams, never 0. Annotations of a call under a
later lease do not replace earlier ones; readers show the latest. Mismatch is |log(trainer / engine)|. For `fresh`
tokens, whose weight version is the trainer's, it shows rounding or a difference of the two computations. For older
tokens it also contains the policy's change since then.

`updated_sums` sums the mismatch of a policy by group and harness, incrementally. A run's page reloads every few
seconds. Rows never change, and a later lease has a greater token, so new rows usually have the greatest tokens. It
compares the count and tokens of the rows with those of the previous sums. If only rows with the greatest tokens are
new, it sums their groups again, otherwise all groups.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import sqlalchemy as sa

from rolltap.calllog.codec import (
    CompletionDetail,
    check_columns,
    left_out_if_unreadable,
    pack_arrays,
    unpack_arrays,
    unpack_floats,
    unpack_ids,
)
from rolltap.calllog.schema import annotations, call_completions, call_intents
from rolltap.contract.trainer import AnnotationLine, CallAnnotation
from rolltap.decoding import json_decoder
from rolltap.errors import InvalidRequest, LedgerError, RecordCorrupt
from rolltap.types import NO_VERSION, Float32, Int32

CHUNK = 500
_detail = json_decoder(CompletionDetail)


@dataclass(frozen=True, slots=True)
class AnnotationSource:
    """The lease under which calls are annotated. `sessions` maps its session ids to group and harness."""

    token: int
    lease_id: str
    policy: str
    trainer: str
    step: int | None
    version: int
    sessions: Mapping[str, tuple[str, str]]


@dataclass(frozen=True, slots=True, eq=False)
class AnnotationStreams:
    """A call's streams, each [T] or empty: `logprobs` and `entropy` with NaN, `clipped` with -1 for no value."""

    logprobs: Float32
    entropy: Float32
    clipped: np.ndarray[Any, np.dtype[np.int8]]


@dataclass(frozen=True, slots=True, eq=False)
class _Sampled:
    """A call's recorded tokens: their count, log-probs ([T] or [0]) and versions [T]."""

    session_id: str
    tokens: int
    logprobs: Float32
    versions: Int32


_LINE = [annotations.c[name] for name in AnnotationLine.__slots__]
_TOKEN = sa.cast(annotations.c.token, sa.BigInteger) % (1 << 40)
"""The token itself; a number that can be summed of whatever else SQLite has in the column."""


def append_annotations(
    connection: sa.Connection, now: float, source: AnnotationSource, posted: Sequence[CallAnnotation]
) -> list[AnnotationLine]:
    """Appends all annotations or none; returns those that were not on record yet.

    Raises `InvalidRequest` for calls outside the lease and streams of a wrong length, and `LedgerError` if other values
    are on record for a call under this lease.
    """
    ids = [call.call_id for call in posted]
    sampled = _sampled(connection, ids)
    query = sa.select(annotations.c.call_id, annotations.c.version, annotations.c.streams)
    query = query.where(annotations.c.token == source.token)
    rows_by_call: dict[str, sa.Row[Any]] = {}
    for start in range(0, len(ids), CHUNK):
        of_chunk = query.where(annotations.c.call_id.in_(ids[start : start + CHUNK]))
        rows_by_call |= {row.call_id: row for row in connection.execute(of_chunk)}
    added: list[AnnotationLine] = []
    rows: list[dict[str, Any]] = []
    for call in posted:
        record = sampled.get(call.call_id)
        if record is None or record.session_id not in source.sessions:
            raise InvalidRequest(f"call {call.call_id} is not of lease {source.lease_id}", param="calls")
        if call.tokens != record.tokens:
            raise InvalidRequest(
                f"call {call.call_id} has {record.tokens} sampled tokens, its annotation {call.tokens}; send one value "
                "for each, null for those without",
                param="calls",
            )
        streams = call.arrays()
        packed = pack_arrays(streams)
        if (before := rows_by_call.get(call.call_id)) is not None:
            if (before.version, before.streams) != (source.version, packed):
                raise LedgerError(
                    f"call {call.call_id} already has other values under lease {source.lease_id}; they stay",
                    param="calls",
                )
            continue
        line = _line(call.call_id, record, streams, source, now)
        added.append(line)
        rows.append({name: getattr(line, name) for name in AnnotationLine.__slots__})
        rows[-1] |= {"token": source.token, "policy": source.policy, "streams": packed}
    if rows:
        connection.execute(sa.insert(annotations), rows)
    return added


def _line(
    call_id: str, record: _Sampled, streams: Mapping[str, np.ndarray[Any, Any]], source: AnnotationSource, now: float
) -> AnnotationLine:
    group_id, harness = source.sessions[record.session_id]
    mismatch = np.empty(0)
    fresh = np.empty(0, np.bool_)
    if "logprobs" in streams and len(record.logprobs):
        difference = np.abs(streams["logprobs"].astype(np.float64) - record.logprobs)
        has_value = np.isfinite(difference)
        mismatch, fresh = difference[has_value], (record.versions == source.version)[has_value]
    clipped = streams.get("clipped", np.empty(0, np.int8))
    return AnnotationLine(
        call_id=call_id,
        session_id=record.session_id,
        group_id=group_id,
        harness=harness,
        trainer=source.trainer,
        step=source.step,
        version=source.version,
        created_at=now,
        compared=len(mismatch),
        mismatch_sum=float(mismatch.sum()),
        mismatch_max=float(mismatch.max(initial=0.0)),
        fresh=int(fresh.sum()),
        fresh_sum=float(mismatch[fresh].sum()),
        kept=int((clipped == 0).sum()),
        clipped=int((clipped == 1).sum()),
    )


def _sampled(connection: sa.Connection, call_ids: Sequence[str]) -> dict[str, _Sampled]:
    ended = call_completions.c
    query = sa.select(ended.call_id, call_intents.c.session_id, ended.output_ids, ended.logprobs, ended.detail).join(
        call_intents, call_intents.c.id == ended.call_id
    )
    sampled: dict[str, _Sampled] = {}
    for start in range(0, len(call_ids), CHUNK):
        for row in connection.execute(query.where(ended.call_id.in_(call_ids[start : start + CHUNK]))):
            tokens = len(unpack_ids(row.output_ids))
            versions = np.full(tokens, NO_VERSION, np.int32)
            for version, first, last in _detail.decode(row.detail).versions:
                versions[first:last] = version
            logprobs = unpack_floats(row.logprobs)
            usable = logprobs if len(logprobs) == tokens else np.empty(0, np.float32)
            sampled[row.call_id] = _Sampled(row.session_id, tokens, usable, versions)
    return sampled


def annotations_of(connection: sa.Connection, session_id: str) -> dict[str, AnnotationLine]:
    """The latest annotation of each annotated call of the session."""
    query = sa.select(*_LINE).where(annotations.c.session_id == session_id).order_by(annotations.c.token)
    lines: dict[str, AnnotationLine] = {}
    for row in connection.execute(query):
        with left_out_if_unreadable("annotation of call", row.call_id):
            check_columns(_LINE, row)
            lines[row.call_id] = AnnotationLine(*row)
    return lines


def streams_of(connection: sa.Connection, call_id: str) -> AnnotationStreams | None:
    """The call's latest streams; None if no trainer has annotated it."""
    query = sa.select(annotations.c.streams).where(annotations.c.call_id == call_id)
    packed = connection.scalar(query.order_by(annotations.c.token.desc()).limit(1))
    if packed is None:
        return None
    streams = unpack_arrays(packed)
    empty = np.empty(0, np.float32)
    return AnnotationStreams(
        streams.get("logprobs", empty), streams.get("entropy", empty), streams.get("clipped", np.empty(0, np.int8))
    )


@dataclass(frozen=True, slots=True)
class MismatchSums:
    """Sums over the latest annotations of calls: see `AnnotationLine`."""

    calls: int = 0
    compared: int = 0
    mismatch_sum: float = 0.0
    mismatch_max: float = 0.0
    fresh: int = 0
    fresh_sum: float = 0.0
    kept: int = 0
    clipped: int = 0


@dataclass(frozen=True, slots=True)
class _Rows:
    """A fingerprint of a set of rows: equal values mean equal rows."""

    count: int = 0
    last_token: int = 0
    token_sum: int = 0


@dataclass(frozen=True, slots=True)
class GroupSums:
    """The sums of a group and harness, and the greatest token of its rows."""

    last_token: int
    sums: MismatchSums


@dataclass(frozen=True, slots=True)
class PolicySums:
    """A policy's sums by group id, by harness (sorted by name), and by both.

    `older` is the fingerprint of the rows whose token is less than the greatest one.
    """

    rows: _Rows
    older: _Rows
    by_both: Mapping[tuple[str, str], GroupSums]
    by_group: Mapping[str, MismatchSums]
    by_harness: Mapping[str, MismatchSums]


NO_SUMS = PolicySums(_Rows(), _Rows(), {}, {}, {})


def updated_sums(connection: sa.Connection, policy: str, known: PolicySums = NO_SUMS) -> PolicySums:
    """The policy's current sums. `known` are its previous sums."""
    columns = annotations.c
    mine, last = columns.policy == policy, known.rows.last_token
    now = _policy_rows(connection, mine)
    if now == known.rows:
        return known
    some: set[str] | None = None
    if known.by_both and _policy_rows(connection, mine, columns.token < last) == known.older:
        newer = sa.select(columns.group_id).where(mine, columns.token >= last).distinct()
        some = {*connection.scalars(newer), *(key[0] for key, one in known.by_both.items() if one.last_token == last)}
    if some is None or len(some) > CHUNK:
        by_both = _group_sums(connection, policy, None)
    else:
        unchanged = {key: one for key, one in known.by_both.items() if key[0] not in some}
        by_both = unchanged | _group_sums(connection, policy, some)
    older = _policy_rows(connection, mine, columns.token < now.last_token)
    return PolicySums(now, older, by_both, _by(by_both, 0), _by(by_both, 1))


def _policy_rows(connection: sa.Connection, *conditions: sa.ColumnElement[bool]) -> _Rows:
    query = sa.select(sa.func.count(), sa.func.max(_TOKEN), sa.func.sum(_TOKEN)).where(*conditions)
    return _Rows(*(int(value or 0) for value in connection.execute(query).one()))


def _group_sums(
    connection: sa.Connection, policy: str, group_ids: Iterable[str] | None
) -> dict[tuple[str, str], GroupSums]:
    """The sums of the policy's groups, or only of `group_ids`."""
    columns = annotations.c
    last = sa.select(columns.group_id, columns.harness, sa.func.max(_TOKEN)).where(columns.policy == policy)
    if group_ids is not None:
        last = last.where(columns.group_id.in_(list(group_ids)))
    rows = connection.execute(last.group_by(columns.group_id, columns.harness))
    sums = _sums(connection, policy, group_ids)
    return {(row[0], row[1]): GroupSums(row[2], sums[row[0], row[1]]) for row in rows if (row[0], row[1]) in sums}


def _sums(
    connection: sa.Connection, policy: str, group_ids: Iterable[str] | None
) -> dict[tuple[str, str], MismatchSums]:
    """The sums of the policy's groups, or only of `group_ids`, without damaged ones. Only the latest annotation of a
    call counts."""
    columns, newer = annotations.c, annotations.alias()
    replaced = sa.exists().where(newer.c.call_id == columns.call_id, newer.c.token > columns.token)
    query = sa.select(
        columns.group_id,
        columns.harness,
        sa.func.count(),
        sa.func.sum(columns.compared),
        sa.func.sum(columns.mismatch_sum),
        sa.func.max(columns.mismatch_max),
        sa.func.sum(columns.fresh),
        sa.func.sum(columns.fresh_sum),
        sa.func.sum(columns.kept),
        sa.func.sum(columns.clipped),
    )
    query = query.where(columns.policy == policy, ~replaced).group_by(columns.group_id, columns.harness)
    if group_ids is not None:
        query = query.where(columns.group_id.in_(list(group_ids)))
    found: dict[tuple[str, str], MismatchSums] = {}
    for row in connection.execute(query):
        with left_out_if_unreadable("annotations of group", row[0]):
            if not (isinstance(row[0], str) and isinstance(row[1], str) and math.isfinite(sum(row[2:]))):
                raise RecordCorrupt("sums of what are no numbers")
            found[row[0], row[1]] = MismatchSums(*row[2:])
    return found


def _by(sums: Mapping[tuple[str, str], GroupSums], part: int) -> dict[str, MismatchSums]:
    totals: dict[str, MismatchSums] = {}
    for key in sorted(sums, key=lambda key: key[part]):
        name, one = key[part], sums[key].sums
        totals[name] = _total(totals[name], one) if name in totals else one
    return totals


def _total(one: MismatchSums, other: MismatchSums) -> MismatchSums:
    return MismatchSums(
        one.calls + other.calls,
        one.compared + other.compared,
        one.mismatch_sum + other.mismatch_sum,
        max(one.mismatch_max, other.mismatch_max),
        one.fresh + other.fresh,
        one.fresh_sum + other.fresh_sum,
        one.kept + other.kept,
        one.clipped + other.clipped,
    )
