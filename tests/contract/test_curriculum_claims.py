"""What a claim reads of the queue, and what it does with tasks that others take meanwhile, over every database."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import pytest
import pytest_asyncio
import sqlalchemy as sa

from rolltap.calllog.database import Database
from rolltap.contract.admin import ClaimRollouts
from rolltap.contract.control import RolloutControl
from rolltap.ledger import nodes, submissions
from rolltap.ledger.submissions import SubmissionSpec
from rolltap.ledger.unit_of_work import Tx
from rolltap.types import Task

from ..unit.ledger.world import World, empty

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(loop_scope="module")
async def world(database: Database) -> World:
    await empty(database)
    world = World(database)
    await world.ledger.policies.register("policy")
    tasks = tuple(Task(f"{tag}{number}", "do it", tags=(tag,)) for number in range(8) for tag in ("easy", "hard"))
    await world.ledger.submissions.submit(SubmissionSpec("policy", 1, tasks), submission_id="s")
    return world


async def claim(world: World, capacity: int, node: str = "node", wait: float = 0.0) -> list[str]:
    """The tasks of the rollouts that a node claims."""
    return [one.task.id for one in await world.ledger.nodes.claim(node, ClaimRollouts(capacity, wait=wait))]


async def curriculum(world: World, **weights: float) -> None:
    await world.ledger.controls.set("policy", RolloutControl(curriculum=weights))


def reads(patch: pytest.MonkeyPatch) -> list[str]:
    """The statements from now on that read the queue."""
    statements: list[str] = []

    def watched(name: str) -> None:
        inner = getattr(Tx, name)

        def call(tx: Tx, statement: sa.Executable) -> Any:
            if "JOIN submissions ON" in (text := str(statement)):
                statements.append(text)
            return inner(tx, statement)

        patch.setattr(Tx, name, call)

    watched("all")
    watched("first")
    return statements


def meanwhile(world: World, patch: pytest.MonkeyPatch, act: Callable[[], Coroutine[Any, Any, Any]]) -> list[Any]:
    """Has `act` done once a claim has read the queue, before it locks a task; the actions under way."""
    loop, acting, read = asyncio.get_running_loop(), list[Any](), submissions._by_name

    def slow(tx: Tx, *arguments: Any) -> Any:
        tasks_by_key = read(tx, *arguments)
        if not acting:
            acting.append(None)
            acting[0] = asyncio.run_coroutine_threadsafe(act(), loop)
            if tx.connection.dialect.name == "postgresql":  # on SQLite one transaction waits for the other
                while not acting[0].done():
                    tx.connection.exec_driver_sql("SELECT pg_sleep(0.02)")
        return tasks_by_key

    patch.setattr(submissions, "_by_name", slow)
    return acting


async def test_a_claim_reads_the_tasks_once_and_only_for_a_curriculum(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        statements = reads(patch)
        assert len(await claim(world, 6)) == 6
        assert statements
        assert not any("tasks" in text for text in statements)
    await curriculum(world, easy=1.0, hard=1.0)
    with monkeypatch.context() as patch:
        statements = reads(patch)
        assert len(await claim(world, 6)) == 6
        assert sum("JOIN tasks" in text for text in statements) == 1


async def test_work_that_a_curriculum_holds_back_starts_no_claim(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    await curriculum(world, nothing=1.0)
    claims: list[str] = []
    original = nodes._claim

    def counted(tx: Tx, node: str, *more: Any) -> Sequence[Any]:
        claims.append(node)
        return original(tx, node, *more)

    monkeypatch.setattr(nodes, "_claim", counted)
    waiting = asyncio.create_task(claim(world, 2, wait=10.0))
    await asyncio.sleep(1.2)  # more than two polls
    assert claims == ["node"]
    assert await world.ledger.nodes.has_work()
    await curriculum(world, hard=1.0)
    assert await asyncio.wait_for(waiting, 20) == ["hard0", "hard1"]
    assert claims == ["node"] * 2


async def test_a_submission_that_is_cancelled_after_the_queue_was_read_hands_out_nothing(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    await curriculum(world, easy=1.0)
    with monkeypatch.context() as patch:
        cancelling = meanwhile(world, patch, lambda: world.ledger.submissions.cancel("s"))
        own_claim = await claim(world, 2)
    assert (await asyncio.wrap_future(cancelling[0])).ended
    assert own_claim in ([], ["easy0", "easy1"])  # on SQLite the claim comes first
    assert await claim(world, 2) == []


async def test_a_claim_reads_again_when_others_took_all_that_it_read(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    await curriculum(world, easy=1.0)
    with monkeypatch.context() as patch:
        others = meanwhile(world, patch, lambda: claim(world, 2, node="other"))
        own_claim = await claim(world, 2)
    other_claim = await asyncio.wrap_future(others[0])
    assert sorted([*own_claim, *other_claim]) == ["easy0", "easy1", "easy2", "easy3"]
