"""The seam between what is sampled and how a server of some kind says it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import msgspec
import numpy as np

from rolltap.engine.scripted.sampling import Ask, Piece, Plan, experts_of, logprob_of
from rolltap.errors import InvalidRequest


class Wire(Protocol):
    """One sampling route. Bodies are JSON-able; None leaves an event out."""

    path: str

    def read(self, body: dict[str, Any], headers: Mapping[str, str]) -> Ask: ...

    def first(self, plan: Plan) -> Any | None:
        """An event before the first token."""
        ...

    def event(self, plan: Plan, piece: Piece) -> Any: ...

    def last(self, plan: Plan) -> Any | None:
        """An event after the finish."""
        ...

    def whole(self, plan: Plan, piece: Piece) -> Any:
        """The answer that is not streamed, or its bytes; `piece` is all of it."""
        ...


class Reader(msgspec.Struct, frozen=True):
    """Fields of a body, by name; what has the wrong type is refused with its name."""

    body: dict[str, Any]

    def ids(self, name: str) -> list[int]:
        ids = self.body.get(name)
        if not isinstance(ids, list) or not ids or set(map(type, ids)) != {int} or min(ids) < 0:
            raise InvalidRequest(f"{name} must be a list of token ids that is not empty", param=name)
        return ids

    def integer(self, name: str, default: int | None = None) -> int | None:
        value = self.body.get(name, default)
        if value is not None and type(value) is not int:
            raise InvalidRequest(f"{name} must be an integer", param=name)
        return value

    def number(self, name: str, default: float = 1.0) -> float:
        value = self.body.get(name)
        if value is not None and not isinstance(value, int | float):
            raise InvalidRequest(f"{name} must be a number", param=name)
        return default if value is None else float(value)

    def inner(self, name: str) -> Reader:
        value = self.body.get(name) or {}
        if not isinstance(value, dict):
            raise InvalidRequest(f"{name} must be an object", param=name)
        return Reader(value)

    def text(self, *names: str) -> str:
        """The first of these fields that is there, "" if none is."""
        return str(next((self.body[name] for name in names if self.body.get(name)), ""))


def session_of(reader: Reader, headers: Mapping[str, str]) -> str:
    return headers.get("x-session-id") or reader.text("session_id", "cache_salt")


def echoed(plan: Plan) -> list[int]:
    """The prompt as the server says it saw it."""
    prompt = plan.ask.prompt_ids
    return [*prompt[:-1], prompt[-1] ^ 1] if plan.fault == "altered_prompt" else prompt


def candidates(plan: Plan, token: int, position: int, mode: str) -> list[tuple[int, float]]:
    """The sampled token and `top_logprobs` - 1 less likely ones; none where none are wanted."""
    if not plan.ask.top_logprobs:
        return []
    likeliest = logprob_of(token, position) / temperature_of(plan, mode)
    return [(token + other, likeliest - other) for other in range(plan.ask.top_logprobs)]


def prompt_scores(plan: Plan) -> list[list[tuple[int, float]]]:
    """The prompt's ids from the first scored place on, each with its log-prob, its candidates behind it."""
    ask, rows = plan.ask, []
    for place in range(ask.scored_from or 0, len(ask.prompt_ids)):
        token = ask.prompt_ids[place]
        value = float("nan") if plan.fault == "nan_logprobs" else logprob_of(token, place)
        rows.append([(token, value), *((token + other, value - other) for other in range(1, ask.scored_top))])
    return rows[:-1] if plan.fault == "short_logprobs" else rows


def experts(plan: Plan) -> np.ndarray:
    """The experts of every token that went through the model: prompt and output but the last, [tokens, layers, k]."""
    return experts_of([*plan.ask.prompt_ids, *plan.entry.output][:-1])


def scaled(plan: Plan, logprobs: Sequence[float | None], mode: str) -> Sequence[float | None]:
    """Log-probs after temperature, where the server's mode says so."""
    temperature = temperature_of(plan, mode)
    if temperature == 1.0:
        return logprobs
    return [None if value is None else value / temperature for value in logprobs]


def temperature_of(plan: Plan, mode: str) -> float:
    return 1.0 if mode == "raw" else plan.ask.temperature or 1.0
