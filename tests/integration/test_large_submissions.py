"""A submission of several requests, by our client to a running server: replies are lost, and the client is killed."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from rolltap.contract.admin import SubmitTasks
from rolltap.contract.operations import Request
from rolltap.contract.planes import AdminPlane
from rolltap.engine.scripted import say
from rolltap.errors import InvalidRequest, LedgerError, NotFound
from rolltap.harnesses.client import AdminClient
from rolltap.types import Task

from ..harnesses.house import POLICY, House, house

SPEC = {"harness": "command", "argv": ["true"], "evaluator": {"kind": "session_completed"}}
TASKS = [Task(f"t{number}", "hi", {**SPEC, "files": {"a": "x" * 100_000}}) for number in range(35)]


class Killed(Exception):
    pass


class UnluckyClient(AdminClient):
    """Some replies are lost; after some it is killed."""

    def __init__(self, *given: Any, fate: random.Random) -> None:
        super().__init__(*given)
        self.fate = fate

    async def _once(
        self, session: aiohttp.ClientSession, request: Request[Any], tries: Iterator[dict[str, str]]
    ) -> bytes:
        reply = await super()._once(session, request, tries)
        match self.fate.randrange(5):
            case 0:
                raise aiohttp.ServerDisconnectedError
            case 1:
                raise Killed
        return reply


@pytest.fixture
async def home(tmp_path: Path) -> AsyncIterator[House]:
    async with house(say("Hello."), tmp_path) as home:
        yield home


@pytest.mark.parametrize("seed", [2, 4, 8])
async def test_replies_that_are_lost_and_clients_that_are_killed(home: House, seed: int) -> None:
    work = SubmitTasks(POLICY, 2, TASKS, id="large")
    assert len(work.parts()) == 4
    fate, killed = random.Random(seed), 0
    while True:
        async with UnluckyClient(home.client.url, home.client.key, fate=fate) as client:
            try:
                told = await client.submit(work)
                break
            except Killed:
                killed += 1
                try:
                    assert (await home.client.ask(AdminPlane.submission, "large")).queued == len(TASKS)
                except NotFound:
                    assert not (await home.client.ask(AdminPlane.work_waits)).waiting
    assert (told.tasks, told.queued) == (len(TASKS), len(TASKS))
    assert killed
    assert await home.client.submit(work) == told
    with pytest.raises(LedgerError, match="other tasks"):
        await home.client.submit(SubmitTasks(POLICY, 2, [*TASKS[1:], TASKS[0]], id="large"))
    claimed = await home.client.claim_rollouts("node", 100, ttl=60, wait=0)
    assert [one.task for one in claimed] == [task for task in TASKS for _ in range(2)]


async def test_a_task_that_is_too_large_says_what_to_do(home: House) -> None:
    large = Task("large", "hi", {**SPEC, "files": {"a": "x" * (1 << 20)}})
    with pytest.raises(InvalidRequest, match=r"task large takes a request of .* bytes.*`folder` or a `repository`"):
        await home.client.submit(SubmitTasks(POLICY, 1, [*TASKS, large]))
    assert not (await home.client.ask(AdminPlane.work_waits)).waiting


async def test_a_part_names_its_submission(home: House) -> None:
    with pytest.raises(InvalidRequest, match="has the submission's id"):
        SubmitTasks(POLICY, 1, TASKS[:1], total=2)
