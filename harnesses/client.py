"""The admin plane as runners use it (`rolltap.contract.admin`).

Every call is idempotent, by client-made ids or by the attempt's number, so the client repeats it while the server can't
be reached (`rolltap.http_client`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from rolltap.contract.admin import (
    AssignedRollout,
    CapTurns,
    FinishRollout,
    Heartbeat,
    LeaseRollouts,
    NewReward,
    OpenGroup,
    OpenSession,
    PolicyOrRoles,
    StartRollout,
    SubmitTasks,
)
from rolltap.contract.base import values_of
from rolltap.contract.harness_log import HarnessLog
from rolltap.harnesses.base import Endpoint
from rolltap.http_client import AsyncHttpClient, Request
from rolltap.ids import new_id
from rolltap.types import RolloutStatus, Task


@dataclass(frozen=True, slots=True)
class OpenedSession:
    """A fresh session and what reaches it. `attempt` is 0 for a session without a rollout, `turns` without a cap."""

    session_id: str
    endpoint: Endpoint
    attempt: int = 0
    turns: int = 0


@dataclass(frozen=True, slots=True)
class ClaimedRollout:
    """A rollout that this runner may run. `token` is the node's claim on it, "" where its group was opened here."""

    rollout_id: str
    token: str = ""


@dataclass(frozen=True, slots=True)
class LeasedRollout:
    """A rollout that the ledger gave to a node, with its task."""

    claim: ClaimedRollout
    task: Task


@dataclass(frozen=True, slots=True)
class OpenedGroup:
    """A group and its rollouts' ids, in order."""

    id: str
    rollout_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RolloutStanding:
    """What the ledger says of a rollout: its status, and the attempt that it is at."""

    status: RolloutStatus
    attempt: int


class AdminClient(AsyncHttpClient):
    """Calls to the admin plane at `url`, in an `async with` block."""

    async def open_group(
        self, task: Task, *, policy: PolicyOrRoles, n: int, tags: Sequence[str] = (), group_id: str | None = None
    ) -> OpenedGroup:
        """Opens a group of `n` rollouts of `task`; the same `group_id` again returns the same group.

        `RateLimited` while too many groups are outstanding for the trainer.
        """
        reply = await self._post("/groups", OpenGroup(policy, n, task, tags, id=group_id or new_id()))
        return OpenedGroup(reply["id"], tuple(rollout["id"] for rollout in reply["rollouts"]))

    async def cancel_group(self, group_id: str) -> None:
        """Ends every rollout of the group that has not ended; their keys die."""
        await self._post(f"/groups/{group_id}/cancel")

    async def start_rollout(
        self, claim: ClaimedRollout, *, ttl: float, runner: str = "", turns: int = 0
    ) -> OpenedSession:
        """Begins a new attempt: a fresh session with its own key. An older attempt's key dies.

        The session's cap of turns is the lower of `turns` and the policy's own (0: none).
        """
        body = StartRollout(ttl, runner, claim.token, turns)
        reply = await self._post(f"/rollouts/{claim.rollout_id}/start", body)
        return _opened(reply, reply["model"])

    async def finish_rollout(self, rollout_id: str, end: FinishRollout) -> RolloutStanding:
        """The one terminal state; closes the session. Without `end.scoring` the ledger decides.

        After a failure of the infrastructure the rollout may be pending again: a new attempt is to be made.
        """
        return _standing(await self._post(f"/rollouts/{rollout_id}/finish", end))

    async def rollout_standing(self, rollout_id: str) -> RolloutStanding:
        return _standing(await self.get(f"/rollouts/{rollout_id}"))

    async def reward(self, reward: NewReward) -> None:
        """Appends a reward; one for an attempt that is over is refused."""
        await self._post("/rewards", reward if reward.id else replace(reward, id=new_id()))

    async def cap_turns(self, policy: str, turns: int) -> None:
        """Attempts of the policy that begin from now on have at most `turns` turns; 0 lifts the cap."""
        await self._post(f"/policies/{policy}/turns", CapTurns(turns))

    async def open_session(
        self, *, policy: str = "", ttl: float | None = None, tags: Mapping[str, str] | None = None
    ) -> OpenedSession:
        """A session without a rollout, for work by hand and for judges."""
        reply = await self._post("/sessions", OpenSession(policy or None, ttl=ttl, tags=dict(tags or {})))
        return _opened(reply, reply.get("policy") or policy)

    async def submit(self, work: SubmitTasks) -> dict[str, Any]:
        """Queues `work.n` rollouts of each task, for nodes to run; the same `work.id` again changes nothing."""
        return await self._post("/tasks", work if work.id else replace(work, id=new_id()))

    async def submission_groups(self, submission_id: str) -> list[dict[str, Any]]:
        """Its groups with their rollouts and rewards, in the order they were opened."""
        groups: list[dict[str, Any]] = []
        path = f"/tasks/{submission_id}/groups"
        while page := (await self.get(path, after=groups[-1]["id"] if groups else ""))["groups"]:
            groups += page
        return groups

    async def lease_rollouts(
        self, node: str, capacity: int, *, ttl: float, wait: float, submission: str | None = None
    ) -> list[LeasedRollout]:
        """Up to `capacity` rollouts for `node` to run within `ttl` seconds of its last heartbeat.

        Waits up to `wait` seconds for the first. With `submission` only rollouts of that one are taken.
        """
        body = LeaseRollouts(capacity, ttl, wait, submission)
        reply = await self.send(Request("POST", f"/nodes/{node}/lease", values_of(body), wait=wait))
        rollouts = msgspec.convert(reply["rollouts"], list[AssignedRollout])
        return [LeasedRollout(ClaimedRollout(rollout.rollout_id, rollout.token), rollout.task) for rollout in rollouts]

    async def has_work(self) -> bool:
        """True while unclaimed work exists, including work blocked by backpressure."""
        return (await self.get("/nodes/waiting"))["waiting"]

    async def heartbeat(self, node: str, tokens: Sequence[str], *, ttl: float) -> set[str]:
        """Extends the claims of `tokens` by `ttl` seconds; returns the rollouts that are still theirs."""
        return set((await self._post(f"/nodes/{node}/heartbeat", Heartbeat(ttl, tokens)))["rollouts"])

    async def release(self, node: str) -> None:
        """Gives back everything the node holds, for others to run at once."""
        await self._post(f"/nodes/{node}/release")

    async def close_session(self, session_id: str) -> bool:
        """Later calls are refused. Whether calls were refused before for the session's cap of turns."""
        return (await self._post(f"/sessions/{session_id}/close")).get("capped", False)

    async def check_log(self, session_id: str, log: HarnessLog) -> dict[str, Any]:
        """Has the harness's own log compared with the closed session: its verdict and a text. The first one stands."""
        return await self._post(f"/sessions/{session_id}/log", log)

    async def answer(self, session_id: str) -> str:
        """The last text that the main agent's model said in the session, as it is on record."""
        turns = await self.get(f"/read/sessions/{session_id}/transcript")
        replies = [turn["reply"] for turn in turns if turn["kind"] == "main" and not turn["agent"] and turn["reply"]]
        texts = ["".join(part["text"] for part in reply["parts"] if part["kind"] == "text") for reply in replies]
        return next((text for text in reversed(texts) if text.strip()), "")

    async def get(self, path: str, **query: str) -> Any:
        """Any read of the admin plane: `get("/sessions/ID")`."""
        return await self.send(Request("GET", path, query=query))

    async def _post(self, path: str, body: Any = None) -> Any:
        return await self.send(Request("POST", path, {} if body is None else values_of(body)))


def _standing(rollout: Mapping[str, Any]) -> RolloutStanding:
    return RolloutStanding(RolloutStatus(rollout["status"]), rollout["attempt"])


def _opened(reply: Mapping[str, Any], model: str) -> OpenedSession:
    base_url = reply["base_url"].rstrip("/")
    return OpenedSession(
        session_id=reply["session_id"],
        endpoint=Endpoint(base_url.removesuffix("/v1"), reply["key"], model, roles=tuple(reply.get("roles", ()))),
        attempt=reply.get("attempt", 0),
        turns=reply.get("turns", 0),
    )
