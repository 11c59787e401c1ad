"""The trainer's settings: where they come from, and that each knob is documented."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from rolltap.errors import ConfigError
from rolltap.trainer_client.model.learner import learning_rate
from rolltap.trainer_client.settings import OptimiserSettings, TrainerSettings, load_trainer_settings

GIVEN: dict[str, Any] = {"key": "k", "policy": "p", "model": Path("m"), "out": Path("o")}
DOCS = Path(__file__).parents[3] / "docs" / "settings.md"


def test_a_file_under_what_is_given_under_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "rolltap.toml"
    path.write_text("[trainer]\nsteps = 7\ngroups = 3\n[trainer.loss]\nclip_high = 0.28\nkl = 0.1\n[policies.p]\n")
    monkeypatch.setenv("ROLLTAP_TRAINER__LOSS__KL", "0.5")
    settings = load_trainer_settings(path, **GIVEN, groups=4, recipe="rloo")
    assert (settings.steps, settings.groups) == (7, 4)
    assert (settings.loss.clip_high, settings.recipe, settings.loss.kl) == (0.28, "rloo", 0.5)


def test_a_value_of_the_environment_names_its_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLLTAP_TRAINER__LOSS__KL", "much")
    with pytest.raises(ConfigError, match=r"trainer\.loss\.kl: .*\(from ROLLTAP_TRAINER__LOSS__KL\)$"):
        load_trainer_settings(**GIVEN)


RECIPE = """
from rolltap.trainer_client.recipes.base import Recipe

class Own(Recipe):
    settings = {settings}
"""


def test_a_recipes_settings_are_below_the_users_and_are_checked_with_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alone, neither side's would do."""
    path, recipe = tmp_path / "rolltap.toml", tmp_path / "own.py"
    recipe.write_text(RECIPE.format(settings={"policy": "p", "loss": {"kl": 0.1, "clip_low": 0.3}, "groups": 3}))
    path.write_text("[trainer]\ngroups = 5\n[trainer.loss]\nclip_low = 0.4\n")
    monkeypatch.setenv("ROLLTAP_TRAINER__RECIPE", str(recipe))
    given = {name: value for name, value in GIVEN.items() if name != "policy"}
    settings = load_trainer_settings(path, **given, recipe="rloo")
    assert (settings.policy, settings.groups, settings.recipe) == ("p", 5, str(recipe))
    assert (settings.loss.kl, settings.loss.clip_low, settings.loss.clip_high) == (0.1, 0.4, 0.2)
    adapters = {"lora": {"rank": 4, "push": "adapter"}}
    recipe.write_text(RECIPE.format(settings=adapters))
    with pytest.raises(ConfigError, match="sends whole weights"):
        load_trainer_settings(**GIVEN, push={"transfer": "distributed"})
    assert load_trainer_settings(**GIVEN, push={"transfer": "distributed"}, lora={"push": "merged"}).lora.rank == 4


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"loss": {"clip_hi": 0.3}}, "own.py: settings.loss.clip_hi: no such key; did you mean loss.clip_high?"),
        ({"loss": {"kl": -1}}, "trainer.loss.kl: has to be greater than or equal to 0"),
    ],
)
def test_a_recipes_bad_setting_is_named(settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    recipe = tmp_path / "own.py"
    recipe.write_text(RECIPE.format(settings=settings))
    with pytest.raises(ConfigError) as caught:
        load_trainer_settings(**GIVEN, recipe=str(recipe))
    assert message in caught.value.message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[trainer]\nstepz = 7", "trainer.stepz: no such key; did you mean steps?"),
        ("[trainer.optimizer]\nlr = 1", "trainer.optimizer: no such key; did you mean optimiser?"),
        ("[trainer]\nlr = 1", "trainer.lr: no such key; did you mean optimiser.lr?"),
        ("[trainer.loss]\nratio = 'turn'", "trainer.loss.ratio: has to be 'token' or 'sequence'"),
        ("[trainer]\nsteps = 0", "trainer.steps: has to be greater than or equal to 1"),
        (
            "[trainer]\nlora = {rank = 4, push = 'adapter'}\npush = {transfer = 'distributed'}",
            "trainer: push.transfer = 'distributed' sends whole weights",
        ),
        ("[trainer", "is not TOML"),
    ],
)
def test_a_bad_file_is_one_line_that_names_the_key(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "rolltap.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_trainer_settings(path, **GIVEN)
    assert message in caught.value.message
    assert "\n" not in caught.value.message


@pytest.mark.parametrize(
    ("name", "meant"), [("STEPZ", "STEPS"), ("OPTIMIZER__LR", "OPTIMISER"), ("LOSS__KLL", "LOSS__KL")]
)
def test_a_variable_that_is_no_setting_is_named(monkeypatch: pytest.MonkeyPatch, name: str, meant: str) -> None:
    monkeypatch.setenv(f"ROLLTAP_TRAINER__{name}", "1")
    with pytest.raises(ConfigError) as caught:
        load_trainer_settings(**GIVEN)
    assert f"ROLLTAP_TRAINER__{name}: no such setting; did you mean ROLLTAP_TRAINER__{meant}" in caught.value.message


def test_the_learning_rate_rises_and_falls() -> None:
    settings = OptimiserSettings(lr=1.0, warmup=2, lr_end=0.2)  # type: ignore[call-arg]
    assert [learning_rate(settings, step, 5) for step in (1, 2, 3, 5, 9)] == pytest.approx([0.5, 0.8, 0.6, 0.2, 0.2])
    assert learning_rate(OptimiserSettings(lr=1.0), 100, 100) == 1.0  # type: ignore[call-arg]


def test_settings_cannot_be_changed_after_the_start() -> None:
    settings = load_trainer_settings(**GIVEN)
    with pytest.raises(ValueError, match="frozen"):
        settings.steps = 3  # type: ignore[misc]


def knobs(model: type[BaseModel], prefix: str = "") -> list[tuple[str, str | None]]:
    found: list[tuple[str, str | None]] = []
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            found += knobs(field.annotation, f"{prefix}{name}.")
        else:
            found.append((f"{prefix}{name}", field.description))
    return found


@pytest.mark.parametrize(("name", "description"), knobs(TrainerSettings))
def test_every_knob_is_documented(name: str, description: str | None) -> None:
    assert description
    assert f"`{name}`" in DOCS.read_text(encoding="utf-8")
