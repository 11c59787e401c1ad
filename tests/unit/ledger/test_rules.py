"""Rules that no group could ever meet are refused when they are given."""

from __future__ import annotations

import pytest

from rolltap.contract.admin import EACH_CALL, MAX_ROLLOUTS, WILDCARDS, GroupRule
from rolltap.errors import InvalidRequest


@pytest.mark.parametrize("scope", ["rolout", "call:", "role", "span:*:1", ""])
def test_a_scope_that_no_reward_can_have_is_refused(scope: str) -> None:
    with pytest.raises(InvalidRequest, match=r"rule\.scopes: no reward scope .*known: rollout, call:ID"):
        GroupRule(scopes=("rollout", scope)).check(2)


@pytest.mark.parametrize("scope", ["rollout", "role:judge", "call:c1", "span:c1:0:5", EACH_CALL, *WILDCARDS])
def test_a_scope_that_a_reward_can_have_is_taken(scope: str) -> None:
    GroupRule(scopes=(scope,)).check(2)


def test_spares_have_a_bound() -> None:
    GroupRule(usable=MAX_ROLLOUTS, spares=MAX_ROLLOUTS).check(1)
    with pytest.raises(InvalidRequest, match=f"at most {MAX_ROLLOUTS}"):
        GroupRule(usable=1, spares=MAX_ROLLOUTS + 1).check(1)
