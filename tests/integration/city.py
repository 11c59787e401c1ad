"""A proxy with two tenants on one Postgres, whose user is no superuser, as in a deployment."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import asyncpg
import httpx

from rolltap import wire
from rolltap.calllog.schema import metadata
from rolltap.contract.trainer import Lease
from rolltap.engine.scripted import ScriptedEngine
from rolltap.engine.tiny import FOLDER
from rolltap.proxy.app import Rolltap
from rolltap.settings import Settings, load_settings

OURS, THEIRS = "acme", "globex"


@asynccontextmanager
async def app_database(server: str, attributes: str = "") -> AsyncIterator[str]:
    """A database, and a role that owns it and may no more than that; its URL for the role."""
    name = f"test_{secrets.token_hex(6)}"
    maintenance = await asyncpg.connect(server)
    await maintenance.execute(f"CREATE ROLE {name} LOGIN {attributes}")
    await maintenance.execute(f"CREATE DATABASE {name} OWNER {name}")
    try:
        yield f"postgresql://{name}@{server.split('@')[1].rsplit('/', 1)[0]}/{name}"
    finally:
        await maintenance.execute(f"DROP DATABASE {name} WITH (FORCE)")
        await maintenance.execute(f"DROP ROLE {name}")
        await maintenance.close()


def settings(folder: Path, store: str, engine: ScriptedEngine, **policy: Any) -> Settings:
    model = {"model": "scripted", "tokenizer": str(FOLDER), "family": "qwen3", **policy}
    return load_settings(
        None,
        data=folder / "data",
        store={"url": store},
        engines={tenant: {"url": engine.url} for tenant in (OURS, THEIRS)},
        policies={f"{tenant}-model": {"engine": tenant, "tenant": tenant, **model} for tenant in (OURS, THEIRS)},
    )


@dataclass
class Tenant:
    """A tenant's keys by role, and the ids of what it made: the names are those that another one would choose, too."""

    name: str
    keys: dict[str, str] = field(default_factory=dict)
    ids: dict[str, str] = field(default_factory=dict)
    handle: str = ""
    text: str = ""

    @property
    def policy(self) -> str:
        return f"{self.name}-model"

    @property
    def canary(self) -> str:
        return f"CANARY-{self.name}"


@dataclass
class City:
    """A proxy with its tenants. `superuser` reads the same database past its wall."""

    app: Rolltap
    store: str
    superuser: str
    tenants: dict[str, Tenant]

    async def send(self, plane: str, row: str, key: str, **more: Any) -> httpx.Response:
        method, path = row.split(" ", 1)
        headers = {"authorization": f"Bearer {key}"}
        transport = httpx.ASGITransport(self.app.planes[plane])
        async with httpx.AsyncClient(transport=transport, base_url="http://proxy", headers=headers) as client:
            return await client.request(method, path, **more)

    async def admin(self, tenant: Tenant, row: str, **body: Any) -> Any:
        more = {"json": body} if row.startswith("POST") else {}
        answer = await self.send("admin", row, tenant.keys["admin"], **more)
        assert answer.status_code == 200, (row, answer.text)
        return answer.json()

    async def mint(self, tenant: str, role: str) -> tuple[str, str]:
        """A key that the deployment's admin makes, and its id."""
        body = {"role": role, "name": "k", "tenant": tenant}
        answer = await self.send("admin", "POST /keys", self.app.settings.keys.admin, json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()["key"], answer.json()["id"]

    async def sql(self, statement: str, tenant: str | None = None) -> list[Any]:
        """By the superuser; or as a tenant's transaction runs it, by the proxy's role."""
        connection = await asyncpg.connect(self.superuser if tenant is None else self.store)
        try:
            async with connection.transaction():
                if tenant is not None:
                    await connection.execute(f"SET LOCAL rolltap.tenant = '{tenant}'")
                return [tuple(row) for row in await connection.fetch(statement)]
        finally:
            await connection.close()

    async def rows(self, tenant: Tenant) -> dict[str, list[Any]]:
        """All that is on record of it, and the parts of requests; what its keys used is saved first."""
        await self.app.accounts.save()
        own = {"call_intents": f"session_id = '{tenant.ids['session_id']}'"}
        own |= dict.fromkeys(("prunings", "notes", "annotations"), f"session_id = '{tenant.ids['session_id']}'")
        own |= dict.fromkeys(("call_completions", "deliveries"), f"call_id = '{tenant.ids['call_id']}'")
        own |= {"parts": "true"}
        return {
            name: sorted(
                await self.sql(f"SELECT * FROM {name} WHERE {own.get(name, f'''tenant = '{tenant.name}' ''')}"),
                key=repr,
            )
            for name in sorted(set(metadata.tables) - {"processes"})
        }


async def live(city: City, tenant: Tenant) -> None:
    """Everything that a tenant does, in names that are the same for each: tasks, calls, rewards, leases, notes."""
    task = {"id": "t", "instruction": tenant.canary, "spec": {}, "tags": []}
    opened = await city.admin(tenant, "POST /groups", policy=tenant.policy, n=1, task=task, id="g")
    await city.admin(tenant, "POST /tasks", policy=tenant.policy, n=1, tasks=[task], id="s")
    rollout = opened["rollouts"][0]["id"]
    started = await city.admin(tenant, f"POST /rollouts/{rollout}/start")
    tenant.keys["session"] = started["key"]
    # The tool is the same for both: a part of requests that they share.
    tool = {"type": "function", "function": {"name": "bash", "description": "x" * 3000, "parameters": {}}}
    call = {"model": tenant.policy, "tools": [tool], "messages": [{"role": "user", "content": tenant.canary}]}
    for key in ("session", "project"):
        answer = await city.send("agent", "POST /v1/chat/completions", tenant.keys[key], json=call)
        assert answer.status_code == 200, answer.text
    answer = await city.send(
        "agent", "POST /v1/responses", tenant.keys["session"], json={"model": tenant.policy, "input": tenant.canary}
    )
    tenant.handle = answer.json()["id"]
    await city.admin(tenant, "POST /rewards", rollout_id=rollout, value=0.5, id="r", detail={"why": tenant.canary})
    await city.admin(
        tenant, f"POST /rollouts/{rollout}/finish", status="succeeded", attempt=1, evaluation=tenant.canary
    )
    note = {"kind": "comment", "value": tenant.canary, "session_id": started["session_id"]}
    await city.admin(tenant, "POST /read/notes", **note)
    await city.admin(tenant, f"POST /policies/{tenant.policy}/control", max_turns=7)
    claimed = await city.admin(tenant, "POST /nodes/n/claim", capacity=1, ttl=600)
    assert len(claimed["rollouts"]) == 1
    answer = await city.send(
        "trainer", "POST /leases", tenant.keys["trainer"], json={"trainer": "w", "policy": tenant.policy, "groups": 1}
    )
    assert answer.status_code == 200, answer.text
    lease = wire.unpack(answer.content, Lease)
    session = await city.admin(tenant, f"GET /read/sessions/{started['session_id']}")
    call = {"call_id": session["calls"][0]["id"], "entropy": [1.0] * session["calls"][0]["output_tokens"]}
    said = {"token": lease.token, "version": 0, "calls": [call]}
    row = f"POST /leases/{lease.id}/annotations"
    answer = await city.send("trainer", row, tenant.keys["trainer"], json=said)
    assert answer.json() == {"added": 1}, answer.text
    tenant.ids |= {
        "id": "s",
        "group_id": "g",
        "rollout_id": rollout,
        "session_id": started["session_id"],
        "call_id": session["calls"][0]["id"],
        "node": "n",
        "name": tenant.policy,
        "policy": tenant.policy,
        "lease_id": lease.id,
        "token": str(lease.token),
    }


def bodies(victim: Tenant) -> Mapping[str, Any]:
    """Bodies that would be taken from the victim, by the beginning of their route."""
    ids, token = victim.ids, int(victim.ids["token"])
    task = {"id": "x", "instruction": "x", "spec": {}, "tags": []}
    return {
        "POST /sessions": {"policy": victim.policy},
        "POST /sessions/{session_id}/fork": {"call": ids["call_id"]},
        "POST /sessions/{session_id}/close": {},
        "POST /tasks": {"policy": victim.policy, "n": 1, "tasks": [task]},
        "POST /groups": {"policy": victim.policy, "n": 1, "task": task},
        "POST /rollouts/{rollout_id}/start": {},
        "POST /rollouts/{rollout_id}/fork": {"call": ids["call_id"]},
        "POST /rollouts/{rollout_id}/finish": {"status": "failed", "attempt": 1},
        "POST /rewards": {"rollout_id": ids["rollout_id"], "value": 1.0, "scope": "call:*"},
        "POST /nodes/{node}/claim": {"capacity": 9, "ttl": 60},
        "POST /nodes/{node}/heartbeat": {"tokens": ["x"], "ttl": 60},
        "POST /policies/{name}/control": {"max_turns": 1},
        "POST /read/notes": {"kind": "comment", "value": "x", "session_id": ids["session_id"]},
        "POST /keys": {"role": "admin", "name": "k", "tenant": victim.name},
        "POST /keys/{key_id}/rotate": {"overlap": 0},
        "POST /leases": {"trainer": "w", "policy": victim.policy, "groups": 1},
        "POST /leases/{lease_id}/extend": {"token": token},
        "POST /leases/{lease_id}/ack": {"token": token, "step": 1},
        "POST /leases/{lease_id}/nack": {"token": token, "reason": "x"},
        "POST /leases/{lease_id}/release": {"token": token},
        "POST /leases/{lease_id}/annotations": {
            "token": token,
            "version": 0,
            "calls": [{"call_id": ids["call_id"], "logprobs": [-1.0]}],
        },
        "POST /trainers/{name}/rewind": {"step": 0, "versions": {victim.policy: 0}, "run": "r", "take_over": True},
        "POST /policies/{name}/begin_update": {"trainer": "w", "incarnation": 0, "mode": "keep"},
        "POST /policies/{name}/push": {"trainer": "w", "incarnation": 0, "path": "/w", "version": 1, "digest": "d"},
        "POST /policies/{name}/finish_update": {"trainer": "w", "incarnation": 0},
        "POST /policies/{name}/leave": {"trainer": "w", "incarnation": 0},
        "POST /policies/{name}/receive": {
            "trainer": "w",
            "incarnation": 0,
            "version": 1,
            "digest": "d",
            "address": "127.0.0.1",
            "port": 9,
            "group": "g",
            "world_size": 2,
            "backend": "gloo",
            "timeout_s": 1,
            "buckets": [],
        },
    }
