"""Small file-system tasks for the tiny model, and the short mini-swe-agent configuration they run under.

A task is a folder to start from, an instruction, and the folder that must be there at the end: the reward compares
what is really on the disk. Held-out tasks use file names that no training task uses. Standard library only.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

Split = Literal["train", "held_out", "all"]
Tree = Mapping[str, str]
"""A folder: name to content. A name that ends in `/` is an empty folder; a content `-> X` is a link to X."""

SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"

MINI_SWE_AGENT: dict[str, dict[str, Any]] = {
    "agent": {
        "system_template": "Do the task in bash, then finish with: " + SUBMIT,
        "instance_template": "{{task}}",
        "step_limit": 4,
        "cost_limit": 0.0,
        "max_consecutive_format_errors": 2,
    },
    "model": {
        "observation_template": (
            "exit {{output.returncode}}{% if output.output %}\n{{output.output | trim}}{% endif %}"
            "{% if output.exception_info %}\n{{output.exception_info}}{% endif %}"
        ),
        "format_error_template": "Call bash.",
        "cost_tracking": "ignore_errors",
        "model_kwargs": {"temperature": 1.0, "max_tokens": 48},
    },
    "environment": {"timeout": 10},
}
"""Keyword arguments of mini-swe-agent's `DefaultAgent`, `LitellmModel` and `LocalEnvironment`."""

_TRAIN_WORDS = """
apple pear plum grape lemon melon peach cherry mango olive onion carrot potato tomato pepper pumpkin
river lake stone cloud storm island forest desert tiger lion horse eagle whale rabbit spider turtle
"""
_HELD_OUT_WORDS = "banana garlic valley glacier falcon monkey dolphin beetle"
TRAIN_NAMES = tuple(_TRAIN_WORDS.split())
HELD_OUT_NAMES = tuple(_HELD_OUT_WORDS.split())
NAMES: dict[Split, tuple[str, ...]] = {
    "train": TRAIN_NAMES,
    "held_out": HELD_OUT_NAMES,
    "all": TRAIN_NAMES + HELD_OUT_NAMES,
}


@dataclass(frozen=True, slots=True)
class TaskKind:
    """What can be asked: `instruction` and the `command` that does it, over a first name {a} and a second {b}.

    `before` and `after` make the folder from (a, b, text), `text` being three lines that are not sorted. Kinds of one
    `arity` take the same arguments, so that their commands can be mistaken for each other.
    """

    name: str
    instruction: str
    command: str
    before: Callable[[str, str, str], Tree]
    after: Callable[[str, str, str], Tree]
    arity: int = 2
    suffix: str = ".txt"  # of the first name


def _sorted(text: str) -> str:
    return "".join(sorted(text.splitlines(keepends=True)))


KINDS: tuple[TaskKind, ...] = (
    TaskKind("copy", "Copy {a} to {b}.", "cp {a} {b}", lambda a, b, t: {a: t}, lambda a, b, t: {a: t, b: t}),
    TaskKind("rename", "Rename {a} to {b}.", "mv {a} {b}", lambda a, b, t: {a: t}, lambda a, b, t: {b: t}),
    TaskKind("link", "Link {a} as {b}.", "ln -s {a} {b}", lambda a, b, t: {a: t}, lambda a, b, t: {a: t, b: f"-> {a}"}),
    TaskKind(
        "sort", "Sort {a} into {b}.", "sort {a} > {b}", lambda a, b, t: {a: t}, lambda a, b, t: {a: t, b: _sorted(t)}
    ),
    TaskKind(
        "count",
        "Count the lines of {a} into {b}.",
        "wc -l < {a} > {b}",
        lambda a, b, t: {a: t},
        lambda a, b, t: {a: t, b: "3\n"},
    ),
    TaskKind("create", "Create the file {a}.", "touch {a}", lambda a, b, t: {b: t}, lambda a, b, t: {a: "", b: t}, 1),
    TaskKind("delete", "Delete {a}.", "rm {a}", lambda a, b, t: {a: t, b: t}, lambda a, b, t: {b: t}, 1),
    TaskKind(
        "folder",
        "Make the folder {a}.",
        "mkdir {a}",
        lambda a, b, t: {b: t},
        lambda a, b, t: {f"{a}/": "", b: t},
        1,
        "",
    ),
)


@dataclass(frozen=True, slots=True)
class TinyTask:
    """One task: a kind with its names filled in."""

    id: str
    kind: TaskKind
    first: str
    second: str
    before: Tree
    after: Tree

    @property
    def instruction(self) -> str:
        return self.fill(self.kind.instruction)

    def fill(self, template: str) -> str:
        return template.format(a=self.first, b=self.second)

    def setup(self, folder: Path) -> None:
        """Fills the empty `folder` with what the task starts from."""
        for name, content in self.before.items():
            (folder / name).write_text(content)

    def check(self, folder: Path) -> float:
        """1.0 if `folder` holds exactly what it should, else 0.0."""
        return float(snapshot(folder) == dict(self.after))


def snapshot(folder: Path) -> dict[str, str]:
    """The tree of `folder`, one level deep."""
    tree = {}
    for path in folder.iterdir():
        if path.is_symlink():
            tree[path.name] = f"-> {path.readlink()}"
        elif path.is_dir():
            tree[f"{path.name}/"] = " ".join(sorted(child.name for child in path.iterdir()))
        else:
            tree[path.name] = path.read_text(errors="replace")
    return tree


def make_tasks(seed: int, n: int, split: Split, kinds: Sequence[TaskKind] = KINDS) -> list[TinyTask]:
    """`n` tasks in a seeded order that uses every kind before it repeats one."""
    rng = random.Random(f"{split}:{seed}")
    tasks: list[TinyTask] = []
    while len(tasks) < n:
        for kind in rng.sample(kinds, len(kinds)):
            tasks.append(make_task(kind, f"{split}-{seed}-{len(tasks)}", rng, split))
    return tasks[:n]


def make_task(kind: TaskKind, task_id: str, rng: random.Random, split: Split) -> TinyTask:
    """One task of `kind` with names drawn from the split's."""
    names = NAMES[split]
    first, second = rng.sample(names, 2)
    a, b = first + kind.suffix, f"{second}.txt"
    low, middle, high = sorted(rng.sample(TRAIN_NAMES, 3))
    order = rng.choice(((middle, low, high), (low, high, middle), (high, low, middle), (middle, high, low)))
    text = "".join(f"{word}\n" for word in order)
    return TinyTask(
        id=task_id,
        kind=kind,
        first=a,
        second=b,
        before=kind.before(a, b, text),
        after=kind.after(a, b, text),
    )
