"""Prints what the house measures: `make measures`. A figure is a sign, not an aim.

files, lines            of the product, without tests, examples and scripts
imports                 their share of all lines
small private helpers   private functions of at most six lines with one caller, as a share of all functions
import circles          groups of files that import one another, imports for type checkers included
words                   of docs/ and README.md
"""

from __future__ import annotations

import ast
import re
import subprocess
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = ("src", "proxy", "reconstructor", "trainer_client", "harnesses")
SMALL = 6
LARGEST_FILE, LARGEST_FUNCTION, MOST_PARAMETERS = 800, 80, 8


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
    return (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def length(node: ast.stmt) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


def import_lines(tree: ast.Module) -> int:
    return sum(length(node) for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom))


def small_helpers(tree: ast.Module) -> Iterator[str]:
    """Private functions and methods of at most `SMALL` lines, its docstring included, that are named once elsewhere."""
    used = Counter(
        node.id if isinstance(node, ast.Name) else node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Name | ast.Attribute)
    )
    for node in functions(tree):
        is_private = node.name.startswith("_") and not node.name.startswith("__")
        if is_private and not node.decorator_list and length(node) <= SMALL and used[node.name] == 1:
            yield node.name


def imports(name: str, tree: ast.Module, modules: Mapping[str, ast.Module]) -> set[str]:
    """The product's modules that a module imports when it is loaded or checked; imports within functions left out."""
    inside = {id(child) for node in functions(tree) for child in ast.walk(node)}
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
    rows = {
        "product files / lines": f"{len(modules):,} / {total:,}",
        "imports, share of lines": f"{sum(map(import_lines, modules.values())) / total:.1%}",
        f"private helpers of at most {SMALL} lines with one caller": f"{helpers} of {len(counted):,} functions, "
        f"{helpers / len(counted):.1%}",
        "import circles, type checking included": f"{len(found)}: {', '.join(str(len(one)) for one in found)} files",
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
