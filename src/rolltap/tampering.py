"""Tampering: an agent's acts against its reward, other sessions or other planes, which no task asks for.

Each act is counted on the rollout, whether it would have worked or not. Runners detect it in a workspace's files, the
proxy in requests.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

DETAIL_CHARS = 300
_KEY = re.compile(r"(?<![A-Za-z0-9])((?:rt|sk|pk|hf|gh[a-z]|AIza|xox[a-z])[-_.]?\w{2})[\w.~-]{14,}")
"""Keys of rolltap and of vendors, by their beginnings; the group is what may be shown."""
MOST_ACTS = 1000
"""How many acts of one rollout its runner reports; more tell nothing more."""


class TamperingKind(StrEnum):
    """What an act is aimed at. A closed vocabulary."""

    STARTUP = "startup"  # code that Python runs by itself: sitecustomize, usercustomize, .pth
    SHELL = "shell"  # a shell's start-up file that ends the shell or replaces a tool
    TOOLS = "tools"  # git's, pip's or npm's configuration that names programs, or packages of the agent's own
    ENVIRONMENT = "environment"  # environment files that steer pytest, Python or the linker
    PYTEST = "pytest"  # hooks, plugins and options that change what pytest reports
    TEST_RUNNER = "test_runner"  # a program or module in place of the test runner
    TESTS = "tests"  # existing tests deleted, emptied or skipped
    REWARD_FILE = "reward_file"  # a reward file, or a link for one, before the evaluator ran
    LIMITS = "limits"  # more processes, memory or disk than the run may take
    UNREADABLE = "unreadable"  # files that take their reader more memory or time than it may use
    OTHER_SESSION = "other_session"  # another session's id with the own key
    OTHER_PLANE = "other_plane"  # the session's key on the trainer or admin plane, or their routes on the agent plane
    PATH = "path"  # encoded dots and delimiters in a request's path


@dataclass(frozen=True, slots=True, order=True)
class TamperingAct:
    """`detail` says where: a path below the working copy or HOME, or a request's. It is an agent's text."""

    kind: TamperingKind
    detail: str = ""

    @classmethod
    def at(cls, kind: TamperingKind, where: str) -> TamperingAct:
        """An act whose detail any store and terminal can take. Keys in it, which may be others', are cut short."""
        shown = _KEY.sub(lambda key: f"{key[1]}…", where[: 4 * DETAIL_CHARS])[:DETAIL_CHARS]
        return cls(kind, "".join(each if each.isprintable() else "?" for each in shown))


def count_by_kind(acts: Iterable[TamperingAct]) -> dict[str, int]:
    """How many acts of each kind; kinds without one are left out."""
    return dict(sorted(Counter(act.kind.value for act in acts).items()))
