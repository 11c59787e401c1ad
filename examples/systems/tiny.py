"""Examples on the tiny model: `python tiny.py trace` (appo, tcod, tree_grpo, user_dialogue).

Starts the embedded engine with the model's weights, and the proxy; plays the example's own loop on file tasks whose
commands are run for real; and trains one step of the recipe on the groups that it left. A CPU needs about a minute.
The model solves about a third of the tasks, by chance: what is shown is the loop on a real model's tokens.
"""

import asyncio
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from home import Home, Session
from safetensors.torch import load_file, save_file

from rolltap.demo.learn import PENALISED
from rolltap.demo.stack import Process, Stack
from rolltap.engine.tiny import FOLDER
from rolltap.engine.tiny.tasks import MINI_SWE_AGENT, TinyTask, make_tasks
from rolltap.types import Task

BASH = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "Execute a bash command",
        "parameters": {
            "type": "object",
            "properties": {"command": {"type": "string", "description": "The bash command to execute"}},
            "required": ["command"],
        },
    },
}
"""mini-swe-agent's tool, which the model knows."""

POLICIES: dict[str, dict[str, Any]] = {
    "tiny": {"pin": {"temperature": 1.0, "max_tokens": 48}, "train": list(PENALISED), "top_logprobs": 8},
    "frozen": {"pin": {"temperature": 1.0, "max_tokens": 48}, "trainable": False},
}


@dataclass
class Shell:
    """Runs the commands of a conversation, each task's in a folder of its own."""

    folder: Path

    async def do(self, session: Session, task: TinyTask) -> float:
        """Asks for a task, runs the reply's command and tells what it printed. 1 if the task is done."""
        said = session.history or [{"role": "system", "content": MINI_SWE_AGENT["agent"]["system_template"]}]
        await session.ask([*said, {"role": "user", "content": task.instruction}], tools=[BASH])
        calls = session.history[-1].get("tool_calls") or []
        if len(calls) != 1:
            return 0.0
        try:
            command = str(json.loads(calls[0]["function"]["arguments"])["command"])
        except (KeyError, TypeError, ValueError):
            command = "false"
        done, printed = await asyncio.to_thread(self.run, task, command)
        session.history.append({"role": "tool", "tool_call_id": calls[0]["id"], "content": printed})
        return done

    def run(self, task: TinyTask, command: str) -> tuple[float, str]:
        """Whether `command` does the task in a new folder, and what it printed."""
        folder = Path(tempfile.mkdtemp(dir=self.folder))
        task.setup(folder)
        shell = ["bash", "-c", command]
        end = subprocess.run(
            shell,
            cwd=folder,
            env={"HOME": str(folder), "PATH": os.defpath},
            capture_output=True,
            timeout=10,
            check=False,
        )
        printed = (end.stdout + end.stderr).decode(errors="replace").strip()[:200]
        return task.check(folder), f"exit {end.returncode}" + (f"\n{printed}" if printed else "")

    def shown(self, task: TinyTask, number: int) -> list[dict[str, Any]]:
        """The task as an expert does it."""
        call = {"name": "bash", "arguments": json.dumps({"command": task.fill(task.kind.command)})}
        return [
            {"role": "user", "content": task.instruction},
            {"role": "assistant", "tool_calls": [{"id": f"call-{number}", "type": "function", "function": call}]},
            {"role": "tool", "tool_call_id": f"call-{number}", "content": "exit 0"},
        ]


class Trace:
    """Two tasks in a row; a predictor sees the kind of the first, and whether it was done."""

    def __init__(self, shell: Shell) -> None:
        self.shell = shell
        first, self.second = make_tasks(0, 6, "train"), dict[str, TinyTask]()
        self.first = {each.id: each for each in first}
        for each, second in zip(first, make_tasks(1, 6, "train"), strict=True):
            self.second[each.id] = second
        self.tasks = tuple(Task(each.id, each.instruction, tags=(each.kind.name,)) for each in first)

    async def begin(self, session: Session, task: Task, at: int) -> str:
        return "done" if await self.shell.do(session, self.first[task.id]) else "not done"

    async def end(self, session: Session, one: Any) -> float:
        return (one.found == "done") * await self.shell.do(session, self.second[one.task.id])


class Jobs:
    """Several tasks in one conversation."""

    task = Task("jobs", "Do one task after the other.")

    def __init__(self, shell: Shell, seed: int = 0) -> None:
        self.shell = shell
        self.jobs = make_tasks(seed, 3, "train")
        self.turns = len(self.jobs)

    async def turn(self, session: Session, number: int) -> float:
        return await self.shell.do(session, self.jobs[number])

    async def expert(self, home: Home) -> Sequence[TinyTask]:
        return self.jobs

    async def student(self, session: Session, kept: Sequence[TinyTask]) -> float:
        system = {"role": "system", "content": MINI_SWE_AGENT["agent"]["system_template"]}
        shown = [self.shell.shown(each, number) for number, each in enumerate(kept)]
        session.history = [system, *(message for each in shown for message in each)] if kept else []
        done = [await self.shell.do(session, each) for each in self.jobs[len(kept) :]]
        return sum(done) / len(done)


class Office:
    """A user who has one task after the other done. The model does few of them, so all dialogues are exported."""

    satisfied = 0.0

    def __init__(self, shell: Shell, seed: int) -> None:
        self.shell = shell
        *self.wishes, self.another = make_tasks(seed, 4, "train")

    async def meet(self, home: Home, session: Session, wish: TinyTask) -> float:
        return await self.shell.do(session, wish)


def sharper(folder: Path) -> Path:
    """A teacher: the model with twice its logits, so that what it finds likely is likelier."""
    shutil.copytree(FOLDER, folder)
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"] *= 2
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


Play = Callable[[Home, Shell], Awaitable[Any]]


def module(name: str) -> Any:
    return import_module(name)


async def play_trace(home: Home, shell: Shell) -> Any:
    return await module("trace").main(home, Trace(shell))


async def play_appo(home: Home, shell: Shell) -> Any:
    played = []
    for each in make_tasks(0, 4, "train"):

        async def answer(session: Session, task: TinyTask = each) -> float:
            return await shell.do(session, task)

        played.append(await module("appo").main(home, 4, Task(each.id, each.instruction), answer))
    return played


async def play_tcod(home: Home, shell: Shell) -> Any:
    every = module("tcod").EVERY
    return await module("tcod").main(home, (0, every, 2 * every), Jobs(shell), n=4)


async def play_tree_grpo(home: Home, shell: Shell) -> Any:
    return [await module("tree_grpo").main(home, Jobs(shell, seed), seed) for seed in range(3)]


async def play_user_dialogue(home: Home, shell: Shell) -> Any:
    dialogue = module("user_dialogue")
    return [await dialogue.main(home, shell.folder / f"out-{seed}", Office(shell, seed), n=4) for seed in range(3)]


@dataclass(frozen=True)
class Example:
    """How an example is played, and the recipe that trains on what it leaves. `teaches`: the recipe has a teacher."""

    play: Play
    recipe: str
    teaches: bool = False


EXAMPLES = {
    "trace": Example(play_trace, "arpo"),
    "appo": Example(play_appo, "appo"),
    "tcod": Example(play_tcod, "tcod", teaches=True),
    "tree_grpo": Example(play_tree_grpo, "tree_grpo"),
    "user_dialogue": Example(play_user_dialogue, "grpo"),
}


async def complete_groups(home: Home) -> int:
    return sum(each["status"] == "complete" for each in await home.client.get("/read/groups"))


def train(stack: Stack, example: Example, groups: int) -> dict[str, Any]:
    """One step on all complete groups, and its metrics."""
    arguments = {"policy": "tiny", "model": FOLDER, "out": stack.folder / "run", "steps": 1, "groups": groups}
    arguments |= {"recipe": example.recipe, "lr": 2e-4, "threads": 1}
    options = {"ROLLTAP_TRAINER__OPTIONS__TEACHER": str(sharper(stack.folder / "teacher"))} if example.teaches else {}
    trainer: Process = stack.start_trainer(
        [word for name, value in arguments.items() for word in (f"--{name}", str(value))], options
    )
    trainer.child.wait()
    trainer.check()
    (line,) = (stack.folder / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return json.loads(line)


def main(name: str) -> dict[str, Any]:
    example, folder = EXAMPLES[name], Path(tempfile.mkdtemp(prefix="rolltap-example-"))
    try:
        with Stack(folder, FOLDER, POLICIES) as stack:
            os.chdir(folder)  # `rolltap export` reads the settings there
            os.environ["ROLLTAP_ADMIN_URL"], os.environ["ROLLTAP_ADMIN_KEY"] = stack.admin_url, stack.keys["admin"]
            os.environ["ROLLTAP_TRAINER_URL"], os.environ["ROLLTAP_TRAINER_KEY"] = (
                stack.trainer_url,
                stack.keys["trainer"],
            )
            commands = folder / "commands"
            commands.mkdir()

            async def play() -> tuple[Any, int]:
                async with Home.here() as home:
                    return await example.play(home, Shell(commands)), await complete_groups(home)

            played, groups = asyncio.run(play())
            return {"played": played, "groups": groups, "step": train(stack, example, groups)}
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1]), indent=2, default=str))
