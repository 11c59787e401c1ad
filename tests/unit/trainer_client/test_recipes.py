"""Recipes of one number a rollout by their papers' figures; names, files, options, and what a checkpoint accepts."""

from __future__ import annotations

import dataclasses
import math
import runpy
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rolltap.errors import CheckpointMismatch, ConfigError
from rolltap.trainer_client.data.step import Step, view
from rolltap.trainer_client.model.ranks import Ranks
from rolltap.trainer_client.recipes import ENTRY_POINTS, RANGES, RECIPES, fingerprint, make_recipe, restore
from rolltap.trainer_client.recipes.base import Recipe
from rolltap.trainer_client.recipes.papers.slea_rl import SLEARL
from rolltap.trainer_client.run.worker import RankWorker
from rolltap.trainer_client.settings import load_trainer_settings

from ...contract.outsider import install_distribution, run_suite
from .acting import scripted, spoken
from .making import group, model_folder, recipe_names, record, segment
from .test_recipe_figures import by_turn, reading

BY_ROLLOUT = ["grpo", "dr_grpo", "rloo", "lite_ppo", "reinforce"]
REWARDS = st.lists(st.lists(st.floats(-5, 5), max_size=6), min_size=1, max_size=4)
ONE = segment([1, 2], [1])


def step_of(groups: Sequence[Sequence[float]]) -> Step:
    """Rollouts of one trained token."""
    return view(
        [
            group(str(index), [record(str(index), place, [ONE], reward) for place, reward in enumerate(rewards)])
            for index, rewards in enumerate(groups)
        ]
    )


def advantages(name: str, groups: Sequence[Sequence[float]]) -> list[float]:
    return [float(one[1]) for one in make_recipe(name, {}).credit(step_of(groups)).advantages]


@pytest.mark.parametrize(
    ("name", "groups", "expected"),
    [
        ("grpo", [[1, 0, 0, 1]], [0.866, -0.866, -0.866, 0.866]),
        ("dr_grpo", [[1, 0, 0, 1]], [0.5, -0.5, -0.5, 0.5]),
        ("rloo", [[1, 0, 0, 1]], [0.6667, -0.6667, -0.6667, 0.6667]),
        ("lite_ppo", [[1, 0], [1, 1]], [1, -1, 0, 0]),
        ("reinforce", [[1, 0.25]], [1, 0.25]),
    ],
)
def test_published_numbers(name: str, groups: list[list[float]], expected: list[float]) -> None:
    assert advantages(name, groups) == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo"])
def test_a_group_of_one_or_of_equal_rewards_teaches_nothing(name: str) -> None:
    assert advantages(name, [[1.0], [], [0.1] * 6]) == [0.0] * 7


@pytest.mark.parametrize("name", [name for name in BY_ROLLOUT if name != "reinforce"])
@settings(deadline=None)
@given(groups=REWARDS, shift=st.integers(-3, 3))
def test_a_constant_added_to_all_rewards_changes_nothing(name: str, groups: list[list[float]], shift: int) -> None:
    rounded = [[round(reward, 2) for reward in rewards] for rewards in groups]
    moved = [[reward + shift for reward in rewards] for rewards in rounded]
    assert advantages(name, moved) == pytest.approx(advantages(name, rounded), abs=1e-5)


def test_agentflow_by_call_lets_longer_rollouts_weigh_more() -> None:
    """R 1 in one call and 0 in three: mean .25 over the calls, .5 over the rollouts."""
    step = view([scripted("g", [[0.0], [0.0, 0.0, 0.0]], [1.0, 0.0])])
    by_call = make_recipe("agentflow", {"by_call": True}).credit(step)
    assert by_turn(step, by_call) == pytest.approx([1.5, -0.5, -0.5, -0.5], abs=1e-4)
    assert by_turn(step, make_recipe("agentflow", {}).credit(step))[0] == pytest.approx(0.7071, abs=1e-4)


def test_webagent_r1_counts_turns_alike() -> None:
    """Turns of one and three tokens: with the rollout's mean each token has 1/4 of it, here 1/2 and 1/6."""
    part = spoken("a", [([1, 2], [9], ""), ([3], [7, 8, 9], "")])
    step = view([group("g", [record("g", 0, [part], 1.0)])])
    credit = make_recipe("webagent_r1", {}).credit(step)
    assert credit.weights is not None
    shares = credit.weights[0][step.rows[0].segment.loss_mask] / 4
    assert shares == pytest.approx([1 / 2, 1 / 6, 1 / 6, 1 / 6])


def test_ai_searchplanner_is_ppo_on_the_planner() -> None:
    step = reading(view([scripted("g", [[0.0, 0.0]], [1.0])]), value=[0.2, 0.5])
    found, expected = (make_recipe(name, {}).credit(step) for name in ("ai_searchplanner", "ppo"))
    assert by_turn(step, found) == by_turn(step, expected)


def test_slea_rl_compares_turns_that_saw_nearly_the_same() -> None:
    """Returns [1, 0, 1] of one cluster → [.577, -1.155, .577], on top of GRPO's own; another observation is alone."""
    seen = [10, 11, 12, 13, 14, 15, 16]
    observed = [seen, [*seen[:6], 40], seen, [50, 51, 52, 53, 54, 55, 56]]
    rows = [spoken(f"r{index}", [(ids, [8, index], "")]) for index, ids in enumerate(observed)]
    rewards = [1.0, 0.0, 1.0, 0.0]
    step = view([group("g", [record("g", index, [row], rewards[index]) for index, row in enumerate(rows)])])
    overall = [0.866, -0.866, 0.866, -0.866]
    expected = [one + other for one, other in zip(overall, [0.577, -1.155, 0.577, 0.0], strict=True)]
    assert by_turn(step, make_recipe("slea_rl", {}).credit(step)) == pytest.approx(expected, abs=1e-3)
    assert SLEARL().like([1, 2, 3, 4, 5, 6, 7], [1, 2, 3, 4, 5, 6, 9])
    assert not SLEARL().like([1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 9])


def test_an_unknown_recipe_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"no recipe 'pppo'; known: .*dr_grpo, "):
        make_recipe("pppo", {})


FILE = '''
from dataclasses import dataclass
from rolltap.trainer_client.recipes.estimators import centre
from rolltap.trainer_client.model.ranks import Ranks
from rolltap.trainer_client.recipes.base import Recipe

@dataclass
class Halved(Recipe):
    """Half of Dr. GRPO."""
    settings = {"loss": {"clip_high": 0.5}, "optimiser": {"epochs": 3}}
    factor: float = 0.5

    def __post_init__(self):
        self.seen = 0

    def credit(self, step):
        self.seen += 1
        return step.broadcast(self.factor * centre(step.rewards, step.groups))

    def state(self):
        return {"seen": self.seen}

    def restore(self, state):
        self.seen = state.get("seen", 0)
'''


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "halved.py"
    path.write_text(FILE)
    return path


def test_a_file_is_a_recipe_with_options_and_settings_of_its_own(file: Path) -> None:
    recipe = make_recipe(str(file), {"factor": "0.1"})
    found = recipe.credit(step_of([[1.0, 0.0]]))
    assert [float(one[1]) for one in found.advantages] == pytest.approx([0.05, -0.05])
    given = {"key": "k", "policy": "p", "model": Path("m"), "out": Path("o"), "recipe": str(file)}
    settings = load_trainer_settings(None, **given, optimiser={"epochs": 2})
    assert (settings.loss.clip_high, settings.optimiser.epochs) == (0.5, 2)


@pytest.mark.parametrize("name", RECIPES)
def test_an_option_has_no_value_by_which_a_run_would_fail_later(name: str) -> None:
    """NaN in any option; a discount or a share outside 0 to 1; 0 where it divides."""
    numbers: dict[str, Any] = {
        field.name: type(field.default)
        for field in dataclasses.fields(RECIPES[name])
        if field.init and type(field.default) in (int, float)
    }
    odd = [(option, math.nan) for option, kind in numbers.items() if kind is float]
    for option, (least, most) in RANGES.items():
        if kind := numbers.get(option):
            odd += [(option, kind(least) - 1), *([(option, kind(most) + 1)] if most < math.inf else [])]
            make_recipe(name, {option: kind(max(least, 1e-6))})
    for option, value in odd:
        with pytest.raises(ConfigError, match=rf"trainer\.options\.{option}: has to be .*, not"):
            make_recipe(name, {option: value})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"faktor": 1}, "trainer.options.faktor: recipe .* has no such option; its options: factor"),
        ({"factor": "much"}, "trainer.options.factor: has to be a number, not 'much'"),
    ],
)
def test_a_bad_option_is_named(file: Path, options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_recipe(str(file), options)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = 1", "has to define one class that derives from Recipe; it has: none"),
        ("import nothing_of_this_name", "can't be loaded: ModuleNotFoundError"),
        (None, "can't be loaded: there is no such file"),
    ],
)
def test_a_bad_file_says_what_is_wrong(tmp_path: Path, text: str | None, message: str) -> None:
    if text is not None:
        (tmp_path / "bad.py").write_text(text)
    with pytest.raises(ConfigError, match=message):
        make_recipe(str(tmp_path / "bad.py"), {})


def test_a_module_beside_the_recipe_is_part_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("deeper", "beside"):  # of an earlier run in this process
        monkeypatch.delitem(sys.modules, f"{name}_of_test", raising=False)
    deeper, beside, file = (tmp_path / f"{name}_of_test.py" for name in ("deeper", "beside", "recipe"))
    deeper.write_text("FACTOR = 1.0")
    beside.write_text("from deeper_of_test import FACTOR")
    file.write_text("import beside_of_test\n" + FILE)
    saved = {**fingerprint(str(file), make_recipe(str(file), {})), "state": {"seen": 0}}
    deeper.write_text('"""A docstring."""\n# a comment\nFACTOR = 1.0\n"""What it is."""')
    restore(str(file), make_recipe(str(file), {}), saved)
    deeper.write_text("FACTOR = 2.0")
    with pytest.raises(CheckpointMismatch, match="code changed; set recipe_changed"):
        restore(str(file), make_recipe(str(file), {}), saved)
    restore(str(file), make_recipe(str(file), {}), saved, changed=True)


def test_a_checkpoint_has_the_code_that_made_it(file: Path, tmp_path: Path) -> None:
    """The file was edited while the run went on: what the run saves was made by the code that it began with."""
    model, before = model_folder(tmp_path / "model"), fingerprint(str(file), make_recipe(str(file), {}))
    given = load_trainer_settings(
        key="k", policy="p", model=model, out=tmp_path / "out", recipe=str(file), compute={"device": "cpu"}
    )
    worker = RankWorker(given, Ranks.of_environment("cpu"), None)
    file.write_text(FILE.replace("self.factor *", "2 * self.factor *"))
    assert worker.state()["recipe"] == {**before, "state": {"seen": 0}}


def test_a_changed_recipe_is_refused_unless_told(file: Path) -> None:
    first = make_recipe(str(file), {})
    first.credit(step_of([[1.0, 0.0]]))
    saved = {**fingerprint(str(file), first), "state": first.state()}
    file.write_text("# a comment\n" + FILE)
    same = make_recipe(str(file), {})
    restore(str(file), same, saved)
    assert same.state() == {"seen": 1}
    with pytest.raises(CheckpointMismatch, match="options changed; set recipe_changed"):
        restore(str(file), make_recipe(str(file), {"factor": 1.0}), saved)
    file.write_text(FILE.replace("self.factor *", "2 * self.factor *"))
    other = make_recipe(str(file), {})
    with pytest.raises(CheckpointMismatch, match=r"another recipe \(halved\): code changed"):
        restore(str(file), other, saved)
    restore(str(file), other, saved, changed=True)
    assert other.state() == {"seen": 1}
    restore("grpo", make_recipe("grpo", {}), saved, changed=True)


class OfCandidates(Recipe):
    """A method of a user's own that reads the tokens that were nearly sampled."""

    needs = ("candidates",)


def test_candidates_that_were_not_recorded_are_asked_for_by_their_setting() -> None:
    with pytest.raises(ConfigError, match=r"no token has its likeliest candidates: set policies\.NAME\.top_logprobs"):
        OfCandidates().check(step_of([[1.0, 0.0]]))
    part = replace(ONE, extras={"top_ids": np.zeros((2, 3), np.int32)})
    OfCandidates().check(view([group("g", [record("g", 0, [part], 1.0)])]))


@pytest.mark.parametrize("name", recipe_names())
def test_a_step_without_groups_has_no_credit(name: str) -> None:
    recipe = make_recipe(name, {})
    if type(recipe).passes is Recipe.passes and not recipe.needs and not recipe.reads_policy:
        assert recipe.credit(view([])).advantages == ()


SOUND = """
from rolltap.trainer_client.recipes.base import Recipe
class TOY(Recipe): pass
"""


@pytest.mark.long
def test_a_recipe_of_another_package_passes_the_contract(tmp_path: Path) -> None:
    install_distribution(tmp_path, ENTRY_POINTS, "outside", SOUND)
    printed = run_suite(Path(__file__).with_name("test_recipe_contract.py"), tmp_path, "outside")
    assert "4 passed" in printed, printed


def test_what_is_no_recipe_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(RECIPES, "toy", lambda step: None)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="it has to be a class that derives from Recipe"):
        make_recipe("toy", {})


def test_every_system_of_the_page_runs_with_settings_or_as_an_example_that_is_tested() -> None:
    """A recipe is in the contract suite, and has figures of its own under its name or class in a test here."""
    root = Path(__file__).parents[3]
    systems = runpy.run_path(str(root / "scripts" / "recipes_page.py"))["SYSTEMS"]
    figures = "".join(path.read_text(encoding="utf-8") for path in Path(__file__).parent.glob("test_recipe*s.py"))
    loops, folders = (
        (root / "tests" / "integration" / f"test_{name}.py").read_text(encoding="utf-8")
        for name in ("systems", "examples")
    )
    given = {"key": "k", "policy": "p", "model": Path("m"), "out": Path("o")}
    for one in systems:
        assert len({"recipe", "example"} & one.keys()) == 1, one
        if "recipe" in one:
            settings = load_trainer_settings(None, **given, recipe=one["recipe"], **one.get("settings", {}))
            assert settings.recipe in recipe_names()
            assert f'"{one["recipe"]}"' in figures or f"{RECIPES[one['recipe']].__name__}(" in figures, one
        if "example" in one:
            is_folder = (root / "examples" / one["example"]).is_dir()
            assert f'"{one["example"]}"' in folders if is_folder else f'@of("{one["example"]}")' in loops, one
        for place in one.get("images", ()):
            file, _, test = place.partition("::")
            assert f"def {test}(" in (root / file).read_text(encoding="utf-8"), one
    assert len(systems) == 56


def test_the_pages_are_what_the_recipes_and_their_runs_say() -> None:
    root = Path(__file__).parents[3]
    made = runpy.run_path(str(root / "scripts" / "recipes_page.py"))
    assert (root / "docs" / "recipes.md").read_text(encoding="utf-8") == made["page"]()
    assert (root / "docs" / "notes" / "recipes.md").read_text(encoding="utf-8") == made["notes"]()
