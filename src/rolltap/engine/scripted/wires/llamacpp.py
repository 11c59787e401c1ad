"""llama.cpp's `/completion` without its stream. Source: `tools/server/README.md`, and seen in xllamacpp 2026.10."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rolltap.engine.scripted.sampling import Ask, Piece, Plan
from rolltap.engine.scripted.wires.base import Reader, candidates
from rolltap.errors import InvalidRequest

STOP_TYPES = {"stop": "eos", "length": "limit", "abort": "none", None: "none"}


class Completion:
    """`/completion`. It knows only the model's own stop tokens, and no log-probs after temperature."""

    path = "/completion"

    def read(self, body: dict[str, Any], headers: Mapping[str, str]) -> Ask:
        reader = Reader(body)
        if body.get("stream"):
            raise InvalidRequest("this server stands for llama.cpp without its stream", param="stream")
        return Ask(
            id="",
            session="",
            model="",
            prompt_ids=reader.ids("prompt"),
            max_tokens=reader.integer("n_predict"),
            temperature=reader.number("temperature", 0.8),
            top_logprobs=reader.integer("n_probs", 0) or 0,
            logprobs=bool(body.get("n_probs")),
            stream=False,
            echo=bool(body.get("return_tokens")),
        )

    def first(self, plan: Plan) -> Any | None:
        return None

    def event(self, plan: Plan, piece: Piece) -> Any:
        raise NotImplementedError("llama.cpp's stream is not spoken")

    def last(self, plan: Plan) -> Any | None:
        return None

    def whole(self, plan: Plan, piece: Piece) -> Any:
        rows = zip(piece.ids, piece.logprobs or (), strict=False)
        return {
            "index": 0,
            "content": "",
            "tokens": piece.ids if plan.ask.echo else [],
            "stop": True,
            "stop_type": STOP_TYPES[piece.finish],
            "tokens_predicted": len(piece.ids),
            "tokens_evaluated": len(plan.ask.prompt_ids),
            "truncated": False,
            "completion_probabilities": [
                {
                    "id": token,
                    "logprob": logprob,
                    "top_logprobs": [
                        {"id": other, "logprob": value} for other, value in candidates(plan, token, at, "raw")
                    ],
                }
                for at, (token, logprob) in enumerate(rows)
            ],
        }
