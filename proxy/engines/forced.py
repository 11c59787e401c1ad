"""Marks the tokens that a server forced where a budget of thinking was spent, as it does not tell them.

Such a token is no choice of the policy: it is recorded with a mask of its own id (`rolltap.token_masks`), so that it
has no gradient. vLLM forces the end of thinking where prompt and output have `most` tokens since thinking began, and
such a token has log-prob 0 in the mode "processed", in which alone a budget is sent (`EngineFacts.budgets`). Behind an
end without a beginning it misses the next end, and forces one more outside of thinking. A server with a
`reasoning_end_str` of several tokens forces them wherever that whole text is not found, which is not marked.
"""

from __future__ import annotations

from itertools import takewhile

import msgspec
import numpy as np

from rolltap.proxy.engines.base import SampleChunk, SampleRequest, is_cut
from rolltap.token_masks import FREE, MASK_ROWS, SAMPLING_MASK


class ForcedTokens:
    """The marks of one output, whose request has a budget."""

    def __init__(self, request: SampleRequest) -> None:
        budget = request.extra["thinking_budget"]
        self._open, self._close, self._most = budget["open"], budget["close"], budget["most"]
        self._is_cut = is_cut(request)
        ids = request.prompt_ids
        behind = sum(1 for _ in takewhile(lambda token: token not in (self._open, self._close), reversed(ids)))
        opened = behind < len(ids) and ids[len(ids) - behind - 1] == self._open
        self._thought = behind if opened else None  # tokens of thinking so far; None: it is not under way
        self._begun = self._thought  # tokens since the first thinking of the output; None: there was none

    def marked(self, chunk: SampleChunk) -> SampleChunk:
        """The chunk with `mask_rows`, if its log-probs are known. Where top-p, top-k or min-p cut the vocabulary,
        these say nothing without the cut's own masks."""
        if chunk.logprobs is None or not chunk.token_ids or (self._is_cut and SAMPLING_MASK not in chunk.extras):
            return chunk
        rows = [self._row(token, value) for token, value in zip(chunk.token_ids, chunk.logprobs, strict=True)]
        return msgspec.structs.replace(chunk, extras={**chunk.extras, MASK_ROWS: np.asarray(rows, np.int32)})

    def _row(self, token: int, logprob: float) -> int:
        count = self._begun if token == self._close else self._thought
        is_spent = count is not None and count >= self._most
        if self._begun is not None:
            self._begun += 1
        elif token == self._open:
            self._begun = 0
        if token == self._close:
            self._thought = None
        elif self._thought is not None:
            self._thought += 1
        elif token == self._open:
            self._thought = 0
        return -2 - token if is_spent and logprob == 0.0 else FREE
