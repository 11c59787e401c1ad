"""The admin plane as the runner uses it, over HTTP (docs/architecture.md, "HTTP API").

An error of the server comes back as the `RolltapError` of its code. Transport failures and 503 are retried with
back-off: every call made here is idempotent, by client-made ids or by the attempt's number.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import aiohttp
import msgspec

from rolltap.errors import ConfigError, RateLimited, RolltapError, StoreUnavailable
from rolltap.harnesses.base import Endpoint
from rolltap.ids import new_id
from rolltap.types import Cause, RolloutStatus, Scoring, Task

Casting = str | Mapping[str, str]
"""A policy, or a map of roles to policies."""

ATTEMPTS = 6
FIRST_WAIT_S = 0.2


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

    @property
    def proof(self) -> dict[str, str]:
        return {"node_token": self.token} if self.token else {}


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


class AdminClient:
    """An async context manager around one connection pool. `url` is the admin plane's."""

    def __init__(self, url: str, key: str) -> None:
        self.url = url.rstrip("/")
        self._headers = {"Authorization": f"Bearer {key}"}
        self._http: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        self._http = aiohttp.ClientSession(headers=self._headers, timeout=aiohttp.ClientTimeout(total=60))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._http is not None:
            await self._http.close()

    async def open_group(
        self, task: Task, *, policy: Casting, n: int, tags: Sequence[str] = (), group_id: str | None = None
    ) -> OpenedGroup:
        """Opens a group of `n` rollouts of `task`; the same `group_id` again returns the same group.

        `RateLimited` while too many groups are outstanding for the trainer.
        """
        body = {
            "policy": _casting(policy),
            "n": n,
            "task": _task_body(task),
            "tags": list(tags),
            "id": group_id or new_id(),
        }
        reply = await self._call("POST", "/groups", body)
        return OpenedGroup(reply["id"], tuple(rollout["id"] for rollout in reply["rollouts"]))

    async def cancel_group(self, group_id: str) -> None:
        """Ends every rollout of the group that has not ended; their keys die."""
        await self._call("POST", f"/groups/{group_id}/cancel", {})

    async def start_rollout(
        self, claim: ClaimedRollout, *, ttl: float, runner: str = "", turns: int = 0
    ) -> OpenedSession:
        """Begins a new attempt: a fresh session with its own key. An older attempt's key dies.

        The session's cap of turns is the lower of `turns` and the policy's own (0: none).
        """
        body = {"ttl": ttl, "runner": runner, "turns": turns, **claim.proof}
        reply = await self._call("POST", f"/rollouts/{claim.rollout_id}/start", body)
        return _opened(reply, reply["model"])

    async def finish_rollout(
        self,
        claim: ClaimedRollout,
        status: RolloutStatus,
        *,
        attempt: int,
        reason: str = "",
        cause: Cause | None = None,
        scoring: Scoring | None = None,
        evaluation: str = "",
    ) -> None:
        """The one terminal state; closes the session. Attempt 0 ends a rollout that was never started.

        Without `scoring` the ledger decides by the status and its cause. `evaluation` is what the evaluator saw.
        """
        body: dict[str, Any] = {"status": status.value, "reason": reason, "attempt": attempt, **claim.proof}
        if evaluation:
            body["evaluation"] = evaluation
        if scoring is not None:
            body["scoring"] = scoring.value
        if cause is not None:
            body["cause"] = cause.value
        await self._call("POST", f"/rollouts/{claim.rollout_id}/finish", body)

    async def reward(
        self,
        rollout_id: str,
        value: float,
        *,
        scope: str = "rollout",
        source: str = "",
        detail: Mapping[str, Any] | None = None,
        attempt: int | None = None,
        reward_id: str | None = None,
    ) -> None:
        """Appends a reward; the same `reward_id` again changes nothing. One for an attempt that is over is refused."""
        body = {
            "rollout_id": rollout_id,
            "value": value,
            "scope": scope,
            "source": source,
            "detail": dict(detail or {}),
            "attempt": attempt,
            "id": reward_id or new_id(),
        }
        await self._call("POST", "/rewards", body)

    async def cap_turns(self, policy: str, turns: int) -> None:
        """Attempts of the policy that begin from now on have at most `turns` turns; 0 lifts the cap."""
        await self._call("POST", f"/policies/{policy}/turns", {"turns": turns})

    async def open_session(
        self, *, policy: str = "", ttl: float | None = None, tags: Mapping[str, str] | None = None
    ) -> OpenedSession:
        """A session without a rollout, for work by hand and for judges."""
        body: dict[str, Any] = {"tags": dict(tags or {})}
        if policy:
            body["policy"] = policy
        if ttl is not None:
            body["ttl"] = ttl
        reply = await self._call("POST", "/sessions", body)
        return _opened(reply, reply.get("policy") or policy)

    async def submit(
        self,
        tasks: Sequence[Task],
        *,
        policy: Casting,
        n: int,
        tags: Sequence[str] = (),
        rule: Mapping[str, Any] | None = None,
        priority: int = 0,
        submission_id: str | None = None,
    ) -> dict[str, Any]:
        """Queues `n` rollouts of each task, for nodes to run; the same `submission_id` again changes nothing."""
        body = {
            "policy": _casting(policy),
            "n": n,
            "tasks": [_task_body(task) for task in tasks],
            "tags": list(tags),
            "rule": dict(rule or {}),
            "priority": priority,
            "id": submission_id or new_id(),
        }
        return await self._call("POST", "/tasks", body)

    async def cancel_submission(self, submission_id: str) -> dict[str, Any]:
        """Nothing more of it is started, and what is under way is cancelled."""
        return await self._call("POST", f"/tasks/{submission_id}/cancel", {})

    async def submission_groups(self, submission_id: str) -> list[dict[str, Any]]:
        """Its groups with their rollouts and rewards, in the order they were opened."""
        found: list[dict[str, Any]] = []
        while page := (await self.get(f"/tasks/{submission_id}/groups", after=found[-1]["id"] if found else ""))[
            "groups"
        ]:
            found += page
        return found

    async def lease_rollouts(
        self, node: str, capacity: int, *, ttl: float, wait: float, submission: str | None = None
    ) -> list[LeasedRollout]:
        """Up to `capacity` rollouts for `node` to run within `ttl` seconds of its last heartbeat.

        Waits up to `wait` seconds for the first. With `submission` only rollouts of that one are taken.
        """
        body = {"capacity": capacity, "ttl": ttl, "wait": wait, "submission": submission}
        reply = await self._call("POST", f"/nodes/{node}/lease", body)
        return [
            LeasedRollout(ClaimedRollout(given["rollout_id"], given["token"]), msgspec.convert(given["task"], Task))
            for given in reply["rollouts"]
        ]

    async def anything_waits(self) -> bool:
        """Whether anything is left that nobody runs, be it that its trainers have no room yet."""
        return (await self.get("/nodes/waiting"))["waiting"]

    async def heartbeat(self, node: str, tokens: Sequence[str], *, ttl: float) -> set[str]:
        """Extends the claims of `tokens` by `ttl` seconds; returns the rollouts that are still theirs."""
        body = {"ttl": ttl, "tokens": list(tokens)}
        return set((await self._call("POST", f"/nodes/{node}/heartbeat", body))["rollouts"])

    async def release(self, node: str) -> None:
        """Gives back everything the node holds, for others to run at once."""
        await self._call("POST", f"/nodes/{node}/release", {})

    async def close_session(self, session_id: str) -> bool:
        """Later calls are refused. Whether calls were refused before for the session's cap of turns."""
        return (await self._call("POST", f"/sessions/{session_id}/close", {})).get("capped", False)

    async def get(self, path: str, **query: str) -> Any:
        """Any read of the admin plane: `get("/sessions/ID")`."""
        return await self._call("GET", path, None, query)

    async def _call(
        self, method: str, path: str, body: Mapping[str, Any] | None, query: Mapping[str, str] | None = None
    ) -> Any:
        if self._http is None:
            raise ConfigError("AdminClient is used outside its `async with`")
        last: Exception | None = None
        for wait in _waits():
            try:
                async with self._http.request(method, self.url + path, json=body, params=query) as reply:
                    if reply.status < 400:
                        return await reply.json()
                    error = await _error(reply)
            except (aiohttp.ClientConnectionError, aiohttp.ServerDisconnectedError, TimeoutError) as failure:
                last = failure
            else:
                if not isinstance(error, StoreUnavailable) or reply.status != 503:
                    raise error
                last = error
            await asyncio.sleep(wait)
        if isinstance(last, RolltapError):
            raise last
        raise ConfigError(f"can't reach the admin plane at {self.url}: {last}; is `rolltap serve` running?") from last


def _casting(policy: Casting) -> str | dict[str, str]:
    return policy if isinstance(policy, str) else dict(policy)


def _task_body(task: Task) -> dict[str, Any]:
    return {"id": task.id, "instruction": task.instruction, "spec": dict(task.spec), "tags": list(task.tags)}


def _waits() -> Iterator[float]:
    return (FIRST_WAIT_S * 2**number for number in range(ATTEMPTS))


def _opened(reply: Mapping[str, Any], model: str) -> OpenedSession:
    base_url = reply["base_url"].rstrip("/")
    return OpenedSession(
        session_id=reply["session_id"],
        endpoint=Endpoint(base_url.removesuffix("/v1"), reply["key"], model, roles=tuple(reply.get("roles", ()))),
        attempt=reply.get("attempt", 0),
        turns=reply.get("turns", 0),
    )


def _subclasses(root: type[RolltapError]) -> Iterator[type[RolltapError]]:
    for child in root.__subclasses__():
        yield child
        yield from _subclasses(child)


async def _error(reply: aiohttp.ClientResponse) -> RolltapError:
    """The server's error as the exception of its code."""
    try:
        told = (await reply.json(content_type=None))["error"]
        code, message, param = told["code"], told["message"], told.get("param")
    except (ValueError, KeyError, TypeError):
        return RolltapError(f"{reply.method} {reply.url.path} answered {reply.status} without an error body")
    retry_after = reply.headers.get("Retry-After")
    wait = float(retry_after) if retry_after and retry_after.replace(".", "", 1).isdigit() else None
    kinds = {kind.code: kind for kind in _subclasses(RolltapError)}
    kind = RateLimited if reply.status == 429 else kinds.get(code, RolltapError)
    return kind(message, param=param, retry_after=wait)
