"""What the wires have in common: JSON that may hold NaN, weight version spans, candidates, arrays."""

from __future__ import annotations

import base64
import binascii
import io
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeVar

import msgspec
import numpy as np

from rolltap.decoding import convert, json_decoder
from rolltap.errors import EngineProtocolError, EngineUnavailable, RateLimited, RolltapError
from rolltap.proxy.engines.base import SampleRequest
from rolltap.proxy.engines.http import failure
from rolltap.types import VersionSpan

T = TypeVar("T", bound=msgspec.Struct)
Finish = TypeVar("Finish", bound=str)

FinishReason = Literal["stop", "length", "abort"]
FINISHES: dict[str, FinishReason] = {
    **dict.fromkeys(("stop", "eos", "end_turn", "stop_sequence", "content_filter"), "stop"),
    **dict.fromkeys(("length", "max_tokens", "model_length"), "length"),
    **dict.fromkeys(("abort", "aborted", "cancelled", "error"), "abort"),
}
"""rolltap's words for what servers name as the end of an output. "error": the server failed in the middle of it."""

INITIAL_VERSION = "default"
"""What vLLM and SGLang call weights that were never updated: rolltap's version 0."""


RAW_FIELDS = ("prompt_token_ids", "arguments")

VERSIONS = 1 << 31
"""Weight versions are less, as tokens carry them as int32: a greater number (a time stamp) is a name like any other."""


class Problem(msgspec.Struct):
    """An error inside a stream."""

    message: str = ""
    code: int | str | None = None


class WireVersionSpan(msgspec.Struct):
    version: str | int
    start: int
    end: int


def decoder(kind: type[T]) -> Callable[[bytes], T]:
    """Reads JSON as a `kind`; `EngineProtocolError` if it is not one.

    Python's own JSON writers put NaN and Infinity where JSON has no word for them: those are read as they are meant.
    """
    strict = json_decoder(kind)

    def read(data: bytes) -> T:
        try:
            return strict.decode(data)
        except msgspec.ValidationError as error:
            raise EngineProtocolError(f"the engine sent an event of another shape: {error}") from error
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            return _lenient(data, kind, error)

    return read


def event_reader(kind: type[T]) -> Callable[[Sequence[bytes]], Iterator[T]]:
    """Reads the events of one read as `kind`s, in one decoding where all are strict JSON; errors come in their turn."""
    read_one = decoder(kind)
    together = json_decoder(list[kind])

    def read(events: Sequence[bytes]) -> Iterator[T]:
        if len(events) > 1:
            try:
                decoded = together.decode(b"[" + b",".join(events) + b"]")
            except (msgspec.MsgspecError, UnicodeDecodeError):
                decoded = []
            if len(decoded) == len(events):  # else an event was not one JSON value
                return iter(decoded)
        return map(read_one, events)

    return read


def _lenient(data: bytes, kind: type[T], cause: Exception) -> T:
    try:
        return convert(json.loads(data, object_hook=_raw_fields), kind)
    except (ValueError, RecursionError) as error:
        raise EngineProtocolError(f"the engine sent an event that is not JSON: {cause}") from error


def _raw_fields(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields of an object as the strict reader has them: a prompt's ids and a call's arguments stay JSON."""
    raw = {name: msgspec.Raw(msgspec.json.encode(fields[name])) for name in RAW_FIELDS if name in fields}
    return fields | raw


def problem(name: str, path: str, error: Problem) -> RolltapError:
    """The error that a stream's error event stands for. The request has already started, so any code means failure."""
    code = error.code if isinstance(error.code, int) else 500
    error_of_code = failure(name, path, code, error.message)
    if isinstance(error_of_code, EngineUnavailable | RateLimited) or code in (400, 422):
        return error_of_code
    return EngineUnavailable(f"engine {name}: {error.message}")


def check_prompt(name: str, counted: int | None, request: SampleRequest) -> None:
    """`EngineProtocolError` if the server saw another number of prompt tokens than it was sent."""
    sent = len(request.prompt_ids)
    if counted is not None and counted != sent:
        raise EngineProtocolError(f"engine {name} counted {counted} prompt tokens; {sent} were sent")


def finish_of(reason: str | None, known: Mapping[str, Finish]) -> tuple[Finish | None, str]:
    """rolltap's word for a server's finish reason; None if it gives none.

    A reason that rolltap does not know (vLLM's `repetition`) ends the output all the same: as "stop", and the second
    value is the server's word.
    """
    if not reason:
        return None, ""
    finish = known.get(reason.lower())
    return (finish, "") if finish is not None else (known["stop"], reason)


def version_number(version: str | int) -> int | None:
    """rolltap's number of a server's weight version; None for a name that rolltap did not give."""
    if version == INITIAL_VERSION:
        return 0
    try:
        number = int(version)
    except ValueError:
        return None
    return number if 0 <= number < VERSIONS else None


def spans(stated: Sequence[WireVersionSpan], count: int) -> tuple[VersionSpan, ...]:
    """The spans of an output of `count` ids; () if they do not tile it or name a version that rolltap did not set."""
    numbered = [(version_number(span.version), span.start, span.end) for span in stated if span.start < span.end]
    edges = [0, *(end for _, _, end in numbered)]
    tiles = [start for _, start, _ in numbered] == edges[:-1] and edges[-1] == count
    if not tiles or any(version is None for version, _, _ in numbered):
        return ()
    joined: list[VersionSpan] = []
    for version, start, end in numbered:
        assert version is not None
        if joined and joined[-1].version == version:
            joined[-1] = VersionSpan(version, joined[-1].start, end)
        else:
            joined.append(VersionSpan(version, start, end))
    return tuple(joined)


def top_k(
    ids: Sequence[int], logprobs: Sequence[float], rows: Sequence[Sequence[tuple[int, float]]], k: int
) -> dict[str, np.ndarray]:
    """The `k` likeliest candidates of each position, the sampled token among them, likeliest first.

    `top_ids` int32 [t, k] and `top_logprobs` float32 [t, k]; {} if the server gave fewer than `k` for a position.
    """
    kept: list[list[tuple[int, float]]] = []
    for token, logprob, row in zip(ids, logprobs, rows, strict=True):
        others = sorted((pair for pair in row if pair[0] != token), key=lambda pair: -pair[1])
        kept.append(sorted([(token, logprob), *others[: k - 1]], key=lambda pair: -pair[1]))
    if not kept or any(len(row) != k for row in kept):
        return {}
    pairs = np.asarray(kept, np.float64)
    return {"top_ids": pairs[:, :, 0].astype(np.int32), "top_logprobs": pairs[:, :, 1].astype(np.float32)}


def sampling_mask(rows: Sequence[Sequence[int]] | None, count: int, width: int) -> dict[str, np.ndarray]:
    """`sampling_mask` int32 [count, width]: the ids that each of `count` tokens was drawn from, then -1.

    {} where a token has none, or more than `width`: part of a mask would be another distribution.
    """
    if rows is None or not count or len(rows) != count or not all(0 < len(row) <= width for row in rows):
        return {}
    table = np.full((count, width), -1, np.int32)
    for line, row in zip(table, rows, strict=True):
        line[: len(row)] = row
    return {"sampling_mask": table}


def sampled_experts(rows: np.ndarray, count: int) -> dict[str, np.ndarray]:
    """`routed_experts` int16 [count, ...]: the experts of the forward passes which sampled the output's `count` ids.

    `rows` has one for every token of prompt and output but the last, which nothing was computed from: the output's
    are the last `count`.
    """
    if len(rows) < count or not np.issubdtype(rows.dtype, np.integer):
        raise EngineProtocolError(f"routed experts are {rows.dtype} {rows.shape}; the output has {count} ids")
    own = rows[len(rows) - count :]
    if own.size and not 0 <= own.min() <= own.max() <= np.iinfo(np.int16).max:
        raise EngineProtocolError(f"routed experts are numbered {own.min()} to {own.max()}")
    return {"routed_experts": own.astype(np.int16)}


def npy(encoded: str) -> np.ndarray:
    """A base64 `.npy` file; never unpickled."""
    try:
        return np.load(io.BytesIO(base64.b64decode(encoded, validate=True)), allow_pickle=False)
    except (binascii.Error, ValueError, EOFError, OSError) as error:
        raise EngineProtocolError(f"the engine sent an array that is not base64 .npy: {error}") from error
