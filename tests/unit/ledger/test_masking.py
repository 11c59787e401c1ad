"""What is left of a trajectory whose stale tokens carry no loss."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rolltap.ledger.policies import VersionHistory
from rolltap.ledger.rebuilding import answered, without_late_calls, without_stale
from rolltap.reconstructor.reconstruct import reconstruct
from rolltap.reconstructor.rules import Rules
from rolltap.types import ROUTED_EXPERTS, CallKind

from ..reconstructor.forests import make_call
from .world import trajectory

WHOSE = st.tuples(
    st.sampled_from(["p", "frozen"]), st.sampled_from([CallKind.MAIN, CallKind.JUDGE, CallKind.SIMULATOR])
)


@given(st.lists(WHOSE, max_size=4))
def test_a_rollout_in_which_others_alone_answered_has_no_answer(whose: list[tuple[str, CallKind]]) -> None:
    """Its reward is no baseline: the policy has no token in it."""
    calls = [make_call(at, [at], [7, at], policy=policy, kind=kind) for at, (policy, kind) in enumerate(whose)]
    assert answered(reconstruct(calls, rules=Rules(policy="p"))) == (("p", CallKind.MAIN) in whose)


def test_stale_tokens_lose_loss_and_values_but_not_their_experts() -> None:
    """Expert 0 is an expert: zeros would be replayed in the prompt as well."""
    made = trajectory("s", (0, 5))
    (segment,) = made.segments
    experts = np.full((len(segment), 1, 2), -1, np.int16)
    experts[segment.loss_mask] = [3, 1]
    candidates = np.where(segment.loss_mask, 7.0, 0.0).astype(np.float32)
    extras = {ROUTED_EXPERTS: experts, "candidates": candidates}
    made = replace(made, segments=(replace(segment, extras=extras),))
    (kept,) = without_stale(made, VersionHistory(5), 1).segments
    assert np.flatnonzero(kept.loss_mask).tolist() == [len(segment) - 1]
    np.testing.assert_array_equal(kept.extras[ROUTED_EXPERTS], experts)
    assert np.flatnonzero(kept.extras["candidates"]).tolist() == [len(segment) - 1]


def test_a_late_call_says_that_it_is_late() -> None:
    made = trajectory("s", (0, 5))
    (call,) = [turn.call_id for turn in made.segments[0].turns if turn.trained]
    kept = without_late_calls(made, {"another"})
    assert (kept.counts["masked_calls.late"], kept.counts["trained_tokens"]) == (1, 0)
    assert kept.counts["masked_tokens.late"] == int(made.segments[0].loss_mask.sum()) > 0
    assert without_late_calls(made, {call}) is made
