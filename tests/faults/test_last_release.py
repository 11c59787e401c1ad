"""The last release beside this tree on one store, as while a deployment is upgraded proxy by proxy."""

from __future__ import annotations

import asyncio
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from itertools import cycle
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from rolltap.calllog.database import Database
from rolltap.calllog.schema import VERSION
from rolltap.calllog.sql import open_call_log
from rolltap.calllog.versions import CUTS_OFF, version_of
from rolltap.ledger.counts import counted
from rolltap.ledger.unit_of_work import Tx

from ..conftest import ROOT
from ..unit.ledger.world import counted_anew
from .clients import Clients, Messages, turn
from .invariants import check
from .processes import EngineProcess, Proxy

LAST_RELEASE = "8f78839e0e2a5f0ddf8d553aa1218b68df183898"
"""0.3.0's schema (0104), with the mends since. At each release: the commit that the release was made of."""

PRODUCT = ("src", "proxy", "reconstructor", "trainer_client", "harnesses")
TURNS = 8
COUNTS = ("groups", "rollouts", "outstanding", "zero_variance", "staleness", "abandoned", "untrained", "unanswered")
Tree = Mapping[str, str]
"""Variables with which Python finds one tree's `rolltap`."""

THIS: Tree = {"PYTHONPATH": str(ROOT / "src")}


@pytest.fixture(scope="module")
def last(tmp_path_factory: pytest.TempPathFactory) -> Tree:
    """The last release's product, taken from the repository's history."""
    git = ["git", "-C", str(ROOT)]
    known = subprocess.run([*git, "cat-file", "-e", f"{LAST_RELEASE}^{{commit}}"], capture_output=True, check=False)
    if known.returncode:
        pytest.skip(f"no commit {LAST_RELEASE[:8]} here, the last release: a shallow clone, or a source archive")
    archive = subprocess.run([*git, "archive", LAST_RELEASE, *PRODUCT], capture_output=True, check=True).stdout
    folder = tmp_path_factory.mktemp("last-release")
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        files.extractall(folder, filter="tar")
    tree = {"PYTHONPATH": str(folder / "src")}
    where = [sys.executable, "-c", "import rolltap; print(rolltap.__file__)"]
    found = subprocess.run(where, env={**os.environ, **tree}, capture_output=True, text=True, check=True).stdout
    assert found.startswith(str(folder))
    return tree


LATER = "9000"
STEP = f"""
import sqlalchemy as sa
from alembic import op

revision, down_revision = "{LATER}", "{VERSION}"


def upgrade() -> None:
    op.add_column("groups", sa.Column("added", sa.Text))
"""


@pytest.fixture(scope="module")
def later(tmp_path_factory: pytest.TempPathFactory) -> Tree:
    """This tree with one more step, which adds a column."""
    folder = tmp_path_factory.mktemp("later")
    for part in PRODUCT:
        shutil.copytree(ROOT / part, folder / part, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    calllog = folder / "src" / "rolltap" / "calllog"
    schema = (calllog / "schema.py").read_text()
    (calllog / "schema.py").write_text(schema.replace(f'VERSION = "{VERSION}"', f'VERSION = "{LATER}"'))
    (calllog / "migrations" / "versions" / f"{LATER}_step.py").write_text(STEP)
    return {"PYTHONPATH": str(folder / "src")}


async def schema_of(url: str) -> str | None:
    database = Database(url, writable=False)
    await database.start()
    try:
        return await database.query(version_of)
    finally:
        await database.close()


async def verified(url: str) -> str:
    """What `rolltap log verify` of this tree says."""
    command = [sys.executable, "-m", "rolltap", "log", "verify", "--store", url]
    environment = {**os.environ, **THIS, "COLUMNS": "200"}
    done = await asyncio.to_thread(
        subprocess.run, command, env=environment, capture_output=True, text=True, check=False
    )
    return done.stdout + done.stderr


class Conversation:
    """One that is asked for turn by turn, through whatever proxy its clients have then."""

    def __init__(self, clients: Clients, key: str) -> None:
        self._clients = clients
        self._key = key
        self._messages: Messages = []

    async def go_on(self, stream: bool) -> None:
        number = len(self._messages) // 2
        self._messages.append(turn(f"question {number}", say=f"answer {number}"))
        reply = await self._clients.insist(self._key, self._messages, stream=stream)
        assert reply.ended, reply
        self._messages.append({"role": "assistant", "content": reply.text})


async def check_continuity(url: str, session: str, turns: int) -> None:
    log = open_call_log(url, writable=False, newer=True)
    await log.start()
    rows = await log.rows(session)
    await log.close()
    assert [row.intent.break_ for row in rows] == [None] * turns


@asynccontextmanager
async def played(folder: Path, url: str, count: int) -> AsyncIterator[tuple[Sequence[Proxy], Clients, EngineProcess]]:
    """Proxies on one store that are not started yet, clients of the first one, and the engine."""
    engine = await asyncio.to_thread(EngineProcess)
    proxies: list[Proxy] = []
    for number in range(count):
        own = folder / f"proxy-{number}"
        own.mkdir()
        proxies.append(Proxy(own, None, engine.url, {"url": url}))
    try:
        async with aiohttp.ClientSession() as http:
            yield proxies, Clients(proxies[0], http), engine
    finally:
        for proxy in proxies:
            await proxy.kill()
        engine.close()


async def counts(clients: Clients, proxy: Proxy) -> dict[str, Any]:
    """Those of the policy, as this proxy tells them."""
    clients.proxy = proxy
    stated = await clients.admin("/policies/tiny", method="GET")
    return {name: stated[name] for name in COUNTS}


async def train_one_group(clients: Clients, opens: Proxy, acknowledges: Proxy, step: int) -> None:
    """Both proxies have a part in the group: one opens it and plays a rollout, the other plays and acknowledges."""
    clients.proxy = opens
    first, second = await clients.open_group()
    await clients.roll_out(first)
    clients.proxy = acknowledges
    await clients.roll_out(second)
    clients.proxy = opens
    async with asyncio.timeout(30):
        while (lease := await clients.lease()) is None or not lease.groups:
            pass
    clients.proxy = acknowledges
    assert await clients.ack(lease, step) == 200
    assert not any(record.trajectory.breaks for leased in lease.groups for record in leased.rollouts)


async def queue_and_leave(clients: Clients, submits: Proxy, claims: Proxy) -> None:
    """Tasks of which one is claimed, a group that is cancelled, and one with a rollout under way."""
    clients.proxy = submits
    spec = {"harness": "command", "argv": ["true"], "evaluator": {"kind": "session_completed"}}
    tasks = [{"id": f"task-{number}", "instruction": "do", "spec": spec} for number in range(3)]
    await clients.admin("/tasks", {"policy": "tiny", "n": 2, "tasks": tasks})
    begun, _ = await clients.open_group()
    await clients.open_group()
    clients.proxy = claims
    await clients.start(begun)
    await clients.admin(f"/groups/{list(clients.told.groups)[-1]}/cancel", {})
    await clients.admin("/nodes/node/claim", {"capacity": 2})


async def use_both(clients: Clients, conversation: Conversation, older: Proxy, newer: Proxy) -> None:
    """Calls, groups and tasks through both; then each tells the same counts, and they are right."""
    for number, proxy in zip(range(TURNS), cycle((newer, older))):
        clients.proxy = proxy
        await conversation.go_on(bool(number % 3))
    await train_one_group(clients, older, newer, 1)
    await train_one_group(clients, newer, older, 2)
    await queue_and_leave(clients, older, newer)
    await queue_and_leave(clients, newer, older)
    assert await counts(clients, older) == await counts(clients, newer)


async def check_stores(url: str, clients: Clients, engine: EngineProcess, turns: int) -> None:
    """What clients were told is on record, the conversation never breaks, and counts are those of the rows."""
    async with aiohttp.ClientSession() as http, http.get(f"{engine.url}/scripted/log") as answer:
        journal = json.loads(await answer.read())["requests"]
    await check(url, clients.told, journal)
    await check_continuity(url, clients.told.sessions[0], turns)
    database = Database(url, writable=False)
    await database.start()
    kept, anew = await database.query(
        lambda connection: [dict(read(Tx(connection, 0.0), "tiny")) for read in (counted, counted_anew)]
    )
    await database.close()
    assert kept == anew
    assert kept["queued"][""] < 6  # some were claimed
    assert kept["groups"]["acknowledged"] == len(clients.told.acked)


@pytest.mark.timeout(300)
async def test_a_proxy_goes_on_beside_the_one_that_upgrades_its_store(later: Tree, postgres_url: str, tmp_path: Path):
    """Takes about 20 CPU seconds: three starts of a proxy with its reading process, two of them uncompiled."""
    async with played(tmp_path, postgres_url, 2) as ((older, newer), clients, engine):
        assert await older.start(env=THIS), older.tail()
        conversation = Conversation(clients, await clients.open_session())
        await clients.take_over()
        await conversation.go_on(True)
        assert await newer.start(env=later), newer.tail()
        assert await schema_of(postgres_url) == LATER
        await use_both(clients, conversation, older, newer)
        await check_stores(postgres_url, clients, engine, 1 + TURNS)
        await older.stop()
        assert not await older.start(env=THIS)
        assert f"has schema {LATER}, this rolltap knows up to {VERSION}" in older.tail()
        await newer.stop()
    for proxy in (older, newer):
        assert "Traceback" not in proxy.tail(sys.maxsize)


@pytest.mark.timeout(300)
async def test_the_last_release_goes_on_or_holds_up_the_upgrade(last: Tree, postgres_url: str, tmp_path: Path) -> None:
    """Takes about 20 CPU seconds: four starts of a proxy with its reading process, two of them uncompiled."""
    async with played(tmp_path, postgres_url, 2) as ((older, newer), clients, engine):
        assert await older.start(env=last), older.tail()
        schema = str(await schema_of(postgres_url))
        conversation = Conversation(clients, await clients.open_session())
        await clients.take_over()
        await conversation.go_on(True)

        holds_up = any(schema < step <= VERSION for step in CUTS_OFF)
        assert await newer.start(env=THIS) != holds_up, newer.tail()
        first, second = await clients.open_group()
        await clients.roll_out(first)
        await conversation.go_on(False)
        if holds_up:
            assert "stop all older proxies of this store, then start this one" in newer.tail()
            assert await schema_of(postgres_url) == schema
            await older.stop()
            assert await newer.start(env=THIS), newer.tail()
        clients.proxy = newer
        await clients.roll_out(second)
        await use_both(clients, conversation, newer if holds_up else older, newer)
        await check_stores(postgres_url, clients, engine, 2 + TURNS)
        await newer.stop()
    for proxy in (older, newer):
        assert "Traceback" not in proxy.tail(sys.maxsize)
    assert "all sound" in await verified(postgres_url)


@pytest.mark.timeout(300)
async def test_sqlite_is_upgraded_once_the_older_one_has_stopped_and_not_taken_back(last: Tree, tmp_path: Path) -> None:
    """Takes about 10 CPU seconds: four starts of a proxy, two of them uncompiled."""
    url = f"sqlite:///{tmp_path}/rolltap.db"
    async with played(tmp_path, url, 2) as ((proxy, second), clients, _):
        assert await proxy.start(env=last), proxy.tail()
        schema = await schema_of(url)
        conversation = Conversation(clients, await clients.open_session())
        await conversation.go_on(True)
        assert not await second.start(env=THIS)
        assert await schema_of(url) == schema
        await proxy.stop()

        assert await proxy.start(env=THIS), proxy.tail()
        assert await schema_of(url) == VERSION
        await conversation.go_on(True)
        await proxy.stop()
        assert await proxy.start(env=last) == (schema == VERSION)
    await check_continuity(url, clients.told.sessions[0], 2)
    assert schema == VERSION or f"has schema {VERSION}, this rolltap knows up to {schema}" in proxy.tail()
    assert "Traceback" not in proxy.tail(sys.maxsize) + second.tail()
    assert "all sound" in await verified(url)
