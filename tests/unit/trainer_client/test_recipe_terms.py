"""What each term, argument and condition of a recipe is for: a recipe without it fails here.

Values differ from token to token and formulas don't coincide: several groups, strengths that aren't 1, tokens past
every limit. The formulas are the papers', written here a second time.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from tokenizers.processors import TemplateProcessing

from rolltap.contract.trainer import Replay
from rolltap.errors import ConfigError
from rolltap.trainer_client.data.recorded import ExpertShape
from rolltap.trainer_client.data.scoring import trainable
from rolltap.trainer_client.data.step import POLICY, Pass, PolicyReading, ReadNetwork, Step, StepRollout, view
from rolltap.trainer_client.model.loss import MOST_LOG_RATIO, Correction, PolicyLoss
from rolltap.trainer_client.model.network import Predictions
from rolltap.trainer_client.recipes import RECIPES, make_recipe
from rolltap.trainer_client.recipes.base import Recipe, ReplayedGroups
from rolltap.trainer_client.recipes.hinted_teacher import HintedTeacher, distance
from rolltap.trainer_client.recipes.papers.aepo import AEPO
from rolltap.trainer_client.recipes.papers.archer import ArCHer
from rolltap.trainer_client.recipes.papers.hiper import HiPER, Reply
from rolltap.trainer_client.recipes.papers.infopo import InfoPO
from rolltap.trainer_client.recipes.papers.seeupo import SeeUPO
from rolltap.trainer_client.recipes.papers.skill_sd import SkillSD
from rolltap.trainer_client.recipes.papers.spear import SPEAR
from rolltap.trainer_client.recipes.papers.tt_opd import TTOPD
from rolltap.types import ROUTED_EXPERTS, PromptImage, Reward, Scoring

from .acting import hinted, rewarded, scripted, spoken
from .making import VOCABULARY, group, record, segment
from .test_loss import batch_of
from .test_recipe_critics import hiper_step
from .test_recipe_formulas import GAMES, by_turn, counted, earned, leased


def apart(step: Step, seed: int, *heads: str) -> PolicyReading:
    """A reading that says something else at every token."""
    rng = np.random.default_rng(seed)

    def drawn() -> tuple[np.ndarray, ...]:
        return tuple(rng.normal(0, 1, len(row.segment)).astype(np.float32) for row in step.rows)

    return PolicyReading(drawn(), drawn(), {name: drawn() for name in heads})


def silent_last(rewards: Sequence[float]) -> Step:
    """A rollout of three turns for each reward but the last, whose rollout has no token with loss."""
    plays = [spoken(f"r{index}", [([5], [8, 9], "")] * 3) for index in range(len(rewards) - 1)]
    parts = [*plays, segment([5, 8, 9], [])]
    return view([group("g", [record("g", at, [part], rewards[at]) for at, part in enumerate(parts)])])


def test_archer_reads_values_where_a_prompt_ends_and_q_where_the_reply_does() -> None:
    step = view(leased((GAMES[1][1:],)), number=99)
    own, target = (apart(step, seed, "q1", "q2", "v1", "v2") for seed in (1, 2))
    credit = ArCHer(gamma=0.9).credit(replace(step, readings={POLICY: own, "target": target}))

    def said(reading: PolicyReading, head: str, at: int) -> list[float]:
        return [float(reading.values[head][turn.row][turn.places[at]]) for turn in step.turns]

    quality = [min(a, b) for a, b in zip(said(own, "q1", -1), said(own, "q2", -1), strict=True)]
    value = [min(a, b) for a, b in zip(said(own, "v1", 0), said(own, "v2", 0), strict=True)]
    assert by_turn(step, credit) == pytest.approx([a - b for a, b in zip(quality, value, strict=True)], abs=1e-6)
    rewards = [one for plays in counted((GAMES[1][1:],)) for play in plays for one in earned(play)]
    for twin in "12":
        following = [*said(target, f"v{twin}", 0)[1:], 0.0]
        ends = [float(credit.extra[f"q{twin}_target"][turn.row][turn.places[-1]]) for turn in step.turns]
        assert ends == pytest.approx([r + 0.9 * v for r, v in zip(rewards, following, strict=True)], abs=1e-6)
        begins = [float(credit.extra[f"v{twin}_target"][turn.row][turn.places[0]]) for turn in step.turns]
        assert begins == pytest.approx(said(target, f"q{twin}", -1), abs=1e-6)


def test_hiper_reads_its_values_where_each_level_begins(tmp_path: Path) -> None:
    """One turn with reward 1: A = 1 - V at the action's, and at the reply's, first token."""
    step = hiper_step(tmp_path, ["<switch> SWITCH </switch> <subgoal> find </subgoal> <action> go </action>"])
    reading, (turn,) = apart(step, 3, "low", "high", "term"), step.turns
    credit = HiPER(whitened=False, keep_penalty=0).credit(replace(step, readings={POLICY: reading}))
    values = {name: array[turn.row][turn.places] for name, array in reading.values.items()}
    found = credit.advantages[turn.row][turn.places]
    expected = [1 - values["term"][0]] * 3 + [1 - values["high"][0]] * 3 + [1 - values["low"][6]] * 3
    assert found == pytest.approx(expected, abs=1e-6)
    assert credit.extra["low_target"][turn.row][turn.places[6]] == pytest.approx(1)


def test_hiper_whitens_subgoals_over_the_turns_that_begin_a_segment(tmp_path: Path) -> None:
    say = "<switch> {} </switch> <subgoal> find </subgoal> <action> go </action>".format
    step = hiper_step(tmp_path, [say("SWITCH"), say("KEEP"), say("SWITCH")])
    reading = apart(step, 4, "low", "high", "term")
    readings = {POLICY: reading}
    own, plain = (HiPER(whitened=one).credit(replace(step, readings=readings)) for one in (True, False))
    highs = [
        [float(credit.advantages[turn.row][turn.places[4]]) for turn in (step.turns[0], step.turns[2])]
        for credit in (own, plain)
    ]
    mean, spread = statistics.fmean(highs[1]), statistics.pstdev(highs[1])
    assert highs[0] == pytest.approx([(one - mean) / (spread + 1e-6) for one in highs[1]], abs=1e-4)


def test_hiper_reads_tags_over_lines_in_any_case() -> None:
    reply = Reply.of(["<switch>\n keep \n</switch><subgoal>\nfind\n</subgoal>"])
    assert (reply.switches, reply.subgoal) == (False, "find")


def test_hiper_charges_only_who_keeps_and_names_another_subgoal() -> None:
    say = "<switch>{}</switch><subgoal>{}</subgoal>".format
    recipe = HiPER(keep_penalty=0)
    for before, after, loss in (
        (say("SWITCH", "find"), say("SWITCH", "take"), 0.0),
        ("<switch>SWITCH</switch>", say("KEEP", "take"), 0.0),
        (say("SWITCH", "find"), say("KEEP", "take"), 0.3),
    ):
        assert recipe.penalties([Reply.of([before]), Reply.of([after])]) == pytest.approx([0, loss])


def test_hiper_adds_up_what_a_token_of_two_tags_earns() -> None:
    step = view([group("g", [record("g", 0, [spoken("a", [([5], [8, 9, 10], "")])], 1.0)])])
    reply = Reply.of(["<switch>SWITCH</switch><sub", "goal>find</subgoal>", "<action>go</action>"])
    levels = {"low": np.array([0.25]), "high": np.array([2.0]), "term": np.array([0.5])}
    credit = HiPER(whitened=False).assigned(step, [reply], levels, np.array([True]))
    assert credit.advantages[0][step.turns[0].places].tolist() == [2.5, 2.0, 0.25]


def test_aepo_scales_a_clipped_tokens_gradient_by_its_correction() -> None:
    """rho 1.5 of a bound of 1.3, A .6, c = pi_old / mu = e^-.5: the gradient is -c 1.3 A."""
    batch = replace(batch_of([-1.5], [0.6]), proximal_M=torch.tensor([-2.0]))
    current = torch.tensor([-2.0 + math.log(1.5)], requires_grad=True)
    loss = PolicyLoss(clip_high=0.3, correction=Correction("truncated", cap=2.0))
    terms = make_recipe("aepo", {}).loss(Predictions(current, torch.zeros(1)), batch, loss)
    (gradient,) = torch.autograd.grad(terms.loss, current)
    assert float(gradient) == pytest.approx(-math.exp(-0.5) * 1.3 * 0.6, rel=1e-5)


def test_dart_asks_for_groups_of_its_age_in_any_order() -> None:
    asked = make_recipe("dart", {"groups": 2, "hard": 0.5, "age": 11}).replay(3)
    assert asked == ReplayedGroups(2, Replay(min_age=1, max_age=11, min_reward=1e-9, max_reward=0.5, order="random"))


def test_dr_mas_pays_the_outcome_and_the_calls_reward() -> None:
    """A = (R - mean_k) / (std_k + 1e-6) over the calls of agent k, R the outcome and the call's own reward."""
    outcomes, own, records = [1.0, 0.25, 0.0], [(0.0, -0.1), (0.5, 0.0), (0.25, 0.2)], []
    for index, (outcome, (first, second)) in enumerate(zip(outcomes, own, strict=True)):
        part = spoken(f"r{index}", [([5], [8, 9], "solver"), ([6], [8], "verifier")])
        made = record("g", index, [part], outcome)
        records.append(rewarded(made, **{f"turn_r{index}_00": first, f"turn_r{index}_01": second}))
    step = view([group("g", records)])
    found = by_turn(step, make_recipe("dr_mas", {}).credit(step))
    for agent in (0, 1):
        values = [outcome + turns[agent] for outcome, turns in zip(outcomes, own, strict=True)]
        mean, spread = statistics.fmean(values), statistics.stdev(values) + 1e-6
        assert found[agent::2] == pytest.approx([(one - mean) / spread for one in values], abs=1e-4)


def test_gigpo_and_spear_count_a_last_rollout_without_a_trained_turn() -> None:
    step = silent_last([1.0, 0.5, 0.0])
    episode = by_turn(step, make_recipe("gigpo", {"weight": 0.0}).credit(step))
    assert episode == pytest.approx([0.5] * 3 + [0.0] * 3)
    fresh = by_turn(step, SPEAR().credit(step))  # two calls before the last are worth .2, none are worth nothing
    mean = statistics.fmean([1.2, 0.7, 0.0])
    assert fresh == pytest.approx([1.2 - mean] * 3 + [0.7 - mean] * 3)


def test_spear_pays_no_calls_without_its_bonus() -> None:
    step = view([scripted("g", [[0.0, 0.0, 0.0], [0.0]], [1.0, 0.0])])
    assert by_turn(step, SPEAR(bonus=False).credit(step)) == pytest.approx([0.5] * 3 + [-0.5])


def test_distillation_is_scaled_by_its_strength() -> None:
    part = segment([3, 4, 5], [2], logprob=math.log(0.5))
    step = view([group("g", [record("g", 0, [part], 1.0)])])
    said = {name: (np.full(3, math.log(value), np.float32),) for name, value in (("teacher", 0.8), (POLICY, 0.4))}
    step = replace(step, readings={name: PolicyReading(one, one) for name, one in said.items()})
    served = make_recipe("opd", {"teacher_policy": "t", "strength": 0.25}).credit(step)
    assert float(served.advantages[0][2]) == pytest.approx(0.25 * math.log(0.8 / 0.5))
    forward = make_recipe("tcod", {"teacher": "folder", "strength": 0.25})
    assert float(forward.credit(step).advantages[0][2]) == pytest.approx(0.25 * math.log(0.8 / 0.4))
    assert forward.networks() == {"teacher": ReadNetwork("folder")}


@pytest.mark.parametrize("baseline", [True, False])
def test_reinforce_pp_takes_its_groups_baseline_only_if_asked(baseline: bool) -> None:
    step = view(leased())
    plays = [(number, play) for number, group_ in enumerate(counted()) for play in group_]
    means = {
        number: statistics.fmean(play.reward for own, play in plays if own == number) for number in range(len(GAMES))
    }
    values = [play.reward - baseline * means[number] for number, play in plays]
    tokens = [sum(turn.tokens for turn in play.turns) for _, play in plays]
    every = [value for value, count in zip(values, tokens, strict=True) for _ in range(count)]
    mean, spread = statistics.fmean(every), statistics.pstdev(every) + 1e-6
    expected = [
        (value - mean) / spread for value, (_, play) in zip(values, plays, strict=True) for _ in range(len(play.turns))
    ]
    found = by_turn(step, make_recipe("reinforce_pp", {"baseline": baseline}).credit(step))
    assert found == pytest.approx(expected, abs=1e-5)


def test_seeupo_numbers_turns_for_its_loss_and_holds_unlikely_later_ones() -> None:
    """Turn 2 became e^-.6 as likely: turn 1's advantage counts .8 times, the least."""
    step = view(leased())
    order = [index + 1 for plays in counted() for play in plays for index in range(len(play.turns))]
    numbers = SeeUPO().credit(step).extra["turn"]
    assert [float(numbers[turn.row][turn.places[0]]) for turn in step.turns] == order
    batch = replace(batch_of([-1.0, -1.0], [0.7, 0.7]), extra={"turn": torch.tensor([1.0, 2.0])})
    current = torch.tensor([-1.0, -1.6], requires_grad=True)
    terms = SeeUPO(limit=0.2).loss(Predictions(current, torch.zeros(2)), batch, PolicyLoss())
    assert float(terms.loss.detach()) == pytest.approx(-(0.7 * 0.8 + 0.7 * math.exp(-0.6)), rel=1e-5)
    assert torch.autograd.grad(terms.loss, current)[0].tolist() == pytest.approx([-0.56, -0.7 * math.exp(-0.6)])


def test_seeupo_gives_later_turns_no_gradient_of_earlier_ones() -> None:
    """Turn 2 became e^.1 as likely, within the limit: its own gradient is that of its own ratio."""
    batch = replace(batch_of([-1.0, -1.0], [0.7, 0.7]), extra={"turn": torch.tensor([1.0, 2.0])})
    current = torch.tensor([-1.0, -0.9], requires_grad=True)
    terms = SeeUPO(limit=0.2).loss(Predictions(current, torch.zeros(2)), batch, PolicyLoss())
    assert torch.autograd.grad(terms.loss, current)[0].tolist() == pytest.approx([-0.7 * math.exp(0.1)] * 2)


def test_slea_rl_compares_an_observation_with_the_first_of_each_cluster() -> None:
    """B is like A; C and D are like B, but neither like A nor like each other: they are clusters of their own."""
    shown = [(3, 4, 5, 6, 7, 8), (3, 4, 5, 6, 7, 20), (21, 4, 5, 6, 7, 20), (3, 22, 5, 6, 7, 20)]
    rewards = [1.0, 0.0, 0.5, 0.25]
    parts = [spoken(f"r{at}", [(observed, [30], "")]) for at, observed in enumerate(shown)]
    step = view([group("g", [record("g", at, [parts[at]], rewards[at]) for at in range(4)])])
    plain = by_turn(step, make_recipe("grpo", {}).credit(step))
    found = by_turn(step, make_recipe("slea_rl", {"likeness": 0.8}).credit(step))
    extra = [one - other for one, other in zip(found, plain, strict=True)]
    assert extra == pytest.approx([math.sqrt(0.5), -math.sqrt(0.5), 0, 0], abs=1e-4)


def test_of_steps_without_what_is_compared_nothing_is_made() -> None:
    silent = view([group("g", [record("g", 0, [segment([5, 8], [])], 1.0)])])
    nothing = PolicyReading((), ())
    for name in ("cm2", "ssp"):
        assert make_recipe(name, {}).credit(silent).advantages == ()
    assert make_recipe("infopo", {}).credit(replace(silent, readings=dict.fromkeys((POLICY, "masked"), nothing)))
    masked = record("g", 0, [segment([5, 8], [1])], 1.0, Scoring.MASKED)
    step = view([group("g", [masked, record("g", 1, [segment([5, 9], [1])], 0.0, Scoring.MASKED)])])
    given = make_recipe("grpo", {}).credit(step)
    found = make_recipe("aepo", {}).credit(replace(step, readings={POLICY: apart(step, 5)}))
    assert [one.tolist() for one in found.advantages] == [one.tolist() for one in given.advantages]


def test_a_hinted_teacher_is_followed_beside_the_policys_own_loss() -> None:
    batch = replace(batch_of([-1.0], [0.5]), extra={"teacher": torch.tensor([-1.2]), "hinted": torch.ones(1)})
    predicted = Predictions(torch.tensor([-1.0]), torch.zeros(1))
    found = float(HintedTeacher(strength=0.3).loss(predicted, batch, PolicyLoss()).loss)
    assert found == pytest.approx(-0.5 + 0.3 * (math.exp(-0.2) - 1 + 0.2), rel=1e-5)


@pytest.mark.parametrize("apart_by", [100.0, -100.0])
def test_log_ratios_are_held_at_both_ends(apart_by: float) -> None:
    """In float32 e^100 is infinite; at e^20 nothing is lost."""
    held = math.copysign(MOST_LOG_RATIO, apart_by)
    current, zero = torch.tensor([apart_by]), torch.zeros(1)
    expected = math.exp(-held) - 1 + held
    assert float(distance(current, zero)) == pytest.approx(expected)
    batch = replace(batch_of([0.0], [0.0]), reference_M=current, extra={"teacher": current})
    assert float(PolicyLoss(kl=1.0)(Predictions(zero, zero), batch).loss) == pytest.approx(math.exp(held) - held - 1)
    skilled = SkillSD().distance(Predictions(current, zero), replace(batch, extra={"teacher": zero}))
    assert float(skilled) == pytest.approx(math.exp(held) * expected)
    _, weights = Correction("truncated", cap=math.inf)(current, batch)
    assert float(weights) == pytest.approx(math.exp(held))


def test_a_rollout_without_a_reward_or_with_all_its_routes_can_be_trained() -> None:
    part = segment(range(4), [2, 3])
    routed = replace(part, extras={ROUTED_EXPERTS: np.tile(np.array([0, 1], np.int16), (4, 1, 1))})
    unjudged = group("g", [record("g", 0, [routed], None, Scoring.UNSCORABLE)])
    shape = ExpertShape(depth=1, layers=(0,), experts=4, top_k=2)
    assert trainable(unjudged, VOCABULARY, shape, all_routed=True).rollouts == unjudged.rollouts


class Answering(Recipe):
    answer: Any = 1

    def admits_rollout(self, rollout: StepRollout) -> bool:
        return self.answer


def test_what_a_recipe_answers_is_checked() -> None:
    with pytest.raises(ConfigError, match="replays at least 1 group, not 0"):
        ReplayedGroups(0, Replay())
    step = view([scripted("g", [[0.0]], [1.0])])
    with pytest.raises(ConfigError, match="admits_rollout returned 1 for rollout"):
        Answering().filtered(step)
    assert type("Numpy", (Answering,), {"answer": np.bool_(True)})().filtered(step).rollouts[0].trained
    assert not type("Numpy", (Answering,), {"answer": np.bool_(False)})().filtered(step).rollouts[0].trained
    older = SPEAR()
    older.restore({})
    assert older.state() == {"means": []}


def test_rollouts_that_other_policies_train_too_have_roles() -> None:
    step = view([scripted("g", [[0.0]], [1.0])])
    needy = type("Needy", (Recipe,), {"needs": ("roles",)})()
    needy.check(replace(step, shared=True))
    with pytest.raises(ConfigError, match="all calls are of one agent"):
        needy.check(step)


def test_infopo_pays_no_question_that_was_answered_by_nothing_and_refuses_images() -> None:
    answers: dict[str, list[int]] = defaultdict(list)
    for name, observed in (("asked", [7]), ("silent", [])):
        step = view([group("g", [record("g", 0, [spoken("a", [([5], [8], ""), (observed, [9], "")])], 1.0)])])
        answers[name] = list(InfoPO().answered(step))
    assert answers == {"asked": [1], "silent": []}
    shown = replace(spoken("a", [([5, 6], [8], ""), ([7], [9], "")]), images=(PromptImage(0, 1, (1, 1, 1), "00"),))
    with pytest.raises(ConfigError, match="can't where these show images"):
        InfoPO().passes(view([group("g", [record("g", 0, [shown], 1.0)])]))


def test_weights_of_weights_are_products_and_further_arrays_stand_beside_the_others() -> None:
    step = silent_last([1.0, 0.0])
    credit = step.broadcast(np.array([0.5, 2.0]))
    half, third = (step.broadcast(np.full(2, value)).advantages for value in (0.5, 1 / 3))
    twice = credit.weighted(half).weighted(third).carrying(a=half).carrying(b=third)
    assert twice.weights is not None
    assert twice.weights[0][step.turns[0].places].tolist() == pytest.approx([1 / 6, 1 / 6])
    assert twice.extra.keys() == {"a", "b"}


def test_a_hint_before_a_row_moves_its_images_and_lengthens_its_arrays() -> None:
    """Recorded experts are left out: behind another prompt the routers choose anew."""
    extras = {"top_ids": np.arange(8).reshape(4, 2), ROUTED_EXPERTS: np.zeros((4, 1, 1), np.int16)}
    part = replace(segment(range(4), [3]), extras=extras, images=(PromptImage(1, 3, (1, 2, 2), "00"),))
    step = view([group("g", [hinted(record("g", 0, [part], 1.0), [7, 8])])])
    (shown,) = step.hinted()
    assert shown.segment.images == (PromptImage(3, 5, (1, 2, 2), "00"),)
    assert shown.segment.loss_mask.tolist() == [False] * 5 + [True]
    assert shown.segment.extras["top_ids"].dtype == part.extras["top_ids"].dtype
    assert {name: array.tolist() for name, array in shown.segment.extras.items()} == {
        "top_ids": [[0, 0], [0, 0], [0, 1], [2, 3], [4, 5], [6, 7]]
    }


def test_a_hinted_teacher_reads_the_rows_behind_their_hints() -> None:
    hints = hinted(record("g", 0, [segment(range(4), [3])], 1.0), [7, 8]), record("g", 1, [segment([1, 2], [1])], 0.0)
    step = view([group("g", hints)])
    for recipe, network in ((SkillSD(), POLICY), (TTOPD(), "teacher")):
        (made,) = recipe.passes(step).values()
        assert isinstance(made, Pass)
        assert made.network == network
        assert [(shown.row, shown.segment.token_ids.tolist()) for shown in made.views or ()] == [
            (0, [7, 8, 0, 1, 2, 3])
        ]


def test_a_recipe_that_reads_the_policy_reads_the_rows_as_they_are_and_another_reads_nothing() -> None:
    step = view([group("g", [record("g", 0, [segment([1, 2], [1])], 1.0)])])
    assert Recipe().passes(step) == {}
    ((name, made),) = AEPO().passes(step).items()
    assert isinstance(made, Pass)
    assert (name, made.network, made.views) == (POLICY, POLICY, None)


def test_aepos_loss_trains_no_row_without_an_advantage() -> None:
    assert not AEPO().trains_zero_rows


def test_a_reward_counts_for_the_call_the_span_or_the_role_that_its_scope_names() -> None:
    one = record("g", 0, [spoken("a", [([5], [8, 9], "")])], 1.0)
    scopes = {
        "call:a-00": 0.5,
        "span:a-00:0:1": 0.25,
        "role:x": 2.0,
        "role:x:y": 4.0,
        "rollout": 8.0,
        "note:a-00": 16.0,
    }
    rewards = tuple(Reward(name, one.rollout.id, value, name) for name, value in scopes.items())
    step = view([group("g", [replace(one, rollout=replace(one.rollout, rewards=rewards))])])
    assert (step.turn_rewards.tolist(), dict(step.rollouts[0].roles)) == ([0.75], {"x": 2.0, "x:y": 4.0})


def test_texts_are_encoded_without_and_decoded_with_special_tokens(tmp_path: Path) -> None:
    """Hints may be texts or ids in one step; tags that a recipe reads may be special tokens."""
    coder = Tokenizer(WordLevel({"<s>": 0, "go": 1, "<action>": 2}, unk_token="go"))
    coder.pre_tokenizer = WhitespaceSplit()  # type: ignore[assignment]
    coder.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])  # type: ignore[assignment]
    coder.add_special_tokens(["<s>", "<action>"])
    records = [hinted(record("g", at, [segment([1, 2], [1])], 1.0), hint) for at, hint in enumerate(("go go", [2, 1]))]
    step = view([group("g", [*records, record("g", 2, [spoken("a", [([1], [2], "")])], 0.0)])])
    with pytest.raises(ConfigError, match=r"has no tokenizer\.json"):
        replace(step, tokenizer=tmp_path).texts(step.turns[0])
    coder.save(str(tmp_path / "tokenizer.json"))
    step = replace(step, tokenizer=tmp_path)
    assert step.hint_ids == [[1, 1], [2, 1], []]
    assert step.texts(step.turns[0]) == ["<action>"]


def test_an_outcome_is_added_to_given_values_and_sequences_are_a_rollouts_or_an_agents() -> None:
    turns = [([5], [8], ""), ([6], [9], "critic"), ([7], [9], "")]
    step = view([group("g", [record("g", at, [spoken(f"r{at}", turns)], float(at)) for at in range(2)])])
    assert step.with_outcome(np.full(6, 0.5)).tolist() == [0.5, 0.5, 0.5, 0.5, 0.5, 1.5]
    assert step.sequences() == [[0, 1, 2], [3, 4, 5]]
    assert step.sequences(by_agent=True) == [[0, 2], [1], [3, 5], [4]]


@pytest.mark.parametrize("name", ["ppo", "steppo", "odysseus", "marft"])
def test_gamma_discounts_rewards_and_lambda_only_the_later_errors(name: str) -> None:
    """Schulman et al. 2016, eq. 16, gamma .9 and lam .6: over tokens, or over turns of one token each."""
    turns = [([5], [8], "")] * 3
    step = view([group("g", [record("g", 0, [spoken("a", turns)], 1.0)])])
    values, gamma, lam = [0.2, 0.5, 0.3], 0.9, 0.6
    said = step.spread_turns(np.array(values))
    step = replace(step, readings={POLICY: PolicyReading(said, said, {"value": said})})
    errors = [gamma * 0.5 - 0.2, gamma * 0.3 - 0.5, 1.0 - 0.3]
    expected = [sum((gamma * lam) ** (k - t) * errors[k] for k in range(t, 3)) for t in range(3)]
    credit = make_recipe(name, {"gamma": gamma, "lam": lam}).credit(step)
    targets = [float(credit.extra["value_target"][turn.row][turn.places[0]]) for turn in step.turns]
    assert targets == pytest.approx([a + v for a, v in zip(expected, values, strict=True)], abs=1e-5)


def test_skill_sds_importance_ratio_has_a_gradient() -> None:
    """d (rho D) / d log pi = rho (D + 1 - e^-l): eq. 13 samples from the old policy."""
    current = torch.tensor([-1.0], requires_grad=True)
    batch = replace(batch_of([-1.1], [0.0]), extra={"teacher": torch.tensor([-1.2])})
    found = torch.autograd.grad(SkillSD().distance(Predictions(current, torch.zeros(1)), batch).sum(), current)[0]
    apart_by = math.exp(-0.2) - 1 + 0.2
    assert float(found) == pytest.approx(math.exp(0.1) * (apart_by + 1 - math.exp(-0.2)), rel=1e-4)


def test_who_pays_for_entropy_lets_it_move() -> None:
    assert {name for name, kind in RECIPES.items() if kind.entropy_moves} == {"epo"}
