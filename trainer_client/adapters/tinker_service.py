"""Tinker's training service on leased groups: rows become its `Datum`s, and the service makes the steps.

A request to the service can't be undone, so groups are acknowledged before any of their rows is sent. `save_state`
makes a step durable. A restart resumes from the newest saved state, and the groups after it are leased again.
`advantages` are divided by the step's trained tokens, because the service's losses are sums.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from rolltap.errors import CheckpointMismatch, ConfigError
from rolltap.trainer_client.adapters import ADAPTERS
from rolltap.trainer_client.adapters.feed import Feed, newest_checkpoint, step_of, write_version
from rolltap.trainer_client.adapters.rows import TrainedRow
from rolltap.trainer_client.model.weights import whole_folder
from rolltap.trainer_client.recipes import make_recipe

ADAPTERS["tinker"].check_installed()
import tinker  # noqa: E402

LOSSES = ("ppo", "importance_sampling", "cispo")
"""Tinker's losses in which a token of advantage 0 has no part. `dro` would train context towards probability 1."""

STATE = "tinker.json"
"""In a checkpoint's folder: the path of the service's state."""


@dataclass(frozen=True, slots=True)
class TinkerSettings:
    """The service's loss, one of `LOSSES`, its optimiser, and the rolltap recipe for the advantages."""

    vocabulary: int
    steps: int
    recipe: str = "grpo"
    loss: str = "ppo"
    loss_config: dict[str, float] | None = None
    optimiser: tinker.AdamParams = field(default_factory=tinker.AdamParams)


class TinkerTrainer:
    """Trains a model of the service from `feed`.

    `open_client` returns a `tinker.TrainingClient`: a new one for None, else one that resumes from the state at the
    path, with its optimiser. `fetch` copies the service's weights from a `tinker://` path to a folder that the policy's
    engines see: a model's or a peft adapter's.
    """

    def __init__(
        self,
        open_client: Callable[[str | None], Any],
        feed: Feed,
        settings: TinkerSettings,
        fetch: Callable[[str], Path],
    ) -> None:
        if settings.loss not in LOSSES:
            raise ConfigError(
                f"loss {settings.loss!r} would train tokens that the agent did not sample, too; "
                f"one of {', '.join(LOSSES)} trains the sampled ones alone"
            )
        self.client: Any = None
        self.feed = feed
        self.settings = settings
        self.step = 0
        self._open_client = open_client
        self._fetch = fetch
        self._recipe = make_recipe(settings.recipe, {})

    def train(self) -> None:
        """Trains from the newest checkpoint in the feed's folder to the settings' last step."""
        with self.feed.leasing(self.settings.vocabulary):
            self._restore()
            while self.step < self.settings.steps:
                _, rows = self.feed.next_rows(self._recipe)
                if not self.feed.acknowledge(self.step + 1):
                    continue
                # Both requests are sent before the first reply, as the service expects.
                data = [datum_of(row, sum(one.tokens for one in rows)) for row in rows]
                gradient = self.client.forward_backward(data, self.settings.loss, self.settings.loss_config)
                update = self.client.optim_step(self.settings.optimiser)
                gradient.result()
                update.result()
                self.step += 1
                version = self.feed.version + 1
                self.feed.push(self._weights(version), version)
                path = self.client.save_state(f"step-{self.step}").result().path
                with whole_folder(self.feed.out / f"checkpoint-{self.step}") as folder:
                    write_version(folder, self.feed.settings.policy, self.feed.version)
                    (folder / STATE).write_text(json.dumps({"path": path}), encoding="utf-8")

    def _restore(self) -> None:
        newest = newest_checkpoint(self.feed.out, STATE)
        if newest is not None:
            self.step = step_of(newest)
        self.client = self._open_client(None if newest is None else _state_of(newest))
        self.feed.connect(newest, self.step, self.client.get_tokenizer())
        self.feed.push_start(self._weights(self.feed.version))

    def _weights(self, version: int) -> Path:
        """The service's weights, in a folder that the policy's engines see."""
        return self._fetch(self.client.save_weights_for_sampler(f"version-{version}").result().path)


def datum_of(row: TrainedRow, tokens: int) -> tinker.Datum:
    """The row in the service's form: each token is predicted from those before. `tokens`: the step's trained tokens."""
    part = row.segment
    advantages = np.where(part.loss_mask, row.advantage / tokens, 0.0).astype(np.float32)
    return tinker.Datum(
        model_input=tinker.ModelInput.from_ints(part.token_ids[:-1].tolist()),
        loss_fn_inputs={
            "target_tokens": part.token_ids[1:].astype(np.int64),
            "logprobs": part.logprobs[1:],
            "advantages": advantages[1:],
        },  # type: ignore[arg-type]  # the SDK converts arrays to its TensorData
    )


def _state_of(checkpoint: Path) -> str:
    try:
        return str(json.loads((checkpoint / STATE).read_text(encoding="utf-8"))["path"])
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointMismatch(f"{checkpoint / STATE} does not say where the state is: {error!r}") from error
