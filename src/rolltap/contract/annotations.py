"""What a trainer says of the tokens that it leased: its own log-probs, their entropy, what the clip took."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
from pydantic import Field

from rolltap.contract.base import Integer, RequestBody
from rolltap.errors import InvalidRequest
from rolltap.types import Float32

MAX_CALLS = 1024
MAX_TOKENS = 1 << 18
"""Sampled tokens of all calls of one request; the clients split what is more."""

ROUNDING = 1e-3
"""How far a log-prob may be over 0, and an entropy under it."""

Numbers = Annotated[Sequence[float | None], Field(max_length=MAX_TOKENS)]
Flags = Annotated[Sequence[bool | None], Field(max_length=MAX_TOKENS)]


@dataclass(frozen=True, slots=True)
class CallAnnotation(RequestBody):
    """A value for each sampled token of a call, in their order; None where there is none (masked tokens), never 0.

    `logprobs` are the trainer's, as natural logarithms; `entropy` is in nats; `clipped` says whether the loss's clip
    took a token's gradient. An empty stream was not reported; the others are equally long.
    """

    call_id: Annotated[str, Field(min_length=1, max_length=64)]
    logprobs: Numbers = ()
    entropy: Numbers = ()
    clipped: Flags = ()

    def __post_init__(self) -> None:
        lengths = {len(stream) for stream in (self.logprobs, self.entropy, self.clipped) if len(stream)}
        if len(lengths) != 1:
            raise InvalidRequest(
                f"call {self.call_id}: "
                + ("its streams have different lengths" if lengths else "it has no values: leave the call out"),
                param="calls",
            )
        logprobs, entropy = (_numbers(self.call_id, name, getattr(self, name)) for name in ("logprobs", "entropy"))
        if (logprobs > ROUNDING).any():
            raise InvalidRequest(f"call {self.call_id}: a log-prob is at most 0, not {logprobs.max():g}", param="calls")
        if (entropy < -ROUNDING).any():
            raise InvalidRequest(f"call {self.call_id}: an entropy is at least 0, not {entropy.min():g}", param="calls")

    @property
    def tokens(self) -> int:
        """How many tokens the streams are of."""
        return max(map(len, (self.logprobs, self.entropy, self.clipped)))

    def arrays(self) -> dict[str, np.ndarray[Any, Any]]:
        """The streams that were reported: float32 with NaN, and int8 with -1, where there is no value."""
        arrays: dict[str, np.ndarray[Any, Any]] = {
            name: np.array(values, np.float32)
            for name, values in (("logprobs", self.logprobs), ("entropy", self.entropy))
            if len(values)
        }
        if len(self.clipped):
            arrays["clipped"] = np.array([-1 if flag is None else int(flag) for flag in self.clipped], np.int8)
        return arrays


def _numbers(call_id: str, name: str, values: Sequence[float | None]) -> Float32:
    """The values that are there; `InvalidRequest` where one is not finite."""
    numbers = np.array([value for value in values if value is not None], np.float64)
    if not np.isfinite(numbers).all():
        raise InvalidRequest(
            f"call {call_id}: {name} has a value that is not a finite number; send null where there is none",
            param="calls",
        )
    with np.errstate(over="ignore"):
        stored = numbers.astype(np.float32)
    if not np.isfinite(stored).all():
        raise InvalidRequest(f"call {call_id}: {name} has a value that float32 can't hold", param="calls")
    return stored


@dataclass(frozen=True, slots=True)
class AnnotateLease(RequestBody):
    """Annotations of calls of a lease that is held or acknowledged. `token` is the lease's fencing token, `version`
    the weight version that the log-probs are of. The same again changes nothing.
    """

    token: int
    version: Annotated[Integer, Field(ge=0)]
    calls: Annotated[Sequence[CallAnnotation], Field(min_length=1, max_length=MAX_CALLS)]
    incarnation: Integer = 0

    def __post_init__(self) -> None:
        total = sum(call.tokens for call in self.calls)
        if total > MAX_TOKENS:
            raise InvalidRequest(f"a request has up to {MAX_TOKENS} tokens, this one {total}: split it", param="calls")
        if len({call.call_id for call in self.calls}) != len(self.calls):
            raise InvalidRequest("a call is in the request twice", param="calls")


@dataclass(frozen=True, slots=True)
class LeaseAnnotated:
    """How many calls had no annotation under the lease yet."""

    added: int
