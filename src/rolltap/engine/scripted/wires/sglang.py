"""SGLang's `/generate`, in its two ways of streaming: everything so far in each event (its default), or only what is
new (`--incremental-streaming-output`).

Source: SGLang 0.5.23, `srt/managers/{io_struct,tokenizer_manager}.py` and `srt/entrypoints/http_server.py`.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

from rolltap.engine.scripted.sampling import Ask, Piece, Plan, mask_of, masked_logprob_of
from rolltap.engine.scripted.wires.base import Reader, candidates, echoed, experts, prompt_scores, scaled, session_of
from rolltap.errors import InvalidRequest


class SglangGenerate:
    """`/generate`; `incremental` as the server's flag. Without `masks` it is an older server, which returns none."""

    path = "/generate"

    def __init__(self, mode: str, *, incremental: bool, masks: bool = True) -> None:
        self._mode = mode
        self._incremental = incremental
        self._masks = masks

    def read(self, body: dict[str, Any], headers: Mapping[str, str]) -> Ask:
        reader = Reader(body)
        params = reader.inner("sampling_params")
        masks = self._masks and bool(body.get("return_sampling_mask"))
        if masks and not _cuts(params):
            raise InvalidRequest("return_sampling_mask requires top_k, top_p or min_p", param="return_sampling_mask")
        return Ask(
            id=reader.text("rid"),
            session=session_of(reader, headers),
            model="",
            prompt_ids=reader.ids("input_ids"),
            max_tokens=params.integer("max_new_tokens", 128),
            temperature=params.number("temperature"),
            top_logprobs=reader.integer("top_logprobs_num", 0) or 0,
            experts=bool(body.get("return_routed_experts")),
            masks=masks,
            logprobs=bool(body.get("return_logprob")),
            stream=bool(body.get("stream")),
            echo=bool(body.get("return_prompt_token_ids")),
            stop_ids=frozenset(params.body.get("stop_token_ids") or ()),
            scored_from=reader.integer("logprob_start_len"),
            scored_top=reader.integer("top_logprobs_num", 0) or 0,
        )

    def first(self, plan: Plan) -> Any | None:
        return None

    def event(self, plan: Plan, piece: Piece) -> Any:
        meta: dict[str, Any] = {
            "id": plan.ask.id,
            "finish_reason": _finish(piece),
            "prompt_tokens": len(plan.ask.prompt_ids),
            "completion_tokens": piece.start + len(piece.ids),
            "cached_tokens": 0,
            "num_retractions": 0,
        }
        if piece.spans is not None:
            meta["weight_versions"] = piece.spans
        if plan.ask.experts and piece.finish is not None:
            meta["routed_experts"] = base64.b64encode(experts(plan).tobytes()).decode()
        if plan.ask.scored_from is not None:
            rows = prompt_scores(plan)
            own = [[None if at == 0 else row[0][1], row[0][0], None] for at, row in enumerate(rows)]
            tops = [None if at == 0 else [[value, token, None] for token, value in row] for at, row in enumerate(rows)]
            meta |= {"input_token_logprobs": own, "input_top_logprobs": tops}
        pieces = [piece] if self._incremental else plan.pieces
        if piece.logprobs is not None:
            meta |= self._logprobs(plan, pieces)
        if plan.ask.masks:
            meta |= _masks(pieces)
        ids = [token for part in pieces for token in part.ids]
        body: dict[str, Any] = {"text": "", "output_ids": ids, "meta_info": meta}
        if plan.ask.echo or plan.fault == "altered_prompt":
            body["prompt_token_ids"] = echoed(plan)
        return body

    def last(self, plan: Plan) -> Any | None:
        return None

    def whole(self, plan: Plan, piece: Piece) -> Any:
        plan.pieces = [piece]
        return self.event(plan, piece)

    def _logprobs(self, plan: Plan, pieces: list[Piece]) -> dict[str, Any]:
        rows: list[Any] = []
        tops: list[Any] = []
        for piece in pieces:
            values = scaled(plan, piece.logprobs or (), self._mode)
            for at, (token, value) in enumerate(zip(piece.ids, values, strict=False), piece.start):
                rows.append([value, token, None])
                tops.append([[logprob, other, None] for other, logprob in candidates(plan, token, at, self._mode)])
        return {"output_token_logprobs": rows, **({"output_top_logprobs": tops} if plan.ask.top_logprobs else {})}


def _cuts(params: Reader) -> bool:
    """Whether top-k, top-p or min-p leave a part of the vocabulary."""
    return (params.integer("top_k", -1) or -1) > 0 or params.number("top_p") < 1 or params.number("min_p", 0.0) > 0


def _masks(pieces: list[Piece]) -> dict[str, Any]:
    tokens = [(token, at) for piece in pieces for at, token in enumerate(piece.ids, piece.start)]
    return {
        "output_token_sampling_mask": [mask_of(token, at) for token, at in tokens],
        "output_token_sampling_logprobs": [masked_logprob_of(token, at) for token, at in tokens],
        "output_token_sampling_mask_length": len(tokens),
    }


def _finish(piece: Piece) -> dict[str, Any] | None:
    if piece.finish is None:
        return None
    more: dict[str, dict[str, Any]] = {
        "stop": {"matched": piece.ids[-1] if piece.ids else None},
        "length": {"length": piece.start + len(piece.ids)},
        "abort": {"message": "Aborted", "status_code": None, "err_type": None},
    }
    return {"type": piece.finish, **more[piece.finish]}
