"""The spool keeps what it acknowledged through any cut, and takes over and hands back without losing order."""

from __future__ import annotations

import asyncio
import errno
import shutil
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

import pytest

from rolltap.calllog import spool as spool_writer
from rolltap.calllog.codec import EncodedFact, encode_fact
from rolltap.calllog.facts import Delivery
from rolltap.calllog.spool import OPEN_SHARE, START, Spool, SpoolWriter
from rolltap.errors import ConfigError, RecordCorrupt, StoreUnavailable

from .facts import a_completion, an_intent

LIMIT = 100_000


def opened(path: Path) -> Spool:
    spool = Spool(path, LIMIT)
    spool.open()
    return spool


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "sub" / "spool"


def test_records_survive_the_process(path: Path):
    spool = opened(path)
    spool.append([b"one", b"two"])
    spool.append([b"three"])
    spool.close()
    again = opened(path)
    assert again.count == 3
    assert again.read()[0] == [b"one", b"two", b"three"]
    again.append([b"four"])
    assert again.read()[0][3:] == [b"four"]
    again.close()


def removed(path: Path) -> None:
    path.unlink()


def folder_removed(path: Path) -> None:
    shutil.rmtree(path.parent)


def replaced(path: Path) -> None:
    path.rename(path.with_name("other"))
    path.write_bytes(b"")


LOSSES = [removed, folder_removed, replaced]


@pytest.mark.parametrize("lose", LOSSES)
def test_what_is_appended_to_a_spool_whose_file_has_gone_is_found_at_the_next_start(
    path: Path, lose: Callable[[Path], None]
) -> None:
    spool = opened(path)
    spool.append([b"in the store by now"])
    spool.clear()
    lose(path)
    spool.append([b"one"])
    spool.append([b"two"])
    spool.close()
    again = opened(path)
    assert again.read()[0] == [b"one", b"two"]
    again.close()


def test_a_spool_that_could_not_be_made_anew_is_made_when_it_can(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    spool = opened(path)
    path.unlink()
    with monkeypatch.context() as disk:
        disk.setattr("os.posix_fallocate", full)
        for _ in range(2):
            with pytest.raises(StoreUnavailable, match=r"cannot allocate the spool .*No space left"):
                spool.append([b"one"])
    spool.append([b"two"])
    spool.close()
    again = opened(path)
    assert again.read()[0] == [b"two"]
    again.close()


@pytest.mark.parametrize("lose", LOSSES)
def test_a_spool_whose_file_has_gone_keeps_its_records_for_the_store_and_takes_no_more(
    path: Path, lose: Callable[[Path], None]
) -> None:
    spool = opened(path)
    spool.append([b"one"])
    lose(path)
    with pytest.raises(StoreUnavailable, match="was removed while it holds 1 facts"):
        spool.append([b"two"])
    assert spool.read()[0] == [b"one"]
    spool.clear()
    spool.append([b"three"])
    spool.close()


def test_what_was_cleared_never_comes_back(path: Path):
    spool = opened(path)
    spool.append([b"a" * 20, b"b" * 20, b"c" * 20])
    spool.clear()
    spool.append([b"d" * 20])
    spool.close()
    again = opened(path)
    assert again.read()[0] == [b"d" * 20]
    again.close()


def test_a_write_that_was_cut_off_anywhere_leaves_the_records_before_it(path: Path):
    spool = opened(path)
    spool.append([b"first", b"second"])
    _, end = spool.read()
    spool.append([b"the last one"])
    spool.close()
    whole = path.read_bytes()
    _, last = len(whole), end + 8 + len(b"the last one")
    for cut in range(end, last):
        path.write_bytes(whole[:cut] + b"\0" * (len(whole) - cut))
        again = opened(path)
        assert again.read()[0] == [b"first", b"second"]
        again.append([b"next"])
        assert again.read()[0] == [b"first", b"second", b"next"]
        again.close()


def test_a_read_ends_at_a_count_or_a_size(path: Path):
    spool = opened(path)
    spool.append([b"a" * 20, b"b" * 20, b"c" * 20])
    first, position = spool.read(count=1)
    assert first == [b"a" * 20]
    assert spool.left(position) == 2 * Spool.size(b"b" * 20)
    assert spool.read(position, most_bytes=1)[0] == [b"b" * 20]
    assert spool.read(position, most_bytes=Spool.size(b"b" * 20) + 1)[0] == [b"b" * 20, b"c" * 20]
    spool.close()


def test_it_takes_its_room_at_once(path: Path):
    spool = opened(path)
    assert path.stat().st_blocks * 512 >= LIMIT
    assert spool.room(for_new_calls=False) == LIMIT - START
    assert spool.room(for_new_calls=True) == int(LIMIT * OPEN_SHARE) - START
    spool.close()


def test_one_process_uses_it_at_a_time(path: Path):
    spool = opened(path)
    with pytest.raises(ConfigError, match=r"another process uses the spool .*; give each process its own"):
        opened(path)
    spool.close()


def test_another_file_is_not_taken_for_a_spool(path: Path):
    path.parent.mkdir()
    path.write_bytes(b"something else entirely" * 10)
    with pytest.raises(RecordCorrupt, match="not a spool"):
        opened(path)
    assert path.read_bytes().startswith(b"something else")


class Store:
    """A store that can be taken away."""

    waiting = 0
    unseen = 0
    blind = False
    refused = 0
    spool = None

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    async def settled(self) -> None: ...

    def __init__(self) -> None:
        self.call_ids: list[str] = []
        self.away = False
        self.slow_s = 0.0
        self.answers = asyncio.Event()
        self.answers.set()
        self.refuses: set[str] = set()
        self.asked = asyncio.Event()

    async def write(self, facts: Sequence[EncodedFact]) -> None:
        self.asked.set()
        if self.away:
            raise StoreUnavailable("away")
        await asyncio.sleep(self.slow_s)
        await self.answers.wait()
        for fact in facts:
            if fact.row[0] in self.refuses:
                fact.failure = RecordCorrupt("refused")
            else:
                self.call_ids.append(fact.row[0])


@pytest.fixture
async def store() -> Store:
    return Store()


@pytest.fixture
async def writer(store: Store, path: Path) -> AsyncIterator[SpoolWriter]:
    writer = SpoolWriter(store, Spool(path, LIMIT), probe_s=0.01)
    await writer.start()
    yield writer
    await writer.close()


async def write(writer: SpoolWriter, *call_ids: str) -> list[EncodedFact]:
    facts = [encode_fact(Delivery(call_id, True)) for call_id in call_ids]
    await writer.write(facts)
    return facts


async def test_nothing_is_spooled_while_the_store_is_there(store: Store, writer: SpoolWriter):
    await write(writer, "a", "b")
    assert store.call_ids == ["a", "b"]
    assert writer.waiting == 0
    await writer.settled()


async def test_the_spool_takes_over_and_is_drained_in_order(
    store: Store, writer: SpoolWriter, monkeypatch: pytest.MonkeyPatch
):
    await write(writer, "a")
    store.away = True
    for call_id in "bcd":
        assert [fact.failure for fact in await write(writer, call_id)] == [None]
    assert writer.waiting == 3
    with monkeypatch.context() as patch:
        patch.setattr(spool_writer, "BACK_WITHIN_S", 0.1)
        with pytest.raises(StoreUnavailable, match="the store is unavailable"):
            await writer.settled()
    store.away = False
    await write(writer, "e")
    while writer.waiting:  # noqa: ASYNC110 - the writer's own task empties it
        await asyncio.sleep(0.005)
    await write(writer, "f")
    assert sorted(store.call_ids) == list("abcdef")
    assert [name for name in store.call_ids if name in "bcd"] == list("bcd")


async def test_a_store_that_goes_away_again_while_the_spool_is_cleared_gets_all_of_it(
    store: Store, path: Path, monkeypatch: pytest.MonkeyPatch
):
    clearing, go_on = threading.Event(), threading.Event()
    spool = Spool(path, LIMIT)
    clear = spool.clear

    def slow_clear() -> None:
        clearing.set()
        go_on.wait(60)
        clear()

    monkeypatch.setattr(spool, "clear", slow_clear)
    writer = SpoolWriter(store, spool, probe_s=0.01)
    await writer.start()
    store.away = True
    await write(writer, "a")
    store.away = False
    assert await asyncio.to_thread(clearing.wait, 10)
    store.away = True
    writing = asyncio.create_task(write(writer, "b"))
    await asyncio.sleep(0.05)
    go_on.set()
    await writing
    store.away = False
    await asyncio.wait_for(writer.settled(), 20)
    assert store.call_ids == ["a", "b"]
    await writer.close()


async def test_what_comes_while_the_spool_is_drained_goes_to_the_store_after_it(
    store: Store, writer: SpoolWriter, monkeypatch: pytest.MonkeyPatch
):
    """A peer that reads from the store never finds a call there before its parent."""
    monkeypatch.setattr(writer, "_batch", 1)
    store.away = True
    await write(writer, *"abcdef")
    store.slow_s = 0.02
    store.away = False
    later = [str(number) for number in range(200)]
    for call_id in later:
        await write(writer, call_id)
    await asyncio.wait_for(writer.settled(), 20)
    assert store.call_ids == [*"abcdef", *later]
    assert writer.waiting == 0


async def test_facts_that_come_faster_than_the_spool_is_drained_are_refused_until_it_is_empty(store: Store, path: Path):
    writer = SpoolWriter(store, Spool(path, LIMIT), probe_s=0.01)
    await writer.start()
    store.away = True
    await write(writer, "first")
    store.answers.clear()
    store.asked.clear()
    store.away = False
    await store.asked.wait()
    intents: list[EncodedFact] = []
    while not intents or intents[-1].failure is None:
        intents.append(encode_fact(an_intent("session")))
        await writer.write(intents[-1:])
    assert "spool is full" in str(intents[-1].failure)
    store.answers.set()
    await asyncio.wait_for(writer.settled(), 20)
    assert store.call_ids == ["first", *(intent.row[0] for intent in intents[:-1])]
    await write(writer, "after")
    assert store.call_ids[-1] == "after"
    await writer.close()


class SlowStore(Store):
    """A store that takes its time for each fact, and writes all or none."""

    async def write(self, facts: Sequence[EncodedFact]) -> None:
        await asyncio.sleep(0.002 * len(facts) if not self.away else 0)
        await super().write(facts)


@pytest.mark.parametrize("when", ["running", "at the next start"])
async def test_a_store_that_is_too_slow_for_a_whole_batch_gets_all_of_the_spool(path: Path, when: str):
    store = SlowStore()
    writer = SpoolWriter(store, Spool(path, LIMIT), probe_s=0.01 if when == "running" else 60, stall_s=0.2)
    await writer.start()
    call_ids = [str(number) for number in range(500)]
    store.away = True
    await write(writer, *call_ids)
    if when == "at the next start":
        await writer.close()
        store.away = False
        writer = SpoolWriter(store, Spool(path, LIMIT), stall_s=0.2)
        await writer.start()
    store.away = False
    while writer.waiting:  # noqa: ASYNC110 - the writer's own task empties it
        await asyncio.sleep(0.005)
    assert store.call_ids == call_ids
    await writer.close()


async def test_a_reader_waits_for_a_store_that_is_away_for_a_moment(store: Store, writer: SpoolWriter):
    store.away = True
    await write(writer, "a")
    reader = asyncio.create_task(writer.settled())
    await asyncio.sleep(0.05)
    assert not reader.done()
    store.away = False
    await asyncio.wait_for(reader, 20)
    assert store.call_ids == ["a"]


async def test_readers_wait_for_the_spools_of_other_workers(store: Store, path: Path):
    """A group that one worker ends may have calls which another one took while the store was away."""
    other_path = path.with_name("spool-1")
    other = opened(other_path)
    writer = SpoolWriter(store, Spool(path, LIMIT), others=[other_path, path.with_name("spool-2")])
    await writer.start()
    await asyncio.wait_for(writer.settled(), 20)
    other.append([b"a call's end"])
    reader = asyncio.create_task(writer.settled())
    assert not (await asyncio.wait([reader], timeout=0.3))[0]
    other.clear()
    await asyncio.wait_for(reader, 20)
    other.append([b"another"])
    with pytest.raises(StoreUnavailable, match="catching up"):
        await settled_within(writer, 0.2)
    await writer.close()
    other.close()


async def test_a_reader_is_not_told_that_a_spool_which_can_not_be_read_is_empty(
    store: Store, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This process has no file descriptor left, for instance."""
    other = opened(other_path := path.with_name("spool-1"))
    other.append([b"a call's end"])
    writer = SpoolWriter(store, Spool(path, LIMIT), others=[other_path])
    await writer.start()

    def refuse(path: Path, *_: object, **__: object) -> object:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(StoreUnavailable, match="spool-1 of another worker can't be read: Too many open files"):
        await settled_within(writer, 0.2)
    monkeypatch.undo()
    await writer.close()
    other.close()


async def settled_within(writer: SpoolWriter, seconds: float) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(spool_writer, "CATCH_UP_S", seconds)
        await writer.settled()


async def test_a_full_spool_refuses_new_calls_and_still_takes_the_ends_of_open_ones(store: Store, path: Path):
    writer = SpoolWriter(store, Spool(path, LIMIT), probe_s=60)
    await writer.start()
    store.away = True
    taken = 0
    while True:
        intent = encode_fact(an_intent("session"))
        await writer.write([intent])
        if intent.failure is not None:
            break
        taken += 1
    assert taken > 100
    assert isinstance(intent.failure, StoreUnavailable)
    assert intent.failure.retry_after
    ends = [encode_fact(a_completion(f"{number}")) for number in range(30)]
    await writer.write(ends)
    assert all(end.failure is None for end in ends)
    await writer.close()


async def test_what_a_killed_process_spooled_goes_to_the_store_at_the_next_start(store: Store, path: Path):
    spool = opened(path)
    killed = SpoolWriter(store, spool, probe_s=60)
    store.away = True
    await write(killed, "a", "b")
    spool.close()
    store.away = False
    writer = SpoolWriter(store, Spool(path, LIMIT))
    await writer.start()
    assert store.call_ids == ["a", "b"]
    await writer.close()


async def test_what_the_store_refuses_from_the_spool_is_kept_and_reported(
    store: Store, writer: SpoolWriter, path: Path, caplog: pytest.LogCaptureFixture
):
    store.away = True
    await write(writer, "good", "bad", "fine")
    store.refuses.add("bad")
    store.away = False
    while writer.waiting:  # noqa: ASYNC110 - the writer's own task empties it
        await asyncio.sleep(0.005)
    assert store.call_ids == ["good", "fine"]
    assert b"bad" in path.with_name("spool.refused").read_bytes()
    assert "call bad" in caplog.text


def damage(path: Path, word: bytes) -> None:
    at = path.read_bytes().index(word)
    with path.open("r+b") as file:
        file.seek(at)
        file.write(b"?")


async def test_a_spool_that_the_disk_damages_is_kept_and_reported(
    store: Store, writer: SpoolWriter, path: Path, caplog: pytest.LogCaptureFixture
):
    store.away = True
    await write(writer, "good", "damaged", "lost")
    damage(path, b"damaged")
    store.asked.clear()
    await store.asked.wait()  # what was read before the damage has been refused
    store.away = False
    while writer.waiting:  # noqa: ASYNC110 - the writer's own task empties it
        await asyncio.sleep(0.005)
    assert store.call_ids == ["good"]
    assert "cannot read 2 facts of the spool" in caplog.text
    (copy,) = path.parent.glob("spool.damaged*")
    assert b"lost" in copy.read_bytes()


class HangingStore(Store):
    async def write(self, facts: Sequence[EncodedFact]) -> None:
        await asyncio.Event().wait()


async def test_a_store_that_hangs_is_away(path: Path, caplog: pytest.LogCaptureFixture):
    writer = SpoolWriter(HangingStore(), Spool(path, LIMIT), stall_s=0.02)
    await writer.start()
    (fact,) = await write(writer, "a")
    assert fact.failure is None
    assert writer.waiting == 1
    assert "the store is unavailable, calls go to the spool: a commit took too long" in caplog.text
    await writer.close()
    kept = opened(path)
    assert kept.count == 1
    kept.close()
