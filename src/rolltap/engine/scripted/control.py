"""The scripted engine's other routes: what it is, its weights, its journal. One set for each kind of server."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from rolltap.engine.scripted.http import error_body
from rolltap.engine.scripted.sampling import Model

Endpoint = Callable[[Request], Awaitable[Response]]


@dataclass(frozen=True, slots=True)
class Control:
    """The endpoints over one model. `name` is what requests call it, `mode` its log-probs mode."""

    model: Model
    name: str
    mode: str

    def routes(self, wire: str) -> list[Route]:
        """The routes of a server of this kind; routes of other kinds are not there, as with the real ones."""
        shared = [
            Route("/health", self.health),
            Route("/v1/models", self.models),
            Route("/scripted/log", self.log),
        ]
        kinds: dict[str, Callable[[str], list[Route]]] = {
            "vllm": self._vllm,
            "sglang": self._sglang,
            "llamacpp": lambda _: [Route("/props", self.props)],
            "openai": lambda _: [],
            "tinker": self._tinker,
        }
        return shared + kinds[wire.split("-")[0]](wire)

    def _vllm(self, wire: str) -> list[Route]:
        posts: dict[str, Endpoint] = {
            "/tokenize": self.tokenize,
            "/pause": self.pause,
            "/resume": self.resume,
            "/collective_rpc": self.collective_rpc,
            "/v1/load_lora_adapter": self.load_lora_adapter,
            "/reset_prefix_cache": self.done,
            "/init_weight_transfer_engine": self.done,
            "/start_weight_update": self.done,
            "/update_weights": self.done,
            "/finish_weight_update": self.finish_weight_update,
            "/shutdown_weight_transfer_engine": self.done,
            "/update_weight_version": self.update_weight_version,
            "/abort_requests": self.abort_requests,
            "/inference/v1/abort_requests": self.abort_requests,
        }
        if wire.startswith("vllm-completions"):
            posts |= {"/inference/v1/generate": self.closed, "/inference/v1/abort_requests": self.closed}
        gets: dict[str, Endpoint] = {
            "/weight_info": self.weight_info,
            "/is_paused": self.is_paused,
            "/get_world_size": self.get_world_size,
        }
        return _routes(gets, posts)

    def _sglang(self, wire: str) -> list[Route]:
        posts: dict[str, Endpoint] = {
            "/tokenize": self.tokenize,
            "/pause_generation": self.pause_generation,
            "/continue_generation": self.resume,
            "/update_weights_from_disk": self.update_weights_from_disk,
            "/update_weight_version": self.update_weight_version,
            "/flush_cache": self.done,
            "/abort_request": self.abort_request,
        }
        return _routes({"/model_info": self.model_info, "/server_info": self.server_info}, posts)

    def _tinker(self, wire: str) -> list[Route]:
        posts: dict[str, Endpoint] = {
            "/api/v1/create_session": self.session,
            "/api/v1/create_sampling_session": self.session,
            "/api/v1/asample": self.asample,
            "/api/v1/cancel_future": self.done,
        }
        return _routes({"/api/v1/get_server_capabilities": self.capabilities}, posts)

    # What it is

    async def health(self, request: Request) -> Response:
        return Response()

    async def models(self, request: Request) -> Response:
        names = [self.name, *self.model.weights.adapters]
        about = {"object": "model", "created": int(time.time()), "owned_by": "rolltap"}
        entries = [{"id": name, **about, "max_model_len": self.model.context} for name in names]
        return JSONResponse({"object": "list", "data": entries})

    async def log(self, request: Request) -> Response:
        """Every request from the `first` on: its ids, what it continues, and whether it extends it token for token."""
        entries = self.model.journal.as_json(first=int(request.query_params.get("first", 0)))
        broken = sum(entry["extends"] is False for entry in entries)
        value = {"count": self.model.journal.count, "broken": broken, "requests": entries}
        return Response(msgspec.json.encode(value), media_type="application/json")

    async def tokenize(self, request: Request) -> Response:
        ids = self.model.writer.tokenizer.encode((await request.json())["prompt"])
        return JSONResponse({"tokens": ids, "count": len(ids), "max_model_len": self.model.context})

    # vLLM

    async def closed(self, request: Request) -> Response:
        message = "Scale-out endpoints are disabled. Restart vllm serve with --enable-scale-out to enable them."
        return JSONResponse(error_body(403, message), 403)

    async def weight_info(self, request: Request) -> Response:
        weights = self.model.weights
        return JSONResponse({"weight_version": weights.version, "weight_digest": weights.digest})

    async def is_paused(self, request: Request) -> Response:
        return JSONResponse({"is_paused": self.model.weights.paused})

    async def get_world_size(self, request: Request) -> Response:
        return JSONResponse({"world_size": 1})

    async def finish_weight_update(self, request: Request) -> Response:
        """It holds no weights, so it joins no group: what it is told to receive it has."""
        self.model.weights.version = (await request.json()).get("weight_version") or self.model.weights.version
        return JSONResponse({"message": "Weight update finished"})

    async def pause(self, request: Request) -> Response:
        mode = request.query_params.get("mode", "abort")
        if mode not in ("abort", "wait", "keep"):
            return _refused(f"mode is {mode!r}; it may be abort, wait or keep")
        await self.model.weights.pause(mode)
        return JSONResponse({"status": "paused"})

    async def resume(self, request: Request) -> Response:
        self.model.weights.resume()
        return JSONResponse({"status": "resumed"})

    async def collective_rpc(self, request: Request) -> Response:
        body = await request.json()
        path = (body.get("kwargs") or {}).get("weights_path")
        if body.get("method") != "reload_weights" or not isinstance(path, str):
            return _refused("the one method is reload_weights, with kwargs.weights_path")
        self.model.weights.load(path)
        return JSONResponse({"results": [None]})

    async def load_lora_adapter(self, request: Request) -> Response:
        """As vLLM, which answers in words; an adapter that can't be read leaves the loaded one as it is."""
        body = await request.json()
        name, path = body.get("lora_name"), body.get("lora_path")
        if not isinstance(name, str) or not isinstance(path, str) or name == self.name:
            return _refused("lora_name and lora_path must be provided, and the name not be that of the model")
        if name in self.model.weights.adapters and not body.get("load_inplace"):
            return _refused(f"The lora adapter '{name}' has already been loaded.")
        if not (Path(path) / "adapter_config.json").is_file():
            return JSONResponse(error_body(404, f"No adapter found for {path}"), 404)
        self.model.weights.adapters[name] = path
        return PlainTextResponse(f"Success: LoRA adapter '{name}' added successfully.")

    async def update_weight_version(self, request: Request) -> Response:
        version = (await request.json()).get("new_version")
        if not isinstance(version, str) or not version:
            return _refused("new_version must be a string")
        self.model.weights.version = version
        return JSONResponse({"success": True, "new_version": version})

    async def abort_requests(self, request: Request) -> Response:
        ids = (await request.json()).get("request_ids")
        return JSONResponse({"status": "aborted", "aborted": self.model.weights.abort(ids)})

    async def done(self, request: Request) -> Response:
        return JSONResponse({"success": True})

    # llama.cpp

    async def props(self, request: Request) -> Response:
        return JSONResponse({"default_generation_settings": {"n_ctx": self.model.context}})

    # Tinker

    async def capabilities(self, request: Request) -> Response:
        model = {"model_name": self.name, "max_context_length": self.model.context, "sampleable": True}
        return JSONResponse({"supported_models": [model]})

    async def session(self, request: Request) -> Response:
        return JSONResponse({"session_id": "session", "sampling_session_id": "session:sample:0"})

    async def asample(self, request: Request) -> Response:
        """The promise is the request itself, see the wire."""
        return JSONResponse({"request_id": (await request.body()).decode(), "sample_sequence_ids": ["sequence"]})

    # SGLang

    async def model_info(self, request: Request) -> Response:
        return JSONResponse({"served_model_name": self.name, "weight_version": self.model.weights.version})

    async def server_info(self, request: Request) -> Response:
        return JSONResponse({"context_length": self.model.context, "served_model_name": self.name})

    async def pause_generation(self, request: Request) -> Response:
        mode = (await request.json()).get("mode", "abort")
        modes = {"abort": "abort", "retract": "keep", "in_place": "keep"}
        if mode not in modes:
            return _refused(f"mode is {mode!r}; it may be {', '.join(modes)}")
        await self.model.weights.pause(modes[mode])
        return JSONResponse({"status": "ok", "message": "Generation paused successfully."})

    async def update_weights_from_disk(self, request: Request) -> Response:
        body = await request.json()
        if not isinstance(body.get("model_path"), str):
            return _refused("model_path must be a string")
        self.model.weights.load(body["model_path"])
        if body.get("weight_version") is not None:
            self.model.weights.version = str(body["weight_version"])
        if not body.get("keep_pause"):
            self.model.weights.resume()
        return JSONResponse(
            {"success": True, "message": "Succeeded to update model weights.", "num_paused_requests": 0}
        )

    async def abort_request(self, request: Request) -> Response:
        body = await request.json()
        self.model.weights.abort(None if body.get("abort_all") else [body.get("rid", "")])
        return Response()


def _routes(gets: dict[str, Endpoint], posts: dict[str, Endpoint]) -> list[Route]:
    return [Route(path, to) for path, to in gets.items()] + [
        Route(path, to, methods=["POST"]) for path, to in posts.items()
    ]


def _refused(message: str) -> Response:
    return JSONResponse(error_body(400, message), 400)
