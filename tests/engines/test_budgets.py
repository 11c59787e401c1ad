"""A budget of thinking on a real vLLM: it forces the end there, and our record of what it forced is right."""

from __future__ import annotations

import asyncio
from itertools import chain

import numpy as np
import pytest
from tokenizers import Tokenizer

from rolltap.engine.tiny import FOLDER
from rolltap.proxy.engines.base import SampleChunk, SampleRequest
from rolltap.proxy.engines.retries import DEFAULT_RETRIES
from rolltap.proxy.engines.vllm import VllmEngine
from rolltap.settings import EngineSettings
from rolltap.token_masks import FREE, MASK_ROWS

from .servers import MODEL

TOKENIZER = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
OPEN, CLOSE = TOKENIZER.encode("<think></think>", add_special_tokens=False).ids


@pytest.mark.parametrize("before", [0, 2])
@pytest.mark.parametrize("most", [0, 1, 3, 8])
def test_the_end_is_forced_at_the_budget(vllm_url: str, before: int, most: int) -> None:
    """`before`: tokens of thinking that the prompt has already, as a fork's has."""
    prompt = [*TOKENIZER.encode("Copy apple.txt to pear.txt.").ids, OPEN, *TOKENIZER.encode("so so").ids[:before]]
    budget = {"open": OPEN, "close": CLOSE, "most": most}

    async def sample() -> list[SampleChunk]:
        engine = VllmEngine("main", EngineSettings(kind="vllm", url=vllm_url), retries=DEFAULT_RETRIES)
        chunks: list[SampleChunk] = []
        try:
            assert (await engine.probe()).budgets
            request = SampleRequest("budget", MODEL, prompt, 16, seed=most, extra={"thinking_budget": budget})
            await engine.sample(request, lambda chunk: chunks.append(chunk) or True)
        finally:
            await engine.close()
        return chunks

    chunks = asyncio.run(sample())
    ids = list(chain.from_iterable(chunk.token_ids for chunk in chunks))
    values = list(chain.from_iterable(chunk.logprobs or () for chunk in chunks))
    rows = np.concatenate([chunk.extras[MASK_ROWS] for chunk in chunks if chunk.token_ids]).tolist()
    left = max(most - before, 0)
    if CLOSE not in ids[:left]:  # it did not end by itself
        assert (ids[left], values[left], rows[left]) == (CLOSE, 0.0, -2 - CLOSE)
        assert rows[:left] == [FREE] * left
        assert all(value < 0 for value in values[:left])
