"""Functions on facts that all stores share: their names, equality, and derived facts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import numpy as np

from rolltap.calllog.base import CallCompletion, CallIntent, RequestParts
from rolltap.errors import RecordCorrupt
from rolltap.types import Finish, Outcome, Session


@dataclass(frozen=True, slots=True)
class Delivery:
    """Whether a call's reply reached its client."""

    call_id: str
    delivered: bool


Fact = Session | CallIntent | CallCompletion | Delivery


def name_of(fact: Fact) -> str:
    match fact:
        case CallIntent(id=call_id):
            return f"the intent of call {call_id}"
        case CallCompletion(call_id=call_id):
            return f"the completion of call {call_id}"
        case Delivery(call_id=call_id):
            return f"the delivery of call {call_id}"
        case Session(id=session_id):
            return f"session {session_id}"


def aborted(call_id: str, at: float) -> CallCompletion:
    """The completion of a call whose process ended before the call."""
    return CallCompletion(
        call_id=call_id,
        finished_at=at,
        outcome=Outcome.ABORTED,
        finish=Finish.ABORT,
        output_ids=np.empty(0, np.int32),
        logprobs=np.empty(0, np.float32),
        error="the proxy process ended before the call was complete",
    )


def extend_items(call_id: str, items: tuple[bytes, ...], request: RequestParts) -> tuple[bytes, ...]:
    """All items of a request, given the `items` of its parent's request."""
    if request.items_shared > len(items):
        raise RecordCorrupt(f"call {call_id}: shares {request.items_shared} items, but its parent has {len(items)}")
    return items[: request.items_shared] + request.items


def same_fact(first: Any, second: Any) -> bool:
    """Whether two facts are equal, arrays bit for bit (NaNs included)."""
    if isinstance(first, np.ndarray) or isinstance(second, np.ndarray):
        first, second = np.asarray(first), np.asarray(second)
        same_layout = first.dtype == second.dtype and first.shape == second.shape
        return same_layout and first.tobytes() == second.tobytes()
    if is_dataclass(first) and type(first) is type(second):
        return all(same_fact(getattr(first, field.name), getattr(second, field.name)) for field in fields(first))
    if isinstance(first, Mapping) and isinstance(second, Mapping):
        return first.keys() == second.keys() and all(same_fact(first[key], second[key]) for key in first)
    return first == second
