"""vLLM's weight transfer backend `rolltap`: weights over a trainer's process group, by gloo or NCCL.

vLLM's own backends need vLLM's communicator on the trainer's side; this one is torch's, as SGLang's is. rolltap,
installed without its requirements beside vLLM (`pip install --no-deps rolltap`), registers it in each of vLLM's
processes: `--weight-transfer-config '{"backend": "rolltap"}'`. This module imports only vLLM, torch and
`rolltap.weight_transfer`. Source: vLLM 0.32, `vllm/distributed/weight_transfer/{base,nccl_engine}.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.weight_transfer import base  # pyright: ignore[reportMissingImports]
from vllm.distributed.weight_transfer.factory import (  # pyright: ignore[reportMissingImports]
    WeightTransferEngineFactory,
)

from rolltap.weight_transfer import Rendezvous, WeightGroup, dtype_of

NAME = "rolltap"


@dataclass
class InitInfo(base.WeightTransferInitInfo):
    """Where the trainer waits. This server's first process is rank `rank_offset`."""

    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    group_name: str
    backend: str
    timeout_s: float


@dataclass
class TransferUpdateInfo(base.WeightTransferUpdateInfo):
    """The tensors that come next, in their order."""

    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]


class GroupWeightTransferEngine(base.WeightTransferEngine):
    """One process of vLLM. What is received is loaded as a checkpoint's tensors are."""

    init_info_cls = InitInfo
    update_info_cls = TransferUpdateInfo
    _group: WeightGroup | None = None
    _place: torch.device

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        self.shutdown()
        parallel = self.parallel_config
        rank = init_info.rank_offset + parallel.data_parallel_index * parallel.world_size + parallel.rank
        self._place = torch.device("cpu") if init_info.backend == "gloo" else self.device
        rendezvous = Rendezvous(
            init_info.master_address,
            init_info.master_port,
            init_info.group_name,
            init_info.world_size,
            init_info.backend,
            init_info.timeout_s,
        )
        self._group = WeightGroup(rendezvous, rank)

    def start_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import (  # pyright: ignore[reportMissingImports]
            initialize_layerwise_reload,
        )

        initialize_layerwise_reload(self.model)

    def finish_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import (  # pyright: ignore[reportMissingImports]
            finalize_layerwise_reload,
        )

        finalize_layerwise_reload(self.model, self.model_config)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """vLLM's own waits for an accelerator, which a CPU is not; `WeightGroup.broadcast` has waited."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: TransferUpdateInfo) -> None:
        if self._group is None:
            raise RuntimeError("init_weight_transfer_engine comes first")
        named = zip(update_info.names, update_info.dtype_names, update_info.shapes, strict=True)
        for name, dtype, shape in named:
            tensor = torch.empty(shape, dtype=dtype_of(dtype), device=self._place)
            self._group.broadcast(tensor)
            self.model.load_weights([(name, tensor)])

    def shutdown(self) -> None:
        if self._group is not None:
            self._group.close()
            self._group = None


def register() -> None:
    """The entry point `vllm.general_plugins`."""
    WeightTransferEngineFactory.register_engine(NAME, GroupWeightTransferEngine)
