"""A whole rolltap in the test's event loop: scripted engine, proxy on SQLite, three planes; and harnesses in sandboxes.

Each run has a session of its own and a workspace of its own. Sandboxes have no network but the proxy, so a harness that
needs the outside world fails here.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rolltap.contract.admin import HarnessLog
from rolltap.engine.scripted import Entry, Script, ScriptedEngine
from rolltap.engine.scripted.server import SCRIPTED, ServedModel
from rolltap.engine.tiny import FOLDER
from rolltap.harnesses.agents.install import Installation
from rolltap.harnesses.base import Command, Exit, Harness, Job, Limits, Workspace
from rolltap.harnesses.client import AdminClient, OpenedSession
from rolltap.harnesses.runtimes.bubblewrap import BubblewrapRuntime
from rolltap.harnesses.runtimes.sources import Files
from rolltap.proxy.app import Rolltap
from rolltap.proxy.reading_process.child import Vocabularies
from rolltap.proxy.server import bind, serve
from rolltap.reading.reader import RecordReader, reader_on
from rolltap.settings import Settings, load_settings

POLICY = "tiny"
FIRST_FILES = {"a.txt": "x\n"}


@dataclass
class Run:
    """What a harness did under one session. `calls` are the admin plane's, `asked` the engine's own journal."""

    session: OpenedSession
    exits: list[Exit] = field(default_factory=list)
    files: dict[str, str] = field(default_factory=dict)
    calls: list[dict[str, Any]] = field(default_factory=list)
    asked: list[Entry] = field(default_factory=list)
    report: dict[str, Any] = field(default_factory=dict)
    log: HarnessLog | None = None
    check: dict[str, str] = field(default_factory=dict)


@dataclass(eq=False)
class House:
    """`reader` reads the store beside the server's own reading process."""

    app: Rolltap
    urls: Mapping[str, str]
    engine: ScriptedEngine
    client: AdminClient
    workspaces: Path
    reader: RecordReader

    async def open(self, policy: str = POLICY) -> OpenedSession:
        return await self.client.open_session(policy=policy)

    @asynccontextmanager
    async def workspace(self, installation: Installation) -> AsyncIterator[Workspace]:
        runtime = BubblewrapRuntime(self.workspaces, installation.bins, installation.needs)
        workspace = await runtime.prepare(Files(FIRST_FILES))
        try:
            yield workspace
        finally:
            await workspace.close()

    async def launch(
        self, workspace: Workspace, harness: Harness, job: Job, session: OpenedSession, *, timeout: float
    ) -> Exit:
        """Runs `job` in `workspace` under `session`."""
        launch = harness.launch(replace(job, endpoint=workspace.endpoint(job.endpoint)))
        assert isinstance(launch, Command)
        return await workspace.run(launch, job.limits, timeout, reach=session.endpoint.base_url)

    def job(self, workspace: Workspace, session: OpenedSession, prompt: str, **more: Any) -> Job:
        return Job(session.endpoint, prompt, workspace.workdir, workspace.home, Limits(), **more)

    async def read(self, run: Run) -> Run:
        """Fills in what the record and the engine's journal hold of the run's session, which ends here."""
        session_id = run.session.session_id
        await self.client.close_session(session_id)
        if run.log is not None:
            await self.client.check_log(session_id, run.log)
        session = await self.client.get(f"/read/sessions/{session_id}")
        run.calls, run.check = session["calls"], session["log_check"]
        run.report = {**session["report"], "findings": session["findings"]}
        run.asked = [entry for entry in self.engine.journal.entries if entry.session == session_id]
        return run


@asynccontextmanager
async def house(
    script: Script, folder: Path, *, limits: Mapping[str, Any] | None = None, context: int = 0, **policy: Any
) -> AsyncIterator[House]:
    """Everything up, with an engine that follows `script`; `policy` are more of the policy's settings.

    `context` is the engine's longest sequence in tokens; 0: one that no test fills.
    """
    model = ServedModel(context=context) if context else SCRIPTED
    async with (
        ScriptedEngine(script, policy.get("tokenizer", FOLDER), served=model) as engine,
        opened(engine, folder, limits=limits, **policy) as home,
    ):
        yield home


@asynccontextmanager
async def opened(
    engine: ScriptedEngine, folder: Path, *, port: int = 0, limits: Mapping[str, Any] | None = None, **policy: Any
) -> AsyncIterator[House]:
    """The proxy on what `folder` holds already, its agent plane on `port`."""
    values = house_settings(folder, engine.url, **policy)
    async with served(engine, load_settings(None, **values, limits=limits or {}), port) as home:
        yield home


@asynccontextmanager
async def served(engine: ScriptedEngine, settings: Settings, port: int = 0) -> AsyncIterator[House]:
    """The proxy with these settings, which name `engine`, its agent plane on `port`."""
    async with (
        Rolltap.running(settings) as app,
        serving(app, settings, port) as urls,
        AdminClient(urls["admin"], app.settings.keys.admin) as client,
    ):
        folders = {name: policy.tokenizer for name, policy in settings.policies.items()}
        reader = reader_on(app.services.call_log, vocabulary=Vocabularies(folders).of_policy)
        try:
            yield House(app, urls, engine, client, settings.data / "workspaces", reader)
        finally:
            await reader.close()


def house_settings(folder: Path, engine_url: str, **policy: Any) -> Mapping[str, Any]:
    model = {"engine": "main", "model": "scripted", "tokenizer": FOLDER, "family": "qwen3", **policy}
    model["tokenizer"] = str(model["tokenizer"])
    return {
        "data": folder / "data",
        "engines": {"main": {"url": engine_url}},
        "policies": {POLICY: model},
    }


@asynccontextmanager
async def serving(app: Rolltap, settings: Settings, port: int = 0) -> AsyncIterator[dict[str, str]]:
    """The planes on free ports, the agent plane on `port`; yields their URLs."""
    sockets = {plane: bind("127.0.0.1", at) for plane, at in (("agent", port), ("trainer", 0), ("admin", 0))}
    urls = {plane: f"http://127.0.0.1:{listener.getsockname()[1]}" for plane, listener in sockets.items()}
    app.set_base_url(urls["agent"])
    stop = asyncio.Event()
    running = asyncio.create_task(serve({plane: (app.planes[plane], sockets[plane]) for plane in sockets}, stop))
    try:
        yield urls
    finally:
        stop.set()
        await running
