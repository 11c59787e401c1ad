"""Shared by both TRL adapters: hooks that follow the contract in the loop of a transformers `Trainer`."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import TrainerCallback, TrainerState
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from rolltap.errors import CheckpointMismatch, ConfigError
from rolltap.trainer_client.adapters.feed import Feed, complete_checkpoints, step_of, write_version


class LeasedTrainer:
    """A mixin before the trainer's class: leases during `train`, and adds the weight version to checkpoints."""

    args: Any
    state: Any
    model: Any
    accelerator: Any
    processing_class: Any
    feed: Feed
    resumed: Path | None = None

    def hook(self, feed: Feed) -> None:
        """Call it at the end of the trainer's `__init__`."""
        if self.accelerator.num_processes > 1:
            raise ConfigError("one process can be fed so far; for more GPUs use rolltap train under torchrun")
        self.feed = feed
        self.add_callback(_Contract(self))  # type: ignore[attr-defined]

    def train(self, resume_from_checkpoint: str | bool | None = True, *options: Any, **named: Any) -> Any:
        """Trains, from the newest complete checkpoint in `output_dir` if there is one (or from the given one).

        `False` restarts from the initial model; groups that were acknowledged after the starting point are leased
        again. `ConfigError` if `output_dir` has checkpoints of later steps: were this run killed, they would be taken
        for its own.
        """
        out = Path(self.args.output_dir)
        complete = complete_checkpoints(out, TRAINER_STATE_NAME)
        newest = max(complete, key=step_of, default=None)
        checkpoint = newest if resume_from_checkpoint in (True, None) else resume_from_checkpoint
        self.resumed = Path(checkpoint) if checkpoint else None
        start = 0 if self.resumed is None else _step_of_trainer(self.resumed)
        if later := sorted(path.name for path in complete if step_of(path) > start):
            raise ConfigError(f"to start from step {start}, first move these out of {out}: {', '.join(later)}")
        with self.feed.leasing(self.model.config.vocab_size):
            return super().train(str(self.resumed) if self.resumed else None, *options, **named)  # type: ignore[misc]

    def connect(self) -> None:
        """Call it after the trainer restored its checkpoint, before its first step."""
        self.feed.connect(self.resumed, self.state.global_step, self.processing_class)

    def plain_model(self) -> Any:
        return self.accelerator.unwrap_model(self.model)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        folder = Path(self.args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        write_version(folder, self.feed.settings.policy, self.feed.version)
        super()._save_checkpoint(model, trial)  # type: ignore[misc]


def _step_of_trainer(checkpoint: Path) -> int:
    """The step of a checkpoint, whatever its name. Raises `CheckpointMismatch` if it is none of transformers'."""
    try:
        return TrainerState.load_from_json(str(checkpoint / TRAINER_STATE_NAME)).global_step
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointMismatch(f"{checkpoint} is not a complete checkpoint: {error}") from error


class _Contract(TrainerCallback):
    """Acknowledges before the optimiser's step. If this fails, or the gradient is not finite, drops the gradient."""

    def __init__(self, trainer: LeasedTrainer) -> None:
        self._trainer = trainer

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        model, feed = self._trainer.model, self._trainer.feed
        gradients = [weight.grad for weight in model.parameters() if weight.grad is not None]
        if not all(bool(gradient.isfinite().all()) for gradient in gradients):
            feed.refuse(f"step {state.global_step + 1}: the gradient is not finite")
        elif feed.acknowledge(state.global_step + 1):
            return
        model.zero_grad(set_to_none=True)  # the optimiser skips weights without a gradient


class Push:
    """TRL's weight transfer, as pushes to the policy: first the starting point's weights, then each step's."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def init_weight_transfer(self) -> None:
        self._trainer.connect()
        self._trainer.model_version = self._trainer.feed.version - 1  # TRL adds one at each transfer

    def send_weights(self, iterator: Iterator[tuple[str, Tensor]]) -> None:
        """Pushes the weights, with the frozen ones, which TRL leaves out."""
        trained = {name: weight.cpu() for name, weight in iterator}
        model = self._trainer.plain_model()
        parameters = (
            {}
            if hasattr(model, "peft_config")
            else {name: one.detach().cpu() for name, one in model.named_parameters()}
        )
        self._trainer.feed.push({**parameters, **trained}, self._trainer.model_version + 1)

    def pause(self) -> None: ...

    def resume(self) -> None: ...

    def destroy(self) -> None: ...


class NoWorker:
    """A rollout worker for TRL that does nothing: harnesses make the rollouts."""

    def __init__(self) -> None:
        self.rollout_buffer: Any = queue.Queue()
        self.metrics_queue: Any = queue.Queue()

    def start(self) -> None: ...

    def stop(self) -> None: ...

    def update_model_version(self, model_version: int) -> None: ...

    def check_health(self, stale_after_s: float) -> None: ...
