"""Weights on disk: whole folders of them, their digest, and the tokenizer that belongs to them.

A folder is written under another name, synced to disk and then renamed, so it is never incomplete.

A folder has the same digest as the tensors that it was written from (`rolltap.weight_transfer`), whatever the split
over files. The server keeps it with the version, and refuses other weights under that number.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from rolltap.errors import CheckpointMismatch
from rolltap.weight_transfer import digest_of

COMPANIONS = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "generation_config.json",
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
)
"""Files of a model folder other than the weights; they are copied from the initial model."""

MAKING, LEAVING, REPLACED = ".making-", ".leaving-", ".replaced-"
"""Prefixes of the names of folders that are being written, removed, and replaced by a new one of their name."""


@contextmanager
def whole_folder(final: Path) -> Iterator[Path]:
    """A folder to write into. At the end it is renamed to `final`; after an error, `final` is unchanged."""
    making = final.with_name(f"{MAKING}{final.name}")
    shutil.rmtree(making, ignore_errors=True)
    making.mkdir(parents=True)
    yield making
    for path in sorted(making.rglob("*"), reverse=True):
        _sync(path)
    _sync(making)
    former = _set_aside(final, REPLACED) if final.exists() else None
    making.rename(final)
    _sync(final.parent)
    if former is not None:
        shutil.rmtree(former, ignore_errors=True)


def remove_folder(folder: Path) -> None:
    """Removes a folder. It is renamed first: if this process dies, `sweep` removes the rest."""
    shutil.rmtree(_set_aside(folder, LEAVING))


def sweep(parent: Path) -> None:
    """Removes the folders in `parent` that dead processes were writing or removing.

    One that a process had set aside, but not yet replaced, gets its name back.
    """
    for path in parent.glob(f"{REPLACED}*"):
        if not (final := path.with_name(path.name.removeprefix(REPLACED))).exists():
            path.rename(final)
    for prefix in (MAKING, LEAVING, REPLACED):
        for path in parent.glob(f"{prefix}*"):
            shutil.rmtree(path)


def _set_aside(folder: Path, prefix: str) -> Path:
    aside = folder.with_name(f"{prefix}{folder.name}")
    shutil.rmtree(aside, ignore_errors=True)
    return folder.rename(aside)


def save_model(model: Any, state: dict[str, Any] | None, folder: Path, source: Path) -> None:
    """Writes a Hugging Face folder with safetensors, with the weights of `state`, or of the model if it is None."""
    model.save_pretrained(folder, state_dict=state)
    for name in COMPANIONS:
        if (source / name).exists():
            shutil.copy(source / name, folder / name)


def sendable(model: Any, state: dict[str, Any]) -> dict[str, Any]:
    """The model's weights without tied ones (the same tensor under a second name), as in a model folder."""
    return {name: weight for name, weight in state.items() if name not in model.all_tied_weights_keys}


def tokenizer_hash(folder: Path) -> str:
    """A hash of a folder's tokenizer and chat template, equal to the server's; "" without a tokenizer."""
    path = folder / "tokenizer.json"
    if not path.exists():
        return ""
    return _hash(path, _chat_template(folder))


def served_tokenizer(tokenizer: Any) -> str:
    """The `tokenizer_hash` of a transformers tokenizer with its current chat template; "" without files."""
    from transformers.utils.hub import cached_file

    path = cached_file(tokenizer.name_or_path, "tokenizer.json", _raise_exceptions_for_missing_entries=False)
    return "" if path is None else _hash(Path(path), _chosen(tokenizer.chat_template))


def check_tokenizer(policy: str, served: str, folder: Path) -> None:
    """`CheckpointMismatch` if the engine's tokenizer is known and is not the folder's."""
    own = tokenizer_hash(folder)
    if served and own and served != own:
        raise CheckpointMismatch(
            f"policy {policy!r} is served with tokenizer {served[:12]}, {folder} has {own[:12]}: "
            "train the model that the engine serves"
        )


def _chat_template(folder: Path) -> str:
    path = folder / "chat_template.jinja"
    if path.exists():
        return path.read_text(encoding="utf-8")
    config = folder / "tokenizer_config.json"
    template = json.loads(config.read_text(encoding="utf-8")).get("chat_template") if config.exists() else ""
    if isinstance(template, list):
        template = {entry["name"]: entry["template"] for entry in template}
    return _chosen(template)


def _chosen(template: str | Mapping[str, str] | None) -> str:
    """The template that the server renders with, if there are several."""
    if isinstance(template, Mapping):
        return template.get("tool_use") or template.get("default") or ""
    return template or ""


def _hash(tokenizer: Path, template: str) -> str:
    return hashlib.sha256(f"{tokenizer.read_text(encoding='utf-8')}\0{template}".encode()).hexdigest()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def digest_of_folder(folder: Path) -> str:
    """The digest of a folder's safetensors; of its files' bytes if they can't be read as safetensors."""
    try:
        with ExitStack() as stack:
            tensors: list[tuple[str, Callable[[], Tensor]]] = []
            for path in folder.glob("*.safetensors"):
                file = stack.enter_context(safe_open(path, "pt"))
                tensors += [(name, lambda file=file, name=name: file.get_tensor(name)) for name in file.offset_keys()]
            return digest_of(tensors)
    except SafetensorError:
        whole = hashlib.sha256()
        for path in sorted(folder.glob("*.safetensors")):
            whole.update(path.read_bytes())
        return whole.hexdigest()
