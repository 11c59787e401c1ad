"""Recipes where their formulas have an edge: ends of schedules, single members, shares that aren't 1, empty steps.

Each value is computed here from the paper's formula. A change of one line that the other tests let pass fails here.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from rolltap.contract.trainer import RolloutRecord
from rolltap.errors import AlignmentError, ConfigError
from rolltap.trainer_client.data.scoring import trainable, trained_tokens
from rolltap.trainer_client.data.step import POLICY, PolicyReading, RowView, Step, view
from rolltap.trainer_client.model.loss import PolicyLoss
from rolltap.trainer_client.model.network import Predictions
from rolltap.trainer_client.recipes import estimators, make_recipe
from rolltap.trainer_client.recipes.base import Recipe
from rolltap.trainer_client.recipes.critic import value_loss
from rolltap.trainer_client.recipes.hinted_teacher import HintedTeacher
from rolltap.trainer_client.recipes.papers.epo import EPO, phase
from rolltap.trainer_client.recipes.papers.hiper import HiPER
from rolltap.trainer_client.recipes.papers.infopo import InfoPO
from rolltap.trainer_client.recipes.papers.rise import RISE
from rolltap.trainer_client.recipes.papers.seeupo import SeeUPO
from rolltap.trainer_client.recipes.papers.spear import SPEAR
from rolltap.types import ROUTED_EXPERTS, Scoring

from .acting import branched, hinted, rewarded, scripted, spoken
from .making import VOCABULARY, group, record, segment
from .test_loss import batch_of
from .test_recipe_critics import archer_step, heads, hiper_step
from .test_recipe_formulas import by_turn

NO_KEYS = np.zeros(0, np.int64)
STATISTICS = estimators.mean, estimators.centre, estimators.spread, estimators.normalise, estimators.against_others


def flat(step: Step, values: Sequence[float]) -> PolicyReading:
    """A reading with one log-prob and entropy a turn."""
    spread = step.spread_turns(np.array(values))
    return PolicyReading(spread, spread)


def test_of_nothing_there_is_no_statistic() -> None:
    for statistic in STATISTICS:
        assert statistic(np.zeros(0), NO_KEYS).shape == (0,)


def test_the_dual_clip_leaves_good_tokens_alone() -> None:
    """Ye et al. 2020, eq. 5: only where A < 0."""
    batch = batch_of([-1.0], [0.5])
    predicted = Predictions(torch.tensor([-1.0]), torch.zeros(1))
    assert float(PolicyLoss(clip_dual=3.0)(predicted, batch).loss) == pytest.approx(-0.5)


def test_a_values_loss_is_scaled_by_its_share_and_its_tokens_weight() -> None:
    """share weight (V - target)^2 / 2, where the clip is far: .5 · .25 · .6² / 2."""
    extra = {
        f"value_{name}": torch.tensor([value]) for name, value in (("target", 1.0), ("before", 0.4), ("share", 0.5))
    }
    batch = replace(batch_of([0.0], [0.0]), extra=extra, weights_M=torch.tensor([0.25]))
    predicted = Predictions(torch.zeros(1), torch.zeros(1), {"value": torch.tensor([0.4])})
    assert float(value_loss(predicted, batch, "value", math.inf)) == pytest.approx(0.5 * 0.25 * 0.36 / 2)


def test_a_rollouts_tokens_are_those_of_all_its_segments() -> None:
    rows = [segment(range(6), [2, 3, 4]), segment(range(6), [5])]
    assert trained_tokens(record("g", 0, rows, 1.0)) == 4


def test_a_group_at_every_limit_can_be_trained_and_past_one_can_not() -> None:
    """The ids 0 and `vocabulary` - 1, as many tokens as the trainer takes; one log-prob of two that is not finite."""
    whole = segment([0, 1, VOCABULARY - 1], [1, 2])
    trainable(group("g", [record("g", 0, [whole], 1.0)]), VOCABULARY, longest=3)
    with pytest.raises(AlignmentError, match="has 3 tokens, and the trainer takes 2"):
        trainable(group("g", [record("g", 0, [whole], 1.0)]), VOCABULARY, longest=2)
    broken = replace(whole, logprobs=np.array([0, -1, np.nan], np.float32))
    with pytest.raises(AlignmentError, match="log-prob is not finite"):
        trainable(group("g", [record("g", 0, [broken], 1.0)]), VOCABULARY)


def test_archer_has_a_twin_learn_from_half_of_the_turns_and_counts_them_twice() -> None:
    """Over many steps each turn is one twin's or the other's, about as often; V's share is twice its tokens."""
    recipe, seen = make_recipe("archer", {}), {"q1": 0.0, "q2": 0.0, "v1": 0.0, "v2": 0.0}
    for number in range(30, 90):
        credit = recipe.credit(archer_step(number))
        for name in seen:
            seen[name] += float(sum(share.sum() for share in credit.extra[f"{name}_share"]))
    assert seen["q1"] + seen["q2"] == seen["v1"] + seen["v2"] == 60 * 2 * 2 * 2.0  # steps, turns, tokens, twice
    assert 0.3 < seen["q1"] / (seen["q1"] + seen["q2"]) < 0.7
    assert seen["v1"] == seen["q1"]


def test_epos_phase_ends_with_the_run() -> None:
    assert phase(1.5) == phase(1.0) == pytest.approx(0.8 * math.exp(-3))


def test_epo_weighs_its_penalty_by_the_share_of_the_run_that_is_done() -> None:
    """w at 30 of 120 steps: x = .5 of the first half, 1 - .2 (1 - e^-1)."""
    recipe = EPO(steps=120)
    recipe.restore({"history": {"0": [1.0, 2]}})
    step = replace(view([scripted("g", [[0.0], [0.0]], [1.0, 0.0])]), number=31)
    credit = recipe.credit(replace(step, readings={POLICY: flat(step, [0.3, 0.3])}))
    turn = step.turns[0]
    assert credit.extra["phase"][turn.row][turn.places] == pytest.approx(1 - 0.2 * (1 - math.exp(-1)))
    assert credit.extra["usual"][turn.row][turn.places] == pytest.approx(0.5)


def test_epo_pays_entropy_by_the_weight_of_its_token_and_not_at_the_bounds() -> None:
    """L - strength Σ weight (H - c w P); H of .4 and .6 are the bounds .8 and 1.2 of .5 themselves."""
    recipe, usual = EPO(strength=0.5, penalty=0.25), torch.tensor([0.5, 0.5, 0.5])
    entropy = torch.stack([recipe.low * usual[0], recipe.high * usual[1], torch.tensor(0.7)])
    assert recipe.penalties(entropy, usual).tolist() == [0, 0, 0.25]
    extra = {"usual": usual, "phase": torch.full((3,), 0.5)}
    batch = replace(batch_of([0.0] * 3, [0.0] * 3), extra=extra, weights_M=torch.tensor([0.5, 0.25, 0.125]))
    found = float(recipe.loss(Predictions(torch.zeros(3), entropy), batch, PolicyLoss()).loss)
    assert found == pytest.approx(-0.5 * (0.5 * 0.4 + 0.25 * 0.6 + 0.125 * (0.7 - 0.5 * 0.25)))


def test_a_hinted_teachers_distance_is_scaled_by_strength_weight_and_whether_there_was_a_hint() -> None:
    """Skill-SD, eq. 14: strength Σ weight (e^(-l) - 1 + l) where there is a hint, l = log pi - log pi_T."""
    extra = {"teacher": torch.tensor([-1.2, -1.0, -3.0]), "hinted": torch.tensor([1.0, 1.0, 0.0])}
    batch = replace(batch_of([-1.0, -1.5, -1.0], [0.0] * 3), extra=extra, weights_M=torch.tensor([0.5, 0.25, 0.125]))
    predicted = Predictions(torch.tensor([-1.0, -1.5, -1.0]), torch.zeros(3))
    expected = 0.3 * (0.5 * (math.exp(-0.2) - 1 + 0.2) + 0.25 * (math.exp(0.5) - 1 - 0.5))
    assert float(HintedTeacher(strength=0.3).loss(predicted, batch, PolicyLoss()).loss) == pytest.approx(expected)


KEEP, ACT = "<switch> KEEP </switch> <subgoal> find </subgoal>", "<action> go </action>"


@pytest.mark.parametrize("whitened", [False, True])
def test_hiper_takes_what_keeping_costs_from_the_reward_and_whitens_over_the_population(
    whitened: bool, tmp_path: Path
) -> None:
    """Two turns, the second keeps: r = [0 - .3/2, 1 - .3/2] (KEEP twice), values 0: A_low = G by gamma 1, lam 1."""
    step = hiper_step(tmp_path, [f"{KEEP} {ACT}", f"{KEEP} {ACT}"])
    step = replace(step, readings={POLICY: heads(step, low=[0, 0], high=[0, 0], term=[0, 0])})
    credit = HiPER(whitened=whitened).credit(step)
    found = [float(credit.advantages[turn.row][turn.places[-1]]) for turn in step.turns]
    rewards = [0 - 0.3 / 2, 1 - 0.3 / 2]
    expected = [sum(rewards), rewards[1]]
    if whitened:
        mean, spread = statistics.fmean(expected), statistics.pstdev(expected)
        expected = [(one - mean) / (spread + 1e-6) for one in expected]
    assert found == pytest.approx(expected, abs=1e-4)


def test_infopo_pays_a_question_the_mean_of_what_several_replies_learned() -> None:
    """The first rollout's first turn is answered twice, in the trunk and in a branch, with gains of 2 and 1."""
    records = []
    for index in range(2):
        trunk = spoken(f"r{index}", [([5, 6], [8, 9], ""), ([7, 7], [10, 11 + index, 12], "")])
        rows = [trunk, branched(trunk, [13, 14, 15], [16, 17, 18], "r0")] if index == 0 else [trunk]
        records.append(record("g", index, rows, 1.0))
    once = spoken("r2", [([5, 6], [8, 9], ""), ([7, 7], [10], "")])
    step = view([group("g", [*records, record("g", 2, [once], 1.0)])])
    gains = [{0: 0.0, 1: 2.0, 2: 1.0}, {0: 0.0, 1: 0.5}, {0: 0.0, 1: 0.1}]
    order = [
        sum(other.rollout == turn.rollout for other in step.turns[:number]) for number, turn in enumerate(step.turns)
    ]
    said = [gains[turn.rollout][at] - 3.0 for turn, at in zip(step.turns, order, strict=True)]
    readings = {POLICY: flat(step, said), "masked": flat(step, [-3.0] * len(said))}
    found = by_turn(step, InfoPO().credit(replace(step, readings=readings)))
    paid = [(2.0 + 1.0) / 2, 0.5, 0.1]
    mean, spread = statistics.fmean(paid), statistics.stdev(paid)
    beta = 0.1 / (1 + math.exp(0 / 0.05))
    firsts = [value for value, at in zip(found, order, strict=True) if at == 0]
    assert firsts == pytest.approx([beta * (one - mean) / (spread + 1e-6) for one in paid], abs=1e-5)


def test_infopo_shows_a_row_up_to_the_replys_end_without_its_routes() -> None:
    trunk = spoken("a", [([5, 6], [8], ""), ([7], [10, 11, 12, 13], ""), ([3], [2], "")])
    routes = np.zeros((len(trunk), 1, 1), np.int16)
    kept = replace(trunk, extras={ROUTED_EXPERTS: routes, "top_ids": np.arange(len(trunk))})
    views = InfoPO(filler=63).passes(view([group("g", [record("g", 0, [kept], 1.0)])]))["masked"].views
    assert views is not None
    shown = views[0].segment
    assert shown.token_ids.tolist() == [5, 6, 8, 63, 10, 11, 12, 13]
    assert {name: len(array) for name, array in shown.extras.items()} == {"top_ids": 8}


@pytest.mark.parametrize("name", ["grpo", "lite_ppo", "reinforce_pp"])
def test_epsilon_is_added_to_the_spread(name: str) -> None:
    """Rewards of 0 and .00002: A = (R - mean) / (std + 1e-6), std with ddof 1, over tokens with ddof 0."""
    records = [record("g", index, [segment(range(4), [2, 3])], reward) for index, reward in enumerate((0.0, 2e-5))]
    step = view([group("g", records)])
    found = float(make_recipe(name, {}).credit(step).advantages[1][-1])
    spread = statistics.pstdev([0.0, 2e-5]) if name == "reinforce_pp" else statistics.stdev([0.0, 2e-5])
    assert found == pytest.approx(1e-5 / (spread + 1e-6), rel=1e-4)


def test_returns_that_differ_by_rounding_are_one_value_for_mars() -> None:
    """1, 1 + 3e-10 and -2: less the mean, the distinct values are 1 and -2 (to 9 digits), whose mean is -.5."""
    turns = [(1.0,), (1.0 + 3e-10,), (-2.0,)]
    step = view([scripted("g", turns, [0.0, 0.0, 0.0])])
    found = by_turn(step, make_recipe("mars", {"whitened": False}).credit(step))
    assert found == pytest.approx([1.5, 1.5, -1.5], abs=1e-6)


def test_opd_is_the_difference_of_log_probs_on_what_was_sampled() -> None:
    """strength (log pi_teacher - log pi): .5 (ln .25 - ln .5), and nothing on the prompt."""
    part = segment([3, 4, 5, 6], [2, 3], logprob=math.log(0.5))
    step = view([group("g", [record("g", 0, [part], 1.0)])])
    teacher = (np.full(4, math.log(0.25), np.float32),)
    recipe = make_recipe("opd", {"teacher_policy": "t", "strength": 0.5})
    credit = recipe.credit(replace(step, readings={"teacher": PolicyReading(teacher, teacher)}))
    assert credit.advantages[0] == pytest.approx([0, 0, 0.5 * math.log(0.5), 0.5 * math.log(0.5)])


def test_rise_weighs_by_the_temperature_and_the_token() -> None:
    """Qu et al. 2024: - Σ weight exp(r / T) log pi; T = .5 and r = 1 → e²."""
    recipe = RISE(temperature=0.5)
    step = view([scripted("g", [[0.0], [0.0]], [1.0, 0.0])])
    assert by_turn(step, recipe.credit(step)) == pytest.approx([math.exp(2), 1.0])
    batch = replace(batch_of([0.0, 0.0], [2.0, 3.0]), weights_M=torch.tensor([0.5, 0.25]))
    found = recipe.loss(Predictions(torch.tensor([-0.5, -1.0]), torch.zeros(2)), batch, PolicyLoss()).loss
    assert float(found) == pytest.approx(0.5 * 2.0 * 0.5 + 0.25 * 3.0 * 1.0)


def test_secs_gain_is_a_mean() -> None:
    """Rewards 1, 0, 0 → |A| of 2/3, 1/3 and 1/3 by the deviation .5774."""
    made = scripted("g", [[0.0]] * 3, [1.0, 0.0, 0.0])
    recipe = make_recipe("sec", {"rate": 1.0})
    recipe.credit(view([replace(made, task=replace(made.task, tags=("easy",)))]))
    expected = (2 / 3 + 1 / 3 + 1 / 3) / 3 / (statistics.stdev([1, 0, 0]) + 1e-6)
    assert recipe.state() == {"values": {"easy": pytest.approx(expected)}}


def test_seeupo_makes_no_update_of_a_step_without_turns() -> None:
    silent = group("g", [record("g", 0, [], 1.0)])
    step = view([silent])
    assert list(SeeUPO().updates(step, SeeUPO().credit(step))) == []


def test_slea_rl_compares_long_observations_whole() -> None:
    """Ratcliff and Obershelp's ratio counts common tokens, too: two of 300 that share all but the first are alike."""
    common = [5, 6] * 150
    other = [7, *common[1:]]
    records = [record("g", index, [spoken(f"r{index}", [(shown, [30], "")])], reward)
               for index, (shown, reward) in enumerate(((common, 1.0), (other, 0.0)))]  # fmt: skip
    step = view([group("g", records)])
    found = by_turn(step, make_recipe("slea_rl", {"weight": 1.0, "likeness": 0.95}).credit(step))
    assert found == pytest.approx([math.sqrt(2), -math.sqrt(2)], abs=1e-4)  # .7071 of GRPO's and .7071 of the cluster's


def test_spears_ramps_end_and_begin_at_nothing() -> None:
    recipe = SPEAR(steps=300, explore=200)
    assert (recipe.usual(), recipe.ramp(450)) == (0.0, 1.0)
    assert recipe.tool_bonus(np.array([3.0]), 300).tolist() == [0.0]


def test_spear_shares_the_step_between_fresh_and_replayed_rollouts() -> None:
    """One trained fresh rollout and two replayed: each kind's weights add up to the step's rollouts, by its ramp."""
    fresh = scripted("f", [[0.0], [0.0]], [1.0, 0.0])
    fresh = replace(fresh, rollouts=(fresh.rollouts[0], _masked(fresh.rollouts[1])))
    back = replace(scripted("b", [[0.0], [0.0]], [1.0, 0.5]), replay=True)
    recipe = SPEAR(steps=300, bonus=False)
    step = replace(view([fresh, back]), number=151)
    credit = recipe.credit(step)
    assert credit.weights is not None
    found = [float(credit.weights[turn.row][turn.places[0]]) for turn in step.turns]
    ramp = (1 - math.cos(math.pi * 150 / 300)) / 2
    assert [found[0], *found[2:]] == pytest.approx([3.0, ramp * 3 / 2, ramp * 3 / 2])


def _masked(one: RolloutRecord) -> RolloutRecord:
    return replace(one, rollout=replace(one.rollout, scoring=Scoring.MASKED))


class Needy(Recipe):
    needs = ("turns", "turn_rewards", "role_rewards", "hints", "candidates", "roles")


def test_one_turn_or_rollout_with_what_a_recipe_needs_is_enough() -> None:
    parts = [spoken(f"r{index}", [([5], [8], ""), ([6], [9], "other")]) for index in range(2)]
    parts[0] = replace(parts[0], extras={"top_ids": np.zeros((len(parts[0]), 1), np.int32)})
    records = [record("g", index, [part], 1.0) for index, part in enumerate(parts)]
    records[0] = hinted(rewarded(records[0], turn_r0_00=0.5, role_x=1.0), [4])
    Needy().check(view([group("g", records)]))
    for need in Needy.needs[1:]:
        plain = view([group("g", [record("g", 0, [spoken("r", [([5], [8], "")])], 1.0)])])
        one = type("One", (Recipe,), {"needs": (need,)})
        with pytest.raises(ConfigError, match="recipe One: "):
            one().check(plain)


def test_a_view_has_a_place_of_its_row_for_each_trained_token() -> None:
    one = segment([1, 2, 3, 4], [2, 3])
    assert RowView(one, 7, np.array([5, 6], np.int32)).row == 7
    for places in ([5], [4, 5, 6]):
        with pytest.raises(AlignmentError, match=f"a view of row 7 has 2 trained tokens for {len(places)} places"):
            RowView(one, 7, np.array(places, np.int32))
