"""The reading process: opens the store for reading and answers questions over a Unix socket, until its parent ends.

    python -m rolltap.proxy.reading_process.child SOCKET_FD

Standard input holds the settings as one line of JSON, without keys, and ends with the parent. Requests are
`POST /CLASS.METHOD` with a JSON list of arguments; a header names the tenant. Only the parent reaches the socket.

What agents recorded decides how much memory a question needs. The kernel gives this process `MEMORY_SHARE` of the
machine's; a question that finds no more gets an error, and the process ends, as what it holds is in the next one's way.
Where the machine's memory ends before, the kernel kills this process first.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import resource
import signal
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, get_type_hints

import msgspec
import uvicorn
from starlette.requests import Request
from starlette.responses import Response

from rolltap.decoding import convert
from rolltap.errors import NotFound, RolltapError, StoreUnavailable
from rolltap.ledger.rebuilding import LocalRebuilder
from rolltap.proxy.reading_process.questions import TENANT_HEADER, TIMELINE_HEADER, SessionEnds, encode, names_of
from rolltap.proxy.viewer.listing import Selections
from rolltap.proxy.viewer.one_file import SavedPages
from rolltap.proxy.viewer.pages import Pages
from rolltap.reading.reader import folder_vocabulary, opened_readers
from rolltap.reading.runs import step_files
from rolltap.reading.tokens import Vocabulary
from rolltap.reconstructor.reconstruct import reconstruct
from rolltap.reconstructor.rules import Rules, session_rules
from rolltap.settings import Settings
from rolltap.tenants import acting_for
from rolltap.types import Session, Trajectory

NICENESS = 5
"""Agents' calls, in the parent, have priority where processors are short."""

MEMORY_SHARE = 0.5


ERROR_STATUS = 400
"""Status of a reply that is a `WireError`."""


class WireError(msgspec.Struct):
    """A `RolltapError` as sent to the parent, with the name of its class."""

    name: str
    message: str
    param: str | None
    retry_after: float | None


def error_response(error: RolltapError) -> Response:
    wire_error = WireError(type(error).__name__, error.message, error.param, error.retry_after)
    return Response(msgspec.json.encode(wire_error), ERROR_STATUS, media_type="application/json")


class QuestionApp:
    """The ASGI application: calls the method that a path names. It sets `stop` when a question finds no memory."""

    def __init__(self, *responders: Any, stop: asyncio.Event) -> None:
        self._stop = stop
        self._methods: dict[str, Callable[..., Awaitable[Any]]] = {}
        self._arguments: dict[str, Any] = {}
        for each in responders:
            for name, function in names_of(type(each)).items():
                if inspect.iscoroutinefunction(function):
                    self._methods[name] = function.__get__(each)
                    hints = get_type_hints(function)
                    parameters = list(inspect.signature(function).parameters)[1:]
                    self._arguments[name] = [hints[parameter] for parameter in parameters]

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        request = Request(scope, receive)
        try:
            media_type, body = await self._answer(request.url.path[1:], await request.body())
            response = Response(body, media_type=media_type)
        except RolltapError as error:
            response = error_response(error)
        except asyncio.CancelledError:  # this process ends; to uvicorn a cancelled answer is a fault of the application
            response = error_response(StoreUnavailable("the reading process was stopped", retry_after=1))
        except MemoryError:
            message = "reading this takes more memory than the process may use; ask for less at once"
            await error_response(StoreUnavailable(message, retry_after=1))(scope, receive, send)
            self._stop.set()
            return
        await response(scope, receive, send)

    async def _answer(self, name: str, body: bytes) -> tuple[str, bytes]:
        if name not in self._methods:
            raise NotFound(f"the reading process knows no question {name!r}")
        arguments: Sequence[Any] = msgspec.json.decode(body)
        types = self._arguments[name][: len(arguments)]
        values = [convert(value, type) for value, type in zip(arguments, types, strict=True)]
        return await asyncio.to_thread(encode, await self._methods[name](*values))


class TenantRouter:
    """Sends each tenant's questions to its own objects: nothing that they keep in memory is shown to another tenant.

    `expect` gets the timeline that each question comes with: see `Database.expect`.
    """

    def __init__(self, make: Callable[[], QuestionApp], expect: Callable[[int], None]) -> None:
        self._make = make
        self._expect = expect
        self._of_tenant: dict[str, QuestionApp] = {}

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        headers = dict(scope["headers"])
        self._expect(int(headers[TIMELINE_HEADER.encode()]))
        tenant = headers[TENANT_HEADER.encode()].decode()
        with acting_for(tenant):
            if tenant not in self._of_tenant:
                self._of_tenant[tenant] = self._make()
            await self._of_tenant[tenant](scope, receive, send)


class _Server(uvicorn.Server):
    """Ends with its parent, not by a signal to the whole process group."""

    def capture_signals(self) -> Any:
        return nullcontext()


class Vocabularies:
    """One tokenizer per policy, read from its folder at first use."""

    def __init__(self, folders: Mapping[str, str]) -> None:
        self._folders = folders
        self._known: dict[str, Vocabulary] = {}

    def of_policy(self, policy: str) -> Vocabulary | None:
        """Returns the policy's tokenizer; None if it has no folder: then only its upstream has one."""
        folder = self._folders.get(policy)
        if folder and folder not in self._known:
            self._known[folder] = folder_vocabulary(Path(folder))
        return self._known.get(folder or "")


def rules_of(settings: Settings) -> Callable[[Session], Rules]:
    """Returns the rules by session: the calls of its policy carry loss, as that policy's settings say."""

    def rules(session: Session) -> Rules:
        policy = settings.policies.get(session.policy)
        return session_rules(session, policy.train if policy else ())

    return rules


class FailedApp:
    """The ASGI application if the record can't be opened: answers the question with the error, then sets `stop`."""

    def __init__(self, error: RolltapError, stop: asyncio.Event) -> None:
        self._error = error
        self._stop = stop

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await Request(scope, receive).body()
        await error_response(self._error)(scope, receive, send)
        self._stop.set()


async def answer_questions(settings: Settings, socket_fd: int) -> None:
    """Serves until standard input ends; if the record can't be opened, until the first question."""
    stop = asyncio.Event()
    asyncio.get_running_loop().add_reader(sys.stdin.fileno(), stop.set)
    folders = {name: policy.tokenizer for name, policy in settings.policies.items()}
    rules = rules_of(settings)
    vocabulary = Vocabularies(folders).of_policy
    async with AsyncExitStack() as stack:
        try:
            opened = opened_readers(
                settings.store_url,
                rules=rules,
                vocabulary=vocabulary,
                connections=settings.store.reading_connections,
                indexes=settings.data,
                metrics=step_files(settings),
                newer=True,  # the parent is connected
            )
            readers = await stack.enter_async_context(opened)
        except RolltapError as error:  # the store is unavailable: the next question starts a new process
            await _serve(FailedApp(error, stop), socket_fd, stop)
            return

        async def trajectories(session_ids: Sequence[str], policy: str = "", /) -> list[Trajectory]:
            sessions = await readers.log.calls(session_ids)

            def rebuild(session_id: str) -> Trajectory:
                if session_id not in sessions:
                    return reconstruct(())
                session, calls = sessions[session_id]
                return reconstruct(calls, rules=rules(replace(session, policy=policy or session.policy)))

            return await asyncio.to_thread(lambda: [rebuild(session_id) for session_id in session_ids])

        def make_answering() -> QuestionApp:
            reader, database = readers.own(), readers.log.database
            ends = SessionEnds(readers.log, trajectories)
            rebuilder = LocalRebuilder(database, trajectories, readers.log.images)
            pages, saved, selections = Pages(reader, database.name), SavedPages(reader), Selections(reader)
            return QuestionApp(reader, pages, saved, selections, ends, rebuilder, stop=stop)

        await _serve(TenantRouter(make_answering, readers.log.database.expect), socket_fd, stop)


async def _serve(application: Any, socket_fd: int, stop: asyncio.Event) -> None:
    config = uvicorn.Config(application, fd=socket_fd, log_level="warning", access_log=False, lifespan="off", ws="none")
    server = _Server(config)
    serving = asyncio.create_task(server.serve())
    await stop.wait()
    asyncio.get_running_loop().remove_reader(sys.stdin.fileno())
    server.should_exit = server.force_exit = True
    await serving


def limit_memory() -> None:
    """Sets the kernel's limit for what this process may write to, which excludes what threads only reserve."""
    with suppress(OSError):  # a sandbox may show no /proc
        Path("/proc/self/oom_score_adj").write_text("1000")
    share = int(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") * MEMORY_SHARE)
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (share if hard == resource.RLIM_INFINITY else min(share, hard), hard))


def main() -> None:
    import uvloop

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes of a terminal: the parent decides
    os.nice(NICENESS)
    limit_memory()
    if settings_line := sys.stdin.buffer.readline():  # empty: the parent was killed before it sent the settings
        uvloop.run(answer_questions(Settings.model_validate_json(settings_line), int(sys.argv[1])))


if __name__ == "__main__":
    main()
