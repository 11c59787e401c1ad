"""Group commit: together, in order, and each caller told what became of its own entry."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from rolltap.calllog.sql import MAX_ENTRIES, GroupCommit, PendingWrite
from rolltap.errors import RecordCorrupt, StoreUnavailable


class Store:
    """Takes groups; holds each back until it is let through."""

    def __init__(self) -> None:
        self.groups: list[list[int]] = []
        self.asked = asyncio.Event()
        self.gate = asyncio.Event()
        self.failure: Exception | None = None

    async def commit(self, group: Sequence[PendingWrite[int]]) -> None:
        self.asked.set()
        await self.gate.wait()
        self.groups.append([entry.value for entry in group])
        if self.failure is not None:
            raise self.failure
        for entry in group:
            if entry.value < 0:
                entry.failure = RecordCorrupt(f"{entry.value} is negative")


@pytest.fixture
async def store() -> Store:
    return Store()


@pytest.fixture
async def commits(store: Store) -> GroupCommit[int]:
    commits = GroupCommit(store.commit)
    commits.start()
    return commits


async def test_what_waits_during_a_commit_is_written_together_in_order(store: Store, commits: GroupCommit[int]):
    first = commits.append(0)
    await store.asked.wait()
    rest = [commits.append(value) for value in range(1, 50)]
    await asyncio.sleep(0)
    assert not first.done()
    store.gate.set()
    await asyncio.gather(first, *rest)
    assert store.groups == [[0], list(range(1, 50))]
    await commits.close()


async def test_a_failure_of_one_entry_is_its_callers_alone(store: Store, commits: GroupCommit[int]):
    store.gate.set()
    results = await asyncio.gather(*map(commits.append, (1, -2, 3)), return_exceptions=True)
    assert [type(result) for result in results] == [type(None), RecordCorrupt, type(None)]
    await commits.close()


@pytest.mark.parametrize("failure", [StoreUnavailable("away"), ZeroDivisionError("a bug")])
async def test_a_failed_group_is_told_to_all_and_the_next_one_is_tried(
    store: Store, commits: GroupCommit[int], failure: Exception
):
    store.gate.set()
    store.failure = failure
    results = await asyncio.gather(commits.append(1), commits.append(2), return_exceptions=True)
    assert results == [failure, failure]
    store.failure = None
    await commits.append(3)
    assert store.groups[-1] == [3]
    await commits.close()


async def test_an_entry_without_hurry_rides_along(store: Store, commits: GroupCommit[int]):
    store.gate.set()
    slow = commits.append(1, hurry=False)
    await commits.append(2)
    await slow
    assert store.groups == [[1, 2]]
    await commits.append(3, hurry=False)
    assert store.groups == [[1, 2], [3]]
    await commits.close()


async def test_closing_writes_what_waits_and_refuses_more(store: Store, commits: GroupCommit[int]):
    store.gate.set()
    values = range(MAX_ENTRIES + 10)
    waiting = [commits.append(value, hurry=False) for value in values]
    await commits.close()
    await asyncio.gather(*waiting)
    assert [value for group in store.groups for value in group] == list(values)
    with pytest.raises(StoreUnavailable):
        await commits.append(1)


async def test_a_cancelled_caller_leaves_its_entry(store: Store, commits: GroupCommit[int]):
    first = commits.append(1)
    await store.asked.wait()
    first.cancel()
    store.gate.set()
    await commits.append(2)
    assert store.groups == [[1], [2]]
    await commits.close()
