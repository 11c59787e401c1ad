"""What a trainer says of many tokens is sent in requests that the server takes, and its answers are put together."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import msgspec
import pytest

from rolltap.contract.base import MAX_BODY, values_of
from rolltap.contract.planes import TrainerPlane
from rolltap.contract.trainer import (
    MAX_CALLS,
    MAX_SCORED,
    AnnotateLease,
    CallAnnotation,
    LeaseAnnotated,
    PolicyScores,
    ScoredIds,
    ScoreIds,
    TokenScores,
)
from rolltap.trainer_client.lease.client import TrainerClient


class RecordingClient(TrainerClient):
    """Keeps what it would send. The policy's version is the number of the request, or always 1."""

    def __init__(self, *, pushed: bool = False) -> None:
        super().__init__("http://127.0.0.1:9", "key", "trainer", run="run")
        self.sent: list[Any] = []
        self.pushed = pushed

    async def reply(self, operation: Any, *given: Any) -> Any:  # type: ignore[override]
        body = given[-1]
        self.sent.append(body)
        if isinstance(body, AnnotateLease):
            assert operation is TrainerPlane.annotate
            return LeaseAnnotated(len(body.calls))
        assert isinstance(body, ScoreIds)
        scores = [TokenScores([-float(sequence.start)]) for sequence in body.sequences]
        return PolicyScores("p", len(self.sent) if self.pushed else 1, scores)

    @property
    def sizes(self) -> list[int]:
        return [len(msgspec.json.encode(values_of(body))) for body in self.sent]


@pytest.mark.parametrize(("count", "tokens"), [(40, 5_000), (3_000, 1), (2, 90_000), (0, 1)])
def test_annotations_come_in_requests_of_1_mib_or_of_one_call(count: int, tokens: int) -> None:
    client = RecordingClient()
    calls = [CallAnnotation(f"c{number}", logprobs=[-0.123457] * tokens) for number in range(count)]
    assert client.annotate(Mock(id="lease", token=1), calls, version=1) == count
    assert [call for body in client.sent for call in body.calls] == calls
    for body, size in zip(client.sent, client.sizes, strict=True):
        assert len(body.calls) <= MAX_CALLS
        assert size <= MAX_BODY or len(body.calls) == 1
    assert len(client.sent) < max(4, count)


@pytest.mark.parametrize("pushed", [False, True])
def test_scores_of_several_requests_are_in_the_order_of_the_sequences(pushed: bool) -> None:
    client = RecordingClient(pushed=pushed)
    sequences = [ScoredIds([100_000] * 2_000, number) for number in range(1, 300)]
    scores = client.score("p", sequences, top_logprobs=3)
    assert [one.logprobs for one in scores.sequences] == [[-float(number)] for number in range(1, 300)]
    assert scores.version == (None if pushed else 1)
    assert len(client.sent) > 2
    for body, size in zip(client.sent, client.sizes, strict=True):
        assert (len(body.sequences) <= MAX_SCORED, size <= MAX_BODY, body.top_logprobs) == (True, True, 3)
