"""Recipes against their papers' formulas, written here a second time over plain lists.

The games are drawn so that formulas do not coincide by chance: groups of unequal size that see the same observations,
unequal numbers of turns and tokens, turn rewards of their own, discounts below 1, rollouts that only count in the
baseline and one that was lost.
"""

from __future__ import annotations

import math
import runpy
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from rolltap.contract.trainer import LeasedGroup, Replay
from rolltap.trainer_client.data.step import POLICY, Credit, PolicyReading, Step, view
from rolltap.trainer_client.model.loss import Correction, PolicyLoss
from rolltap.trainer_client.model.network import Predictions
from rolltap.trainer_client.recipes import RECIPES, estimators, make_recipe, recipe_class
from rolltap.trainer_client.recipes.base import Recipe, ReplayedGroups
from rolltap.trainer_client.recipes.papers.archer import ArCHer
from rolltap.trainer_client.recipes.papers.epo import EPO
from rolltap.trainer_client.recipes.papers.hiper import HiPER
from rolltap.trainer_client.recipes.papers.seeupo import SeeUPO
from rolltap.trainer_client.recipes.papers.spear import SPEAR
from rolltap.trainer_client.run.planning import rows_to_train
from rolltap.trainer_client.settings import LossSettings
from rolltap.types import RolloutParent, Scoring

from .acting import hinted, rewarded, spoken
from .making import group, record
from .test_loss import batch_of


@dataclass(frozen=True)
class Turn:
    observed: tuple[int, ...]
    tokens: int
    reward: float | None  # None: its judge failed
    agent: str = ""


@dataclass(frozen=True)
class Play:
    """A rollout. `scoring`: masked ones are in the baseline only."""

    reward: float
    turns: tuple[Turn, ...]
    scoring: Scoring = Scoring.SCORED
    roles: tuple[tuple[str, float], ...] = ()


SAME, OTHER = (3, 4, 5, 6, 7, 8), (9, 10, 11, 12, 13, 14)
NEAR = (3, 4, 5, 6, 7, 20)
"""Five of six tokens of SAME: a likeness of .833."""

GAMES: tuple[tuple[Play, ...], ...] = (
    (
        Play(1.0, (Turn(SAME, 2, 0.3), Turn(OTHER, 5, 0.1), Turn(SAME, 1, 0.0)), roles=(("x", 0.4), ("o", -0.1))),
        Play(0.2, (Turn(SAME, 4, 0.0), Turn(NEAR, 3, 0.6)), roles=(("x", 0.7),)),
        Play(0.7, (Turn(OTHER, 3, 0.2),), Scoring.MASKED),
        Play(9.0, (Turn(SAME, 2, 9.0),), Scoring.UNSCORABLE),
        Play(0.1, (Turn(SAME, 1, None), Turn(OTHER, 2, 0.5))),
    ),
    (
        Play(0.9, (Turn(SAME, 3, 0.5),)),
        Play(0.4, (Turn(SAME, 1, 0.0), Turn(OTHER, 2, 0.25), Turn(NEAR, 4, 0.0), Turn(SAME, 2, 0.7))),
    ),
)


def leased(games: Sequence[Sequence[Play]] = GAMES, tags: Sequence[tuple[str, ...]] = ()) -> list[LeasedGroup]:
    made = []
    for number, plays in enumerate(games):
        records = []
        for index, play in enumerate(plays):
            name = f"g{number}r{index}"
            turns = [(turn.observed, list(range(30, 30 + turn.tokens)), turn.agent) for turn in play.turns]
            one = record(f"g{number}", index, [spoken(name, turns)], play.reward, play.scoring)
            scopes = {
                f"turn_{name}_{at:02}": turn.reward for at, turn in enumerate(play.turns) if turn.reward is not None
            }
            records.append(rewarded(one, **scopes, **{f"role_{role}": value for role, value in play.roles}))
        one = group(f"g{number}", records)
        made.append(replace(one, task=replace(one.task, tags=tags[number])) if tags else one)
    return made


def counted(games: Sequence[Sequence[Play]] = GAMES) -> list[list[Play]]:
    """The plays of each group that are in the baseline."""
    return [[play for play in plays if play.scoring is not Scoring.UNSCORABLE] for plays in games]


def by_turn(step: Step, credit: Credit) -> list[float]:
    found = [set(credit.advantages[turn.row][turn.places].tolist()) for turn in step.turns]
    assert {len(one) for one in found} == {1}
    return [one.pop() for one in found]


def to_go(rewards: Sequence[float], gamma: float) -> list[float]:
    """G_t = sum over k >= t of gamma^(k-t) r_k."""
    return [sum(gamma ** (k - t) * rewards[k] for k in range(t, len(rewards))) for t in range(len(rewards))]


def earned(play: Play) -> list[float]:
    """A play's turn rewards, with the outcome at its last turn."""
    rewards = [turn.reward or 0.0 for turn in play.turns]
    return [*rewards[:-1], rewards[-1] + play.reward]


def less_mean(values: dict[Any, list[tuple[int, float]]], *, scaled: bool = False) -> list[float]:
    """Each value less its key's mean, in the order of its number; by the sample's deviation + 1e-6 if `scaled`."""
    found: dict[int, float] = {}
    for members in values.values():
        numbers = [value for _, value in members]
        spread = (statistics.stdev(numbers) if len(numbers) > 1 else 0.0) + 1e-6 if scaled else 1.0
        found |= {place: (value - statistics.fmean(numbers)) / spread for place, value in members}
    return [found[place] for place in sorted(found)]


def outcomes(value: Any, *, scaled: bool = False) -> list[float]:
    """`value` of each play less its group's mean, for every turn of the play."""
    keyed: dict[Any, list[tuple[int, float]]] = defaultdict(list)
    plays = [(number, play) for number, group_ in enumerate(counted()) for play in group_]
    for place, (number, play) in enumerate(plays):
        keyed[number].append((place, value(play)))
    each = less_mean(keyed, scaled=scaled)
    return [one for one, (_, play) in zip(each, plays, strict=True) for _ in play.turns]


def test_grpo_is_the_reward_less_its_groups_mean_by_the_deviation() -> None:
    """Shao et al. 2024, section 4.1.2: outcome supervision."""
    step = view(leased())
    assert by_turn(step, make_recipe("grpo", {}).credit(step)) == pytest.approx(
        outcomes(lambda play: play.reward, scaled=True), abs=1e-5
    )


@pytest.mark.parametrize("spread", [False, True])
def test_gigpo_equations_6_to_8(spread: bool) -> None:
    step, gamma, weight = view(leased()), 0.8, 0.5
    total = outcomes(lambda play: play.reward + sum(turn.reward or 0.0 for turn in play.turns), scaled=spread)
    anchors: dict[Any, list[tuple[int, float]]] = defaultdict(list)
    place = 0
    for number, plays in enumerate(counted()):
        for play in plays:
            for turn, value in zip(play.turns, to_go(earned(play), gamma), strict=True):
                anchors[number, turn.observed].append((place, value))
                place += 1
    expected = [a + weight * b for a, b in zip(total, less_mean(anchors, scaled=spread), strict=True)]
    recipe = make_recipe("gigpo", {"gamma": gamma, "weight": weight, "spread": spread})
    assert by_turn(step, recipe.credit(step)) == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(("likeness", "near"), [(0.85, False), (5 / 6, True)])
def test_slea_rl_clusters_like_observations_of_a_group(likeness: float, near: bool) -> None:
    step, gamma, weight = view(leased()), 0.7, 0.5
    clusters: dict[Any, list[tuple[int, float]]] = defaultdict(list)
    place = 0
    for number, plays in enumerate(counted()):
        for play in plays:
            for turn, value in zip(play.turns, to_go(earned(play), gamma), strict=True):
                clusters[number, SAME if near and turn.observed == NEAR else turn.observed].append((place, value))
                place += 1
    grpo = outcomes(lambda play: play.reward, scaled=True)
    expected = [a + weight * b for a, b in zip(grpo, less_mean(clusters, scaled=True), strict=True)]
    recipe = make_recipe("slea_rl", {"gamma": gamma, "weight": weight, "likeness": likeness})
    assert by_turn(step, recipe.credit(step)) == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("estimator", ["grpo", "rloo"])
def test_turn_grpo_compares_discounted_returns_of_a_turn_index(estimator: str) -> None:
    step, gamma = view(leased()), 0.6
    alike: dict[Any, list[tuple[int, float]]] = defaultdict(list)
    place = 0
    for number, plays in enumerate(counted()):
        for play in plays:
            for index, value in enumerate(to_go(earned(play), gamma)):
                alike[number, index].append((place, value))
                place += 1
    sizes = {at: len(members) for members in alike.values() for at, _ in members}
    if estimator == "grpo":
        expected = less_mean(alike, scaled=True)
    else:  # the mean of the others: Ahmadian et al. 2024, eq. 8
        scale = [sizes[at] / max(1, sizes[at] - 1) for at in range(place)]
        expected = [one * by for one, by in zip(less_mean(alike), scale, strict=True)]
    found = by_turn(step, make_recipe("turn_grpo", {"gamma": gamma, "estimator": estimator}).credit(step))
    assert found == pytest.approx(expected, abs=1e-4)


SEATS = (
    (
        Play(0.0, (Turn(SAME, 2, 0.0, "x"), Turn(OTHER, 3, 0.4, "o"), Turn(SAME, 1, 0.0, "x")), roles=(("x", 1.0),)),
        Play(0.0, (Turn(SAME, 2, 0.0, "x"), Turn(OTHER, 1, 0.0, "o"), Turn(SAME, 4, 0.0, "x")), roles=(("x", 1.0),)),
        Play(0.0, (Turn(SAME, 3, 0.0, "x"), Turn(OTHER, 2, 0.1, "o")), roles=(("x", -1.0), ("o", 0.5))),
    ),
)


@pytest.mark.parametrize("whitened", [False, True])
def test_mars_takes_the_mean_of_distinct_returns_of_each_player(whitened: bool) -> None:
    """Returns that come twice count once in the mean: that is not the mean of all."""
    step = view(leased(SEATS))
    rewards: dict[str, list[float]] = defaultdict(list)
    for play in SEATS[0]:
        for seat in ("x", "o"):
            own = [turn.reward or 0.0 for turn in play.turns if turn.agent == seat]
            own[-1] += dict(play.roles).get(seat, 0.0)
            rewards[seat] += own
    means = {seat: statistics.fmean(own) for seat, own in rewards.items()}
    values: list[tuple[str, float]] = []
    for play in SEATS[0]:
        returns = {}
        for seat in ("x", "o"):
            own = [turn.reward or 0.0 for turn in play.turns if turn.agent == seat]
            own[-1] += dict(play.roles).get(seat, 0.0)
            returns[seat] = to_go([reward - means[seat] for reward in own], 1.0)
        values += [(turn.agent, returns[turn.agent].pop(0)) for turn in play.turns]
    distinct = {seat: statistics.fmean({round(v, 9) for s, v in values if s == seat}) for seat in ("x", "o")}
    expected = [value - distinct[seat] for seat, value in values]
    assert distinct["x"] != pytest.approx(statistics.fmean(value for seat, value in values if seat == "x"))
    if whitened:
        expected = [(one - statistics.fmean(expected)) / (statistics.stdev(expected) + 1e-6) for one in expected]
    found = by_turn(step, make_recipe("mars", {"whitened": whitened}).credit(step))
    assert found == pytest.approx(expected, abs=1e-5)


def test_spiral_keeps_a_baseline_for_each_game_and_role() -> None:
    """b <- decay b + (1 - decay) R of the role in that game (role-conditioned advantage estimation)."""
    recipe, decay = make_recipe("spiral", {"decay": 0.75}), 0.75
    baselines: dict[tuple[str, str], float] = defaultdict(float)
    for _ in range(3):
        step = view(leased((SEATS[0][:1], SEATS[0][2:]), tags=[("tictactoe",), ("poker",)]))
        expected = []
        for tag, play in (("tictactoe", SEATS[0][0]), ("poker", SEATS[0][2])):
            rewards = {seat: dict(play.roles).get(seat, play.reward) for seat in ("x", "o")}
            expected += [rewards[turn.agent] - baselines[tag, turn.agent] for turn in play.turns]
            for seat, reward in rewards.items():
                baselines[tag, seat] = decay * baselines[tag, seat] + (1 - decay) * reward
        assert by_turn(step, recipe.credit(step)) == pytest.approx(expected, abs=1e-6)


def test_cm2_needs_more_than_least_samples_of_a_turn_index() -> None:
    """Group 0 has four samples of its first turn, one of them without a judgement, and three of the second."""
    games = (*GAMES, (Play(0.5, (Turn(SAME, 1, None),)),))  # nobody was judged in the last group
    step = view(leased(games))
    expected, kept = [], []
    for plays in counted(games):
        for play in plays:
            for index, turn in enumerate(play.turns):
                alike = [other.turns[index].reward for other in plays if index < len(other.turns)]
                judged = [reward for reward in alike if reward is not None]
                expected.append(0.0 if turn.reward is None else turn.reward - statistics.fmean(judged))
                kept.append(turn.reward is not None and len(judged) > 2)
    credit = make_recipe("cm2", {"least": 2}).credit(step)
    assert credit.weights is not None
    assert by_turn(step, credit) == pytest.approx(expected, abs=1e-6)
    assert [bool(credit.weights[turn.row][turn.places[0]]) for turn in step.turns] == kept
    assert True in kept
    assert False in kept


def test_spear_compares_with_the_median_of_group_means() -> None:
    recipe = SPEAR(bonus=False)
    recipe.restore({"means": [0.1, 0.6, 0.9]})
    assert recipe.usual() == 0.6
    back = replace(leased(((*GAMES[1], Play(0.6, (Turn(SAME, 2, 0.0),))),))[0], replay=True)
    step = recipe.filtered(view([back]))
    assert [rollout.trained for rollout in step.rollouts] == [True, False, False]  # the usual reward is no better
    assert by_turn(step, recipe.credit(step))[0] == pytest.approx(0.9 - 0.6)


def test_spear_pays_the_turns_before_the_last_up_to_one() -> None:
    """R' = R + min(.1 calls, 1) at the first step: 11 calls earn 1, none 0."""
    plays = (Play(0.0, tuple(Turn(SAME, 1, 0.0) for _ in range(12))), Play(0.0, (Turn(SAME, 1, 0.0),)))
    step = view(leased((plays,)))
    found = by_turn(step, SPEAR().credit(step))
    assert [found[0], found[-1]] == pytest.approx([0.5, -0.5])


def read_with(step: Step, entropies: Sequence[float]) -> Step:
    """The step, read by the policy with the entropy of each turn at its tokens."""
    rows = step.spread_turns(np.array(entropies))
    return replace(step, readings={POLICY: PolicyReading(rows, rows)})


def test_aepo_scales_by_the_entropy_over_the_steps_trained_tokens() -> None:
    """A' = A (1 + .3 (H - mean) / deviation), over tokens, so longer turns count more; masked rollouts don't."""
    step = view(leased())
    entropies = [0.2 + 0.17 * place for place in range(len(step.turns))]
    step = read_with(step, entropies)
    tokens = [
        value
        for value, turn in zip(entropies, step.turns, strict=True)
        if step.rollouts[turn.rollout].trained
        for _ in turn.places
    ]
    mean, spread = statistics.fmean(tokens), statistics.pstdev(tokens)
    plain = outcomes(lambda play: play.reward, scaled=True)
    credit = make_recipe("aepo", {"strength": 0.3}).credit(step)
    for turn, value, advantage in zip(step.turns, entropies, plain, strict=True):
        if step.rollouts[turn.rollout].trained:
            expected = advantage * (1 + 0.3 * (value - mean) / spread)
            assert credit.advantages[turn.row][turn.places] == pytest.approx([expected] * len(turn.places), rel=1e-5)
    close = [0.4 + 1e-6 * (place % 2) for place in range(len(step.turns))]
    found = make_recipe("aepo", {"strength": 1.0}).credit(read_with(step, close))
    assert abs(by_turn(step, found)[0] / plain[0] - 1) == pytest.approx(0.33, abs=0.1)  # 5e-7 / (5e-7 + 1e-6)
    even = make_recipe("aepo", {}).credit(read_with(step, [0.4] * len(step.turns)))
    assert by_turn(step, even) == pytest.approx(plain)


def test_aepo_keeps_the_gradient_of_tokens_that_are_clipped_above() -> None:
    """rho 1.5 and A .6 with a bound of 1.3: gain .78, gradient .78 of log pi. Below, and where A < 0, PPO's clip."""
    behaviour, ratios, gains = [-1.0] * 4, [1.5, 1.1, 0.5, 0.5], [0.6, 2.0, 2.0, -2.0]
    batch = replace(batch_of(behaviour, gains), weights_M=torch.tensor([0.5, 1.0, 1.0, 1.0]))
    current = torch.tensor([old + math.log(ratio) for old, ratio in zip(behaviour, ratios, strict=True)])
    current.requires_grad_()
    terms = make_recipe("aepo", {}).loss(Predictions(current, torch.zeros(4)), batch, PolicyLoss(clip_high=0.3))
    (gradient,) = torch.autograd.grad(terms.loss, current)
    assert float(terms.loss.detach()) == pytest.approx(-(0.5 * 0.78 + 2.2 + 1.0 - 1.6), rel=1e-5)
    assert gradient.tolist() == pytest.approx([-0.5 * 0.78, -2.2, -1.0, 0.0], rel=1e-5)


def test_dart_trains_the_turns_of_most_entropy_in_each_group() -> None:
    """Three of five turns with share .5, by group: a group's low turn may be above another's high one."""
    step = view(leased((*GAMES, GAMES[1])))
    entropies = [((place * 7) % 11) / 10 + 2 * float(turn.rollout > 3) for place, turn in enumerate(step.turns)]
    step = read_with(step, entropies)
    credit = make_recipe("dart", {"share": 0.5}).credit(step)
    assert credit.weights is not None
    kept = {(turn.row, int(turn.places[0])) for turn in step.turns if credit.weights[turn.row][turn.places].all()}
    expected = set()
    for group_ in set(step.turn_groups.tolist()):
        own = [place for place, number in enumerate(step.turn_groups.tolist()) if number == group_]
        ranked = sorted(own, key=lambda place: -entropies[place])[: math.ceil(len(own) / 2)]
        expected |= {(step.turns[place].row, int(step.turns[place].places[0])) for place in ranked}
    assert kept == expected
    assert 0 < len(kept) < len(step.turns)
    assert {float(value) for row in credit.weights for value in row} == {0.0, 1.0}
    plain = make_recipe("grpo", {}).credit(step)
    assert by_turn(step, credit) == by_turn(step, plain)


def test_astraflow_mixes_stored_groups_within_its_bound() -> None:
    recipe = make_recipe("astraflow", {"groups": 2})
    assert recipe.replay(3) == ReplayedGroups(2, Replay(min_age=1, max_age=8, order="random"))
    assert make_recipe("astraflow", {"groups": 0}).replay(3) is None
    assert RECIPES["astraflow"].settings == {"max_staleness": 8}


def test_dart_replays_the_successes_of_hard_tasks() -> None:
    recipe = make_recipe("dart", {"groups": 1, "hard": 0.5, "success": 0.9})
    asked = recipe.replay(7)
    assert asked is not None
    assert (asked.count, asked.filter.max_reward, asked.filter.min_age) == (1, 0.5, 1)
    assert asked.filter.min_reward is not None
    assert 0 < asked.filter.min_reward < 1e-6
    stored = replace(leased((GAMES[1],))[0], replay=True)
    fresh = leased((GAMES[1],))[0]
    assert [one.trained for one in recipe.filtered(view([stored])).rollouts] == [True, False]
    assert [one.trained for one in recipe.filtered(view([fresh])).rollouts] == [True, True]
    assert make_recipe("dart", {"groups": 0}).replay(7) is None
    assert RECIPES["dart"].settings["loss"] == {"correction": "truncated", "importance_cap": 1.0}


def test_differences_by_rounding_are_none_whatever_the_size() -> None:
    one = np.zeros(2, np.int64)
    assert estimators.centre(np.array([1.0, 1.0 + 1e-10]), one).tolist() == [0, 0]
    assert estimators.centre(np.array([1000.0, 1000.0 + 1e-7]), one).tolist() == [0, 0]
    assert estimators.centre(np.array([1.0, 1.0 + 1e-6]), one) == pytest.approx([-5e-7, 5e-7])
    batch, within = batch_of([-1.0], [1.0]), Correction("truncated", cap=2.0, band=(1.0, 1.0))
    assert within(torch.tensor([-1.0]), batch)[1].tolist() == [1.0]  # at both ends of the band
    assert [Correction("truncated").needs_proximal, Correction().needs_proximal] == [True, False]


@pytest.mark.parametrize("tags", [(), ("easy",)])
def test_sec_follows_the_mean_of_advantages_by_its_rate(tags: tuple[str, ...]) -> None:
    """Q(c) <- rate r(c) + (1 - rate) Q(c), r(c) the mean |A| of the rollouts of the category."""
    recipe = make_recipe("sec", {"tags": tags, "rate": 0.75})
    expected: dict[str, float] = defaultdict(float)
    for _ in range(2):
        step = view(leased(tags=[("easy", "x"), ("hard",)]))
        recipe.credit(step)
        for names, plays in zip((("easy", "x"), ("hard",)), counted(), strict=True):
            rewards = [play.reward for play in plays]
            spread = statistics.stdev(rewards) + 1e-6
            gain = statistics.fmean(abs(one - statistics.fmean(rewards)) / spread for one in rewards)
            for name in names:
                expected[name] = 0.75 * gain + 0.25 * expected[name]
    kept = {name: value for name, value in expected.items() if not tags or name in tags}
    assert recipe.state() == {"values": pytest.approx(kept, abs=1e-6)}


def test_the_dual_clip_and_the_divergence_are_scaled_by_their_settings() -> None:
    """Ye et al. 2020, eq. 5: a loss of c |A| at most; kl (exp(q) - q - 1) with q = log ref - log pi."""
    batch = replace(batch_of([-4.0], [-0.5]), reference_M=torch.tensor([-1.3]))
    predicted = Predictions(torch.tensor([-1.0]), torch.zeros(1))
    assert float(PolicyLoss(clip_dual=3.0)(predicted, batch).loss) == pytest.approx(3.0 * 0.5)
    plain = float(PolicyLoss()(predicted, batch).loss)
    assert float(PolicyLoss(kl=0.25)(predicted, batch).loss) - plain == pytest.approx(
        0.25 * (math.exp(-0.3) + 0.3 - 1), abs=1e-5
    )


def test_epo_rewards_entropy_within_its_bounds() -> None:
    """L = L_pg - strength sum w (H - c w(t) P): more entropy is a lower loss, an outlier a higher one."""
    usual, phase = torch.full((3,), 0.5), torch.full((3,), 0.25)
    entropy = torch.tensor([0.1, 0.5, 1.2], requires_grad=True)
    batch = replace(batch_of([-1.0] * 3, [1.0, -0.5, 2.0]), extra={"usual": usual, "phase": phase})
    terms = EPO(strength=0.3, penalty=0.2).loss(Predictions(torch.full((3,), -1.0), entropy), batch, PolicyLoss())
    gradient = -(1.0 - 0.5 + 2.0)
    bonus = sum(h - 0.25 * (0.2 if h < 0.8 * 0.5 or h > 1.2 * 0.5 else 0.0) for h in (0.1, 0.5, 1.2))
    assert float(terms.loss.detach()) == pytest.approx(gradient - 0.3 * bonus)
    assert torch.autograd.grad(terms.loss, entropy)[0].tolist() == pytest.approx([-0.3] * 3)


def test_seeupo_turns_of_an_update_weigh_alike() -> None:
    """seq-mean-token-mean over an update's samples, which are turns: 1/G_t a turn, whatever its rollout's length."""
    recipe, step = SeeUPO(), view(leased())
    credit = recipe.credit(step)
    settings = LossSettings(**recipe.settings["loss"])
    order = [index for plays in counted() for play in plays for index in range(1, len(play.turns) + 1)]
    trained = [play.scoring is Scoring.SCORED for plays in counted() for play in plays for _ in play.turns]
    updates = recipe.updates(step, credit)
    assert updates is not None
    assert [len(updates), max(order)] == [4, 4]
    for update, turn_number in zip(updates, range(4, 0, -1), strict=True):
        rows = {row.number: row for row in rows_to_train(step, update, settings, zeros=True)}
        own = [at for at, number in enumerate(order) if number == turn_number and trained[at]]
        weighed = [float(rows[step.turns[at].row].weights[step.turns[at].places].sum()) for at in own]
        assert weighed == pytest.approx([1 / len(own)] * len(own))
        total = sum(float(row.weights[row.segment.loss_mask].sum()) for row in rows.values())
        assert total == pytest.approx(1)


def test_seeupo_has_one_clipped_ratio_a_turn_and_holds_the_later_ones() -> None:
    """s_t = exp(mean of log pi - log pi_old); A times the product of later s, held within 1 ± limit; GSPO's clip."""
    drifts = {5: [[0.3, -0.1], [0.25], [0.5, 0.1, 0.0]], 6: [[-0.05], [-0.4, 0.1]]}  # of each rollout's turns, by token
    expected, tokens, turns, rollouts = 0.0, list[float](), list[float](), list[int]()
    for rollout, drift in drifts.items():
        ratios = [math.exp(statistics.fmean(own)) for own in drift]
        for at, (ratio, own) in enumerate(zip(ratios, drift, strict=True)):
            advantage = 0.7 * min(1.2, max(0.8, math.prod(ratios[at + 1 :])))
            expected -= min(ratio * advantage, min(1.2, max(0.8, ratio)) * advantage) * len(own)
            tokens += own
            turns += [float(at + 1)] * len(own)
            rollouts += [rollout] * len(own)
    batch = replace(
        batch_of([-1.0] * len(tokens), [0.7] * len(tokens), rollouts=rollouts), extra={"turn": torch.tensor(turns)}
    )
    predicted = Predictions(torch.tensor([-1.0 + value for value in tokens]), torch.zeros(len(tokens)))
    terms = SeeUPO(limit=0.2).loss(predicted, batch, PolicyLoss())
    assert float(terms.loss) == pytest.approx(expected, rel=1e-5)


def heads(step: Step, **values: Sequence[float]) -> PolicyReading:
    zeros = step.spread_turns(np.zeros(len(step.turns)))
    return PolicyReading(zeros, zeros, {name: step.spread_turns(np.array(one)) for name, one in values.items()})


def test_archer_reads_the_next_state_by_the_target_network() -> None:
    """Q_k(o, a) -> r + gamma V̄_k(o'), with bars for the target network, whose values are not the policy's."""
    (one,) = leased((GAMES[1][1:],))
    step = view([one], number=99)
    own = heads(step, q1=[0.8, 0.1, 0.4, 0.2], q2=[0.7, 0.2, 0.9, 0.1], v1=[9.0] * 4, v2=[8.0] * 4)
    target = heads(step, q1=[0.3] * 4, q2=[0.6] * 4, v1=[0.15, 0.25, 0.35, 0.45], v2=[0.5, 0.6, 0.7, 0.8])
    credit = ArCHer(gamma=0.9).credit(replace(step, readings={POLICY: own, "target": target}))
    rewards = [0.0, 0.25, 0.0, 0.7 + 0.4]
    for name, values in (("q1", [0.25, 0.35, 0.45, 0.0]), ("q2", [0.6, 0.7, 0.8, 0.0])):
        expected = [r + 0.9 * v for r, v in zip(rewards, values, strict=True)]
        ends = [float(credit.extra[f"{name}_target"][turn.row][turn.places[-1]]) for turn in step.turns]
        assert ends == pytest.approx(expected)
    begins = [float(credit.extra["v1_target"][turn.row][turn.places[0]]) for turn in step.turns]
    assert begins == pytest.approx([0.3] * 4)
    minimum = [min(a, b) - 8.0 for a, b in zip([0.8, 0.1, 0.4, 0.2], [0.7, 0.2, 0.9, 0.1], strict=True)]
    assert by_turn(step, credit) == pytest.approx(minimum, abs=1e-5)


def test_a_critic_adds_the_regressions_of_all_its_heads() -> None:
    said, target = {"q1": 0.5, "q2": -0.25, "v1": 1.0, "v2": 2.0}, 0.75
    one = torch.ones(1)
    extra = {f"{name}_{part}": value * one for name in said for part, value in (("target", target), ("share", 1.0))}
    extra |= {f"{name}_before": value * one for name, value in said.items()}
    batch = replace(batch_of([-1.0], [0.5]), extra=extra)
    predicted = Predictions(torch.tensor([-1.0]), torch.zeros(1), {name: value * one for name, value in said.items()})
    regressions = sum(0.5 * (value - target) ** 2 for value in said.values())
    assert float(ArCHer().loss(predicted, batch, PolicyLoss()).loss) == pytest.approx(-0.5 + regressions)


def test_hiper_discounts_within_and_over_segments() -> None:
    """Segments at turns 0, 2 and 3, gamma .9, lam .7, lam_segment .6, no two values equal."""
    rewards, starts = [0.1, 0.4, 0.2, 0.3, 1.0], [0, 2, 3]
    low, high = [0.3, 0.45, 0.6, 0.2, 0.15], [0.25, 9.0, 0.5, 0.35, 9.0]
    gamma, lam, lam_segment = 0.9, 0.7, 0.6
    expected_low, expected_high, expected_to_go = [0.0] * 5, [0.0] * 5, [0.0] * 5
    following, later = 0.0, 0.0
    for start, end in reversed(list(zip(starts, [2, 3, 5], strict=True))):
        length = end - start
        for t in range(start, end):  # Schulman et al. 2016, eq. 16, over the segment
            deltas = [rewards[k] + gamma * (low[k + 1] if k + 1 < end else following) - low[k] for k in range(t, end)]
            expected_low[t] = sum((gamma * lam) ** k * delta for k, delta in enumerate(deltas))
            expected_to_go[t] = (
                sum(gamma ** (k - t) * rewards[k] for k in range(t, end)) + gamma ** (end - t) * following
            )
        earned_ = sum(gamma ** (k - start) * rewards[k] for k in range(start, end))
        delta = earned_ + gamma**length * following - high[start]
        expected_high[start] = delta + gamma**length * lam_segment * later
        later, following = expected_high[start], high[start]
    begins = [at in starts for at in range(5)]
    recipe = HiPER(gamma=gamma, lam=lam, lam_segment=lam_segment)
    found = recipe.estimate(*map(np.array, (rewards, begins, low, high)))
    for one, expected in zip(found, (expected_low, expected_high, expected_to_go), strict=True):
        assert one == pytest.approx(expected)


def said_of(step: Step, names: Sequence[str]) -> dict[str, PolicyReading]:
    """What networks say of the step: numbers of their own for every name and head."""
    found = {}
    for seed, name in enumerate(names):
        rng = np.random.default_rng(seed)
        arrays = [step.spread_turns(rng.normal(-1.0, 0.3, len(step.turns))) for _ in range(2 + len(HEADS))]
        found[name] = PolicyReading(arrays[0], arrays[1], dict(zip(HEADS, arrays[2:], strict=True)))
    return found


HEADS = ("value", "q1", "q2", "v1", "v2", "low", "high", "term")
READINGS = (POLICY, "teacher", "target", "masked")


def loss_of(recipe: Recipe, step: Step, credit: Credit) -> float:
    """The recipe's loss of all the step's trained tokens, with its own credit."""
    masks = [row.segment.loss_mask for row in step.rows]
    rollouts = [row.rollout for row, mask in zip(step.rows, masks, strict=True) for _ in range(int(mask.sum()))]
    extra = {
        name: torch.tensor(np.concatenate([one[mask] for one, mask in zip(arrays, masks, strict=True)]))
        for name, arrays in credit.extra.items()
    }
    rng = np.random.default_rng(7)
    advantages = np.concatenate([one[mask] for one, mask in zip(credit.advantages, masks, strict=True)])
    batch = replace(batch_of(rng.normal(-1, 0.1, len(rollouts)).tolist(), advantages.tolist(), rollouts), extra=extra)
    logprobs, entropy = (torch.tensor(rng.normal(-1, 0.1, len(rollouts)), dtype=torch.float32) for _ in range(2))
    values = {name: torch.tensor(rng.normal(0, 1, len(rollouts)), dtype=torch.float32) for name in HEADS}
    return float(recipe.loss(Predictions(logprobs, entropy, values), batch, PolicyLoss()).loss)


def forked(one: LeasedGroup) -> LeasedGroup:
    """The group, whose second rollout continues the first."""
    first, second, *rest = one.rollouts
    second = replace(second, rollout=replace(second.rollout, parent=RolloutParent(first.rollout.id, "call")))
    return replace(one, rollouts=(first, second, *rest))


def test_a_recipe_of_the_page_differs_from_its_base_and_settings_do_not(tmp_path: Path) -> None:
    """By its credit or its loss on a step; a control by what it sets for rollouts to come."""
    Tokenizer(WordLevel({f"w{number}": number for number in range(64)}, unk_token="w1")).save(
        str(tmp_path / "tokenizer.json")
    )
    page = runpy.run_path(str(Path(__file__).parents[3] / "scripts" / "recipes_page.py"))
    groups_ = leased((*GAMES, *SEATS, GAMES[1][:1]))  # the last is a group of one
    groups_ = [replace(one, rollouts=tuple(hinted(each, [5]) for each in one.rollouts)) for one in groups_]
    groups_[0] = forked(groups_[0])
    step = replace(view(groups_, number=30), tokenizer=tmp_path)
    step = replace(step, readings=said_of(step, READINGS))
    found: dict[str, str] = {}
    for name, kind in RECIPES.items():
        if kind is Recipe:
            continue
        recipe, base = make_recipe(name, {}), RECIPES[page["base_of"](kind)]()
        credit, plain = recipe.credit(step), base.credit(step)
        own, other = (np.concatenate(one.weights or [np.zeros(0)]) for one in (credit, plain))
        differs = (
            not np.allclose(np.concatenate(credit.advantages), np.concatenate(plain.advantages))
            or not np.array_equal(own, other)
            or loss_of(recipe, step, credit) != pytest.approx(loss_of(base, step, credit), rel=1e-5)
        )
        found[name] = "recipe" if differs else "settings" if recipe.after(0) is None else "control"
    assert found == {name: page["label"](kind) for name, kind in RECIPES.items() if kind is not Recipe}
    assert {name for name, label in found.items() if label == "control"} == {"agentgym_rl", "sec"}


NO_ANSWER = """
from rolltap.trainer_client.recipes.{module} import {base}

class Named({base}):
    {body}
"""


@pytest.mark.parametrize(
    ("module", "base", "body"),
    [
        ("base", "Recipe", "def credit(self, step): return super().credit(step)"),
        ("base", "Recipe", "def loss(self, predicted, batch, policy_loss): return policy_loss(predicted, batch)"),
        ("papers.rloo", "RLOO", "admits = RLOO.admits"),
        ("papers.sec", "SEC", "def credit(self, step): return super().credit(step)"),
    ],
)
def test_a_recipe_by_its_name_alone_is_noticed(
    module: str, base: str, body: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test before fails for a hook that changes nothing."""
    file = tmp_path / "named.py"
    file.write_text(NO_ANSWER.format(module=module, base=base, body=body))
    monkeypatch.setitem(RECIPES, "named", recipe_class(str(file)))
    with pytest.raises(AssertionError):
        test_a_recipe_of_the_page_differs_from_its_base_and_settings_do_not(tmp_path)
