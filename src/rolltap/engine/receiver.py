"""vLLM's weight transfer API over one engine loop: the trainer sends tensors over a process group.

`init_weight_transfer_engine` joins the group, `start_weight_update` begins a copy of the weights, each
`update_weights` receives the tensors that it names, and `finish_weight_update` swaps the whole copy in between two
steps. If anything fails before that, the weights in use stay. Other threads wait for the network, so sampling
continues meanwhile, unless it is paused.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

import torch
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from rolltap.engine.protocol import (
    FinishRequest,
    TransferInfo,
    TransferRequest,
    UpdateInfo,
    UpdateRequest,
    decode,
)
from rolltap.engine.responses import json_response
from rolltap.engine.scheduler import EngineLoop
from rolltap.errors import ConfigError, EngineUnavailable, InvalidRequest
from rolltap.weight_group import Rendezvous, WeightGroup, dtype_of

T = TypeVar("T")


class WeightReceiver:
    """The transfer routes. They run one at a time: a call waits until the one before it has ended."""

    def __init__(self, loop: EngineLoop) -> None:
        self._loop = loop
        self._group: WeightGroup | None = None
        self._copy: dict[str, torch.Tensor] | None = None
        self._lock = asyncio.Lock()

    def routes(self) -> list[Route]:
        endpoints = {
            "/init_weight_transfer_engine": self.init,
            "/start_weight_update": self.start,
            "/update_weights": self.update,
            "/finish_weight_update": self.finish,
            "/shutdown_weight_transfer_engine": self.shutdown,
        }
        return [Route(path, endpoint, methods=["POST"]) for path, endpoint in endpoints.items()]

    async def init(self, http: HttpRequest) -> Response:
        info = decode(await http.body(), TransferRequest).init_info
        async with self._lock:
            self._leave_group()
            self._group = await self._run_in_thread(lambda: _join(info))
        return json_response({"message": "Weight transfer initialized"})

    async def start(self, http: HttpRequest) -> Response:
        async with self._lock:
            self._copy = {}
        return json_response({"message": "Weight update started"})

    async def update(self, http: HttpRequest) -> Response:
        info = decode(await http.body(), UpdateRequest).update_info
        async with self._lock:
            group, copy = self._group, self._copy
            if group is None or copy is None:
                raise InvalidRequest("no transfer is active: init_weight_transfer_engine, then start_weight_update")
            self._copy = None  # if this bucket fails, the copy is incomplete and must not be swapped in
            tensors = self._allocate(info)
            await self._run_in_thread(lambda: [group.broadcast(tensor) for tensor in tensors.values()])
            self._copy = copy | tensors
        return json_response({"message": "Weights updated"})

    async def finish(self, http: HttpRequest) -> Response:
        version = decode(await http.body(), FinishRequest).weight_version
        async with self._lock:
            copy, self._copy = self._copy, None
            if copy is None:
                raise InvalidRequest("no transfer is active, or it failed; the weights in use stay")
            try:
                await asyncio.wrap_future(self._loop.replace(copy, "the transfer", version))
            except ConfigError as error:
                raise InvalidRequest(f"{error}; the weights in use stay") from error
        return json_response({"message": "Weight update finished"})

    async def shutdown(self, http: HttpRequest) -> Response:
        async with self._lock:
            self._leave_group()
        return json_response({"message": "Weight transfer shut down"})

    def _allocate(self, info: UpdateInfo) -> dict[str, torch.Tensor]:
        """Empty tensors for the announced ones; `InvalidRequest` if the model has no such tensor."""
        try:
            announced = list(zip(info.names, info.dtype_names, info.shapes, strict=True))
            for name, _, shape in announced:
                self._loop.model.check_weight(name, shape, "the transfer")
            return {name: torch.empty(shape, dtype=dtype_of(dtype)) for name, dtype, shape in announced}
        except (ConfigError, ValueError) as error:
            raise InvalidRequest(f"{error}; the weights in use stay", param="update_info") from error

    async def _run_in_thread(self, work: Callable[[], T]) -> T:
        try:
            return await asyncio.to_thread(work)
        except RuntimeError as error:  # torch raises it if a rank does not come, or is lost
            self._leave_group()
            reason = str(error).splitlines()[0]
            raise EngineUnavailable(f"the trainer's group is lost: {reason}; the weights in use stay") from error

    def _leave_group(self) -> None:
        self._copy = None
        if self._group is not None:
            self._group.close()
            self._group = None


def _join(info: TransferInfo) -> WeightGroup:
    rendezvous = Rendezvous(
        info.master_address, info.master_port, info.group_name, info.world_size, info.backend, info.timeout_s
    )
    return WeightGroup(rendezvous, info.rank_offset)
