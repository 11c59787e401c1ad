"""The engine's routes that do not sample: what it is, how it does, pausing, and its weights.

Weights come from a folder, or by vLLM's weight transfer API, as tensors over a process group:
`init_weight_transfer_engine` joins the group, `start_weight_update` begins a copy of the weights, each
`update_weights` receives the tensors that it names, and `finish_weight_update` swaps the whole copy in between two
steps. If anything fails before that, the weights in use stay. Other threads wait for the network, so sampling
continues meanwhile, unless it is paused.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, get_args

import torch
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, generate_latest
from starlette.requests import Request as HttpRequest
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from tokenizers import Tokenizer

from rolltap.engine import protocol
from rolltap.engine.http import json_response
from rolltap.engine.sampling import LOGPROBS_MODE
from rolltap.engine.scheduler import EngineLoop, PauseMode
from rolltap.engine.settings import ModelServerSettings
from rolltap.errors import ConfigError, EngineUnavailable, InvalidRequest
from rolltap.weight_group import Rendezvous, WeightGroup, dtype_of


class AdminRoutes:
    """vLLM's development routes over one engine loop."""

    def __init__(self, settings: ModelServerSettings, loop: EngineLoop, tokenizer: Tokenizer) -> None:
        self._settings = settings
        self._tokenizer = tokenizer
        self._loop = loop
        self._started_at = int(time.time())

    def routes(self) -> list[Route]:
        get: dict[str, Any] = {
            "/health": self.health,
            "/v1/models": self.models,
            "/metrics": self.metrics,
            "/server_info": self.server_info,
            "/is_paused": self.is_paused,
            "/weight_info": self.weight_info,
            "/get_world_size": self.get_world_size,
        }
        post: dict[str, Any] = {
            "/inference/v1/abort_requests": self.abort_requests,
            "/abort_requests": self.abort_requests,
            "/tokenize": self.tokenize,
            "/pause": self.pause,
            "/resume": self.resume,
            "/collective_rpc": self.collective_rpc,
            "/update_weight_version": self.update_weight_version,
        }
        return [
            *(Route(path, endpoint, methods=["GET"]) for path, endpoint in get.items()),
            *(Route(path, endpoint, methods=["POST"]) for path, endpoint in post.items()),
        ]

    async def health(self, http: HttpRequest) -> Response:
        failure = self._loop.failure
        if failure is not None:
            raise EngineUnavailable(f"the engine's loop failed: {failure!r}; restart the engine")
        return Response()

    async def models(self, http: HttpRequest) -> Response:
        entry = {
            "id": self._settings.served_name,
            "object": "model",
            "created": self._started_at,
            "owned_by": "rolltap",
            "root": str(self._settings.model),
            "parent": None,
            "max_model_len": self._loop.context,
        }
        return json_response({"object": "list", "data": [entry]})

    async def server_info(self, http: HttpRequest) -> Response:
        model = self._loop.model
        return json_response(
            {
                "engine": "rolltap",
                "logprobs_mode": LOGPROBS_MODE,
                "slots": self._settings.slots,
                "architecture": type(model.network).__name__,
                "vocabulary": model.vocabulary,
                "device": str(model.device),
                "dtype": str(model.dtype).removeprefix("torch."),
            }
        )

    async def weight_info(self, http: HttpRequest) -> Response:
        loop = self._loop
        return json_response(
            {"weight_version": loop.version, "weight_digest": loop.digest, "logprobs_mode": LOGPROBS_MODE}
        )

    async def tokenize(self, http: HttpRequest) -> Response:
        request = protocol.decode(await http.body(), protocol.TokenizeRequest)
        ids = self._tokenizer.encode(request.prompt, add_special_tokens=request.add_special_tokens).ids
        return json_response({"tokens": ids, "count": len(ids), "max_model_len": self._loop.context})

    async def get_world_size(self, http: HttpRequest) -> Response:
        return json_response({"world_size": 1})

    async def metrics(self, http: HttpRequest) -> Response:
        """Prometheus text with vLLM's names."""
        active, waiting = self._loop.load
        counts = self._loop.counts
        registry = CollectorRegistry()
        for name, value in {"num_requests_running": active, "num_requests_waiting": waiting}.items():
            Gauge(f"vllm:{name}", "", registry=registry).set(value)
        totals = {
            "prompt_tokens_total": counts["prompt_tokens"],
            "generation_tokens_total": counts["generation_tokens"],
            "prefix_cache_queries_total": counts["prompt_tokens"],
            "prefix_cache_hits_total": counts["prefix_hits"],
        }
        for name, value in totals.items():
            Counter(f"vllm:{name}", "", registry=registry).inc(value)
        finished = Counter("vllm:request_success_total", "", ["finished_reason"], registry=registry)
        for name, value in counts.items():
            if name.startswith("finished:"):
                finished.labels(name.removeprefix("finished:")).inc(value)
        return PlainTextResponse(generate_latest(registry).decode(), media_type=CONTENT_TYPE_LATEST)

    async def pause(self, http: HttpRequest) -> Response:
        mode: Any = http.query_params.get("mode", "abort")
        if mode not in get_args(PauseMode):
            raise InvalidRequest(f"mode is {mode!r}; it must be one of {get_args(PauseMode)}", param="mode")
        await asyncio.wrap_future(self._loop.pause(mode))
        return json_response({"status": "paused"})

    async def resume(self, http: HttpRequest) -> Response:
        await asyncio.wrap_future(self._loop.resume())
        return json_response({"status": "resumed"})

    async def is_paused(self, http: HttpRequest) -> Response:
        return json_response({"is_paused": self._loop.paused})

    async def collective_rpc(self, http: HttpRequest) -> Response:
        """Loads weights from a folder. A folder that can't be used is a 400, and the weights in use stay."""
        request = protocol.decode(await http.body(), protocol.RpcRequest)
        try:
            await asyncio.wrap_future(self._loop.reload(Path(request.kwargs.weights_path)))
        except ConfigError as error:
            raise InvalidRequest(f"{error}; the weights in use stay", param="kwargs.weights_path") from error
        return json_response({"results": [None]})

    async def update_weight_version(self, http: HttpRequest) -> Response:
        request = protocol.decode(await http.body(), protocol.VersionRequest)
        await asyncio.wrap_future(self._loop.set_version(request.new_version))
        return json_response({"success": True, "new_version": request.new_version})

    async def abort_requests(self, http: HttpRequest) -> Response:
        request = protocol.decode(await http.body(), protocol.AbortRequest)
        count = await asyncio.wrap_future(self._loop.abort(request.request_ids or None))
        return json_response({"status": "aborted", "aborted": count})


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
        info = protocol.decode(await http.body(), protocol.TransferRequest).init_info
        async with self._lock:
            self._leave_group()
            address, port = info.master_address, info.master_port
            meeting = Rendezvous(address, port, info.group_name, info.world_size, info.backend, info.timeout_s)
            self._group = await self._run_in_thread(lambda: WeightGroup(meeting, info.rank_offset))
        return json_response({"message": "Weight transfer initialized"})

    async def start(self, http: HttpRequest) -> Response:
        async with self._lock:
            self._copy = {}
        return json_response({"message": "Weight update started"})

    async def update(self, http: HttpRequest) -> Response:
        info = protocol.decode(await http.body(), protocol.UpdateRequest).update_info
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
        version = protocol.decode(await http.body(), protocol.FinishRequest).weight_version
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

    def _allocate(self, info: protocol.UpdateInfo) -> dict[str, torch.Tensor]:
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
