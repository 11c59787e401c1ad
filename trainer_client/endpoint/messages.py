"""Converts the SDK's protobuf messages to arrays and back. JSON bodies are parsed by the SDK's own pydantic types.

Shapes: a datum's input has `T` tokens, each with `K` targets (1 unless the client trains on a distribution).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError
from numpy.typing import NDArray
from tinker.proto import tinker_public_pb2 as pb

from rolltap.engine.sampling import PromptScores, TokenDelta
from rolltap.errors import InvalidRequest
from rolltap.types import Float32, Int32

PROTOBUF = "application/x-protobuf"
MOST_TARGETS = 1024
"""The most targets per token. A sparse tensor's width is checked before memory is allocated for the dense one."""

DTYPES: Mapping[int, Any] = {pb.DTYPE_FLOAT32: np.float32, pb.DTYPE_INT64: np.int64, pb.DTYPE_INT32: np.int32}
NOTHING_THERE = -99_999.0
"""The log-prob of a missing candidate, the SDK's `MASK_LOGPROB`. Its id is 0."""


@dataclass(frozen=True, slots=True, eq=False)
class Example:
    """A datum: the token ids [T] of its input, and the loss's inputs by name, each [T] or [T, K]."""

    token_ids: Int32
    inputs: Mapping[str, NDArray[Any]]


def read_loss_request(body: bytes) -> pb.ForwardBackwardRequest:
    """Parses a body of `forward_backward`. Raises `InvalidRequest` if it is not a `ForwardBackwardRequest`."""
    message = pb.ForwardBackwardRequest()
    try:
        message.ParseFromString(body)
    except DecodeError as error:
        raise InvalidRequest(f"the body is not a ForwardBackwardRequest: {error}") from error
    return message


def config_of(message: pb.ForwardBackwardRequest) -> dict[str, float | str]:
    """The settings of the loss. `loss_fn_config_v2`, which newer clients send too and which may hold text, wins."""
    if not message.loss_fn_config_v2:
        return dict(message.loss_fn_config)
    kinds = {name: value.WhichOneof("value") for name, value in message.loss_fn_config_v2.items()}
    return {name: getattr(message.loss_fn_config_v2[name], kind) for name, kind in kinds.items() if kind}


def examples(message: pb.ForwardBackwardRequest) -> list[Example]:
    """The data of a message. Raises `InvalidRequest` with the datum and the field if one can't be read."""
    return [_example(f"datum {number}", datum) for number, datum in enumerate(message.data)]


def _example(where: str, datum: pb.Datum) -> Example:
    other = {chunk.WhichOneof("chunk") for chunk in datum.model_input} - {"encoded_text"}
    if other:
        raise InvalidRequest(f"{where}: model_input has {', '.join(map(str, sorted(other, key=str)))}; only text here")
    try:
        parts = [np.frombuffer(chunk.encoded_text.tokens, np.int32) for chunk in datum.model_input]
    except ValueError as error:
        raise InvalidRequest(f"{where}: model_input: {error}") from error
    ids = np.concatenate(parts) if parts else np.zeros(0, np.int32)
    inputs = {
        name: _array(f"{where}: {name}", tensor, len(ids)) for name, tensor in sorted(datum.loss_fn_inputs.items())
    }
    return Example(ids, inputs)


def _array(where: str, tensor: pb.Tensor, length: int) -> NDArray[Any]:
    """A tensor as an array [T] or [T, K], where T is `length`. `where` names it in the message of `InvalidRequest`."""
    dtype, shape = DTYPES.get(tensor.dtype), tuple(tensor.shape)
    if dtype is None:
        raise InvalidRequest(f"{where}: it must be of float32 or int64")
    if shape and (shape[0] != length or len(shape) > 2 or (len(shape) == 2 and not 0 < shape[1] <= MOST_TARGETS)):
        raise InvalidRequest(f"{where}: its shape is {list(shape)}; model_input has {length} tokens")
    try:
        if tensor.HasField("sparse_csr"):
            return _dense(tensor.sparse_csr, dtype, shape)
        return np.frombuffer(tensor.dense, dtype).reshape(shape or (length,))
    except (ValueError, IndexError) as error:
        raise InvalidRequest(f"{where}: {error}") from error


def _dense(sparse: pb.SparseCsr, dtype: Any, shape: tuple[int, ...]) -> NDArray[Any]:
    """A matrix in CSR format as a dense array. Raises `ValueError` or `IndexError` if it does not fit `shape`."""
    ends, columns = (np.frombuffer(part, np.int64) for part in (sparse.crow_indices, sparse.col_indices))
    values = np.frombuffer(sparse.values, dtype)
    if len(shape) != 2 or len(ends) != shape[0] + 1 or ends[0] != 0 or ends[-1] != len(columns):
        raise ValueError("the row pointers of a sparse tensor don't fit its shape")
    if len(values) != len(columns) or (columns < 0).any():
        raise ValueError("a sparse tensor has another number of values than of columns")
    dense = np.zeros(shape, dtype)
    dense[np.repeat(np.arange(shape[0]), np.diff(ends)), columns] = values
    return dense


def write_loss_output(logprobs: Sequence[Float32], metrics: Mapping[str, float]) -> bytes:
    """A serialized `ForwardBackwardOutput` with the log-probs [T] or [T, K] of each datum's targets.

    A record holds consecutive data with the same K.
    """
    message = pb.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord", metrics=metrics)
    for trailing, run in groupby(logprobs, key=lambda array: array.shape[1:]):
        arrays = list(run)
        offsets = np.cumsum([0, *(array.nbytes for array in arrays)], dtype=np.int64)
        record = message.loss_fn_outputs.add(type_tag="ArrayRecord", num_datums=len(arrays))
        record.fields["logprobs"].CopyFrom(
            pb.BatchedTensor(
                data=b"".join(array.tobytes() for array in arrays),
                offsets=offsets.tobytes(),
                dtype=pb.DTYPE_FLOAT32,
                trailing_shape=trailing,
            )
        )
    return message.SerializeToString()


def write_sample_output(
    outputs: Sequence[TokenDelta], scores: PromptScores | None, first_score: int, cached_tokens: int
) -> bytes:
    """A serialized `SampleResponse` with the whole `outputs` of a request.

    `scores` are the prompt's, if requested. Prompt tokens before the index `first_score` get NaN and no candidates,
    and so does the first token, which has no log-prob.
    """
    message = pb.SampleResponse(prompt_cache_hit_tokens=cached_tokens)
    for delta in outputs:
        stopped = delta.finish == "stop"
        sequence = message.sequences.add(
            stop_reason=pb.STOP_REASON_STOP if stopped else pb.STOP_REASON_LENGTH,
            tokens=np.asarray(delta.token_ids, np.int32).tobytes(),
            logprobs=np.asarray(delta.logprobs, np.float32).tobytes(),
        )
        if any(delta.tops):
            sequence.topk_sampled_logprobs.CopyFrom(_candidates(delta.tops))
    if scores is not None:
        values = np.array([np.nan, *scores.logprobs], np.float32)
        values[:first_score] = np.nan
        message.prompt_logprobs = values.tobytes()
        if any(scores.tops):
            tops = [() if index < first_score else row for index, row in enumerate([(), *scores.tops])]
            message.topk_prompt_logprobs.CopyFrom(_candidates(tops))
    return message.SerializeToString()


def _candidates(rows: Sequence[Sequence[tuple[int, float]]]) -> pb.TopkLogprobs:
    """Each token's candidates as two matrices [tokens, candidates]. Missing ones are `NOTHING_THERE`."""
    width = max(map(len, rows))
    padded = [[*row, *[(0, NOTHING_THERE)] * (width - len(row))] for row in rows]
    ids = np.array([[token for token, _ in row] for row in padded], np.int32)
    logprobs = np.array([[value for _, value in row] for row in padded], np.float32)
    return pb.TopkLogprobs(token_ids=ids.tobytes(), logprobs=logprobs.tobytes(), k=width, length=len(rows))
