"""Asking a server how it tokenizes, by `/tokenize`, which vLLM, SGLang and the embedded engine have."""

from __future__ import annotations

from rolltap.errors import EngineError, RateLimited
from rolltap.proxy.engines.http import EngineHttp

ASKED_S = 10.0


async def server_tokens(http: EngineHttp, text: str, model: str) -> list[int] | None:
    """The server's ids of `text`; None if it has no such route, refuses, or does not answer."""
    body = {"model": model, "prompt": text, "add_special_tokens": False}
    try:
        answer = await http.optional("POST", "/tokenize", body, timeout_s=ASKED_S)
    except (EngineError, RateLimited):
        return None
    ids = answer.get("tokens") if isinstance(answer, dict) else None
    return ids if isinstance(ids, list) and all(isinstance(one, int) for one in ids) else None
