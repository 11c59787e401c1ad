"""New weights and adapters, as every engine client takes them: every token has its weight version."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from rolltap.engine.scripted import ScriptedReply
from rolltap.errors import EngineRefused
from rolltap.proxy.engines.registry import ENGINES
from rolltap.proxy.engines.retries import Retries
from rolltap.settings import EngineSettings
from rolltap.types import VersionSpan

from .engine_world import REPLY, Start, ids_of, starter


async def test_a_pushed_version_is_on_every_token(start: Start, tmp_path: Path):
    async with start(REPLY, REPLY) as world:
        await world.engine.pause("keep")
        await world.engine.load_weights(str(tmp_path), 7)
        await world.engine.resume()
        facts = await world.engine.probe()
        chunks = await world.sample()
        assert world.server.weights.path == str(tmp_path)
        assert world.server.weights.version == "7"
        receiver = world.engine.receiver
        assert receiver is not None
        assert [await receiver.holds(version) for version in (7, 6)] == [True, False]
    if facts.weight_versions:
        assert chunks[-1].versions == (VersionSpan(7, 0, 5),)
    else:
        assert chunks[-1].versions is None


async def test_a_swap_in_mid_output_splits_the_versions(start: Start, tmp_path: Path):
    async with start(ScriptedReply(ids=REPLY.ids, hold=2)) as world:
        sampling = asyncio.create_task(world.sample())
        await world.server.journal.until(lambda entries: any(len(entry.output) == 2 for entry in entries))
        await world.engine.pause("keep")
        await world.engine.load_weights(str(tmp_path), 7)
        world.server.release()
        await world.engine.resume()
        chunks = await sampling
    assert ids_of(chunks) == list(REPLY.ids or ())
    if chunks[-1].versions is not None:
        assert chunks[-1].versions == (VersionSpan(0, 0, 2), VersionSpan(7, 2, 5))


def adapter_in(folder: Path) -> str:
    """A folder like those that peft writes."""
    folder.mkdir()
    (folder / "adapter_config.json").write_text("{}")
    return str(folder)


@pytest.mark.parametrize("wire", ["vllm", "vllm-completions"])
async def test_an_adapter_is_loaded_in_place_of_the_former(wire: str, tmp_path: Path):
    first, second = adapter_in(tmp_path / "first"), adapter_in(tmp_path / "second")
    async with starter(wire)(ScriptedReply(ids=REPLY.ids, hold=2)) as world:
        await world.engine.load_weights(first, 6, "policy")
        sampling = asyncio.create_task(world.sample(model="policy"))
        await world.server.journal.until(lambda entries: any(len(entry.output) == 2 for entry in entries))
        await world.engine.pause("keep")
        await world.engine.load_weights(second, 7, "policy")
        world.server.release()
        await world.engine.resume()
        chunks = await sampling
        assert world.server.weights.adapters == {"policy": second}
        assert world.server.weights.path is None
        assert (await world.engine.probe()).models == ("scripted", "policy")
    if chunks[-1].versions is not None:
        assert chunks[-1].versions == (VersionSpan(6, 0, 2), VersionSpan(7, 2, 5))


@pytest.mark.parametrize("name", ["policy", "scripted"])
async def test_an_adapter_that_can_not_be_loaded_leaves_the_former(name: str, tmp_path: Path):
    adapter = adapter_in(tmp_path / "adapter")
    async with starter("vllm")(REPLY) as world:
        await world.engine.load_weights(adapter, 6, "policy")
        path = str(tmp_path / "missing") if name == "policy" else adapter
        with pytest.raises(EngineRefused, match=rf"adapter '{name}' serves as before"):
            await world.engine.load_weights(path, 7, name)
        assert (world.server.weights.adapters, world.server.weights.version) == ({"policy": adapter}, "6")


async def test_a_server_that_loads_no_adapters_needs_its_flags():
    async with starter("sglang")(REPLY) as world:
        settings = EngineSettings(kind="vllm", url=world.server.url)
        with pytest.raises(EngineRefused, match="VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"):
            await ENGINES["vllm"]("main", settings, retries=Retries()).load_weights("folder", 7, "policy")


async def test_only_vllm_loads_adapters(tmp_path: Path):
    async with starter("sglang")(REPLY) as world:
        with pytest.raises(EngineRefused, match="by vLLM only; push merged weights"):
            await world.engine.load_weights(adapter_in(tmp_path / "adapter"), 1, "policy")


async def test_draining_waits_for_what_is_under_way(start: Start):
    async with start(ScriptedReply(ids=REPLY.ids, hold=2)) as world:
        sampling = asyncio.create_task(world.sample())
        await world.server.journal.until(lambda entries: any(len(entry.output) == 2 for entry in entries))
        draining = asyncio.create_task(world.engine.pause("drain"))
        world.server.release()
        await draining
        assert world.server.journal.entries[0].outcome == "finished"
        assert (await sampling)[-1].finish == "stop"
        await world.engine.resume()
        assert ids_of(await world.sample()) == list(REPLY.ids or ())


async def test_aborting_ends_what_is_under_way(start: Start):
    async with start(ScriptedReply(ids=REPLY.ids, hold=2)) as world:
        sampling = asyncio.create_task(world.sample())
        await world.server.journal.until(lambda entries: any(len(entry.output) == 2 for entry in entries))
        await world.engine.pause("abort")
        world.server.release()
        chunks = await sampling
    assert chunks[-1].finish == "abort"
    assert ids_of(chunks) == [10, 11]
