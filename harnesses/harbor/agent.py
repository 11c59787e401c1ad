"""A Harbor agent that runs another Harbor agent in a rolltap session and adds token ids and log-probs to its result.

Usage: `harbor run -a rolltap.harnesses.harbor.agent:CapturedAgent --ak agent=codex`, with ROLLTAP_ADMIN_URL and
ROLLTAP_ADMIN_KEY in the environment of Harbor itself.

Each trial has its own session key. The key is created at the agent's setup and becomes invalid when the agent has
ended, so it is never valid while a verifier runs. Only the agent's own commands have it in their environment. Before
Harbor writes the trial's result, `rollout_details` and the token fields of `trajectory.json` (ATIF) are filled from the
record. If the record can't be read, the trial fails.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import asyncio
import os
import stat
from collections.abc import Awaitable, Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from harbor.agents.base import BaseAgent
from harbor.agents.factory import AgentFactory
from harbor.agents.installed.base import BaseInstalledAgent
from harbor.environments.base import BaseEnvironment
from harbor.models.agent.context import AgentContext
from harbor.models.trajectories import Metrics, Step
from harbor.models.trajectories import Trajectory as Atif
from harbor.models.trial.config import AgentConfig
from harbor.models.trial.result import AgentInfo
from harbor.utils.trajectory_utils import format_trajectory_json

from rolltap.errors import ConfigError, RuntimeFailed
from rolltap.harnesses.client import AdminClient, OpenedSession
from rolltap.harnesses.harbor.environment import BubblewrapEnvironment
from rolltap.harnesses.harbor.names import connection_to, harness_of
from rolltap.harnesses.left_files import LeftFiles
from rolltap.reading.plane import ReadPlane
from rolltap.reading.types import CallTurn
from rolltap.reconstructor.exporters.base import trained_spans
from rolltap.types import Segment, Trajectory

ATIF_NAME = "trajectory.json"
LARGEST_ATIF = 16 << 20
"""Size limit in bytes: a larger `trajectory.json` stays without tokens."""

LARGEST_LOGS = 64 << 20
"""Size limit in bytes of all of an agent's logs: Harbor, which reads them whole, gets no larger ones."""

NOTE = "rolltap"
"""The key of our entry in `AgentContext.metadata`: the session's id, and whether its turn cap refused calls."""


class CapturedAgent(BaseAgent):
    """Runs Harbor's agent `agent` in a session.

    `dialect` selects the protocol if the agent speaks several. `policy` is the session's policy if this agent opens the
    session itself. `options` are the inner agent's own arguments.
    """

    def __init__(
        self,
        logs_dir: Path,
        model_name: str | None = None,
        *,
        agent: str,
        dialect: str = "",
        policy: str = "",
        options: dict[str, Any] | None = None,
        **common: Any,
    ) -> None:
        super().__init__(logs_dir, model_name, **common)
        self._name, self._dialect, self._policy = agent, dialect, policy
        self._options = options or {}
        self._inherited = {name: common[name] for name in ("logger", "mcp_servers", "skills_dir") if name in common}
        self._server = ("", "")
        self._open: Callable[[], Awaitable[OpenedSession]] = self._open_own
        self._inner: BaseAgent | None = None
        self._context = AgentContext()
        self.session: OpenedSession | None = None
        self.capped, self.answered = False, True
        self._version = ""
        self._trajectory: Trajectory | None = None
        self._turns: tuple[CallTurn, ...] = ()

    def serve(self, url: str, key: str, open_session: Callable[[], Awaitable[OpenedSession]]) -> None:
        """Makes the trial an attempt of a rollout, which `open_session` starts at the admin plane `url`."""
        self._server, self._open = (url, key), open_session

    @staticmethod
    def name() -> str:
        return "rolltap"

    def version(self) -> str | None:
        return self._version or (self._inner.version() if self._inner else None)

    def to_agent_info(self) -> AgentInfo:
        if self._inner is None:
            return AgentInfo(name=self._name, version="unknown")
        return self._inner.to_agent_info().model_copy(update={"version": self.version() or "unknown"})

    @property
    def extra_env(self) -> dict[str, str]:
        """The variables that the trial adds to the agent's commands, and removes from its logs at the end."""
        return {**self._extra_env, **(self._inner.extra_env if self._inner else {})}

    async def setup(self, environment: BaseEnvironment) -> None:
        """Opens the session, and installs the inner agent if its command is not on PATH. A failure closes it."""
        self.session = await self._open()
        try:
            self._inner = inner = self._create_inner(environment, self.session)
            if await self._command_exists(environment):
                self._version = await _version_of(inner, environment)
            else:
                await inner.setup(environment)
        except BaseException:
            await asyncio.shield(self._close())
            raise

    def _create_inner(self, environment: BaseEnvironment, session: OpenedSession) -> BaseAgent:
        endpoint = session.endpoint
        if isinstance(environment, BubblewrapEnvironment):
            endpoint = environment.inside(endpoint)
        connection = connection_to(endpoint, self._name, self._dialect)
        env = {**self._extra_env, **connection.env}
        config = AgentConfig(name=self._name, model_name=connection.model, env=env, kwargs=self._options)
        agent = AgentFactory.create_agent_from_config(config, self.logs_dir, **self._inherited)
        agent.session_id, agent.context_id = self.session_id, self.context_id
        return agent

    async def _command_exists(self, environment: BaseEnvironment) -> bool:
        """True if the agent's command is on PATH. False if no harness of ours says which command it is."""
        harness = harness_of(self._name)
        if harness is None or harness.package is None:
            return False
        result = await environment.exec(f"command -v {harness.package.executable}")
        return result.return_code == 0

    async def run(self, instruction: str, environment: BaseEnvironment, context: AgentContext) -> None:
        """Runs the inner agent, then closes the session and reads its record, even if the agent failed.

        Raises `RuntimeFailed` before `setup` and on a second run.
        """
        if self._inner is None or self.session is None or self._trajectory is not None:
            raise RuntimeFailed("a trial has one session, for one run of its agent: tasks with steps have several")
        is_sandbox = isinstance(environment, BubblewrapEnvironment)
        try:
            with environment.reaching(self.session.endpoint) if is_sandbox else nullcontext():
                await self._inner.run(instruction, environment, self._context)
        finally:
            await asyncio.shield(self._read_record(self.session.session_id))

    async def _read_record(self, session_id: str) -> None:
        """Closes the session and reads its trajectory and turns."""
        async with self._connected() as client:
            closed = await client.close_session(session_id)
            self.capped, self.answered = closed.capped, closed.answered
            self._trajectory = await client.ask(ReadPlane.trajectory, session_id)
            self._turns = await client.ask(ReadPlane.transcript, session_id)

    def populate_context_post_run(self, context: AgentContext) -> None:
        """Copies the inner agent's context to `context` and adds the session's id and tokens, also to the ATIF file."""
        if self._inner is None or self.session is None or self._trajectory is None:
            return
        left = LeftFiles(self.logs_dir)  # the agent may have written them, and its processes may still run
        if _bytes_below(left) > LARGEST_LOGS:
            self.logger.warning("the agent's logs have over %d MB: Harbor does not read them", LARGEST_LOGS >> 20)
            self._context.model_usage = self._context.model_usage or {}  # or Harbor looks for it in them
        elif self._context.is_empty():
            self._inner.populate_context_post_run(self._context)
        for name in AgentContext.model_fields:
            setattr(context, name, getattr(self._context, name))
        context.rollout_details = rollout_details(self._trajectory.segments)
        note = {"session_id": self.session.session_id, "capped": self.capped}
        context.metadata = {**(context.metadata or {}), NOTE: note}
        if (data := left.read_up_to(ATIF_NAME, LARGEST_ATIF)) is None:
            return
        try:
            atif = with_tokens(data.decode(), self._turns, self._trajectory.segments)
            left.replace(ATIF_NAME, atif.encode())
        except (ValueError, OSError) as error:
            self.logger.warning("%s is not an ATIF trajectory: %s", ATIF_NAME, error)

    async def _open_own(self) -> OpenedSession:
        async with self._connected() as client:
            return await client.open_session(policy=self._policy, tags={"harness": self._name, "harbor": "trial"})

    async def _close(self) -> None:
        if self.session is not None:
            async with self._connected() as client:
                await client.close_session(self.session.session_id)

    def _connected(self) -> AdminClient:
        """A new client, for an `async with` block."""
        url, key = self._server
        url, key = url or os.environ.get("ROLLTAP_ADMIN_URL"), key or os.environ.get("ROLLTAP_ADMIN_KEY")
        if not url or not key:
            raise ConfigError(
                "set ROLLTAP_ADMIN_URL and ROLLTAP_ADMIN_KEY where harbor runs: sessions are opened there"
            )
        return AdminClient(url, key)


def _bytes_below(left: LeftFiles) -> int:
    """The size of the files there, until it is over `LARGEST_LOGS`."""
    size, waiting = 0, [""]
    while waiting and size <= LARGEST_LOGS:
        for path, status in left.entries(waiting.pop()):
            size += status.st_size
            if stat.S_ISDIR(status.st_mode):
                waiting.append(path)
    return size


async def _version_of(agent: BaseAgent, environment: BaseEnvironment) -> str:
    """The version that the agent's command prints; "" if there is none."""
    if not isinstance(agent, BaseInstalledAgent) or not (command := agent.get_version_command()):
        return ""
    result = await environment.exec(command)
    return agent.parse_version(result.stdout or "") if result.return_code == 0 else ""


def rollout_details(segments: Sequence[Segment]) -> list[dict[str, Any]]:
    """Harbor's `RolloutDetail` of each segment with trained tokens, the main agent's first. One list entry per turn."""
    details: list[dict[str, Any]] = []
    for segment in sorted(segments, key=lambda segment: segment.agent != ""):
        spans = trained_spans(segment)
        if spans:
            turns = [_tokens(segment, span.start, span.end) for span in spans]
            details.append({name: [turn[name] for turn in turns] for name in turns[0]})
    return details


def _tokens(segment: Segment, start: int, end: int) -> dict[str, list[Any]]:
    """The tokens of the turn that was sampled from `start` to `end`, by Harbor's names."""
    return {
        "prompt_token_ids": segment.token_ids[:start].tolist(),
        "completion_token_ids": segment.token_ids[start:end].tolist(),
        "logprobs": segment.logprobs[start:end].tolist(),
    }


def with_tokens(text: str, turns: Sequence[CallTurn], segments: Sequence[Segment]) -> str:
    """Adds the token ids and log-probs of trained calls to the agent steps of an ATIF trajectory. Returns its JSON.

    A step belongs to the call with the same tool-call ids or, if neither has tool calls, the same text. Each call
    belongs to one step at most. Other steps stay unchanged. Raises `ValueError` if `text` is not an ATIF trajectory.
    """
    trajectory = Atif.model_validate_json(text)
    spans = {span.call_id: (segment, span) for segment in segments for span in trained_spans(segment)}
    unmatched = [turn for turn in turns if turn.call_id in spans]
    for step in trajectory.steps:
        matches = [turn for turn in unmatched if step.source == "agent" and _comes_from(step, turn)]
        if matches:
            unmatched.remove(matches[0])
            segment, span = spans[matches[0].call_id]
            metrics = step.metrics or Metrics()
            step.metrics = metrics.model_copy(update=_tokens(segment, span.start, span.end))
    return format_trajectory_json(trajectory.to_json_dict())


def _comes_from(step: Step, turn: CallTurn) -> bool:
    """True if the step has the reply's tool-call ids or, without tool calls, its text."""
    parts = turn.reply.parts if turn.reply is not None else ()
    reply_ids = {part.id for part in parts if part.kind == "tool_call"}
    step_ids = {call.tool_call_id for call in step.tool_calls or ()}
    if reply_ids or step_ids:
        return reply_ids == step_ids
    text = "".join(part.text for part in parts if part.kind == "text")
    return isinstance(step.message, str) and step.message.strip() == text.strip()
