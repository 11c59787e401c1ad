"""vLLM's weight transfer API over one engine loop: a trainer's tensors, by the process group of a push.

`init_weight_transfer_engine` joins the group, `start_weight_update` begins a copy of the weights, each
`update_weights` receives the tensors that it names, and `finish_weight_update` puts the whole copy in the weights'
place between two steps. Whatever breaks before that leaves the weights in use. Waiting for the network is done in
other threads: sampling goes on meanwhile, unless it is paused.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

import msgspec
import torch
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from rolltap.engine.protocol import (
    FinishRequest,
    TransferInfo,
    TransferRequest,
    UpdateInfo,
    UpdateRequest,
    decode,
)
from rolltap.engine.scheduler import EngineLoop
from rolltap.errors import ConfigError, EngineUnavailable, InvalidRequest
from rolltap.weight_group import Meeting, WeightGroup, dtype_of

T = TypeVar("T")
Endpoint = Callable[[HttpRequest], Awaitable[Response]]


class Receiver:
    """The routes. One transfer at a time: a call waits until the one before it has ended."""

    def __init__(self, loop: EngineLoop) -> None:
        self._loop = loop
        self._group: WeightGroup | None = None
        self._copy: dict[str, torch.Tensor] | None = None
        self._turn = asyncio.Lock()

    def posts(self) -> dict[str, Endpoint]:
        return {
            "/init_weight_transfer_engine": self.init,
            "/start_weight_update": self.start,
            "/update_weights": self.update,
            "/finish_weight_update": self.finish,
            "/shutdown_weight_transfer_engine": self.shutdown,
        }

    async def init(self, http: HttpRequest) -> Response:
        info = decode(await http.body(), TransferRequest).init_info
        async with self._turn:
            self._leave()
            self._group = await self._over_network(lambda: _join(info))
        return _done("Weight transfer initialized")

    async def start(self, http: HttpRequest) -> Response:
        async with self._turn:
            self._copy = {}
        return _done("Weight update started")

    async def update(self, http: HttpRequest) -> Response:
        info = decode(await http.body(), UpdateRequest).update_info
        async with self._turn:
            group, copy = self._group, self._copy
            if group is None or copy is None:
                raise InvalidRequest("no transfer is under way: init_weight_transfer_engine, then start_weight_update")
            self._copy = None  # of no use if this breaks off
            tensors = self._room_for(info)
            await self._over_network(lambda: [group.broadcast(tensor) for tensor in tensors.values()])
            self._copy = copy | tensors
        return _done("Weights updated")

    async def finish(self, http: HttpRequest) -> Response:
        version = decode(await http.body(), FinishRequest).weight_version
        async with self._turn:
            copy, self._copy = self._copy, None
            if copy is None:
                raise InvalidRequest("no transfer is under way, or it broke off; the weights in use stay")
            try:
                await asyncio.wrap_future(self._loop.replace(copy, "the transfer", version))
            except ConfigError as error:
                raise InvalidRequest(f"{error}; the weights in use stay") from error
        return _done("Weight update finished")

    async def shutdown(self, http: HttpRequest) -> Response:
        async with self._turn:
            self._leave()
        return _done("Weight transfer shut down")

    def _room_for(self, info: UpdateInfo) -> dict[str, torch.Tensor]:
        """Empty tensors for what is announced, none of which the model refuses."""
        try:
            rows = list(zip(info.names, info.dtype_names, info.shapes, strict=True))
            for name, _, shape in rows:
                self._loop.model.check_weight(name, shape, "the transfer")
            return {name: torch.empty(shape, dtype=dtype_of(dtype)) for name, dtype, shape in rows}
        except (ConfigError, ValueError) as error:
            raise InvalidRequest(f"{error}; the weights in use stay", param="update_info") from error

    async def _over_network(self, work: Callable[[], T]) -> T:
        try:
            return await asyncio.to_thread(work)
        except RuntimeError as error:  # torch's for a group that does not come together or has lost a rank
            self._leave()
            reason = str(error).splitlines()[0]
            raise EngineUnavailable(f"the trainer's group is lost: {reason}; the weights in use stay") from error

    def _leave(self) -> None:
        self._copy = None
        if self._group is not None:
            self._group.close()
            self._group = None


def _join(info: TransferInfo) -> WeightGroup:
    meeting = Meeting(
        info.master_address, info.master_port, info.group_name, info.world_size, info.backend, info.timeout_s
    )
    return WeightGroup(meeting, info.rank_offset)


def _done(message: str) -> Response:
    return Response(msgspec.json.encode({"message": message}), media_type="application/json")
