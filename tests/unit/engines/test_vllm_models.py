"""What is said of a model that a vLLM server lacks, or can't load, or would load wrongly."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from rolltap.errors import EngineRefused, EngineUnavailable, ModelNotLoaded
from rolltap.proxy.engines.base import SampleRequest
from rolltap.proxy.engines.vllm import VllmEngine
from rolltap.settings import EngineSettings

from ...contract.engine_world import collect

MISSING = "The model `policy` does not exist."
TOO_LARGE = "LoRA rank 64 is greater than max_lora_rank 16"


def answering(status: int, message: str, asked: list[str]) -> TestServer:
    """A server with one answer for all; `asked` grows by the path of each request."""

    async def answer(request: web.Request) -> web.Response:
        asked.append(request.path)
        return web.json_response({"error": {"message": message, "code": status}}, status=status)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    return TestServer(app)


async def test_a_model_that_is_not_there_yet_is_to_be_asked_for_again() -> None:
    asked: list[str] = []
    async with answering(404, MISSING, asked) as server:
        engine = VllmEngine("main", EngineSettings(kind="vllm", url=str(server.make_url("/"))))
        with pytest.raises(ModelNotLoaded, match=r"`policy` does not exist.*from its first push") as raised:
            await collect(engine.sample, SampleRequest("id", "policy", [1], 1))
        assert asked == ["/inference/v1/generate"]  # once, and not the other route
    assert (raised.value.status, raised.value.retry_after) == (503, 5.0)


@pytest.mark.parametrize(("status", "error"), [(400, EngineRefused), (500, EngineRefused), (503, EngineUnavailable)])
async def test_an_adapter_that_the_server_fails_to_load_is_not_a_server_that_is_away(
    status: int, error: type[Exception]
) -> None:
    async with answering(status, TOO_LARGE, []) as server:
        engine = VllmEngine("main", EngineSettings(kind="vllm", url=str(server.make_url("/"))))
        with pytest.raises(error, match="max_lora_rank 16") as raised:
            await engine.load_weights("folder", 1, "policy")
    assert type(raised.value) is error
    assert ("serves as before" in str(raised.value)) == (error is EngineRefused)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("tied", [True, False])
async def test_tied_embeddings_are_not_reloaded_on_a_cpu(device: str, tied: bool, tmp_path: Path) -> None:
    asked: list[str] = []

    async def answer(request: web.Request) -> web.Response:
        asked.append(request.path)
        # As vLLM 0.32 dumps its configuration.
        return web.json_response({"vllm_config": {"device_config": {"device": device}}, "vllm_env": {}})

    (tmp_path / "config.json").write_text(json.dumps({"tie_word_embeddings": tied}))
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    async with TestServer(app) as server:
        engine = VllmEngine("main", EngineSettings(kind="vllm", url=str(server.make_url("/"))))
        if tied and device == "cpu":
            with pytest.raises(EngineRefused, match="tie_word_embeddings: false"):
                await engine.load_weights(str(tmp_path), 1)
        else:
            await engine.load_weights(str(tmp_path), 1)
    assert ("/collective_rpc" in asked) == (not tied or device != "cpu")
