"""The promises of the reconstructor over any session."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rolltap.extras import known_names
from rolltap.reconstructor.reconstruct import reconstruct
from rolltap.reconstructor.rules import SWITCHABLE, Rules
from rolltap.reconstructor.segments import ENTRY_POINTS, STRATEGIES
from rolltap.types import NO_VERSION, Call, CallKind, Finish, Flaw, Outcome, Trajectory
from rolltap.wire import pack

from .forests import sessions

by_every_strategy = pytest.mark.parametrize("strategy", known_names(STRATEGIES, ENTRY_POINTS))
rule_sets = st.builds(lambda off: Rules().train(*off), st.sets(st.sampled_from(sorted(SWITCHABLE))))


def context(call: Call) -> list[int]:
    return [*call.prompt_ids.tolist(), *call.output_ids.tolist()]


def longest_proven_parent(calls: list[Call], call: Call) -> list[int] | None:
    """The naive search: the context of the longest earlier (or recorded) call that is a prefix of the prompt."""
    prompt = call.prompt_ids.tolist()
    found = [
        context(earlier)
        for earlier in calls
        if (earlier.id < call.id or earlier.id == call.parent_id)
        and earlier.id != call.id
        and len(earlier.output_ids)
        and prompt[: earlier.context_length] == context(earlier)
    ]
    return max(found, key=len, default=None)


def trained_tokens(trajectory: Trajectory) -> Counter[tuple[str, int, int, float, int]]:
    """Every token with loss: (call, position in its output, id, log-probability, version)."""
    found: Counter[tuple[str, int, int, float, int]] = Counter()
    for segment in trajectory.segments:
        covered = np.zeros(len(segment), bool)
        for turn in segment.turns:
            if not turn.trained:
                continue
            covered[turn.start : turn.end] = True
            for i in range(turn.start, turn.end):
                token = int(segment.token_ids[i]), float(segment.logprobs[i]), int(segment.versions[i])
                found[(turn.call_id, i - turn.start, *token)] += 1
        assert np.array_equal(covered, segment.loss_mask)
        assert not segment.logprobs[~segment.loss_mask].any()
        assert (segment.versions[~segment.loss_mask] == NO_VERSION).all()
    return found


def may_train(call: Call, rules: Rules) -> bool:
    """The rules again, in one expression, without the retries."""
    switched = {
        "auxiliary": call.kind is CallKind.AUXILIARY,
        "summary": call.kind is CallKind.SUMMARY,
        "length_truncated": call.finish is Finish.LENGTH,
        "tool_call_unparsable": call.flaw is Flaw.TOOL_CALL_UNPARSABLE,
        "version_unknown": call.flaw is Flaw.VERSION_UNKNOWN,
    }
    return (
        call.outcome is Outcome.COMPLETED
        and call.delivered is not False
        and call.flaw not in (Flaw.LOGPROBS_MISSING, Flaw.TOKENS_MISSING)
        and call.kind not in (CallKind.JUDGE, CallKind.SIMULATOR)
        and not any(holds and name in rules.mask for name, holds in switched.items())
    )


@by_every_strategy
@given(calls=sessions(), rules=rule_sets)
def test_the_trained_tokens_are_the_sampled_tokens_of_the_trained_calls_once_each(calls, strategy, rules):
    trajectory = reconstruct(calls, strategy=strategy, rules=rules)
    found = trained_tokens(trajectory)
    by_id = {call.id: call for call in calls}
    expected: Counter[tuple[str, int, int, float, int]] = Counter()
    for call_id in {token[0] for token in found}:
        call = by_id[call_id]
        assert may_train(call, rules)
        versions = [span.version for span in call.versions for _ in range(span.start, span.end)]
        versions = versions or [NO_VERSION] * len(call.output_ids)
        for i, (token, logprob) in enumerate(zip(call.output_ids.tolist(), call.logprobs.tolist(), strict=True)):
            expected[(call_id, i, token, logprob, versions[i])] += 1
    assert found == expected
    left_out = {call.id for call in calls if may_train(call, rules)} - {token[0] for token in found}
    for call_id in left_out:
        twins = [c for c in calls if c.id != call_id and np.array_equal(c.prompt_ids, by_id[call_id].prompt_ids)]
        assert twins, "only a call that was retried may be left out beyond the rules"


@by_every_strategy
@given(calls=sessions())
def test_every_turn_stands_behind_the_prompt_that_the_engine_saw(calls, strategy):
    by_id = {call.id: call for call in calls}
    for segment in reconstruct(calls, strategy=strategy).segments:
        for turn in segment.turns:
            call = by_id[turn.call_id]
            assert segment.token_ids[: turn.start].tolist() == call.prompt_ids.tolist()
            assert segment.token_ids[turn.start : turn.end].tolist() == call.output_ids.tolist()
        assert segment.turns[-1].end == len(segment)


@given(sessions())
def test_segments_follow_the_longest_proven_parent(calls):
    by_id = {call.id: call for call in calls}
    for segment in reconstruct(calls, strategy="tree").segments:
        parent: list[int] | None = None
        for turn in segment.turns:
            assert longest_proven_parent(calls, by_id[turn.call_id]) == parent
            parent = context(by_id[turn.call_id])


@by_every_strategy
@given(calls=sessions(), data=st.data())
def test_order_and_duplicates_change_nothing(calls, strategy, data):
    plain = pack(reconstruct(calls, strategy=strategy))
    again = data.draw(st.lists(st.sampled_from(calls), max_size=4))
    shuffled = data.draw(st.permutations([*calls, *again]))
    assert pack(reconstruct(shuffled, strategy=strategy)) == plain


@given(sessions())
def test_a_break_stands_before_every_call_that_extends_none_and_is_measured(calls):
    trajectory = reconstruct(calls, strategy="prefix")
    by_id = {call.id: call for call in calls}
    broken = {found.call_id: found for found in trajectory.breaks}
    assert len(broken) == len(trajectory.breaks)
    seen: list[list[int]] = []
    for call in calls:
        prompt = call.prompt_ids.tolist()
        alone = longest_proven_parent(calls, call) is None
        if alone and seen and prompt not in seen:
            assert call.id in broken
        seen.append(prompt)
    for found in trajectory.breaks:
        if found.parent_id is None:
            assert found.token_index == 0
            continue
        parent, prompt = context(by_id[found.parent_id]), by_id[found.call_id].prompt_ids.tolist()
        assert prompt[: found.token_index] == parent[: found.token_index]
        rest = prompt[found.token_index :], parent[found.token_index :]
        assert not (rest[0] and rest[1]) or rest[0][0] != rest[1][0]


@by_every_strategy
@given(calls=sessions())
def test_the_counts_add_up(calls, strategy):
    trajectory = reconstruct(calls, strategy=strategy)
    counts = trajectory.counts
    masked = sum(n for name, n in counts.items() if name.startswith("masked_calls."))
    masked_tokens = sum(n for name, n in counts.items() if name.startswith("masked_tokens."))
    assert counts["calls"] == len(calls) == counts["trained_calls"] + masked
    assert counts["sampled_tokens"] == counts["trained_tokens"] + masked_tokens
    assert counts["trainable_tokens"] == counts["trained_tokens"] == sum(trained_tokens(trajectory).values())
    assert counts["breaks"] == len(trajectory.breaks)


@given(sessions(), st.data())
def test_only_replies_of_the_policy_that_came_are_answers(calls, data):
    """Whatever is wrong with the calls of other policies, and with those that their harness never got."""
    policies = data.draw(st.lists(st.sampled_from("pq"), min_size=len(calls), max_size=len(calls)))
    mixed = [replace(call, policy=policy) for call, policy in zip(calls, policies, strict=True)]
    trajectory = reconstruct(mixed, rules=Rules(policy="p"))
    others = (CallKind.JUDGE, CallKind.SIMULATOR)
    got = [call for call in mixed if call.outcome is Outcome.COMPLETED and call.delivered is not False]
    assert trajectory.counts["answers"] == sum(call.policy == "p" and call.kind not in others for call in got)


@given(sessions(), st.data())
def test_a_retry_before_it_never_costs_a_later_turn(calls, data):
    """An extra sample of any prompt, wherever it comes, leaves every call that was gone on from trained."""
    rules = Rules()
    before = {token[0] for token in trained_tokens(reconstruct(calls))}
    twin = data.draw(st.sampled_from(calls))
    extra = replace(
        twin, id=f"{twin.id}-retry", outcome=Outcome.ABORTED, finish=Finish.ABORT, parent_id=None, break_=None
    )
    after = {token[0] for token in trained_tokens(reconstruct([*calls, extra], rules=rules))}
    assert before <= after


@pytest.mark.parametrize("strategy", sorted(STRATEGIES))
def test_no_calls_give_an_empty_trajectory(strategy):
    trajectory = reconstruct([], strategy=strategy)
    assert trajectory.segments == ()
    assert trajectory.breaks == ()
