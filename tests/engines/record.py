"""What the record says of a session, and what Hugging Face's own forward pass of the same weights says of it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from rolltap.calllog.facts import CallCompletion, CallRow
from rolltap.calllog.sql import open_call_log


def rows_of(database: str, session_id: str) -> Sequence[CallRow]:
    """The session's calls, read from the store beside the process that writes it."""

    async def read() -> Sequence[CallRow]:
        log = open_call_log(database, writable=False)
        await log.start()
        try:
            return await log.rows(session_id)
        finally:
            await log.close()

    return asyncio.run(read())


def done(row: CallRow) -> CallCompletion:
    assert row.completion is not None, f"call {row.intent.id} did not end"
    return row.completion


def assert_extends(rows: Sequence[CallRow]) -> None:
    """Every call's prompt is the former call's prompt, the former call's output, and something new."""
    for before, after in pairwise(rows):
        context = np.concatenate([before.prompt_ids, done(before).output_ids])
        assert after.intent.break_ is None, after.intent.break_
        assert after.intent.parent_id == before.intent.id
        assert after.intent.shared == len(context) < len(after.prompt_ids)
        np.testing.assert_array_equal(after.prompt_ids[: len(context)], context)


class Reference:
    """Log-probs by transformers, float32, of the weights in a folder."""

    def __init__(self, folder: Path) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager", local_files_only=True
        ).eval()

    def logprobs(self, row: CallRow) -> np.ndarray:
        """The log-prob of each sampled token of a call, [T]."""
        return np.take_along_axis(self.distributions(row), done(row).output_ids[:, None].astype(np.int64), 1)[:, 0]

    def distributions(self, row: CallRow) -> np.ndarray:
        """The log-probs of the whole vocabulary that each token of a call was sampled from, [T, V]."""
        ids = torch.tensor(np.concatenate([row.prompt_ids, done(row).output_ids]), dtype=torch.long)
        with torch.inference_mode():
            logits_TV = self._model(ids[None, :-1]).logits[0, len(row.prompt_ids) - 1 :]
        return torch.log_softmax(logits_TV, dim=-1).numpy()
