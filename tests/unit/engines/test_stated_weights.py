"""Which servers can be asked for the version of their weights, and what they say after somebody's push."""

from __future__ import annotations

import aiohttp
import pytest

from rolltap.engine.scripted import ScriptedEngine, say
from rolltap.engine.tiny import FOLDER
from rolltap.proxy.engines.base import StatesWeights
from rolltap.proxy.engines.registry import open_chat_engine, open_engine
from rolltap.settings import EngineSettings


@pytest.mark.parametrize(
    ("kind", "wire", "in_replies"),
    [
        ("vllm", "vllm", True),
        ("vllm", "vllm-completions", False),
        ("sglang", "sglang", True),
        ("openai_compatible", "vllm", False),
        ("openai_compatible", "sglang", False),
    ],
)
async def test_a_server_says_what_was_pushed_last(kind: str, wire: str, in_replies: bool) -> None:
    async with ScriptedEngine(say("hi"), FOLDER, wire=wire) as server, aiohttp.ClientSession() as http:
        settings = EngineSettings.model_validate({"kind": kind, "url": server.url})
        engine = (open_chat_engine if kind == "openai_compatible" else open_engine)("main", settings)
        facts = await engine.probe()
        assert (facts.weight_versions, facts.states_weights) == (in_replies, True)
        assert isinstance(engine, StatesWeights)
        stated = [await engine.served_weights()]
        for version in ("7", "somebody's"):
            async with http.post(f"{server.url}/update_weight_version", json={"new_version": version}) as answer:
                assert answer.status == 200
            stated.append(await engine.served_weights())
        assert stated == [0, 7, None]
        await engine.close()


@pytest.mark.parametrize(("kind", "wire"), [("llamacpp", "llamacpp"), ("openai_compatible", "openai")])
async def test_others_are_not_asked(kind: str, wire: str) -> None:
    async with ScriptedEngine(say("hi"), FOLDER, wire=wire) as server:
        settings = EngineSettings.model_validate({"kind": kind, "url": server.url})
        engine = (open_chat_engine if kind == "openai_compatible" else open_engine)("main", settings)
        assert not (await engine.probe()).states_weights
        await engine.close()
