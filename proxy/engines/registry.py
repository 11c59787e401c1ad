"""The registry of engine clients by kind. Other packages add one by an entry point."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Protocol, TypeVar

import aiohttp

from rolltap.errors import ConfigError
from rolltap.extras import known_names, lookup, page
from rolltap.network import server_url
from rolltap.proxy.engines.base import ChatEngine, Engine
from rolltap.proxy.engines.llamacpp import LlamaCppEngine
from rolltap.proxy.engines.openai_compatible import OpenAiCompatibleEngine
from rolltap.proxy.engines.passthrough import PassthroughUpstream
from rolltap.proxy.engines.pool import EnginePool
from rolltap.proxy.engines.retries import DEFAULT_RETRIES, Retries
from rolltap.proxy.engines.sglang import SglangEngine
from rolltap.proxy.engines.tinker import TinkerEngine
from rolltap.proxy.engines.vllm import VllmEngine
from rolltap.settings import EngineSettings
from rolltap.wording import did_you_mean


class MakeEngine(Protocol):
    def __call__(self, name: str, settings: EngineSettings, *, retries: Retries) -> Engine: ...


class MakeChatEngine(Protocol):
    def __call__(self, name: str, settings: EngineSettings, *, retries: Retries) -> ChatEngine: ...


ENTRY_POINTS, CHAT_ENTRY_POINTS = "rolltap.engines", "rolltap.chat_engines"

ENGINES: dict[str, MakeEngine] = {
    "vllm": VllmEngine,
    "rolltap": VllmEngine,
    "sglang": SglangEngine,
    "llamacpp": LlamaCppEngine,
    "tinker": TinkerEngine,
}

CHAT_ENGINES: dict[str, MakeChatEngine] = {
    "openai_compatible": OpenAiCompatibleEngine,
}

ONCE = Retries(attempts=1)

M = TypeVar("M")


def is_chat_engine(kind: str) -> bool:
    """Whether the kind is that of a chat upstream."""
    return kind in known_names(CHAT_ENGINES, CHAT_ENTRY_POINTS)


def check_engine(name: str, settings: EngineSettings) -> None:
    """`ConfigError` for a kind that nobody knows, or a URL that is not http(s), before anything is opened."""
    if settings.kind == "passthrough":
        return
    if is_chat_engine(settings.kind):
        _maker(name, settings.kind, CHAT_ENGINES, CHAT_ENTRY_POINTS)
    else:
        _maker(name, settings.kind, ENGINES, ENTRY_POINTS)
    if settings.kind in ENGINES or settings.kind in CHAT_ENGINES:
        for url in filter(None, (url.strip() for url in settings.url.split(","))):
            server_url(url, f"engines.{name}.url")


def open_engine(name: str, settings: EngineSettings) -> Engine:
    """The client for an engine's settings; a pool if they list several replicas.

    Raises `ConfigError` for an unknown kind or a URL that is not http(s).
    """
    make = _maker(name, settings.kind, ENGINES, ENTRY_POINTS)
    urls = [url.strip() for url in settings.url.split(",") if url.strip()]
    if settings.kind in ENGINES:  # a package's own kind may have other addresses
        urls = [server_url(url, f"engines.{name}.url") for url in urls]
    if len(urls) == 1:
        return make(name, settings, retries=DEFAULT_RETRIES)
    if not urls:
        raise ConfigError(f"engines.{name}.url: name at least one server")
    replicas = [settings.model_copy(update={"url": url}) for url in urls]
    return EnginePool(name, [make(f"{name}[{at}]", one, retries=ONCE) for at, one in enumerate(replicas)])


def open_chat_engine(name: str, settings: EngineSettings) -> ChatEngine:
    """The client of a chat upstream (chat mode); `ConfigError` for an unknown kind, or no http(s) URL."""
    make = _maker(name, settings.kind, CHAT_ENGINES, CHAT_ENTRY_POINTS)
    if settings.kind in CHAT_ENGINES:
        server_url(settings.url, f"engines.{name}.url")
    return make(name, settings, retries=DEFAULT_RETRIES)


OPENAI_SERVERS = (
    *("litellm", "lmstudio", "lm-studio", "ollama", "openai", "openrouter"),
    *("tgi", "text-generation-inference", "trtllm", "trt-llm", "tensorrt-llm"),
)
"""Servers whose names users try as kinds."""


def _maker(name: str, kind: str, registry: Mapping[str, M], group: str) -> M:
    if kind not in known_names(registry, group):
        known = (*known_names(ENGINES, ENTRY_POINTS), *known_names(CHAT_ENGINES, CHAT_ENTRY_POINTS), "passthrough")
        hint = did_you_mean(kind, known)
        if kind.lower() in OPENAI_SERVERS:
            hint = f"; for {kind} it is openai_compatible ({page('your-server')})"
        raise ConfigError(f"engines.{name}.kind: no engine kind {kind!r}; known: {', '.join(known)}{hint}")
    return lookup("engine kind", kind, registry, group, ConfigError)


def open_vendor(
    name: str, settings: EngineSettings, http: aiohttp.ClientSession, dialects: Collection[str]
) -> PassthroughUpstream:
    """The client of a vendor (passthrough). `ConfigError` for a URL that is not one server's, or an unknown dialect."""
    for dialect in settings.dialects:
        if dialect not in dialects:
            known = ", ".join(dialects)
            raise ConfigError(f"engines.{name}.dialects: no dialect {dialect!r}; known: {known}")
    url = settings.url.strip()
    if "," in url or not url.startswith(("https://", "http://")):
        raise ConfigError(f"engines.{name}.url: expected the http(s) URL of one vendor, not {url!r}")
    return PassthroughUpstream(name, settings, http, settings.dialects or dialects)
