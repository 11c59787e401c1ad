"""Datasets for verl's SFT trainer, which read the Parquet files of `rolltap export` as they are.

In verl's settings `data.custom_cls.path` is `pkg://rolltap.trainer_client.adapters.verl_sft`, and
`data.custom_cls.name` is `SampledTokensDataset` for `sft-tokens`, `RecordedMessagesDataset` for `sft`. verl's own
dataset can read neither: it trains every assistant message, and takes arguments and tools that Parquet has given one
type, nulls for absent keys included.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils.data import Dataset
from verl.utils.dataset.multiturn_sft_dataset import MultiTurnSFTDataset  # type: ignore[import-not-found]

IGNORED = -100


class SampledTokensDataset(Dataset[dict[str, torch.Tensor]]):
    """Rows as verl's `MultiTurnSFTDataset` gives them; `loss_mask` is 1 on sampled tokens that carry loss.

    Reads `max_length`, `pad_mode` (`no_padding` or `right`) and `truncation` (`error`, `left` or `right`) of `config`.
    """

    def __init__(
        self,
        parquet_files: str | Sequence[str],
        tokenizer: Any,
        config: Mapping[str, Any] | None,
        processor: Any = None,
        max_samples: int = -1,
    ) -> None:
        import pandas

        options = config or {}
        files = [parquet_files] if isinstance(parquet_files, str) else list(parquet_files)
        columns = ["input_ids", "labels"]
        frames = [pandas.read_parquet(file, columns=columns) for file in files]
        self._rows = pandas.concat(frames, ignore_index=True)
        if max_samples > 0:
            self._rows = self._rows.iloc[:max_samples]
        self._longest = int(options.get("max_length", 1024))
        self._padded = options.get("pad_mode", "right") == "right"
        self._truncation = options.get("truncation", "error")
        self._pad = tokenizer.pad_token_id or 0

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        """Of [T], or of [max_length] where rows are padded: `input_ids`, `position_ids`, `loss_mask`."""
        ids, labels = (torch.tensor(self._rows[name].iloc[index]).long() for name in ("input_ids", "labels"))
        if len(ids) > self._longest:
            if self._truncation == "error":
                raise ValueError(f"row {index} has {len(ids)} tokens, more than data.max_length={self._longest}")
            part = slice(-self._longest, None) if self._truncation == "left" else slice(self._longest)
            ids, labels = ids[part], labels[part]
            labels[0] = IGNORED  # nothing before it predicts it
        loss, length = (labels != IGNORED).long(), len(ids)
        if not self._padded:
            return {"input_ids": ids, "position_ids": torch.arange(length), "loss_mask": loss}
        missing = self._longest - length
        return {
            "input_ids": torch.nn.functional.pad(ids, (0, missing), value=self._pad),
            "attention_mask": (torch.arange(self._longest) < length).long(),
            "position_ids": torch.nn.functional.pad(torch.arange(length), (0, missing)),
            "loss_mask": torch.nn.functional.pad(loss, (0, missing)),
        }


class RecordedMessagesDataset(MultiTurnSFTDataset):
    """verl's dataset of messages, over `sft`: a message whose `weight` is 0 is context.

    verl renders each message by itself and raises where that differs from the whole, as with Qwen3's template, which
    keeps thinking by position; `SampledTokensDataset` is for those.
    """

    def _read_files_and_process(self) -> None:
        super()._read_files_and_process()
        self.tools = [json.loads(text) or None for text in self.dataframe[self.tools_key]]

    def _build_messages(self, example: dict[str, Any]) -> list[dict[str, Any]]:
        return [_decoded(message) for message in super()._build_messages(example)]

    def _process_single_message(self, index: int, message: dict[str, Any], **rest: Any) -> tuple[Any, Any, Any, Any]:
        plain = {name: value for name, value in message.items() if name != "weight"}
        ids, loss, attention, others = super()._process_single_message(index=index, message=plain, **rest)
        return ids, loss * int(message.get("weight", 1)), attention, others


def _decoded(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message without Parquet's nulls, its tool calls' arguments decoded."""
    plain = {name: value for name, value in message.items() if value is not None}
    if calls := plain.get("tool_calls"):
        functions = [{**call["function"], "arguments": json.loads(call["function"]["arguments"])} for call in calls]
        plain["tool_calls"] = [{**call, "function": function} for call, function in zip(calls, functions, strict=True)]
    return plain
