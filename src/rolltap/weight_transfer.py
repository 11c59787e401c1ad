"""What the two ends of a weight push share: the digest of a model's weights, as the trainer names them and the embedded
engine states them, and the process group of a push, in which the trainer is rank 0 and sends and every engine rank
receives.

The digest covers every tensor's name, dtype, shape and bytes, in any order.

The group is one of `torch.distributed`, made the way SGLang makes the group of `/init_weights_update_group`
(`init_custom_process_group`), so that its servers can join: a `tcp://` store with the group's name as prefix. It does
not touch the groups that a process already has. Both ends need the same minor version of torch.

gloo kills a process that receives another number of bytes than it expects: send exactly what was announced.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed import distributed_c10d as c10d

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


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """Where a group meets: the trainer's `address` and `port`, and the group's `name`.

    `world_size` counts all ranks, `backend` is torch's (gloo, nccl), `timeout_s` limits the wait for the other ranks.
    """

    address: str
    port: int
    name: str
    world_size: int
    backend: str
    timeout_s: float

    @property
    def timeout(self) -> timedelta:
        return timedelta(seconds=self.timeout_s)


class WeightGroup:
    """This process's membership of the group as `rank`; a context manager. The constructor waits for the other ranks.

    Raises torch's `DistError` or `RuntimeError` if a rank does not come, or is lost.
    """

    def __init__(self, rendezvous: Rendezvous, rank: int, store: Store | None = None) -> None:
        if store is None:
            store = TCPStore(rendezvous.address, rendezvous.port, is_master=False, timeout=rendezvous.timeout)
        store.set_timeout(rendezvous.timeout)
        make: Callable[..., Any] = c10d._new_process_group_helper
        self._group, _ = make(
            rendezvous.world_size,
            rank,
            [],
            c10d.Backend(rendezvous.backend),
            PrefixStore(rendezvous.name, store),
            group_name=rendezvous.name,
            timeout=rendezvous.timeout,
        )
        c10d._world.pg_group_ranks[self._group] = {place: place for place in range(rendezvous.world_size)}

    def __enter__(self) -> WeightGroup:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Copies rank 0's `tensor` (contiguous) into every rank's; complete when this returns."""
        self._group.broadcast(tensor, 0).wait()
        if tensor.is_cuda:
            torch.cuda.synchronize(tensor.device)

    def close(self) -> None:
        dist.destroy_process_group(self._group)


def dtype_of(name: str) -> torch.dtype:
    """The dtype that torch calls `name` ("float32"); `ValueError` if there is none."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r} is not a dtype")
    return dtype
