"""What the doctor asks of the configured store and engines: whether they answer, and what they can do."""

from __future__ import annotations

import asyncio
from pathlib import Path

import aiohttp

from rolltap.calllog import open_call_log
from rolltap.contract.diagnosis import Finding
from rolltap.errors import (
    ConfigError,
    DatabaseInUse,
    EngineError,
    EngineTimeout,
    EngineUnavailable,
    RateLimited,
    RolltapError,
)
from rolltap.protocols.dialects import known_dialects
from rolltap.proxy.call.tokenizer_check import tokenizer_difference
from rolltap.proxy.engines import is_chat_engine, open_chat_engine, open_engine, open_vendor
from rolltap.proxy.engines.base import ChatEngine, Engine, EngineFacts, missing_model
from rolltap.proxy.engines.passthrough import PassthroughUpstream
from rolltap.settings import EngineSettings, Settings, hide_password
from rolltap.tokenizer import HubTokenizer

CONNECT_S = 10.0


async def check_store(settings: Settings) -> Finding:
    """Opens the store for writing, which also brings its tables up to date.

    SQLite has one writer at a time, so beside a running server the store cannot be opened, and works.
    """
    name = hide_password(settings.store_url)
    try:
        call_log = open_call_log(settings.store_url)
        await call_log.start()
    except DatabaseInUse as error:
        return Finding("store", f"{name}: in use by the running server (process {error.holder})")
    except RolltapError as error:
        return Finding("store", name, error.message, healthy=False)
    condition = await call_log.condition()
    await call_log.close()
    if condition.clock_is_off:
        advice = f"this machine's clock is {condition.clock_ahead_s:+.1f} s off the store's: set it (NTP)"
        return Finding("store", name, advice, healthy=False)
    return Finding("store", name)


def check_tokenizers(settings: Settings) -> list[Finding]:
    """A finding for each policy whose tokenizer folder has no tokenizer.json."""
    advice = "correct the policy's `tokenizer`; a relative folder is looked up where `rolltap` starts"
    return [
        Finding(f"policy {name}", f"no tokenizer.json in {policy.tokenizer}", advice, healthy=False)
        for name, policy in settings.policies.items()
        if policy.tokenizer and not (Path(policy.tokenizer) / "tokenizer.json").is_file()
    ]


async def check_engines(settings: Settings) -> list[Finding]:
    """Probes every engine at once: what it can do, and whether it serves the policies' models."""
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S)
    async with aiohttp.ClientSession(timeout=timeout) as http:
        checks = (_check_engine(name, engine, settings, http) for name, engine in settings.engines.items())
        return [finding for findings in await asyncio.gather(*checks) for finding in findings]


async def _check_engine(
    name: str, engine: EngineSettings, settings: Settings, http: aiohttp.ClientSession
) -> list[Finding]:
    what = f"engine {name}"
    try:
        client = _open(name, engine, http)
    except ConfigError as error:
        return [Finding(what, "broken", error.message, healthy=False)]
    try:
        facts = await client.probe()
        tokenizers = await _check_tokenizer_of(name, client, settings)
    except (EngineUnavailable, EngineTimeout) as error:
        advice = f"{error.message}; start the model server, or correct engines.{name}.url (--engine)"
        return [Finding(what, "down", advice, healthy=False)]
    except (ConfigError, EngineError, RateLimited) as error:
        return [Finding(what, "broken", error.message, healthy=False)]
    finally:
        await client.close()
    can_do = [
        f"{engine.kind}, models {', '.join(facts.models)}" if facts.models else engine.kind,
        f"context {facts.max_context or 'unknown'}",
        f"log-probs {facts.logprobs_mode}",
        _versions(facts),
        "takes new weights" if facts.weight_updates else "takes no new weights",
    ]
    return [
        Finding(what, "; ".join(can_do), "; ".join(facts.notes)),
        *_check_models(name, facts, settings),
        *tokenizers,
    ]


async def _check_tokenizer_of(engine: str, client: object, settings: Settings) -> list[Finding]:
    """A finding for each policy of `engine` whose tokenizer is another one than the engine's."""
    found: list[Finding] = []
    for name, policy in settings.policies.items():
        if policy.engine == engine and (Path(policy.tokenizer or "") / "tokenizer.json").is_file():
            tokenizer = HubTokenizer(policy.tokenizer)
            if difference := await tokenizer_difference(client, tokenizer, policy.model or name):
                found.append(Finding(f"policy {name}", "another tokenizer", difference, healthy=False))
    return found


def _versions(facts: EngineFacts) -> str:
    """Where tokens' weight versions come from."""
    if facts.weight_versions:
        return "a weight version for every token"
    return "says its weight version when asked" if facts.states_weights else "the policy's weight version"


def _check_models(engine: str, facts: EngineFacts, settings: Settings) -> list[Finding]:
    """A finding for each policy of `engine` whose model the engine does not list."""
    return [
        Finding(f"policy {name}", f"engine {engine} serves no model {policy.model or name!r}", advice, healthy=False)
        for name, policy in settings.policies.items()
        if policy.engine == engine and (advice := missing_model(policy.model or name, facts.models))
    ]


def _open(
    name: str, settings: EngineSettings, http: aiohttp.ClientSession
) -> Engine | ChatEngine | PassthroughUpstream:
    if settings.kind == "passthrough":
        return open_vendor(name, settings, http, known_dialects())
    return (open_chat_engine if is_chat_engine(settings.kind) else open_engine)(name, settings)
