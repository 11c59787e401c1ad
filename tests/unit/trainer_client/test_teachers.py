"""Teachers that the server serves: what they are asked, what is made of it, and what is refused."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from rolltap.contract.trainer import PolicyScores, PolicyState, ScoredIds, TokenScores
from rolltap.errors import ConfigError
from rolltap.trainer_client.data.step import ScoredPass, Step, view
from rolltap.trainer_client.recipes import make_recipe
from rolltap.trainer_client.run.teachers import SEQUENCES_AT_ONCE, scored_reading
from rolltap.types import Segment

from .making import group, record, segment
from .test_recipe_contract import tagged_model

LARGE = ScoredPass("large")


class Large:
    """A served policy that gives token id n the log-prob -n / 10."""

    def __init__(self, tokenizer_hash: str = "") -> None:
        self.requests: list[list[tuple[list[int], int]]] = []
        self._tokenizer_hash = tokenizer_hash

    def policy(self, name: str) -> PolicyState:
        return PolicyState(name, 3, self._tokenizer_hash)

    def score(self, policy: str, sequences: Sequence[ScoredIds], *, top_logprobs: int = 0) -> PolicyScores:
        self.requests.append([(list(one.token_ids), one.start) for one in sequences])
        return PolicyScores(
            policy, 3, [TokenScores([-id / 10 for id in one.token_ids[one.start :]]) for one in sequences]
        )


def step_of(*parts: Segment) -> Step:
    return view([group("g", [record("g", index, [part], float(index)) for index, part in enumerate(parts)])])


def test_a_row_is_scored_from_its_first_trained_token_to_its_last() -> None:
    """Ids that were observed in between are scored, too, and their scores are dropped."""
    large = Large()
    reading = scored_reading(large, LARGE, step_of(segment([5, 6, 7, 8, 9, 3], [2, 4]), segment([5, 4], [1])))
    assert large.requests == [[([5, 6, 7, 8, 9], 2), ([5, 4], 1)]]
    assert [one.tolist() for one in reading.logprobs] == [
        pytest.approx([0, 0, -0.7, 0, -0.9, 0]),
        pytest.approx([0, -0.4]),
    ]


def test_many_rows_are_several_requests() -> None:
    large = Large()
    reading = scored_reading(large, LARGE, step_of(*(segment([5, one], [1]) for one in range(40))))
    assert [len(request) for request in large.requests] == [SEQUENCES_AT_ONCE, SEQUENCES_AT_ONCE, 8]
    assert [one[1] for one in reading.logprobs] == pytest.approx([-one / 10 for one in range(40)])


def test_opd_moves_each_token_towards_the_teacher() -> None:
    """The student's ln .5 and ln .8; the teacher's -.7 and -.8: twice the differences."""
    part = replace(segment([5, 6, 7, 8], [2, 3]), logprobs=np.log([1, 1, 0.5, 0.8]).astype(np.float32))
    recipe, step = make_recipe("opd", {"teacher_policy": "large", "strength": 2.0}), step_of(part)
    (scored,) = recipe.passes(step).values()
    assert isinstance(scored, ScoredPass)
    credit = recipe.credit(replace(step, readings={"teacher": scored_reading(Large(), scored, step)}))
    wanted = [0, 0, 2 * (-0.7 - math.log(0.5)), 2 * (-0.8 - math.log(0.8))]
    assert credit.advantages[0].tolist() == pytest.approx(wanted, abs=1e-6)
    with pytest.raises(ConfigError, match=r"trainer\.options\.teacher_policy: name the policy that scores"):
        make_recipe("opd", {}).passes(step)


@pytest.mark.parametrize("extra", ["temperature", "sampling_mask"])
def test_what_was_sampled_otherwise_than_scores_are_is_refused(extra: str) -> None:
    arrays = {"temperature": np.full(3, 0.7, np.float32), "sampling_mask": np.full((3, 1), 7, np.int32)}
    part = replace(segment([5, 6, 7], [2]), extras={extra: arrays[extra]})
    with pytest.raises(ConfigError, match="'large' scores at temperature 1 over the whole vocabulary"):
        scored_reading(Large(), LARGE, step_of(part))


def test_a_teacher_of_another_tokenizer_is_refused(tmp_path: Path) -> None:
    step = replace(step_of(segment([5, 6], [1])), tokenizer=tagged_model(tmp_path / "model"))
    with pytest.raises(ConfigError, match=r"policy 'large' has tokenizer 0123456789ab, the model in training"):
        scored_reading(Large("0123456789abcdef"), LARGE, step)
