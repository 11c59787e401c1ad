"""verl's PPO trainer (v1, on TransferQueue) on leased groups: verl's actor, loss, optimiser, checkpoints; our record.

In place of a batch of verl's own rollouts, a lease is put into TransferQueue in the form of verl's agent loops: a key
`{group}_{rollout}_{row}` per row, with the segment's tokens, mask and log-probs. It is acknowledged first. Advantages
come with the rows and are a recipe's, over rollouts, as one rollout may have several rows; verl's estimator is not
called. A step trains all rows at once; verl adds rows without loss if its ranks need them.

No rollout engine is started: weights go to the policy's engines through `FeedSettings.through`, a folder that verl's
workers and the engines see. `train` runs it. In verl's terms (`min_global_steps`), version N is the one at the start of
step N.
"""

# pyright: reportMissingImports=false
# Only users of this adapter have the package.

from __future__ import annotations

from pathlib import Path
from typing import Any

from rolltap.trainer_client.adapters import ADAPTERS
from rolltap.trainer_client.adapters.feed import Feed, write_version
from rolltap.trainer_client.lease.push import prune

ADAPTERS["verl"].check_installed()
import ray  # noqa: E402
import transfer_queue as tq  # noqa: E402
from torchdata.stateful_dataloader import StatefulDataLoader  # noqa: E402
from transformers import AutoConfig  # noqa: E402
from verl.trainer.constants_ppo import get_ppo_ray_runtime_env  # noqa: E402
from verl.trainer.ppo.v1.trainer_base import PPOTrainer  # noqa: E402
from verl.utils.tensordict_utils import list_of_dict_to_tensordict  # noqa: E402

from rolltap.trainer_client.adapters.verl_rows import rows_of_queue  # noqa: E402
from rolltap.trainer_client.adapters.verl_settings import (  # noqa: E402
    check_arguments,
    prepare,
    recipe_of,
    weights_folder,
)


class LeasedPPOTrainer(PPOTrainer):
    """A `PPOTrainer` that leases its batches and pushes its weights through `feed`."""

    _enable_hybrid_replicas = False  # verl starts no rollout engine

    def __init__(self, config: Any, feed: Feed) -> None:
        check_arguments(config)
        prepare(config, feed)
        self.feed = feed
        self.recipe = recipe_of(config)
        super().__init__(config)

    def _build_replay_buffer(self) -> Any:
        return _Leases(self)

    def _init_dataloader(self) -> None:
        self.train_dataloader = StatefulDataLoader([0])  # saved with checkpoints, never read
        self.total_training_steps = self.steps_per_epoch = self.config.trainer.total_training_steps
        self.config.actor_rollout_ref.actor.optim.total_training_steps = self.total_training_steps

    def prepare_step(self) -> dict[str, Any]:
        return {}

    def on_init_end(self) -> None:
        folder = Path(self.config.trainer.default_local_dir).absolute() / f"global_step_{self.global_steps}"
        self.feed.connect(folder if self.global_steps else None, self.global_steps, self.tokenizer)
        self.feed.push_start(self._weights(self.feed.version))

    def on_sample_end(self) -> None: ...

    def on_step_end(self) -> None: ...

    def _step_once(self, metrics: dict[str, Any], timing_raw: dict[str, Any], sample_batch_size: int) -> Any:
        """Pushes before the checkpoint, which is of the pushed version."""
        batch = super()._step_once(metrics, timing_raw, sample_batch_size)
        version = self.feed.version + 1
        self.feed.push(self._weights(version), version)
        prune(weights_folder(self.feed))
        return batch

    def _compute_advantage(self, batch: Any, metrics: dict[str, Any]) -> Any:
        return batch

    def _get_required_batch_multiple(self, dp_size: int) -> int:
        return dp_size

    def _update_actor(self, batch: Any, metrics: dict[str, Any]) -> Any:
        self.config.actor_rollout_ref.actor.ppo_mini_batch_size = len(batch)
        return super()._update_actor(batch, metrics)

    def _save_checkpoint(self) -> None:
        folder = Path(self.config.trainer.default_local_dir) / f"global_step_{self.global_steps}"
        write_version(folder, self.feed.settings.policy, self.feed.version)
        super()._save_checkpoint()

    def _weights(self, version: int) -> Path:
        """The folder of the trained weights."""
        self._write_weights(version)
        return weights_folder(self.feed) / f"version-{version}"

    def _write_weights(self, version: int) -> None:
        """All workers gather the weights, one writes them. A trainer whose workers are in its process does it anew."""
        ray.get(self.actor_rollout_wg.update_weights(global_steps=version, mode="rolltap"))


class _Leases:
    """Replaces verl's replay buffer."""

    def __init__(self, trainer: LeasedPPOTrainer) -> None:
        self._trainer = trainer

    def sample(self, global_steps: int, partition_id: str, batch_size: int) -> tuple[Any, dict[str, float]]:
        """Puts the step's rows into TransferQueue, acknowledged. Returns them, and metrics of the sampling for verl."""
        feed, temperature = self._trainer.feed, self._trainer.config.actor_rollout_ref.rollout.temperature
        while True:
            groups, rows = feed.next_rows(self._trainer.recipe, temperature)
            if feed.acknowledge(global_steps):
                break
        keys, fields, tags = rows_of_queue(groups, rows, global_steps, feed.version)
        tq.kv_batch_put(keys=keys, partition_id=partition_id, fields=list_of_dict_to_tensordict(fields), tags=tags)
        staleness = float(max(group.staleness for group in groups))
        return tq.KVBatchMeta(partition_id=partition_id, keys=keys, tags=tags), {"training/staleness": staleness}


def train(config: Any, feed: Feed) -> None:
    """Starts verl's Ray and TransferQueue, and trains from the newest checkpoint in `trainer.default_local_dir` to
    `trainer.total_training_steps`."""
    check_arguments(config)
    if not ray.is_initialized():
        environment = {**get_ppo_ray_runtime_env(config).get("env_vars", {}), "TRANSFER_QUEUE_ENABLE": "1"}
        ray.init(runtime_env={"env_vars": environment}, **config.ray_kwargs.get("ray_init", {}))
    tq.init(config.transfer_queue)
    try:
        with feed.leasing(AutoConfig.from_pretrained(config.actor_rollout_ref.model.path).vocab_size):
            trainer = LeasedPPOTrainer(config, feed)
            trainer.init()
            trainer.fit(None)
    finally:
        tq.close()
