"""Which of an agent's changes an evaluation takes into a clean copy of the task. An allow-list.

Without a task's `takes`, source files and documents with plain names in plain folders are taken. No tool reads such a
file unless the code or the task names it. Everything else stays as it was before the agent: tests, files that configure
a tool, files that a tool finds by name or place, links, and unknown kinds of files.

With `takes`, the task's patterns decide. A pattern with a wildcard never takes a hidden file or one that is known to
configure a tool; a pattern that names such a file does: `"takes": ["src/*", "pyproject.toml"]`.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from rolltap.harnesses.left_files import UNSEEN

SOURCES = re.compile(
    r"\.(py|pyi|pyx|c|h|cc|cpp|cxx|hh|hpp|rs|go|java|kt|scala|cs|fs|swift|js|mjs|cjs|jsx|ts|mts|tsx|vue|svelte|rb|php|pl|lua"
    r"|r|jl|hs|ml|ex|erl|clj|dart|zig|sql|proto|f90)",
    re.IGNORECASE,
)
DOCUMENTS = re.compile(r"\.(txt|md|rst|csv|tsv|html|css|svg|tex|po|png|jpg|gif|pdf)", re.IGNORECASE)
"""New ones come in; of those that the task has, any may be what the agent's answer is compared with."""

PLAIN = re.compile(r"(?!__)[A-Za-z0-9_][A-Za-z0-9_-]{0,99}|__init__|__main__")
"""A folder, or a file without its suffix: no dot, so neither hidden nor `jest.config.js` or `x.cpython-311.so`."""

FOLDER_OF_TESTS = re.compile(
    r"((.+[_-])?(unit|doc|func)?tests?\d*(ing|utils?|lib|suite|cases?|data|base|helpers?|support)?([_-].+)?|specs?)(\..+)?",
    re.IGNORECASE | re.DOTALL,
)
"""The name of a folder with tests, or with what they use, or of a file with all of that."""
FILE_OF_TESTS = re.compile(
    r"test_.*\..*|.*(_test|[._]spec|\.test)\.[^.]*"
    r"|(?-i:(\w*[a-z0-9])?(Test|Spec)(s|ing|Base|Case|Cases|Suite|Helper|Utils?)?\.[^.]*|Test[A-Z]\w*\.[^.]*)",
    re.IGNORECASE | re.DOTALL,
)
"""Also in the spelling of Java, C# and others: `CalcTest.java`, `TestCalc.kt`, `CalcSpecs.cs`."""
PLACES = frozenset(
    (
        *("node_modules", "bower_components", "site-packages", "dist-packages", "venv", "env", "META-INF"),
        *("__pycache__", "sitecustomize", "usercustomize", "buildSrc", "fabfile"),
    )
)
"""Folders that tools look into, wherever they are."""
NAMES = re.compile(
    r"(conftest|sitecustomize|usercustomize|setup|hatch_build|dodo|duties|pavement)\.py"
    r"|(conan|nox|fab|tox|locust|gulp|grunt|jake|make|rake|mage|guard|thor|cap|fast|danger)file\.[^.]*"
    r"|setup(tests|proxy)\.[^.]*|(xmake|premake5)\.lua"
    r"|(cmakelists|requirements|constraints|meson_options)\.txt|build\.(rs|zig|clj|jl|dart|pl|scala)|package\.swift|startup\.jl"
    r"|(project|user|data_readers)\.clj|myocamlbuild\.ml|(spec|test|rails)_helper\.[^.]*",
    re.IGNORECASE,
)
"""Source files and documents that tools find by their names alone."""
NAMES_OF_NEW = frozenset(("tasks.py",))
"""Like `NAMES`, but only for new files: projects have modules of these names, too."""

CONFIGURES = re.compile(
    r"[^/]*(config|conf|rc|setup|workspace)\.[^/]+|[^/]*\.(pth|pyc|pyo|so|egg-link|cfg|ini|toml|mk|cmake|opts|gradle|kts"
    r"|gemspec|lock)|[^/]*(make|rake|gem|docker|just|task|build|proc|jenkins|vagrant)file|build|workspace|package\.json"
    r"|(pom|build|phpunit|testng|ivy)\.xml(\.dist)?|(deno|composer|angular|nx|turbo|lerna|nodemon|cypress|global)\.jsonc?"
    r"|cmakepresets\.json|rust-toolchain|go\.(mod|sum|work)|(gradle|junit-platform)\.properties|(gradlew|mvnw)(\.[^/.]*)?"
    r"|[^/]*\.([cfv][sb]proj|props|targets|sln|cabal|bazel|bzl|gyp|sbt|neon|zon|config)|meson\.build|mix\.exs|dune(-project)?"
    r"|(cabal\.project|stack\.yaml|pubspec\.yaml)|(deps|bb|shadow-cljs)\.edn|scons(truct|cript)|wscript|configure"
    r"|(pip|snake|tup|earth|tilt|pod|cap|thor|guard|fast|danger|jake|cake|steep|puppet|berks)file|cpanfile|(task|behat|codeception|environment|shard)(file)?\.ya?ml",
    re.IGNORECASE,
)
"""Paths that no pattern of `takes` with a wildcard takes."""
WILD = re.compile(r"[*?[]")


@dataclass(frozen=True, slots=True)
class StartingState:
    """The files of a task before the agent ran, its folders, and those folders that Python imports from.

    `modules`: the files by their path up to the first dot of their name.
    """

    files: frozenset[str]
    folders: frozenset[str]
    roots: frozenset[str]
    modules: Mapping[str, Sequence[str]]

    @classmethod
    def of(cls, clean: Path) -> StartingState:
        files, folders, roots = set[str](), set[str](), set[str]()
        modules = dict[str, list[str]]()
        for place, inner, names in os.walk(clean):
            inner[:] = [name for name in inner if name not in UNSEEN]
            folder = os.path.relpath(place, clean).removeprefix(".")
            folders.add(folder)
            files |= {os.path.join(folder, name) for name in names}
            for name in names:
                modules.setdefault(os.path.join(folder, name.partition(".")[0]), []).append(os.path.join(folder, name))
            if "__init__.py" not in names:
                roots.add(folder)
        return cls(frozenset(files), frozenset(folders), frozenset(roots), modules)


@dataclass(frozen=True, slots=True)
class Intake:
    """`takes`: the task's patterns of paths (`*` matches `/`, too); () for the allow-list alone. `refused`: paths that
    never come in."""

    start: StartingState
    takes: Collection[str] = ()
    refused: Collection[str] = ()

    def brings(self, path: str, is_link: bool = False) -> bool:
        """Whether the change of `path` is taken."""
        if path in self.refused:
            return False
        if not self.takes:
            return not is_link and self._is_plain(path)
        matching = [pattern for pattern in self.takes if fnmatchcase(path, pattern)]
        return any(not WILD.search(pattern.rpartition("/")[2]) for pattern in matching) or (
            bool(matching) and not self._configures(path)
        )

    def _is_plain(self, path: str) -> bool:
        *folders, name = path.split("/")
        stem, suffix = os.path.splitext(name)
        is_known = SOURCES.fullmatch(suffix) or (path not in self.start.files and DOCUMENTS.fullmatch(suffix))
        return (
            bool(is_known)
            and all(PLAIN.fullmatch(each) for each in (*folders, stem))
            and not is_of_tests(path)
            and not self._configures(path)
        )

    def _configures(self, path: str) -> bool:
        """Whether a tool would find `path` by its name or place, or Python in place of a module that it has."""
        *folders, name = path.split("/")
        is_new = path not in self.start.files
        return (
            any(each.startswith((".", "-")) or not each.isprintable() for each in (*folders, name))
            or bool(set(path) & set("|<>"))  # Perl runs a file named `COMMAND|`
            or not PLACES.isdisjoint(folders)
            or NAMES.fullmatch(name) is not None
            or (is_new and name.lower() in NAMES_OF_NEW)
            or CONFIGURES.fullmatch(path.rpartition("/")[2]) is not None
            or any(each.endswith((".dist-info", ".egg-info", ".egg")) for each in folders)
            or (is_new and (not sys.stdlib_module_names.isdisjoint(self.names(path)) or self._displaces(path)))
        )

    def names(self, path: str) -> set[str]:
        """The names by which Python may import the new `path`, or what it lies in, before an installed module."""
        return {
            inner.rpartition("/")[2].partition(".")[0]
            for folder, inner in self._in_task(path)
            if folder in self.start.roots and (inner == path or inner not in self.start.folders)
        }

    def _displaces(self, path: str) -> bool:
        """Whether an import would find the new `path` instead of a file or folder of the task."""
        for folder, inner in self._in_task(path):
            name = os.path.join(folder, inner.rpartition("/")[2].partition(".")[0])
            if inner == path and name in self.start.folders:
                return True
            if any(not self.brings(each) for each in self.start.modules.get(name, ())):
                return True
        return False

    def _in_task(self, path: str) -> Iterator[tuple[str, str]]:
        """The folders on the way to `path` that the task has, each with what follows in it. An agent's own, below,
        can be very deep."""
        folder = ""
        for part in path.split("/"):
            if folder not in self.start.folders:
                return
            inner = os.path.join(folder, part)
            yield folder, inner
            folder = inner


def is_of_tests(path: str) -> bool:
    """Whether a file is one of tests, or lies among them."""
    parts = path.split("/")
    return any(map(FOLDER_OF_TESTS.fullmatch, parts)) or FILE_OF_TESTS.fullmatch(parts[-1]) is not None
