"""Chat mode over vLLM's own chat: the server renders, and says which tokens it saw; the record proves them."""

from __future__ import annotations

from contextlib import closing
from itertools import pairwise

import numpy as np

from rolltap.types import BreakReason

from .record import Reference, done, rows_of
from .servers import Proxy
from .talkers import chat


def test_what_vllm_rendered_is_recorded_and_judged(served: Proxy, reference: Reference) -> None:
    session = served.open_session("chat")
    with closing(chat(session)) as talker:
        said = talker.ask("Copy apple.txt to pear.txt.")
        for _ in range(3):
            said = talker.answer(dict.fromkeys(said.calls, "exit 0")) if said.calls else talker.ask("Go on.")
    rows = rows_of(served.database, session["session_id"])
    assert len(rows) == 4
    for row in rows:
        np.testing.assert_allclose(done(row).logprobs, reference.logprobs(row), rtol=0, atol=1e-4)
    for before, after in pairwise(rows):
        context = np.concatenate([before.prompt_ids, done(before).output_ids])
        extends = np.array_equal(after.prompt_ids[: len(context)], context)
        reason = after.intent.break_.reason if after.intent.break_ is not None else None
        assert reason is (None if extends else BreakReason.TOKENS_DIFFER)
