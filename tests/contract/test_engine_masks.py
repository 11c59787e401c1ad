"""The ids that top-p, top-k or min-p left to draw each token from, over every engine client that can have them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rolltap.engine.scripted import ScriptedReply
from rolltap.engine.scripted.sampling import mask_of, masked_logprob_of
from rolltap.proxy.engines.base import Scorer, ScoreRequest

from .engine_world import EXACT, PROMPT, REPLY, ids_of, logprobs_of, starter

IDS = list(REPLY.ids or ())
SGLANG = ["sglang", "sglang-incremental"]


def masks_of(chunks: list[Any]) -> list[list[int]]:
    rows = np.concatenate([chunk.extras["sampling_mask"] for chunk in chunks if chunk.token_ids])
    return [[id for id in row if id >= 0] for row in rows.tolist()]


@pytest.mark.parametrize("wire", ["vllm-masks", *SGLANG])
@pytest.mark.parametrize("size", [1, 3, 100])
@pytest.mark.parametrize("stream", [True, False])
async def test_every_token_has_its_mask(wire: str, size: int, stream: bool) -> None:
    async with starter(wire)(ScriptedReply(ids=REPLY.ids, tokens_per_event=size)) as world:
        chunks = await world.sample(top_p=0.8, top_k=3, sampling_mask=3, stream=stream)
    assert ids_of(chunks) == IDS
    assert masks_of(chunks) == [mask_of(token, at) for at, token in enumerate(IDS)]


@pytest.mark.parametrize("wire", SGLANG)
async def test_sglangs_logprobs_are_those_of_the_mask(wire: str) -> None:
    """Its `output_token_logprobs` are of the whole vocabulary, whatever was left of it."""
    async with starter(wire)(REPLY) as world:
        chunks = await world.sample(top_p=0.8, sampling_mask=3, top_logprobs=2)
        without = await world.sample(top_p=0.8, top_logprobs=2)
    assert logprobs_of(chunks) == [masked_logprob_of(token, at) for at, token in enumerate(IDS)]
    assert logprobs_of(without) == EXACT
    for cut, whole in zip(chunks, without, strict=True):
        np.testing.assert_array_equal(cut.extras["top_logprobs"], whole.extras["top_logprobs"])


@pytest.mark.parametrize("wire", SGLANG)
@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.0}, {"temperature": 0.0, "top_k": 1}])
async def test_sglang_is_asked_for_masks_only_where_there_is_one_to_replay(wire: str, sampling: dict[str, Any]) -> None:
    """It refuses a mask of the whole vocabulary, and no trainer replays greedy sampling."""
    async with starter(wire)(REPLY) as world:
        chunks = await world.sample(sampling_mask=3, **sampling)
    assert all("sampling_mask" not in chunk.extras for chunk in chunks)
    assert ids_of(chunks) == IDS


async def test_a_longer_mask_is_left_out_with_its_logprobs() -> None:
    """The call is then named as truncated; its log-probs stay those of what was sampled."""
    async with starter("sglang")(ScriptedReply(ids=REPLY.ids, tokens_per_event=100)) as world:
        (chunk,) = await world.sample(top_p=0.8, sampling_mask=2)
    assert "sampling_mask" not in chunk.extras
    assert chunk.logprobs == [masked_logprob_of(token, at) for at, token in enumerate(IDS)]


async def test_an_sglang_without_masks_answers_without_them() -> None:
    async with starter("sglang-without-masks")(REPLY) as world:
        chunks = await world.sample(top_p=0.8, sampling_mask=3)
    assert all("sampling_mask" not in chunk.extras for chunk in chunks)
    assert logprobs_of(chunks) == EXACT


async def test_a_vllm_that_returns_masks_is_probed_and_scores() -> None:
    """It refuses every request without top-k."""
    async with starter("vllm-masks")(REPLY) as world:
        facts = await world.engine.probe()
        assert isinstance(world.engine, Scorer)
        scores = await world.engine.score(ScoreRequest("s", "scripted", PROMPT, 1))
    assert facts.logprobs_mode == "processed"
    assert facts.weight_versions
    assert len(scores.logprobs) == len(PROMPT) - 1
