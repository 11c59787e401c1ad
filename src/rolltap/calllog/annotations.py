"""Annotations: trainers' values for sampled tokens, by call and lease. Append-only, until the call is pruned.

Tokens that the trainer masked have no value: NaN (or -1) in the stored streams, never 0. Annotations of a call under a
later lease do not replace earlier ones; readers show the latest. Mismatch is |log(trainer / engine)|. For `fresh`
tokens, whose weight version is the trainer's, it shows rounding or a difference of the two computations. For older
tokens it also contains the policy's change since then.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import sqlalchemy as sa

from rolltap.calllog.codec import pack_arrays, unpack_arrays, unpack_floats, unpack_ids
from rolltap.calllog.records import CompletionDetail
from rolltap.calllog.schema import annotations, call_completions, call_intents
from rolltap.contract.trainer import CallAnnotation
from rolltap.decoding import json_decoder
from rolltap.errors import InvalidRequest, LedgerError
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


@dataclass(frozen=True, slots=True)
class AnnotationLine:
    """The sums of a call's annotation. `mismatch_sum` is over `compared` tokens, `fresh_sum` over `fresh` tokens.

    `kept` and `clipped` count tokens by the trainer's clipping; tokens without that information count in neither.
    """

    call_id: str
    session_id: str
    group_id: str
    harness: str
    trainer: str
    step: int | None
    version: int
    created_at: float
    compared: int
    mismatch_sum: float
    mismatch_max: float
    fresh: int
    fresh_sum: float
    kept: int
    clipped: int

    @property
    def mismatch(self) -> float | None:
        """The mean mismatch of the compared tokens; None if there are none."""
        return self.mismatch_sum / self.compared if self.compared else None


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


def append_annotations(
    connection: sa.Connection, now: float, source: AnnotationSource, posted: Sequence[CallAnnotation]
) -> list[AnnotationLine]:
    """Appends all annotations or none; returns those that were not on record yet.

    Raises `InvalidRequest` for calls outside the lease and streams of a wrong length, and `LedgerError` if other values
    are on record for a call under this lease.
    """
    ids = [call.call_id for call in posted]
    sampled = _sampled(connection, ids)
    mine = sa.select(annotations.c.call_id, annotations.c.version, annotations.c.streams)
    rows_by_call = {row.call_id: row for row in _rows(connection, mine.where(annotations.c.token == source.token), ids)}
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


def _rows(connection: sa.Connection, query: sa.Select[*tuple[Any, ...]], call_ids: Sequence[str]) -> list[sa.Row[Any]]:
    return [
        row
        for start in range(0, len(call_ids), CHUNK)
        for row in connection.execute(query.where(annotations.c.call_id.in_(call_ids[start : start + CHUNK])))
    ]


def annotations_of(connection: sa.Connection, session_id: str) -> dict[str, AnnotationLine]:
    """The latest annotation of each annotated call of the session."""
    query = sa.select(*_LINE).where(annotations.c.session_id == session_id).order_by(annotations.c.token)
    return {row.call_id: AnnotationLine(*row) for row in connection.execute(query)}


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
