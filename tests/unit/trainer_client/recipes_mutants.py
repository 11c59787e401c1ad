"""Changes one line of a recipe, an estimator or a loss at a time, and runs the tests of `make test` that compute them.

`python -m tests.unit.trainer_client.recipes_mutants [NAME ...] [--every N]` prints the changes that no test notices;
its exit status is 1 where there are any. NAME is a module of `MODULES` or a recipe. Every change runs in a process of
its own, forked from one that has torch.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import importlib
import io
import os
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from rolltap.trainer_client.recipes import RECIPES

HERE = Path(__file__).parent
TESTS = ("formulas", "figures", "critics", "controls", "settings")
FILES = [str(HERE / f"test_recipe_{name}.py") for name in TESTS] + [
    str(HERE / "test_loss.py"),
    str(HERE / "test_recipes.py"),
]
SLOW = "not (package or learner or tau or slowly or rank or named)"
MODULES = ("estimators", "loss", "critic", "scoring")

SWAPS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.Pow: ast.Mult,
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.And: ast.Or, ast.Or: ast.And, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd,
}  # fmt: skip
NAMES = {"minimum": "maximum", "maximum": "minimum", "min": "max", "max": "min", "mean": "median", "median": "mean"}
NAMES |= {"centre": "normalise", "normalise": "centre", "exp": "expm1", "cos": "sin", "sum": "max"}


@dataclass(frozen=True)
class Mutant:
    module: str
    line: int
    change: str
    source: str


class Site(ast.NodeTransformer):
    """Changes the site of number `wanted`; counts them without one."""

    def __init__(self, wanted: int = -1) -> None:
        self.wanted, self.count, self.line, self.change = wanted, 0, 0, ""

    def _here(self, node: ast.AST, change: str) -> bool:
        self.count += 1
        if self.count - 1 != self.wanted:
            return False
        self.line, self.change = getattr(node, "lineno", 0), change
        return True

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        self.generic_visit(node)
        other = SWAPS.get(type(node.op))
        if other and self._here(node, f"{type(node.op).__name__} to {other.__name__}"):
            node.op = other()  # type: ignore[assignment]
        return node

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        self.generic_visit(node)
        other = SWAPS.get(type(node.ops[0]))
        if other and self._here(node, f"{type(node.ops[0]).__name__} to {other.__name__}"):
            node.ops[0] = other()  # type: ignore[assignment]
        return node

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.AST:
        self.generic_visit(node)
        other = SWAPS[type(node.op)]
        if self._here(node, f"{type(node.op).__name__} to {other.__name__}"):
            node.op = other()  # type: ignore[assignment]
        return node

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.AST:
        self.generic_visit(node)
        if isinstance(node.op, ast.USub | ast.Not | ast.Invert) and self._here(node, f"no {type(node.op).__name__}"):
            return node.operand
        return node

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        self.generic_visit(node)
        if node.attr in NAMES and self._here(node, f"{node.attr} to {NAMES[node.attr]}"):
            node.attr = NAMES[node.attr]
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        name = node.func.id if isinstance(node.func, ast.Name) else ""
        if name in NAMES and self._here(node, f"{name} to {NAMES[name]}"):
            node.func = ast.Name(NAMES[name], ast.Load())
        return node

    def visit_Assert(self, node: ast.Assert) -> ast.AST:
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        return node  # options and their types

    def visit_Raise(self, node: ast.Raise) -> ast.AST:
        return node

    def visit_arguments(self, node: ast.arguments) -> ast.AST:
        return node


def mutants(name: str, module: ModuleType) -> Iterator[Mutant]:
    source = Path(str(module.__file__)).read_text(encoding="utf-8")
    counter = Site()
    counter.visit(_functions(source))
    for wanted in range(counter.count):
        tree, site = _functions(source), Site(wanted)
        site.visit(tree)
        yield Mutant(name, site.line, site.change, ast.unparse(ast.fix_missing_locations(tree)))


def _functions(source: str) -> ast.Module:
    """The source without its annotations, which hold `|`."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            node.returns = None
    return tree


def survives(mutant: Mutant, module: ModuleType) -> bool:
    """Whether all tests pass with the change, in a fork of this process."""
    sys.stdout.flush()
    child = os.fork()
    if not child:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            try:
                _apply(mutant, module)
                import pytest

                options = [
                    "-x",
                    "-q",
                    "-n",
                    "0",
                    "--assert=plain",
                    "-p",
                    "no:cacheprovider",
                    "-k",
                    SLOW,
                    "-m",
                    "not long",
                ]
                with tempfile.TemporaryDirectory() as scratch:
                    status = pytest.main([*options, f"--basetemp={scratch}/tests", *FILES])
            except BaseException:  # noqa: BLE001 - a change that can't be loaded is noticed
                status = 1
        os._exit(int(status))
    return os.waitpid(child, 0)[1] == 0


def _apply(mutant: Mutant, module: ModuleType) -> None:
    """Every module that has something of the changed module by name gets the new one."""
    old = dict(vars(module))
    exec(compile(mutant.source, str(module.__file__), "exec"), module.__dict__)
    new = {
        id(value): module.__dict__[name]
        for name, value in old.items()
        if callable(value) and getattr(value, "__module__", "") == module.__name__
    }
    for other in [one for name, one in sys.modules.items() if name.startswith("rolltap.trainer_client")]:
        for name, value in list(vars(other).items()):
            if id(value) in new:
                setattr(other, name, new[id(value)])
    for name, recipe in list(RECIPES.items()):
        RECIPES[name] = new.get(id(recipe), recipe)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--every", type=int, default=1, help="only each N-th change")
    parser.add_argument("--first", type=int, default=0, help="which of them is the first")
    given = parser.parse_args()
    import torch
    import transformers  # noqa: F401 - once, before the forks

    torch.set_num_threads(1)
    recipes = [name for name in RECIPES if name != "grpo"]
    modules = {name: importlib.import_module(f"rolltap.trainer_client.{name}") for name in MODULES}
    modules |= {name: importlib.import_module(f"rolltap.trainer_client.recipes.{name}") for name in recipes}
    import rolltap.trainer_client.find_recipe
    import rolltap.trainer_client.learner
    import rolltap.trainer_client.planning  # noqa: F401

    unchanged = Path(str(modules["loss"].__file__)).read_text(encoding="utf-8")
    if not survives(Mutant("loss", 0, "nothing", unchanged), modules["loss"]):
        print("the tests fail without a change: run them")
        return 2
    alive = tried = 0
    for name in given.names or modules:
        for mutant in list(mutants(name, modules[name]))[given.first :: given.every]:
            tried += 1
            if survives(mutant, modules[name]):
                alive += 1
                print(f"survives: {mutant.module}:{mutant.line} {mutant.change}", flush=True)
    print(f"{tried} changes, {alive} survive")
    return int(alive > 0)


if __name__ == "__main__":
    sys.exit(main())
