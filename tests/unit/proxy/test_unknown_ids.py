"""Ids past the tokenizer's vocabulary: a flaw of their call, which neither a trainer nor an engine sees again."""

from __future__ import annotations

from typing import Any

import pytest

from rolltap.engine.scripted import Fault, ScriptedReply
from rolltap.reconstructor.reconstruct import reconstruct
from rolltap.types import BreakReason, Flaw

from .test_kept_arrays import USER, served

FAULTS = (None, Fault(kind="nan_logprobs"), Fault(kind="no_logprobs"))


@pytest.mark.parametrize(("unknown", "fault"), [(880, None), (10**6, None), *((2**31 - 1, fault) for fault in FAULTS)])
async def test_a_reply_with_an_unknown_id_is_masked_and_goes_on_as_text(
    plane: Any, unknown: int, fault: Fault | None
) -> None:
    """Also where the engine's log-probs are as broken as its ids."""
    tokenizer = plane.policy.source.continuation.renderer.tokenizer
    known = tokenizer.encode("one")
    ids = (*known, unknown, tokenizer.convert_tokens_to_ids("<|im_end|>"))
    reply = ScriptedReply(ids=ids, fault=fault)
    async with served(plane, "vllm", "zero", reply, "two"):
        history = [USER]
        for _ in range(3):
            answer = (await plane.client.chat(*history)).json()["choices"][0]["message"]
            history += [answer, USER]
    first, second, third = [row.call() for row in await plane.rows()]
    assert second.flaw is Flaw.IDS_UNKNOWN
    assert unknown in second.output_ids
    assert third.break_ is not None
    assert third.break_.reason is BreakReason.IDS_UNKNOWN
    assert unknown not in third.prompt_ids
    trajectory = reconstruct([first, second, third])
    assert [one.mask for one in trajectory.classifications] == ["", "ids_unknown", ""]
    assert trajectory.counts["masked_calls.ids_unknown"] == 1
    assert "ids_unknown" in [finding.name for finding in trajectory.findings]
    assert all(segment.token_ids.max() < 880 for segment in trajectory.segments)
