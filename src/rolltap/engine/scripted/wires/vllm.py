"""vLLM's token routes: `/inference/v1/generate` and `/v1/completions` with a prompt of ids.

Source: vLLM 0.32, `entrypoints/scale_out/token_in_token_out` and `entrypoints/openai/completion`.
"""

from __future__ import annotations

import base64
import io
import time
from collections.abc import Mapping
from itertools import count
from typing import Any

import numpy as np

from rolltap.engine.scripted.sampling import Ask, Piece, Plan, mask_of
from rolltap.engine.scripted.wires.base import Reader, candidates, echoed, experts, prompt_scores, scaled, session_of
from rolltap.errors import InvalidRequest


class Generate:
    """`/inference/v1/generate`; `experts` as `--enable-return-routed-experts`, `masks` as `--return-sampling-mask`."""

    path = "/inference/v1/generate"

    def __init__(self, mode: str, *, experts: bool = False, masks: bool = False) -> None:
        self._mode = mode
        self._experts = experts
        self._masks = masks

    def read(self, body: dict[str, Any], headers: Mapping[str, str]) -> Ask:
        reader = Reader(body)
        params = reader.inner("sampling_params")
        if self._masks:
            check_cut(params)
        top = params.integer("logprobs")
        return Ask(
            id=reader.text("request_id"),
            session=session_of(reader, headers),
            model=reader.text("model"),
            prompt_ids=reader.ids("token_ids"),
            max_tokens=params.integer("max_tokens"),
            temperature=params.number("temperature"),
            top_logprobs=top or 0,
            logprobs=top is not None,
            stream=bool(body.get("stream")),
            echo=bool(body.get("return_token_ids")),
            usage=bool(reader.inner("stream_options").body.get("include_usage")),
            stop_ids=frozenset(params.body.get("stop_token_ids") or ()),
        )

    def first(self, plan: Plan) -> Any | None:
        return None

    def event(self, plan: Plan, piece: Piece) -> Any:
        body: dict[str, Any] = {
            "request_id": plan.ask.id,
            "output_mode": "tokens",
            "choices": [self._choice(plan, piece)],
        }
        if (plan.ask.echo or plan.fault == "altered_prompt") and piece.start == 0:
            body["prompt_token_ids"] = echoed(plan)
        return body

    def last(self, plan: Plan) -> Any | None:
        return {"request_id": plan.ask.id, "choices": [], "usage": usage(plan)} if plan.ask.usage else None

    def whole(self, plan: Plan, piece: Piece) -> Any:
        return {**self.event(plan, piece), "usage": usage(plan)}

    def _choice(self, plan: Plan, piece: Piece) -> dict[str, Any]:
        content = None
        if piece.logprobs is not None:
            logprobs = scaled(plan, piece.logprobs, self._mode)
            content = [
                {
                    "token_id": token,
                    "logprob": logprob,
                    "rank": 1,
                    "top_logprobs": [
                        {"token_id": other, "logprob": value, "rank": 1 + rank}
                        for rank, (other, value) in enumerate(candidates(plan, token, at, self._mode))
                    ],
                }
                for at, (token, logprob) in enumerate(zip(piece.ids, logprobs, strict=False), piece.start)
            ]
        return {
            "index": 0,
            "token_ids": piece.ids,
            "logprobs": None if content is None else {"content": content},
            "finish_reason": piece.finish,
            "stop_reason": None,
            "weight_versions": piece.spans,
            **(routed(plan, piece) if self._experts else {}),
            **(
                {"sampling_mask": [mask_of(*one) for one in zip(piece.ids, count(piece.start), strict=False)]}
                if self._masks
                else {}
            ),
        }


def check_cut(params: Reader) -> None:
    """Under `--return-sampling-mask` vLLM takes no request whose mask has no bound."""
    if params.number("temperature") <= 0 or (params.integer("top_k", 0) or 0) <= 0:
        raise InvalidRequest("return_sampling_mask requires temperature > 0 and top_k > 0", param="top_k")


class Completions:
    """`/v1/completions`. Text is left empty: whoever asks for ids reads ids. Flags as those of `Generate`."""

    path = "/v1/completions"

    def __init__(self, mode: str, *, experts: bool = False, masks: bool = False) -> None:
        self._mode = mode
        self._experts = experts
        self._masks = masks

    def read(self, body: dict[str, Any], headers: Mapping[str, str]) -> Ask:
        reader = Reader(body)
        if self._masks:
            check_cut(reader)
        top = reader.integer("logprobs")
        return Ask(
            id=reader.text("request_id"),
            session=session_of(reader, headers),
            model=reader.text("model"),
            prompt_ids=reader.ids("prompt"),
            max_tokens=reader.integer("max_tokens", 16),
            temperature=reader.number("temperature"),
            top_logprobs=top or 0,
            logprobs=top is not None,
            stream=bool(body.get("stream")),
            echo=bool(body.get("return_token_ids")),
            usage=bool(reader.inner("stream_options").body.get("include_usage")),
            stop_ids=frozenset(body.get("stop_token_ids") or ()),
            scored_from=None if reader.integer("prompt_logprobs") is None else 1,
            scored_top=reader.integer("prompt_logprobs") or 0,
        )

    def first(self, plan: Plan) -> Any | None:
        return None

    def event(self, plan: Plan, piece: Piece) -> Any:
        return {**_head(plan), "choices": [self._choice(plan, piece)]}

    def last(self, plan: Plan) -> Any | None:
        return {**_head(plan), "choices": [], "usage": usage(plan)} if plan.ask.usage else None

    def whole(self, plan: Plan, piece: Piece) -> Any:
        return {**self.event(plan, piece), "usage": usage(plan)}

    def _choice(self, plan: Plan, piece: Piece) -> dict[str, Any]:
        logprobs = None
        if piece.logprobs is not None:
            size = len(piece.logprobs)
            tops = [candidates(plan, token, at, self._mode) for at, token in enumerate(piece.ids[:size], piece.start)]
            logprobs = {
                "text_offset": [0] * size,
                "tokens": [f"token_id:{token}" for token in piece.ids[:size]],
                "token_logprobs": scaled(plan, piece.logprobs, self._mode),
                "top_logprobs": [{f"token_id:{other}": value for other, value in row} for row in tops],
            }
        echo = plan.ask.echo and piece.start == 0
        return {
            "index": 0,
            "text": "",
            "logprobs": logprobs,
            "finish_reason": piece.finish,
            "stop_reason": None,
            "token_ids": piece.ids if plan.ask.echo else None,
            "prompt_token_ids": echoed(plan) if echo else None,
            **({} if plan.ask.scored_from is None else {"prompt_logprobs": _prompt_logprobs(plan)}),
            **(routed(plan, piece) if self._experts else {}),
        }


def _prompt_logprobs(plan: Plan) -> list[dict[str, Any] | None]:
    """By id, for every place of the prompt but the first: its own, and the candidates'."""
    rows = [{str(token): {"logprob": value, "rank": 1} for token, value in row} for row in prompt_scores(plan)]
    return [None, *rows]


def routed(plan: Plan, piece: Piece) -> dict[str, str]:
    """Routed experts with the last tokens, as base64 `.npy`."""
    if piece.finish is None:
        return {}
    file = io.BytesIO()
    np.save(file, experts(plan).astype(np.uint8))
    return {"routed_experts": base64.b64encode(file.getvalue()).decode()}


def usage(plan: Plan) -> dict[str, Any]:
    prompt, output = len(plan.ask.prompt_ids), len(plan.entry.output)
    return {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output}


def _head(plan: Plan) -> dict[str, Any]:
    return {"id": plan.ask.id, "object": "text_completion", "created": int(time.time()), "model": plan.ask.model}
