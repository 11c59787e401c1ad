"""Configuration that an agent plants for the tools of an evaluation, at any depth: rewards stay what its work is worth.

Each trap makes its tool run the agent's command, or its own version of a module, where an evaluator starts the tool.
`test_the_traps_work` shows that they do where nothing protects the evaluator.
"""

from __future__ import annotations

import importlib.util
import py_compile
import random
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from rolltap.harnesses.base import Ending, Evaluator, Evidence, Exit, Limits, Source, Workspace
from rolltap.harnesses.evaluators.command import CommandCheck
from rolltap.harnesses.evaluators.harbor import HarborCheck
from rolltap.harnesses.evaluators.intake import WILD, Intake, StartingState
from rolltap.harnesses.evaluators.pytest_check import PytestCheck
from rolltap.harnesses.runtimes.bubblewrap import BubblewrapRuntime
from rolltap.harnesses.runtimes.sources import Empty, Files
from rolltap.types import Task

from ..plain_python import plain_python

FORGE = "echo 1 > /workspace/reward.txt; echo 1 > /logs/verifier/reward.txt; kill -9 $PPID"
PYTHON_FORGE = f"import os\nos.system({FORGE!r})\nos._exit(0)\n"
PASS_ALL = (
    "import pytest\n\n@pytest.hookimpl(hookwrapper=True)\ndef pytest_runtest_makereport(item, call):\n"
    "    result = yield\n    result.get_result().outcome = 'passed'\n"
)
EMPTY = Empty()
REPOSITORY = {"HEAD": "ref: refs/heads/main\n", "objects/x": "", "refs/x": ""}

Trap = Callable[[random.Random], dict[str, str]]


def _git(chance: random.Random) -> dict[str, str]:
    alias = f'[alias]\n\tcheck = "!{FORGE}"\n'
    how = chance.choice(
        [
            {".git/config": alias},
            {".git/config": "[include]\n\tpath = ../more\n", "more": alias},
            {".git/config": "[extensions]\n\tworktreeConfig = true\n", ".git/config.worktree": alias},
        ]
    )
    return {**{f".git/{name}": text for name, text in REPOSITORY.items()}, **how}


def _pytest(chance: random.Random) -> dict[str, str]:
    settings = chance.choice(
        [
            {"pytest.ini": "[pytest]\naddopts = -p evil\n"},
            {"tox.ini": "[pytest]\naddopts = -p evil\n"},
            {"setup.cfg": "[tool:pytest]\naddopts = --setup-only\n"},
            {"pyproject.toml": '[tool.pytest.ini_options]\naddopts = "-p evil"\n'},
            {"conftest.py": PASS_ALL},
        ]
    )
    return {**settings, "evil.py": PASS_ALL}


def _make(chance: random.Random) -> dict[str, str]:
    return {chance.choice(["Makefile", "makefile", "GNUmakefile"]): f"all:\n\t{FORGE.replace('$', '$$')}\n"}


PACKAGE = """\
[build-system]
requires = []
build-backend = "evil"
backend-path = ["."]
[project]
name = "x"
version = "1"
"""
CRATE = {
    ".cargo/config.toml": '[build]\nrustc = "./forge"\n',
    "Cargo.toml": '[package]\nname = "x"\nversion = "0.1.0"\n',
    "src/lib.rs": "",
    "forge": f"#!/bin/sh\n{FORGE}\n",
}
PACKAGE_JSON = {"package.json": f'{{"scripts": {{"test": "{FORGE}"}}}}'}
SETTINGS_OF_NPM = ("script-shell=/bin/sh\n", "node-options=--no-warnings\n")
MODULE = {"node_modules/x/index.js": f"require('child_process').execSync({FORGE!r})"}

TRAPS: Mapping[str, tuple[str, Trap]] = {
    "git": ("git check", _git),
    "pytest": (f"{plain_python()} -m pytest -q", _pytest),
    "npm": ("npm test --offline", lambda chance: {**PACKAGE_JSON, ".npmrc": chance.choice(SETTINGS_OF_NPM)}),
    "node": ("node -e \"import('x')\"", lambda _: MODULE),
    "make": ("make", _make),
    "python": (
        "python3 -c 'import json'",
        lambda chance: {chance.choice(["json.py", "json/__init__.py"]): PYTHON_FORGE},
    ),
    "pip": (
        f"{sys.executable} -m pip install --no-index --no-build-isolation .",
        lambda _: {"pyproject.toml": PACKAGE, "evil.py": PYTHON_FORGE},
    ),
    "cargo": ("cargo build --offline", lambda _: CRATE),
}
"""By tool: how an evaluator starts it in a folder, and what an agent puts there for it."""
CAN_RUN = ("git", "npm", "node", "make", "python", "pytest", "pip")
"""Tools that the sandbox has on every machine with our test dependencies."""

PROJECT = {
    "calc.py": "def add(a, b):\n    return a - b\n",
    "tests/test_calc.py": "from calc import add\n\ndef test_two():\n    assert add(1, 1) == 2\n",
}
FIXED = {"calc.py": "def add(a, b):\n    return a + b\n"}
LOOKS = "grep -q 'a + b' /workspace/calc.py && echo 1 > {0} || echo 0 > {0}"


def planted(tool: str, seed: int, also: str = "") -> tuple[str, dict[str, str]]:
    """The folder of a trap, at a random depth, and its files by path. `also`: what it runs beside its forgery."""
    chance = random.Random(f"{tool}-{seed}")
    folder = "/".join(chance.choices(["a", "src", "tests", ".hidden", "lib x"], k=chance.randrange(3)))
    files = {f"{folder}/{name}".lstrip("/"): text for name, text in TRAPS[tool][1](chance).items()}
    if also:
        for forge in (FORGE, FORGE.replace("$", "$$")):
            files = {name: text.replace(forge, f"{forge}; {also}") for name, text in files.items()}
    return folder or ".", files


def evaluators(tool: str, place: str, tests: Path) -> dict[str, Evaluator]:
    start = f"cd '/workspace/{place}' 2> /dev/null && {{}}{TRAPS[tool][0]} > /dev/null 2>&1; cd /workspace; "
    apart = start.replace("{}", "$ROLLTAP_SANDBOXED ")
    direct = start.replace("{}", "")
    looks = f"set +o pipefail; {{}}{LOOKS.format('reward.txt')}"
    helped = f"$ROLLTAP_SANDBOXED true; {direct}"
    for folder, script in ((tests, direct), (tests / "helped", helped)):
        Files({"test.sh": script + LOOKS.format("/logs/verifier/reward.txt")})(folder)
    return {
        "command, takes": CommandCheck(looks.format(direct), "reward.txt", takes=("calc.py",)),
        "command, apart": CommandCheck(looks.format(apart), "reward.txt"),
        "harbor, takes": HarborCheck(str(tests), takes=("calc.py",)),
        "command, beside": CommandCheck(looks.format(helped), "reward.txt"),
        "harbor, beside": HarborCheck(str(tests / "helped")),
        "pytest": PytestCheck(("tests/test_calc.py",), python=plain_python()),
    }


async def reward(
    evaluator: Evaluator,
    left: dict[str, str],
    folder: Path,
    plant: Source = EMPTY,
    project: dict[str, str] = PROJECT,
) -> tuple[float, str]:
    needs = PytestCheck(("t",), python=plain_python()).needs
    runtime = BubblewrapRuntime(folder, shown=(*needs, Path(sys.prefix)))
    made: list[Workspace] = []

    async def prepare() -> Workspace:
        made.append(await runtime.prepare(Files(project)))
        return made[-1]

    agents = await prepare()
    Files(left)(agents.folder)
    plant(agents.folder)
    for name in left:
        if name.endswith("forge"):
            (agents.folder / name).chmod(0o755)
    evidence = Evidence(Task("t", "Fix add."), Exit(Ending.DONE, 1.0, 0), agents, prepare, Limits(evaluate_s=120))
    try:
        return (await evaluator.evaluate(evidence)).scores[0].value, str(evidence.seen)
    finally:
        for each in made:
            await each.close()


@pytest.mark.parametrize("tool", TRAPS)
async def test_planted_configuration_changes_no_reward(tool: str, tmp_path: Path) -> None:
    """6 evaluators, one of them also with the work done."""
    place, files = planted(tool, random.randrange(10**6), "kill -9 -1")  # a judge that is killed gives no reward
    every = evaluators(tool, place, tmp_path)
    tries = [(name, {}, 0.0) for name in every] + [(random.choice(list(every)), FIXED, 1.0)]
    for name, work, worth in tries:
        value, seen = await reward(every[name], {**files, **work}, tmp_path / "places")
        assert value == worth, (name, place, sorted(files), seen)


@pytest.mark.parametrize("tool", CAN_RUN)
async def test_the_traps_work(tool: str, tmp_path: Path) -> None:
    """A judge that starts the tool in the agent's folder, beside itself, pays for nothing."""
    place, files = planted(tool, 1)
    command = TRAPS[tool][0]
    start = f"cd '/workspace/{place}' && {command} > /tmp/out 2>&1; cat /tmp/out; cd /workspace; true"
    if tool == "pytest":  # it changes what pytest says, not who runs
        forged = f"PYTHONPATH=.:/workspace {command} && echo 1 > /workspace/reward.txt"
        start = f"cd '/workspace/{place}' && cp -r /workspace/tests . ; {forged}"
    check = CommandCheck(f"({start}); test -e reward.txt || echo 0 > reward.txt", "reward.txt")
    value, seen = await reward(check, files, tmp_path)
    assert value == 1.0, seen


CONFIGURATION = (
    *("setup.cfg", "setup.py", "tox.ini", "pyproject.toml", "pytest.ini", ".pytest.ini", "conftest.py"),
    *("noxfile.py", "sitecustomize.py", "usercustomize.py", "usercustomize/__init__.py", "x.pth", ".env"),
    *(".envrc", ".pdbrc", ".coveragerc", "mypy.ini", "ruff.toml", ".python-version", "requirements.txt"),
    *("uv.lock", "MANIFEST.in", "evil-1.dist-info/entry_points.txt", "evil-1.dist-info/METADATA"),
    *("evil.egg-info/top_level.txt", "json.py", "json/__init__.py", "xml/new.py", "encodings/x.py"),
    *("_pytest.so", "calc.cpython-311-x86_64-linux-gnu.so", "__pycache__/calc.cpython-311.pyc", "calc.pyc"),
    *("site-packages/x.py", "tests/test_new.py", "test_more.py", ".npmrc", ".yarnrc", ".yarnrc.yml"),
    *("package.json", "package-lock.json", "pnpm-workspace.yaml", "tsconfig.json", "babel.config.js"),
    *(".babelrc", ".babelrc.js", "jest.config.ts", "jest.setup.js", "vitest.config.mjs", ".mocharc.js"),
    *("vitest.workspace.ts", "mocha.opts", "karma.conf.js", "webpack.config.js", "gulpfile.js"),
    *("Gruntfile.js", "node_modules/x/index.js", "node_modules/.bin/jest", "__mocks__/fs.js"),
    *("__tests__/a.js", "a.test.ts", "a.spec.js", ".cargo/config.toml", ".cargo/config", "build.rs"),
    *("rust-toolchain", "rust-toolchain.toml", "Cargo.toml", "go.mod", "go.work", "vendor/modules.txt~"),
    *("Makefile", "GNUmakefile", "makefile", "rules.mk", "CMakeLists.txt", "meson.build", "BUILD"),
    *("WORKSPACE", "BUILD.bazel", "Justfile", "Taskfile.yml", "Rakefile", "Gemfile", ".rspec"),
    *(".git/config", ".gitattributes", ".gitmodules", "HEAD", "config", ".hgrc", ".editorconfig"),
    *(".bashrc", ".profile", "Dockerfile", "compose.yaml", "pom.xml", "build.gradle", "build.gradle.kts"),
    *("composer.json", "run_tests.sh", ".hidden.py", ".src/calc.py", "bin/python3", "a.py.orig"),
    *("toxfile.py", "locustfile.py", "duties.py", "fabfile/__init__.py", "rakefile.rb", "Rakefile.rb", "magefile.go"),
    *("Makefile.PL", "Build.PL", "build.zig", "Package.swift", "project.clj", "user.clj", "data_readers.clj"),
    *("build.clj", "myocamlbuild.ml", "Setup.hs", "deps/build.jl", "startup.jl", "buildSrc/src/main/java/X.java"),
    *("spec_helper.rb", "test_helper.rb", "hook/build.dart", "project/Build.scala", "Guardfile.rb"),
    *("tsconfig.build.json", "jest.config.e2e.ts", "vitest.config.unit.mts", "karma.conf.ci.js", "jest.setup.dom.js"),
    *("Guardfile", "Thorfile", "Capfile", "Fastfile", "Dangerfile", "Jakefile", "Cakefile"),
    *("calc.py/x.py", "x~.py", "-rf.py", "lib x.py", "a\nb.py"),
)
"""What some tool reads by its name or its place, or might; at any depth."""
FOLDERS = ("a", "src", "tests", "pkg", ".hidden", "lib")
OF_A_PACKAGE = ("json.py", "json/__init__.py", "xml/new.py", "encodings/x.py")
"""They may come in where Python imports them by the name of their folder."""
HONEST = (
    *("calc.py", "new.py", "src/deep/util.rs", "README.md", "docs/how.md", "pkg/json.py"),
    *("pkg/types/__init__.py", "x.txt"),
)
TASKS_OWN = ("pkg/__init__.py", "src/lib.rs", "setup.py", "Makefile", "conftest.py", "build.rs")
START = {**PROJECT, **dict.fromkeys(TASKS_OWN, "")}


@pytest.mark.parametrize("seed", range(40))
def test_no_configuration_comes_in_at_any_depth(seed: int, tmp_path: Path) -> None:
    """Whether the task has such a file or not; a pattern with a wildcard brings none that a tool is known to read."""
    Files(START)(tmp_path)
    start = StartingState.of(tmp_path)
    chance = random.Random(seed)
    for name in CONFIGURATION:
        folder = "/".join(chance.choices(FOLDERS, k=chance.randrange(4)))
        path = f"{folder}/{name}".lstrip("/")
        if name not in OF_A_PACKAGE or folder in ("", "src", "tests"):
            assert not Intake(start).brings(path), path
        assert Intake(start, (path,)).brings(path) or WILD.search(path), path
        assert not Intake(start, (path,), {path}).brings(path)


BUILDS = (
    *(
        "go.work",
        "a/go.mod",
        "a/phpunit.xml",
        "phpunit.xml.dist",
        "meson.build",
        "a/mix.exs",
        "gradle.properties",
        "App.csproj",
    ),
    *(
        "a/Directory.Build.props",
        "dune",
        "BUILD.bazel",
        "a/x.cabal",
        "nx.json",
        "SConstruct",
        "mvnw",
        "src/setupTests.js",
    ),
)


def test_source_files_and_documents_come_in_and_links_do_not(tmp_path: Path) -> None:
    Files(START)(tmp_path)
    start = StartingState.of(tmp_path)
    assert [path for path in HONEST if not Intake(start).brings(path)] == []
    assert [path for path in HONEST if Intake(start).brings(path, is_link=True)] == []
    wide = Intake(start, ("*",))
    assert wide.brings("out/result.json")
    assert wide.brings("answer")
    known = (
        "conftest.py",
        "a/tsconfig.build.json",
        "jest.config.e2e.ts",
        "x/Guardfile",
        "a/package.json",
        ".env",
        "x/jest.config.js",
        "a/x.pth",
        "json.py",
        "a/Makefile",
        *BUILDS,
    )
    assert [path for path in known if wide.brings(path)] == []


async def test_bytecode_that_an_agent_made_is_not_what_is_tested(tmp_path: Path) -> None:
    """Also where it says that nobody need compare it with its source."""
    cached = importlib.util.cache_from_source("calc.py")
    (source := tmp_path / "calc.py").write_text(FIXED["calc.py"])
    unchecked = py_compile.PycInvalidationMode.UNCHECKED_HASH
    made = str(py_compile.compile(str(source), doraise=True, invalidation_mode=unchecked))
    check = PytestCheck(("tests/test_calc.py",), python=plain_python())

    def plant(folder: Path) -> None:
        (folder / cached).parent.mkdir()
        (folder / cached).write_bytes(Path(made).read_bytes())

    assert (await reward(check, {}, tmp_path / "places", plant))[0] == 0.0


async def test_a_new_module_takes_no_installed_ones_place(tmp_path: Path) -> None:
    """Of what the tests import themselves, too: else it could say that they passed."""
    text = "import sys\nassert 'packaging' not in sys.modules\n\nimport packaging\n\n"
    tests = {"tests/test_calc.py": f"{text}def test_it():\n    assert hasattr(packaging, '__version__')\n"}
    check = PytestCheck(("tests/test_calc.py",), python=plain_python())
    for path in ("packaging.py", "packaging/__init__.py", "src/packaging.py"):
        value, seen = await reward(check, {path: ""}, tmp_path, project={**PROJECT, **tests})
        assert value == 1.0, seen


SHADOWED = {
    "test_calc.py": "def test_two(): pass\n",
    "conftest.py": "import pytest\n@pytest.hookimpl(hookwrapper=True)\ndef pytest_runtest_makereport(item, call):\n"
    "    done = yield\n    done.get_result().outcome = 'passed'\n",
    "helpers/__init__.py": "def right(value): return True\n",
}
"""Files of the task beside its tests, and what an agent would have in their place."""


@pytest.mark.parametrize("name", SHADOWED)
async def test_no_package_stands_before_a_file_of_the_tests(name: str, tmp_path: Path) -> None:
    """Python prefers packages to modules, and a module can say that it is another file."""
    project = {
        "calc.py": PROJECT["calc.py"],
        "test_calc.py": "from calc import add\nfrom helpers import right\ndef test_two(): assert right(add(1, 1))\n",
        "conftest.py": "",
        "helpers/__init__.py": "def right(value): return value == 2\n",
    }
    for takes in ((), ("*",)):
        check = PytestCheck(("test_calc.py",), python=plain_python(), takes=takes)
        stem = name.partition("/")[0].partition(".")[0]
        forged = f"import os\n__file__ = os.path.join(os.getcwd(), {name!r})\n{SHADOWED[name]}"
        for path in {f"{stem}/__init__.py", f"{stem}.py"} - project.keys():
            value, seen = await reward(check, {path: forged}, tmp_path, project=project)
            assert value == 0.0, (path, seen)


@pytest.mark.parametrize(
    "judge",
    [
        "python3 grade/check.py",
        "python3 -B ./grade/check.py calc.py",
        "(cd grade && python3 check.py)",
        "if ! PYTHONPATH=. timeout 5 python3 -m grade.check; then exit 1; fi",
        "PYTHONPATH=. python3 grade/check.py | cat",
    ],
)
async def test_what_a_judge_starts_stays_the_tasks(judge: str, tmp_path: Path) -> None:
    check = "import sys\nsys.exit('a + b' not in open('/workspace/calc.py').read())\n"
    project = {**PROJECT, "grade/check.py": check, "expected.txt": "1"}
    evaluator = CommandCheck(f"$ROLLTAP_SANDBOXED python3 calc.py; {judge} && test $(cat expected.txt) = 1")
    cheats = {"grade/check.py": "", "expected.txt": "1"}
    assert (await reward(evaluator, cheats, tmp_path, project=project))[0] == 0.0
    value, seen = await reward(evaluator, {**cheats, **FIXED, "expected.txt": "2"}, tmp_path, project=project)
    assert value == 1.0, seen
