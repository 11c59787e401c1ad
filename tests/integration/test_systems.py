"""Methods of data, evaluation and guidance as examples: each runs its whole loop on a server.

The model is the example's own stand-in; record, ledger and exporter are real.
"""

from __future__ import annotations

import json
import math
from collections.abc import AsyncIterator
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest

from rolltap.cli.export import ExportJob, run_export
from rolltap.contract.control import RolloutControl
from rolltap.contract.trainer import LeaseRequest
from rolltap.engine.scripted import Prompt, ScriptedEngine
from rolltap.engine.tiny import FOLDER
from rolltap.harnesses.client import AdminClient
from rolltap.proxy.app import Rolltap
from rolltap.reconstructor.exporters import exporter_named
from rolltap.reconstructor.exporters.dataset import Query
from rolltap.reconstructor.exporters.where import parse_where
from rolltap.reconstructor.rules import session_rules
from rolltap.settings import load_settings
from rolltap.trainer_client.data.step import POLICY, PolicyReading, view
from rolltap.trainer_client.recipes import make_recipe

from ..harnesses.house import house_settings, serving

EXAMPLES = Path(__file__).parents[2] / "examples" / "systems"


@pytest.fixture
def example(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The example that the test's parameter names."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return import_module(request.param)


@pytest.fixture
async def home(example: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Any]:
    def reply(prompt: Prompt) -> Any:
        return example.reply(prompt)

    async with ScriptedEngine(reply, FOLDER) as engine:
        asked: dict[str, Any] = dict(house_settings(tmp_path, engine.url))
        tiny = asked["policies"]["tiny"]
        asked["policies"] = {"tiny": tiny, "frozen": {**tiny, "trainable": False}, "worker": {**tiny, "model": "w"}}
        settings = load_settings(None, **asked)
        async with (
            Rolltap.running(settings) as app,
            serving(app, settings) as urls,
            AdminClient(urls["admin"], app.settings.keys.admin) as client,
            aiohttp.ClientSession() as http,
        ):
            here = exporting_here(import_module("home").Home, f"sqlite:///{tmp_path}/data/rolltap.db")(client, http)
            here.trainers = app.ledger.trainers
            monkeypatch.setenv("ROLLTAP_TRAINER_URL", urls["trainer"])
            monkeypatch.setenv("ROLLTAP_TRAINER_KEY", app.settings.keys.trainer)
            yield here


def exporting_here(home: type[Any], store: str) -> type[Any]:
    """The examples' home, with the export run in this process: the command takes seconds to start."""

    class Here(home):
        async def export(self, out: Path, form: str, where: str, reader: str = "") -> Path:
            query = Query(where=parse_where([where]), container="jsonl")
            rules = partial(session_rules, train=())
            await run_export(ExportJob(store, out, exporter_named(form, {}), query, rules))
            return out

    return Here


def of(name: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("example", [name], indirect=True)


def rows(folder: Path) -> list[dict[str, Any]]:
    """What an export wrote."""
    return [json.loads(line) for path in sorted(folder.glob("*.jsonl")) for line in path.read_text().splitlines()]


@of("inspo")
async def test_inspo_finds_the_instruction_that_works(home: Any, example: Any) -> None:
    assert example.probabilities([0.5, 0.3, 0.1]) == pytest.approx([0.472, 0.316, 0.212], abs=1e-3)
    weights = await example.main(home)
    assert max(weights, key=weights.__getitem__) == "Answer with digits only."
    assert len(weights) == 3


@of("ssp")
async def test_ssp_pays_the_proposer_by_how_hard_its_question_was(home: Any, example: Any) -> None:
    """The river's is too hard, the tower's too easy; moss gives none, so one of the pool is played."""
    assert example.read_question("Q: Is it? A: yes A: no") == ("Is it? A: yes", "no")
    assert example.read_question("Q:  A: yes") is example.read_question("A question") is None
    river, tower, moss = await example.main(home)
    assert river == {"question": "How long is the river Lonn, in km?", "accuracy": 0.0, "proposer": 1.0}
    assert tower == {"question": "Which year was the tower of Abel built?", "accuracy": 1.0, "proposer": 0.0}
    assert moss["question"] in (river["question"], tower["question"])
    assert moss["proposer"] == 0.0
    assert len((await home.client.get("/read/sessions"))["sessions"]) == 3 + 2 + 3 * 4


@of("slea_rl")
async def test_slea_rl_is_shown_what_it_learned(home: Any, example: Any) -> None:
    """Kicked at first; the warning leads to the key, and the strategy takes its place beside it."""
    library = example.Library()
    assert library.admit(example.Experience("a red door", "Use the key.", 0.0))
    assert not library.admit(example.Experience("a red door", "Use the key.", 0.0))
    assert library.admit(example.Experience("a red door", "Use the key.", 1.0))
    assert (len(library.kept), library.shown("a blue door"), library.shown("x")) == (1, ["Use the key."], [])
    assert await example.main(home) == {"red": [0.0, 1.0, 1.0], "blue": [0.0, 1.0, 1.0], "kept": [1.0, 2.0, 2.0]}


@of("agent_rlvr")
async def test_agent_rlvr_guides_the_second_attempt(home: Any, example: Any, tmp_path: Path) -> None:
    rewards = await example.main(home, tmp_path / "out")
    assert rewards == {"first": [0.5, 0.5], "guided": [1.0, 1.0]}
    assert len(rows(tmp_path / "out")) == 2  # equal rows are written once


@of("reves")
async def test_reves_makes_tasks_of_mended_attempts(home: Any, example: Any) -> None:
    mined = example.mine("p", "c", ["a", "b", "c"])
    assert [(one.kind, one.answer) for one in mined] == [
        ("repair", "c"), ("verify", "False"), ("repair", "c"), ("verify", "True"),
    ]  # fmt: skip
    assert example.mine("p", "c", ["c"]) == example.mine("p", "c", ["a", "b"]) == []
    assert await example.main(home) == {"repair": ["9.9: 1", "9.9: 1"], "verify": ["False: 0", "True: 1"]}


@of("lumina")
async def test_lumina_measures_what_an_oracle_adds(home: Any, example: Any) -> None:
    assert await example.main(home) == {"alone": 0.5, "oracle": 1.0, "value of state": 0.5}
    sessions = (await home.client.get("/read/sessions"))["sessions"]
    assert len(sessions) == 4


@of("plague")
async def test_plague_learns_from_its_library(home: Any, example: Any) -> None:
    found = await example.main(home)
    assert [one["success"] for one in found.values()] == [1.0, 1.0]
    assert set(example.LIBRARY) == {"vault", "cellar"}


@of("apigen_mt")
async def test_apigen_mt_keeps_dialogues_that_end_as_their_blueprint(home: Any, example: Any, tmp_path: Path) -> None:
    found = await example.main(home, tmp_path / "out")
    assert found["blueprint"]["calls"] == [{"item": "pear", "count": 2}]
    assert found["kept"] == 2
    (row,) = rows(tmp_path / "out")
    assert "tool_calls" in json.dumps(row["messages"])


@of("agentic_qwen")
async def test_agentic_qwen_makes_tasks_of_its_errors(home: Any, example: Any) -> None:
    rewards = await example.main(home)
    assert rewards["Add 17 and 25."] == 0.0
    assert rewards["Add 2 and 3."] == 1.0
    assert "Add 27 and 36." in rewards


@of("lmrl_gym")
async def test_lmrl_gym_leaves_transitions_with_returns(home: Any, example: Any, tmp_path: Path) -> None:
    """Three moves that cost 1 each, and the one that finds the vault."""
    rollouts = await example.main(home, tmp_path / "out")
    for rollout in rollouts:
        episode = [row for row in rows(tmp_path / "out") if row["rollout_id"] == rollout]
        assert [row["return_to_go"] for row in episode] == [-3, -2, -1, 0]
        assert [row["done"] for row in episode] == [False, False, False, True]


@of("env_factory")
async def test_env_factory_keeps_what_replays(home: Any, example: Any, tmp_path: Path) -> None:
    assert await example.main(home, tmp_path / "out") == {"open_account": 1.0, "deposit": 1.0}
    assert len(rows(tmp_path / "out")) == 2


@of("astra")
async def test_astra_teaches_by_walks_and_pays_turns(home: Any, example: Any, tmp_path: Path) -> None:
    means = await example.main(home, tmp_path / "out")
    assert means["arena"] == 1.0
    assert 0 < means["taught"] < 1
    assert rows(tmp_path / "out")


@of("recoworld")
async def test_recoworld_pays_for_users_who_stay(home: Any, example: Any) -> None:
    found = await example.main(home)
    assert found["stayed"] == [5.0, 5.0]


@of("user_dialogue")
async def test_user_dialogues_go_on_from_a_stored_state(home: Any, example: Any, tmp_path: Path) -> None:
    found = await example.main(home, tmp_path / "out")
    assert found["first"] == pytest.approx(2 / 3)
    assert found["again"] == 1.0
    again = await home.client.get(f"/read/rollouts/{found['goes on']}")
    assert again["rollout"]["parent"]["call_id"]
    assert again["rollout"]["group_id"]
    assert rows(tmp_path / "out")


@of("arpo")
async def test_arpo_forks_after_a_tools_answer(home: Any, example: Any) -> None:
    found = await example.main(home)
    assert (found["rollouts"], found["forks"]) == (6, 4)
    group = await home.client.get(f"/read/groups/{found['group']}")
    parents = [each["rollout"]["parent"] for each in group["rollouts"]]
    assert [parent["at"] for parent in parents if parent] == [0] * 4


@of("tcod")
async def test_tcod_goes_on_from_ever_fewer_of_an_experts_turns(home: Any, example: Any) -> None:
    """What the expert said is context: only the student's own turns are trained."""
    found = await example.main(home)
    assert [one["kept"] for one in found] == [2, 1, 0, 0]
    assert [one["rewards"] for one in found] == [[1.0, 1.0], [1.0, 1.0], [0.0, 0.0], [0.0, 0.0]]
    leased = (await home.trainers.lease(LeaseRequest("t", "tiny", 99))).groups
    turns = {each.task.id: len(view([each]).turns) for each in leased}
    assert turns == {"lamp-0": 2, "lamp-5": 4, "lamp-10": 6, "lamp-15": 6}
    recipe = make_recipe("tcod", {"teacher": "folder", "every": example.EVERY})
    assert [recipe.after(step) for step in (0, 5, 10)] == [RolloutControl(max_turns=turns) for turns in (1, 2, 3)]


@of("appo")
def test_appo_scores_where_entropy_and_gain_are_both_over_their_mean(example: Any) -> None:
    """Gains exp(.05), exp(-.1), exp(.3) past the clip, 1: with entropies 1, 2, 4, 1 the third place is the first."""
    found = example.scores([1.0, 2.0, 4.0, 1.0], [0.15, -0.4, 0.3, 0.0])
    gains = [math.exp(0.05), math.exp(-0.1), 1.2, 1.0]
    factors = [[(value - np.mean(of)) / np.std(of) for value in of] for of in ([1.0, 2.0, 4.0, 1.0], gains)]
    assert [score for _, score in found] == pytest.approx([a * b for a, b in zip(*factors, strict=True)], abs=1e-4)
    assert [sure for sure, _ in found] == [False, False, True, False]
    token = {"logprob": -3.0, "top": [{"logprob": math.log(0.5)}, {"logprob": math.log(0.25)}]}
    assert example.entropy(token) == pytest.approx(math.log(2))
    assert example.entropy({"logprob": -3.0, "top": []}) == 3.0


@of("appo")
async def test_appo_forks_inside_replies_and_their_beginnings_are_paid(home: Any, example: Any) -> None:
    found = await example.main(home)
    assert (found["rollouts"], found["forks"]) == (4, 2)
    assert all(place.at > 0 for place in found["places"])
    group = await home.client.get(f"/read/groups/{found['group']}")
    parents = [each["rollout"]["parent"] for each in group["rollouts"]]
    forks = sorted((parent["call_id"], parent["at"]) for parent in parents if parent)
    assert forks == sorted((place.call, place.at) for place in found["places"])
    leased = (await home.trainers.lease(LeaseRequest("t", "tiny", 1))).groups
    recipe, step = make_recipe("appo", {}), view(leased)
    assert [rollout.trained for rollout in recipe.filtered(step).rollouts] == [True, True, False, False]
    said = tuple(row.segment.logprobs for row in step.rows)
    credit = recipe.credit(replace(step, readings={POLICY: PolicyReading(said, said, {})}))
    own = [turn for turn in step.turns if not step.rollouts[turn.rollout].root]
    assert len(own) == 2
    assert max(len(set(credit.advantages[turn.row][turn.places].tolist())) for turn in own) > 1


@of("trace")
async def test_trace_gives_attempts_to_what_may_go_either_way(home: Any, example: Any) -> None:
    """Past its first round: fair riddles, and forks of their beginnings that found a clue."""
    found = await example.main(home)
    assert [sorted(roots) for roots in found["roots"]] == [["fair-1", "fair-2"]] * example.ROUNDS
    assert set(found["forks"]) == {"fair, a clue"}
    assert len(found["forks"]) == example.FORKS * example.ROUNDS
    predicted = found["predicted"]
    assert predicted["hard"] < 0.15 < predicted["fair"] < 0.6 < 0.85 < predicted["easy"]
    leased = (await home.trainers.lease(LeaseRequest("t", "tiny", 99))).groups
    step = view([each for each in leased if each.group.id in found["groups"]])
    assert make_recipe("arpo", {}).credit(step).weights is not None
    kinds = [bool(rollout.root) for rollout in step.rollouts]
    assert (kinds.count(True), kinds.count(False)) == (example.FORKS * example.ROUNDS, 4 * example.ROUNDS)


@of("tree_grpo")
async def test_tree_grpo_grows_trees_whose_branches_are_paid_within_them(home: Any, example: Any) -> None:
    """Two roots, and twice two branches of each tree; a branch samples the drawn turn anew."""
    found = await example.main(home)
    grown = example.TREES * example.BRANCHES * example.ROUNDS
    assert (found["rollouts"], len(found["turns"])) == (example.TREES + grown, grown)
    leased = (await home.trainers.lease(LeaseRequest("t", "tiny", 1))).groups
    step = view(leased)
    roots = {rollout.root or rollout.id for rollout in step.rollouts}
    assert len(roots) == example.TREES
    turns = sum(turn.rollout == number for number in range(len(step.rollouts)) for turn in step.turns)
    assert turns == example.TREES * len(example.SUMS) + sum(len(example.SUMS) - turn for turn in found["turns"])
    for name in ("tree_grpo", "branch_grpo"):
        assert make_recipe(name, {}).credit(step).advantages
    assert [len(tree) for tree in found["trees"]] == [1 + example.BRANCHES * example.ROUNDS] * example.TREES


@of("unity_mas")
async def test_unity_mas_trains_two_models_of_three_roles(home: Any, example: Any) -> None:
    """Each model is leased its own roles' calls, paid by them; a role without a reward gets the rollout's."""
    groups = (await example.main(home))["groups"]
    assert list(groups) == ["tiny", "worker"]
    played: dict[str, set[str]] = {}
    for policy in groups:
        (leased,) = (await home.trainers.lease(LeaseRequest(policy, policy, 1))).groups
        assert (leased.group.id, len(leased.rollouts)) == (groups[policy], 4)
        segments = [each for record in leased.rollouts for each in record.trajectory.segments if each.loss_mask.any()]
        played[policy] = {span.agent for segment in segments for span in segment.turns if span.trained}
        assert {record.reward for record in leased.rollouts} == {1.0 if policy == "tiny" else 2.0}
        step = view([leased])
        assert step.shared
        make_recipe("dr_mas", {}).check(step)  # it needs agents, and each run has some of them
    assert played == {"tiny": {""}, "worker": {"first", "second"}}


def test_every_example_stands_in_the_readme() -> None:
    names = {path.stem for path in EXAMPLES.glob("*.py")} - {"home"}
    readme = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    assert {name for name in names if f"({name}.py)" not in readme} == set()
