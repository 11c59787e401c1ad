"""A foreign trainer's side of the contract, step by step, for an adapter to call from the trainer's own hooks.

    connect → (next_rows → acknowledge → push) …

A step is acknowledged whole or not at all: where a part of it is lost, what was acknowledged comes back, and the caller
forgets its gradient.
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

from rolltap import weights
from rolltap.contract.leases import LeasedGroup
from rolltap.contract.trainer import LeaseOptions, PauseMode
from rolltap.errors import CheckpointMismatch, ConfigError, VersionTaken
from rolltap.trainer_client.adapters.rows import TrainedRow, rows_of
from rolltap.trainer_client.client import TrainerClient
from rolltap.trainer_client.leases import LeaseHolder
from rolltap.trainer_client.recipe import Recipe
from rolltap.trainer_client.run import locked, run_id
from rolltap.trainer_client.scoring import check
from rolltap.trainer_client.sender import WeightSender
from rolltap.trainer_client.weights import served_tokenizer

ABOUT = "rolltap.json"
"""Beside a foreign trainer's checkpoint: the policy and the weight version that it is of."""


@dataclass(frozen=True, slots=True)
class FeedSettings:
    """What a step leases, and how its weights reach the engines: by folders in `through`, or a sender.

    With `take_over`, the policy is taken from another run that owns it.
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
    """A feed from the server at `url` for the run that keeps its checkpoints in `out`: started again on the same
    folder, it is the same run, and gets its policy back."""
    return Feed(TrainerClient(url, key, trainer, run=run_id(out)), settings, out)


@dataclass(slots=True)
class Feed:
    """The connection of one trainer to one policy. `version` is that of the weights in training."""

    client: TrainerClient
    settings: FeedSettings
    out: Path
    version: int = 0
    _holder: LeaseHolder | None = field(default=None, init=False)
    _fresh: bool = field(default=False, init=False)  # it goes on from no checkpoint

    @contextlib.contextmanager
    def leasing(self, vocabulary: int, longest: int | None = None) -> Iterator[None]:
        """Leases are held, and extended, inside only; those that were not acknowledged are given back at its end.

        Groups with other tokens than the model's, or with a row of more than `longest` tokens, are refused.
        """
        chosen = self.settings
        options = LeaseOptions(
            max_staleness=chosen.max_staleness, wait=chosen.wait, ttl=chosen.lease_ttl, tampered=chosen.tampered
        )
        sound = partial(check, vocabulary=vocabulary, longest=longest)
        self._holder = LeaseHolder(self.client, chosen.policy, options, keep_zero_variance=True, check=sound)
        try:
            with locked(self.out), self._holder:
                yield
        finally:
            self._holder = None

    def connect(self, checkpoint: Path | None, step: int, tokenizer: Any) -> None:
        """Makes the server agree with what the trainer goes on from: `checkpoint` of `step`, or its model anew. Then
        `serve`.

        `CheckpointMismatch` if the policy is served with another tokenizer or chat template than `tokenizer`, or the
        checkpoint is of another policy.
        """
        policy = self.settings.policy
        check_tokenizer(self.client, policy, tokenizer)
        self._fresh = checkpoint is None
        saved = 0 if checkpoint is None else read_version(checkpoint, policy)
        rewound = self.client.rewind(step, {policy: saved}, take_over=self.settings.take_over)
        self.version = rewound.versions[policy]
        if checkpoint is not None and self.version != saved:
            write_version(checkpoint, policy, self.version)

    def serve(self, model: Any) -> None:
        """Makes the engines agree, too: they get the weights of the version gone on from, unless they have them."""
        served = self.client.policy(self.settings.policy)
        if served.version != self.version or served.paused is not None or hasattr(model, "peft_config"):
            try:
                self.push(model, self.version)
            except VersionTaken:  # by fresh adapters of another run: those of this one get the next number
                if not self._fresh:
                    raise
                self.push(model, self.version + 1)

    def next_rows(self, recipe: Recipe, temperature: float = 1.0) -> tuple[tuple[LeasedGroup, ...], list[TrainedRow]]:
        """Waits for the step's groups; with them, the rows they are trained as, at least one.

        `temperature` is what the trainer computes log-probs at. Groups that can't be
        trained are refused with a reason, and others waited for.
        """
        while True:
            self._leases.gather(self.settings.groups, lambda: False)
            groups = self._leases.groups
            if rows := rows_of(groups, recipe, temperature):
                return groups, rows
            self._leases.refuse("no rollout of these groups has a trained token")

    def acknowledge(self, step: int) -> bool:
        """The groups become part of `step`. False: they are somebody else's now, forget what was made of them."""
        acknowledged = self._leases.acknowledge(step)
        if not acknowledged and self._leases.groups:  # of other leases than the one that was lost
            self.client.rewind(step - 1, {self.settings.policy: self.version})
        self._leases.clear()
        return acknowledged

    def refuse(self, reason: str) -> None:
        """Nothing can be made of the groups held: each counts a failure."""
        self._leases.refuse(reason)

    def push(self, model: Any, version: int) -> None:
        """The engines serve `model`'s weights as `version` from now on."""
        chosen = self.settings
        weights.push(self.client, chosen.policy, model, version, through=chosen.through, mode=chosen.update_mode)
        self.version = version

    @property
    def _leases(self) -> LeaseHolder:
        if self._holder is None:
            raise ConfigError("groups are leased within Feed.leasing() only")
        return self._holder


def check_tokenizer(client: TrainerClient, policy: str, tokenizer: Any) -> None:
    """`CheckpointMismatch` if the policy is served with another tokenizer or chat template than `tokenizer`."""
    served, own = client.policy(policy).tokenizer_hash, served_tokenizer(tokenizer)
    if served and own and served != own:
        raise CheckpointMismatch(
            f"policy {policy!r} is served with tokenizer and chat template {served[:12]}, "
            f"this trainer has {own[:12]}: train the model that the engine serves, with its own template"
        )


def write_version(checkpoint: Path, policy: str, version: int) -> None:
    """Notes what the checkpoint is of, in one rename. Called before the file that makes the checkpoint whole."""
    checkpoint.mkdir(parents=True, exist_ok=True)
    making = checkpoint / f".making-{ABOUT}"
    with making.open("w", encoding="utf-8") as file:
        json.dump({"policy": policy, "version": version}, file)
        file.flush()
        os.fsync(file.fileno())
    making.rename(checkpoint / ABOUT)


def read_version(checkpoint: Path, policy: str) -> int:
    """The weight version of a checkpoint. `CheckpointMismatch` if it is no checkpoint of this policy."""
    try:
        about = json.loads((checkpoint / ABOUT).read_text(encoding="utf-8"))
        of, version = str(about["policy"]), int(about["version"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointMismatch(f"{checkpoint} was not made with rolltap: {error!r}; start from its model") from error
    if of != policy:
        raise CheckpointMismatch(f"{checkpoint} is of policy {of!r}, not {policy!r}")
    return version


def newest_checkpoint(out: Path, finished_by: str) -> Path | None:
    """The checkpoint of the highest step in `out` that holds the file which its trainer writes last."""
    whole = [path for path in out.glob("checkpoint-*") if (path / finished_by).exists() and (path / ABOUT).exists()]
    return max(whole, key=lambda path: int(path.name.rpartition("-")[2]), default=None)
