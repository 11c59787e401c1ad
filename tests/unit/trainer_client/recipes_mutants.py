"""Changes one line of a recipe, an estimator or a loss at a time, and runs the tests of `make test` that reach it.

`python -m tests.unit.trainer_client.recipes_mutants [NAME ...] [--every N] [--write]` prints the changes that no test
notices; its exit status is 1 where there are any. NAME is a module of `MODULES` or a recipe. `--write` keeps the
figures in `mutants.json`, of which `scripts/mutants_page.py` makes docs/notes/mutations.md.

Tests are collected once, and run once to see which reach which line. A change is then made in a fork of this process,
in the code of the functions themselves, so that whoever holds one has it; there only the tests that reach its line run,
the fastest first, until one fails. A change that takes `LIMIT_S` of CPU time is noticed, and one after which the child
waits. A fork without a change runs all tests first: what fails only in a fork would pass for noticed.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import functools
import hashlib
import importlib
import json
import os
import re
import resource
import select
import signal
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any

import pytest

from rolltap.trainer_client.recipes import RECIPES

from .equal_mutants import EQUAL

HERE = Path(__file__).parent
FIGURES = HERE / "mutants.json"
TESTS = (
    *("loss", "scoring", "routing", "planning", "recipes", "recipe_formulas", "recipe_figures", "recipe_critics"),
    *("recipe_controls", "recipe_settings", "recipe_edges", "recipe_terms", "recipe_forks", "gradients"),
    *("tinker_losses", "rows_and_steps", "stale_turns", "call_order", "teachers"),
)
MODULES = {
    "estimators": "recipes.estimators", "critic": "recipes.critic", "hinted_teacher": "recipes.hinted_teacher",
    "loss": "model.loss", "tinker_losses": "endpoint.losses", "scoring": "data.scoring", "step": "data.step",
}  # fmt: skip
LIMIT_S, IDLE_S, BUSY = 30, 10.0, 0.02
"""A child that uses less than this share of a core for `IDLE_S` waits for what never comes."""

SWAPS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.Pow: ast.Mult,
    ast.FloorDiv: ast.Mult, ast.MatMult: ast.Add,
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
    ast.And: ast.Or, ast.Or: ast.And, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd,
}  # fmt: skip
NAMES = {"minimum": "maximum", "maximum": "minimum", "min": "max", "max": "min", "mean": "median", "median": "mean"}
NAMES |= {"centre": "normalise", "normalise": "centre", "exp": "expm1", "cos": "sin", "sum": "max", "all": "any"}
NAMES |= {"any": "all", "floor": "ceil", "argmax": "argmin", "argmin": "argmax"}
LEFT_OUT = (ast.Raise, ast.Assert, ast.JoinedStr)
"""What says something and computes nothing. Options and a paper's settings are on the generated page of recipes."""
METHODS = {"abs", "clamp", "detach", "strip", "upper", "carrying", "weighted"}
"""Methods that are left out, so that what they are called on stands alone."""
DTYPES = {"bool", "float32", "float64", "int32", "int64"}


@dataclass(frozen=True)
class Mutant:
    """`text` is the source's line, `place` says which of its equal changes, `lines` those of the changed expression,
    `number` which of the module's changes it is."""

    module: str
    line: int
    text: str
    change: str
    place: int
    lines: range
    number: int

    @property
    def key(self) -> tuple[str, str, str, int]:
        return self.module, self.text, self.change, self.place


Change = tuple[ast.expr | ast.stmt, str, Callable[[], None]]


def changes(node: ast.AST) -> Iterator[Change]:
    """What can be changed in a function, and how."""
    for name, value in ast.iter_fields(node):
        if name in ("returns", "annotation", "decorator_list") or isinstance(node, ast.arguments):
            continue
        for index, child in enumerate(value if isinstance(value, list) else [value]):
            if not isinstance(child, ast.AST) or isinstance(child, LEFT_OUT) or getattr(child, "arg", "") == "strict":
                continue
            yield from changes(child)
            for change, other in (*_others(node, name, child), *_shorter(child)):
                yield child, change, functools.partial(_put, node, name, index, other)  # type: ignore[misc]


def _put(parent: ast.AST, name: str, index: int, other: ast.AST) -> None:
    value = getattr(parent, name)
    if isinstance(value, list):
        value[index] = other
    else:
        setattr(parent, name, other)


def _others(parent: ast.AST, name: str, node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """What may stand in a node's place."""
    match node:
        case ast.BinOp() if swap := SWAPS.get(type(node.op)):
            yield _swapped(node.op, swap), ast.BinOp(node.left, swap(), node.right)  # type: ignore[arg-type]
        case ast.AugAssign() if swap := SWAPS.get(type(node.op)):
            yield _swapped(node.op, swap), ast.AugAssign(node.target, swap(), node.value)  # type: ignore[arg-type]
        case ast.Compare() if swap := SWAPS.get(type(node.ops[0])):
            ops = [swap(), *node.ops[1:]]
            yield _swapped(node.ops[0], swap), ast.Compare(node.left, ops, node.comparators)  # type: ignore[arg-type]
        case ast.BoolOp():
            swap = SWAPS[type(node.op)]
            yield _swapped(node.op, swap), ast.BoolOp(swap(), node.values)  # type: ignore[arg-type]
        case ast.UnaryOp(op=ast.USub() | ast.Not() | ast.Invert()):
            yield f"no {type(node.op).__name__}", node.operand
        case ast.Attribute() if node.attr in NAMES:
            yield f"{node.attr} to {NAMES[node.attr]}", ast.Attribute(node.value, NAMES[node.attr], node.ctx)
        case ast.Name() if node.id in NAMES and isinstance(parent, ast.Call) and name == "func":
            yield f"{node.id} to {NAMES[node.id]}", ast.Name(NAMES[node.id], ast.Load())
        case ast.Constant(value=bool()):
            yield f"{node.value} to {not node.value}", ast.Constant(not node.value)
        case ast.Constant(value=int() | float()):
            yield f"{node.value} to {node.value + 1}", ast.Constant(node.value + 1)  # type: ignore[operator]
    if name == "test" and not isinstance(node, ast.Compare | ast.BoolOp | ast.UnaryOp):
        yield "the condition turned round", ast.UnaryOp(ast.Not(), node)  # type: ignore[arg-type]


def _shorter(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """What stands there with a part left out: a term, a condition, an argument, a statement."""
    match node:
        case ast.BinOp():
            yield "the left operand alone", node.left
            yield "the right operand alone", node.right
        case ast.BoolOp():
            for index in range(len(node.values)):
                left = [*node.values[:index], *node.values[index + 1 :]]
                yield f"without operand {index}", left[0] if len(left) == 1 else ast.BoolOp(node.op, left)
        case ast.IfExp():
            yield "always the first", node.body
            yield "always the second", node.orelse
        case ast.If():
            yield "always", ast.If(ast.Constant(True), node.body, node.orelse)
            yield "never", ast.If(ast.Constant(False), node.body, node.orelse)
        case ast.AugAssign():
            yield "set instead", ast.Assign([node.target], node.value)
        case ast.Expr(value=ast.Call()):
            yield "without the statement", ast.Pass()
        case ast.Call():
            if isinstance(node.func, ast.Attribute) and node.func.attr in METHODS:
                yield f"without {node.func.attr}", node.func.value
            for index, keyword in enumerate(node.keywords):
                if keyword.arg not in ("strict", "dtype"):
                    rest = [*node.keywords[:index], *node.keywords[index + 1 :]]
                    yield f"without {keyword.arg}", ast.Call(node.func, node.args, rest)
            if len(node.args) > 1 and getattr(node.args[-1], "attr", getattr(node.args[-1], "id", "")) not in DTYPES:
                yield "without the last argument", ast.Call(node.func, node.args[:-1], node.keywords)
        case ast.ListComp() | ast.GeneratorExp() if node.generators[0].ifs:
            first = node.generators[0]
            every = ast.comprehension(first.target, first.iter, [], first.is_async)
            yield "without the filter", type(node)(node.elt, [every, *node.generators[1:]])


def _swapped(old: ast.AST, new: type[ast.AST]) -> str:
    return f"{type(old).__name__} to {new.__name__}"


def functions(tree: ast.Module) -> Iterator[ast.FunctionDef]:
    """The functions of a module and its classes, without the text that describes them."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.Module):
            for one in node.body:
                if isinstance(one, ast.FunctionDef):
                    if ast.get_docstring(one):
                        one.body = one.body[1:] or [ast.Pass()]
                    yield one


def _statements(tree: ast.Module) -> list[tuple[ast.FunctionDef, int, ast.Module]]:
    """Those of its functions, each with its place and as the body of a module, where it can be exchanged."""
    return [
        (one, index, ast.Module([statement], [])) for one in functions(tree) for index, statement in enumerate(one.body)
    ]


def mutants(name: str, source: str) -> Iterator[Mutant]:
    text, places = source.splitlines(), Counter[tuple[int, str]]()
    found = (change for *_, root in _statements(ast.parse(source)) for change in changes(root))
    for number, (node, change, _) in enumerate(found):
        lines = range(node.lineno, (node.end_lineno or node.lineno) + 1)
        place = places[node.lineno, change]
        places[node.lineno, change] += 1
        yield Mutant(name, node.lineno, text[node.lineno - 1].strip(), change, place, lines, number)


def changed(source: str, number: int) -> str:
    """The module's source with the change of this number."""
    tree = ast.parse(source)
    statements = _statements(tree)
    *_, make = [change for *_, root in statements for change in changes(root)][number]
    make()
    for one, index, root in statements:
        one.body[index] = root.body[0]
    return ast.unparse(ast.fix_missing_locations(tree))


def digest(source: str) -> str:
    """Of what is changed: comments and docstrings don't count. Python 3.13 leaves empty lists out, 3.12 has more."""
    text = "\n".join(ast.dump(one) for one in functions(ast.parse(source)))
    text = re.sub(r",? ?\b\w+=\[\]", "", text).replace("(, ", "(")
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def apply(mutant: Mutant, module: ModuleType) -> None:
    """Gives the module's functions the mutant's code: whoever holds one, a class that inherits one, has it."""
    source = changed(Path(str(module.__file__)).read_text(encoding="utf-8"), mutant.number)
    codes = {code.co_qualname: code for code in _codes(compile(source, str(module.__file__), "exec"))}
    for held in [module, *(one for one in vars(module).values() if isinstance(one, type))]:
        if isinstance(held, type) and held.__module__ != module.__name__:
            continue
        for value in list(vars(held).values()):
            function = getattr(value, "fget", None) or getattr(value, "func", None) or getattr(value, "__func__", value)
            while hasattr(function, "__wrapped__"):
                function = function.__wrapped__
            is_own = isinstance(function, FunctionType) and function.__module__ == module.__name__
            if is_own and (code := codes.get(function.__code__.co_qualname)):
                function.__code__ = code


def _codes(code: CodeType) -> Iterator[CodeType]:
    for one in code.co_consts:
        if isinstance(one, CodeType):
            yield one
            yield from _codes(one)


class Trial:
    """The pytest plugin that runs the tests as they are, then the changes. `figures` is what came of it."""

    def __init__(self, modules: Mapping[str, ModuleType], every: int, first: int) -> None:
        self.modules, self.every, self.first = modules, every, first
        self.figures: dict[str, dict[str, Any]] = {}
        self.failed: list[str] = []
        self.reached: dict[tuple[str, int], set[int]] = defaultdict(set)
        self.seconds: dict[int, float] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed.append(report.nodeid)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        items = session.items
        for number, item in enumerate(items):
            self._traced(number, item, items[number + 1] if number + 1 < len(items) else None)
        if self.failed:
            return True
        if (outcome := self._outcome(None, items)) != "alive":
            raise pytest.UsageError(f"in a fork the tests fail without a change: {outcome}")
        sources = {
            name: Path(str(module.__file__)).read_text(encoding="utf-8") for name, module in self.modules.items()
        }
        for name, module in self.modules.items():
            counts, alive, equal, began = Counter[str](), [], [], time.monotonic()
            for mutant in list(mutants(name, sources[name]))[self.first :: self.every]:
                path = str(module.__file__)
                numbers = {number for line in mutant.lines for number in self.reached[path, line]}
                ordered = [items[number] for number in sorted(numbers, key=self.seconds.__getitem__)]
                change = functools.partial(apply, mutant, module)
                outcome = "equal" if mutant.key in EQUAL else self._outcome(change, ordered)
                counts[outcome] += 1
                if outcome == "equal":
                    equal.append(f"{mutant.text} ({mutant.change}): {EQUAL[mutant.key]}")
                if outcome == "alive":
                    alive.append(f"{mutant.line} {mutant.change} ({mutant.place}): {mutant.text}")
                    print(f"survives ({len(ordered)} tests): {name}:{alive[-1]}", file=sys.stderr, flush=True)
            noticed = {"noticed": counts["noticed"], "limit": counts["limit"]}
            self.figures[name] = {"source": digest(sources[name]), **noticed, "equal": equal, "alive": alive}
            print(f"{name}: {dict(counts)} in {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
        return True

    def _traced(self, number: int, item: pytest.Item, following: pytest.Item | None) -> None:
        files = {str(module.__file__) for module in self.modules.values()}

        def trace(frame: FrameType, event: str, _: object) -> Any:
            if frame.f_code.co_filename not in files:
                return None
            self.reached[frame.f_code.co_filename, frame.f_lineno].add(number)
            return trace

        began = time.process_time()
        sys.settrace(trace)
        try:
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        finally:
            sys.settrace(None)
        self.seconds[number] = time.process_time() - began

    def _outcome(self, change: Callable[[], None] | None, items: Sequence[pytest.Item]) -> str:
        """What becomes of a change, in a fork of this process: one of `noticed`, `limit`, `alive`."""
        child = os.fork()
        if not child:
            status = 1
            try:
                if change:
                    resource.setrlimit(resource.RLIMIT_CPU, (LIMIT_S, LIMIT_S + 1))
                    change()
                self.failed.clear()
                for item, following in zip(items, [*items[1:], None], strict=True):
                    item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
                    if self.failed:
                        break
                status = int(bool(self.failed))
            finally:
                os._exit(status)
        while waits(child):
            os.kill(child, signal.SIGXCPU)
        status = os.waitpid(child, 0)[1]
        if os.WIFSIGNALED(status):
            return "limit" if os.WTERMSIG(status) == signal.SIGXCPU else "noticed"
        return "noticed" if status else "alive"


def waits(child: int) -> bool:
    """Whether the child has stopped to work; False when it has ended."""
    descriptor, before = os.pidfd_open(child), -1.0
    clock = ~child << 3 | 2  # Linux's clock of a process's CPU time
    try:
        while not select.select([descriptor], [], [], IDLE_S)[0]:
            seconds = time.clock_gettime(clock)
            if before >= 0 and seconds < before + BUSY * IDLE_S:
                return True
            before = seconds
        return False
    finally:
        os.close(descriptor)


def modules(names: Sequence[str] = ()) -> dict[str, ModuleType]:
    """The modules of these names, or all."""
    places = {name: f"rolltap.trainer_client.{place}" for name, place in MODULES.items()}
    places |= {name: recipe.__module__ for name, recipe in RECIPES.items()}
    return {name: importlib.import_module(place) for name, place in places.items() if not names or name in names}


def tried(names: Sequence[str], every: int = 1, first: int = 0) -> Trial:
    """The trial of these modules, or of all."""
    import torch

    torch.set_num_threads(1)
    trial = Trial(modules(names), every, first)
    files = [str(path) for name in TESTS if (path := HERE / f"test_{name}.py").exists()]
    with tempfile.TemporaryDirectory() as scratch, Path(os.devnull).open("w") as nowhere:
        options = ["-q", "--assert=plain", "-p", "no:cacheprovider", "-n", "0", "-m", "not long"]
        with contextlib.redirect_stdout(nowhere):
            pytest.main([*options, f"--basetemp={scratch}/tests", *files], plugins=[trial])
    return trial


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--every", type=int, default=1, help="only each N-th change")
    parser.add_argument("--first", type=int, default=0, help="which of them is the first")
    parser.add_argument("--write", action="store_true", help=f"keep the figures in {FIGURES.name}")
    given = parser.parse_args()
    trial = tried(given.names, given.every, given.first)
    if trial.failed or not trial.figures:
        print("the tests fail without a change: run them", *trial.failed, sep="\n")
        return 2
    if given.write:
        kept = json.loads(FIGURES.read_text(encoding="utf-8")) if FIGURES.exists() else {}
        FIGURES.write_text(
            json.dumps(dict(sorted({**kept, **trial.figures}.items())), indent=1) + "\n", encoding="utf-8"
        )
    alive = [f"{name}:{one}" for name, figures in trial.figures.items() for one in figures["alive"]]
    print(*alive, f"{sum(os.times()[:4]):.0f} CPU seconds, {len(alive)} changes survive", sep="\n")
    return int(bool(alive))


if __name__ == "__main__":
    sys.exit(main())
