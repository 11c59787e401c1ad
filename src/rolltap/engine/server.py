"""The embedded engine's process: vLLM's token API over HTTP, for one model on the CPU.

One uvicorn loop answers requests; one thread (`EngineLoop`) samples. The deltas of a step cross from the thread to the
event loop all together. A client that disconnects has its request aborted before the next step. Errors have vLLM's
shape, see `vllm_http`.

Weights come from a folder, or by vLLM's weight transfer API, as tensors over a process group:
`init_weight_transfer_engine` joins the group, `start_weight_update` begins a copy of the weights, each
`update_weights` receives the tensors that it names, and `finish_weight_update` swaps the whole copy in between two
steps. If anything fails before that, the weights in use stay. Other threads wait for the network, so sampling
continues meanwhile, unless it is paused.

Limitations: no chat endpoint (the proxy renders), no penalties or stop strings, one key for everything, which is
required unless the address is loopback (`keyed`).
"""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import starmap
from pathlib import Path
from typing import Any, TypeVar, get_args
from uuid import uuid4

import numpy as np
import torch
import uvicorn
from llguidance import LLMatcher
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, generate_latest
from starlette.applications import Starlette
from starlette.requests import Request as HttpRequest
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from tokenizers import Tokenizer

from rolltap.engine import protocol
from rolltap.engine.grammar import FreeThinking, Grammars, GrammarState
from rolltap.engine.model import CausalModel
from rolltap.engine.protocol import CompletionRequest, Draw, GenerateRequest, check_prompt, decode
from rolltap.engine.sampling import LOGPROBS_MODE, Outbox, SamplingRequest, TokenDelta, deliver
from rolltap.engine.scheduler import EngineLoop, PauseMode
from rolltap.engine.vllm_http import (
    EXCEPTION_HANDLERS,
    ScoredToken,
    completion,
    completion_choice,
    error_body,
    generate_choice,
    json_response,
    keyed,
    npy,
    prompt_logprobs,
    sse_event,
    usage,
)
from rolltap.errors import ConfigError, EngineUnavailable, InvalidRequest, NotFound
from rolltap.weight_transfer import Rendezvous, WeightGroup, dtype_of

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class ModelServerSettings:
    """How one engine process runs.

    `model` is a Hugging Face folder (`config.json`, `*.safetensors`). `name` is the name that requests use (empty: the
    folder's name). `port` 0 takes any free port. `slots` is how many requests are sampled together, `threads` the
    number of torch threads, `context` the longest sequence in tokens (0: the model's own limit), `key` what clients
    must send. `device` is torch's ("auto": a CUDA card where there is one, else the CPU; "mps" on a Mac), `dtype` is
    "float32", "bfloat16" or "auto" (bfloat16 on a card).
    """

    model: Path
    name: str = ""
    host: str = "127.0.0.1"
    port: int = 8100
    slots: int = 32
    threads: int = 1
    context: int = 0
    key: str = ""
    device: str = "auto"
    dtype: str = "auto"

    @property
    def served_name(self) -> str:
        return self.name or self.model.resolve().name

    @property
    def torch_device(self) -> str:
        """`ConfigError` if torch can't compute there."""
        name = "cuda" if torch.cuda.is_available() else "cpu"
        if self.device != "auto":
            name = self.device
        try:
            torch.empty(1, device=name)
        except (RuntimeError, AssertionError, NotImplementedError) as error:
            raise ConfigError(f"--device {name}: {str(error).splitlines()[0]}") from error
        return name

    @property
    def torch_dtype(self) -> torch.dtype:
        automatic = "bfloat16" if self.torch_device.startswith("cuda") else "float32"
        name = automatic if self.dtype == "auto" else self.dtype
        if name not in DTYPES:
            raise ConfigError(f"--dtype {name}: {' or '.join(DTYPES)}, or auto")
        return DTYPES[name]


DONE = b"data: [DONE]\n\n"
LONGEST_MASK = 2048
"""Ids of a token's sampling mask up to which it is sent, as in vLLM: one that cuts off next to nothing has them all."""
LOOP_FAILED = "the engine's loop failed while it sampled; restart the engine"
MakeBody = Callable[[list[dict[str, Any]], bool], dict[str, Any]]
"""The reply around choices; the flag is True for the first (or only) piece of a reply."""
MakeChoice = Callable[[int, TokenDelta, bool], dict[str, Any]]
"""A choice's JSON from its index and delta; the flag is True for the first piece of the choice."""


class Mailbox:
    """The deltas of one choice on their way to its client. Deltas that pile up are taken as one."""

    def __init__(self) -> None:
        self._delta: TokenDelta | None = None
        self._ready = asyncio.Event()

    def put(self, delta: TokenDelta) -> None:
        self._delta = delta if self._delta is None else self._delta + delta
        self._ready.set()

    async def take(self) -> TokenDelta:
        await self._ready.wait()
        self._ready.clear()
        delta, self._delta = self._delta, None
        assert delta is not None
        return delta


@dataclass(frozen=True, slots=True, eq=False)
class PendingReply:
    """A request that the loop samples for: its id, its prompt's length in tokens, and one mailbox per choice."""

    id: str
    prompt_tokens: int
    mailboxes: list[Mailbox]
    stream: bool
    include_usage: bool


class ModelServer:
    """The sampling routes over one engine loop, and the application with all routes."""

    def __init__(
        self, settings: ModelServerSettings, model: CausalModel, eos_ids: frozenset[int], tokenizer: Tokenizer
    ) -> None:
        self.settings = settings
        self.loop = EngineLoop(model, eos_ids, self._deliver, settings.slots, settings.context or None)
        self._events: asyncio.AbstractEventLoop | None = None
        self._tokenizer = tokenizer
        self._eos_ids = eos_ids
        self._grammars = Grammars(settings.model / "tokenizer.json", model.vocabulary)
        routes = [
            Route("/inference/v1/generate", self.generate, methods=["POST"]),
            Route("/v1/completions", self.completions, methods=["POST"]),
            *AdminRoutes(settings, self.loop, tokenizer).routes(),
            *WeightReceiver(self.loop).routes(),
        ]
        self.app = Starlette(routes=routes, lifespan=self._lifespan, exception_handlers=EXCEPTION_HANDLERS)

    @asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        self._events = asyncio.get_running_loop()
        self.loop.start()
        yield
        await asyncio.to_thread(self.loop.close)

    def _deliver(self, outbox: Outbox) -> None:
        assert self._events is not None
        self._events.call_soon_threadsafe(deliver, outbox)

    async def generate(self, http: HttpRequest) -> Response:
        request = decode(await http.body(), GenerateRequest)
        reply = await self._submit(request)
        with_logprobs = request.sampling_params.logprobs is not None

        def make_body(choices: list[dict[str, Any]], first: bool) -> dict[str, Any]:
            body = {"request_id": reply.id, "output_mode": "tokens", "choices": choices}
            if request.return_token_ids and first:
                body["prompt_token_ids"] = request.token_ids
            return body

        def make_choice(index: int, delta: TokenDelta, first: bool) -> dict[str, Any]:
            return generate_choice(
                index,
                delta.token_ids,
                scored(delta) if with_logprobs else None,
                delta.finish,
                stop_reason=delta.stop_reason,
                **written_masks(delta),
                sampling_mask=delta.masks if delta.masks and max(map(len, delta.masks)) <= LONGEST_MASK else None,
                routed_experts=None if delta.experts is None else npy(delta.experts.numpy().astype(np.int16)),
                weight_versions=delta.spans if delta.finish or delta.spans else None,
            )

        return await self._respond(http, reply, make_body, make_choice)

    async def completions(self, http: HttpRequest) -> Response:
        request = decode(await http.body(), CompletionRequest)
        if request.prompt_logprobs is not None and request.stream:
            raise InvalidRequest("prompt_logprobs come with a reply that is not streamed", param="prompt_logprobs")
        reply = await self._submit(request)
        extra_fields: dict[str, Any] = {}
        if request.prompt_logprobs is not None:
            scores = await asyncio.wrap_future(self.loop.score(request.prompt, request.prompt_logprobs))
            rows = zip(scores.token_ids, scores.logprobs, scores.tops, strict=True)
            extra_fields = {"prompt_logprobs": prompt_logprobs(list(starmap(ScoredToken, rows)))}

        def make_body(choices: list[dict[str, Any]], first: bool) -> dict[str, Any]:
            return completion(reply.id, self.settings.served_name, choices)

        def make_choice(index: int, delta: TokenDelta, first: bool) -> dict[str, Any]:
            text = self._tokenizer.decode(list(delta.token_ids), skip_special_tokens=request.skip_special_tokens)
            if request.return_token_ids:
                ids = {"token_ids": delta.token_ids, "prompt_token_ids": request.prompt if first else None}
            else:
                ids = {}
            rows = None if request.logprobs is None else scored(delta)
            stop = delta.stop_reason
            return completion_choice(index, text, rows, delta.finish, stop_reason=stop, **ids, **extra_fields)

        return await self._respond(http, reply, make_body, make_choice)

    async def _submit(self, request: GenerateRequest | CompletionRequest) -> PendingReply:
        served_name = self.settings.served_name
        if request.model not in (None, served_name):
            message = f"The model `{request.model}` does not exist; this engine serves `{served_name}`."
            raise NotFound(message, param="model")
        max_tokens = check_prompt(request, self.loop.model.vocabulary, self.loop.context)
        request_id = request.request_id or uuid4().hex
        mailboxes = [Mailbox() for _ in range(request.draw.n)]
        outputs = request.draw.structured_outputs
        lark = None if outputs is None else outputs.lark
        matcher = None if lark is None else await asyncio.to_thread(self._grammars.compile, lark)
        choices = [
            SamplingRequest(
                request_id,
                request.prompt_ids,
                request.draw.sampling(max_tokens, choice),
                mailbox.put,
                request.stream,
                None if outputs is None else self._grammar(matcher, request.draw, request.prompt_ids),
            )
            for choice, mailbox in enumerate(mailboxes)
        ]
        await asyncio.wrap_future(self.loop.submit(choices))
        include_usage = request.stream_options is not None and request.stream_options.include_usage
        return PendingReply(request_id, len(request.prompt_ids), mailboxes, request.stream, include_usage)

    def _grammar(self, matcher: LLMatcher | None, draw: Draw, prompt_ids: Sequence[int]) -> GrammarState:
        assert draw.structured_outputs is not None
        thinking = draw.structured_outputs.thinking
        ends = frozenset(draw.stop_token_ids) | (frozenset() if draw.ignore_eos else self._eos_ids)
        between = (
            None if thinking is None else FreeThinking(thinking.close, thinking.open, thinking.opened, thinking.budget)
        )
        state = self._grammars.start(matcher, ends, between)
        state.go_on(prompt_ids[len(prompt_ids) - draw.structured_outputs.begun :])
        return state

    async def _respond(
        self, http: HttpRequest, reply: PendingReply, make_body: MakeBody, make_choice: MakeChoice
    ) -> Response:
        if reply.stream:
            return StreamingResponse(self._stream(reply, make_body, make_choice), media_type="text/event-stream")
        sampling = asyncio.ensure_future(asyncio.gather(*(mailbox.take() for mailbox in reply.mailboxes)))
        disconnect = asyncio.ensure_future(_wait_for_disconnect(http))
        await asyncio.wait((sampling, disconnect), return_when=asyncio.FIRST_COMPLETED)
        disconnect.cancel()
        if not sampling.done():
            sampling.cancel()
            await asyncio.gather(sampling, return_exceptions=True)
            self.loop.abort([reply.id])
            return Response(status_code=499)
        deltas = sampling.result()
        if any(delta.finish == "error" for delta in deltas):
            raise EngineUnavailable(LOOP_FAILED)
        body = make_body([make_choice(index, delta, True) for index, delta in enumerate(deltas)], True)
        output_tokens = sum(len(delta.token_ids) for delta in deltas)
        body["usage"] = usage(reply.prompt_tokens, output_tokens, max(delta.cached_tokens for delta in deltas))
        return json_response(body)

    async def _stream(self, reply: PendingReply, make_body: MakeBody, make_choice: MakeChoice) -> AsyncIterator[bytes]:
        """Server-sent events, one per delta. If the stream ends early for any reason, the request is aborted."""
        queue: asyncio.Queue[tuple[int, TokenDelta]] = asyncio.Queue(1)
        sent, cached = [0] * len(reply.mailboxes), 0
        pumps = [asyncio.create_task(_pump(index, mailbox, queue)) for index, mailbox in enumerate(reply.mailboxes)]
        unfinished = set(range(len(pumps)))
        try:
            while unfinished:
                index, delta = await queue.get()
                first = not sent[index]
                sent[index] += len(delta.token_ids)
                cached = max(cached, delta.cached_tokens)
                if delta.finish == "error":
                    yield sse_event(error_body(EngineUnavailable(LOOP_FAILED)))
                    return
                yield sse_event(make_body([make_choice(index, delta, first)], first))
                if delta.finish:
                    unfinished.discard(index)
            if reply.include_usage:
                yield sse_event({**make_body([], False), "usage": usage(reply.prompt_tokens, sum(sent), cached)})
            yield DONE
        finally:
            for pump in pumps:
                pump.cancel()
            if unfinished:
                self.loop.abort([reply.id])


def scored(delta: TokenDelta) -> list[ScoredToken]:
    """The sampled ids with their log-probs; raises if these are not aligned."""
    tops = delta.tops or ((),) * len(delta.token_ids)
    return [ScoredToken(*row) for row in zip(delta.token_ids, delta.logprobs, tops, strict=True)]


def written_masks(delta: TokenDelta) -> dict[str, Any]:
    """The masks of a delta under a grammar; nothing without one (not vLLM's, which tells none that long)."""
    if len(delta.mask_rows) != len(delta.token_ids) or not delta.mask_rows:
        return {}
    return {"mask_rows": delta.mask_rows, "mask_table": npy(delta.mask_table) if len(delta.mask_table) else None}


async def _pump(index: int, mailbox: Mailbox, queue: asyncio.Queue[tuple[int, TokenDelta]]) -> None:
    finish: str | None = None
    while finish is None:
        delta = await mailbox.take()
        finish = delta.finish
        await queue.put((index, delta))


async def _wait_for_disconnect(http: HttpRequest) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass


def end_tokens(folder: Path) -> frozenset[int]:
    """The ids that end a turn: `generation_config.json`'s, else `config.json`'s."""
    for name in ("generation_config.json", "config.json"):
        path = folder / name
        ids = json.loads(path.read_text()).get("eos_token_id") if path.exists() else None
        if ids is not None:
            return frozenset(ids if isinstance(ids, list) else [ids])
    raise ConfigError(f"{folder}: neither generation_config.json nor config.json has an eos_token_id")


def build(settings: ModelServerSettings) -> ModelServer:
    """The server with its model loaded; `ConfigError` names what is missing."""
    torch.set_num_threads(settings.threads)
    model = CausalModel.load(settings.model, dtype=settings.torch_dtype, device=settings.torch_device)
    tokenizer = settings.model / "tokenizer.json"
    if not tokenizer.exists():
        raise ConfigError(f"{tokenizer}: not found; a model folder needs its tokenizer")
    return ModelServer(settings, model, end_tokens(settings.model), Tokenizer.from_file(str(tokenizer)))


def main(settings: ModelServerSettings) -> None:
    """Serves until a signal ends it. Prints the URL as its first line once requests are accepted."""
    server = build(settings)
    app = keyed(server.app, settings.host, settings.key)
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((settings.host, settings.port))
        except OSError as error:
            raise ConfigError(
                f"can't listen on {settings.host}:{settings.port} ({error}); take another --port"
            ) from error
        listener.listen(1024)
        host, port = listener.getsockname()[:2]
        print(f"http://{host}:{port}", flush=True)
        config = uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=2)
        uvicorn.Server(config).run(sockets=[listener])


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
