"""The processes that train together: one, or those that torchrun started. The lead (rank 0) talks to the server."""

from __future__ import annotations

import gc
import logging
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

T = TypeVar("T")

PATIENCE = timedelta(days=365)
"""How long a rank waits for the lead, which may be waiting for rollouts. If the lead dies, torchrun ends the ranks."""


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process's rank among `size` processes, and its device."""

    rank: int
    size: int
    device: torch.device

    @classmethod
    def of_environment(cls, device: str = "") -> Ranks:
        """The ranks that torchrun sets in the environment, else one process. `device`: a torch device; "": the best."""
        kind = device or ("cuda" if torch.cuda.is_available() else "cpu")
        if kind == "cuda":
            kind = f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
            torch.cuda.set_device(kind)
        return cls(int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1")), torch.device(kind))

    @property
    def lead(self) -> bool:
        return self.rank == 0

    def mesh(self) -> DeviceMesh:
        """A one-dimensional device mesh of all ranks."""
        self._join()
        return init_device_mesh(self.device.type, (self.size,))

    def from_lead(self, value: T) -> T:
        """The lead's value, on every rank."""
        return self.scatter([value] * self.size if self.lead else None)

    def scatter(self, values: Sequence[T] | None) -> T:
        """This rank's entry of the lead's `values`, which has one for each rank. Other ranks pass None."""
        if self.size == 1:
            assert values is not None
            return values[0]
        self._join()
        mine: list[Any] = [None]
        dist.scatter_object_list(mine, None if values is None else list(values), src=0, group=_waiting_group())
        return mine[0]

    def gather(self, value: T) -> list[T]:
        """Every rank's value, for the lead; other ranks get an empty list."""
        if self.size == 1:
            return [value]
        self._join()
        gathered: list[Any] | None = [None] * self.size if self.lead else None
        dist.gather_object(value, gathered, dst=0, group=_waiting_group())
        return gathered or []

    def total(self, values: torch.Tensor, *, peak: bool = False) -> torch.Tensor:
        """The sum over ranks, or with `peak` the maximum; in place."""
        if self.size > 1:
            dist.all_reduce(values, dist.ReduceOp.MAX if peak else dist.ReduceOp.SUM)
        return values

    def leave(self) -> None:
        """Ends the run once all ranks are done: a single process leaves its group; with several, the process exits.

        It exits at once, because gloo's threads may abort a process that destroys groups and FSDP's modules
        (torch 2.13), although all its work is done.
        """
        if self.size > 1:
            dist.barrier(group=_waiting_group())
            logging.shutdown()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)
        if dist.is_initialized():
            gc.collect()
            dist.destroy_process_group()

    def _join(self) -> None:
        if not dist.is_initialized():
            backend = "cpu:gloo,cuda:nccl" if self.device.type == "cuda" else "gloo"
            store = None if self.size > 1 else HashStore()
            dist.init_process_group(backend, rank=self.rank, world_size=self.size, store=store)


@cache
def _waiting_group() -> Any:
    """A gloo group of all ranks with the timeout `PATIENCE`."""
    return dist.new_group(backend="gloo", timeout=PATIENCE)
