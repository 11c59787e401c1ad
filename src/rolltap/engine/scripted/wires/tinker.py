"""Tinker's sampling: a promise, and its result as protobuf. Needs the `tinker` extra. Source: tinker 0.38."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from rolltap.engine.scripted.sampling import Ask, Piece, Plan
from rolltap.engine.scripted.wires.base import Reader, candidates, scaled
from rolltap.errors import InvalidRequest


class Sample:
    """`/retrieve_future`. A request's id is the request itself: nothing is sampled before its result is asked for."""

    path = "/api/v1/retrieve_future"

    def __init__(self, mode: str) -> None:
        self._mode = mode

    def read(self, body: dict[str, Any], headers: Mapping[str, str]) -> Ask:
        reader = Reader(json.loads(Reader(body).text("request_id")))
        params = reader.inner("sampling_params")
        (chunk,) = reader.inner("prompt").body["chunks"]
        if headers.get("accept") != "application/x-protobuf":
            raise InvalidRequest("the result is protobuf: accept application/x-protobuf")
        return Ask(
            id="",
            session="",
            model="",
            prompt_ids=Reader(chunk).ids("tokens"),
            max_tokens=params.integer("max_tokens"),
            temperature=params.number("temperature"),
            top_logprobs=reader.integer("topk_sample_logprobs", 0) or 0,
            stream=False,
            stop_ids=frozenset(params.body.get("stop") or ()),
        )

    def first(self, plan: Plan) -> Any | None:
        return None

    def event(self, plan: Plan, piece: Piece) -> Any:
        raise NotImplementedError("Tinker has no stream")

    def last(self, plan: Plan) -> Any | None:
        return None

    def whole(self, plan: Plan, piece: Piece) -> bytes:
        from tinker.proto import tinker_public_pb2 as pb

        logprobs = scaled(plan, piece.logprobs or (), self._mode)
        sequence = pb.SampledSequence(
            stop_reason=pb.STOP_REASON_LENGTH if piece.finish == "length" else pb.STOP_REASON_STOP,
            tokens=np.asarray(piece.ids, np.int32).tobytes(),
            logprobs=np.array([np.nan if value is None else value for value in logprobs], np.float32).tobytes(),
        )
        rows = [candidates(plan, token, at, self._mode) for at, token in enumerate(piece.ids)]
        if plan.ask.top_logprobs:
            sequence.topk_sampled_logprobs.CopyFrom(
                pb.TopkLogprobs(
                    token_ids=np.array([[token for token, _ in row] for row in rows], np.int32).tobytes(),
                    logprobs=np.array([[value for _, value in row] for row in rows], np.float32).tobytes(),
                    k=plan.ask.top_logprobs,
                    length=len(rows),
                )
            )
        return pb.SampleResponse(sequences=[sequence]).SerializeToString()
