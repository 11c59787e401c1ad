"""A third-party trainer's side of the contract, as steps that an adapter calls from the trainer's hooks.

    connect → (next_rows → acknowledge → push) …

A step is acknowledged as a whole or not at all: if a part of it is lost, acknowledged groups return to the ledger, and
the caller discards its gradient.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

from rolltap.contract.trainer import LeasedGroup, LeaseOptions, PauseMode
from rolltap.errors import CheckpointMismatch, ConfigError, VersionTaken
from rolltap.trainer_client.adapters.rows import TrainedRow, rows_of
from rolltap.trainer_client.data.scoring import trainable
from rolltap.trainer_client.lease.client import TrainerClient
from rolltap.trainer_client.lease.folder import locked, run_id
from rolltap.trainer_client.lease.holder import LeaseHolder
from rolltap.trainer_client.lease.push import WeightSender, push_weights
from rolltap.trainer_client.model.weights import served_tokenizer
from rolltap.trainer_client.recipes.base import Recipe

ABOUT = "rolltap.json"
"""In a third-party trainer's checkpoint folder: the policy and the weight version of the checkpoint."""


@dataclass(frozen=True, slots=True)
class FeedSettings:
    """What a step leases, and how its weights reach the engines: by folders in `through`, or by a sender.

    `take_over` takes the policy from another run that owns it.
    """

    policy: str
    groups: int
    through: Path | WeightSender
    max_staleness: int | None = 1
    lease_ttl: float = 600.0
    wait: float = 5.0
    update_mode: PauseMode = "keep"
    take_over: bool = False
    tampered: Literal["keep", "drop", "mask"] = "keep"


def open_feed(url: str, key: str, settings: FeedSettings, *, trainer: str, out: Path) -> Feed:
    """A feed from the server at `url` for the run with its checkpoints in `out`. A restart with the same folder is the
    same run, and keeps its policy."""
    return Feed(TrainerClient(url, key, trainer, run=run_id(out)), settings, out)


@dataclass(slots=True)
class Feed:
    """The connection of one trainer to one policy. `version` is the version of the weights in training."""

    client: TrainerClient
    settings: FeedSettings
    out: Path
    version: int = 0
    _holder: LeaseHolder | None = field(default=None, init=False)
    _fresh: bool = field(default=False, init=False)  # started without a checkpoint

    @contextlib.contextmanager
    def leasing(self, vocabulary: int, longest: int | None = None) -> Iterator[None]:
        """Leases are possible, and extended, only inside this context. At its end unacknowledged ones are given back.

        Refuses groups with tokens outside the model's vocabulary, or with a row of more than `longest` tokens.
        """
        settings = self.settings
        options = LeaseOptions(
            max_staleness=settings.max_staleness, wait=settings.wait, ttl=settings.lease_ttl, tampered=settings.tampered
        )
        takes = partial(trainable, vocabulary=vocabulary, longest=longest)
        self._holder = LeaseHolder(self.client, settings.policy, options, keep_zero_variance=True, trainable=takes)
        try:
            with locked(self.out), self._holder:
                yield
        finally:
            self._holder = None

    def version_folder(self, step: int, prefix: str = "checkpoint") -> Path:
        """The folder with the weight version of the trainer's own checkpoint of `step`."""
        return self.out / f"{prefix}-{step}"

    def connect(self, checkpoint: Path | None, step: int, tokenizer: Any) -> None:
        """Rewinds the server to the trainer's starting point: `checkpoint` of `step`, or the initial model. Call
        `serve` or `push_start` next: a push may have been cut off, and left the engines paused.

        Raises `CheckpointMismatch` if the policy is served with another tokenizer or chat template than `tokenizer`, or
        the checkpoint is of another policy.
        """
        policy = self.settings.policy
        check_tokenizer(self.client, policy, tokenizer)
        self._fresh = checkpoint is None
        saved_version = 0 if checkpoint is None else read_version(checkpoint, policy)
        reply = self.client.rewind(step, {policy: saved_version}, take_over=self.settings.take_over)
        self.version = reply.versions[policy]
        if checkpoint is not None and self.version != saved_version:
            write_version(checkpoint, policy, self.version)

    def serve(self, model: Any) -> None:
        """Pushes the weights of the starting point, unless the engines already serve them."""
        policy = self.client.policy(self.settings.policy)
        if policy.version != self.version or policy.paused is not None or hasattr(model, "peft_config"):
            self.push_start(model)

    def push_start(self, model: Any) -> None:
        """Pushes the weights of the starting point. A start without a checkpoint may have other new adapters than an
        earlier start, whose weights have the number already: its own then get the next one."""
        try:
            self.push(model, self.version)
        except VersionTaken:
            if not self._fresh:
                raise
            self.push(model, self.version + 1)

    def next_rows(self, recipe: Recipe, temperature: float = 1.0) -> tuple[tuple[LeasedGroup, ...], list[TrainedRow]]:
        """Waits for the step's groups. Returns them and their rows, at least one.

        `temperature`: at which the trainer computes log-probs. Groups that can't be trained are refused with a reason,
        and others are awaited.
        """
        while True:
            self._leases.gather(self.settings.groups, lambda: False)
            groups = self._leases.groups
            if rows := rows_of(groups, recipe, temperature):
                return groups, rows
            self._leases.refuse("no rollout of these groups has a trained token")

    def acknowledge(self, step: int) -> bool:
        """Makes the groups part of `step`. Returns False if their lease was lost: discard their rows and gradient."""
        acknowledged = self._leases.acknowledge(step)
        if not acknowledged and self._leases.groups:  # groups of other leases than the lost one
            self.client.rewind(step - 1, {self.settings.policy: self.version})
        self._leases.clear()
        return acknowledged

    def refuse(self, reason: str) -> None:
        """Refuses the leased groups. Each counts a failure."""
        self._leases.refuse(reason)

    def push(self, model: Any, version: int) -> None:
        """Pushes `model`'s weights to the engines as `version`."""
        settings = self.settings
        push_weights(self.client, settings.policy, model, version, through=settings.through, mode=settings.update_mode)
        self.version = version

    @property
    def _leases(self) -> LeaseHolder:
        if self._holder is None:
            raise ConfigError("groups are leased within Feed.leasing() only")
        return self._holder


def check_tokenizer(client: TrainerClient, policy: str, tokenizer: Any) -> None:
    """Raises `CheckpointMismatch` if the policy is served with another tokenizer or chat template than `tokenizer`."""
    served, own = client.policy(policy).tokenizer_hash, served_tokenizer(tokenizer)
    if served and own and served != own:
        raise CheckpointMismatch(
            f"policy {policy!r} is served with tokenizer and chat template {served[:12]}, "
            f"this trainer has {own[:12]}: train the model that the engine serves, with its own template"
        )


def write_version(checkpoint: Path, policy: str, version: int) -> None:
    """Writes the checkpoint's policy and version, in one rename. Call it before the checkpoint's last file."""
    checkpoint.mkdir(parents=True, exist_ok=True)
    temporary = checkpoint / f".making-{ABOUT}"
    with temporary.open("w", encoding="utf-8") as file:
        json.dump({"policy": policy, "version": version}, file)
        file.flush()
        os.fsync(file.fileno())
    temporary.rename(checkpoint / ABOUT)


def read_version(checkpoint: Path, policy: str) -> int:
    """The weight version of a checkpoint. Raises `CheckpointMismatch` if it is not a checkpoint of this policy."""
    try:
        record = json.loads((checkpoint / ABOUT).read_text(encoding="utf-8"))
        saved_policy, version = str(record["policy"]), int(record["version"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointMismatch(f"{checkpoint} was not made with rolltap: {error!r}; start from its model") from error
    if saved_policy != policy:
        raise CheckpointMismatch(f"{checkpoint} is of policy {saved_policy!r}, not {policy!r}")
    return version


def newest_checkpoint(out: Path, finished_by: str) -> Path | None:
    """The complete checkpoint of the highest step in `out`. `finished_by` is the file that its trainer writes last."""
    return max(complete_checkpoints(out, finished_by), key=step_of, default=None)


def complete_checkpoints(out: Path, finished_by: str) -> list[Path]:
    return [path for path in out.glob("checkpoint-*") if (path / finished_by).exists() and (path / ABOUT).exists()]


def step_of(checkpoint: Path) -> int:
    """The step in a checkpoint's name, `checkpoint-STEP`. Raises `CheckpointMismatch` if it has none."""
    step = checkpoint.name.rpartition("-")[2]
    if not step.isdecimal():
        raise CheckpointMismatch(f"{checkpoint} is not named checkpoint-STEP")
    return int(step)
