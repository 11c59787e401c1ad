"""NeMo RL's policy and loss on leased groups: rows become its message logs, its `Policy` makes the steps.

A segment is a message log: a `user` message for each run of context, an `assistant` message for each run of trained
tokens. NeMo RL's own loop takes one log per rollout and compares rewards by prompt; here a rollout may have several
logs, with a rolltap recipe's advantages. The engine's log-probs are the old policy's, so no pass recomputes them.
Groups are acknowledged before `Policy.train`, and each step has a checkpoint.
"""

# pyright: reportMissingImports=false
# NeMo RL is on no package index; the tests run it from its source.

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rolltap.trainer_client.adapters import ADAPTERS
from rolltap.trainer_client.adapters.feed import ABOUT, Feed, newest_checkpoint, step_of, write_version
from rolltap.trainer_client.adapters.rows import TrainedRow, trained_runs
from rolltap.trainer_client.model.weights import whole_folder
from rolltap.trainer_client.recipes import make_recipe

ADAPTERS["nemo-rl"].check_installed()
from nemo_rl.data.llm_message_utils import batched_message_log_to_flat_message  # noqa: E402
from nemo_rl.distributed.batched_data_dict import BatchedDataDict  # noqa: E402


@dataclass(frozen=True, slots=True)
class NemoSettings:
    """Number of steps; the model's vocabulary size and `tokenizer`; `longest`: most tokens of a row.

    A step's rows are padded to a multiple of `multiple` (data-parallel size times micro batch) with rows without loss.
    """

    steps: int
    vocabulary: int
    longest: int
    tokenizer: Any
    multiple: int = 1
    recipe: str = "grpo"
    temperature: float = 1.0


class NemoTrainer:
    """Trains the NeMo RL `Policy` that `make_policy` returns for a checkpoint's folder, or for None at the start.

    `weights_of` writes a checkpoint's weights to a Hugging Face folder that the engines see; for None: the initial
    model's. `log` is the `log_metrics` of NeMo RL's `Logger`.
    """

    def __init__(
        self,
        feed: Feed,
        settings: NemoSettings,
        make_policy: Callable[[Path | None], Any],
        loss: Any,
        weights_of: Callable[[Path | None], Path],
        log: Callable[..., None],
    ) -> None:
        self.feed, self.settings, self.loss = feed, settings, loss
        self._make_policy, self._weights_of, self._log = make_policy, weights_of, log
        self._recipe = make_recipe(settings.recipe, {})

    def train(self) -> None:
        """Trains from the newest checkpoint in the feed's folder to the settings' last step."""
        settings, feed = self.settings, self.feed
        with feed.leasing(settings.vocabulary, longest=settings.longest):
            newest = newest_checkpoint(feed.out, ABOUT)
            step = 0 if newest is None else step_of(newest)
            feed.connect(newest, step, settings.tokenizer)
            feed.serve(self._weights_of(newest))
            policy = self._make_policy(newest)
            while step < settings.steps:
                groups, rows = feed.next_rows(self._recipe, settings.temperature)
                if not feed.acknowledge(step + 1):
                    continue
                step += 1
                batch = batch_of(rows, self.loss, settings.tokenizer.pad_token_id, settings.multiple)
                if self.loss.reference_policy_kl_penalty:
                    policy.prepare_for_lp_inference()
                    reference = policy.get_reference_policy_logprobs(batch)["reference_logprobs"]
                    batch["reference_policy_logprobs"] = reference
                policy.prepare_for_training()
                results = policy.train(batch, self.loss, gbs=len(batch["input_ids"]))
                staleness = max(group.staleness for group in groups)
                metrics = {"rolltap_version": feed.version, "rolltap_staleness_max": staleness, "rows": len(rows)}
                metrics |= {name: float(results[name].sum()) for name in ("loss", "grad_norm")}
                self._log(metrics, step, prefix="train")
                with whole_folder(self.feed.out / f"checkpoint-{step}") as folder:
                    policy.save_checkpoint(str(folder / "weights"), str(folder / "optimizer"))
                    policy.finalize_async_save()
                    write_version(folder, self.feed.settings.policy, self.feed.version + 1)
                feed.push(self._weights_of(self.feed.out / f"checkpoint-{step}"), feed.version + 1)


def batch_of(rows: Sequence[TrainedRow], loss: Any, padding: int, multiple: int = 1) -> BatchedDataDict[Any]:
    """The step in the form for `Policy.train` and `ClippedPGLossFn`.

    A mean over tokens counts each token once. If NeMo RL's mean is over sequences, a row's `sample_mask` is its share
    of its rollout, so that the rows of a rollout weigh as one.
    """
    by_sequence = loss.loss_type.name == "SEQUENCE_LEVEL"
    weights = [row.share if by_sequence else 1.0 for row in rows]
    padding_rows = -len(rows) % multiple
    logs = [message_log(row) for row in rows] + [message_log(rows[0])] * padding_rows
    flat, lengths = batched_message_log_to_flat_message(logs, pad_value_dict={"token_ids": padding})
    old = flat["generation_logprobs"]
    return BatchedDataDict(
        {
            "input_ids": flat["token_ids"],
            "input_lengths": lengths,
            "advantages": flat["advantages"],
            "generation_logprobs": old,
            "prev_logprobs": old.clone(),
            "reference_policy_logprobs": torch.zeros_like(old),
            "token_mask": flat["token_loss_mask"],
            "sample_mask": torch.tensor(weights + [0.0] * padding_rows),
        }
    )


def message_log(row: TrainedRow) -> list[dict[str, Any]]:
    """The whole segment: one message per run of trained or untrained tokens."""
    part = row.segment
    edges = sorted({0, len(part), *(place for run in trained_runs(part) for place in run)})
    messages = []
    for begin, end in pairwise(edges):
        trained = bool(part.loss_mask[begin])
        messages.append(
            {
                "role": "assistant" if trained else "user",
                "content": "",
                "token_ids": torch.from_numpy(part.token_ids[begin:end].astype(np.int64)),
                "token_loss_mask": torch.full((end - begin,), int(trained)),
                "generation_logprobs": torch.from_numpy(part.logprobs[begin:end].copy()),
                "advantages": torch.full((end - begin,), row.advantage),
            }
        )
    return messages
