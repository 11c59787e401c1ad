"""The viewer's questions to the running server: its engines' state, and new samples of a recorded call's prompt."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rolltap.errors import InvalidRequest
from rolltap.ids import new_id
from rolltap.proxy.call.policies import Policies
from rolltap.proxy.call.policy import Policy
from rolltap.proxy.call.sources.tokens import TokenSource
from rolltap.proxy.engines.base import SampleChunk, SampleRequest, join_chunks
from rolltap.proxy.engines.pool import EnginePool, Replica
from rolltap.proxy.viewer.runs import EngineLine
from rolltap.tenants import DEFAULT_TENANT
from rolltap.types import VersionSpan

MOST_SAMPLES = 8
MAX_TOKENS = 4096
"""Most tokens of a sample; the call's own limit may be lower."""


@dataclass(frozen=True, slots=True)
class RecordedPrompt:
    """What a replay needs of a call: the prompt as the engine got it, its output, and the sampling that was sent."""

    policy: str
    prompt_ids: Sequence[int]
    output_ids: Sequence[int]
    sampling: dict[str, Any]


@dataclass(frozen=True, slots=True)
class ReplayedSample:
    """A reply of the policy now. `logprob`: the mean of its tokens', None if the engine gave none.

    `version`: the newest weight version that sampled it.
    """

    text: str
    tokens: int
    finish: str
    logprob: float | None
    version: int


class Replays:
    """Asks the engines of `policies`."""

    def __init__(self, policies: Policies) -> None:
        self._policies = policies
        self._one_at_a_time = asyncio.Lock()

    async def samples(
        self, prompt: RecordedPrompt, temperature: float | None, n: int
    ) -> tuple[str, list[ReplayedSample]]:
        """Returns the text that was sampled then, and `n` samples at the call's own temperature, unless one is given.

        Raises `InvalidRequest` for a policy that is not served here or whose engine takes no token ids, and what the
        engine raises.
        """
        if prompt.policy not in self._policies.names:
            raise InvalidRequest(f"policy {prompt.policy!r} is not served here, and a replay asks its engine")
        policy = self._policies[prompt.policy]
        source = policy.source
        if policy.settings.tenant != DEFAULT_TENANT or not isinstance(source, TokenSource):
            raise InvalidRequest(f"policy {prompt.policy!r} has no engine that takes token ids")
        if not prompt.prompt_ids:
            raise InvalidRequest("no token ids of the call are on record", param="call_id")
        policy.check_engine()
        room = source.max_context - len(prompt.prompt_ids)
        if room < 1:
            raise InvalidRequest("the prompt fills the policy's whole context", param="call_id")
        sent = prompt.sampling
        request = SampleRequest(
            id="",
            model=policy.settings.model or policy.name,
            prompt_ids=prompt.prompt_ids,
            max_tokens=min(room, MAX_TOKENS, int(sent.get("max_tokens") or MAX_TOKENS)),
            temperature=float(sent.get("temperature", 1.0)) if temperature is None else temperature,
            top_p=float(sent.get("top_p") or 1.0),
            top_k=int(sent.get("top_k") or 0),
            min_p=float(sent.get("min_p") or 0.0),
            stop_token_ids=source.continuation.renderer.stop_token_ids,
            stream=False,
        )
        async with self._one_at_a_time:
            chunks = await asyncio.gather(*(_sampled(source, request) for _ in range(n)))
        decode = source.continuation.renderer.tokenizer.decode
        samples = [_sample(chunk, decode(list(chunk.token_ids)), policy.version) for chunk in chunks]
        return decode(list(prompt.output_ids)), samples


async def _sampled(source: TokenSource, request: SampleRequest) -> SampleChunk:
    chunks: list[SampleChunk] = []

    def take(chunk: SampleChunk) -> bool:
        chunks.append(chunk)
        return True

    values = {name: getattr(request, name) for name in request.__dataclass_fields__}
    await source.engine.sample(SampleRequest(**{**values, "id": new_id()}), take)
    return join_chunks(chunks)


def _sample(chunk: SampleChunk, text: str, version: int) -> ReplayedSample:
    known = [value for value in chunk.logprobs or () if math.isfinite(value)]
    spans: Sequence[VersionSpan] = chunk.versions or ()
    return ReplayedSample(
        text,
        len(chunk.token_ids),
        chunk.finish or "",
        sum(known) / len(known) if known else None,
        max((span.version for span in spans), default=version),
    )


def engines_of(policies: Policies) -> Callable[[str], Sequence[EngineLine]]:
    """Returns a function that lists a policy's engine or its replicas now; empty if the policy is not served."""

    def lines(name: str) -> list[EngineLine]:
        if name not in policies.names:
            return []
        policy = policies[name]
        if isinstance(policy.engine, EnginePool):
            return [_replica(policy, replica) for replica in policy.engine.replicas]
        return [EngineLine(policy.engine.name, "serving" if policy.up else "not up", policy.stated_version)]

    return lines


def _replica(policy: Policy, replica: Replica) -> EngineLine:
    state = "ejected" if replica.ejected else "paused" if replica.paused else "serving" if policy.up else "not up"
    version = replica.sent_version if replica.sent_version is not None else policy.stated_version
    return EngineLine(replica.engine.name, state, version)
