"""Which recorded samplings a trainer can compute the log-probs of."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rolltap.calllog.facts import sampling_flaw, tempered

PLAIN = {"model": "m", "max_tokens": 9, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "seed": 3}


@pytest.mark.parametrize(
    ("sent", "mode", "flaw"),
    [
        (PLAIN, "processed", None),
        (PLAIN, "raw", None),
        ({}, "unknown", None),
        ({"top_k": -1, "presence_penalty": 0.0, "repetition_penalty": 1.0}, "unknown", None),
        ({**PLAIN, "temperature": 0.5}, "processed", None),
        ({**PLAIN, "temperature": 0.5}, "raw", "logprobs_untempered"),
        ({**PLAIN, "temperature": 0.5}, "unknown", "logprobs_untempered"),
        ({**PLAIN, "temperature": 0.0}, "processed", "sampling_truncated"),
        ({**PLAIN, "top_p": 0.8}, "processed", "sampling_truncated"),
        ({**PLAIN, "top_p": 0.8}, "raw", "sampling_truncated"),
        ({**PLAIN, "top_k": 20}, "processed", "sampling_truncated"),
        ({**PLAIN, "min_p": 0.05}, "processed", "sampling_truncated"),
        ({**PLAIN, "presence_penalty": 0.5}, "processed", "sampling_truncated"),
        ({**PLAIN, "frequency_penalty": -0.5}, "processed", "sampling_truncated"),
        ({**PLAIN, "repetition_penalty": 1.1}, "processed", "sampling_truncated"),
    ],
)
def test_what_cannot_be_replayed_is_named(sent: dict[str, Any], mode: str, flaw: str | None) -> None:
    assert sampling_flaw(sent, mode) == flaw


@pytest.mark.parametrize(
    ("sent", "mode", "flaw"),
    [
        ({"top_p": 0.8, "top_k": 5, "min_p": 0.1, "temperature": 0.7}, "processed", None),
        ({"top_p": 0.8}, "raw", "sampling_truncated"),
        ({"temperature": 0.0}, "processed", "sampling_truncated"),
        ({"top_p": 0.8, "presence_penalty": 0.5}, "processed", "sampling_truncated"),
        ({"temperature": 0.5}, "unknown", "logprobs_untempered"),
    ],
)
def test_with_its_mask_a_cut_is_replayed_and_nothing_else_is(sent: dict[str, Any], mode: str, flaw: str | None) -> None:
    masks = {"sampling_mask": np.array([[4, 7, -1]], np.int32)}
    assert sampling_flaw({**PLAIN, **sent}, mode, masks) == flaw


def test_only_another_temperature_than_1_is_laid_over_the_tokens() -> None:
    assert tempered(PLAIN, 3) == tempered({}, 3) == tempered({"temperature": 0.5}, 0) == {}
    assert tempered({"temperature": 0.5}, 2)["temperature"].tolist() == [0.5, 0.5]


def test_what_a_grammar_left_is_replayed_from_processed_log_probs_only() -> None:
    masks = {"mask_rows": np.array([0], np.int32), "mask_table": np.array([2, 4, 7], np.int32)}
    assert sampling_flaw(PLAIN, "processed", masks) is None
    assert sampling_flaw({**PLAIN, "top_p": 0.8}, "processed", masks) is None
    assert sampling_flaw(PLAIN, "raw", masks) == "sampling_truncated"
