"""What is drawn is what the reported log-probs say."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from rolltap.engine.sampling import SamplingOptions, draw_tokens, processed_logprobs

samplings = st.builds(
    SamplingOptions,
    max_tokens=st.just(1),
    temperature=st.floats(0.05, 5.0),
    top_p=st.floats(0.01, 1.0),
    top_k=st.integers(0, 40),
    min_p=st.floats(0.0, 1.0),
)


@given(seed=st.integers(0, 1000), rows=st.lists(samplings, min_size=1, max_size=4), uniform=st.floats(0, 0.999999))
def test_a_draw_is_never_of_what_was_cut(seed: int, rows: list[SamplingOptions], uniform: float) -> None:
    logits = torch.randn(len(rows), 30, generator=torch.Generator().manual_seed(seed))
    logprobs = processed_logprobs(logits, rows)
    assert torch.allclose(logprobs.exp().sum(-1), torch.ones(len(rows)), atol=1e-5)
    ids = draw_tokens(logprobs, rows, [uniform] * len(rows))
    assert torch.isfinite(logprobs.gather(1, ids[:, None])).all()
    for row, sampling in enumerate(rows):
        kept = int(torch.isfinite(logprobs[row]).sum())
        assert 1 <= kept <= (sampling.top_k or 30)


def test_without_truncation_it_is_the_softmax_at_temperature() -> None:
    logits = torch.randn(2, 30)
    logprobs = processed_logprobs(logits, [SamplingOptions(1, temperature=0.5), SamplingOptions(1)])
    assert torch.equal(logprobs[0], torch.log_softmax(logits[0] / 0.5, -1))
    assert torch.equal(logprobs[1], torch.log_softmax(logits[1], -1))


def test_greedy_takes_the_likeliest_and_reports_temperature_one() -> None:
    logits = torch.randn(1, 30)
    greedy = [SamplingOptions(1, temperature=0.0)]
    logprobs = processed_logprobs(logits, greedy)
    assert draw_tokens(logprobs, greedy, [0.99]).item() == logits.argmax()
    assert torch.equal(logprobs, torch.log_softmax(logits, -1))


def test_frequencies_follow_the_log_probs() -> None:
    many = [SamplingOptions(1, temperature=1.3)] * 4000
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]]).expand(4000, 4)
    logprobs = processed_logprobs(logits, many)
    uniforms = torch.rand(4000, generator=torch.Generator().manual_seed(0)).tolist()
    shares = torch.bincount(draw_tokens(logprobs, many, uniforms), minlength=4) / 4000
    assert (shares - logprobs[0].exp()).abs().max() < 0.03


def test_top_p_keeps_the_smallest_set_that_reaches_it() -> None:
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()
    kept = torch.isfinite(processed_logprobs(logits, [SamplingOptions(1, top_p=0.7)]))[0].tolist()
    assert kept == [True, True, False, False]
