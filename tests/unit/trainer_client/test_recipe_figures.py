"""Each recipe by the published or derived figures of its method; those of one number a rollout are in test_recipes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rolltap.contract.trainer import LeasedGroup
from rolltap.errors import ConfigError
from rolltap.trainer_client.data.step import POLICY, Credit, PolicyReading, Step, view
from rolltap.trainer_client.model.learner import Learner
from rolltap.trainer_client.model.loss import PolicyLoss
from rolltap.trainer_client.model.network import Predictions
from rolltap.trainer_client.model.ranks import Ranks
from rolltap.trainer_client.recipes import estimators, make_recipe
from rolltap.trainer_client.recipes.critic import value_loss
from rolltap.trainer_client.recipes.papers.aem import modulation
from rolltap.trainer_client.recipes.papers.epo import EPO, phase
from rolltap.trainer_client.recipes.papers.infopo import InfoPO
from rolltap.trainer_client.recipes.papers.seeupo import MOST_TURNS, later_ratios
from rolltap.trainer_client.recipes.papers.skill_sd import SkillSD
from rolltap.trainer_client.recipes.papers.spear import SPEAR
from rolltap.trainer_client.recipes.papers.ssp import proposer_reward
from rolltap.trainer_client.recipes.papers.tt_opd import TTOPD, length_reward
from rolltap.trainer_client.settings import load_trainer_settings
from rolltap.types import Reward, Scoring

from .acting import hinted, rewarded, scripted, spoken
from .making import group, model_folder, record, segment
from .test_loss import batch_of


def by_turn(step: Step, credit: Credit) -> list[float]:
    """The advantage that all tokens of a turn share, turn by turn."""
    found = [set(credit.advantages[turn.row][turn.places].tolist()) for turn in step.turns]
    assert {len(one) for one in found} <= {1}
    return [one.pop() for one in found]


def reading(step: Step, *, entropy: Sequence[float] = (), **values: Sequence[float]) -> Step:
    """The step as if the policy had these entropies and values at each turn."""
    zeros = [0.0] * len(step.turns)
    said = {name: step.spread_turns(np.array(one)) for name, one in values.items()}
    own = PolicyReading(step.spread_turns(np.array(zeros)), step.spread_turns(np.array(entropy or zeros)), said)
    return replace(step, readings={POLICY: own})


def test_arithmetic_that_recipes_share() -> None:
    one = np.zeros(4, np.int64)
    rewards = np.array([1.0, 0.0, 0.0, 1.0])
    assert estimators.normalise(rewards, one) == pytest.approx([0.866, -0.866, -0.866, 0.866], abs=1e-4)
    assert estimators.against_others(rewards, one) == pytest.approx([0.6667, -0.6667, -0.6667, 0.6667], abs=1e-4)
    assert estimators.whiten(np.array([1.0, 2.0, 3.0])) == pytest.approx([-1, 0, 1], abs=1e-5)
    rows, masks = [np.array([1.0, 9.0]), np.array([2.0, 3.0])], [np.array([True, False]), np.array([True, True])]
    assert np.concatenate(estimators.whiten_rows(rows, masks)) == pytest.approx([-1, 0, 0, 1], abs=1e-5)
    assert estimators.whiten_rows([], []) == []
    assert estimators.discounted(np.array([0.0, 0.0, 1.0]), 0.9) == pytest.approx([0.81, 0.9, 1])
    assert estimators.keyed([0, 0, 1, 0], "aaba").tolist() == [0, 0, 1, 0]
    found = estimators.gae(np.array([0.0, 0.0, 1.0]), np.array([0.2, 0.5, 0.6]), 1.0, 0.95)
    assert found == pytest.approx([0.756, 0.48, 0.4], abs=1e-3)
    assert estimators.gae(np.array([0.0]), np.array([0.5]), 0.9, 1.0, last=1.0) == pytest.approx([0.4])


def test_reinforce_pp_takes_mean_and_spread_over_tokens() -> None:
    """Rewards 1 on three tokens and 0 on one: mean .75, variance .1875. With baseline: ±.5 off the group's mean."""
    records = [record("g", 0, [segment([1, 2, 3, 4], [1, 2, 3])], 1.0), record("g", 1, [segment([1, 2], [1])], 0.0)]
    step = view([group("g", records)])
    for options, expected in (({}, [0.5774, -1.7321]), ({"baseline": True}, [0.5774, -1.7321])):
        found = make_recipe("reinforce_pp", options).credit(step).advantages
        assert [float(one[-1]) for one in found] == pytest.approx(expected, abs=1e-3)
    apart = view([group("g", records[:1]), group("h", records[1:])])
    found = make_recipe("reinforce_pp", {"baseline": True}).credit(apart).advantages
    assert [float(one[-1]) for one in found] == pytest.approx([0, 0])


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [0.7071, 0.7071, -0.7071, -0.7071]),
        ({"estimator": "rloo"}, [1.5, 1.0, -1.5, -1.0]),
        ({"estimator": "rloo", "gamma": 0.5}, [1.0, 1.0, -1.0, -1.0]),
    ],
)
def test_turn_rewards_in_grpo_and_rloo(options: dict[str, Any], expected: list[float]) -> None:
    """Turn rewards [.5, 0] and outcome 1 against [0, 0] and 0: returns 1.5, 1 and 0, 0."""
    step = view([scripted("g", [[0.5, 0.0], [0.0, 0.0]], [1.0, 0.0])])
    assert by_turn(step, make_recipe("turn_grpo", options).credit(step)) == pytest.approx(expected, abs=1e-4)


def test_cm2_centres_a_turn_index_and_leaves_out_what_too_few_have() -> None:
    """Five samples [1, .5, 0, .5, .5] of the first turn → [.5, 0, -.5, 0, 0]; only two have a second turn."""
    step = view([scripted("g", [[1.0, 1.0], [0.5], [0.0, 0.0], [0.5], [0.5]], [0.0] * 5)])
    recipe = make_recipe("cm2", {})
    credit = recipe.credit(step)
    assert by_turn(step, credit) == pytest.approx([0.5, 0.5, 0, -0.5, -0.5, 0, 0])
    assert credit.weights is not None
    kept = [float(credit.weights[turn.row][turn.places[0]]) for turn in step.turns]
    assert kept == [1, 0, 1, 1, 0, 1, 1]


def test_gigpo_compares_turns_that_saw_the_same() -> None:
    """Two rollouts of two turns with reward 1 and 0: episode ±.5, returns .95, 1 and 0, 0.

    Where all four saw the same, the step's part is each return less their mean. Where only the first turns did, it is
    ±.475 for them; an observation that is alone has 0.
    """
    step = view([scripted("g", [[0.0, 0.0], [0.0, 0.0]], [1.0, 0.0])])
    everywhere = by_turn(step, make_recipe("gigpo", {}).credit(step))  # all four turns saw [5, 6, 7]
    mean = (0.95 + 1) / 4
    assert everywhere == pytest.approx([0.5 + 0.95 - mean, 0.5 + 1 - mean, -0.5 - mean, -0.5 - mean])
    rows = [
        spoken("a", [([1, 2], [9, 9], ""), ([3], [9, 8], "")]),
        spoken("b", [([1, 2], [9, 7], ""), ([4], [9, 8], "")]),
    ]
    step = view([group("g", [record("g", index, [row], 1.0 - index) for index, row in enumerate(rows)])])
    assert by_turn(step, make_recipe("gigpo", {}).credit(step)) == pytest.approx([0.975, 0.5, -0.975, -0.5])


def test_gigpo_counts_the_reward_of_a_rollout_without_a_trained_turn() -> None:
    """Rewards 1 and 1, one of them of a rollout that is only compared with: no difference, so no advantage."""
    records = [record("g", 0, [spoken("a", [([1], [2], "")])], 1.0), record("g", 1, [], 1.0, Scoring.MASKED)]
    step = view([group("g", records)])
    assert by_turn(step, make_recipe("gigpo", {}).credit(step)) == [0.0]


def test_aem_scales_by_the_entropy_of_replies() -> None:
    assert modulation(np.array([0.2, 0.6, 1.0]), 1.0, 0.1) == pytest.approx([1.519, 0.922, 0.559], abs=1e-3)
    assert modulation(np.array([0.2, 0.25]), 1.0, 0.1).tolist() == [1, 1]
    assert modulation(np.array([0.0, 0.1]), 1.0, 0.1).tolist() != [1, 1]  # the least range itself is one
    step = view([scripted("g", [[0.0, 0.0], [0.0]], [1.0, 0.0])])
    found = by_turn(step, make_recipe("aem", {}).credit(reading(step, entropy=[0.2, 0.6, 1.0])))
    scaled = [0.7071 * 1.519, 0.7071 * 0.922, -0.7071 * 0.559]
    assert found == pytest.approx(scaled, abs=1e-3)


def test_ssp_trains_the_proposer_by_its_reward_and_solvers_by_their_group() -> None:
    one = segment([1, 2], [1])
    solvers = [record("s", index, [one], reward) for index, reward in enumerate([1.0, 0.0, 0.0, 1.0])]
    step = view([group("p", [record("p", 0, [one], proposer_reward(0.4))]), group("s", solvers)])
    found = [float(row[1]) for row in make_recipe("ssp", {}).credit(step).advantages]
    assert found == pytest.approx([0.6, 0.866, -0.866, -0.866, 0.866], abs=1e-4)
    assert (proposer_reward(0.4, curve=True), proposer_reward(None)) == (pytest.approx(0.96), 0.0)


def game(seats: Sequence[tuple[str, float]]) -> Step:
    """One game: each seat's turns, the last of which earns the seat's reward."""
    turns = [([5], [8, 9], seat) for _ in range(2) for seat, _ in seats]
    part = spoken("r", turns)
    made = record("g", 0, [part], 0.0)
    scopes = {f"role_{seat}": value for seat, value in seats}
    return view([group("g", [rewarded(made, **scopes)])])


def test_mars_takes_returns_of_each_player() -> None:
    """Turn rewards [0, 0, 1] and [0, 0, -1] of one seat in two games: returns 1 and -1 on every turn."""
    step = view([scripted("g", [[0, 0, 1], [0, 0, -1]], [0.0, 0.0])])
    plain = by_turn(step, make_recipe("mars", {"whitened": False}).credit(step))
    assert plain == pytest.approx([1, 1, 1, -1, -1, -1])
    whitened = by_turn(step, make_recipe("mars", {}).credit(step))
    assert whitened == pytest.approx([value * math.sqrt(5 / 6) for value in plain], abs=1e-5)


def test_mars_pays_a_seat_by_its_role() -> None:
    """Two turns each. Rewards [0, 1] of x: centred [-.5, .5], returns [0, .5], less their mean: [-.25, .25]."""
    step = game([("x", 1.0), ("o", -1.0)])
    found = by_turn(step, make_recipe("mars", {"whitened": False}).credit(step))
    assert found == pytest.approx([-0.25, 0.25, 0.25, -0.25])


def test_dr_mas_normalises_each_agent_by_itself() -> None:
    """Solver rewards [1, 1, 0, 0] → ±.866, verifier rewards [1, 1, 1, 0] → .5 and -1.5."""
    records = []
    for index, (solver, verifier) in enumerate([(1, 1), (1, 1), (0, 1), (0, 0)]):
        part = spoken(f"r{index}", [([5], [8, 9], "solver"), ([6], [8, 9], "verifier")])
        scopes = {f"turn_r{index}_00": float(solver), f"turn_r{index}_01": float(verifier)}
        records.append(rewarded(record("g", index, [part], 0.0), **scopes))
    step = view([group("g", records)])
    found = by_turn(step, make_recipe("dr_mas", {}).credit(step))
    assert found[0::2] == pytest.approx([0.866, 0.866, -0.866, -0.866], abs=1e-4)
    assert found[1::2] == pytest.approx([0.5, 0.5, 0.5, -1.5], abs=1e-4)


def test_spiral_keeps_a_baseline_for_each_role() -> None:
    """One role with rewards 1, 1, -1 → 1, .95, -1.0975; the state goes on in another process."""
    recipe = make_recipe("spiral", {})
    found = []
    for reward in (1.0, 1.0, -1.0):
        step = game([("x", reward), ("o", 0.0)])
        found.append(by_turn(step, recipe.credit(step))[0])
        resumed = make_recipe("spiral", {})
        resumed.restore(recipe.state())
        recipe = resumed
    assert found == pytest.approx([1, 0.95, -1.0975])


def test_rise_keeps_the_best_reply_of_a_state_and_weighs_it_by_its_reward() -> None:
    """tau 1: rewards 0 and 1 weigh 1 and 2.718; of the two samples of the first state only the better one is kept."""
    step = view([scripted("g", [[0.0, 0.0], [1.0, 0.0]], [0.0, 0.0])])
    recipe = make_recipe("rise", {})
    credit = recipe.credit(step)
    assert by_turn(step, credit) == pytest.approx([1, 1, math.e, 1], abs=1e-4)
    assert credit.weights is not None
    assert [float(credit.weights[turn.row][turn.places[0]]) for turn in step.turns] == [0, 1, 1, 1]
    current = torch.tensor([-1.0, -2.0], requires_grad=True)
    terms = recipe.loss(Predictions(current, torch.zeros(2)), batch_of([-9.0, 0.0], [math.e, 1.0]), PolicyLoss())
    (gradient,) = torch.autograd.grad(terms.loss, current)
    assert gradient.tolist() == pytest.approx([-math.e, -1])


def test_steppo_estimates_over_replies() -> None:
    """r [0, 0, 1], V [.2, .5, .6], lam .95 → A [.756, .48, .4], targets [.956, .98, 1]; then whitened."""
    step = view([scripted("g", [[0.0, 0.0, 0.0]], [1.0])])
    read = reading(step, value=[0.2, 0.5, 0.6])
    credit = make_recipe("steppo", {}).credit(read)
    raw = np.array([0.756, 0.48, 0.4])
    assert by_turn(step, credit) == pytest.approx((raw - raw.mean()) / raw.std(ddof=1), abs=3e-3)
    targets, shares = credit.extra["value_target"][0], credit.extra["value_share"][0]
    starts = [int(turn.places[0]) for turn in step.turns]
    assert targets[starts] == pytest.approx([0.956, 0.98, 1], abs=1e-3)
    assert [float(shares[turn.places].sum()) for turn in step.turns] == [2, 2, 2]
    assert np.count_nonzero(shares) == 3


def test_marft_estimates_over_the_replies_of_all_agents() -> None:
    """r [0, 0, 1] of two agents, V [.2, .5, .6], gamma .9: a reply bootstraps from the other agent's prompt."""
    turns = [([5], [8, 9], ""), ([6], [9], "critic"), ([7], [9, 8, 10], "")]
    step = view([group("g", [record("g", 0, [spoken("a", turns)], 1.0)])])
    credit = make_recipe("marft", {"gamma": 0.9, "lam": 0.5}).credit(reading(step, value=[0.2, 0.5, 0.6]))
    errors = [0.9 * 0.5 - 0.2, 0.9 * 0.6 - 0.5, 1 - 0.6]
    raw = np.array([errors[0] + 0.45 * (errors[1] + 0.45 * errors[2]), errors[1] + 0.45 * errors[2], errors[2]])
    assert by_turn(step, credit) == pytest.approx((raw - raw.mean()) / raw.std(ddof=1), abs=1e-4)
    starts = [int(turn.places[0]) for turn in step.turns]
    assert credit.extra["value_target"][0][starts] == pytest.approx(raw + [0.2, 0.5, 0.6], abs=1e-4)
    assert [set(credit.extra["turn"][0][turn.places]) for turn in step.turns] == [{0}, {1}, {2}]
    with pytest.raises(ConfigError, match="all calls are of one agent"):
        make_recipe("marft", {}).check(view([scripted("g", [[0.0]], [1.0])]))


def test_marft_has_one_clipped_ratio_a_reply() -> None:
    """Log-ratios .1 and .3 of one reply, .5 of the next: ratios exp(.2), past the clip, for both, and exp(.5)."""
    recipe = make_recipe("marft", {})
    extra = {"turn": torch.tensor([4.0, 4.0, 5.0])}
    extra |= {f"value_{name}": torch.zeros(3) for name in ("before", "target", "share")}
    batch = replace(batch_of([-1.0, -1.0, -1.0], [1.0, 1.0, 1.0]), extra=extra)
    current = torch.tensor([-0.9, -0.7, -0.5], requires_grad=True)
    predicted = Predictions(current, torch.zeros(3), {"value": torch.zeros(3)})
    terms = recipe.loss(predicted, batch, PolicyLoss(clip_high=0.3))
    assert terms.log_ratio_M.tolist() == pytest.approx([0.2, 0.2, 0.5])
    (gradient,) = torch.autograd.grad(terms.loss, current)
    assert gradient.tolist() == pytest.approx([-math.exp(0.2), -math.exp(0.2), 0])


def test_odysseus_drops_turns_that_were_no_better_than_their_value() -> None:
    step = view([scripted("g", [[0.4, -0.2, 0.1]], [0.0])])
    credit = make_recipe("odysseus", {"gamma": 0.0}).credit(reading(step, value=[0.0, 0.0, 0.0]))
    assert by_turn(step, credit) == pytest.approx([0.4, 0, 0.1])


def test_ppo_estimates_over_tokens() -> None:
    """Two turns of two tokens, V .2 then .5, reward 1 at the last: gamma 1 and lam 1 → A = 1 - V, targets 1."""
    step = view([scripted("g", [[0.0, 0.0]], [1.0])])
    credit = make_recipe("ppo", {}).credit(reading(step, value=[0.2, 0.5]))
    mask = step.rows[0].segment.loss_mask
    raw = np.array([0.8, 0.8, 0.5, 0.5])
    assert credit.advantages[0][mask] == pytest.approx((raw - raw.mean()) / raw.std(ddof=1), abs=1e-4)
    assert credit.extra["value_target"][0][mask] == pytest.approx([1, 1, 1, 1])


def test_the_critic_regresses_on_its_target_within_the_clip() -> None:
    extra = {"v_target": torch.ones(2), "v_before": torch.tensor([0.2, 0.6]), "v_share": torch.ones(2)}
    batch = replace(batch_of([0.0, 0.0], [0.0, 0.0]), extra=extra)
    values = torch.tensor([0.9, 0.9], requires_grad=True)
    predicted = Predictions(torch.zeros(2), torch.zeros(2), {"v": values})
    loss = value_loss(predicted, batch, "v", 0.5)
    assert float(loss.detach()) == pytest.approx(0.045 + 0.005)
    assert torch.autograd.grad(loss, values)[0].tolist() == pytest.approx([0, -0.1])


def test_seeupo_weighs_turns_by_the_later_ones() -> None:
    """Ratios 1.1 of the last turn and .9 of the one before → 1, 1.1, .99; another rollout is apart."""
    ratios = torch.tensor([1.3, 1.3, 0.9, 1.1, 7.0]).log()
    units = torch.tensor([1, 1, 2, 3, MOST_TURNS + 2])
    assert later_ratios(ratios, units).tolist() == pytest.approx([0.99, 0.99, 1.1, 1, 1])


def test_seeupo_updates_turns_from_the_last_to_the_first() -> None:
    step = view([scripted("g", [[0.0, 0.0], [0.0]], [1.0, 0.0])])
    recipe = make_recipe("seeupo", {})
    credit = recipe.credit(step)
    assert by_turn(step, credit) == pytest.approx([0.5, 0.5, -0.5])
    updates = recipe.updates(step, credit)
    assert updates is not None
    trained = [[bool(one.weights[turn.row][turn.places[0]]) for turn in step.turns] for one in updates if one.weights]
    assert trained == [[False, True, False], [True, False, True]]


def test_epo_pulls_entropy_to_its_history() -> None:
    assert [phase(done) for done in (0, 0.25, 0.5, 0.75, 1)] == pytest.approx([1, 0.874, 0.827, 0.179, 0.040], abs=1e-3)
    recipe = EPO()
    entropy, usual = torch.tensor([0.1, 0.5, 1.2]), torch.full((3,), 0.5)
    assert float(recipe.penalties(entropy, usual).mean()) == pytest.approx(0.0667, abs=1e-4)
    assert EPO(hinge=True).penalties(entropy, usual).tolist() == pytest.approx([0.3, 0, 0.6])
    step = view([scripted("g", [[0.0], [0.0]], [1.0, 0.0])])
    first = recipe.credit(reading(step, entropy=[0.4, 0.6]))
    assert all(not one.any() for one in first.extra["phase"])
    second = recipe.credit(reading(step, entropy=[9.0, 9.0]))
    assert [float(one.max()) for one in second.extra["usual"]] == pytest.approx([0.5, 0.5])
    resumed = EPO()
    resumed.restore(recipe.state())
    assert resumed.history == recipe.history


def test_the_reward_of_a_span_counts_for_its_turn() -> None:
    (one,) = scripted("g", [[0.0, 0.0]], [1.0]).rollouts
    spans = (Reward("a", one.rollout.id, 0.5, "span:gr0-01:0:1"), Reward("b", one.rollout.id, 0.25, "call:gr0-01"))
    step = view([group("g", [replace(one, rollout=replace(one.rollout, rewards=spans))])])
    assert step.turn_rewards.tolist() == [0, 0.75]
    assert step.with_outcome().tolist() == [0, 1.75]


def test_skill_sd_keeps_the_policy_near_itself_with_the_skill() -> None:
    """l = .2 and rho = 1.1: 1.1 (e^-.2 - 1 + .2) = .0206; without a hint nothing."""
    extra = {"teacher": torch.tensor([-1.2, -1.2]), "hinted": torch.tensor([1.0, 0.0])}
    batch = replace(batch_of([-1.0 - math.log(1.1)] * 2, [0.0, 0.0]), extra=extra)
    terms = SkillSD(strength=1.0).loss(Predictions(torch.tensor([-1.0, -1.0]), torch.zeros(2)), batch, PolicyLoss())
    assert float(terms.loss) == pytest.approx(0.0206, abs=1e-4)


def test_a_hint_stands_before_the_row_and_carries_no_loss() -> None:
    one, other = scripted("g", [[0.0], [0.0]], [1.0, 0.0]).rollouts
    step = view([group("g", [hinted(one, [40, 41]), other])])
    (shown,) = step.hinted()
    assert shown.segment.token_ids.tolist() == [40, 41, *step.rows[0].segment.token_ids.tolist()]
    assert shown.segment.loss_mask.tolist() == [False, False, *step.rows[0].segment.loss_mask.tolist()]
    assert [row.max() for row in step.has_hint] == [1, 0]
    with pytest.raises(ConfigError, match=r"hints are text, but None has no tokenizer\.json"):
        view([group("g", [hinted(one, "look twice")])]).hinted()


def test_tt_opd_follows_the_policy_slowly_and_rewards_short_answers(tmp_path: Path) -> None:
    assert length_reward(True, 6144) == pytest.approx(0.9)
    assert length_reward(False, 6144) == pytest.approx(-0.15)
    assert (length_reward(True, 0), length_reward(True, 12_288)) == (pytest.approx(1.1), -0.5)
    model = model_folder(tmp_path / "model")
    given = {"key": "k", "policy": "p", "out": tmp_path, "compute": {"device": "cpu"}}
    settings = load_trainer_settings(None, **given, model=model)
    learner = Learner(model, settings, Ranks(0, 1, torch.device("cpu")), TTOPD(every=2))
    followed = next(learner.read_networks["teacher"].model.parameters())
    with torch.no_grad():
        followed.fill_(1.0)
        next(learner.model.parameters()).fill_(2.0)
    learner.update_followers(1)
    assert followed.unique().tolist() == [1.0]
    learner.update_followers(2)
    assert followed.unique().tolist() == pytest.approx([1.005])
    resumed = Learner(model, settings, Ranks(0, 1, torch.device("cpu")), TTOPD(every=2))
    resumed.restore(learner.state())
    assert next(resumed.read_networks["teacher"].model.parameters()).unique().tolist() == pytest.approx([1.005])


def test_infopo_rewards_what_feedback_told() -> None:
    """Equal rewards (std 0) → beta .05; the second turns gained 2 and 0 nats a token by what the first turns were
    answered, which are paid for it: z = ±.7071. std .05 → .0269."""
    step = view([scripted("g", [[0.0, 0.0], [0.0, 0.0]], [1.0, 1.0])])
    said, masked = (step.spread_turns(np.array(one)) for one in ([-1.0, -1.0, -1.0, -1.0], [0.0, -3.0, 0.0, -1.0]))
    readings = {POLICY: PolicyReading(said, said), "masked": PolicyReading(masked, masked)}
    recipe = InfoPO(filler=63)
    found = by_turn(step, recipe.credit(replace(step, readings=readings)))
    assert found == pytest.approx([0.03536, 0, -0.03536, 0], abs=1e-5)
    rewards = tuple(replace(one, reward=1 + 0.0707107 * number) for number, one in enumerate(step.rollouts))
    apart = recipe.credit(replace(step, rollouts=rewards, readings=readings))
    outcome = np.array([-1, -1, 1, 1]) / math.sqrt(2)
    assert by_turn(step, apart) - outcome == pytest.approx([0.0269 * 0.7071, 0, -0.0269 * 0.7071, 0], abs=2e-4)
    shown = recipe.passes(step)["masked"].views
    assert shown is not None
    assert shown[0].segment.token_ids.tolist() == [5, 6, 7, 8, 9, 63, 63, 63, 8, 10]
    assert shown[0].segment.loss_mask.nonzero()[0].tolist() == [8, 9]


def test_tcod_prefers_what_the_teacher_prefers_and_grows_the_horizon() -> None:
    step = view([scripted("g", [[0.0]], [1.0])])
    teacher, own = (step.spread_turns(np.array([value])) for value in (-0.5, -0.75))
    readings = {POLICY: PolicyReading(own, own), "teacher": PolicyReading(teacher, teacher)}
    recipe = make_recipe("tcod", {"teacher": "folder"})
    assert by_turn(step, recipe.credit(replace(step, readings=readings))) == [0.25]
    with pytest.raises(ConfigError, match="name the folder of the teacher's model"):
        make_recipe("tcod", {}).networks()


def replayed(name: str, outcomes: Sequence[float]) -> LeasedGroup:
    return replace(scripted(name, [[0.0]] * len(outcomes), outcomes), replay=True)


def test_spear_imitates_what_was_better_than_usual() -> None:
    """Group means .4 and .6: median .5. Replayed rewards 1, .6 and .2 → .5 and .1, the last is left out."""
    recipe = SPEAR(bonus=False, steps=4)
    assert [SPEAR().ramp(step) for step in (0, 75, 150, 300)] == pytest.approx([0, 0.146, 0.5, 1], abs=1e-3)
    recipe.restore({"means": [0.4, 0.6]})
    step = view([scripted("g", [[0.0], [0.0]], [1.0, 0.0]), replayed("r", [1.0, 0.6, 0.2])], number=3)
    step = recipe.filtered(step)
    assert [rollout.trained for rollout in step.rollouts] == [True] * 4 + [False]
    credit = recipe.credit(step)
    assert by_turn(step, credit)[:4] == pytest.approx([0.5, -0.5, 0.5, 0.1])
    assert credit.weights is not None
    shares = [float(credit.weights[turn.row][turn.places[0]]) for turn in step.turns]
    assert shares[:4] == pytest.approx([4 / 2, 4 / 2, 0.5 * 4 / 2, 0.5 * 4 / 2])  # of 1/4 each: means over their own
    assert recipe.state() == {"means": [0.4, 0.6, 0.5]}


def test_spear_pays_tool_calls_while_it_explores() -> None:
    recipe = SPEAR()
    assert [recipe.tool_bonus(np.array([3, 20]), step).tolist() for step in (0, 100, 200)] == [
        pytest.approx([0.3, 1]), pytest.approx([0.15, 0.5]), pytest.approx([0, 0]),
    ]  # fmt: skip
    step = view([scripted("g", [[0.0, 0.0, 0.0], [0.0]], [0.0, 0.0])])
    assert by_turn(step, recipe.credit(step)) == pytest.approx([0.1, 0.1, 0.1, -0.1])
