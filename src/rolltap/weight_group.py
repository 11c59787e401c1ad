"""The process group of one push: the trainer is rank 0 and sends, every rank of an engine receives.

A group is `torch.distributed`'s, made as SGLang makes the one of `/init_weights_update_group` (its
`init_custom_process_group`), so that its servers can join: the store of a `tcp://` rendezvous under the group's name.
It stands beside whatever groups a process has already. Both ends need the same minor version of torch.

gloo ends a process that is sent another number of bytes than it expects: what is sent must be what was announced.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed import distributed_c10d as c10d


@dataclass(frozen=True, slots=True)
class Meeting:
    """Where a group meets: the trainer's `address` and `port`, the group's `name`, all its ranks (`world_size`),
    torch's `backend` (gloo, nccl), and how long a rank waits for the others, in seconds."""

    address: str
    port: int
    name: str
    world_size: int
    backend: str
    timeout_s: float

    @property
    def patience(self) -> timedelta:
        return timedelta(seconds=self.timeout_s)


class WeightGroup:
    """This process's place in the group, as `rank`; a context manager. Making it waits for the others.

    Raises torch's `DistError` or `RuntimeError` where they don't come, or are lost.
    """

    def __init__(self, meeting: Meeting, rank: int, store: Store | None = None) -> None:
        if store is None:
            store = TCPStore(meeting.address, meeting.port, is_master=False, timeout=meeting.patience)
        store.set_timeout(meeting.patience)
        make: Callable[..., Any] = c10d._new_process_group_helper
        self._group, _ = make(
            meeting.world_size,
            rank,
            [],
            c10d.Backend(meeting.backend),
            PrefixStore(meeting.name, store),
            group_name=meeting.name,
            timeout=meeting.patience,
        )
        c10d._world.pg_group_ranks[self._group] = {place: place for place in range(meeting.world_size)}

    def __enter__(self) -> WeightGroup:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Rank 0's `tensor` (contiguous) becomes everybody's; done when this returns."""
        self._group.broadcast(tensor, 0).wait()
        if tensor.is_cuda:
            torch.cuda.synchronize(tensor.device)

    def close(self) -> None:
        dist.destroy_process_group(self._group)


def dtype_of(name: str) -> torch.dtype:
    """The dtype that torch calls `name` ("float32"); `ValueError` if there is none."""
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{name!r} is not a dtype")
    return found
