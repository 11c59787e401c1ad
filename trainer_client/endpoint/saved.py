"""Saved weights on disk: `<out>/<model>/<kind>/<name>`. Clients use the path `tinker://<model>/<kind>/<name>`.

A folder appears only when it is complete. The kind `weights` holds what training needs to continue; `sampler_weights`
is a model folder with its tokenizer, which any engine can load.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal, get_args

import msgspec
from tinker import types

from rolltap.decoding import from_json
from rolltap.errors import InvalidRequest, NotFound
from rolltap.trainer_client.model.weights import remove_folder, sweep

Kind = Literal["weights", "sampler_weights"]
SCHEME, METADATA_FILE = "tinker://", "tinker.json"
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,199}")
EPHEMERAL = "ephemeral-"
"""The prefix of snapshots that the client did not name. The service removes them all when it starts."""

KEPT = 4
"""The number of unnamed snapshots of a model that stay, the newest ones."""


class SavedMetadata(msgspec.Struct, frozen=True):
    """The description of saved weights, in the file `METADATA_FILE` beside them.

    `rank` 0 means that all weights are trained. `created` and `expires` are in seconds since the epoch. `user_metadata`
    is what the client gave with these weights, `run_metadata` what it gave when it created the model.
    """

    base_model: str
    rank: int
    train_mlp: bool = True
    train_attn: bool = True
    train_unembed: bool = True
    created: float = 0.0
    expires: float | None = None
    user_metadata: dict[str, str] | None = None
    run_metadata: dict[str, str] | None = None
    has_optimiser: bool = False

    @property
    def trained(self) -> dict[str, int | bool]:
        """Which weights are trained: the rank of the adapters, and the layers that have them."""
        names = ("rank",) if self.rank == 0 else ("rank", "train_mlp", "train_attn", "train_unembed")
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True, slots=True)
class SavedWeights:
    """The name of saved weights. They need not exist."""

    model: str
    kind: Kind
    name: str

    @property
    def path(self) -> str:
        return f"{SCHEME}{self.model}/{self.kind}/{self.name}"


def parse_path(path: str, kind: Kind) -> SavedWeights:
    """Parses a `tinker://` path. Raises `InvalidRequest` if it does not name weights of this kind."""
    parts = path.removeprefix(SCHEME).split("/")
    if not path.startswith(SCHEME) or len(parts) != 3 or parts[1] != kind:
        raise InvalidRequest(f"{path[:200]!r} is not {SCHEME}MODEL/{kind}/NAME")
    if not NAME.fullmatch(parts[2]) or not NAME.fullmatch(parts[0].replace(":", "-")):
        raise InvalidRequest(f"{path[:200]!r}: names have letters, digits and _ . - only")
    return SavedWeights(parts[0], kind, parts[2])


def folder_of(root: Path, path: str) -> Path:
    """The folder of the sampler weights with the `tinker://` path `path`, for a service with `--out` `root`.

    Raises `InvalidRequest` if it is not a path of sampler weights. The folder need not exist.
    """
    return Library(root).folder(parse_path(path, "sampler_weights"))


class Library:
    """The saved weights of all models in the folder `root`."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def tidy(self) -> None:
        """Removes unfinished folders of a killed process, unnamed snapshots and expired weights. Called at start."""
        for folder in self.root.glob("*/*"):
            sweep(folder)
        for folder in self.root.glob(f"*/sampler_weights/{EPHEMERAL}*"):
            remove_folder(folder)
        self.expire()

    def expire(self) -> None:
        """Removes the weights whose expiry has passed."""
        for saved, metadata in list(self.all()):
            if metadata.expires is not None and metadata.expires < time.time():
                remove_folder(self.folder(saved))

    def folder(self, saved: SavedWeights) -> Path:
        return self.root / saved.model / saved.kind / saved.name

    def metadata(self, saved: SavedWeights) -> SavedMetadata:
        """The description of saved weights. Raises `NotFound` if they do not exist."""
        try:
            return from_json((self.folder(saved) / METADATA_FILE).read_bytes(), SavedMetadata)
        except (OSError, msgspec.DecodeError) as error:
            raise NotFound(f"{saved.path}: nothing is saved there, or no longer") from error

    def reserve_name(self, saved: SavedWeights, *, overwrite: bool = False) -> Path:
        """The folder to save to; its parent exists afterwards. Also removes expired weights.

        Raises `InvalidRequest` if the name is in use, unless `overwrite` is set.
        """
        self.expire()
        folder = self.folder(saved)
        if folder.exists() and not overwrite:
            raise InvalidRequest(f"{saved.path}: the name is taken; save with overwrite, or under another name")
        folder.parent.mkdir(parents=True, exist_ok=True)
        return folder

    def remove(self, saved: SavedWeights) -> None:
        """Removes saved weights. Raises `NotFound` if they do not exist."""
        self.metadata(saved)
        remove_folder(self.folder(saved))

    def forget_snapshots(self, model: str) -> None:
        """Removes the model's unnamed snapshots except the newest `KEPT`."""
        folders = (self.root / model / "sampler_weights").glob(f"{EPHEMERAL}*")
        for folder in sorted(folders, key=lambda path: int(path.name.removeprefix(EPHEMERAL)))[:-KEPT]:
            remove_folder(folder)

    def all(self, model: str = "*") -> Iterator[tuple[SavedWeights, SavedMetadata]]:
        """All saved weights, or those of `model`, sorted by path within each kind. `model` is a glob pattern."""
        for kind in get_args(Kind):
            for file in sorted(self.root.glob(f"{model}/{kind}/*/{METADATA_FILE}")):
                saved = SavedWeights(file.parents[2].name, kind, file.parent.name)
                yield saved, self.metadata(saved)

    def checkpoint(self, saved: SavedWeights, metadata: SavedMetadata) -> types.Checkpoint:
        """The entry in the SDK's list of checkpoints."""
        return types.Checkpoint(
            checkpoint_id=f"{saved.kind}/{saved.name}",
            checkpoint_type="training" if saved.kind == "weights" else "sampler",
            time=moment(metadata.created),
            tinker_path=saved.path,
            size_bytes=sum(file.stat().st_size for file in self.folder(saved).iterdir()),
            user_metadata=metadata.user_metadata,
            expires_at=None if metadata.expires is None else moment(metadata.expires),
        )


def moment(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)
