"""Replicas behind one name: sessions stay, new ones spread, the broken leave and come back."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

from rolltap.contract.trainer import Transfer
from rolltap.engine.scripted import Fault, ScriptedEngine, ScriptedReply, say
from rolltap.engine.tiny import FOLDER
from rolltap.errors import ConfigError, EngineError, EngineTimeout, EngineUnavailable, WeightsLost
from rolltap.protocols.conversation import ChatRequest, Sampling
from rolltap.proxy.engines.base import ChatCall, Engine, EngineFacts, PauseMode, SampleChunk, SampleRequest, Take
from rolltap.proxy.engines.chat_wire import headers_of
from rolltap.proxy.engines.decode import Output
from rolltap.proxy.engines.pool import FAILURES, LOAD, EnginePool
from rolltap.proxy.engines.receivers import Receiver
from rolltap.proxy.engines.registry import open_chat_engine, open_engine
from rolltap.proxy.engines.retries import Retries
from rolltap.proxy.engines.sglang import SglangOutput
from rolltap.proxy.engines.vllm_wire import GenerateOutput
from rolltap.settings import EngineSettings

from ...contract.engine_world import collect


def request(session: str = "", id: str = "call", origin: str = "") -> SampleRequest:
    return SampleRequest(id=id, model="m", prompt_ids=[1, 2], max_tokens=5, session_id=session, origin_id=origin)


class Told:
    """A replica that does as its switches say. `gate` holds its outputs until it is set."""

    receiver: ToldReceiver | None = None

    def __init__(self, name: str) -> None:
        self.name = name
        self.up = True
        self.takes_weights = True
        self.seen: list[str] = []
        self.weights: list[tuple[str, int, str]] = []
        self.state = "running"
        self.gate = asyncio.Event()
        self.gate.set()

    async def probe(self) -> EngineFacts:
        self._check()
        if self.state != "running":
            raise EngineTimeout("a one-token call took over 60 s")
        return EngineFacts("told", f"http://{self.name}", ("m", self.name), 100, True, True, "processed")

    async def sample(self, request: SampleRequest, take: Take) -> None:
        self.seen.append(request.session_id)
        self._check()
        await self.gate.wait()
        take(SampleChunk([1], [-0.5], "stop"))

    async def pause(self, mode: PauseMode) -> None:
        self._check()
        self.state = mode

    async def resume(self) -> None:
        self._check()
        self.state = "running"

    async def load_weights(self, path: str, version: int, adapter: str = "") -> None:
        self._check()
        if not self.takes_weights:
            raise EngineError("no such folder")
        self.weights.append((path, version, adapter))

    async def close(self) -> None: ...

    def _check(self) -> None:
        if not self.up:
            raise EngineUnavailable(f"{self.name} is down")


class ToldReceiver:
    """Receives at once, unless it `waits` for ever or has a `failure`."""

    def __init__(self, replica: Told, ranks: int = 1) -> None:
        self._replica = replica
        self._ranks = ranks
        self.received: list[tuple[int, int]] = []
        self.holding = 0
        self.failure: EngineError | None = None
        self.waits = False

    async def ranks(self) -> int:
        self._replica._check()
        return self._ranks

    async def holds(self, version: int) -> bool:
        self._replica._check()
        return self.holding == version

    async def join(self, transfer: Transfer, first_rank: int = 1) -> None:
        self.first_rank = first_rank
        self._replica._check()

    async def receive(self, transfer: Transfer) -> None:
        if self.failure is not None:
            raise self.failure
        if self.waits:
            await asyncio.Event().wait()
        self.received.append((transfer.version, self.first_rank))
        self.holding = transfer.version


@pytest.fixture
def replicas() -> list[Told]:
    return [Told("a"), Told("b"), Told("c")]


@pytest.fixture
async def pool(replicas: list[Told]) -> AsyncIterator[EnginePool]:
    engines: list[Engine] = [*replicas]
    pool = EnginePool("main", engines, retries=Retries(first_wait_s=0), probe_every_s=0.01)
    yield pool
    await pool.close()


async def sample(pool: EnginePool, session: str = "", origin: str = "") -> list[SampleChunk]:
    return await collect(pool.sample, request(session, origin=origin))


async def until_all_serve(pool: EnginePool) -> None:
    async with asyncio.timeout(20):
        await asyncio.gather(*pool.replicas._tasks)
    assert not any(replica.ejected for replica in pool.replicas)


def receiver_of(pool: EnginePool) -> Receiver:
    assert pool.receiver is not None
    return pool.receiver


def settings(url: str) -> EngineSettings:
    return EngineSettings.model_validate({"kind": "vllm", "url": url})


async def test_a_session_stays_with_its_replica(pool: EnginePool, replicas: list[Told]):
    for _ in range(3):
        for session in "uvwxyz":
            await sample(pool, session)
    for session in "uvwxyz":
        assert sorted(replica.seen.count(session) for replica in replicas) == [0, 0, 3]


@pytest.mark.parametrize("sessions", [1, 2, 3, 9, 40])
async def test_no_replica_gets_much_more_than_its_share(sessions: int, pool: EnginePool, replicas: list[Told]):
    for replica in replicas:
        replica.gate.clear()
    tasks = [asyncio.create_task(sample(pool, f"s{at}")) for at in range(sessions)]
    async with asyncio.timeout(20):
        while sum(len(replica.seen) for replica in replicas) < sessions:  # noqa: ASYNC110  their log is the event
            await asyncio.sleep(0)
    assert max(len(replica.seen) for replica in replicas) <= math.ceil(LOAD * sessions / 3)
    for replica in replicas:
        replica.gate.set()
    await asyncio.gather(*tasks)


async def test_every_proxy_gives_a_session_the_same_replica_and_most_keep_it_when_there_are_more() -> None:
    """Another proxy, or this one after a restart, knows nothing of what was chosen."""
    homes: list[list[str]] = []
    for number in (3, 3, 4):
        replicas = [Told(name) for name in "abcd"[:number]]
        pool = EnginePool("main", [*replicas], retries=Retries(first_wait_s=0), probe_every_s=0.01)
        for at in range(400):
            await sample(pool, f"s{at}")
        homes.append([next(one.name for one in replicas if f"s{at}" in one.seen) for at in range(400)])
        await pool.close()
    one, other, with_a_fourth = homes
    assert one == other
    assert all(90 < one.count(name) < 180 for name in "abc")
    moved = [after for before, after in zip(one, with_a_fourth, strict=True) if before != after]
    assert set(moved) == {"d"}
    assert 60 < len(moved) < 140


async def test_a_fork_goes_where_its_origin_is_unless_that_is_busy(pool: EnginePool, replicas: list[Told]):
    await sample(pool, "origin")
    home = next(replica for replica in replicas if replica.seen)
    for at in range(10):
        await sample(pool, f"fork{at}", origin="origin")
    assert len(home.seen) == 11
    home.gate.clear()
    stuck = [asyncio.create_task(sample(pool, "origin")) for _ in range(3)]
    await asyncio.sleep(0)
    await sample(pool, "late", origin="origin")
    assert "late" not in home.seen
    home.gate.set()
    await asyncio.gather(*stuck)


@pytest.mark.parametrize(("output", "name"), [(GenerateOutput, "x-session-id"), (SglangOutput, "x-smg-routing-key")])
def test_a_router_in_front_is_told_the_session(output: Callable[[str, SampleRequest], Output[Any]], name: str) -> None:
    assert output("main", request("s")).headers == {name: "s"}
    assert output("main", request()).headers == {}
    chat = ChatCall("call", "m", ChatRequest("test", "m", ()), Sampling(), "s")
    assert headers_of(chat, "sglang")[name] == "s"


async def test_a_call_moves_on_from_a_replica_that_is_down(pool: EnginePool, replicas: list[Told]):
    await sample(pool, "s")
    home = next(replica for replica in replicas if replica.seen)
    home.up = False
    await sample(pool, "s")
    assert [replica.seen.count("s") for replica in replicas if replica is not home].count(1) == 1


async def test_the_broken_are_ejected_and_come_back_with_the_weights(pool: EnginePool, replicas: list[Told]):
    replicas[0].up = False
    for at in range(20):
        await sample(pool, f"s{at}")
    assert len(replicas[0].seen) == FAILURES
    assert pool.replicas.all[0].ejected
    await pool.pause("keep")
    await pool.load_weights("folder", 3, "policy")
    assert replicas[0].weights == []
    replicas[0].up = True
    await until_all_serve(pool)
    assert replicas[0].weights == [("folder", 3, "policy")]
    assert replicas[0].state == "keep"
    await pool.resume()
    assert [replica.state for replica in replicas] == ["running"] * 3


async def test_a_replica_that_does_not_take_the_weights_does_not_serve(pool: EnginePool, replicas: list[Told]):
    replicas[1].takes_weights = False
    await pool.pause("keep")
    await pool.load_weights("folder", 3)
    await pool.resume()
    assert [replica.ejected for replica in pool.replicas] == [False, True, False]
    replicas[1].takes_weights = True
    await until_all_serve(pool)
    assert replicas[1].weights == [("folder", 3, "")]
    assert replicas[1].state == "running"


async def test_replicas_that_stand_still_since_a_former_process_are_pushed_to(pool: EnginePool, replicas: list[Told]):
    for replica in replicas:
        replica.state = "keep"
    with pytest.raises(EngineUnavailable):
        await pool.probe()
    await pool.pause("keep")
    await pool.load_weights("folder", 3)
    await pool.resume()
    await until_all_serve(pool)
    assert [replica.state for replica in replicas] == ["running"] * 3


def sent(version: int, ranks: int) -> Transfer:
    return Transfer(version, "digest", "here", 1, "group", 1 + ranks, "gloo", 1.0, [], trainer="t", incarnation=1)


async def test_what_is_sent_goes_to_all_that_answer(pool: EnginePool, replicas: list[Told]):
    for replica in replicas:
        replica.receiver = ToldReceiver(replica, ranks=2)
    assert await receiver_of(pool).ranks() == 6
    await pool.pause("drain")
    await receiver_of(pool).join(sent(5, 6))
    await receiver_of(pool).receive(sent(5, 6))
    assert [replica.receiver.received for replica in replicas if replica.receiver] == [[(5, 1)], [(5, 3)], [(5, 5)]]
    with pytest.raises(EngineError, match="has 6 ranks now, not 5"):
        await receiver_of(pool).join(sent(6, 5))


async def test_a_replica_that_was_away_is_back_with_the_next_push(pool: EnginePool, replicas: list[Told]):
    for replica in replicas:
        replica.receiver = ToldReceiver(replica)
    replicas[0].up = False
    for version in (5, 6):
        await pool.pause("keep")
        ranks = await receiver_of(pool).ranks()
        await receiver_of(pool).join(sent(version, ranks))
        await receiver_of(pool).receive(sent(version, ranks))
        await pool.resume()
        if version == 5:
            assert [replica.ejected for replica in pool.replicas] == [True, False, False]
            replicas[0].up = True
            await asyncio.sleep(0.05)
            assert pool.replicas.all[0].ejected, "it has the old weights"
    assert not pool.replicas.all[0].ejected
    assert [replica.state for replica in replicas] == ["running"] * 3


async def test_replicas_that_have_what_was_sent_come_back(pool: EnginePool, replicas: list[Told]):
    receivers = [ToldReceiver(replica) for replica in replicas]
    for replica, receiver in zip(replicas, receivers, strict=True):
        replica.receiver = receiver
    await push(pool, 5)
    await lose_all(pool, replicas)
    receivers[1].holding = 0  # it was started anew
    for replica in replicas:
        replica.up = True
    async with asyncio.timeout(20):
        while sum(replica.ejected for replica in pool.replicas) > 1:  # noqa: ASYNC110  the pool's probes bring them back
            await asyncio.sleep(0.01)
    assert [replica.ejected for replica in pool.replicas] == [False, True, False]
    await push(pool, 6)
    await until_all_serve(pool)


async def test_a_push_reaches_replicas_that_have_all_lost_what_was_sent(pool: EnginePool, replicas: list[Told]):
    for replica in replicas:
        replica.receiver = ToldReceiver(replica)
    await push(pool, 5)
    await lose_all(pool, replicas)
    for replica in replicas:
        replica.up, replica.receiver = True, ToldReceiver(replica)
    await push(pool, 6)
    await until_all_serve(pool)
    assert [replica.state for replica in replicas] == ["running"] * 3


async def test_of_two_transfers_at_once_the_first_receives_nothing(pool: EnginePool, replicas: list[Told]):
    for replica in replicas:
        replica.receiver = ToldReceiver(replica)
    first, second = sent(5, 3), msgspec.structs.replace(sent(6, 3), group="another")
    await receiver_of(pool).join(first)
    await receiver_of(pool).join(second)
    with pytest.raises(EngineError, match="is not in group 'group'"):
        await receiver_of(pool).receive(first)
    await receiver_of(pool).receive(second)
    assert [replica.receiver.received for replica in replicas if replica.receiver] == [[(6, 1)], [(6, 2)], [(6, 3)]]


async def push(pool: EnginePool, version: int) -> None:
    await pool.pause("keep")
    transfer = sent(version, await receiver_of(pool).ranks())
    await receiver_of(pool).join(transfer)
    await receiver_of(pool).receive(transfer)
    await pool.resume()


async def lose_all(pool: EnginePool, replicas: list[Told]) -> None:
    for replica in replicas:
        replica.up = False
    while not all(replica.ejected for replica in pool.replicas):
        with pytest.raises(EngineUnavailable):
            await sample(pool)


async def test_a_replica_that_was_away_takes_a_folder_at_once(pool: EnginePool, replicas: list[Told]):
    for replica in replicas:
        replica.receiver = ToldReceiver(replica)
    replicas[0].up = False
    await receiver_of(pool).join(sent(5, 2))
    await receiver_of(pool).receive(sent(5, 2))
    await pool.load_weights("folder", 6)
    replicas[0].up = True
    await until_all_serve(pool)
    assert replicas[0].weights == [("folder", 6, "")]


async def test_the_first_that_breaks_off_cuts_the_others_short(pool: EnginePool, replicas: list[Told]):
    receivers = [ToldReceiver(replica) for replica in replicas]
    for replica, receiver in zip(replicas, receivers, strict=True):
        replica.receiver = receiver
        receiver.waits = replica is not replicas[1]
    receivers[1].failure = EngineError("no room")
    await receiver_of(pool).join(sent(5, 3))
    with pytest.raises(WeightsLost, match="wait for a whole push: no room"):
        await asyncio.wait_for(receiver_of(pool).receive(sent(5, 3)), 20)
    assert not any(receiver.received for receiver in receivers)


async def test_without_receivers_there_is_none(pool: EnginePool):
    assert pool.receiver is None


async def test_weights_that_nobody_takes_are_an_error_and_the_old_ones_serve(pool: EnginePool, replicas: list[Told]):
    for replica in replicas:
        replica.takes_weights = False
    with pytest.raises(EngineError, match="no such folder"):
        await pool.load_weights("folder", 3)
    assert not any(replica.ejected for replica in pool.replicas)


async def test_all_down(pool: EnginePool, replicas: list[Told]):
    for replica in replicas:
        replica.up = False
    with pytest.raises(EngineUnavailable, match="none of its 3 replicas"):
        await pool.probe()
    with pytest.raises(EngineUnavailable, match="all of its 3 replicas are down"):
        await sample(pool)


async def test_the_pool_says_what_all_can_do(pool: EnginePool, replicas: list[Told]):
    replicas[2].up = False
    facts = await pool.probe()
    assert facts.models == ("m",)
    assert facts.url == "http://a,http://b"
    assert facts.notes == ("1 of 3 replicas are down",)


async def test_several_urls_make_a_pool(tmp_path: Path):
    turn = ScriptedReply(ids=(1, 2), fault=Fault(kind="status", status=503, times=1))
    async with ScriptedEngine(say(turn), FOLDER) as first, ScriptedEngine(say(turn), FOLDER) as second:
        engine = open_engine("main", settings(f"{first.url}, {second.url}"))
        chunks = await collect(engine.sample, request("s"))
        await engine.load_weights(str(tmp_path), 4)
        assert {first.weights.version, second.weights.version} == {"4"}
        assert sorted([len(first.journal.entries), len(second.journal.entries)])[0] >= 1
        await engine.close()
    assert [token for chunk in chunks for token in chunk.token_ids] == [1, 2]


def test_settings_are_checked(http: aiohttp.ClientSession):
    with pytest.raises(ConfigError, match="at least one server"):
        open_engine("main", settings(" , "))
    with pytest.raises(ConfigError, match=r"engines\.main\.url: '127\.0\.0\.1:8720' .* write http://127\.0\.0\.1:8720"):
        open_engine("main", settings("http://127.0.0.1:8000, 127.0.0.1:8720"))
    with pytest.raises(ConfigError, match=r"engines\.main\.url: 'gpu' is not an http\(s\) URL"):
        open_chat_engine("main", EngineSettings(kind="openai_compatible", url="gpu"))


class AskedReplica(Told):
    """Says which version it serves."""

    version: int | None = 3

    async def served_weights(self) -> int | None:
        return self.version


async def test_a_pool_serves_a_version_if_all_that_serve_say_it() -> None:
    replicas = [AskedReplica("a"), AskedReplica("b")]
    engines: list[Engine] = [*replicas]
    pool = EnginePool("main", engines, retries=Retries(first_wait_s=0), probe_every_s=0.01)
    assert await pool.served_weights() == 3
    for other in (4, None):
        replicas[1].version = other
        assert await pool.served_weights() is None
    await pool.close()
