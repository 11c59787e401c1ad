"""Retries of requests whose reply has not reached anybody yet."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeGuard, TypeVar

from rolltap.errors import (
    ContextOverflow,
    EngineError,
    EngineRefused,
    EngineUnavailable,
    ModelNotLoaded,
    RateLimited,
    RolltapError,
    SchemaRefused,
)
from rolltap.proxy.engines.base import SampleRequest, Take

Chunk = TypeVar("Chunk")

log = logging.getLogger("rolltap.engines")


@dataclass(frozen=True, slots=True)
class Retries:
    """How often to retry, and the wait: `first_wait_s`, then four times as long each time, less a random part.

    A server's `Retry-After` replaces it. One above `longest_wait_s` is passed on to the harness instead of waiting.
    """

    attempts: int = 4
    first_wait_s: float = 0.1
    longest_wait_s: float = 5.0

    def wait(self, attempt: int, error: EngineUnavailable | RateLimited) -> float | None:
        """Seconds to wait after the failure of try `attempt` (from 1); None to give up."""
        if attempt >= self.attempts:
            return None
        if error.retry_after is not None:
            return error.retry_after if error.retry_after <= self.longest_wait_s else None
        return min(self.first_wait_s * 4.0 ** (attempt - 1), self.longest_wait_s) * random.uniform(0.5, 1.0)


DEFAULT_RETRIES = Retries()

SCHEMA_STATUSES = (400, 422, 500)
"""Statuses of refusals of a schema that can't be compiled. vLLM's is 500 if its engine process finds out."""


def _is_of_schema(error: RolltapError) -> TypeGuard[EngineError]:
    return (
        isinstance(error, EngineError)
        and not isinstance(error, ModelNotLoaded)
        and error.http_status in SCHEMA_STATUSES
    )


async def retried_sample(
    name: str,
    request: SampleRequest,
    attempt: Callable[[SampleRequest, Take], Awaitable[None]],
    take: Take,
    retries: Retries,
) -> None:
    """Runs an engine's `attempt` at a token request, with the retries of `retried`."""
    prompt_tokens = len(request.prompt_ids)
    call = partial(attempt, request)
    structured = not {"json_schema", "grammar"}.isdisjoint(request.extra)
    await retried(name, request.id, call, take, retries, prompt_tokens=prompt_tokens, structured=structured)


async def retried(
    name: str,
    call_id: str,
    attempt: Callable[[Callable[[Chunk], bool]], Awaitable[None]],
    take: Callable[[Chunk], bool],
    retries: Retries,
    *,
    prompt_tokens: int | None = None,
    structured: bool = False,
) -> None:
    """Runs `attempt`, which passes chunks to `take`. Retries while no server answers and no chunk has arrived.

    A `structured` request has a schema. If a server refuses it, or fails without a token, there is no retry.

    If all tries fail, the error has their number. An overflow has the prompt's number of tokens.
    """
    begun, failures = False, 0

    def take_and_note(chunk: Chunk) -> bool:
        nonlocal begun
        begun = True
        return take(chunk)

    while True:
        try:
            return await attempt(take_and_note)
        except ContextOverflow as error:
            error.tokens = error.tokens or prompt_tokens
            raise
        except (EngineUnavailable, EngineRefused, RateLimited) as error:
            if structured and not begun and _is_of_schema(error):
                raise SchemaRefused(error.message, http_status=error.http_status) from error
            if isinstance(error, EngineRefused):
                raise
            failures += 1
            wait = None if begun else retries.wait(failures, error)
            if wait is None:
                if not begun and failures > 1:
                    error.message = f"{error.message} (try {failures})"
                    error.args = (error.message,)
                raise
            # Each call and try of an engine that is away would have a warning; the pool has one for all.
            log.debug("call %s: %s; trying engine %s again in %.2f s", call_id, error.message, name, wait)
        await asyncio.sleep(wait)
