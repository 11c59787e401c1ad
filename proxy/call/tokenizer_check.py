"""Compares an engine's tokenizer with the policy's, where the engine can be asked: every added token, and a text.

An engine with another vocabulary samples garbage, and says nothing. A server may refuse to parse added tokens in texts,
so an added token differs only if the server gives one id for it, and another than ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rolltap.proxy.engines.base import Tokenizes
from rolltap.proxy.engines.pool import EnginePool

SAMPLE = "Hello, world! def f(x):\n    return x * 2  # naïve café, 你好, Привет, 🙂\t1234567890 https://example.org"

ASKED_ONE_BY_ONE = 64
"""Most added tokens that are asked for one by one, where all of them together gave other ids."""


async def tokenizer_difference(engine: Any, tokenizer: Any, model: str) -> str:
    """How the engine's tokenizer differs from the policy's, in words; empty if it does not, or can't be asked."""
    servers: Sequence[Any] = [engine]
    if isinstance(engine, EnginePool):
        servers = [replica.engine for replica in engine.replicas.serving]
    for server in servers:
        if isinstance(server, Tokenizes) and (difference := await _tokenized_otherwise(server, tokenizer, model)):
            return f"engine {engine.name} has another tokenizer than the policy's: {difference}"
    return ""


async def _tokenized_otherwise(server: Any, tokenizer: Any, model: str) -> str:
    ours = tokenizer.encode_as_is(SAMPLE)
    theirs = await server.tokenize(SAMPLE, model)
    if theirs is None:
        return ""
    if theirs != ours:
        at = next((at for at, pair in enumerate(zip(ours, theirs, strict=False)) if pair[0] != pair[1]), None)
        where = f"token {at} of a sample text is {theirs[at]}, not {ours[at]}" if at is not None else "other lengths"
        return f"{where} ({len(theirs)} tokens, not {len(ours)})"
    added = tokenizer.added_tokens
    together = "\n".join(added.values())
    if await server.tokenize(together, model) in (None, tokenizer.encode_as_is(together)):
        return ""
    for token_id, literal in list(added.items())[:ASKED_ONE_BY_ONE]:
        ids = await server.tokenize(literal, model)
        if ids is not None and len(ids) == 1 and ids != [token_id]:
            return f"{literal} is {ids[0]}, not {token_id}"
    return ""
