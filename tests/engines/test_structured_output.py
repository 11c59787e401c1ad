"""JSON schemas on a real vLLM: replies keep to them, and log-probs are those over what the grammar left.

vLLM tells which ids those were only with `--return-sampling-mask`, which needs a card (its model runner V2).
"""

from __future__ import annotations

from contextlib import closing

import numpy as np
import openai

from rolltap.reconstructor.reconstruct import reconstruct

from ..schemas import check
from .record import Reference, done, rows_of
from .servers import CANDIDATES, Proxy

SCHEMA = {
    "type": "object",
    "properties": {"go": {"enum": ["left", "right"]}, "far": {"type": "boolean"}},
    "required": ["go", "far"],
    "additionalProperties": False,
}
FORM = {"type": "json_schema", "json_schema": {"name": "reply", "schema": SCHEMA, "strict": True}}


def test_log_probs_are_over_what_the_grammar_left(served: Proxy, reference: Reference) -> None:
    session = served.open_session("watched")
    finishes: list[str] = []
    with closing(openai.OpenAI(base_url=session["base_url"] + "/v1", api_key=session["key"], max_retries=0)) as client:
        for number in range(8):
            asked = [{"role": "user", "content": f"Which way, {number}?"}]
            wanted: dict = {"messages": asked, "response_format": FORM, "max_tokens": 400}
            (choice,) = client.chat.completions.create(model=session["policy"], **wanted).choices
            finishes.append(choice.finish_reason)
            if choice.finish_reason == "stop":  # a weak model fills the reply with line breaks
                check(choice.message.content or "", SCHEMA)
    assert "stop" in finishes
    rows = rows_of(served.database, session["session_id"])
    told_whole = 0
    for row in rows:
        extras, free_TV = done(row).extras, reference.distributions(row)
        for token, logprob, ids, values, free_V in zip(
            done(row).output_ids, done(row).logprobs, extras["top_ids"], extras["top_logprobs"], free_TV, strict=True
        ):
            assert logprob >= free_V[token] - 1e-4
            left = ids[np.isfinite(values)]
            if len(left) < CANDIDATES:
                told_whole += 1
                np.testing.assert_allclose(
                    logprob, free_V[token] - np.logaddexp.reduce(free_V[left]), rtol=0, atol=1e-4
                )
    assert told_whole > 10 * len(rows)
    trajectory = reconstruct([row.call() for row in rows])
    assert {one.mask for one in trajectory.classifications} <= {"constrained", "length_truncated"}
