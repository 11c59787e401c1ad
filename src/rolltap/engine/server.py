"""The embedded engine's process: vLLM's token API over HTTP, for one model on the CPU.

One uvicorn loop answers requests; one thread (`EngineLoop`) samples. Deltas cross from the thread to the loop once a
step, all together. A client that goes away has its request aborted before the next step. Errors have vLLM's shape,
`{"error": {"message", "type", "param", "code"}}`.

Limits: no chat endpoint (the proxy renders), no penalties, stop strings or structured output, no authentication: it
listens on the loopback address unless told otherwise.
"""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, get_args
from uuid import uuid4

import msgspec
import torch
import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from tokenizers import Tokenizer

from rolltap.engine.model import Qwen3
from rolltap.engine.protocol import (
    AbortRequest,
    CompletionRequest,
    GenerateRequest,
    RpcRequest,
    VersionRequest,
    check_prompt,
    completion_choice,
    decode,
    generate_choice,
    usage,
)
from rolltap.engine.receiver import Receiver
from rolltap.engine.sampling import LOGPROBS_MODE
from rolltap.engine.scheduler import Delta, EngineLoop, PauseMode, Request
from rolltap.engine.settings import EngineSettings
from rolltap.errors import ConfigError, EngineUnavailable, InvalidRequest, NotFound, RolltapError

ERROR_TYPES = {400: "BadRequestError", 404: "NotFoundError", 405: "MethodNotAllowed", 503: "ServiceUnavailableError"}
DONE = b"data: [DONE]\n\n"


class Mailbox:
    """The deltas of one request on their way to its client; what piles up is taken as one."""

    def __init__(self) -> None:
        self._delta: Delta | None = None
        self._ready = asyncio.Event()

    def put(self, delta: Delta) -> None:
        self._delta = delta if self._delta is None else self._delta + delta
        self._ready.set()

    async def take(self) -> Delta:
        await self._ready.wait()
        self._ready.clear()
        delta, self._delta = self._delta, None
        assert delta is not None
        return delta


@dataclass(frozen=True, slots=True, eq=False)
class Job:
    """A request under way: its id, its prompt's length in tokens, and one mailbox a choice."""

    id: str
    prompt: int
    mailboxes: list[Mailbox]
    stream: bool
    include_usage: bool


class Server:
    """The routes, over one engine loop."""

    def __init__(self, settings: EngineSettings, model: Qwen3, eos_ids: frozenset[int], tokenizer: Tokenizer) -> None:
        self.settings = settings
        self.started = int(time.time())
        self._events: asyncio.AbstractEventLoop | None = None
        self._tokenizer = tokenizer
        self.loop = EngineLoop(model, eos_ids, self._deliver, settings.slots, settings.context or None)
        self._receiver = Receiver(self.loop)
        self.app = Starlette(routes=self._routes(), lifespan=self._lifespan, exception_handlers=_HANDLERS)

    def _routes(self) -> list[Route]:
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
            "/inference/v1/generate": self.generate,
            "/inference/v1/abort_requests": self.abort_requests,
            "/abort_requests": self.abort_requests,
            "/v1/completions": self.completions,
            "/pause": self.pause,
            "/resume": self.resume,
            "/collective_rpc": self.collective_rpc,
            "/update_weight_version": self.update_weight_version,
        }
        return [Route(path, to, methods=["GET"]) for path, to in get.items()] + [
            Route(path, to, methods=["POST"]) for path, to in (post | self._receiver.posts()).items()
        ]

    @asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        self._events = asyncio.get_running_loop()
        self.loop.start()
        yield
        await asyncio.to_thread(self.loop.close)

    def _deliver(self, outbox: list[tuple[Callable[[Delta], None], Delta]]) -> None:
        assert self._events is not None
        self._events.call_soon_threadsafe(_put_all, outbox)

    # What it is

    async def health(self, http: HttpRequest) -> Response:
        if self.loop.failure is not None:
            raise EngineUnavailable(f"the engine's loop failed: {self.loop.failure!r}; restart it")
        return Response()

    async def models(self, http: HttpRequest) -> Response:
        entry = {
            "id": self.settings.served_name,
            "object": "model",
            "created": self.started,
            "owned_by": "rolltap",
            "root": str(self.settings.model),
            "parent": None,
            "max_model_len": self.loop.context,
        }
        return _json({"object": "list", "data": [entry]})

    async def server_info(self, http: HttpRequest) -> Response:
        config = asdict(self.loop.model.config)
        return _json({"engine": "rolltap", "logprobs_mode": LOGPROBS_MODE, "slots": self.settings.slots, **config})

    async def weight_info(self, http: HttpRequest) -> Response:
        return _json({"weight_version": self.loop.version, "logprobs_mode": LOGPROBS_MODE})

    async def get_world_size(self, http: HttpRequest) -> Response:
        return _json({"world_size": 1})

    async def metrics(self, http: HttpRequest) -> Response:
        """Prometheus text with vLLM's names."""
        running, waiting = self.loop.load
        counts = self.loop.counts
        figures = {
            "num_requests_running": running,
            "num_requests_waiting": waiting,
            "prompt_tokens_total": counts["prompt_tokens"],
            "generation_tokens_total": counts["generation_tokens"],
            "prefix_cache_queries_total": counts["prompt_tokens"],
            "prefix_cache_hits_total": counts["prefix_hits"],
        }
        lines = [f"vllm:{name} {value}" for name, value in figures.items()]
        for name, value in counts.items():
            if name.startswith("finished:"):
                lines.append(f'vllm:request_success_total{{finished_reason="{name[9:]}"}} {value}')
        return PlainTextResponse("\n".join(lines) + "\n")

    # Sampling

    async def generate(self, http: HttpRequest) -> Response:
        request = decode(await http.body(), GenerateRequest)
        job = await self._submit(request)
        with_logprobs = request.sampling_params.logprobs is not None

        def body(choices: list[dict[str, Any]], first: bool) -> dict[str, Any]:
            reply = {"request_id": job.id, "output_mode": "tokens", "choices": choices}
            if request.return_token_ids and first:
                reply["prompt_token_ids"] = request.token_ids
            return reply

        def choice(index: int, delta: Delta, first: bool) -> dict[str, Any]:
            return generate_choice(index, delta, with_logprobs)

        return await self._reply(http, job, body, choice)

    async def completions(self, http: HttpRequest) -> Response:
        request = decode(await http.body(), CompletionRequest)
        job = await self._submit(request)

        def body(choices: list[dict[str, Any]], first: bool) -> dict[str, Any]:
            created = int(time.time())
            return {
                "id": job.id,
                "object": "text_completion",
                "created": created,
                "model": self.settings.served_name,
                "choices": choices,
            }

        def choice(index: int, delta: Delta, first: bool) -> dict[str, Any]:
            text = self._tokenizer.decode(list(delta.token_ids), skip_special_tokens=request.skip_special_tokens)
            return completion_choice(request, index, delta, text, first)

        return await self._reply(http, job, body, choice)

    async def _submit(self, request: GenerateRequest | CompletionRequest) -> Job:
        if request.model not in (None, self.settings.served_name):
            known = self.settings.served_name
            raise NotFound(f"The model `{request.model}` does not exist; this engine serves `{known}`.", param="model")
        max_tokens = check_prompt(request, self.loop.model.config.vocab_size, self.loop.context)
        job_id = request.request_id or uuid4().hex
        mailboxes = [Mailbox() for _ in range(request.draw.n)]
        await asyncio.wrap_future(
            self.loop.submit(
                [
                    Request(
                        job_id, request.prompt_ids, request.draw.sampling(max_tokens, choice), box.put, request.stream
                    )
                    for choice, box in enumerate(mailboxes)
                ]
            )
        )
        options = request.stream_options
        return Job(job_id, len(request.prompt_ids), mailboxes, request.stream, bool(options and options.include_usage))

    async def _reply(self, http: HttpRequest, job: Job, body: MakeBody, choice: MakeChoice) -> Response:
        if job.stream:
            return StreamingResponse(self._stream(job, body, choice), media_type="text/event-stream")
        gathered = asyncio.ensure_future(asyncio.gather(*(box.take() for box in job.mailboxes)))
        gone = asyncio.ensure_future(_disconnected(http))
        await asyncio.wait((gathered, gone), return_when=asyncio.FIRST_COMPLETED)
        gone.cancel()
        if not gathered.done():
            gathered.cancel()
            self.loop.abort([job.id])
            return Response(status_code=499)
        deltas = gathered.result()
        if any(delta.finish == "error" for delta in deltas):
            raise EngineUnavailable("the engine's loop failed while it sampled; restart it")
        reply = body([choice(index, delta, True) for index, delta in enumerate(deltas)], True)
        completion = sum(len(delta.token_ids) for delta in deltas)
        reply["usage"] = usage(job.prompt, completion, max(delta.cached_tokens for delta in deltas))
        return _json(reply)

    async def _stream(self, job: Job, body: MakeBody, choice: MakeChoice) -> AsyncIterator[bytes]:
        """Server-sent events, a delta each; whatever ends it early aborts the request."""
        queue: asyncio.Queue[tuple[int, Delta]] = asyncio.Queue(1)
        sent, cached = [0] * len(job.mailboxes), 0
        pumps = [asyncio.create_task(_pump(index, box, queue)) for index, box in enumerate(job.mailboxes)]
        unfinished = set(range(len(pumps)))
        try:
            while unfinished:
                index, delta = await queue.get()
                first = not sent[index]
                sent[index] += len(delta.token_ids)
                cached = max(cached, delta.cached_tokens)
                if delta.finish == "error":
                    yield _event(_error_body(EngineUnavailable("the engine's loop failed while it sampled")))
                    return
                yield _event(body([choice(index, delta, first)], first))
                if delta.finish:
                    unfinished.discard(index)
            if job.include_usage:
                yield _event({**body([], False), "usage": usage(job.prompt, sum(sent), cached)})
            yield DONE
        finally:
            for pump in pumps:
                pump.cancel()
            if unfinished:
                self.loop.abort([job.id])

    # Weights

    async def pause(self, http: HttpRequest) -> Response:
        mode = http.query_params.get("mode", "abort")
        if mode not in get_args(PauseMode):
            raise InvalidRequest(f"mode is {mode!r}; it may be one of {get_args(PauseMode)}", param="mode")
        chosen: Any = mode
        await asyncio.wrap_future(self.loop.pause(chosen))
        return _json({"status": "paused"})

    async def resume(self, http: HttpRequest) -> Response:
        await asyncio.wrap_future(self.loop.resume())
        return _json({"status": "resumed"})

    async def is_paused(self, http: HttpRequest) -> Response:
        return _json({"is_paused": self.loop.paused})

    async def collective_rpc(self, http: HttpRequest) -> Response:
        """Loads weights. A folder that can't be used is a 400, and the weights in use stay."""
        request = decode(await http.body(), RpcRequest)
        try:
            await asyncio.wrap_future(self.loop.reload(Path(request.kwargs.weights_path)))
        except ConfigError as error:
            raise InvalidRequest(f"{error}; the weights in use stay", param="kwargs.weights_path") from error
        return _json({"results": [None]})

    async def update_weight_version(self, http: HttpRequest) -> Response:
        request = decode(await http.body(), VersionRequest)
        await asyncio.wrap_future(self.loop.set_version(request.new_version))
        return _json({"success": True, "new_version": request.new_version})

    async def abort_requests(self, http: HttpRequest) -> Response:
        request = decode(await http.body(), AbortRequest)
        aborted: Future[int] = self.loop.abort(request.request_ids or None)
        return _json({"status": "aborted", "aborted": await asyncio.wrap_future(aborted)})


MakeBody = Callable[[list[dict[str, Any]], bool], dict[str, Any]]
MakeChoice = Callable[[int, Delta, bool], dict[str, Any]]


def _put_all(outbox: list[tuple[Callable[[Delta], None], Delta]]) -> None:
    for sink, delta in outbox:
        sink(delta)


async def _pump(index: int, mailbox: Mailbox, queue: asyncio.Queue[tuple[int, Delta]]) -> None:
    finish: str | None = None
    while finish is None:
        delta = await mailbox.take()
        finish = delta.finish
        await queue.put((index, delta))


async def _disconnected(http: HttpRequest) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass


def _json(value: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")


def _event(value: Any) -> bytes:
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


def _error_body(error: RolltapError) -> dict[str, Any]:
    kind = ERROR_TYPES.get(error.status, "InternalServerError")
    return {"error": {"message": error.message, "type": kind, "param": error.param, "code": error.status}}


async def _on_error(http: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, RolltapError)
    return _json(_error_body(error), error.status)


async def _on_http_error(http: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    kind = ERROR_TYPES.get(error.status_code, "BadRequestError")
    body = {"message": f"{http.method} {http.url.path}: {error.detail}", "type": kind, "param": None}
    return _json({"error": {**body, "code": error.status_code}}, error.status_code)


_HANDLERS: dict[Any, Any] = {RolltapError: _on_error, HTTPException: _on_http_error}


def end_tokens(folder: Path) -> frozenset[int]:
    """The ids that end a turn: `generation_config.json`'s, else `config.json`'s."""
    for name in ("generation_config.json", "config.json"):
        path = folder / name
        found = json.loads(path.read_text()).get("eos_token_id") if path.exists() else None
        if found is not None:
            return frozenset(found if isinstance(found, list) else [found])
    raise ConfigError(f"{folder}: neither generation_config.json nor config.json has an eos_token_id")


def build(settings: EngineSettings) -> Server:
    """The server, its model loaded; `ConfigError` names what is missing."""
    torch.set_num_threads(settings.threads)
    model = Qwen3.load(settings.model)
    tokenizer = settings.model / "tokenizer.json"
    if not tokenizer.exists():
        raise ConfigError(f"{tokenizer}: not found; a model folder needs its tokenizer")
    return Server(settings, model, end_tokens(settings.model), Tokenizer.from_file(str(tokenizer)))


def main(settings: EngineSettings) -> None:
    """Serves until it is told to stop. The first line on standard output is the URL, when requests are accepted."""
    server = build(settings)
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((settings.host, settings.port))
        except OSError as error:
            raise ConfigError(f"can't listen on {settings.host}:{settings.port} ({error}); set another port") from error
        listener.listen(1024)
        host, port = listener.getsockname()[:2]
        print(f"http://{host}:{port}", flush=True)
        config = uvicorn.Config(server.app, log_level="warning", access_log=False, timeout_graceful_shutdown=2)
        uvicorn.Server(config).run(sockets=[listener])
