"""One word for one thing: class names, the values of the closed vocabularies, and sizes that a reader keeps in mind."""

from __future__ import annotations

import ast
import runpy
from collections import defaultdict
from collections.abc import Iterator
from enum import StrEnum

import pytest

from rolltap.types import CallKind, Outcome

from .product import ROOT, Function, Source, compare, sources

MEASURES = runpy.run_path(str(ROOT / "scripts" / "measures.py"))

MAX_LINES, MAX_FUNCTION, MAX_PARAMETERS = 800, 80, 8
MIRRORS = ("_wire.py", "/wire.py", "/write.py")  # modules that mirror a vendor's words: its requests and its replies
MIRROR_FOLDERS = ("engine/scripted/wires/",)

ROLES = {"base", "dialect", "registry", "schema", "settings", "types", "wire"}
"""What a room has a module for, by its name."""
PASSED_ON = {
    "conversation": "as protocols parse it, as exporters write it",
    "keys": "bodies in contract, rows in ledger, routes in planes",
    "passthrough": "the source of a call, the client that it asks",
    "policies": "rows in ledger, those that are served in call",
    "runs": "questions in reading, their pages in viewer",
}
"""Things that several rooms have a part of, in a module of the same name each."""

LEAST_LINES = 60
SHORT = {
    "calllog/migrations/env.py": "Alembic looks for it",
    "crash.py": "the kernel's",
    "harnesses/agents/command.py": "a harness, which is made with its argv and so in no table",
    "harnesses/agents/libraries.py": "several agents share it",
    "harnesses/agents/resumed_mini.py": "a release's own Python loads it",
    "harnesses/evaluators/python_child.py": "a process of its own, which imports little",
    "harnesses/evaluators/rewards.py": "most evaluators share it",
    "ids.py": "the kernel's",
    "protocols/dialects.py": "a registry",
    "proxy/planes/read.py": "a section of a plane",
    "tampering.py": "the kernel's",
    "trainer_client/adapters/slime_rewards.py": "slime's command line names it",
    "trainer_client/adapters/trl_cpu.py": "it stands in for CUDA under TRL's own trainer, too",
    "trainer_client/adapters/verl_weights.py": "verl's workers import it, without Ray",
    "trainer_client/recipes/hinted_teacher.py": "several papers share it",
    "wire.py": "the kernel's",
}
"""Modules of fewer lines that are neither in a registry nor the door of a package, and why they are not a part of
another one."""

LONG_FILES: set[str] = set()
LONG_FUNCTIONS: set[str] = set()
SHARED_NAMES: set[str] = set()
UNWRITTEN: set[str] = set()
"""What is against a rule today. Each set only shrinks: what is mended has to leave it."""


def mirrors_a_vendor(source: Source) -> bool:
    return source.name.endswith(MIRRORS) or source.name.startswith(MIRROR_FOLDERS)


def is_command_line(source: Source) -> bool:
    """There a parameter is an option."""
    return source.name.startswith("cli/") or source.name.endswith("__main__.py")


def parameters(function: Function) -> list[str]:
    every = function.args.posonlyargs + function.args.args + function.args.kwonlyargs
    return [parameter.arg for parameter in every if parameter.arg not in ("self", "cls")]


def test_a_file_has_at_most_800_lines() -> None:
    sizes = {source.name: len(source.text.splitlines()) for source in sources()}
    long = {name: f"{lines} lines" for name, lines in sizes.items() if lines > MAX_LINES}
    compare(long, LONG_FILES, f"a file has at most {MAX_LINES} lines")


def test_a_module_under_60_lines_has_a_reason() -> None:
    entries = MEASURES["entries"]({source.module: source.tree for source in sources()})
    short = {
        source.name: f"{lines} lines: make it a part of its neighbour"
        for source in sources()
        if (lines := len(source.text.splitlines())) < LEAST_LINES
        and source.module not in entries
        and not source.name.endswith(("__init__.py", "__main__.py"))
    }
    compare(short, set(SHORT), f"a module has at least {LEAST_LINES} lines, or a reason in `SHORT`")


def test_a_function_has_at_most_80_lines() -> None:
    long = {}
    for source in sources():
        for function in source.functions():
            lines = (function.end_lineno or 0) - function.lineno + 1
            if lines > MAX_FUNCTION:
                long[f"{source.name}::{function.name}"] = f"{lines} lines"
    compare(long, LONG_FUNCTIONS, f"a function has at most {MAX_FUNCTION} lines")


def test_a_function_has_at_most_8_parameters() -> None:
    many = {}
    for source in sources():
        if not is_command_line(source):
            for function in source.functions():
                names = parameters(function)
                if len(names) > MAX_PARAMETERS:
                    many[f"{source.name}::{function.name}"] = ", ".join(names)
    compare(many, set(), f"a function has at most {MAX_PARAMETERS} parameters, the command line excepted")


def test_no_file_imports_two_modules_of_one_name() -> None:
    modules = {source.module for source in sources()}
    met = {}
    for source in sources():
        by_name: dict[str, set[str]] = defaultdict(set)
        for module in source.imported & modules:
            by_name[module.rpartition(".")[2]].add(module)
        for name, those in by_name.items():
            if len(those) > 1 and name not in ROLES | PASSED_ON.keys() and not is_command_line(source):
                met[f"{source.name} {name}"] = ", ".join(sorted(those))
    compare(met, set(), "a file imports no two modules of one name, but for roles and things that several rooms have")


def test_no_class_name_is_defined_twice() -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for source in sources():
        if not mirrors_a_vendor(source):
            for node in source.classes():
                places[node.name].append(source.name)
    shared = {name: ", ".join(files) for name, files in places.items() if len(files) > 1}
    compare(shared, SHARED_NAMES, "a public class name is defined once, modules that mirror a vendor's words excepted")


@pytest.mark.parametrize("vocabulary", [CallKind, Outcome], ids=lambda vocabulary: vocabulary.__name__)
def test_every_value_is_written_by_some_line(vocabulary: type[StrEnum]) -> None:
    """A value that is only read describes nothing that happens."""
    others = [source for source in sources() if source.name != "types.py"]
    written = {name for source in others for name in members_written(source, vocabulary)}
    unwritten = {f"{vocabulary.__name__}.{member.name}": "never written" for member in vocabulary}
    unwritten = {name: what for name, what in unwritten.items() if name.partition(".")[2] not in written}
    known = {name for name in UNWRITTEN if name.startswith(f"{vocabulary.__name__}.")}
    compare(unwritten, known, "every value of a closed vocabulary is written by some line of the product")


def members_written(source: Source, vocabulary: type[StrEnum]) -> Iterator[str]:
    """Members that an expression passes on: named outside comparisons and a table's keys, or returned as text."""
    by_value = {member.value: member.name for member in vocabulary}
    read = {id(part) for node in source.nodes for part in parts_that_read(node)}
    for node in source.nodes:
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and id(node) not in read:
            if node.value.id == vocabulary.__name__:
                yield node.attr
        elif isinstance(node, ast.Return) and isinstance(node.value, ast.Constant) and node.value.value in by_value:
            yield by_value[node.value.value]


def parts_that_read(node: ast.AST) -> Iterator[ast.AST]:
    roots: list[ast.AST] = []
    if isinstance(node, ast.Compare):
        roots = [node.left, *node.comparators]
    elif isinstance(node, ast.Dict):
        roots = [key for key in node.keys if key is not None]
    return (part for root in roots for part in ast.walk(root))
