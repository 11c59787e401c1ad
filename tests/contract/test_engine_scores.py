"""Log-probs of given ids, over every engine client that has them, and through the trainer plane."""

from __future__ import annotations

import pytest

from rolltap.engine.scripted import Fault, ScriptedReply
from rolltap.engine.scripted.sampling import logprob_of
from rolltap.errors import EngineProtocolError
from rolltap.proxy.engines.base import Scorer, ScoreRequest

from .engine_world import PROMPT, REPLY, WIRES, maker, starter

SCORING = [wire for wire, kind in WIRES.items() if hasattr(maker(kind), "score")]


def test_which_engines_score() -> None:
    assert {WIRES[wire] for wire in SCORING} >= {"vllm", "sglang"}
    assert not hasattr(maker("llamacpp"), "score")


@pytest.mark.parametrize("wire", SCORING)
@pytest.mark.parametrize("start", [1, 3])
async def test_every_wanted_id_has_its_log_prob(wire: str, start: int) -> None:
    async with starter(wire)(REPLY) as world:
        assert isinstance(world.engine, Scorer)
        scores = await world.engine.score(ScoreRequest("s", "scripted", PROMPT, start))
        assert world.server.journal.entries[0].prompt_ids == PROMPT
    assert list(scores.logprobs) == [logprob_of(token, at) for at, token in enumerate(PROMPT)][start:]
    assert not scores.top_ids


@pytest.mark.parametrize("wire", SCORING)
async def test_the_likeliest_candidates_come_first(wire: str) -> None:
    async with starter(wire)(REPLY) as world:
        assert isinstance(world.engine, Scorer)
        scores = await world.engine.score(ScoreRequest("s", "scripted", PROMPT, 2, top_logprobs=3))
    for token, own, ids, values in zip(PROMPT[2:], scores.logprobs, scores.top_ids, scores.top_logprobs, strict=True):
        assert list(ids) == [token, token + 1, token + 2]
        assert list(values) == [own, own - 1, own - 2]


@pytest.mark.parametrize("wire", SCORING)
@pytest.mark.parametrize("kind", ["nan_logprobs", "short_logprobs"])
async def test_a_score_is_never_made_up(wire: str, kind: str) -> None:
    async with starter(wire)(ScriptedReply(ids=REPLY.ids, fault=Fault(kind=kind, after=0))) as world:  # type: ignore[arg-type]
        assert isinstance(world.engine, Scorer)
        with pytest.raises(EngineProtocolError):
            await world.engine.score(ScoreRequest("s", "scripted", PROMPT, 1))
