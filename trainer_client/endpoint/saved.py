"""What the endpoint keeps on disk: `<out>/<model>/<kind>/<name>`, which clients call `tinker://<model>/<kind>/<name>`.

A folder appears whole or not at all. `weights` hold what training goes on from; `sampler_weights` are a model's folder
with its tokenizer, which any engine can load.
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

from rolltap.errors import InvalidRequest, NotFound
from rolltap.trainer_client.weights import remove_folder, sweep

Kind = Literal["weights", "sampler_weights"]
SCHEME, ABOUT = "tinker://", "tinker.json"
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,199}")
EPHEMERAL = "ephemeral-"
"""Before the names of snapshots that nobody named; the newest `KEPT` of a model stay, and none over a restart."""
KEPT = 4


class About(msgspec.Struct, frozen=True):
    """Beside saved weights: the model that they are of, and until when they are kept (seconds since the epoch)."""

    base_model: str
    rank: int
    train_mlp: bool = True
    train_attn: bool = True
    train_unembed: bool = True
    created: float = 0.0
    expires: float | None = None
    user_metadata: dict[str, str] | None = None
    has_optimiser: bool = False


@dataclass(frozen=True, slots=True)
class SavedWeights:
    """A name of saved weights, whether or not they are there."""

    model: str
    kind: Kind
    name: str

    @property
    def path(self) -> str:
        return f"{SCHEME}{self.model}/{self.kind}/{self.name}"


def parse_path(path: str, kind: Kind) -> SavedWeights:
    """`InvalidRequest` if `path` is no name of weights of this kind."""
    parts = path.removeprefix(SCHEME).split("/")
    if not path.startswith(SCHEME) or len(parts) != 3 or parts[1] != kind:
        raise InvalidRequest(f"{path[:200]!r} is not {SCHEME}MODEL/{kind}/NAME")
    if not NAME.fullmatch(parts[2]) or not NAME.fullmatch(parts[0].replace(":", "-")):
        raise InvalidRequest(f"{path[:200]!r}: names have letters, digits and _ . - only")
    return SavedWeights(parts[0], kind, parts[2])


def folder_of(root: Path, path: str) -> Path:
    """Where a service that keeps its weights in `root` has those of a sampler at a `tinker://` path."""
    return Library(root).folder(parse_path(path, "sampler_weights"))


class Library:
    """The saved weights of all models in the folder `root`."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def tidy(self) -> None:
        """At start: takes away what a killed process was writing, and snapshots whose sessions are gone."""
        for folder in self.root.glob("*/*"):
            sweep(folder)
        for folder in self.root.glob(f"*/sampler_weights/{EPHEMERAL}*"):
            remove_folder(folder)
        self.expire()

    def expire(self) -> None:
        """Takes away what is past its time."""
        for saved, about in list(self.all()):
            if about.expires is not None and about.expires < time.time():
                remove_folder(self.folder(saved))

    def folder(self, saved: SavedWeights) -> Path:
        return self.root / saved.model / saved.kind / saved.name

    def about(self, saved: SavedWeights) -> About:
        """`NotFound` if there are no such weights (any more)."""
        try:
            return msgspec.json.decode((self.folder(saved) / ABOUT).read_bytes(), type=About)
        except (OSError, msgspec.DecodeError) as error:
            raise NotFound(f"{saved.path}: nothing is saved there, or no longer") from error

    def claim(self, saved: SavedWeights, *, overwrite: bool = False) -> Path:
        """The folder to write. `InvalidRequest` if the name is taken."""
        self.expire()
        folder = self.folder(saved)
        if folder.exists() and not overwrite:
            raise InvalidRequest(f"{saved.path}: the name is taken; save with overwrite, or under another name")
        folder.parent.mkdir(parents=True, exist_ok=True)
        return folder

    def remove(self, saved: SavedWeights) -> None:
        self.about(saved)
        remove_folder(self.folder(saved))

    def forget_snapshots(self, model: str) -> None:
        """The model's unnamed snapshots but the newest `KEPT`."""
        folders = (self.root / model / "sampler_weights").glob(f"{EPHEMERAL}*")
        for folder in sorted(folders, key=lambda path: int(path.name.removeprefix(EPHEMERAL)))[:-KEPT]:
            remove_folder(folder)

    def all(self, model: str = "*") -> Iterator[tuple[SavedWeights, About]]:
        """Every model's weights, or one's."""
        for kind in get_args(Kind):
            for file in sorted(self.root.glob(f"{model}/{kind}/*/{ABOUT}")):
                saved = SavedWeights(file.parents[2].name, kind, file.parent.name)
                yield saved, self.about(saved)

    def checkpoint(self, saved: SavedWeights, about: About) -> types.Checkpoint:
        """As the SDK lists it."""
        return types.Checkpoint(
            checkpoint_id=f"{saved.kind}/{saved.name}",
            checkpoint_type="training" if saved.kind == "weights" else "sampler",
            time=moment(about.created),
            tinker_path=saved.path,
            size_bytes=sum(file.stat().st_size for file in self.folder(saved).iterdir()),
            user_metadata=about.user_metadata,
            expires_at=None if about.expires is None else moment(about.expires),
        )


def moment(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)
