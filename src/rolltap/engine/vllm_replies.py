"""Replies of vLLM's token API, as the embedded and the scripted engine write them.

Source: vLLM 0.32, `entrypoints/scale_out/token_in_token_out` and `entrypoints/openai/completion`.
"""

from __future__ import annotations

import base64
import io
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np


class ScoredToken(NamedTuple):
    """An id with its log-prob, and the likeliest candidates in its place as (id, log-prob); none if not asked for."""

    id: int
    logprob: float | None
    candidates: Sequence[tuple[int, float]] = ()


def generate_choice(
    index: int, ids: Sequence[int], scored: Sequence[ScoredToken] | None, finish: str | None, **more: Any
) -> dict[str, Any]:
    """A choice, or a streamed piece of one, of `/inference/v1/generate`. `scored`: None without log-probs."""
    logprobs = None
    if scored is not None:
        content = [
            {
                "token_id": token.id,
                "logprob": token.logprob,
                "rank": None,
                "top_logprobs": [{"token_id": id, "logprob": value} for id, value in token.candidates],
            }
            for token in scored
        ]
        logprobs = {"content": content}
    return {
        "index": index,
        "token_ids": ids,
        "logprobs": logprobs,
        "finish_reason": finish,
        "stop_reason": None,
        **more,
    }


def completion_choice(
    index: int, text: str, scored: Sequence[ScoredToken] | None, finish: str | None, **more: Any
) -> dict[str, Any]:
    """A choice, or a streamed piece of one, of `/v1/completions`. `scored`: None without log-probs."""
    logprobs = None
    if scored is not None:
        tops = [{f"token_id:{id}": value for id, value in token.candidates} for token in scored if token.candidates]
        logprobs = {
            "text_offset": [0] * len(scored),
            "tokens": [f"token_id:{token.id}" for token in scored],
            "token_logprobs": [token.logprob for token in scored],
            "top_logprobs": tops or None,
        }
    return {
        "index": index,
        "text": text,
        "logprobs": logprobs,
        "finish_reason": finish,
        "stop_reason": None,
        **more,
    }


def completion(id: str, model: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
    """The body of `/v1/completions`, or an event of its stream."""
    return {"id": id, "object": "text_completion", "created": int(time.time()), "model": model, "choices": choices}


def prompt_logprobs(scored: Sequence[ScoredToken]) -> list[dict[str, dict[str, Any]] | None]:
    """For each id of the prompt its log-prob and its candidates', by id; none for the first one."""
    rows = [[*token.candidates, (token.id, token.logprob)] for token in scored]
    return [None, *({str(id): {"logprob": value, "rank": None} for id, value in row} for row in rows)]


def usage(prompt: int, completion: int, cached: int = 0) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def npy(array: np.ndarray) -> str:
    """The array as a base64 `.npy` file."""
    file = io.BytesIO()
    np.save(file, array)
    return base64.b64encode(file.getvalue()).decode()
