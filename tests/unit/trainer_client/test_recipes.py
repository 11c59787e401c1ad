"""Recipes of one number a rollout by their papers' figures; names, files, options, and what a checkpoint accepts."""

from __future__ import annotations

import runpy
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rolltap.errors import CheckpointMismatch, ConfigError
from rolltap.trainer_client.find_recipe import ENTRY_POINTS, fingerprint, make_recipe, recipe_names, restore
from rolltap.trainer_client.recipe import Recipe
from rolltap.trainer_client.recipes import RECIPES
from rolltap.trainer_client.settings import load_trainer_settings
from rolltap.trainer_client.step import Step, view

from ...contract.outsider import install_distribution, run_suite
from .making import group, record, segment

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


def test_an_unknown_recipe_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"no recipe 'pppo'; known: .*dr_grpo, "):
        make_recipe("pppo", {})


FILE = '''
from dataclasses import dataclass
from rolltap.trainer_client.estimators import centre
from rolltap.trainer_client.recipe import Recipe

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


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"faktor": 1}, "trainer.options.faktor: recipe .* has no such option; its options: factor"),
        ({"factor": "much"}, "trainer.options.factor: Input should be a valid number"),
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
        (None, "can't be loaded: FileNotFoundError"),
    ],
)
def test_a_bad_file_says_what_is_wrong(tmp_path: Path, text: str | None, message: str) -> None:
    if text is not None:
        (tmp_path / "bad.py").write_text(text)
    with pytest.raises(ConfigError, match=message):
        make_recipe(str(tmp_path / "bad.py"), {})


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


@pytest.mark.parametrize("name", recipe_names())
def test_a_step_without_groups_has_no_credit(name: str) -> None:
    recipe = make_recipe(name, {})
    if type(recipe).passes is Recipe.passes and not recipe.needs and not recipe.reads_policy:
        assert recipe.credit(view([])).advantages == ()


SOUND = """
from rolltap.trainer_client.recipe import Recipe
class TOY(Recipe): pass
"""


def test_the_suite_takes_up_a_recipe_from_outside_the_tree(tmp_path: Path) -> None:
    install_distribution(tmp_path, ENTRY_POINTS, "outside", SOUND)
    printed = run_suite(Path(__file__), tmp_path, "without_groups and outside")
    assert "1 passed" in printed, printed


def test_what_is_no_recipe_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(RECIPES, "toy", lambda step: None)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="it has to be a class that derives from Recipe"):
        make_recipe("toy", {})


def test_the_settings_of_every_system_are_settings() -> None:
    systems = runpy.run_path(str(Path(__file__).parents[3] / "scripts" / "recipes_page.py"))["SYSTEMS"]
    given = {"key": "k", "policy": "p", "model": Path("m"), "out": Path("o")}
    for one in systems:
        settings = load_trainer_settings(None, **given, recipe=one["recipe"], **one["settings"])
        assert settings.recipe in recipe_names()


def test_the_page_is_what_the_recipes_say() -> None:
    root = Path(__file__).parents[3]
    made = runpy.run_path(str(root / "scripts" / "recipes_page.py"))
    assert (root / "docs" / "recipes.md").read_text(encoding="utf-8") == made["page"]()
