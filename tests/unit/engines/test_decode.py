"""What the wires have in common, and vLLM's own shapes."""

from __future__ import annotations

import base64
import io
import math
from contextlib import suppress
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from rolltap.errors import (
    ContextOverflow,
    EngineProtocolError,
    EngineRefused,
    EngineUnavailable,
    ModelNotLoaded,
    RateLimited,
)
from rolltap.proxy.engines import vllm_wire as vllm
from rolltap.proxy.engines.base import SampleRequest, join_chunks
from rolltap.proxy.engines.decode import (
    Problem,
    WireVersionSpan,
    npy,
    problem,
    sampling_mask,
    spans,
    top_k,
    version_number,
)
from rolltap.proxy.engines.http import error_text, failure
from rolltap.types import VersionSpan


def request(**fields: Any) -> SampleRequest:
    return SampleRequest(**{"id": "a", "model": "m", "prompt_ids": [1, 2], "max_tokens": 9, **fields})


def encoded(array: np.ndarray) -> str:
    buffer = io.BytesIO()
    np.save(buffer, array)
    return base64.b64encode(buffer.getvalue()).decode()


@pytest.mark.parametrize(
    ("version", "number"),
    [("default", 0), ("7", 7), (7, 7), ("step-7", None), ("-1", None), ("", None), ("2147483648", None)],
)
def test_only_versions_that_rolltap_set_are_numbers(version: str | int, number: int | None):
    assert version_number(version) == number


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5)), max_size=6))
def test_spans_tile_the_output(pieces: list[tuple[int, int]]):
    given_spans, at = [], 0
    for version, size in pieces:
        given_spans.append(WireVersionSpan(str(version), at, at + size))
        at += size
    found = spans(given_spans, at)
    assert [version for span in found for version in [span.version] * (span.end - span.start)] == [
        version for version, size in pieces for _ in range(size)
    ]
    assert all(left.version != right.version for left, right in pairwise(found))
    assert spans(given_spans, at + 1) == ()


def test_a_foreign_version_is_not_guessed():
    assert spans([WireVersionSpan("step-1", 0, 2)], 2) == ()
    assert spans([WireVersionSpan("default", 0, 1), WireVersionSpan("3", 1, 2)], 2) == (
        VersionSpan(0, 0, 1),
        VersionSpan(3, 1, 2),
    )
    assert spans([WireVersionSpan("1", 0, 1), WireVersionSpan("2", 2, 3)], 3) == ()


def test_candidates_hold_the_sampled_token():
    found = top_k([7], [-5.0], [[(7, -5.0), (1, -0.1), (2, -0.2), (3, -0.3)]], 3)
    assert found["top_ids"].tolist() == [[1, 2, 7]]
    np.testing.assert_allclose(found["top_logprobs"], [[-0.1, -0.2, -5.0]], rtol=1e-6)
    assert top_k([7], [-5.0], [[(7, -5.0)]], 3) == {}


def test_a_mask_is_whole_or_left_out():
    assert sampling_mask([[7], [1, 2, 7]], 2, 3)["sampling_mask"].tolist() == [[7, -1, -1], [1, 2, 7]]
    assert sampling_mask([[7], [1, 2, 7]], 2, 2) == {}
    assert sampling_mask([[7], []], 2, 2) == {}
    assert sampling_mask([[7]], 2, 2) == {}
    assert sampling_mask(None, 2, 2) == {}
    for odd in (-1, 2**31, 2**70):
        assert sampling_mask([[7], [odd, 7]], 2, 2) == top_k([7], [-0.1], [[(7, -0.1), (odd, -0.2)]], 2) == {}


def test_arrays_are_never_unpickled():
    buffer = io.BytesIO()
    np.save(buffer, np.array([{}], dtype=object), allow_pickle=True)
    with pytest.raises(EngineProtocolError):
        npy(base64.b64encode(buffer.getvalue()).decode())
    with pytest.raises(EngineProtocolError):
        npy("not base64!")


@pytest.mark.parametrize(
    ("status", "message", "error"),
    [
        (400, "This model's maximum context length is 4096 tokens, but ...", ContextOverflow),
        (400, "The input (9000 tokens) is longer than the model's context length (4096 tokens).", ContextOverflow),
        (400, "the request exceeds the available context size (4096 tokens), try increasing it", ContextOverflow),
        (
            422,
            "Input validation error: `inputs` tokens + `max_new_tokens` must be <= 4096. Given: 5000 `inputs` tokens",
            ContextOverflow,
        ),
        (
            400,
            "Trying to keep the first 5000 tokens when the model's context length of only 4096 tokens",
            ContextOverflow,
        ),
        (400, "temperature must be positive", EngineRefused),
        (400, "the file model.gguf was not found", EngineRefused),
        (401, "Unauthorized", EngineRefused),
        (404, "The model `x` does not exist.", ModelNotLoaded),
        (404, 'model "qwen3:4b" not found, try pulling it first', ModelNotLoaded),
        (404, "No models loaded. Please load a model in the developer page.", ModelNotLoaded),
        (404, "No endpoints found for qwen/qwen9.", ModelNotLoaded),
        (404, "Not Found", EngineRefused),
        (404, "404 page not found", EngineRefused),
        (408, "too slow", EngineUnavailable),
        (429, "slow down", RateLimited),
        (500, "out of memory", EngineUnavailable),
        (501, "not here", EngineRefused),
        (503, "loading", EngineUnavailable),
    ],
)
def test_statuses_by_their_boundary(status: int, message: str, error: type[Exception]):
    found = failure("main", "/generate", status, message)
    assert type(found) is error
    assert message in str(found)
    if isinstance(found, ContextOverflow):
        assert found.limit == 4096
    if isinstance(found, ModelNotLoaded):
        assert f"{message.rstrip('.')}. Set the policy's `model`" in str(found)


def test_a_server_without_a_list_of_models_is_asked_about_its_url():
    assert "(is `engines.main.url` that of its API?)" in str(failure("main", "/v1/models", 404, "404 page not found"))
    assert "url" not in str(failure("main", "/generate", 404, "Not Found"))


@pytest.mark.parametrize(("after", "seconds"), [("3", 3.0), ("0", 0.0), ("-1", 0.0), ("nan", 1.0), (None, 1.0)])
def test_retry_after(after: str | None, seconds: float):
    found = failure("main", "/", 429, "", after)
    assert found.retry_after == seconds


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"error": {"message": "no"}}', "no"),
        ('{"detail": "Not Found"}', "Not Found"),
        ('{"error": "no"}', "no"),
        ("<html>\n  bad   gateway", "<html> bad gateway"),
        ("<html>\n<head><TITLE>502 Bad\n Gateway</TITLE></head><body>nginx", "a page: 502 Bad Gateway"),
        ('[{"error": {"code": 400, "message": "no key", "status": "INVALID_ARGUMENT"}}]', "no key"),
        (
            '{"error": {"message": "Provider returned error", "metadata": {"raw": "busy"}}}',
            "Provider returned error: busy",
        ),
        ('{"error": {"message": "no", "metadata": [1]}}', "no"),
        ('["no"]', '["no"]'),
        ("null", "null"),
        ("", "(nothing)"),
    ],
)
def test_what_an_error_body_says(text: str, message: str):
    assert error_text(text) == message


def test_an_error_inside_a_stream_failed_whatever_its_code():
    assert type(problem("m", "/", Problem("gone", 404))) is EngineUnavailable
    assert type(problem("m", "/", Problem("wait", 429))) is RateLimited
    assert type(problem("m", "/", Problem("bad field", 400))) is EngineRefused


def generate(**choice: Any) -> Any:
    made = vllm.GenerateChoice(**choice)
    return vllm.generate_chunk(made, vllm.GenerateEvent(choices=[made]), request(), len(choice["token_ids"]))


def logprobs(*rows: tuple[int, float | None]) -> vllm.GenerateLogprobs:
    return vllm.GenerateLogprobs([vllm.Token(token, value) for token, value in rows])


def test_vllm_writes_minus_9999_for_what_is_no_number():
    chunk = generate(token_ids=[3, 4], logprobs=logprobs((3, -0.5), (4, -9999.0)))
    assert chunk.logprobs[0] == -0.5
    assert math.isnan(chunk.logprobs[1])


def test_logprobs_of_other_tokens_are_no_logprobs():
    assert generate(token_ids=[3, 4], logprobs=logprobs((3, -0.5), (5, -0.5))).logprobs is None
    assert generate(token_ids=[3, 4], logprobs=logprobs((3, -0.5))).logprobs is None
    assert generate(token_ids=[3, 4]).logprobs is None
    assert generate(token_ids=[], finish_reason="stop").logprobs == []


def test_routed_experts_are_those_that_sampled_each_token():
    rows = np.arange(5 * 2 * 2).reshape(5, 2, 2)  # prompt of 3, output of 3: a row for all but the last
    np.testing.assert_array_equal(routed(rows), rows[2:])
    for wrong in (rows[:2], rows[:, 0], rows.astype(np.float32), rows - 18, rows * 40_000):
        with pytest.raises(EngineProtocolError, match="routed experts"):
            routed(wrong)


def routed(rows: np.ndarray) -> np.ndarray:
    choice = vllm.GenerateChoice(token_ids=[3, 4, 5], routed_experts=encoded(rows), finish_reason="stop")
    chunk = vllm.generate_chunk(choice, vllm.GenerateEvent(choices=[choice]), request(routed_experts=True), 3)
    return chunk.whole["routed_experts"]


def test_an_unknown_finish_ends_the_output_and_is_named():
    choice = vllm.GenerateChoice(token_ids=[1], finish_reason="repetition")
    chunk = vllm.generate_chunk(choice, vllm.GenerateEvent(choices=[choice]), request(), 1)
    assert (list(chunk.token_ids), chunk.finish, chunk.unknown_finish) == ([1], "stop", "repetition")
    joined = join_chunks([chunk, replace(chunk, token_ids=[], finish=None, unknown_finish="")])
    assert (joined.finish, joined.unknown_finish) == ("stop", "repetition")


@pytest.mark.parametrize("reason", ["", None])
def test_an_empty_finish_is_none(reason: str | None):
    choice = vllm.GenerateChoice(token_ids=[1], finish_reason=reason)
    assert vllm.generate_chunk(choice, vllm.GenerateEvent(choices=[choice]), request(), 1).finish is None


def test_a_server_that_ignores_return_token_ids_is_found_out():
    made = vllm.CompletionChoice(text="hello")
    with pytest.raises(EngineProtocolError, match="openai_compatible"):
        vllm.completion_chunk(made, vllm.CompletionEvent(choices=[made]), request(), 0)


def test_nan_as_python_writes_it():
    data = b'{"choices": [{"token_ids": [1], "logprobs": {"token_logprobs": [NaN]}}]}'
    event = next(vllm.CompletionOutput.read_events([data]))
    chunk = vllm.completion_chunk(event.choices[0], event, request(), 1)
    assert chunk.logprobs is not None
    assert math.isnan(chunk.logprobs[0])


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b'{"choices": 3}', b'{"choices": [{"token_ids": ["a"]}]}', b"\xff"])
def test_other_shapes_are_errors(data: bytes):
    with pytest.raises(EngineProtocolError):
        next(vllm.GenerateOutput.read_events([data]))


@given(st.binary(max_size=60))
def test_any_bytes_are_read_or_refused(data: bytes):
    with suppress(EngineProtocolError):
        next(vllm.GenerateOutput.read_events([data]))


def test_nothing_is_left_to_the_servers_defaults():
    body = vllm.completion_body(request(extra={"repetition_penalty": 1.1, "json_schema": {"type": "object"}}, seed=3))
    neutral = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
    assert body.items() >= neutral.items()
    assert (body["repetition_penalty"], body["seed"]) == (1.1, 3)
    assert body["structured_outputs"] == {"json": {"type": "object"}}
    params = vllm.generate_body(request(extra={"json_schema": {}}))["sampling_params"]
    assert params["structured_outputs"] == {"json_object": True}
