"""Probes the policies' engines: at the start, until they are up, and again after calls without an answer."""

from __future__ import annotations

import asyncio
import logging

from rolltap.errors import EngineError, RateLimited
from rolltap.proxy.call.policies import Policies, Policy
from rolltap.proxy.engines import is_chat_engine
from rolltap.proxy.engines.base import missing_model

log = logging.getLogger("rolltap.engines")

PROBE_EVERY_S = 2.0


async def probe_engine(policies: Policies, policy: Policy) -> None:
    """Asks the policy's engine for its facts. If it does not answer, all policies on it are down."""
    try:
        facts = await policy.engine.probe()
    except (EngineError, RateLimited) as error:
        log.warning("engine %s is not up: %s", policy.engine.name, error.message)
        for other in policies.all:
            if other.engine is policy.engine:
                other.lose()
        return
    if not policy.known and policy.settings.trainable and is_chat_engine(facts.kind):
        for note in facts.notes:
            log.warning("policy %s: engine %s: %s", policy.name, policy.engine.name, note)
    policy.learn(facts)
    model = policy.settings.model or policy.name
    advice = missing_model(model, facts.models)
    policy.lacks_model = bool(advice)
    if advice:
        log.warning("policy %s: engine %s serves no model %r: %s", policy.name, policy.engine.name, model, advice)


async def watch_engine(policies: Policies, policy: Policy) -> None:
    """Probes the policy's engine whenever the policy asks for it (`doubted`), forever."""
    while True:
        await policy.doubted.wait()
        if not policy.up:
            await asyncio.sleep(PROBE_EVERY_S)
        await probe_engine(policies, policy)
