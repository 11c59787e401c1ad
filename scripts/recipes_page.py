"""Writes docs/recipes.md and docs/notes/recipes.md from the recipes' own files: `python scripts/recipes_page.py`."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
import re
import sys
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from learning_table import learning

from rolltap.trainer_client.recipes import RECIPES
from rolltap.trainer_client.recipes.base import Recipe

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "recipes.md"
NOTES = ROOT / "docs" / "notes" / "recipes.md"
LEARNING = re.compile(r"(?<=<!-- learning -->\n).*(?=<!-- /learning -->)", re.DOTALL)
SYSTEMS = tomllib.loads((ROOT / "scripts" / "systems.toml").read_text(encoding="utf-8"))["system"]
RESULTS = ROOT / "tests" / "learning" / "results.json"
HEAD = ROOT / "scripts" / "recipes_head.md"
HOOKS = (
    "credit",
    "loss",
    "updates",
    "admits",
    "admits_rollout",
    "replay",
    "passes",
    "networks",
    "heads",
    "shaped",
    "estimated",
)
"""What makes a recipe: another credit or loss."""

SETTINGS_HEAD = """Settings of a paper over a recipe above; credit and loss are that recipe's:

"""
CONTROLS_HEAD = """Controls of the rollouts to come, over a recipe above; credit and loss are that recipe's:

"""
SAME_CREDIT = ("sec", "agentflow", "astraflow")
"""Recipes whose credit is their base's: one reads the step for its control, one has its own by an option, one takes
stored groups again."""


def page() -> str:
    """The page's text."""
    own, controls, settings = (
        "\n".join(_row(name, recipe) for name, recipe in sorted(RECIPES.items()) if label(recipe) == wanted)
        for wanted in LABELS
    )
    text = HEAD.read_text(encoding="utf-8")
    text = text.replace("<!-- recipes -->\n", f"{own}\n\n{CONTROLS_HEAD}{controls}\n\n{SETTINGS_HEAD}{settings}\n")
    return text.replace("<!-- systems -->\n", _systems())


def notes() -> str:
    """The notes' text, with the table of what recipes learned."""
    results = json.loads(RESULTS.read_text(encoding="utf-8"))
    return LEARNING.sub(lambda _: learning(results), NOTES.read_text(encoding="utf-8"))


def label(recipe: type[Recipe]) -> str:
    """One of `LABELS`: a recipe has a credit or a loss of its own, a control none, settings neither."""
    is_named = recipe in [RECIPES[name] for name in SAME_CREDIT]
    if recipe is Recipe or (not is_named and any(name in vars(recipe) for name in HOOKS)):
        return "recipe"
    return "control" if "after" in vars(recipe) else "settings"


LABELS = ("recipe", "control", "settings")


def base_of(recipe: type[Recipe]) -> str:
    """The recipe whose credit and loss it has, or would have."""
    base = next(one for one in recipe.__mro__[1:] if one in RECIPES.values())
    return next(name for name, one in RECIPES.items() if one is base)


def _systems() -> str:
    """By what the published systems run, and those that an example shows."""
    examples = [one for one in SYSTEMS if "example" in one]
    by_recipe = [RECIPES[one["recipe"]] for one in SYSTEMS if "recipe" in one]
    settings = sum(one is Recipe or label(one) != "recipe" for one in by_recipe)
    links = ", ".join(f"[{one['name']}](../examples/{_file(one['example'])})" for one in examples)
    return (
        f"{len(SYSTEMS)} systems run, each with a test: {len(by_recipe) - settings} by a recipe, {settings} by a known "
        f"one's settings or control, {len(examples)} as an example of their loop.\n\nExamples: {links}.\n"
    )


def _file(example: str) -> str:
    """Of a folder in examples/ its README, else a file of examples/systems."""
    return f"{example}/README.md" if (ROOT / "examples" / example).is_dir() else f"systems/{example}.py"


def _row(name: str, recipe: type[Recipe]) -> str:
    path = Path(inspect.getfile(recipe)).resolve()
    text = path.read_text(encoding="utf-8")
    doc = recipe.__doc__ if path.stem == "presets" else ast.get_docstring(ast.parse(text))
    title = (recipe.__doc__ or "") if recipe is Recipe else _method(" ".join((doc or "").split("\n\n")[0].split()))
    if label(recipe) != "recipe":
        title = f"{title} Over `{base_of(recipe)}`"
    link = f"[{name}](../{path.relative_to(ROOT)})"
    options = [f"`{field.name}={field.default!r}`" for field in dataclasses.fields(recipe) if field.init]
    needs = ", ".join(need.replace("_", " ") for need in recipe.needs if need != "turns")  # every lease has them
    parts = {"Sets": ", ".join(_flat(recipe.settings)), "Options": ", ".join(options), "Needs": needs}
    said = [title.rstrip("."), *(f"{name} {text}" for name, text in parts.items() if text)]
    said += [text for one in SYSTEMS if one.get("recipe") == name and (text := _beside(one, name))]
    return f"* {link}: {'. '.join(said)}."


def _method(text: str) -> str:
    """The method's name and its authors, or its paper's title; the docstring has all of it."""
    name, colon, rest = text.partition(": ")
    paper = re.match(r'(?P<by>[^"]*?),? ?"(?:[^":]*: )?(?P<title>[^"]*)"(?P<rest>.*)', rest)
    if not colon or paper is None:
        return text
    return f"{name}: {paper['by'] or paper['title']}{paper['rest']}"


def _beside(one: Mapping[str, Any], recipe: str) -> str:
    """What a system wants beside its recipe; systems with a name of their own are named."""
    rest = "; ".join([*_flat(one.get("settings", {})), *filter(None, [one.get("rest", "")])])
    plain = re.sub(r"\W", "", one["name"]).lower()
    known = plain.startswith(recipe.replace("_", "")) or recipe.replace("_", "") in plain
    return rest[:1].upper() + rest[1:] if known or not rest else f"*{one['name']}*: {rest}"


def _flat(settings: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in settings.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"`{prefix}{key}={value!r}`"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    NOTES.write_text(notes(), encoding="utf-8")
