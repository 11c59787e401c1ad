"""The digest of a model's weights, as the trainer names them and the embedded engine states them.

It covers every tensor's name, dtype, shape and bytes, in any order.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

THREADS = 8
"""Threads that hash: hashlib releases the GIL, and one thread hashes 1 to 2 GB/s."""


def digest_of_tensors(weights: Mapping[str, Tensor]) -> str:
    """The digest of tensors on the CPU."""
    return digest_of((name, lambda name=name: weights[name]) for name in weights)


def digest_of(tensors: Iterable[tuple[str, Callable[[], Tensor]]]) -> str:
    """The digest of named tensors, each of which is loaded when it is hashed."""

    def of(entry: tuple[str, Callable[[], Tensor]]) -> tuple[str, bytes]:
        name, load = entry
        tensor = load().detach().contiguous()
        hasher = hashlib.sha256(f"{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\0".encode())
        hasher.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
        return name, hasher.digest()

    with ThreadPoolExecutor(THREADS) as pool:
        digests = sorted(pool.map(of, tensors))
    return hashlib.sha256(b"".join(digest for _, digest in digests)).hexdigest()
