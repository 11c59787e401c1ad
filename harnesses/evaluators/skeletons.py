"""What tests a file has, whatever the code under test does: code that pytest imports can let pytest lose tests.

`counted_tests` counts the results that each test function has at least. Two forms of a file can be imported also where
the file itself can't, as before the agent's work: `skeleton`, without its imports and with empty tests, says how many
tests there are; `without_what_fails`, with all that can be run, says which skip or are expected to fail anyhow.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence

from rolltap.harnesses.evaluators.decoys import FUNCTIONS, Function, comes_first

COLLECTS = ("pytestmark", "__test__", "__init__", "__new__", "load_tests")
"""Names by which a file or class says what pytest collects. So do those that begin with `pytest_`."""
HARMLESS = frozenset(("patch", "mock", "given", "settings", "example", "hypothesis", "freeze_time", "responses"))
"""Begin the names of decorators that decide nothing about what is collected."""
MARKS = ("pytest.mark.", "unittest.skip")
COUNTED_MARKS = frozenset(("skip", "skipif", "xfail", "usefixtures", "filterwarnings", "asyncio", "timeout"))
"""Marks by which a function has neither more nor fewer results."""
COUNTED_BASES = ("object", "TestCase", "IsolatedAsyncioTestCase")
MULTIPLIES = re.compile(r"\bparams\s*=|pytest_(generate_tests|collect\w*|pycollect\w*|itemcollected|plugins)")
"""In a file that tests use: it may say how many results they have."""
EMPTY = "import pytest, unittest\n"
TRIED = """
try:
    pass
except __import__("unittest").SkipTest:
    raise
except Exception:
    pass
"""


def counted_tests(source: str) -> dict[str, int]:
    """The test functions that a file defines, as pytest finds them without settings: `test_x`, `TestX::test_y`. Each
    with the number of its results, if none is left out; of parameters that only a run can tell it has one at least."""
    try:
        return dict(_tests_in(ast.parse(source)))
    except (SyntaxError, ValueError, RecursionError):
        return {}


def _tests_in(scope: ast.Module | ast.ClassDef) -> Iterator[tuple[str, int]]:
    for each in scope.body:
        times = 1
        for decorator in each.decorator_list if isinstance(each, (*FUNCTIONS, ast.ClassDef)) else ():
            times *= max(1, len(_values(decorator)))
        if isinstance(each, FUNCTIONS) and each.name.startswith("test"):
            yield each.name, times
        elif isinstance(each, ast.ClassDef) and (each.name.startswith("Test") or is_unit_test(each)):
            yield from ((f"{each.name}::{test}", times * count) for test, count in _tests_in(each))


def is_counted(source: str) -> bool:
    """Whether `counted_tests` knows all results of a file: nothing in it makes, brings or multiplies tests."""
    try:
        return not MULTIPLIES.search(source) and all(map(_is_counted, ast.parse(source).body))
    except (SyntaxError, ValueError, RecursionError):
        return False


def _is_counted(statement: ast.stmt) -> bool:
    if isinstance(statement, FUNCTIONS):
        return all(_is_counted_once(each) for each in statement.decorator_list)
    if isinstance(statement, ast.ClassDef):
        bases = (ast.unparse(base).rpartition(".")[2] for base in statement.bases)
        return (
            not statement.keywords
            and all(base in COUNTED_BASES for base in bases)
            and all(map(_is_counted_once, statement.decorator_list))
            and all(map(_is_counted, statement.body))
        )
    if isinstance(statement, ast.Import | ast.ImportFrom):
        return not any((each.asname or each.name).lower().startswith(("*", "test")) for each in statement.names)
    if isinstance(statement, ast.Assign):
        names = [each.id.lower() for each in _stores([statement])]
        marks = statement.value.elts if isinstance(statement.value, ast.List | ast.Tuple) else [statement.value]
        return not any(each.startswith("test") for each in names) and (
            "pytestmark" not in names or all(map(_is_counted_once, marks))
        )
    return isinstance(statement, ast.AnnAssign | ast.Pass) or (
        isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
    )


def _is_counted_once(decorator: ast.expr) -> bool:
    """Whether it gives a function as many results as it is written to have."""
    name = ast.unparse(decorator.func if isinstance(decorator, ast.Call) else decorator)
    if name.startswith("pytest.mark."):
        return name.rpartition(".")[2] in COUNTED_MARKS or bool(_values(decorator))
    first = name.partition(".")[0]
    return first in HARMLESS or first in ("staticmethod", "classmethod", "property", "unittest", "pytest", "fixture")


def skeleton(source: str) -> str:
    """The test file with empty tests and nothing else. Tests that honest code may leave out are not in it: those below
    unknown decorators and in classes with other bases, and all of a file or class that says itself what is collected,
    or that skips outside its tests: what a test itself skips has a result."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError):
        return EMPTY
    fixtures = {
        each.name
        for each in ast.walk(tree)
        if isinstance(each, FUNCTIONS) and any("fixture" in ast.unparse(mark) for mark in each.decorator_list)
    }
    tree.body = list(_empty(tree.body, fixtures))
    return EMPTY + ast.unparse(ast.fix_missing_locations(tree))


def without_what_fails(source: str) -> str:
    """The test file in which a statement that raises, such as an import of the agent's work, is left out."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError):
        return EMPTY
    first = next((at for at, each in enumerate(tree.body) if not comes_first(each)), len(tree.body))
    tree.body[first:] = [_tried(each) for each in tree.body[first:]]
    return ast.unparse(ast.fix_missing_locations(tree))


def _tried(statement: ast.stmt) -> ast.stmt:
    tried = ast.parse(TRIED).body[0]
    assert isinstance(tried, ast.Try)
    tried.body = [statement]
    return tried


def _empty(body: Sequence[ast.stmt], fixtures: set[str]) -> Iterator[ast.stmt]:
    names = {each.name for each in body if isinstance(each, (*FUNCTIONS, ast.ClassDef))}
    names |= {each.id for each in _stores(body)}
    if any(name in COLLECTS or name.startswith("pytest_") for name in names) or any(map(_skips, body)):
        return
    for each in body:
        if not isinstance(each, (*FUNCTIONS, ast.ClassDef)) or any(each.name == name.id for name in _stores(body)):
            continue
        kept = _kept(each.decorator_list)
        if kept is None:
            continue
        if isinstance(each, ast.ClassDef):
            bases = [ast.parse("unittest.TestCase", mode="eval").body] if is_unit_test(each) else []
            if (bases or not each.bases) and (inner := list(_empty(each.body, fixtures))):
                yield ast.ClassDef(each.name, bases, [], inner, kept)
        elif each.name.startswith("test"):
            yield _empty_test(each, kept, fixtures)


def _skips(statement: ast.stmt) -> bool:
    """Whether a statement of a file or class may skip its tests. Of tests and inner classes, their own."""
    if isinstance(statement, ast.ClassDef | ast.Import | ast.ImportFrom):
        return False
    if isinstance(statement, FUNCTIONS) and statement.name.startswith("test"):
        return False
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
        return False
    if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Call | ast.Attribute):
        mark = statement.value.func if isinstance(statement.value, ast.Call) else statement.value
        if ast.unparse(mark).startswith(MARKS):  # it is an unknown decorator's then
            return False
    words = (getattr(each, name, "") for each in ast.walk(statement) for name in ("id", "attr", "name", "value"))
    return any("skip" in word.lower() for word in words if isinstance(word, str))


def _empty_test(function: Function, marks: list[ast.expr], fixtures: set[str]) -> ast.FunctionDef:
    """Fixtures of other files stay: one of them may skip."""
    arguments = [each for each in function.args.args if each.arg not in fixtures]
    for each in arguments:
        each.annotation = None
    signature = ast.arguments([], arguments, None, [], [], None, [])
    return ast.FunctionDef(function.name, signature, [ast.Pass()], marks)


def _stores(body: Sequence[ast.stmt]) -> list[ast.Name]:
    """What the statements of a scope assign or remove, in no function or class of it."""
    own = [each for each in body if not isinstance(each, (*FUNCTIONS, ast.ClassDef))]
    names = (name for each in own for name in ast.walk(each) if isinstance(name, ast.Name))
    return [name for name in names if not isinstance(name.ctx, ast.Load)]


def is_unit_test(scope: ast.ClassDef) -> bool:
    return any(ast.unparse(base).endswith("TestCase") for base in scope.bases)


def _values(decorator: ast.expr) -> list[ast.expr]:
    """The values of `parametrize`, if they are written out; [] for anything else."""
    if not isinstance(decorator, ast.Call) or not ast.unparse(decorator.func).endswith("parametrize"):
        return []
    values = decorator.args[1] if len(decorator.args) == 2 else None
    if not isinstance(values, ast.List | ast.Tuple) or any(isinstance(each, ast.Starred) for each in values.elts):
        return []
    return values.elts


def _kept(decorators: Sequence[ast.expr]) -> list[ast.expr] | None:
    """pytest's marks, without values of the code under test; None if another decorator may decide what is collected."""
    kept: list[ast.expr] = []
    for each in decorators:
        name = ast.unparse(each.func if isinstance(each, ast.Call) else each)
        if name.startswith("pytest.mark."):
            mark = _parameters(each) if name == "pytest.mark.parametrize" else each if _is_written_out(each) else None
            if mark is None or name == "pytest.mark.xfail":
                return None
            kept.append(mark)
        elif name.partition(".")[0] not in HARMLESS:
            return None
    return kept


def _parameters(decorator: ast.expr) -> ast.expr | None:
    """`parametrize` with as many values as it has; None if they are not written out, or some may be left out."""
    values = _values(decorator)
    if not values or not isinstance(decorator, ast.Call) or decorator.keywords:
        return None
    names = _literal(decorator.args[0])
    if not isinstance(names, str | list | tuple) or any("param(" in ast.unparse(each) for each in values):
        return None
    width = len(names.split(",") if isinstance(names, str) else names)
    made = [0 if width == 1 else (0,) * width] * len(values)
    return ast.parse(f"pytest.mark.parametrize({names!r}, {made!r})", mode="eval").body


def _is_written_out(mark: ast.expr) -> bool:
    call = mark if isinstance(mark, ast.Call) else ast.Call(mark, [], [])
    return all(_literal(each) is not None for each in (*call.args, *(item.value for item in call.keywords)))


def _literal(node: ast.expr) -> object:
    """Its value; None if it is no literal."""
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return None
