"""New weights in the middle of an answer, in every mode: each token has the version that it was really sampled from.

Proven from outside: the log-probs of each version's tokens are those of that version's weights, by transformers.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from safetensors.torch import load_file, save_file

from rolltap.calllog.facts import CallRow
from rolltap.engine.tiny import FOLDER
from rolltap.types import Outcome, VersionSpan

from .record import Reference, done, rows_of
from .servers import Proxy

TOKENS, SWAP_AFTER = 3500, 20  # long enough for a push to land in it on most machines


def endless(folder: Path, sharpness: float) -> Path:
    """The tiny model without its special tokens, so that it writes plain text until its limit.

    They get `<|im_start|>`'s row of the head, which the model never samples, made stronger. `sharpness` scales all
    logits: the log-probs of one such model can't be taken for those of another.
    """
    shutil.copytree(FOLDER, folder)
    spec = json.loads((folder / "tokenizer.json").read_text())
    special = {token["content"]: token["id"] for token in spec["added_tokens"]}
    weights = load_file(folder / "model.safetensors")
    head = weights["lm_head.weight"]
    head[list(special.values())] = 8 * head[special["<|im_start|>"]]
    weights["lm_head.weight"] = head * sharpness
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture
def restored(served: Proxy) -> Iterator[Proxy]:
    """The proxy, whose engine gets its own weights back afterwards."""
    yield served
    served.push("tiny", FOLDER)


def answer(running: Proxy, session: Mapping[str, str], tokens: int, swap: Callable[[], object] | None = None) -> None:
    """One streamed answer of so many tokens; `swap` is called while it is being sampled."""
    with openai.OpenAI(base_url=session["base_url"] + "/v1", api_key=session["key"], max_retries=0) as client:
        question: Any = [{"role": "user", "content": "Copy apple.txt to pear.txt."}]
        stream = client.chat.completions.create(model="tiny", messages=question, max_tokens=tokens, stream=True)
        for seen, _ in enumerate(stream):
            if seen == SWAP_AFTER and swap is not None:
                swap()


def swapped(running: Proxy, old: Path, new: Path, tries: int = 4) -> tuple[CallRow, int]:
    """An answer that began with `old` and went on with `new`, and the version of `old`.

    On a busy machine the client may be so late that the engine has sampled all of it: then once more.
    """
    first = running.push("tiny", old)
    session = running.open_session("tiny")
    answer(running, session, TOKENS, lambda: running.push("tiny", new))
    (row,) = rows_of(running.database, session["session_id"])
    late = len(done(row).versions) == 1
    return swapped(running, old, new, tries - 1) if late and tries > 1 else (row, first)


def test_a_swap_in_mid_answer(restored: Proxy, tmp_path: Path) -> None:
    old, new = endless(tmp_path / "old", 0.7), endless(tmp_path / "new", 0.4)
    row, first = swapped(restored, old, new)
    second, completion = first + 1, done(row)
    assert len(completion.output_ids) == TOKENS
    spans = [(span.version, span.start, span.end) for span in completion.versions]
    at = spans[0][2]
    assert SWAP_AFTER <= at < TOKENS  # the swap was in mid-answer: a chunk of text has a token or more
    assert spans == [(first, 0, at), (second, at, TOKENS)]
    before, after = Reference(old).logprobs(row), Reference(new).logprobs(row)
    np.testing.assert_allclose(completion.logprobs[:at], before[:at], rtol=0, atol=1e-4)
    np.testing.assert_allclose(completion.logprobs[at:], after[at:], rtol=0, atol=1e-4)
    assert np.abs(before - after).max() > 0.1  # the two could not be mistaken for each other


def test_a_swap_that_drains_lets_the_answer_end_on_the_old_weights(restored: Proxy, tmp_path: Path) -> None:
    old, new = endless(tmp_path / "old", 0.7), endless(tmp_path / "new", 0.4)
    first = restored.push("tiny", old)
    session = restored.open_session("tiny")
    with ThreadPoolExecutor(1) as trainer:
        pushes = []
        answer(restored, session, TOKENS, lambda: pushes.append(trainer.submit(restored.push, "tiny", new, "drain")))
        (second,) = (push.result(60) for push in pushes)
    answer(restored, session, 20)
    before, after = rows_of(restored.database, session["session_id"])
    assert done(before).versions == (VersionSpan(first, 0, TOKENS),)
    assert done(after).versions == (VersionSpan(second, 0, 20),)
    np.testing.assert_allclose(done(before).logprobs, Reference(old).logprobs(before), rtol=0, atol=1e-4)
    np.testing.assert_allclose(done(after).logprobs, Reference(new).logprobs(after), rtol=0, atol=1e-4)


def test_a_swap_that_aborts_ends_the_answer_and_keeps_what_was_sampled(restored: Proxy, tmp_path: Path) -> None:
    old, new = endless(tmp_path / "old", 0.7), endless(tmp_path / "new", 0.4)
    first = restored.push("tiny", old)
    session = restored.open_session("tiny")
    with pytest.raises((openai.APIError, httpx.TransportError)):
        answer(restored, session, TOKENS, lambda: restored.push("tiny", new, "abort"))
    answer(restored, session, 20)
    before, after = rows_of(restored.database, session["session_id"])
    sampled = done(before)
    assert sampled.outcome is Outcome.ENGINE_ERROR
    assert not before.call().trainable
    assert SWAP_AFTER <= len(sampled.output_ids) < TOKENS
    assert sampled.versions in ((), (VersionSpan(first, 0, len(sampled.output_ids)),))
    np.testing.assert_allclose(sampled.logprobs, Reference(old).logprobs(before), rtol=0, atol=1e-4)
    assert done(after).versions == (VersionSpan(first + 1, 0, 20),)
    np.testing.assert_allclose(done(after).logprobs, Reference(new).logprobs(after), rtol=0, atol=1e-4)
