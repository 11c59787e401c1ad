"""Probes the policies' engines: at the start, until they are up, and again after calls without an answer."""

from __future__ import annotations

import asyncio
import logging

from rolltap.errors import EngineError, RateLimited
from rolltap.proxy.call.policies import Policies, Policy
from rolltap.proxy.call.tokenizer_check import tokenizer_difference
from rolltap.proxy.engines import is_chat_engine
from rolltap.proxy.engines.base import missing_model

log = logging.getLogger("rolltap.engines")

PROBE_EVERY_S = 2.0
TOKENIZERS_EVERY_S = 30.0


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
    await check_tokenizer(policy)
    model = policy.settings.model or policy.name
    advice = missing_model(model, facts.models)
    policy.lacks_model = bool(advice)
    if advice:
        log.warning("policy %s: engine %s serves no model %r: %s", policy.name, policy.engine.name, model, advice)


async def check_tokenizer(policy: Policy) -> None:
    """Refuses the policy's calls while its engine has another tokenizer."""
    if policy.source.tokenizer is None:
        return
    model = policy.settings.model or policy.name
    difference = await tokenizer_difference(policy.engine, policy.source.tokenizer, model)
    if difference and difference != policy.wrong_tokenizer:
        log.error("policy %s: %s; its calls are refused", policy.name, difference)
    policy.wrong_tokenizer = difference


async def watch_tokenizers(policies: Policies) -> None:
    """Compares the engines' tokenizers from time to time, as any engine may have been replaced, forever."""
    while True:
        await asyncio.sleep(TOKENIZERS_EVERY_S)
        for policy in policies.all:
            if policy.up:
                await check_tokenizer(policy)


async def watch_engine(policies: Policies, policy: Policy) -> None:
    """Probes the policy's engine whenever the policy asks for it (`doubted`), forever."""
    while True:
        await policy.doubted.wait()
        if not policy.up:
            await asyncio.sleep(PROBE_EVERY_S)
        await probe_engine(policies, policy)
