"""The Tinker engine against our own Tinker-compatible service: what it samples is what the SDK samples there."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator

import numpy as np
import pytest
from tinker import types

from rolltap.engine.tiny import FOLDER
from rolltap.errors import ContextOverflow, EngineRefused
from rolltap.proxy.engines.base import SampleChunk, SampleRequest
from rolltap.proxy.engines.tinker import TinkerEngine, message, versions
from rolltap.settings import EngineSettings
from rolltap.types import VersionSpan

from ..unit.trainer_client.tinkering import KEY, Service, datum, serving
from .engine_world import collect

IDS = [*range(30, 50)]


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with serving(FOLDER, tmp_path_factory.mktemp("service")) as running:
        yield running


@pytest.fixture(scope="module")
def trained(service: Service) -> tuple[str, list[int], list[float]]:
    """The path of weights after a step, and what the SDK draws from them, greedily."""
    client = service.train(4)
    client.forward_backward([datum(IDS, weights=1.0)], "cross_entropy")
    client.optim_step(types.AdamParams(learning_rate=1e-2)).result()
    path = client.save_weights_for_sampler("version-7").result().path
    sampler = service.clients[-1].create_sampling_client(path).result()
    params = types.SamplingParams(max_tokens=6, temperature=0.0)
    sequence = sampler.sample(types.ModelInput.from_ints(IDS), 1, params).result().sequences[0]
    return path, sequence.tokens, sequence.logprobs or []


@pytest.fixture
async def engine(service: Service) -> AsyncIterator[TinkerEngine]:
    client = TinkerEngine("theirs", EngineSettings(kind="tinker", url=service.url, api_key=KEY))
    yield client
    await client.close()


async def sampled(engine: TinkerEngine, model: str, **fields: object) -> SampleChunk:
    asked = {"id": "c", "prompt_ids": IDS, "max_tokens": 6, "temperature": 0.0, **fields}
    (chunk,) = await collect(engine.sample, SampleRequest(model=model, **asked))  # type: ignore[arg-type]
    return chunk


async def test_it_samples_what_the_sdk_samples_as_the_version_of_the_path(
    engine: TinkerEngine, trained: tuple[str, list[int], list[float]]
) -> None:
    path, tokens, logprobs = trained
    chunk = await sampled(engine, path, top_logprobs=3)
    assert (list(chunk.token_ids), chunk.finish) == (tokens, "length")
    np.testing.assert_allclose(chunk.logprobs or [], logprobs, atol=1e-5)
    assert chunk.versions == (VersionSpan(7, 0, 6),)
    assert chunk.extras["top_ids"].shape == (6, 3)


async def test_a_base_model_has_no_version(engine: TinkerEngine, service: Service) -> None:
    assert (await sampled(engine, str(service.model))).versions is None
    facts = await engine.probe()
    assert (facts.models, facts.max_context, facts.logprobs_mode) == ((str(FOLDER),), 4096, "processed")
    with pytest.raises(EngineRefused, match="nothing is saved there, or no longer"):
        await sampled(engine, "tinker://nobody/sampler_weights/v1")
    with pytest.raises(ContextOverflow) as caught:
        await sampled(engine, str(service.model), prompt_ids=[5] * 4096)
    assert (caught.value.tokens, caught.value.limit) == (4096, 4096)


async def test_a_session_that_the_service_forgot_is_made_anew(engine: TinkerEngine, service: Service) -> None:
    await sampled(engine, str(service.model))
    for session in list(service.endpoint.sessions._by_id):
        service.endpoint.sessions.end(session)
    both = await asyncio.gather(*(sampled(engine, str(service.model)) for _ in range(2)))
    assert both[0].token_ids == both[1].token_ids


@pytest.mark.parametrize("fields", [{"min_p": 0.1}, {"extra": {"presence_penalty": 1.0}}])
async def test_what_tinker_has_not_is_refused(
    engine: TinkerEngine, service: Service, fields: dict[str, object]
) -> None:
    with pytest.raises(EngineRefused, match=r"Tinker has no (min_p|presence_penalty)"):
        await sampled(engine, str(service.model), **fields)
    with pytest.raises(EngineRefused, match="set the policy's `model` to their tinker:// path"):
        await engine.load_weights("/weights", 1)


async def test_the_wrong_key(service: Service) -> None:
    stranger = TinkerEngine("theirs", EngineSettings(kind="tinker", url=service.url, api_key="tml-another"))
    with pytest.raises(EngineRefused, match="no such key"):
        await sampled(stranger, str(service.model))
    await stranger.close()


@pytest.mark.parametrize(
    ("path", "version"),
    [
        ("tinker://r/sampler_weights/version-12", 12),
        ("tinker://r/sampler_weights/000120", 120),
        ("tinker://r/s/final", None),
        ("base-8", None),
    ],
)
def test_the_version_is_what_the_path_says(path: str, version: int | None) -> None:
    assert versions(path, 3) == (None if version is None else (VersionSpan(version, 0, 3),))


@pytest.mark.parametrize("data", [b"\x0a", b"\x0a\x05ab", b"\x0d\x00", b"\xff" * 11])
def test_a_broken_message_is_no_answer(data: bytes) -> None:
    with pytest.raises((ValueError, IndexError)):
        message(data)
