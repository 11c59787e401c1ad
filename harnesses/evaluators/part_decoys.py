"""Decoys of what tests use in the task's own files: set-ups, fixtures, helpers and functions of their own that assert.

Code under test may skip such a part and let the body of the test run as it is: a decoy of the body fails then, as it
should. So in files of its own each part fails at its end, and each test that surely runs it must fail. A part is in the
test's file, in a `conftest.py` above it, or in a file of the task that the test's file imports by name.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import PurePosixPath

from rolltap.harnesses.evaluators.decoys import (
    EQUALITY,
    FUNCTIONS,
    LAST,
    Function,
    asserts,
    assigned_names,
    function_to_change,
    name_of,
)
from rolltap.harnesses.evaluators.quiet_decoys import is_literal
from rolltap.harnesses.evaluators.skeletons import is_unit_test

OF_UNIT_TESTS, OF_PYTEST = frozenset(("setUp", "tearDown")), frozenset(("setup_method", "teardown_method"))
FIXTURE = frozenset(("pytest.fixture", "fixture"))
OF_ALL = frozenset(f"{fixture}(autouse=True)" for fixture in FIXTURE)
"""Decorators of a fixture that each test below its file or class has."""
RUNS = re.compile(r"asyncio\.run|.*\.run_until_complete", re.DOTALL)
"""Functions that run the coroutine which they get."""
CONFTEST, PLUGINS = "conftest.py", "pytest_plugins"
NAMES, NAME = re.compile(r"[\w.:]+(\s*,\s*[\w.:]+)*"), re.compile(r"\w+")
NAMES_ONE = re.compile(r"\w+(\.\w+)?")


@dataclass(frozen=True, slots=True)
class _File:
    """A file of the task. `assigned`, `defined`, `imported`: names of any scope, and of attributes. `functions`: those
    of its own whose names are nothing else. `imports`: the names that it binds once, and by an import of its own, each
    with the file of the task that it imports, and the name there ("": the file itself). `named`: the names in its
    texts, as a mock or a parameter has them."""

    path: str
    tree: ast.Module
    assigned: set[str]
    defined: set[str]
    imported: Collection[str]
    functions: Mapping[str, Function]
    imports: Mapping[str, tuple[str, str]]
    named: set[str]

    @classmethod
    def of(cls, path: str, tree: ast.Module, own: Collection[str]) -> _File:
        imported = Counter(each.asname or each.name for each in ast.walk(tree) if isinstance(each, ast.alias))
        texts = (each.value for each in ast.walk(tree) if isinstance(each, ast.Constant))
        named = {
            name for each in texts if isinstance(each, str) and NAMES.fullmatch(each) for name in NAME.findall(each)
        }
        assigned = assigned_names(tree)
        assigned |= {
            each.attr for each in ast.walk(tree) if isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Store)
        }
        defined = {each.name for each in ast.walk(tree) if isinstance(each, (*FUNCTIONS, ast.ClassDef))}
        functions = {
            name: each for name, each in _functions(tree).items() if name not in assigned and name not in imported
        }
        found = {
            name: place
            for name, place in _imports(tree, path, own)
            if imported[name] == 1 and name.partition(".")[0] not in assigned | defined
        }
        return cls(path, tree, assigned, defined, imported, functions, found, named)


def used_files(texts: Mapping[str, str], own: Collection[str]) -> set[str]:
    """Those of the task's `own` files whose parts the test files `texts` may use."""
    own = _importable(own)
    used = {path for test in texts for folder in PurePosixPath(test).parents if (path := str(folder / CONFTEST)) in own}
    for path, text in texts.items():
        try:
            used |= {file for _, (file, _) in _imports(ast.parse(text), path, own)}
        except (SyntaxError, ValueError, RecursionError):
            continue
    return used - texts.keys()


def with_failing_parts(
    texts: Mapping[str, str], functions: Collection[str], own: Collection[str]
) -> tuple[dict[str, str], list[str]]:
    """Files in which parts fail that assert, and those of the `functions` (`FILE::test_x`, `FILE::TestX::test_y`) that
    run one. `texts`: the test files, and the `used_files`. A file that this Python can't parse has none."""
    try:
        files = _files(texts, own)
        tests = list(_tests(functions, files))
        parts = {id(part): (place, part) for _, used in tests for place, part in used}
        for _, part in parts.values():
            part.body.insert(len(part.body) - isinstance(part.body[-1], ast.Return), ast.parse(LAST).body[0])
        changed = {path: ast.unparse(ast.fix_missing_locations(files[path].tree)) for path, _ in parts.values()}
        for text in changed.values():
            compile(text, "decoys", "exec", dont_inherit=True)
    except (SyntaxError, ValueError, RecursionError):
        return {}, []
    return changed, [function for function, used in tests if used]


def _files(texts: Mapping[str, str], own: Collection[str]) -> dict[str, _File]:
    files, own = dict[str, _File](), _importable(own)
    for path, text in texts.items():
        with suppress(SyntaxError, ValueError, RecursionError):
            files[path] = _File.of(path, ast.parse(text), own)
    return files


def _importable(own: Collection[str]) -> Collection[str]:
    """The Python files, but for those in whose place Python imports a compiled one."""
    compiled = {path[: path.index(".", path.rfind("/") + 1)] for path in own if path.endswith((".so", ".pyd"))}
    return {path for path in own if path.endswith(".py") and path[:-3] not in compiled}


def _changeable(functions: Iterable[str], files: Mapping[str, _File]) -> Iterator[tuple[str, Function, _File]]:
    """The test functions that can be changed, by id, and each with its file."""
    for function in functions:
        path, _, name = function.partition("::")
        if (file := files.get(path)) and (test := function_to_change(file.tree, name, file.assigned)):
            yield function, test, file


def _tests(functions: Iterable[str], files: Mapping[str, _File]) -> Iterator[tuple[str, list[tuple[str, Function]]]]:
    """The test functions that can be changed, each with the parts that it surely runs and that assert."""
    for function, test, file in _changeable(functions, files):
        name = function.partition("::")[2]
        yield function, [each for each in _used(test, name, file, files) if _fails_at_end(each[1])]


def changed_expectation_of(texts: Mapping[str, str], functions: Collection[str], changed: Mapping[str, str]) -> str:
    """One of the `changed` files, in which the `functions` assert something or which has an expectation of theirs that
    is another now; "" if there is none. `texts`: the test files and the `used_files`, all as the task has them;
    `changed`: those that the agent changed, as it did."""
    try:
        files = _files(texts, texts)
        for _, parts in _tests(functions, files):
            for path, part in parts:
                if path in changed and (part.decorator_list or _asserts_only(part)):
                    return path
        given = {argument.arg for test in _changeable(functions, files) for argument in test[1].args.args}
        for path in changed.keys() & files.keys():
            for name, part in _functions(files[path].tree).items():
                if name in given and any(map(_makes_a_fixture, part.decorator_list)):
                    return path
        for path in {function.partition("::")[0] for function in functions} & files.keys():
            for expectation in set(_expectations(files[path].tree)):
                name, _, attribute = expectation.partition(".")
                other, inner = files[path].imports.get(name, ("", ""))
                inner = inner or attribute
                if (
                    other in changed
                    and other in files
                    and _sets_another(files[other], texts[other], inner, changed[other])
                ):
                    return other
    except RecursionError:
        pass
    return ""


def _expectations(tree: ast.Module) -> Iterator[str]:
    """The names (`X`, `module.X`) that are one side of an equation, unless the other side is a literal, or values of
    parameters, or of a loop."""
    for node in ast.walk(tree):
        sides: list[ast.expr] = []
        if isinstance(node, ast.Compare) and len(node.ops) == 1 and isinstance(node.ops[0], ast.Eq):
            sides = [node.left, node.comparators[0]]
        elif isinstance(node, ast.Call) and EQUALITY.fullmatch(name_of(node.func)):
            sides = node.args[:2]
        elif isinstance(node, ast.Call) and name_of(node.func) == "parametrize":
            sides = node.args[1:2]
        elif isinstance(node, ast.For | ast.comprehension):
            sides = [node.iter]
        if not any(map(is_literal, sides)):
            yield from (text for side in sides if NAMES_ONE.fullmatch(text := ast.unparse(side)))


def _sets_another(file: _File, text: str, name: str, now: str) -> bool:
    """Whether the file assigns a literal to the name that may be another `now`: what an agent wrote is not parsed."""
    for statement in file.tree.body:
        targets = statement.targets if isinstance(statement, ast.Assign) and is_literal(statement.value) else []
        if any(name == getattr(each, "id", "") for each in targets):
            lines = [[line for line in each.splitlines() if name in line] for each in (text, now)]
            return lines[0] != lines[1] or (ast.get_source_segment(text, statement) or "") not in now
    return False


def _asserts_only(part: Function) -> bool:
    """Whether a function changes nothing and returns nothing: code under test may assert as well."""
    return not any(
        (isinstance(each, ast.Return) and each.value)
        or (isinstance(each, ast.Attribute | ast.Subscript) and not isinstance(each.ctx, ast.Load))
        or isinstance(each, ast.Raise | ast.Global | ast.Nonlocal)
        for each in ast.walk(part)
    )


def _imports(tree: ast.Module, path: str, own: Collection[str]) -> Iterator[tuple[str, tuple[str, str]]]:
    """What the file's own statements import of the task: each name, the file, and the name there ("": the file)."""
    for statement in tree.body:
        if isinstance(statement, ast.Assign) and any(getattr(each, "id", "") == PLUGINS for each in statement.targets):
            values = (each.value for each in ast.walk(statement.value) if isinstance(each, ast.Constant))
            yield from ((PLUGINS, (file, "")) for each in values if (file := _file_of(str(each), 0, path, own)))
        elif isinstance(statement, ast.Import):
            for each in statement.names:
                if file := _file_of(each.name, 0, path, own):
                    yield each.asname or each.name, (file, "")
        elif isinstance(statement, ast.ImportFrom):
            module = statement.module or ""
            for each in statement.names:
                name = each.asname or each.name
                if file := _file_of(f"{module}.{each.name}".lstrip("."), statement.level, path, own):
                    yield name, (file, "")
                elif module and (file := _file_of(module, statement.level, path, own)):
                    yield name, (file, each.name)


def _file_of(module: str, level: int, path: str, own: Collection[str]) -> str:
    """The file of the task that an import in `path` surely finds; "" for none."""
    folders = PurePosixPath(path).parents
    places = folders[level - 1 : level] if level else folders
    inner = module.replace(".", "/")
    if not level and module.partition(".")[0] in sys.stdlib_module_names:
        return ""
    paths = [str(place / file) for place in places for file in (f"{inner}.py", f"{inner}/__init__.py")]
    found = [path for path in paths if path in own]
    return found[0] if len(found) == 1 else ""


def _used(test: Function, name: str, file: _File, files: Mapping[str, _File]) -> Iterator[tuple[str, Function]]:
    """What a test surely runs of the task's files, each with its file."""
    scope = _scope(file.tree, name)
    methods = _methods(scope, file, files) if scope else {}
    always = OF_UNIT_TESTS if scope and _is_unit_test(scope, file, files) else OF_PYTEST
    written = "".join(map(ast.unparse, [test, *(scope.decorator_list if scope else ())]))
    called, arguments = set(_called(test)), {each.arg for each in test.args.args}
    for key, (place, part) in methods.items():
        is_called = (f"self.{key}", isinstance(part, ast.AsyncFunctionDef)) in called or key in always
        if key in file.assigned | {*file.imported}:
            continue
        if (is_called and _is_plain(part)) or _is_fixture(part, arguments, written):
            yield place, part
    yield from _calls(test, file, files)
    for place, part in _fixtures(file, files):
        if part.name not in methods and _is_fixture(part, arguments, written):
            yield place, part


def _calls(
    caller: Function, file: _File, files: Mapping[str, _File], mocked: Collection[str] = (), depth: int = 3
) -> Iterator[tuple[str, Function]]:
    """The functions of the task that a function surely calls, and those that these call, each with its file. `mocked`:
    names in the texts of the test's file, if that is another call's."""
    called, arguments = set(_called(caller)), {each.arg for each in caller.args.args}
    for key, (place, part) in _callable(caller, file, files).items():
        is_called = (key, isinstance(part, ast.AsyncFunctionDef)) in called and key.partition(".")[0] not in arguments
        if (
            is_called
            and _is_plain(part)
            and part.name not in mocked
            and (place == file.path or part.name not in file.named)
        ):
            yield place, part
            if depth:
                yield from _calls(part, files[place], files, mocked or file.named, depth - 1)


def _callable(test: Function, file: _File, files: Mapping[str, _File]) -> dict[str, tuple[str, Function]]:
    """The functions that a test can call, as it writes them: its own, its file's and those of files that this one
    imports."""
    found: dict[str, tuple[str, Function]] = {}
    for name, (path, inner) in file.imports.items():
        other = files.get(path)
        if other is None or "*" in file.imported:
            continue
        for each in other.functions.keys() & {inner} if inner else other.functions:
            found[name if inner else f"{name}.{each}"] = path, other.functions[each]
    inner = {name: part for name, part in _functions(test).items() if name not in {*file.assigned, *file.imported}}
    return found | {name: (file.path, part) for name, part in (*file.functions.items(), *inner.items())}


def _fixtures(file: _File, files: Mapping[str, _File]) -> Iterator[tuple[str, Function]]:
    """The fixtures of a test's file and of each `conftest.py` above it, but not what a nearer file may replace."""
    above = [files[path] for each in PurePosixPath(file.path).parents if (path := str(each / CONFTEST)) in files]
    replaced = set[str]()
    for each in [file, *above]:
        replaced |= each.named if each is not file else set[str]()
        for name in each.functions.keys() - replaced:
            yield each.path, each.functions[name]
        if "*" in each.imported:
            return
        replaced |= {*each.imported, *each.defined, *each.assigned, *each.named}


def _scope(tree: ast.Module, test: str) -> ast.ClassDef | None:
    """The class of a test; None for one of the file or of an inner class."""
    classes = [each for each in tree.body if isinstance(each, ast.ClassDef) and test.startswith(f"{each.name}::")]
    return classes[-1] if classes and test.count("::") == 1 else None


def _bases(scope: ast.ClassDef, file: _File, files: Mapping[str, _File]) -> Iterator[tuple[ast.ClassDef, _File]]:
    """The classes of the task that it inherits from, but for those behind an unknown one."""
    for base in scope.bases:
        path, inner = file.imports.get(ast.unparse(base), (file.path, ast.unparse(base)))
        other = files.get(path)
        classes = [each for each in other.tree.body if isinstance(each, ast.ClassDef)] if other else []
        found = [each for each in classes if each.name == inner and each is not scope]
        if other is None or len(found) != 1 or "*" in file.imported or inner in {*other.assigned, *other.imported}:
            return
        yield found[0], other


def _methods(scope: ast.ClassDef, file: _File, files: Mapping[str, _File]) -> dict[str, tuple[str, Function]]:
    """The methods of a class by name, each with its file."""
    own = {each.name for each in scope.body if isinstance(each, FUNCTIONS)}
    methods = {name: (file.path, part) for name, part in _functions(scope).items()}
    for base, other in list(_bases(scope, file, files))[:1]:
        methods |= {name: part for name, part in _methods(base, other, files).items() if name not in own}
    return methods


def _is_unit_test(scope: ast.ClassDef, file: _File, files: Mapping[str, _File]) -> bool:
    return is_unit_test(scope) or any(_is_unit_test(base, other, files) for base, other in _bases(scope, file, files))


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


def _makes_a_fixture(mark: ast.expr) -> bool:
    return name_of(mark.func if isinstance(mark, ast.Call) else mark) == "fixture"


def _is_fixture(part: Function, arguments: Collection[str], written: str) -> bool:
    """Whether it is made and ended for the test with these arguments, but for parameters of the test's own."""
    marks = part.decorator_list
    if isinstance(part, ast.AsyncFunctionDef) or len(marks) != 1 or f"'{part.name}" in written:
        return False
    if not _makes_a_fixture(marks[0]):
        return False
    mark = ast.unparse(marks[0]).removesuffix("()")
    return mark in OF_ALL or (mark in FIXTURE and part.name in arguments)


def _fails_at_end(part: Function) -> bool:
    """Whether it asserts something, and comes to its end."""
    inner = (each for statement in part.body for each in ast.walk(statement))
    return asserts(part) and not any(isinstance(each, ast.Return) and each is not part.body[-1] for each in inner)
