"""What these examples share: groups of rollouts that are played in a few lines, over the public planes of a server.

`Home.here()` finds the server by its environment or by `rolltap-data/keys.toml`, as the commands do.
"""

import asyncio
import json
import os
import sys
import tomllib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from rolltap.contract.admin import FinishRollout, NewReward
from rolltap.contract.trainer import ScoredIds
from rolltap.harnesses.base import Endpoint
from rolltap.harnesses.client import AdminClient, ClaimedRollout
from rolltap.trainer_client.lease.client import AsyncTrainerClient
from rolltap.types import RolloutStatus, Task

ADMIN, TRAINER = "http://127.0.0.1:8712", "http://127.0.0.1:8711"


@dataclass
class Session:
    """One recorded session. `calls` are the ids of its calls so far; `history` is a conversation to go on with."""

    http: aiohttp.ClientSession
    endpoint: Endpoint
    id: str = ""
    calls: list[str] = field(default_factory=list)
    history: list[dict[str, Any]] = field(default_factory=list)

    async def ask(self, messages: Sequence[Mapping[str, Any]] | str, role: str = "", tools: Sequence[Any] = ()) -> str:
        """What the model (or that of a role) replies: its text, or the JSON of its first tool call. What it was asked
        and replied is in `history`."""
        said = [{"role": "user", "content": messages}] if isinstance(messages, str) else list(messages)
        body = {"model": role or self.endpoint.model, "messages": said, **({"tools": list(tools)} if tools else {})}
        headers = {"Authorization": f"Bearer {self.endpoint.key}"}
        async with self.http.post(f"{self.endpoint.v1}/chat/completions", json=body, headers=headers) as reply:
            answer = await reply.json()
        if "choices" not in answer:
            raise RuntimeError(f"the model's server says: {answer}")
        self.calls.append(answer["id"].removeprefix("chatcmpl-"))
        message = answer["choices"][0]["message"]
        self.history = [*said, message]
        if calls := message.get("tool_calls"):
            with suppress(ValueError, TypeError):  # a model may write no JSON there
                function = calls[0]["function"]
                return json.dumps({"tool": function["name"], **json.loads(function["arguments"])})
        return message.get("content") or ""

    async def say(self, text: str) -> str:
        """Goes on with the conversation of the last `ask`."""
        return await self.ask([*self.history, {"role": "user", "content": text}])


Reward = float | Mapping[str, float]
"""Of the rollout, or by scope: `rollout`, `call:<id>`, `role:<name>`."""


@dataclass(frozen=True)
class Outcome:
    rollout: str
    session: str
    reward: float


def kept_key(data: Path, plane: str = "admin") -> str:
    """The key of a plane that the server beside this keeps."""
    return tomllib.loads((data / "keys.toml").read_text(encoding="utf-8"))[plane]


@dataclass
class Home:
    """A server, and what the examples ask of it."""

    client: AdminClient
    http: aiohttp.ClientSession

    @classmethod
    @asynccontextmanager
    async def here(cls) -> AsyncIterator["Home"]:
        key = os.environ.get("ROLLTAP_ADMIN_KEY") or kept_key(Path(os.environ.get("ROLLTAP_DATA", "rolltap-data")))
        url = os.environ.get("ROLLTAP_ADMIN_URL", ADMIN)
        async with AdminClient(url, key) as client, aiohttp.ClientSession() as http:
            yield cls(client, http)

    async def group(
        self,
        task: Task,
        play: Callable[[Session], Awaitable[Reward]],
        *,
        policy: str | Mapping[str, str] = "tiny",
        n: int = 4,
    ) -> list[Outcome]:
        """`n` attempts at a task, each played and paid: a group that a trainer leases."""
        group = await self.client.open_group(task, policy=policy, n=n, tags=task.tags)
        return list(await asyncio.gather(*(self.attempt(rollout, play) for rollout in group.rollout_ids)))

    async def attempt(self, rollout: str, play: Callable[[Session], Awaitable[Reward]]) -> Outcome:
        """One attempt at a rollout, played and paid."""
        opened = await self.client.start_rollout(ClaimedRollout(rollout), ttl=600)
        earned = await play(Session(self.http, opened.endpoint, opened.session_id))
        rewards = earned if isinstance(earned, Mapping) else {"rollout": earned}
        for scope, value in rewards.items():
            await self.client.reward(NewReward(rollout, value, scope))
        await self.client.finish_rollout(rollout, FinishRollout(RolloutStatus.SUCCEEDED, opened.attempt))
        return Outcome(rollout, opened.session_id, rewards.get("rollout", 0.0))

    async def session(self, policy: str = "frozen", **tags: str) -> Session:
        """A recorded session outside all groups: judges, simulators, evaluations. Nothing of it is trained."""
        opened = await self.client.open_session(policy=policy, ttl=600, tags=tags)
        return Session(self.http, opened.endpoint, opened.session_id)

    async def score(self, policy: str, ids: Sequence[int], start: int) -> Sequence[float]:
        """The log-probs of `ids` behind the first `start` by the weights that the policy's engine serves now."""
        data = Path(os.environ.get("ROLLTAP_DATA", "rolltap-data"))
        key = os.environ.get("ROLLTAP_TRAINER_KEY") or kept_key(data, "trainer")
        async with AsyncTrainerClient(os.environ.get("ROLLTAP_TRAINER_URL", TRAINER), key, "example") as trainer:
            return (await trainer.score(policy, [ScoredIds(tuple(ids), start)])).sequences[0].logprobs

    async def export(self, out: Path, form: str, where: str, reader: str = "") -> Path:
        """`rolltap export` of the record that the settings here name, as JSON lines, as `reader` reads tool calls."""
        command = [sys.executable, "-m", "rolltap", "export", str(out), "--format", form]
        command += ["--where", where, "--container", "jsonl", *(["--for", reader] if reader else [])]
        process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
        printed, _ = await process.communicate()
        if process.returncode:
            raise RuntimeError(f"the export ended with {process.returncode}: {printed.decode()}")
        return out


def run(main: Callable[[Home], Awaitable[Any]]) -> None:
    """Runs an example against the server that is here, and prints what it gives."""

    async def here() -> None:
        async with Home.here() as home:
            print(json.dumps(await main(home), indent=2, default=str))

    asyncio.run(here())
