"""Sampling by embedded engines in this process, one for each set of weights that is sampled from.

Engines load when they are asked for, and those used longest ago leave when there are more than `most`, but never one
that samples.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from tinker import types

from rolltap.engine.model import Qwen3
from rolltap.engine.protocol import GenerateRequest, check_prompt, decode
from rolltap.engine.requests import Outbox, PromptScores, SamplingRequest, TokenDelta
from rolltap.engine.scheduler import EngineLoop
from rolltap.engine.server import end_tokens
from rolltap.errors import ConfigError, EngineUnavailable, InvalidRequest, NotFound
from rolltap.trainer_client.endpoint.messages import write_sample_output
from rolltap.trainer_client.endpoint.saved import KEPT

NOT_DONE = ("target_prompt_logprobs", "prompt_alt_tokens_k", "record_stability_info")
MOST_CANDIDATES = 20


@dataclass(slots=True, eq=False)
class Sampler:
    """An engine's loop, there once it has loaded, and how many requests use it."""

    loading: asyncio.Task[EngineLoop]
    users: int = 0


@dataclass(slots=True)
class Samplers:
    """Engines by the folder of their weights, the one used last at the end."""

    most: int
    slots: int = 32
    _loaded: OrderedDict[Path, Sampler] = field(default_factory=OrderedDict)

    async def sample(self, folder: Path, request: types.SampleRequest, asked: GenerateRequest, id: str) -> bytes:
        """The SDK's `SampleResponse` to `request`, which is `asked` in the engine's words. To cancel it ends the
        engine's work, too."""
        sampler = self._sampler(folder)
        sampler.users += 1
        try:
            return await _sampled(await asyncio.shield(sampler.loading), request, asked, id)
        except (ConfigError, EngineUnavailable, NotFound):
            if self._loaded.get(folder) is sampler:  # the next request loads it anew
                del self._loaded[folder]
            raise
        finally:
            sampler.users -= 1
            await self._trim()

    async def close(self) -> None:
        for folder in list(self._loaded):
            await self._unload(folder)

    def _sampler(self, folder: Path) -> Sampler:
        if folder not in self._loaded:
            self._loaded[folder] = Sampler(asyncio.create_task(asyncio.to_thread(_load, folder, self.slots)))
        self._loaded.move_to_end(folder)
        return self._loaded[folder]

    async def _trim(self) -> None:
        idle = [folder for folder, sampler in self._loaded.items() if not sampler.users]
        for folder in idle[: max(0, len(self._loaded) - self.most)]:
            await self._unload(folder)

    async def _unload(self, folder: Path) -> None:
        (loop,) = await asyncio.gather(self._loaded.pop(folder).loading, return_exceptions=True)
        if isinstance(loop, EngineLoop):
            await asyncio.to_thread(loop.close)


def _load(folder: Path, slots: int) -> EngineLoop:
    if not folder.exists():
        raise NotFound(
            f"{folder.name}: the snapshot is gone; of a model the newest {KEPT} without a name stay, and all with one"
        )
    loop = EngineLoop(Qwen3.load(folder), end_tokens(folder), _deliver, slots)
    loop.start()
    return loop


def _deliver(outbox: Outbox) -> None:
    for sink, delta in outbox:
        sink(delta)


def engine_request(request: types.SampleRequest) -> GenerateRequest:
    """What the engine is asked; `InvalidRequest` names what is not done here."""
    for name in NOT_DONE:
        if getattr(request, name):
            raise InvalidRequest(f"{name} is not done here", param=name)
    params = request.sampling_params
    stop = [params.stop] if isinstance(params.stop, str) else params.stop
    if any(isinstance(one, str) for one in stop or ()):
        raise InvalidRequest("stop: strings are not looked for here; give token ids", param="stop")
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
            "stop_token_ids": list(stop or ()),
            "ignore_eos": stop is not None and not stop,
            "n": request.num_samples,
            "logprobs": request.topk_sample_logprobs,
        },
    }
    return decode(msgspec.json.encode(body), GenerateRequest)


def _ids(prompt: types.ModelInput) -> list[int]:
    try:
        return prompt.to_ints()
    except ValueError as error:
        raise InvalidRequest("prompt: only text here, no images or sounds", param="prompt") from error


async def _sampled(loop: EngineLoop, request: types.SampleRequest, asked: GenerateRequest, id: str) -> bytes:
    prompt = asked.prompt_ids
    last = request.prompt_logprobs_last_n
    if last is not None and not 0 < last < len(prompt):
        raise InvalidRequest(f"prompt_logprobs_last_n is {last}; it is from 1 to {len(prompt) - 1}")
    most = check_prompt(asked, loop.model.config.vocab_size, loop.context)
    replies: list[Future[TokenDelta]] = [Future() for _ in range(request.num_samples)]
    choices = [
        SamplingRequest(id, prompt, asked.draw.sampling(most, choice), reply.set_result, stream=False)
        for choice, reply in enumerate(replies)
    ]
    scores: PromptScores | None = None
    try:
        await asyncio.wrap_future(loop.submit(choices))
        if request.prompt_logprobs or request.topk_prompt_logprobs:
            scores = await asyncio.wrap_future(loop.score(prompt, request.topk_prompt_logprobs))
        sampled = await asyncio.gather(*(asyncio.shield(asyncio.wrap_future(reply)) for reply in replies))
    except asyncio.CancelledError:
        loop.abort([id])
        raise
    if any(delta.finish in ("error", "abort") for delta in sampled):
        raise EngineUnavailable("the sampler broke off; send the request again")
    cached = max(delta.cached_tokens for delta in sampled)
    return write_sample_output(sampled, scores, 1 if last is None else len(prompt) - last, cached)
