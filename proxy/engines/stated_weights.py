"""Asking a server for the version of the weights that it serves: vLLM by `/weight_info`, SGLang by `/model_info`."""

from __future__ import annotations

from typing import Any

from rolltap.errors import EngineError, RateLimited
from rolltap.proxy.engines.decode import version_number
from rolltap.proxy.engines.http import EngineHttp

VLLM, SGLANG = "/weight_info", "/model_info"
ASKED_S = 10.0
"""Seconds that the answer may take: a call waits for it."""


def stated_version(answer: Any) -> str | None:
    """The version's name in a server's answer; None where there is none."""
    version = answer.get("weight_version") if isinstance(answer, dict) else None
    return version if isinstance(version, str) and version else None


async def find_path(http: EngineHttp) -> str | None:
    """The route by which a server says its version; None where it has none."""
    for path in (VLLM, SGLANG):
        if stated_version(await http.optional("GET", path, timeout_s=ASKED_S)) is not None:
            return path
    return None


async def served_version(http: EngineHttp, path: str) -> int | None:
    """The version that the server says it serves; None where it does not answer, or the name is no version."""
    try:
        name = stated_version(await http.json("GET", path, timeout_s=ASKED_S))
    except (EngineError, RateLimited):
        return None
    return version_number(name) if name is not None else None
