"""Scores of given ids: what a teacher or judge says of tokens that another policy sampled, or nobody.

Nothing is sampled, so nothing of it is in the call log; it has counters of its own.
"""

from __future__ import annotations

import asyncio

from fastapi import APIRouter

from rolltap.contract.trainer import LOST, PolicyScores, ScoredIds, ScoreIds, TokenScores
from rolltap.errors import EngineRefused, InvalidRequest
from rolltap.ids import new_id
from rolltap.proxy.call.policies import Policy
from rolltap.proxy.engines.base import Scorer, ScoreRequest
from rolltap.proxy.routes.policies import policy_of, still_lost
from rolltap.proxy.routes.services import Services
from rolltap.proxy.routes.slices import sliced

AT_ONCE = 16
"""Sequences of a request that an engine is asked for at a time."""


def score_router(services: Services) -> APIRouter:
    routes = APIRouter(tags=["policies"], route_class=sliced({"sequences": ScoredIds}))
    policies = services.ledger.policies

    @routes.post("/policies/{name}/score")
    async def score(name: str, body: ScoreIds) -> PolicyScores:
        """The log-probs of the given ids, and the likeliest candidates. The caller need not own the policy."""
        policy = policy_of(services, name)
        before = await policies.get(name)
        if before.paused == LOST:
            raise still_lost(name)
        places = asyncio.Semaphore(AT_ONCE)

        async def one(index: int) -> TokenScores:
            async with places:
                return await _score(policy, body, index)

        try:
            async with asyncio.TaskGroup() as tasks:
                scorings = [tasks.create_task(one(index)) for index in range(len(body.sequences))]
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        services.recorder.metrics.scored(name, sum(len(each.token_ids) for each in body.sequences))
        after = await policies.get(name)
        same = before.version == after.version and before.paused is None and after.paused is None
        return PolicyScores(name, after.version if same else None, [task.result() for task in scorings])

    return routes


async def _score(policy: Policy, body: ScoreIds, index: int) -> TokenScores:
    engine, sequence = policy.engine, body.sequences[index]
    if not isinstance(engine, Scorer):
        message = f"engine {engine.name} ({policy.settings.engine}) can't score given ids; vllm, sglang and rolltap do"
        raise EngineRefused(message, http_status=501)
    model = policy.settings.model or policy.name
    try:
        return await engine.score(ScoreRequest(new_id(), model, sequence.token_ids, sequence.start, body.top_logprobs))
    except EngineRefused as error:
        if error.http_status in (400, 422):
            raise InvalidRequest(f"sequences[{index}]: {error.message}", param=f"sequences[{index}]") from error
        raise
