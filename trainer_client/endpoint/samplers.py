"""Samples with embedded engines in this process, one engine for each folder of weights.

An engine loads at the first request for its folder. While more than `most` are loaded, the least recently used one is
unloaded, but never one with a request in progress. Stop strings are supported: the renderer that tinker-cookbook takes
for base models samples with one.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
from tinker import types
from tokenizers import Tokenizer

from rolltap.engine.model import CausalModel
from rolltap.engine.protocol import GenerateRequest, check_prompt, decode
from rolltap.engine.sampling import PromptScores, SamplingRequest, Stops, TokenDelta, deliver, never
from rolltap.engine.scheduler import EngineLoop
from rolltap.engine.server import end_tokens
from rolltap.errors import EngineUnavailable, InvalidRequest, NotFound
from rolltap.trainer_client.endpoint.messages import write_sample_output
from rolltap.trainer_client.endpoint.saved import KEPT

NOT_DONE = ("target_prompt_logprobs", "prompt_alt_tokens_k", "record_stability_info")
"""Fields of a request that this service refuses."""

MOST_CANDIDATES = 20
"""The most candidates per token."""


@dataclass(frozen=True, slots=True)
class SampleWork:
    """A client's request, as `generate` in the engine's own protocol, with `stops` for its stop strings."""

    asked: types.SampleRequest
    generate: GenerateRequest
    stops: Stops


@dataclass(slots=True, eq=False)
class Sampler:
    """One engine. `loading` returns its loop once the weights are loaded; `users` counts the requests in progress."""

    loading: asyncio.Task[EngineLoop]
    users: int = 0

    @property
    def loading_failed(self) -> bool:
        return self.loading.done() and (self.loading.cancelled() or self.loading.exception() is not None)


@dataclass(slots=True)
class Samplers:
    """The engines by their weights' folder, in the order of their last use. Each samples `slots` sequences at once."""

    most: int
    slots: int = 32
    _loaded: OrderedDict[Path, Sampler] = field(default_factory=OrderedDict)

    async def sample(self, folder: Path, work: SampleWork, id: str) -> bytes:
        """Samples from the weights in `folder` and returns a serialized `SampleResponse`.

        Cancelling the call aborts the request in the engine. Raises `NotFound` if the folder is gone,
        `EngineUnavailable` if the engine breaks off.
        """
        if folder not in self._loaded:
            self._loaded[folder] = Sampler(asyncio.create_task(asyncio.to_thread(_load, folder, self.slots)))
        self._loaded.move_to_end(folder)
        sampler = self._loaded[folder]
        sampler.users += 1
        try:
            return await _sample(await asyncio.shield(sampler.loading), work, id)
        except Exception as error:
            of_engine = isinstance(error, EngineUnavailable) or sampler.loading_failed
            if of_engine and self._loaded.get(folder) is sampler:  # the next request loads it again
                del self._loaded[folder]
            raise
        finally:
            sampler.users -= 1
            # Idle engines are unloaded, the least recently used first, until `most` are left or none is idle.
            idle = [each for each, sampler in self._loaded.items() if not sampler.users]
            for each in idle[: max(0, len(self._loaded) - self.most)]:
                await self._unload(each)

    async def close(self) -> None:
        for folder in list(self._loaded):
            await self._unload(folder)

    async def _unload(self, folder: Path) -> None:
        (loop,) = await asyncio.gather(self._loaded.pop(folder).loading, return_exceptions=True)
        if isinstance(loop, EngineLoop):
            await asyncio.to_thread(loop.close)


def _load(folder: Path, slots: int) -> EngineLoop:
    """Loads and starts an engine. Raises `NotFound` if the folder does not exist."""
    if not folder.exists():
        raise NotFound(
            f"{folder.name}: the snapshot is gone; of a model the newest {KEPT} without a name stay, and all with one"
        )
    loop = EngineLoop(CausalModel.load(folder), end_tokens(folder), deliver, slots)
    loop.start()
    return loop


def sample_work(request: types.SampleRequest, model: Path) -> SampleWork:
    """What the engine does for the request. `model` is the base model's folder, for its tokenizer.

    Raises `InvalidRequest`, which names a field that is not supported.
    """
    for name in NOT_DONE:
        if getattr(request, name):
            raise InvalidRequest(f"{name} is not supported here", param=name)
    params = request.sampling_params
    stop = [params.stop] if isinstance(params.stop, str) else params.stop
    strings = [entry for entry in stop or () if isinstance(entry, str)]
    if max(request.topk_sample_logprobs, request.topk_prompt_logprobs) > MOST_CANDIDATES:
        raise InvalidRequest(f"at most {MOST_CANDIDATES} candidates of a token are given")
    body: dict[str, Any] = {
        "token_ids": _ids(request.prompt),
        "sampling_params": {
            "max_tokens": params.max_tokens,
            "temperature": params.temperature,
            "top_k": params.top_k,
            "top_p": params.top_p,
            "seed": params.seed,
            "stop_token_ids": [entry for entry in stop or () if isinstance(entry, int)],
            "ignore_eos": stop is not None and not stop,
            "n": request.num_samples,
            "logprobs": request.topk_sample_logprobs,
        },
    }
    generate = decode(msgspec.json.encode(body), GenerateRequest)
    return SampleWork(request, generate, stops_at(strings, model) if strings else never)


def _ids(prompt: types.ModelInput) -> list[int]:
    try:
        return prompt.to_ints()
    except ValueError as error:
        raise InvalidRequest("prompt: only text here, no images or sounds", param="prompt") from error


async def _sample(loop: EngineLoop, work: SampleWork, id: str) -> bytes:
    request, generate, prompt = work.asked, work.generate, work.generate.prompt_ids
    last_n = request.prompt_logprobs_last_n
    if last_n is not None and not 0 < last_n < len(prompt):
        raise InvalidRequest(f"prompt_logprobs_last_n is {last_n}; it is from 1 to {len(prompt) - 1}")
    max_tokens = check_prompt(generate, loop.model.vocabulary, loop.context)
    replies: list[Future[TokenDelta]] = [Future() for _ in range(request.num_samples)]
    samplings = [
        replace(generate.draw.sampling(max_tokens, choice), stops=work.stops) for choice in range(len(replies))
    ]
    choices = [
        SamplingRequest(id, prompt, sampling, reply.set_result, stream=False)
        for sampling, reply in zip(samplings, replies, strict=True)
    ]
    scores: PromptScores | None = None
    try:
        await asyncio.wrap_future(loop.submit(choices))
        if request.prompt_logprobs or request.topk_prompt_logprobs:
            scores = await asyncio.wrap_future(loop.score(prompt, request.topk_prompt_logprobs))
        outputs = await asyncio.gather(*(asyncio.shield(asyncio.wrap_future(reply)) for reply in replies))
    except asyncio.CancelledError:
        loop.abort([id])
        raise
    if any(delta.finish in ("error", "abort") for delta in outputs):
        raise EngineUnavailable("the sampler broke off; send the request again")
    cached_tokens = max(delta.cached_tokens for delta in outputs)
    first_score = 1 if last_n is None else len(prompt) - last_n
    return write_sample_output(outputs, scores, first_score, cached_tokens)


def stops_at(strings: Sequence[str], model: Path) -> Stops:
    """Ends a sample with the token that completes one of `strings`.

    `model` is the model's folder. Raises `InvalidRequest` if a string is empty, or the folder has no tokenizer.
    """
    if not all(strings):
        raise InvalidRequest("stop: an empty string ends nothing", param="stop")
    tokenizer = _tokenizer(model / "tokenizer.json")
    most = max(len(string.encode()) for string in strings)  # a token is one byte or more

    def stops(ids: Sequence[int]) -> bool:
        text = tokenizer.decode(list(ids[-most:]), skip_special_tokens=False)
        return any(string in text for string in strings)

    return stops


@cache
def _tokenizer(file: Path) -> Tokenizer:
    if not file.is_file():
        raise InvalidRequest("stop: strings need a tokenizer.json in the folder --model; give token ids", param="stop")
    return Tokenizer.from_file(str(file))
