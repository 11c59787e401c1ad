"""Test runners that a judge starts by the helper: the code that they test could make up what they say."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Sequence
from contextlib import suppress
from itertools import pairwise

from rolltap.harnesses.evaluators.shell_words import AS_WRITTEN, SHELL, without_what_is_before

RUNNERS = frozenset(
    (
        *("pytest", "py.test", "unittest", "doctest", "nose2", "nosetests", "tox", "nox", "stestr", "trial", "ctest"),
        *("jest", "vitest", "mocha", "ava", "jasmine", "karma", "tap", "rspec", "phpunit", "pest", "prove", "bats"),
        *("busted", "cypress", "playwright", "cucumber", "behave", "robot", "runtests.py", "gotestsum"),
    )
)
BUILDERS = re.compile(
    r"npm|pnpm|yarn|bun|deno|cargo|go|g?make|ninja|meson|mvnw?|gradlew?|dotnet|mix|swift|sbt|lein|cabal|stack|zig|dart"
    r"|flutter|rake|just|bazel|manage\.py|setup\.py|hatch|composer|artisan"
)
OF_BUILDERS = re.compile(r"--test|(unit|integration)?[-_:]?(tests?|check|nextest|verify|spec)([-_:].*)?")
"""What they take to run tests: `make check`, `npm run test:unit`, `node --test`."""
TAKES_A_VALUE = re.compile(r"-[CfopI]|--(prefix|manifest-path|bin|package|directory|file|dir|cwd|filter|workspace)")
PASSES_ON = re.compile(
    r"npx|pnpx|bunx|uvx|uv|poetry|pipenv|pdm|rye|coverage|bundle|xvfb-run|stdbuf|exec|run|dlx|(python|pypy)[\d.]*|ruby|php"
)
"""Programs, and words after them, behind which another program is named."""
PYTHON = re.compile(r"(python|pypy)[\d.]*")


def runner_in(words: Sequence[str]) -> str:
    """The test runner that a command starts, as its text says it; "" if it starts none."""
    words = without_what_is_before(words)
    if SHELL.fullmatch(words[0]):
        for option, text in pairwise(words):
            if re.fullmatch(r"-\w*c", option):
                return next(filter(None, map(_of_text, re.split(r"[;&|()\n]+", text.translate(AS_WRITTEN)))), "")
    rest = list(words)
    while rest:
        name = os.path.basename(rest[0])
        if name in RUNNERS:
            return name
        if name == "node":
            return "node --test" if "--test" in rest else ""
        if BUILDERS.fullmatch(name):
            targets = (each for one, each in pairwise(rest) if not TAKES_A_VALUE.fullmatch(one))
            found = next(filter(OF_BUILDERS.fullmatch, targets), "")
            return f"{name} {found}" if found else ""
        if not PASSES_ON.fullmatch(name):
            return ""
        rest.pop(0)
        while rest and rest[0].startswith("-"):
            if rest.pop(0) in ("-c", "-e", "-r") and (PYTHON.fullmatch(name) or name in ("ruby", "php")):
                return ""
    return ""


def _of_text(text: str) -> str:
    with suppress(ValueError):
        if words := shlex.split(text):
            return runner_in(words)
    return ""
