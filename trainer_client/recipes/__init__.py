"""Recipes: `papers/` has a file for each paper, `base` is what a recipe overrides, `estimators` is shared arithmetic.

A recipe is found by its name in `RECIPES`, by an entry point `rolltap.recipes` of another package, or by its file.
A checkpoint keeps the recipe's `fingerprint`, so a run does not resume with a changed recipe unnoticed.
"""

from __future__ import annotations

import ast
import dataclasses
import hashlib
import importlib.util
import math
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from pydantic import TypeAdapter, ValidationError

from rolltap.errors import CheckpointMismatch, ConfigError
from rolltap.extras import lookup
from rolltap.trainer_client.recipes.base import Recipe
from rolltap.trainer_client.recipes.papers import presets
from rolltap.trainer_client.recipes.papers.aem import AEM
from rolltap.trainer_client.recipes.papers.aepo import AEPO
from rolltap.trainer_client.recipes.papers.agentflow import AgentFlow
from rolltap.trainer_client.recipes.papers.agentgym_rl import AgentGymRL
from rolltap.trainer_client.recipes.papers.appo import APPO
from rolltap.trainer_client.recipes.papers.archer import ArCHer
from rolltap.trainer_client.recipes.papers.arpo import ARPO
from rolltap.trainer_client.recipes.papers.astraflow import AstraFlow
from rolltap.trainer_client.recipes.papers.branch_grpo import BranchGRPO
from rolltap.trainer_client.recipes.papers.cm2 import CM2
from rolltap.trainer_client.recipes.papers.dart import DART
from rolltap.trainer_client.recipes.papers.dr_grpo import DrGRPO
from rolltap.trainer_client.recipes.papers.dr_mas import DrMAS
from rolltap.trainer_client.recipes.papers.epo import EPO
from rolltap.trainer_client.recipes.papers.gigpo import GiGPO
from rolltap.trainer_client.recipes.papers.hiper import HiPER
from rolltap.trainer_client.recipes.papers.infopo import InfoPO
from rolltap.trainer_client.recipes.papers.lite_ppo import LitePPO
from rolltap.trainer_client.recipes.papers.marft import MARFT
from rolltap.trainer_client.recipes.papers.mars import MARS
from rolltap.trainer_client.recipes.papers.odysseus import Odysseus
from rolltap.trainer_client.recipes.papers.opd import OPD
from rolltap.trainer_client.recipes.papers.ppo import PPO
from rolltap.trainer_client.recipes.papers.reinforce import Reinforce
from rolltap.trainer_client.recipes.papers.reinforce_pp import ReinforcePP
from rolltap.trainer_client.recipes.papers.rise import RISE
from rolltap.trainer_client.recipes.papers.rloo import RLOO
from rolltap.trainer_client.recipes.papers.sec import SEC
from rolltap.trainer_client.recipes.papers.seeupo import SeeUPO
from rolltap.trainer_client.recipes.papers.skill_sd import SkillSD
from rolltap.trainer_client.recipes.papers.slea_rl import SLEARL
from rolltap.trainer_client.recipes.papers.spear import SPEAR
from rolltap.trainer_client.recipes.papers.spiral import SPIRAL
from rolltap.trainer_client.recipes.papers.ssp import SSP
from rolltap.trainer_client.recipes.papers.steppo import StepPO
from rolltap.trainer_client.recipes.papers.tcod import TCOD
from rolltap.trainer_client.recipes.papers.tree_grpo import TreeGRPO
from rolltap.trainer_client.recipes.papers.tt_opd import TTOPD
from rolltap.trainer_client.recipes.papers.turn_grpo import TurnGRPO
from rolltap.trainer_client.recipes.papers.webagent_r1 import WebAgentR1
from rolltap.wording import setting_problem

RECIPES: dict[str, type[Recipe]] = {
    "aem": AEM,
    "aepo": AEPO,
    "agentflow": AgentFlow,
    "agentgym_rl": AgentGymRL,
    "ai_searchplanner": presets.AISearchPlanner,
    "appo": APPO,
    "archer": ArCHer,
    "arpo": ARPO,
    "artist": presets.ARTIST,
    "chain_of_agents": presets.ChainOfAgents,
    "cm2": CM2,
    "dapo": presets.DAPO,
    "astraflow": AstraFlow,
    "branch_grpo": BranchGRPO,
    "dart": DART,
    "dr_grpo": DrGRPO,
    "dr_mas": DrMAS,
    "epo": EPO,
    "gigpo": GiGPO,
    "grpo": Recipe,
    "grpo_tcr": presets.GRPOTCR,
    "gspo": presets.GSPO,
    "hiper": HiPER,
    "infopo": InfoPO,
    "lite_ppo": LitePPO,
    "marft": MARFT,
    "mars": MARS,
    "mua_rl": presets.MUARL,
    "odysseus": Odysseus,
    "opd": OPD,
    "ppo": PPO,
    "reinforce": Reinforce,
    "reinforce_pp": ReinforcePP,
    "rise": RISE,
    "rloo": RLOO,
    "sec": SEC,
    "seeupo": SeeUPO,
    "skill_sd": SkillSD,
    "slea_rl": SLEARL,
    "spear": SPEAR,
    "spiral": SPIRAL,
    "ssp": SSP,
    "steppo": StepPO,
    "tcod": TCOD,
    "tree_grpo": TreeGRPO,
    "tt_opd": TTOPD,
    "turn_grpo": TurnGRPO,
    "webagent_r1": WebAgentR1,
}


SHARE, COUNT, DIVISOR = (0.0, 1.0), (1.0, 1e9), (1e-6, 1e6)
RANGES: Mapping[str, tuple[float, float]] = {
    **dict.fromkeys(("gamma", "lam", "lam_segment", "decay", "tau", "share", "likeness", "rate"), SHARE),
    **dict.fromkeys(("steps", "explore", "every", "half_life"), COUNT),
    **dict.fromkeys(("spread", "temperature", "scale"), DIVISOR),
    "value_clip": (0.0, math.inf),
}
"""The least and the greatest value of our recipes' options by name. A recipe of another package means its own."""

ENTRY_POINTS = "rolltap.recipes"


def recipe_class(name: str) -> type[Recipe]:
    """The recipe with the name `name`, or the one in the file `name`; `ConfigError` lists the known ones."""
    is_file = name.endswith(".py")
    recipe = _of_file(Path(name)) if is_file else lookup("recipe", name, RECIPES, ENTRY_POINTS, ConfigError)
    if not (isinstance(recipe, type) and issubclass(recipe, Recipe)):
        raise ConfigError(f"the recipe {name!r} is {recipe!r}: it has to be a class that derives from Recipe")
    return recipe


def make_recipe(name: str, options: Mapping[str, Any]) -> Recipe:
    """The recipe with its options. `ConfigError` names an unknown option, or one with a value of the wrong type."""
    recipe = recipe_class(name)
    names = [field.name for field in dataclasses.fields(recipe) if field.init]
    for option in options:
        if option not in names:
            has = f"its options: {', '.join(names)}" if names else "it has none"
            raise ConfigError(f"trainer.options.{option}: recipe {name!r} has no such option; {has}")
    try:
        instance = TypeAdapter(recipe).validate_python(dict(options))
    except ValidationError as error:
        raise ConfigError(setting_problem(error.errors()[0], "trainer", "options")) from error
    for option in options:
        _check_number(option, getattr(instance, option), RANGES if recipe in RECIPES.values() else {})
    return instance


def _check_number(option: str, value: Any, ranges: Mapping[str, tuple[float, float]]) -> None:
    """`ConfigError` if an option's value is no number of its range: a run would lease groups and then fail by it."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return
    least, most = ranges.get(option, (-math.inf, math.inf))
    if not least <= value <= most:  # nor is NaN
        has_to = f"from {least:g} to {most:g}" if option in ranges else "a number"
        raise ConfigError(f"trainer.options.{option}: has to be {has_to}, not {value}")


def fingerprint(name: str, recipe: Recipe) -> dict[str, Any]:
    """What identifies a recipe: its name, its options and a digest of its code. Comments do not count.

    The code is the recipe's file and the modules that it imports from the same folder.
    """
    options = {field.name: repr(getattr(recipe, field.name)) for field in dataclasses.fields(recipe) if field.init}
    code = hashlib.sha256("\n".join(_own_code(sys.modules[type(recipe).__module__])).encode()).hexdigest()[:16]
    return {"name": Path(name).stem, "options": options, "code": code}


def restore(name: str, recipe: Recipe, saved: dict[str, Any] | None, *, changed: bool = False) -> None:
    """Restores the recipe's state from a checkpoint. `CheckpointMismatch` if it is another recipe's, unless `changed`.

    A changed recipe must itself cope with the old state. The state of a recipe with another name is not restored.
    """
    own = fingerprint(name, recipe)
    before = {key: value for key, value in (saved or {}).items() if key != "state"}
    if before != own and not changed:
        differing = ", ".join(key for key in own if before.get(key) != own[key])
        raise CheckpointMismatch(
            f"the checkpoint was made with another recipe ({before.get('name', 'none')}): {differing} changed; "
            "set recipe_changed to go on with this one"
        )
    if saved and before.get("name") == own["name"]:
        recipe.restore(saved["state"])


def _own_code(module: ModuleType) -> list[str]:
    """The syntax trees of the module and of the modules of its folder that it imports, directly or indirectly."""
    folder, waiting, trees = Path(module.__file__ or "").parent, [module], dict[Path, str]()
    while waiting:
        imported = waiting.pop()
        path = Path(getattr(imported, "__file__", None) or "")
        if path in trees or folder not in path.parents:
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"))
        waiting += [sys.modules[name] for name in _imported(tree, imported.__package__ or "") if name in sys.modules]
        trees[path] = ast.dump(_WithoutTexts().visit(tree))
    return [f"{path.relative_to(folder)}: {trees[path]}" for path in sorted(trees)]


class _WithoutTexts(ast.NodeTransformer):
    """Leaves docstrings out: another wording is not another recipe."""

    def visit_Expr(self, node: ast.Expr) -> ast.AST | None:
        is_text = isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        return None if is_text else node


def _imported(tree: ast.Module, package: str) -> Iterator[str]:
    """The imported names that may be modules."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            base = importlib.util.resolve_name(base, package) if node.level and package else base
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)


def _of_file(path: Path) -> type[Recipe]:
    if not path.is_file():
        raise ConfigError(f"the recipe {path} can't be loaded: there is no such file")
    spec = importlib.util.spec_from_file_location(f"recipe_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module.__name__] = module
    try:
        spec.loader.exec_module(module)
    except Exception as failure:  # foreign code: whatever its import raises
        raise ConfigError(f"the recipe {path} can't be loaded: {failure!r}") from failure
    classes = [
        value for value in vars(module).values() if isinstance(value, type) and value.__module__ == module.__name__
    ]
    recipes = [candidate for candidate in classes if issubclass(candidate, Recipe)]
    if len(recipes) != 1:
        names = ", ".join(recipe.__name__ for recipe in recipes) or "none"
        raise ConfigError(f"{path} has to define one class that derives from Recipe; it has: {names}")
    return recipes[0]
