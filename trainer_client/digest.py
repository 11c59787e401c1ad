"""What identifies weights: a digest of every tensor's name, dtype, shape and bytes.

It is the same for a folder and for the tensors that it was written from, however they are split over files. The server
keeps it with the version, and refuses another set of weights under that number.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

THREADS = 8
"""hashlib lets other threads run, and one does 1 to 2 GB/s."""


def digest_of_tensors(weights: Mapping[str, Tensor]) -> str:
    """The digest of tensors on the CPU."""
    return _digest((name, lambda name=name: weights[name]) for name in weights)


def digest_of_folder(folder: Path) -> str:
    """The digest of a folder's safetensors; of its files' bytes where they can't be read as such."""
    try:
        with ExitStack() as stack:
            tensors: list[tuple[str, Callable[[], Tensor]]] = []
            for path in folder.glob("*.safetensors"):
                file = stack.enter_context(safe_open(path, "pt"))
                tensors += [(name, lambda file=file, name=name: file.get_tensor(name)) for name in file.offset_keys()]
            return _digest(tensors)
    except SafetensorError:
        whole = hashlib.sha256()
        for path in sorted(folder.glob("*.safetensors")):
            whole.update(path.read_bytes())
        return whole.hexdigest()


def _digest(tensors: Iterable[tuple[str, Callable[[], Tensor]]]) -> str:
    def of(entry: tuple[str, Callable[[], Tensor]]) -> tuple[str, bytes]:
        name, load = entry
        tensor = load().detach().contiguous()
        hasher = hashlib.sha256(f"{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\0".encode())
        hasher.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
        return name, hasher.digest()

    with ThreadPoolExecutor(THREADS) as pool:
        digests = sorted(pool.map(of, tensors))
    return hashlib.sha256(b"".join(digest for _, digest in digests)).hexdigest()
