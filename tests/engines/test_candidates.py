"""Candidates of every sampled token from a real vLLM: those of the model's own distribution."""

from __future__ import annotations

from contextlib import closing

import numpy as np

from rolltap.reconstructor.reconstruct import reconstruct

from .record import Reference, assert_extends, done, rows_of
from .servers import CANDIDATES, Proxy
from .talkers import chat


def test_the_likeliest_candidates_are_kept_with_each_token(served: Proxy, reference: Reference) -> None:
    session = served.open_session("watched")
    with closing(chat(session)) as talker:
        talker.ask("Copy apple.txt to pear.txt.")
        talker.ask("Rename plum.txt to river.txt.")
    rows = rows_of(served.database, session["session_id"])
    assert_extends(rows)
    for row in rows:
        output, extras = done(row).output_ids, done(row).extras
        distribution_TV = reference.distributions(row)
        top_ids, top_logprobs = extras["top_ids"], extras["top_logprobs"]
        assert top_ids.shape == top_logprobs.shape == (len(output), CANDIDATES)
        np.testing.assert_allclose(
            top_logprobs, np.take_along_axis(distribution_TV, top_ids.astype(np.int64), 1), rtol=0, atol=1e-4
        )
        assert (top_ids == output[:, None]).sum(1).tolist() == [1] * len(output)
        np.testing.assert_allclose(top_logprobs[:, 0], distribution_TV.max(1), rtol=0, atol=1e-4)
    (segment,) = reconstruct([row.call() for row in rows]).segments
    np.testing.assert_array_equal(
        segment.extras["top_ids"][segment.loss_mask], np.concatenate([done(row).extras["top_ids"] for row in rows])
    )
