"""The `llm_judge` evaluator: a model reads the task and the agent's changes, and returns a score.

It calls the model through the proxy, in a session of its own without a rollout. The session's tag `kind` is `judge`: by
it the proxy records each of its calls as `CallKind.JUDGE`, which is never trained and in no dataset.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass

import aiohttp

from rolltap.errors import EvaluatorFailed
from rolltap.harnesses.base import Evidence, Score, Verdict
from rolltap.harnesses.changes import Change, ChangeKind, changes
from rolltap.harnesses.client import AdminClient, OpenedSession
from rolltap.harnesses.evaluators.base import EvaluatorTable
from rolltap.harnesses.output import storable
from rolltap.harnesses.refusals import choice

SHOWN_BYTES = 20_000
PROMPT = """\
Judge how well an agent did a task. Reply with one short paragraph, then a last line `SCORE: x`, x from 0 to 10.

# Task
{instruction}

# What the agent said at the end
{output}

# Files that it changed
{files}

# Criteria
{criteria}
"""
CRITERIA = "The task is done completely and correctly, and nothing else was changed."
SCORE = re.compile(r"^SCORE:\s*(\d+(?:\.\d+)?)\s*$", re.MULTILINE)


class LlmJudgeTable(EvaluatorTable, tag="llm_judge", frozen=True):
    """The model of `policy` gives a score by `criteria`."""

    example = '{"kind": "llm_judge", "policy": "judge"}'

    policy: str
    criteria: str = CRITERIA

    def check(self, policies: Collection[str]) -> None:
        choice("policy", self.policy, dict.fromkeys(policies))

    def build(self, client: AdminClient) -> LlmJudge:
        return LlmJudge(client, self.policy, self.criteria)


@dataclass(frozen=True, slots=True)
class LlmJudge:
    """Asks the model of `policy`. The reward is its score divided by 10."""

    client: AdminClient
    policy: str
    criteria: str = CRITERIA
    name: str = "llm_judge"
    needs_clean_workspace: bool = True
    reward_files: tuple[str, ...] = ()

    async def evaluate(self, evidence: Evidence) -> Verdict:
        clean = await evidence.clean_workspace()
        agent_changes = changes(clean.folder, evidence.workspace.folder)
        prompt = PROMPT.format(
            instruction=evidence.task.instruction,
            output=evidence.exit.output[-4000:],
            files=_changed_files(evidence, agent_changes),
            criteria=self.criteria,
        )
        tags = {"kind": "judge", "rollout": evidence.rollout_id}
        session = await self.client.open_session(policy=self.policy, ttl=evidence.limits.evaluate_s, tags=tags)
        try:
            answer = await self._ask(session, storable(prompt), evidence.limits.evaluate_s)
        finally:
            await self.client.close_session(session.session_id)
        evidence.seen.add(f"the judge's answer in session {session.session_id}", answer)
        scores = SCORE.findall(answer)
        if not scores or float(scores[-1]) > 10:
            raise EvaluatorFailed(f"the judge gave no score from 0 to 10: {answer.strip()[-200:]!r}")
        return Verdict((Score(float(scores[-1]) / 10),), {"judge_session": session.session_id, "answer": answer})

    async def _ask(self, session: OpenedSession, prompt: str, timeout: float) -> str:
        body = {
            "model": session.endpoint.model,
            "messages": [{"role": "user", "content": prompt}],
            "temperature": 0,
        }
        headers = {"Authorization": f"Bearer {session.endpoint.key}"}
        url = f"{session.endpoint.v1}/chat/completions"
        try:
            async with (
                aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=timeout)) as http,
                http.post(url, json=body, headers=headers) as reply,
            ):
                answer = await reply.json(content_type=None)
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            raise EvaluatorFailed(f"the judge's call failed: {error or type(error).__name__}") from error
        if reply.status != 200:
            raise EvaluatorFailed(f"the judge's call got {reply.status}: {answer}")
        return answer["choices"][0]["message"].get("content") or ""


def _changed_files(evidence: Evidence, agent_changes: list[Change]) -> str:
    """The changed files with their text, up to `SHOWN_BYTES` in all."""
    parts, budget = [], SHOWN_BYTES
    for change in agent_changes:
        path = evidence.workspace.folder / change.path
        text = ""
        if change.kind is not ChangeKind.DELETED and not path.is_symlink() and budget > 0:
            with path.open("rb") as file:
                content = file.read(budget)
            budget -= len(content)
            text = content.decode("utf-8", errors="replace")
        parts.append(f"## {change.path} ({change.kind.value})\n{text}")
    return "\n".join(parts) or "none"
