"""SGLang's endpoints for weights over a process group, as a process that really joins it and holds what it received.

Written from SGLang 0.5.23: `init_custom_process_group` (`srt/utils/common.py`), `WeightUpdater`
(`srt/model_executor/model_runner_components/weight_updater.py`) and the sessions of
`srt/managers/scheduler_components/weight_updater.py`. `GET /held` says what has become of it; tensors whose name holds
"bad" are received and not loaded.

    python sglang_peer.py PORT [--without-sessions]
"""

from __future__ import annotations

import asyncio
import hashlib
import sys
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from torch._C._distributed_c10d import HashStore, PrefixStore
from torch.distributed import distributed_c10d as c10d
from torch.distributed.rendezvous import rendezvous

TIMEOUT = timedelta(seconds=10)


class Peer:
    """One process of one server."""

    def __init__(self) -> None:
        self.groups: dict[str, Any] = {}
        self.held: dict[str, str] = {}
        self.updates: list[dict[str, Any]] = []
        self.session = False
        self.version = "default"

    def init(self, body: dict[str, Any]) -> str:
        rank, size = body["rank_offset"], body["world_size"]
        where = f"tcp://{body['master_address']}:{body['master_port']}"
        store, rank, size = next(iter(rendezvous(where, rank, size, timeout=TIMEOUT)))
        store.set_timeout(TIMEOUT)
        make: Any = c10d._new_process_group_helper
        group, _ = make(
            size,
            rank,
            [],
            c10d.Backend(body["backend"]),
            PrefixStore(body["group_name"], store),
            group_name=body["group_name"],
            backend_options=None,
            timeout=TIMEOUT,
            device_id=None,
        )
        c10d._world.pg_group_ranks[group] = {place: place for place in range(size)}
        self.groups[body["group_name"]] = group
        return "Succeeded to initialize custom process group."

    def destroy(self, body: dict[str, Any]) -> str:
        if body["group_name"] not in self.groups:
            raise ValueError("The group to be destroyed does not exist.")
        dist.destroy_process_group(self.groups.pop(body["group_name"]))
        return "Succeeded to destroy custom process group."

    def begin(self, body: dict[str, Any]) -> str:
        if self.session:
            raise ValueError("a weight-update session is already open; call end_weight_update() first")
        self.session = True
        return "Success"

    def end(self, body: dict[str, Any]) -> str:
        if not self.session:
            raise ValueError("no weight-update session is open; call begin_weight_update() first")
        self.session = False
        return "Success"

    def update(self, body: dict[str, Any]) -> str:
        if SESSIONS and not self.session:
            raise ValueError("must run between begin_weight_update() and end_weight_update()")
        weights, handles = [], []
        for name, dtype, shape in zip(body["names"], body["dtypes"], body["shapes"], strict=True):
            weight = torch.empty(shape, dtype=getattr(torch, dtype))
            group = self.groups[body["group_name"]]
            handles.append(dist.broadcast(weight, src=0, group=group, async_op=True))
            weights.append((name, weight))
        for handle in handles:
            assert handle is not None
            handle.wait()
        for name, weight in weights:
            if "bad" in name:
                raise ValueError(f"Failed to update parameter online: {name}. Please discard the whole weights.")
            self.held[name] = digest(weight)
        self.updates.append({key: body[key] for key in ("names", "flush_cache", "weight_version")})
        self.version = body["weight_version"] or self.version
        return "Succeeded to update parameter online."


def digest(tensor: torch.Tensor) -> str:
    """Of dtype, shape and every bit."""
    data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return hashlib.sha256(f"{tensor.dtype}{list(tensor.shape)}".encode() + data).hexdigest()


SESSIONS = "--without-sessions" not in sys.argv


def app(peer: Peer) -> Starlette:
    def route(path: str, work: Any) -> Route:
        async def answer(request: Request) -> Response:
            body = await request.json()
            try:
                message = await asyncio.to_thread(work, body)
            except Exception as error:  # noqa: BLE001 - as SGLang answers
                return JSONResponse({"success": False, "message": str(error)}, 400)
            return JSONResponse({"success": True, "message": message})

        return Route(path, answer, methods=["POST"])

    async def held(request: Request) -> Response:
        names = ("held", "updates", "session", "version")
        return JSONResponse({**{name: getattr(peer, name) for name in names}, "groups": list(peer.groups)})

    async def server_info(request: Request) -> Response:
        return JSONResponse({"tp_size": 1, "version": "0.5.23"})

    posts = {
        "/init_weights_update_group": peer.init,
        "/destroy_weights_update_group": peer.destroy,
        "/update_weights_from_distributed": peer.update,
    }
    if SESSIONS:
        posts |= {"/begin_weight_update": peer.begin, "/end_weight_update": peer.end}
    gets = [Route("/held", held), Route("/server_info", server_info)]
    return Starlette(routes=[*gets, *(route(path, work) for path, work in posts.items())])


if __name__ == "__main__":
    # SGLang's own group, beside which the one of a push stands
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    uvicorn.run(app(Peer()), port=int(sys.argv[1]), log_level="warning")
