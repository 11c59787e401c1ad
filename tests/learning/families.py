"""Families of tasks that the tiny model can learn, each a few calls of an agent whose commands run for real.

`files` is the demo's: one job, several turns, a submission. `chain` gives two jobs in one conversation, one after the
other. `pair` gives two agents, `maker` and `keeper`, a job each: a conversation each, one reward for both. Every call
is paid by what it did (`call:<id>`), every agent of `pair` by its job (`role:<name>`), the rollout by the share of its
jobs that were done.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from rolltap.engine.tiny.make import tool_call
from rolltap.engine.tiny.tasks import MINI_SWE_AGENT, SUBMIT, Split, TinyTask, make_tasks
from rolltap.harnesses.base import Endpoint

COMMAND = {
    "type": "object",
    "properties": {"command": {"type": "string", "description": "The bash command to execute"}},
}
BASH = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "Execute a bash command",
        "parameters": {**COMMAND, "required": ["command"]},
    },
}
"""mini-swe-agent's tool, which the tiny model knows."""
MAX_TURNS = 4
SHELL_S = 10


@dataclass(frozen=True, slots=True)
class Job:
    """One instruction, done in a folder of its own by the agent of `role` ("": the only one)."""

    task: TinyTask
    role: str = ""


@dataclass(frozen=True, slots=True)
class Play:
    """What one group of rollouts is given."""

    id: str
    jobs: tuple[Job, ...]
    submits: bool = False
    """Whether the agent goes on until it submits."""

    @property
    def hint(self) -> str:
        """The jobs, done right: what a teacher sees before the conversation."""
        return "".join(
            f"<|im_start|>user\n{job.task.instruction}<|im_end|>\n<|im_start|>assistant\n"
            f"{tool_call(job.task.fill(job.task.kind.command))}<|im_end|>\n"
            for job in self.jobs
        )


@dataclass(slots=True)
class Scores:
    """What a rollout earned: the share of jobs done, and the rewards of its calls and roles by scope."""

    rollout: float = 0.0
    turns: list[tuple[str, float]] = field(default_factory=list)
    roles: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Family:
    name: str
    jobs: int
    roles: tuple[str, ...] = ()
    submits: bool = False

    def plays(self, seed: int, count: int, split: Split) -> list[Play]:
        tasks = make_tasks(seed, count * self.jobs, split)
        parts = [tasks[start :: self.jobs] for start in range(self.jobs)]
        roles = self.roles or ("",) * self.jobs
        return [Play(own[0].id, tuple(map(Job, own, roles)), self.submits) for own in zip(*parts, strict=True)]


FAMILIES = {
    "files": Family("files", 1, submits=True),
    "chain": Family("chain", 2),
    "pair": Family("pair", 2, roles=("maker", "keeper")),
}


@dataclass(slots=True)
class Agent:
    """A conversation a role, over a session's endpoint."""

    http: aiohttp.ClientSession
    endpoint: Endpoint
    conversations: dict[str, list[dict[str, Any]]] = field(default_factory=dict)

    async def command(self, role: str, said: Mapping[str, Any]) -> tuple[str, str]:
        """The command that the model answers `said` with ("" if it calls no tool rightly), and the call's id."""
        system = {"role": "system", "content": MINI_SWE_AGENT["agent"]["system_template"]}
        messages = self.conversations.setdefault(role, [system])
        messages.append(dict(said))
        model = role if role in self.endpoint.roles else self.endpoint.model
        body = {"model": model, "messages": messages, "tools": [BASH], "max_tokens": 48}
        headers = {"Authorization": f"Bearer {self.endpoint.key}"}
        async with self.http.post(f"{self.endpoint.v1}/chat/completions", json=body, headers=headers) as reply:
            reply.raise_for_status()
            answer = await reply.json()
        message = answer["choices"][0]["message"]
        messages.append(message)
        try:
            (call,) = message["tool_calls"]
            command = str(json.loads(call["function"]["arguments"])["command"])
        except (KeyError, TypeError, ValueError):
            command = ""
        return command, answer["id"].removeprefix("chatcmpl-")

    def answer(self, role: str, text: str) -> dict[str, Any]:
        """What the shell said, as the answer to the role's last call."""
        (call,) = self.conversations[role][-1]["tool_calls"]
        return {"role": "tool", "tool_call_id": call["id"], "content": text}


async def play(agent: Agent, given: Play, folder: Path) -> Scores:
    """One rollout in the empty `folder`. A reply that calls no tool, or submits, ends its job."""
    scores = Scores()
    for number, job in enumerate(given.jobs):
        own = folder / str(number)
        own.mkdir()
        job.task.setup(own)
        done = await _job(agent, job, own, scores, MAX_TURNS if given.submits else 1)
        scores.rollout += done / len(given.jobs)
        if job.role:
            scores.roles[job.role] = done
    return scores


async def _job(agent: Agent, job: Job, folder: Path, scores: Scores, turns: int) -> float:
    said: dict[str, Any] = {"role": "user", "content": job.task.instruction}
    done = 0.0
    for turn in range(turns):
        command, call = await agent.command(job.role, said)
        if not command or command == SUBMIT:
            scores.turns.append((call, 0.0))
            break
        said = agent.answer(job.role, await _shell(command, folder))
        before, done = done, job.task.check(folder)
        scores.turns.append((call, done - before))
        if turn + 1 == turns:
            agent.conversations[job.role].append(said)
    return done


async def _shell(command: str, folder: Path) -> str:
    """What mini-swe-agent's template shows of the command."""
    process = await asyncio.create_subprocess_exec(
        "bash", "-c", command, cwd=folder, env={"PATH": "/usr/bin:/bin", "HOME": str(folder)},
        stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    try:
        output, _ = await asyncio.wait_for(process.communicate(), SHELL_S)
    except TimeoutError:
        process.kill()
        output, _ = await process.communicate()
    text = output.decode(errors="replace").strip()
    return f"exit {process.returncode}" + (f"\n{text}" if text else "")
