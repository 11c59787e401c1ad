"""Which rollouts count for what, and how much each weighs."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from rolltap.contract.trainer import LeasedGroup, all_equal
from rolltap.errors import AlignmentError
from rolltap.ledger.groups import zero_variance
from rolltap.trainer_client.data.packing import PackedRow
from rolltap.trainer_client.data.scoring import Normalise, Overlong, has_loss, informative, token_weights, trainable
from rolltap.trainer_client.recipes import estimators
from rolltap.types import Scoring, Segment

from .making import VOCABULARY, group, random_group, record, rows_of, segment

TEN = segment(range(12), range(2, 12))
FIVE = segment(range(12), range(7, 12))
EMPTY = segment(range(12), [])


def advantage(row: PackedRow) -> float:
    """The one that all trained tokens of the row share."""
    (found,) = set(row.advantages[row.segment.loss_mask].tolist())
    return found


def of_lengths() -> LeasedGroup:
    """One rollout of ten trained tokens in one row, one of ten in two rows, one of five."""
    return group("g", [record("g", 0, [TEN], 1.0), record("g", 1, [FIVE, FIVE], 0.0), record("g", 2, [FIVE], 0.5)])


def test_masked_rollouts_are_in_the_baseline_and_not_in_the_loss() -> None:
    records = [
        record("g", 0, [TEN], 1.0),
        record("g", 1, [TEN], 0.0, Scoring.MASKED),
        record("g", 2, [TEN], 100.0, Scoring.UNSCORABLE),
        record("g", 3, [TEN], None),
    ]
    (only,) = rows_of([group("g", records)], "dr_grpo")
    assert (only.rollout, advantage(only)) == (0, 0.5)


@pytest.mark.parametrize(
    ("normalise", "shares"),
    [("token", [10 / 25, 10 / 25, 5 / 25]), ("rollout", [1 / 3, 1 / 3, 1 / 3]), ("constant", [1 / 6, 1 / 6, 1 / 12])],
)
def test_what_a_rollout_weighs_does_not_depend_on_its_rows(normalise: Normalise, shares: list[float]) -> None:
    found = [0.0, 0.0, 0.0]
    for row in rows_of([of_lengths()], normalise=normalise, length=20):
        found[row.rollout] += float(row.weights[row.segment.loss_mask].sum())
    assert found == pytest.approx(shares)


@pytest.mark.parametrize("normalise", ["token", "rollout"])
def test_one_rollout_of_one_token_weighs_1(normalise: Normalise) -> None:
    assert token_weights(np.array([1]), np.array([True]), normalise, 20).tolist() == [1.0]
    assert token_weights(np.array([3]), np.array([False]), normalise, 20).tolist() == [0.0]


def test_overlong_rollouts_lose_reward_gradually() -> None:
    overlong = Overlong(limit=20, buffer=4)
    assert [overlong.penalty(tokens) for tokens in (0, 16, 18, 20, 30)] == [0, 0, -0.5, -1, -1]
    records = [record("g", 0, [segment(range(20), range(2, 20))], 1.0), record("g", 1, [TEN], 1.0)]
    long, short = rows_of([group("g", records)], "dr_grpo", overlong_limit=20, overlong_buffer=4)
    assert (advantage(long), advantage(short)) == (-0.25, 0.25)


def test_rollouts_without_trained_tokens_only_count_in_the_baseline() -> None:
    records = [record("g", 0, [TEN], 1.0), record("g", 1, [segment(range(5), [])], 0.0)]
    (only,) = rows_of([group("g", records)], "dr_grpo")
    assert advantage(only) == 0.5


@pytest.mark.parametrize(
    ("rollouts", "loss"),
    [
        ([], False),
        ([(TEN, Scoring.SCORED)], True),
        ([(TEN, Scoring.MASKED)], False),
        ([(EMPTY, Scoring.SCORED)], False),
        ([(EMPTY, Scoring.SCORED), (TEN, Scoring.MASKED)], False),
        ([(TEN, Scoring.MASKED), (EMPTY, Scoring.SCORED), (TEN, Scoring.SCORED)], True),
    ],
)
def test_a_group_has_loss_if_one_of_its_scored_rollouts_trains_a_token(
    rollouts: list[tuple[Segment, Scoring]], loss: bool
) -> None:
    records = [record("g", at, [part], float(at), scoring) for at, (part, scoring) in enumerate(rollouts)]
    assert has_loss(group("g", records)) is loss


def test_groups_whose_rewards_are_equal_are_not_informative() -> None:
    assert informative(random_group("g", [1.0, 0.0]))
    assert not informative(random_group("g", [1.0, 1.0]))
    records = [record("g", 0, [TEN], 1.0), record("g", 1, [TEN], 0.0, Scoring.UNSCORABLE)]
    assert not informative(group("g", records))


@pytest.mark.parametrize(
    ("rewards", "equal"),
    [
        ([], True), ([0.7], True), ([0.3, 0.1 + 0.2], True), ([1e-300, 0.0], True), ([-0.3, -0.1 - 0.2], True),
        ([0.3, 0.3000001], False), ([1e-3, 0.0], False), ([1e300, -1e300], False), ([math.nan, math.nan], False),
    ],
)  # fmt: skip
def test_ledger_leases_and_recipes_agree_on_equal_rewards(rewards: list[float], equal: bool) -> None:
    assert all_equal(rewards) is equal
    assert zero_variance(rewards) is (equal and len(rewards) > 1)
    if not any(map(math.isnan, rewards)):
        assert informative(random_group("g", rewards)) is not equal
        centred = estimators.centre(np.array(rewards), np.zeros(len(rewards), np.int64))
        assert centred.any() is np.bool_(not equal)


def drawn_from(*ids: int) -> Segment:
    """A segment whose one trained token, id 2, was drawn from `ids`."""
    return replace(segment([1, 2], [1]), extras={"sampling_mask": np.array([[0, 0], ids], np.int32)})


def constrained(row: int, table: list[int]) -> Segment:
    extras = {"mask_rows": np.array([0, row], np.int32), "mask_table": np.array(table, np.int32)}
    return replace(segment([1, 2], [1]), extras=extras)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (record("g", 0, [TEN], float("inf")), "the reward is inf"),
        (record("g", 0, [segment([1, 2], [0])], 1.0), "nothing predicts it"),
        (record("g", 0, [segment([1, 2], [1], logprob=float("nan"))], 1.0), "not finite"),
        (record("g", 0, [segment([-1, 2], [1])], 1.0), "-1 is no token id"),
        (record("g", 0, [drawn_from(3, -1)], 1.0), "token 2 is not among the ids of its sampling mask"),
        (record("g", 0, [drawn_from(2, VOCABULARY)], 1.0), f"a sampling mask has id {VOCABULARY}"),
        (record("g", 0, [constrained(-2 - 3, [])], 1.0), "token 2 is not among the ids of its sampling mask"),
        (record("g", 0, [constrained(0, [2, 1, 3])], 1.0), "token 2 is not among the ids of its sampling mask"),
        (record("g", 0, [constrained(0, [2, 2, VOCABULARY])], 1.0), rf"ids up to \[{VOCABULARY}\]"),
        (record("g", 0, [constrained(5, [2, 2, 3])], 1.0), "a sampling mask is missing in its table"),
    ],
)
def test_what_cannot_be_trained_is_named(bad: object, message: str) -> None:
    with pytest.raises(AlignmentError, match=f"group g, rollout g-r0: .*{message}"):
        trainable(group("g", [bad]), VOCABULARY)  # type: ignore[list-item]


@pytest.mark.parametrize("unknown", [VOCABULARY, 10**6, 2**31 - 1])
def test_only_segments_with_ids_past_the_vocabulary_are_left_out(
    unknown: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Replies of an upstream whose tokenizer nobody named. In the context of a trained token, too."""
    strange, context = segment([1, unknown], [1]), segment([unknown, 1, 2], [2])
    records = [record("g", 0, [TEN, strange], 1.0), record("g", 1, [context], 5.0), record("g", 2, [FIVE], 0.0)]
    taken = trainable(group("g", records), VOCABULARY)
    assert [one.trajectory.segments for one in taken.rollouts] == [(TEN,), (), (FIVE,)]
    assert [advantage(row) for row in rows_of([taken], "dr_grpo")] == [0.5, -0.5], "the second is no baseline"
    said = [one.message for one in caplog.records]
    assert "rollout g-r0: only 1 of its 2 segments" in said[0]
    assert "rollout g-r1: only 0 of its 1 segments" in said[1]
    assert all(f"token ids up to {unknown}, of a vocabulary of {VOCABULARY}" in one for one in said)


def test_a_token_drawn_from_ids_that_hold_it_or_from_all_is_trained() -> None:
    for ids in [(2, -1), (1, 2), (-1, -1)]:
        trainable(group("g", [record("g", 0, [drawn_from(*ids)], 1.0)]), VOCABULARY)
    for row, table in [(-1, []), (-2 - 2, []), (0, [2, 1, 2]), (0, [-1, 4]), (2, [1, 5, -1, 6])]:
        trainable(group("g", [record("g", 0, [constrained(row, table)], 1.0)]), VOCABULARY)
