"""Writes docs/recipes.md from the recipes' own files: `python scripts/recipes_page.py`."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rolltap.trainer_client.recipe import Recipe
from rolltap.trainer_client.recipes import RECIPES

ROOT = Path(__file__).parents[1]
SYSTEM_COLUMNS = "| system | `--recipe` | settings | beside the trainer |\n|---|---|---|---|\n"
PAGE = ROOT / "docs" / "recipes.md"
SYSTEMS = tomllib.loads((ROOT / "scripts" / "systems.toml").read_text(encoding="utf-8"))["system"]
HEAD = ROOT / "scripts" / "recipes_head.md"


def page() -> str:
    """The page's text."""
    rows = "\n".join(_row(name, recipe) for name, recipe in sorted(RECIPES.items()))
    head, _, tail = HEAD.read_text(encoding="utf-8").partition("<!-- recipes -->\n")
    columns = "| `--recipe` | method | settings that it brings | options | needs |\n|---|---|---|---|---|\n"
    systems = "\n".join(_system(one) for one in SYSTEMS)
    return f"{head}{columns}{rows}\n{tail}".replace("<!-- systems -->\n", f"{SYSTEM_COLUMNS}{systems}\n")


def _system(one: Mapping[str, Any]) -> str:
    return f"| {one['name']} | `{one['recipe']}` | {'; '.join(_flat(one['settings']))} | {one['rest']} |"


def _row(name: str, recipe: type[Recipe]) -> str:
    path = Path(inspect.getfile(recipe)).resolve()
    doc = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    title = (recipe.__doc__ or "") if recipe is Recipe else doc.split("\n\n")[0]
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
