"""Decoys of what tests use in their own file: set-ups, fixtures, helpers and functions of their own that assert.

Code under test may skip such a part and let the body of the test run as it is: a decoy of the body fails then, as it
should. So in a file of its own each part fails at its end, and each test that surely runs it must fail.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Collection, Iterator

from rolltap.harnesses.evaluators.decoys import (
    FUNCTIONS,
    LAST,
    Function,
    asserts,
    assigned_names,
    function_to_change,
)
from rolltap.harnesses.evaluators.skeletons import is_unit_test

OF_UNIT_TESTS, OF_PYTEST = frozenset(("setUp", "tearDown")), frozenset(("setup_method", "teardown_method"))
FIXTURE = frozenset(("pytest.fixture", "fixture"))
RUNS = re.compile(r"asyncio\.run|.*\.run_until_complete", re.DOTALL)
"""Functions that run the coroutine which they get."""


def with_failing_parts(source: str, functions: Collection[str]) -> tuple[str, list[str]]:
    """A test file in which parts fail that assert, and those of the `functions` (`test_x`, `TestX::test_y`) that run
    one. None if the file can't be parsed by this Python."""
    try:
        tree = ast.parse(source)
        assigned, module = assigned_names(tree), _functions(tree)
        imported = {each.asname or each.name for each in ast.walk(tree) if isinstance(each, ast.alias)}
        surely = {id(part) for part in ast.walk(tree) if isinstance(part, FUNCTIONS) and _fails_at_end(part)}
        parts: dict[int, Function] = {}
        decoys: list[str] = []
        for name in functions:
            if (test := function_to_change(tree, name, assigned)) is not None:
                used = [part for part in _used(test, _scope(tree, name), module) if id(part) in surely]
                used = [part for part in used if part.name not in assigned | imported]
                parts |= {id(part): part for part in used}
                decoys += [name] * bool(used)
        for part in parts.values():
            part.body.insert(len(part.body) - isinstance(part.body[-1], ast.Return), ast.parse(LAST).body[0])
        text = ast.unparse(ast.fix_missing_locations(tree))
        compile(text, "decoys", "exec", dont_inherit=True)
    except (SyntaxError, ValueError, RecursionError):
        return source, []
    return text, decoys


def _scope(tree: ast.Module, test: str) -> ast.ClassDef | None:
    """The class of a test; None for one of the file or of an inner class."""
    classes = [each for each in tree.body if isinstance(each, ast.ClassDef) and test.startswith(f"{each.name}::")]
    return classes[-1] if classes and test.count("::") == 1 else None


def _used(test: Function, scope: ast.ClassDef | None, module: dict[str, Function]) -> Iterator[Function]:
    """What a test surely runs, of its class and of the functions of its file."""
    own = _functions(scope) if scope else {}
    always = OF_UNIT_TESTS if scope and is_unit_test(scope) else OF_PYTEST
    written = "".join(map(ast.unparse, [test, *(scope.decorator_list if scope else ())]))
    called, arguments = set(_called(test)), {each.arg for each in test.args.args}
    for name, part in own.items():
        is_called = (f"self.{name}", isinstance(part, ast.AsyncFunctionDef)) in called or name in always
        if (is_called and _is_plain(part)) or (name in arguments and _is_fixture(part, written)):
            yield part
    for name, part in (module | _functions(test)).items():
        is_called = (name, isinstance(part, ast.AsyncFunctionDef)) in called and name not in arguments
        if (is_called and _is_plain(part)) or (name in arguments - own.keys() and _is_fixture(part, written)):
            yield part


def _functions(scope: ast.Module | ast.ClassDef | Function) -> dict[str, Function]:
    """By name, but for names that several have."""
    every = [each for each in scope.body if isinstance(each, FUNCTIONS)]
    counts = Counter(each.name for each in every)
    return {each.name: each for each in every if counts[each.name] == 1}


def _called(test: Function) -> Iterator[tuple[str, bool]]:
    """What the test calls as statements of its own, and whether that is awaited."""
    for statement in test.body:
        if isinstance(statement, (*FUNCTIONS, ast.ClassDef)):
            continue
        if any(isinstance(each, ast.Return | ast.Yield | ast.YieldFrom) for each in ast.walk(statement)):
            return
        call = statement.value if isinstance(statement, ast.Expr) else None
        is_awaited = isinstance(call, ast.Await)
        if isinstance(call, ast.Await):
            call = call.value
        elif isinstance(call, ast.Call) and call.args and RUNS.fullmatch(ast.unparse(call.func)):
            call, is_awaited = call.args[0], True
        if isinstance(call, ast.Call):
            yield ast.unparse(call.func), is_awaited


def _is_plain(part: Function) -> bool:
    """Whether a call runs it."""
    return not part.decorator_list and not any(isinstance(each, ast.Yield | ast.YieldFrom) for each in ast.walk(part))


def _is_fixture(part: Function, written: str) -> bool:
    """Whether it is made and ended for each test that names it, but for parameters of the test's own."""
    return (
        isinstance(part, ast.FunctionDef)
        and [ast.unparse(each).removesuffix("()") in FIXTURE for each in part.decorator_list] == [True]
        and f"'{part.name}" not in written
    )


def _fails_at_end(part: Function) -> bool:
    """Whether it asserts something, and comes to its end."""
    inner = (each for statement in part.body for each in ast.walk(statement))
    return asserts(part) and not any(isinstance(each, ast.Return) and each is not part.body[-1] for each in inner)
