"""Readings by another policy of the server: its engine scores the ids that the student sampled."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from rolltap.contract.trainer import PolicyScores, PolicyState, ScoredIds
from rolltap.errors import ConfigError
from rolltap.trainer_client.data.recorded import masked_tokens, temperatures
from rolltap.trainer_client.data.step import PolicyReading, RowView, ScoredPass, Step
from rolltap.trainer_client.model.weights import tokenizer_hash
from rolltap.types import Segment

SEQUENCES_AT_ONCE = 16
"""Sequences in one request: as many as the server sends to an engine at a time, so that no request waits long."""


class ScoringClient(Protocol):
    """The part of a `TrainerClient` that scoring needs."""

    def policy(self, name: str) -> PolicyState: ...

    def score(self, policy: str, sequences: Sequence[ScoredIds], *, top_logprobs: int = 0) -> PolicyScores: ...


def scored_reading(client: ScoringClient, one: ScoredPass, step: Step) -> PolicyReading:
    """The log-probs of the rows' trained tokens under the policy of `one`. Scores have no entropy: it is 0.

    `ConfigError` for a policy with a tokenizer other than the student's, and for tokens that were not sampled at
    temperature 1 from the whole vocabulary, as scores assume.
    """
    _check_tokenizer(client.policy(one.policy), step)
    views = step.views() if one.views is None else one.views
    for view in views:
        _check_sampling(view.segment, one.policy)
    logprobs = tuple(np.zeros(len(row.segment), np.float32) for row in step.rows)
    for start in range(0, len(views), SEQUENCES_AT_ONCE):
        part = views[start : start + SEQUENCES_AT_ONCE]
        scores = client.score(one.policy, [_trained_ids(view) for view in part])
        for view, tokens in zip(part, scores.sequences, strict=True):
            places = np.flatnonzero(view.segment.loss_mask)
            logprobs[view.row][view.places] = np.asarray(tokens.logprobs, np.float32)[places - places[0]]
    return PolicyReading(logprobs, tuple(np.zeros_like(array) for array in logprobs))


def _trained_ids(view: RowView) -> ScoredIds:
    """The view's ids up to its last trained token, to be scored from the first one on."""
    places = np.flatnonzero(view.segment.loss_mask)
    return ScoredIds(view.segment.token_ids[: places[-1] + 1].tolist(), int(places[0]))


def _check_tokenizer(teacher: PolicyState, step: Step) -> None:
    own = "" if step.tokenizer is None else tokenizer_hash(step.tokenizer)
    if own and teacher.tokenizer_hash and own != teacher.tokenizer_hash:
        raise ConfigError(
            f"policy {teacher.name!r} has tokenizer {teacher.tokenizer_hash[:12]}, the model in training {own[:12]}: "
            "a teacher reads the student's token ids. Where only the chat templates differ, set the teacher's "
            "policies.NAME.tokenizer to the student's folder"
        )


def _check_sampling(segment: Segment, policy: str) -> None:
    if segment.images:
        raise ConfigError(f"policy {policy!r} scores token ids alone, and the rows show images")
    warm = temperatures([segment])
    if (warm is not None and (warm != 1.0).any()) or masked_tokens(segment):
        raise ConfigError(
            f"policy {policy!r} scores at temperature 1 over the whole vocabulary; the rows were sampled otherwise: "
            "leave the trained policy's pin and sampling_mask as they are by default"
        )
