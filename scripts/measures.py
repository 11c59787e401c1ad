"""Prints what the house measures: `make measures`. A figure is a sign, not an aim.

files, lines            of the product, without tests, examples and scripts
of the files            those that only make a folder a package; those that a literal registry names, and migrations;
                        the rest
imports                 their share of all lines, and of those of the rest
small private helpers   private functions of at most six lines with one caller, as a share of all functions
import circles          groups of files that import one another, imports for type checkers included
arrows up               imports of a room above by one below, in the order of the layers in `pyproject.toml`
way of a lease          files of the ledger that a reader of `Trainers.lease` passes, and returns to one of them
words                   of docs/ and README.md
"""

from __future__ import annotations

import ast
import re
import subprocess
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import groupby
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = ("src", "proxy", "reconstructor", "trainer_client", "harnesses")
SMALL = 6
LARGEST_FILE, LARGEST_FUNCTION, MOST_PARAMETERS = 800, 80, 8
FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)


def product() -> dict[str, str]:
    """The sources of the product's modules, by name."""
    listed = subprocess.run(["git", "ls-files", *FOLDERS], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    paths = [ROOT / line for line in listed.splitlines() if line.endswith(".py") and (ROOT / line).is_file()]
    return {module_name(path): path.read_text(encoding="utf-8") for path in paths}


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    parts = parts[1:] if parts[0] == "src" else ("rolltap", *parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def is_command_line(name: str) -> bool:
    """There a parameter is an option."""
    return name.startswith("rolltap.cli.") or name.endswith(".__main__")


def functions(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (node for node in ast.walk(tree) if isinstance(node, FUNCTION))


def length(node: ast.stmt) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


def import_lines(tree: ast.Module) -> int:
    return sum(length(node) for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom))


REGISTRIES = (
    "rolltap.cli.main",
    "rolltap.engine.scripted.wires",
    "rolltap.harnesses.agents.registry",
    "rolltap.harnesses.evaluators.registry",
    "rolltap.harnesses.runtimes.registry",
    "rolltap.protocols.dialects",
    "rolltap.proxy.engines.registry",
    "rolltap.reconstructor.exporters",
    "rolltap.trainer_client.adapters",
    "rolltap.trainer_client.recipes",
)
MIGRATIONS = "rolltap.calllog.migrations.versions."


def is_marker(tree: ast.Module) -> bool:
    """Whether it only makes its folder a package."""
    return all(isinstance(node, ast.Expr) for node in tree.body)


def entries(modules: Mapping[str, ast.Module]) -> set[str]:
    """The modules that a registry names in its tables, by an imported name or as text; and the migrations."""
    found = {name for name in modules if name.startswith(MIGRATIONS)}
    for registry in REGISTRIES:
        is_package = any(name.startswith(f"{registry}.") for name in modules)
        package = registry if is_package else registry.rpartition(".")[0]
        meaning: dict[str, str] = {}
        for node in modules[registry].body:
            if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith(package):
                for alias in node.names:
                    inner = f"{node.module}.{alias.name}"
                    meaning[alias.name] = inner if inner in modules else node.module
        tables = (node for node in ast.walk(modules[registry]) if isinstance(node, ast.Dict))
        for each in (each for table in tables for value in table.values for each in ast.walk(value)):
            match each:
                case ast.Name(id=name) if name in meaning:
                    found.add(meaning[name])
                case ast.Constant(value=str(text)):
                    found.add(f"{package}.{text.removeprefix('.')}")
    return found & modules.keys()


def small_helpers(tree: ast.Module) -> Iterator[str]:
    """Private functions and methods of at most `SMALL` lines, docstring included, that are named once: in a call."""
    nodes = list(ast.walk(tree))
    used = Counter(_name_of(node) for node in nodes)
    called = {_name_of(node.func) for node in nodes if isinstance(node, ast.Call)}
    for node in functions(tree):
        is_private = node.name.startswith("_") and not node.name.startswith("__")
        has_one_caller = used[node.name] == 1 and node.name in called
        if is_private and not node.decorator_list and length(node) <= SMALL and has_one_caller:
            yield node.name


def _name_of(node: ast.AST) -> str | None:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else None


def imports(name: str, tree: ast.Module, modules: Mapping[str, ast.Module], *, all_of: bool = False) -> set[str]:
    """The product's modules that a module imports when it is loaded or checked; with `all_of`, in functions, too."""
    inside = set() if all_of else {id(child) for node in functions(tree) for child in ast.walk(node)}
    found: set[str] = set()
    for node in ast.walk(tree):
        if id(node) in inside:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return (found & modules.keys()) - {name}


def circles(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """The strongly connected groups of more than one module (Tarjan 1972)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(name: str) -> None:
        index[name] = low[name] = len(index)
        stack.append(name)
        for other in graph[name]:
            if other not in index:
                visit(other)
                low[name] = min(low[name], low[other])
            elif other in stack:
                low[name] = min(low[name], index[other])
        if low[name] == index[name]:
            members = [stack.pop()]
            while members[-1] != name:
                members.append(stack.pop())
            found.append(sorted(members))

    for name in graph:
        if name not in index:
            visit(name)
    return [members for members in found if len(members) > 1]


def layers() -> tuple[dict[str, int], list[str]]:
    """The height of each room, by the layers that import-linter checks, and the imports that it is to ignore."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"][
        "contracts"
    ]
    (rooms,) = (each for each in contracts if each["type"] == "layers" and "containers" not in each)
    lines = enumerate(reversed(rooms["layers"]))
    return {room: height for height, line in lines for room in line.split(" | ")}, rooms["ignore_imports"]


def arrows_up(modules: Mapping[str, ast.Module]) -> set[tuple[str, str]]:
    height, ignored = layers()
    pairs = (
        (".".join(name.split(".")[:2]), ".".join(other.split(".")[:2]))
        for name, tree in modules.items()
        for other in imports(name, tree, modules, all_of=True)
        if f"{name} -> {other}" not in ignored
    )
    return {(room, other) for room, other in pairs if height.get(room, 99) < height.get(other, 0)}


Place = tuple[str, str]
"""A function: its module, and its name there."""

LEASE: Place = ("rolltap.ledger.leases", "Trainers.lease")
TRANSACTIONS: Place = ("rolltap.ledger.unit_of_work", "UnitOfWork")


def way_of_a_lease(modules: Mapping[str, ast.Module]) -> list[str]:
    """The ledger's modules in the order in which a reader enters them who begins at `LEASE` and looks up each function
    that is named there, once. What `Trainers` is given is left out, but for its transactions."""
    known: dict[Place, ast.stmt] = {}
    meaning: dict[Place, Place] = {}
    for name in (each for each in modules if each.startswith("rolltap.ledger.")):
        for node in modules[name].body:
            if isinstance(node, ast.ClassDef):
                known |= {(name, f"{node.name}.{each.name}"): each for each in node.body if isinstance(each, FUNCTION)}
            elif isinstance(node, FUNCTION):
                known[name, node.name] = node
            elif isinstance(node, ast.ImportFrom) and node.module:
                meaning |= {(name, alias.name): (node.module, alias.name) for alias in node.names}
    way: list[str] = []

    def read(place: Place) -> None:
        module, function = place
        node = known.pop(place)
        way.append(module)
        named = (each for each in ast.walk(node) if isinstance(each, ast.Name | ast.Attribute))
        for each in sorted(named, key=lambda one: (one.lineno, one.col_offset)):
            match each:
                case ast.Name(id=name):
                    other = meaning.get((module, name), (module, name))
                case ast.Attribute(value=ast.Name(id="self"), attr=name):
                    other = module, f"{function.partition('.')[0]}.{name}"
                case ast.Attribute(value=ast.Attribute(attr="_uow"), attr=name):
                    other = TRANSACTIONS[0], f"{TRANSACTIONS[1]}.{name}"
                case _:
                    continue
            if other in known:
                read(other)
                way.append(module)

    read(LEASE)
    return [module for module, _ in groupby(way)]


def words() -> int:
    """Those with a letter or a digit: the frames of tables and lists are no words, so a table costs what it says."""
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    return sum(len(re.findall(r"\S*\w\S*", page.read_text(encoding="utf-8"))) for page in pages)


def main() -> None:
    sources = product()
    modules = {name: ast.parse(source, name) for name, source in sources.items()}
    lines = {name: len(source.splitlines()) for name, source in sources.items()}
    total = sum(lines.values())
    counted = [node for tree in modules.values() for node in functions(tree)]
    helpers = sum(len(list(small_helpers(tree))) for tree in modules.values())
    found = circles({name: imports(name, tree, modules) for name, tree in modules.items()})
    way = way_of_a_lease(modules)
    markers = {name for name, tree in modules.items() if is_marker(tree)}
    registered = entries(modules)
    rest = modules.keys() - markers - registered
    imported = {name: import_lines(tree) for name, tree in modules.items()}
    rows = {
        "product files / lines": f"{len(modules):,} / {total:,}",
        "of the files: package markers, registry entries, the rest": f"{len(markers)}, {len(registered)}, {len(rest)}",
        "imports, share of lines": f"{sum(imported.values()) / total:.1%}; of the rest "
        f"{sum(imported[name] for name in rest) / sum(lines[name] for name in rest):.2%}",
        f"private helpers of at most {SMALL} lines with one caller": f"{helpers} of {len(counted):,} functions, "
        f"{helpers / len(counted):.1%}",
        "import circles, type checking included": "; ".join(map(", ".join, found)),
        "arrows up between top rooms": "; ".join(map(" to ".join, sorted(arrows_up(modules)))),
        "way of a lease": f"{len(set(way))} files, {len(way) - len(set(way))} returns",
        f"files over {LARGEST_FILE} lines": ", ".join(name for name, count in lines.items() if count > LARGEST_FILE),
        f"functions over {LARGEST_FUNCTION} lines": str(sum(length(node) > LARGEST_FUNCTION for node in counted)),
        f"functions with over {MOST_PARAMETERS} parameters, commands excepted": str(
            sum(
                len(node.args.args) + len(node.args.kwonlyargs) > MOST_PARAMETERS
                for name, tree in modules.items()
                if not is_command_line(name)
                for node in functions(tree)
            )
        ),
        "words in docs": f"{words():,}",
    }
    print("| measure | now |\n|---|---|")
    for measure, value in rows.items():
        print(f"| {measure} | {value or 'none'} |")


if __name__ == "__main__":
    main()
