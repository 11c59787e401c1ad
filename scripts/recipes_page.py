"""Writes docs/recipes.md from the recipes' own files: `python scripts/recipes_page.py`."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
import sys
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from learning_table import learning

from rolltap.trainer_client.recipe import Recipe
from rolltap.trainer_client.recipes import RECIPES

ROOT = Path(__file__).parents[1]
SYSTEM_COLUMNS = "| system | run it with | beside the trainer |\n|---|---|---|\n"
PAGE = ROOT / "docs" / "recipes.md"
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
    "after",
    "passes",
    "networks",
    "heads",
    "shaped",
)
"""What makes a recipe of its own."""

SETTINGS_HEAD = """### Settings
These are the settings of a paper over a recipe above: credit and loss are that recipe's.

"""


def page() -> str:
    """The page's text."""
    own, settings = (
        "\n".join(_row(name, recipe) for name, recipe in sorted(RECIPES.items()) if bool(settings_of(recipe)) == wanted)
        for wanted in (False, True)
    )
    head, _, tail = HEAD.read_text(encoding="utf-8").partition("<!-- recipes -->\n")
    columns = "| `--recipe` | method | settings that it brings | options | needs |\n|---|---|---|---|---|\n"
    rows = f"{own}\n\n{SETTINGS_HEAD}{columns}{settings}"
    results = json.loads(RESULTS.read_text(encoding="utf-8"))
    made = {"systems": _systems(), "learning": learning(results)}
    for name, text in made.items():
        tail = tail.replace(f"<!-- {name} -->\n", text)
    return f"{head}{columns}{rows}\n{tail}"


def settings_of(recipe: type[Recipe]) -> str:
    """The recipe of which this one is only settings; "" if its credit, its loss or what it sets is its own."""
    own = any(name in vars(recipe) for name in HOOKS) and recipe is not RECIPES["agentflow"]  # its own by an option
    if recipe is Recipe or own:
        return ""
    bases = [one for one in recipe.__mro__[1:] if one in RECIPES.values()]
    return next(name for name, one in RECIPES.items() if one is bases[0])


def _systems() -> str:
    """The systems that run, how many they are, and the others with what they lack."""
    lacking = [one for one in SYSTEMS if "missing" in one]
    running = [one for one in SYSTEMS if one not in lacking]
    examples = sum("example" in one for one in running)
    by_recipe = [RECIPES[one["recipe"]] for one in running if "recipe" in one]
    settings = sum(one is Recipe or bool(settings_of(one)) for one in by_recipe)
    counts = (
        f"Of {len(SYSTEMS)} systems {len(running)} run: {len(by_recipe) - settings} by a recipe, {settings} by the "
        f"settings of a known one, {examples} as an example that shows their loop. Each has a test.\n\n"
    )
    rows = "\n".join(f"| {one['name']} | {_how(one)} | {one.get('rest', '')} |" for one in running)
    missing = "\n".join(f"| {one['name']} | {one['missing']} |" for one in lacking)
    return f"{counts}{SYSTEM_COLUMNS}{rows}\n\n### Not covered\n| system | what is missing |\n|---|---|\n{missing}\n"


def _how(one: Mapping[str, Any]) -> str:
    if "example" in one:
        return f"[{one['example']}.py](../examples/systems/{one['example']}.py)"
    settings = "; ".join(_flat(one.get("settings", {})))
    return f"`--recipe {one['recipe']}`" + (f", {settings}" if settings else "")


def _row(name: str, recipe: type[Recipe]) -> str:
    path = Path(inspect.getfile(recipe)).resolve()
    doc = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    title = (recipe.__doc__ or "") if recipe is Recipe else doc.split("\n\n")[0]
    if base := settings_of(recipe):
        title = f"{title} Over `{base}`."
    link = f"[{name}](../{path.relative_to(ROOT)})"
    options = [f"`{field.name} = {field.default!r}`" for field in dataclasses.fields(recipe) if field.init]
    needs = [need.replace("_", " ") for need in recipe.needs]
    cells = [link, " ".join(title.split("\n")[0:3]).strip(), "; ".join(_flat(recipe.settings)), ", ".join(options)]
    return "| " + " | ".join([*cells, ", ".join(needs)]).replace("  ", " ") + " |"


def _flat(settings: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in settings.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"`{prefix}{key} = {value!r}`"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
