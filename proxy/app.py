"""Wires the parts of `rolltap serve` together. No logic lives here."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from fastapi import FastAPI

from rolltap.addresses import is_loopback
from rolltap.calllog import open_call_log
from rolltap.calllog.base import CallLog
from rolltap.calllog.open import LogWithDatabase
from rolltap.errors import ConfigError, EngineError, RateLimited
from rolltap.ledger.base import LedgerSettings
from rolltap.ledger.ledger import Ledger
from rolltap.proxy.call.admission import Admission, Vendors
from rolltap.proxy.call.open_policies import open_policies
from rolltap.proxy.call.path import CallPath
from rolltap.proxy.call.policies import Policies, Policy
from rolltap.proxy.call.queries import Queries
from rolltap.proxy.call.recorder import Recorder
from rolltap.proxy.call.versions import OwnVersions, SharedVersions
from rolltap.proxy.call.vocabularies import Vocabularies
from rolltap.proxy.continuation.canonical import DigestCache
from rolltap.proxy.continuation.handles import Handles
from rolltap.proxy.dialects import known_dialects
from rolltap.proxy.front.exposure import check_exposure
from rolltap.proxy.front.gate import Gate
from rolltap.proxy.metrics.calls import Metrics
from rolltap.proxy.metrics.loop_lag import watch_loop
from rolltap.proxy.planes import admin_app, trainer_app
from rolltap.proxy.routes.model import AgentPlane
from rolltap.proxy.routes.services import CheckTask, Services
from rolltap.proxy.sessions.capture import Capture
from rolltap.proxy.sessions.keys import Keyring
from rolltap.proxy.sessions.response_store import ResponseStore
from rolltap.proxy.sessions.service import SessionService
from rolltap.proxy.sessions.session_cache import SessionCache
from rolltap.proxy.viewer.access import Access, Viewers
from rolltap.proxy.viewer.app import mount
from rolltap.proxy.viewer.engines import engines_of
from rolltap.proxy.viewer.pages import Pages
from rolltap.reading import reader_on
from rolltap.reconstructor.reconstruct import reconstruct
from rolltap.reconstructor.rules import Rules, session_rules
from rolltap.settings import LimitSettings, Settings, with_keys
from rolltap.types import Session, Trajectory

log = logging.getLogger("rolltap.app")

PROBE_EVERY_S = 2.0


@dataclass(eq=False)
class Rolltap:
    """A running proxy: its parts and the three planes' applications."""

    settings: Settings
    call_log: CallLog
    ledger: Ledger
    policies: Policies
    sessions: SessionCache
    services: Services
    planes: dict[str, Any]
    view_access: Access
    base_url: str = ""
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    def set_base_url(self, url: str) -> None:
        """What harnesses are told to call; known once the sockets are bound."""
        self.base_url = self.services.base_url = url

    @classmethod
    @asynccontextmanager
    async def running(
        cls,
        settings: Settings,
        *,
        check_task: CheckTask = lambda task, policies: None,
        spool: Path | None = None,
    ) -> AsyncIterator[Rolltap]:
        """Everything started; everything closed, in order, at exit.

        `check_task` looks at what is submitted; `spool` is a file of this process's own (`<data>/spool`).
        """
        check_exposure(settings)
        settings = with_keys(settings)
        settings.data.mkdir(mode=0o700, parents=True, exist_ok=True)
        async with AsyncExitStack() as stack:
            http = await stack.enter_async_context(_http())
            call_log = await _started_log(settings, spool or settings.data / "spool", stack)
            app = _build(settings, call_log, http)
            app.services.check_task = check_task
            await stack.enter_async_context(app.ledger.sweeping())
            await app._prepare()
            stack.push_async_callback(app._stop)
            yield app

    async def _prepare(self) -> None:
        """Closes what a former process left open, and learns what the engines can do."""
        recorder = self.services.recorder
        self._start(watch_loop(recorder.metrics.loop_lag))
        aborted = await self.call_log.abort_orphans([recorder.process], at=recorder.now())
        if aborted:
            log.warning("%d calls that a former process left open are recorded as aborted", aborted)
        for runtime in self.policies:
            state = await self.ledger.policies.register(runtime.name, tokenizer_hash=runtime.source.vocabulary)
            runtime.version = state.version
            if not await self._probe(runtime):
                self._start(self._probe_until_up(runtime))

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        """Runs `work` beside the calls until the server stops."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _probe(self, runtime: Policy) -> bool:
        try:
            facts = await runtime.engine.probe()
        except (EngineError, RateLimited) as error:
            log.warning("engine %s is not up: %s", runtime.engine.name, error.message)
            return False
        runtime.learn(facts)
        return True

    async def _probe_until_up(self, runtime: Policy) -> None:
        while not await self._probe(runtime):  # noqa: ASYNC110  the event is another machine's
            await asyncio.sleep(PROBE_EVERY_S)

    async def _stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await self.services.reader.close()
        await self.services.recorder.drain()
        for engine in {id(runtime.engine): runtime.engine for runtime in self.policies}.values():
            await engine.close()


@asynccontextmanager
async def _http() -> AsyncIterator[aiohttp.ClientSession]:
    """The one connection pool of the process. No redirects are followed anywhere: engines are not asked to move."""
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=60)
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=10)
    jar = aiohttp.DummyCookieJar()  # a vendor's cookies are not for another user's calls
    auto = ("accept", "accept-encoding", "user-agent")  # for servers of ours; each is a look-up in every request
    async with aiohttp.ClientSession(
        connector=connector, timeout=timeout, cookie_jar=jar, skip_auto_headers=auto
    ) as session:
        yield session


async def _started_log(settings: Settings, spool: Path, stack: AsyncExitStack) -> LogWithDatabase:
    store = settings.store
    url = settings.store_url
    call_log = open_call_log(
        url,
        spool=spool if store.spool_mb else None,
        spool_bytes=int(store.spool_mb * 1_000_000),
        ingest=store.ingest or None,
    )
    if not isinstance(call_log, LogWithDatabase):
        raise ConfigError(
            f"store.url: {url} has no room for groups and rewards; use sqlite:///PATH or postgresql://..."
        )
    await call_log.start()
    stack.push_async_callback(call_log.close)
    return call_log


def _build(settings: Settings, call_log: LogWithDatabase, http: aiohttp.ClientSession) -> Rolltap:
    handles = Handles(settings.keys.secret.encode())
    policies, vendors = open_policies(settings, handles, http)
    alone = call_log.database.dialect_name == "sqlite"  # which takes one writing process
    digests = DigestCache({name: policy.ignore for name, policy in settings.policies.items() if policy.ignore})
    live = SessionCache(call_log, digests, alone=alone)
    recorder = Recorder(call_log)
    sessions = SessionService(call_log, policies.names, settings.limits, closed=live.forget)

    async def trajectories(session_ids: Sequence[str]) -> list[Trajectory]:
        found = await call_log.calls(session_ids)

        def rebuild(session_id: str) -> Trajectory:
            session, calls = found.get(session_id, (None, ()))
            return reconstruct(calls, rules=_rules(session, settings))

        return await asyncio.to_thread(lambda: [rebuild(session_id) for session_id in session_ids])

    ledger = Ledger(
        call_log.database,
        trajectories=trajectories,
        close_session=sessions.close,
        settings=LedgerSettings(trainer_silence=settings.queue.trainer_silence_s),
    )
    keyring = Keyring(settings.keys, ledger.keys, alone=alone)
    capture = Capture(settings.keys.project, call_log, live, policies, settings.limits.session_ttl_s)
    responses = ResponseStore(call_log, handles, policies)
    passthrough = Vendors(vendors, unnamed=is_loopback(settings.listen.host_of("agent")))
    admission = Admission(live, capture, policies, responses, keyring, passthrough)
    versions = OwnVersions() if alone else SharedVersions(policies, ledger.policies.list)
    path = CallPath(admission, live, recorder, handles, versions, settings.limits)
    services = Services(
        ledger=ledger,
        call_log=call_log,
        sessions=sessions,
        policies=policies,
        recorder=recorder,
        handles=handles,
        trajectories=trajectories,
        reader=reader_on(
            call_log, rules=lambda session: _rules(session, settings), vocabulary=Vocabularies(policies).of_policy
        ),
    )
    counted, gated = recorder.metrics.counted, _gates(keyring, settings.limits, recorder.metrics)
    view_access = Access("\0".join((settings.keys.secret, settings.keys.admin, settings.keys.viewer)))
    pages = Pages(services.reader, call_log.database.name, engines_of(policies))
    planes = {
        "agent": AgentPlane(
            known_dialects(), path, Queries(admission, policies, responses), settings.limits, counted("agent")
        ),
        "trainer": gated("trainer", trainer_app(services, keyring)),
        "admin": gated("admin", mount(admin_app(services, keyring), pages, view_access, Viewers(keyring))),
    }
    return Rolltap(settings, call_log, ledger, policies, live, services, planes, view_access)


def _gates(keyring: Keyring, limits: LimitSettings, metrics: Metrics) -> Callable[[str, FastAPI], Gate]:
    """What puts a gate before a plane's application."""

    async def knows(key: str) -> bool:
        return await keyring.caller(key) is not None

    def gated(plane: str, app: FastAPI) -> Gate:
        return Gate(app, knows, int(limits.request_mb * 1_000_000), limits.receipt_s, metrics.counted(plane))

    return gated


def _rules(session: Session | None, settings: Settings) -> Rules:
    """Which calls of a session carry loss: those of its policy, as that policy's settings say."""
    if session is None:
        return Rules()
    policy = settings.policies.get(session.policy)
    return session_rules(session, policy.train if policy else ())
