"""Advantages by the numbers of their papers and reference implementations."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rolltap.errors import ConfigError
from rolltap.trainer_client.advantages import ENTRY_POINTS, advantage_method, method_names

from ...contract.outsider import install_distribution, run_suite

REWARDS = st.lists(st.lists(st.floats(-5, 5), max_size=6), min_size=1, max_size=4)


@pytest.mark.parametrize(
    ("name", "groups", "expected"),
    [
        ("grpo", [[1, 0, 0, 1]], [[0.866, -0.866, -0.866, 0.866]]),
        ("dr_grpo", [[1, 0, 0, 1]], [[0.5, -0.5, -0.5, 0.5]]),
        ("rloo", [[1, 0, 0, 1]], [[0.6667, -0.6667, -0.6667, 0.6667]]),
        ("lite_ppo", [[1, 0], [1, 1]], [[1, -1], [0, 0]]),
        ("reinforce", [[1, 0.25]], [[1, 0.25]]),
    ],
)
def test_published_numbers(name: str, groups: list[list[float]], expected: list[list[float]]) -> None:
    found = advantage_method(name)(groups)
    assert [pytest.approx(values, abs=1e-4) for values in found] == expected


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo"])
def test_a_group_of_one_teaches_nothing(name: str) -> None:
    assert advantage_method(name)([[1.0], []]) == [[0.0], []]


@pytest.mark.parametrize("name", method_names())
@settings(deadline=None)
@given(groups=REWARDS)
def test_one_number_a_rollout(name: str, groups: list[list[float]]) -> None:
    assert [len(values) for values in advantage_method(name)(groups)] == [len(rewards) for rewards in groups]


@pytest.mark.parametrize("name", [name for name in method_names() if name != "reinforce"])
@settings(deadline=None)
@given(groups=REWARDS, shift=st.integers(-3, 3))
def test_a_constant_added_to_all_rewards_changes_nothing(name: str, groups: list[list[float]], shift: int) -> None:
    method = advantage_method(name)
    rounded = [[round(reward, 2) for reward in rewards] for rewards in groups]
    moved = [[reward + shift for reward in rewards] for rewards in rounded]
    for before, after in zip(method(rounded), method(moved), strict=True):
        assert after == pytest.approx(before, abs=1e-5)


def test_an_unknown_method_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="no advantage method 'ppo'; known: dr_grpo, grpo"):
        advantage_method("ppo")


SOUND = """
from statistics import median
def TOY(groups):
    return [[reward - median(rewards) for reward in rewards] for rewards in groups]
"""
SHORT = "def TOY(groups): return [rewards[1:] for rewards in groups]"


@pytest.mark.parametrize(("source", "outcome"), [(SOUND, "2 passed"), (SHORT, "2 failed")])
def test_the_contract_takes_up_a_method_from_outside_the_tree(tmp_path: Path, source: str, outcome: str) -> None:
    install_distribution(tmp_path, ENTRY_POINTS, "median", source)
    printed = run_suite(Path(__file__), tmp_path, "median")
    assert outcome in printed, printed
