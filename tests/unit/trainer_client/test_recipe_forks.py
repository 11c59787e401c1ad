"""Credit over forks by hand: a shared beginning is paid by all its continuations.

With ARPO a fork's own tokens are paid by its own reward; with APPO a fork carries no loss.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from rolltap.contract.trainer import RolloutRecord
from rolltap.trainer_client.data.step import POLICY, PolicyReading, Step, view
from rolltap.trainer_client.recipes import make_recipe
from rolltap.types import NO_VERSION, CallSpan, RolloutParent, Segment

from .making import group, record


def a_segment(calls: Sequence[tuple[str, int, str]]) -> Segment:
    """Calls of (id, sampled tokens, who sampled it), each behind two tokens of prompt, but a fork inside a reply."""
    spans: list[CallSpan] = []
    length = 0
    for number, (call_id, sampled, by) in enumerate(calls):
        inside = number > 0 and call_id == f"{calls[number - 1][0]}'"
        start = length + (0 if inside else 2)
        length = start + sampled
        spans.append(CallSpan(call_id, start, length, not by, number, sampled_by=by))
    mask = np.zeros(length, bool)
    for span in spans:
        mask[span.start : span.end] = span.trained
    versions = np.where(mask, 0, NO_VERSION).astype(np.int32)
    return Segment(
        np.arange(length, dtype=np.int32), mask, np.where(mask, -1, 0).astype(np.float32), versions, tuple(spans)
    )


def a_step(rewards: Sequence[float], rollouts: Sequence[Sequence[tuple[str, int, str]]]) -> Step:
    records = [
        continuing(record("g", number, [a_segment(calls)], reward), calls)
        for number, (calls, reward) in enumerate(zip(rollouts, rewards, strict=True))
    ]
    return view([group("g", records)])


def continuing(one: RolloutRecord, calls: Sequence[tuple[str, int, str]]) -> RolloutRecord:
    """The record, whose rollout continues the last call that another one sampled."""
    parents = [RolloutParent(by, call_id.rstrip("'")) for call_id, _, by in calls if by]
    return replace(one, rollout=replace(one.rollout, parent=parents[-1] if parents else None))


def found(step: Step) -> list[list[tuple[float, float]]]:
    """Of each rollout, advantage and weight of each trained token."""
    credit = make_recipe("arpo", {}).credit(step)
    assert credit.weights is not None
    return [
        list(zip(a[row.segment.loss_mask].tolist(), w[row.segment.loss_mask].tolist(), strict=True))
        for row, a, w in zip(step.rows, credit.advantages, credit.weights, strict=True)
    ]


def test_tokens_before_forks_get_the_mean_and_the_number_of_the_rollouts_that_contain_them() -> None:
    """Rewards 1, 0, 0, 1: A = ±.866. Rollout 2 forks from 0 in its second reply, 3 from 2 after its reply."""
    first = [("a", 1, ""), ("b", 3, "")]
    fork = [("a", 1, "g-r0"), ("b", 2, "g-r0"), ("b'", 2, "")]
    deeper = [("a", 1, "g-r0"), ("b", 2, "g-r0"), ("b'", 2, "g-r2"), ("d", 1, "")]
    step = a_step([1.0, 0.0, 0.0, 1.0], [first, [("x", 2, "")], fork, deeper])
    one = 0.5 / np.std([1, 0, 0, 1], ddof=1)
    third = (one - one + one) / 3
    expected = [
        [(third, 3), (third, 3), (third, 3), (one, 1)],
        [(-one, 1)] * 2,
        [(0.0, 2), (0.0, 2)],
        [(one, 1)],
    ]
    for tokens, wanted in zip(found(step), expected, strict=True):
        assert np.array(tokens) == pytest.approx(np.array(wanted), abs=1e-5)


def test_without_forks_it_is_grpo() -> None:
    step = a_step([1.0, 0.0, 0.4], [[("a", 2, "")], [("b", 1, ""), ("c", 2, "")], [("d", 1, "")]])
    credit, plain = make_recipe("arpo", {}).credit(step), make_recipe("grpo", {}).credit(step)
    for mine, theirs in zip(credit.advantages, plain.advantages, strict=True):
        assert mine.tolist() == pytest.approx(theirs.tolist())
    assert {weight for rollout in found(step) for _, weight in rollout} == {1.0}


def test_a_fork_of_a_rollout_that_is_not_in_the_step_has_its_own_advantage() -> None:
    step = a_step([1.0, 0.0], [[("z", 3, "elsewhere"), ("a", 2, "")], [("b", 1, "")]])
    one = 0.5 / np.std([1, 0], ddof=1)
    assert np.array(found(step)[0]) == pytest.approx(np.array([(one, 1)] * 2), abs=1e-5)
    masked = replace(step, rollouts=(replace(step.rollouts[0], trained=False), step.rollouts[1]))
    assert found(masked) == found(step)


TREES = [
    [("a", 1, "")],
    [("a", 1, "g-r0"), ("b", 1, "")],
    [("z", 1, "elsewhere"), ("c", 1, "")],
    [("a", 1, "g-r0"), ("b", 1, "g-r1"), ("d", 2, "")],
]
"""The last one is a fork of a fork of the first."""


def test_a_forks_root_is_the_first_of_its_group_that_it_goes_back_to() -> None:
    step = a_step([1.0, 0.0, 0.0, 0.0], TREES)
    assert [rollout.root for rollout in step.rollouts] == ["", "g-r0", "", "g-r0"]


def test_tree_grpo_compares_within_trees_and_over_them() -> None:
    rewards = [1.0, 0.0, 0.4, 0.3]
    step = a_step(rewards, TREES)
    over = [(reward - np.mean(rewards)) / np.std(rewards, ddof=1) for reward in rewards]
    tree = [rewards[0], rewards[1], rewards[3]]
    own = [a + (r - np.mean(tree)) / np.std(tree, ddof=1) * (r != 0.4) for a, r in zip(over, rewards, strict=True)]
    credit = make_recipe("tree_grpo", {}).credit(step)
    found = [row[one.segment.loss_mask].tolist() for one, row in zip(step.rows, credit.advantages, strict=True)]
    expected = [[(own[0] + own[1] + own[3]) / 3], [(own[1] + own[3]) / 2], [own[2]], [own[3]] * 2]
    for mine, wanted in zip(found, expected, strict=True):
        assert mine == pytest.approx(wanted, abs=1e-4)


def test_branch_grpo_compares_nodes_of_a_depth_by_what_came_of_them() -> None:
    """Independently: every token's set of rollouts and depth are counted from the tree's paths alone."""
    chance = np.random.default_rng(0)
    for _ in range(60):
        rollouts = a_forest(chance)
        rewards = [float(chance.integers(0, 4)) / 3 for _ in rollouts]
        step = a_step(rewards, rollouts)
        paths = [path_of(calls) for calls in rollouts]
        nodes: dict[tuple[int, tuple[int, ...], str], float] = {}
        expected: list[list[tuple[int, tuple[int, ...], str]]] = []
        for number, (calls, path) in enumerate(zip(rollouts, paths, strict=True)):
            own = {call for call, _, by in calls if not by}
            mine = [(call, place, at) for call, place, at in path if call in own]
            expected.append([])
            for call, place, at in mine:
                inside = tuple(
                    other for other, theirs in enumerate(paths) if other == number or (call, place, at) in theirs
                )
                nodes[at, inside, call] = float(np.mean([rewards[other] for other in inside]))
                expected[-1].append((at, inside, call))
        paid = {}
        for key, value in nodes.items():
            level = [other for (at, *_), other in nodes.items() if at == key[0]]
            deviation = np.std(level, ddof=1) if len(level) > 1 else 0.0
            paid[key] = (value - np.mean(level)) / (deviation + 1e-6)
        credit = make_recipe("branch_grpo", {}).credit(step)
        assert credit.weights is None
        for row, advantages, keys in zip(step.rows, credit.advantages, expected, strict=True):
            found = advantages[row.segment.loss_mask].tolist()
            assert found == pytest.approx([paid[key] for key in keys], abs=1e-4)


def a_forest(chance: np.random.Generator) -> list[list[tuple[str, int, str]]]:
    """A group's rollouts: some begin anew, others continue a call of an earlier one, behind its reply or inside it."""
    rollouts: list[list[tuple[str, int, str]]] = []
    begun: set[str] = set()
    for number in range(int(chance.integers(2, 7))):
        calls: list[tuple[str, int, str]] = []
        if number and chance.random() < 0.7:
            parent = int(chance.integers(number))
            until = int(chance.integers(len(rollouts[parent])))
            calls = [(call, sampled, by or f"g-r{parent}") for call, sampled, by in rollouts[parent][: until + 1]]
            call, sampled, by = calls[-1]
            if sampled > 1 and f"{call}'" not in begun and not call.endswith("'"):
                begun.add(f"{call}'")
                calls[-1] = (call, int(chance.integers(1, sampled)), by)
                calls.append((f"{call}'", int(chance.integers(1, 4)), ""))
        calls += [(f"{number}-{turn}", int(chance.integers(1, 4)), "") for turn in range(int(chance.integers(0, 3)))]
        if all(by for *_, by in calls):
            calls.append((f"{number}-end", 2, ""))
        rollouts.append(calls)
    return rollouts


def path_of(calls: Sequence[tuple[str, int, str]]) -> list[tuple[str, int, int]]:
    """Call, place in it and depth of each sampled token that the rollout contains."""
    path: list[tuple[str, int, int]] = []
    turn = -1
    for call, sampled, _ in calls:
        turn += not call.endswith("'")
        path += [(call, place, turn) for place in range(sampled)]
    return path


APPO = (
    (1.0, [("a", 1, ""), ("b", 3, "")], [0.1, 0.05, 1.2, 0.15]),
    (0.0, [("x", 2, "")], [0.3, -0.4]),
    (0.3, [("y", 1, ""), ("z", 1, "")], [0.9, float(np.float32(math.log(3)))]),
    (0.2, [("a", 1, "g-r0"), ("b", 2, "g-r0"), ("b'", 1, "")], [0.0]),
    (1.0, [("a", 1, "g-r0"), ("c", 1, "")], [0.0]),
    (0.5, [("x", 1, "g-r1"), ("x'", 2, "")], [0.0, 0.0]),
)
"""Rewards, calls, and by how much the policy's log-prob of each own token is over the engine's (-1)."""


@pytest.mark.parametrize(("weight", "limit", "half_life"), [(1.0, 0.2, 64.0), (0.5, 3.0, 1.0)])
def test_appo_pays_a_beginning_by_its_forks_and_scales_it_by_what_the_policy_gained_since(
    weight: float, limit: float, half_life: float
) -> None:
    """A token past three times its probability adds no gain; first rollouts and forks have a baseline each."""
    step = a_step([reward for reward, *_ in APPO], [calls for _, calls, _ in APPO])
    said = []
    for row, (_, _, gains) in zip(step.rows, APPO, strict=True):
        values = np.zeros(len(row.segment), np.float32)
        values[row.segment.loss_mask] = np.array(gains, np.float32) - 1
        said.append(values)
    step = replace(step, readings={POLICY: PolicyReading(tuple(said), tuple(said), {})})
    recipe = make_recipe("appo", {"weight": weight, "limit": limit, "half_life": half_life})
    assert [rollout.trained for rollout in recipe.filtered(step).rollouts] == [True] * 3 + [False] * 3

    first, forked = ([(value - np.mean(of)) / np.std(of) for value in of] for of in ([1.0, 0.0, 0.3], [0.2, 1.0, 0.5]))
    branches = [[(forked[0] + forked[1]) / 2, forked[0], forked[0], 0], [forked[2], 0], [0, 0]]
    credit = recipe.credit(step)
    assert credit.weights is None
    for number, (_, _, gains) in enumerate(APPO[:3]):
        counted = [0.0 if gain > np.float32(math.log(3)) else gain for gain in gains]
        future = [
            sum(0.5 ** ((k - t) / half_life) * counted[k] for k in range(t, len(counted))) for t in range(len(counted))
        ]
        expected = [
            (first[number] + branch) * (1 + weight * min(max(math.exp(gain), 1), 1 + limit))
            for branch, gain in zip(branches[number], future, strict=True)
        ]
        mine = credit.advantages[number][step.rows[number].segment.loss_mask]
        assert mine.tolist() == pytest.approx(expected, abs=1e-4)
