"""Recipes of several critics, ArCHer and HiPER, by the figures of their methods."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from rolltap.errors import ConfigError
from rolltap.trainer_client.data.step import POLICY, Credit, PolicyReading, Step, view
from rolltap.trainer_client.model.learner import Learner
from rolltap.trainer_client.model.ranks import Ranks
from rolltap.trainer_client.recipes.papers.archer import ArCHer
from rolltap.trainer_client.recipes.papers.hiper import HiPER, Reply
from rolltap.trainer_client.settings import load_trainer_settings

from .acting import scripted, spoken
from .making import group, model_folder, record
from .test_recipe_figures import by_turn

WORDS = [
    "<switch>",
    "KEEP",
    "SWITCH",
    "</switch>",
    "<subgoal>",
    "find",
    "take",
    "</subgoal>",
    "<action>",
    "go",
    "</action>",
]


def heads(step: Step, **values: Sequence[float]) -> PolicyReading:
    """A reading whose heads say one value a turn, at all of its tokens."""
    zeros = step.spread_turns(np.zeros(len(step.turns)))
    return PolicyReading(zeros, zeros, {name: step.spread_turns(np.array(one)) for name, one in values.items()})


def archer_step(number: int = 30, replayed: bool = False) -> Step:
    step = view([replace(scripted("g", [[0.0, 0.0]], [1.0]), replay=replayed)], number=number)
    own = heads(step, q1=[0.8, 0.9], q2=[0.7, 1.0], v1=[0.5, 0.6], v2=[0.4, 0.3])
    target = heads(step, q1=[0.2, 0.3], q2=[0.4, 0.5], v1=[0.1, 0.6], v2=[0.1, 0.6])
    return replace(step, readings={POLICY: own, "target": target})


def test_archer_takes_the_lower_twin_and_looks_one_turn_ahead() -> None:
    """min(Q) .7 and .9, min(V) .4 and .3 → A .3 and .6. Targets of Q: gamma .9 of V̄ .6 → .54, then the reward 1."""
    recipe, step = ArCHer(gamma=0.9), archer_step()
    credit = recipe.credit(step)
    assert by_turn(step, credit) == pytest.approx([0.3, 0.6])
    ends, begins = ([int(turn.places[at]) for turn in step.turns] for at in (-1, 0))
    assert credit.extra["q1_target"][0][ends] == pytest.approx([0.54, 1])
    assert credit.extra["v2_target"][0][begins] == pytest.approx([0.4, 0.5])
    seen = credit.extra["q1_share"][0] + credit.extra["q2_share"][0]
    assert seen[ends].tolist() == [4, 4]  # one twin or the other: two tokens, counted twice
    assert np.count_nonzero(seen) == 2


def test_archer_trains_only_its_critic_at_first_and_on_what_comes_back() -> None:
    recipe = ArCHer()
    warm = archer_step(number=20)
    assert by_turn(warm, recipe.credit(warm)) == [0, 0]
    again = archer_step(replayed=True)
    credit = recipe.credit(again)
    assert by_turn(again, credit) == [0, 0]
    assert sum(one.sum() for name in ("v1_share", "v2_share") for one in credit.extra[name]) == 0
    assert sum(one.sum() for name in ("q1_share", "q2_share") for one in credit.extra[name]) == 8


def test_target_heads_follow_by_tau_and_are_resumed(tmp_path: Path) -> None:
    model = model_folder(tmp_path / "model")
    given = {"key": "k", "policy": "p", "out": tmp_path, "compute": {"device": "cpu"}}
    settings = load_trainer_settings(None, **given, model=model)
    one, other = (Learner(model, settings, Ranks(0, 1, torch.device("cpu")), ArCHer(tau=0.1)) for _ in range(2))
    with torch.no_grad():
        next(one.network.heads["v1"].parameters()).fill_(1.0)
    one.update_followers(1)
    other.restore(one.state())
    for learner in (one, other):
        followed = next(learner.read_networks["target"].heads["v1"].parameters())
        assert followed.unique().tolist() == pytest.approx([0.1])


def test_hiper_estimates_within_and_across_segments() -> None:
    """The docstring's example."""
    columns = ([0, 0, 1.0], [True, False, True], [0.3, 0.4, 0.6], [0.2, 9.0, 0.5])
    low, high, to_go = HiPER(lam=0.95).estimate(*map(np.array, columns))
    assert low == pytest.approx([0.195, 0.1, 0.4])
    assert high == pytest.approx([0.775, 0, 0.5])
    assert to_go == pytest.approx([0.5, 0.5, 1])


def test_hiper_cuts_replies_at_their_tags() -> None:
    reply = Reply.of(["<sw", "itch>KEEP", "</switch> <sub", "goal>find</subgoal>", "\n<action>", "go", "</action>"])
    assert {tag: list(one) for tag, one in reply.tokens.items()} == {
        "switch": [0, 1, 2], "subgoal": [2, 3], "action": [4, 5, 6],
    }  # fmt: skip
    assert (reply.switches, reply.subgoal) == (False, "find")
    bare = Reply.of(["go", "on"])
    assert (list(bare.tokens["action"]), bare.switches, bare.subgoal) == ([0, 1], False, "")


def test_hiper_takes_from_what_keeps() -> None:
    say = "<switch>{}</switch><subgoal>{}</subgoal>".format
    replies = [Reply.of([say("SWITCH", "find")]), Reply.of([say("KEEP", "take")])]
    assert HiPER().penalties(replies) == pytest.approx([0, 0.3 + 0.15])
    assert HiPER().penalties([Reply.of(["go"])]) == pytest.approx([0])
    silent = Reply.of(["<switch>KEEP</switch><action>go</action>"])  # names no other subgoal
    assert HiPER().penalties([replies[0], silent]) == pytest.approx([0, 0.15])
    kept = Reply.of([say("KEEP", "find")])
    assert HiPER().penalties([kept, replies[0], kept]) == pytest.approx([0.1, 0, 0.1])


def hiper_step(folder: Path, replies: Sequence[str]) -> Step:
    """One rollout with reward 1 that says these words."""
    Tokenizer(WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="go")).save(
        str(folder / "tokenizer.json")
    )
    turns = [([30, 31], [WORDS.index(word) for word in said.split()], "") for said in replies]
    step = view([group("g", [record("g", 0, [spoken("a", turns)], 1.0)])])
    return replace(step, tokenizer=folder)


def test_hiper_pays_switch_subgoal_and_action_apart(tmp_path: Path) -> None:
    """Three turns, the last of which switches: V_low .3, .4, .6, V_high .2 and .5, V_term .1; r [0, 0, 1]."""
    keep, act = "<switch> KEEP </switch> <subgoal> find </subgoal>", "<action> go </action>"
    step = hiper_step(tmp_path, [f"{keep} {act}", f"{keep} {act}", f"{keep.replace('KEEP', 'SWITCH')} {act}"])
    step = replace(step, readings={POLICY: heads(step, low=[0.3, 0.4, 0.6], high=[0.2, 9, 0.5], term=[0.1] * 3)})
    recipe = HiPER(lam=0.95, keep_penalty=0, whitened=False)
    credit = recipe.credit(step)
    found = [credit.advantages[turn.row][turn.places] for turn in step.turns]
    assert found[0] == pytest.approx([0.4] * 3 + [0.775] * 3 + [0.195] * 3)
    assert found[1] == pytest.approx([0.4] * 3 + [0.0] * 3 + [0.1] * 3)
    assert found[2] == pytest.approx([0.9] * 3 + [0.5] * 3 + [0.4] * 3)
    shares = [credit.extra["high_share"][turn.row][turn.places] for turn in step.turns]
    assert [np.count_nonzero(one) for one in shares] == [1, 0, 1]
    reads_low = [credit.extra["low_share"][turn.row][turn.places].nonzero()[0].tolist() for turn in step.turns]
    assert reads_low == [[6], [6], [6]]
    targets = [float(credit.extra["low_target"][turn.row][turn.places[6]]) for turn in step.turns]
    assert targets == pytest.approx([0.195 + 0.3, 0.1 + 0.4, 0.4 + 0.6])
    whitened = HiPER(lam=0.95, keep_penalty=0).credit(step)
    assert _tokens(step, whitened, [6, 7, 8]).mean() == pytest.approx(0, abs=1e-6)


def test_what_a_turn_was_shown_and_said_is_read_as_text(tmp_path: Path) -> None:
    step = hiper_step(tmp_path, ["find go", "take"])
    shown = replace(step.turns[1], observed=np.array([WORDS.index("KEEP"), WORDS.index("find")], np.int32))
    assert (step.texts(shown), step.texts(shown, observed=True)) == (["take"], ["KEEP", "find"])


def test_hiper_without_a_tokenizer_says_so() -> None:
    step = view([scripted("g", [[0.0]], [1.0])])
    with pytest.raises(ConfigError, match=r"the recipe reads replies as text, but None has no tokenizer\.json"):
        HiPER().credit(step)


def _tokens(step: Step, credit: Credit, places: Sequence[int]) -> np.ndarray:
    """What these tokens of each turn are given."""
    return np.concatenate([credit.advantages[turn.row][turn.places[list(places)]] for turn in step.turns])
