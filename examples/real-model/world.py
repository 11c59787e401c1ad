"""Tasks for a small pretrained model: 16 kinds, each in two wordings; and a teacher that knows the commands.

    python world.py MODEL PORT      serves the teacher, as an engine of that model would be

The agent is mini-swe-agent in its text mode, as the model knows no tools; the second one is the OpenAI Agents SDK,
whose shell is a native tool, for a model with the template `tools.jinja`. The teacher reads the instruction in the
prompt. It errs in `TEACHER_ERRS` of the tasks (an environment variable, 0 by default): then it gives the command of
another kind, always the same one for an instruction.
"""

from __future__ import annotations

import json
import os
import random
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rolltap.demo.learn import LIMITS, AgentTasks
from rolltap.engine.scripted import Prompt, ScriptedEngine, ScriptedReply
from rolltap.engine.scripted.writing import ScriptedReplyWriter, ScriptTokenizer
from rolltap.engine.tiny.tasks import KINDS, MINI_SWE_AGENT, SUBMIT, TaskKind, Tree
from rolltap.harnesses.agents.install import install
from rolltap.harnesses.agents.mini_swe_agent import MiniSweAgentInProcess
from rolltap.harnesses.agents.openai_agents import OpenAIAgents
from rolltap.harnesses.runtimes.process import ProcessRuntime

OTHER_WORDINGS = {
    "copy": "Make a copy of {a} that is named {b}.",
    "rename": "Give {a} the name {b}.",
    "link": "Make {b} a symbolic link to {a}.",
    "sort": "Write the lines of {a} in alphabetical order to {b}.",
    "count": "Write the number of lines of {a} to {b}.",
    "create": "Make an empty file {a}.",
    "delete": "Remove {a}.",
    "folder": "Create a directory named {a}.",
}


def over(change: Callable[[str], str]) -> Callable[[str, str, str], Tree]:
    """The folder in which {b} holds what `change` makes of {a}."""
    return lambda a, b, text: {a: text, b: change(text)}


def only(a: str, b: str, text: str) -> Tree:
    return {a: text}


def beside(a: str, b: str, text: str) -> Tree:
    return {a: text, b: text}


MORE = (
    (
        "append",
        ("Append {a} to {b}.", "Add the content of {a} to the end of {b}."),
        "cat {a} >> {b}",
        beside,
        over(lambda text: text * 2),
    ),
    (
        "first",
        ("Write the first line of {a} to {b}.", "Put the top line of {a} into {b}."),
        "head -n 1 {a} > {b}",
        only,
        over(lambda text: text.splitlines(keepends=True)[0]),
    ),
    (
        "last",
        ("Write the last line of {a} to {b}.", "Put the bottom line of {a} into {b}."),
        "tail -n 1 {a} > {b}",
        only,
        over(lambda text: text.splitlines(keepends=True)[-1]),
    ),
    (
        "reverse",
        ("Write the lines of {a} in reverse order to {b}.", "Put the lines of {a} backwards into {b}."),
        "tac {a} > {b}",
        only,
        over(lambda text: "".join(text.splitlines(keepends=True)[::-1])),
    ),
    (
        "grep",
        ("Write the lines of {a} that contain an o to {b}.", "Find the lines of {a} with an o and put them into {b}."),
        "grep o {a} > {b}",
        only,
        over(lambda text: "".join(line for line in text.splitlines(keepends=True) if "o" in line)),
    ),
    (
        "upper",
        ("Write {a} in upper case to {b}.", "Put {a} in capital letters into {b}."),
        "tr a-z A-Z < {a} > {b}",
        only,
        over(str.upper),
    ),
    (
        "replace",
        ("Replace each e by an i in {a}.", "Change every e of {a} to an i."),
        "sed -i s/e/i/g {a}",
        beside,
        lambda a, b, text: {a: text.replace("e", "i"), b: text},
    ),
    (
        "write",
        ("Write the word hello to {a}.", "Make {a} hold the word hello."),
        "echo hello > {a}",
        lambda a, b, text: {b: text},
        lambda a, b, text: {a: "hello\n", b: text},
    ),
)

KINDS_OF_16: tuple[TaskKind, ...] = (
    *KINDS,
    *(replace(kind, instruction=OTHER_WORDINGS[kind.name]) for kind in KINDS),
    *(
        TaskKind(name, wording, command, before, after, 1 if name in ("replace", "write") else 2)
        for name, wordings, command, before, after in MORE
        for wording in wordings
    ),
)

AGENT: dict[str, dict[str, Any]] = {
    "agent": {
        **MINI_SWE_AGENT["agent"],
        "system_template": f"Reply with one bash command in a ```bash block. When all is done, reply with: {SUBMIT}",
    },
    "model": {
        **MINI_SWE_AGENT["model"],
        "model_class": "litellm_textbased",
        "action_regex": r"```bash\s*\n(.*?)\n```",
        "format_error_template": "Reply with one ```bash block.",
    },
    "environment": MINI_SWE_AGENT["environment"],
}

TASKS = AgentTasks(KINDS_OF_16, MiniSweAgentInProcess(AGENT))


def tool_tasks(folder: Path) -> AgentTasks:
    """The same tasks for the second agent, a process in `folder`; installs it in rolltap's cache."""
    agent = OpenAIAgents()
    runtime = ProcessRuntime(folder, install(agent.package).bins)
    return AgentTasks(KINDS_OF_16, agent, runtime, replace(LIMITS, agent_s=240, turns=4))


def block(command: str) -> str:
    return f"```bash\n{command}\n```"


def tool_call(command: str) -> str:
    return f"<tool_call>\n{json.dumps({'name': 'shell', 'arguments': {'command': command}})}\n</tool_call>"


def reply(prompt: Prompt) -> str:
    """The task's command, then the submission."""
    has_tools = "<tools>" in prompt.text
    if prompt.turn:
        return "Done." if has_tools else block(SUBMIT)
    command = command_for(prompt.text)
    return tool_call(command) if has_tools else block(command)


def command_for(text: str) -> str:
    for kind in KINDS_OF_16:
        pattern = re.escape(kind.instruction).replace(r"\{a\}", r"(?P<a>[\w.]+?)").replace(r"\{b\}", r"(?P<b>[\w.]+?)")
        if (match := re.search(rf"(?:^|\n){pattern}(?:<|\n|$)", text)) is not None:
            names = match.groupdict()
            chance = random.Random(match[0])
            if chance.random() < float(os.environ.get("TEACHER_ERRS", "0")):
                kind = chance.choice([other for other in KINDS_OF_16 if other.arity == kind.arity])
            return kind.command.format(**{"b": "", **names})
    return "ls"


class TextWriter(ScriptedReplyWriter):
    """Replies as their text, and the token that ends a turn."""

    def __init__(self, tokenizer: ScriptTokenizer) -> None:
        self.tokenizer = tokenizer
        assert tokenizer.eos_token_id is not None
        self.stop_ids = frozenset({tokenizer.eos_token_id})

    def write(self, reply: ScriptedReply, prompt: Sequence[int]) -> list[int]:
        return [*self.tokenizer.encode(reply.say), *self.stop_ids]


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    writer = TextWriter(ScriptTokenizer(folder))
    ScriptedEngine(reply, folder, family=writer).run("127.0.0.1", int(sys.argv[2]), "")
