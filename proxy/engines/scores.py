"""Log-probs of given ids as servers say them: a value for each with its candidates, or an error that names the gap."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from rolltap.contract.trainer import TokenScores
from rolltap.errors import EngineProtocolError
from rolltap.proxy.engines.base import ScoreRequest


def scores_of(
    name: str, request: ScoreRequest, values: Sequence[float | None], candidates: Sequence[Mapping[int, float | None]]
) -> TokenScores:
    """Checks that every wanted id has a log-prob; `candidates` [wanted] by id, more or fewer than were asked for."""
    count = len(request.token_ids) - request.start
    if len(values) != count or (request.top_logprobs and len(candidates) != count):
        raise EngineProtocolError(f"engine {name} scored {len(values)} of {count} ids")
    for place, value in enumerate(values, request.start):
        if value is None or not math.isfinite(value):
            raise EngineProtocolError(f"engine {name} gave {value} as the log-prob of the id at index {place}")
    if not request.top_logprobs:
        return TokenScores(list(values))  # type: ignore[arg-type]
    tops = [_likeliest(name, each, request.top_logprobs) for each in candidates]
    ids, logprobs = ([[pair[part] for pair in top] for top in tops] for part in (0, 1))
    return TokenScores(list(values), ids, logprobs)  # type: ignore[arg-type]


def _likeliest(name: str, candidates: Mapping[int, float | None], count: int) -> list[tuple[int, float]]:
    finite = [(token, value) for token, value in candidates.items() if value is not None and math.isfinite(value)]
    if len(finite) < count:
        raise EngineProtocolError(f"engine {name} named {len(finite)} candidates of an id; {count} were asked for")
    return sorted(finite, key=lambda pair: -pair[1])[:count]
