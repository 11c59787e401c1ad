"""The endpoint's routes: client sessions and saved weights, models in training, sampling sessions.

Each request to a model in training has a number, and the requests run in this order. A refused request takes its place
in the order, too, since the client has already sent later ones, which wait for it. So most of a request is checked only
when it runs.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from typing import TypeVar

import msgspec
from pydantic import BaseModel, ValidationError
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from tinker import types
from tinker.types.shared.untyped_api_future import UntypedAPIFuture

from rolltap.errors import BodyTooLarge, InvalidRequest, NotFound
from rolltap.trainer_client.endpoint.lanes import PendingResults, ResultBody
from rolltap.trainer_client.endpoint.messages import read_loss_request, write_loss_output
from rolltap.trainer_client.endpoint.model import BaseModelInfo, TrainedModel
from rolltap.trainer_client.endpoint.samplers import Samplers, sample_work
from rolltap.trainer_client.endpoint.saved import (
    EPHEMERAL,
    SCHEME,
    Kind,
    Library,
    SavedMetadata,
    SavedWeights,
    moment,
    parse_path,
)
from rolltap.trainer_client.endpoint.sessions import SamplerSource, Sessions, TrainingRun

POLL_S = 30.0
"""Seconds that one poll waits for a result. It is shorter than the client's timeout of 45 s."""


class WeightsPath(BaseModel):
    tinker_path: str


class ClientRoutes:
    def __init__(self, base: BaseModelInfo, library: Library, sessions: Sessions, results: PendingResults) -> None:
        self._base, self._library, self._sessions, self._results = base, library, sessions, results

    def routes(self) -> Iterator[tuple[str, str, Handler]]:
        yield "GET", "/healthz", self.health
        yield "GET", "/get_server_capabilities", self.capabilities
        yield "POST", "/client/config", self.config
        yield "POST", "/client/dynamic_config", self.dynamic_config
        yield "POST", "/telemetry", self.telemetry
        yield "POST", "/create_session", self.create
        yield "POST", "/session_heartbeat", self.heartbeat
        yield "GET", "/sessions/{session}", self.session
        yield "POST", "/sessions/{session}/finish", self.finish
        yield "POST", "/weights_info", self.weights_info
        yield "GET", "/training_runs/{model}", self.training_run
        yield "GET", "/training_runs/{model}/checkpoints", self.checkpoints
        yield "POST", "/retrieve_future", self.retrieve
        yield "DELETE", "/training_runs/{model}/checkpoints/{kind}/{name}", self.delete

    async def health(self, http: Request) -> Response:
        return reply(types.HealthResponse(status="ok"))

    async def capabilities(self, http: Request) -> Response:
        context = self._base.config["max_position_embeddings"]
        model = types.SupportedModel(
            model_name=self._base.name, max_context_length=context, trainable=True, sampleable=True
        )
        return reply(types.GetServerCapabilitiesResponse(supported_models=[model]))

    async def config(self, http: Request) -> Response:
        """The SDK's feature flags, at their defaults. Closes the connection, because the SDK never closes this one."""
        response = reply(types.ClientConfigResponse())
        response.headers["connection"] = "close"
        return response

    async def dynamic_config(self, http: Request) -> Response:
        return reply(types.ClientDynamicConfigResponse(sample_cancel_enabled=True))

    async def telemetry(self, http: Request) -> Response:
        """Accepts the SDK's telemetry and drops it."""
        await read(http)
        return reply(types.TelemetryResponse(status="accepted"))

    async def create(self, http: Request) -> Response:
        parse(await read(http), types.CreateSessionRequest)
        return reply(types.CreateSessionResponse(session_id=self._sessions.open().id))

    async def heartbeat(self, http: Request) -> Response:
        """Keeps the session alive. Answers 410 for an unknown session, upon which the SDK stops its heartbeats."""
        request = parse(await read(http), types.SessionHeartbeatRequest)
        try:
            self._sessions.find(request.session_id)
        except NotFound as error:
            return JSONResponse({"detail": error.message}, 410)
        return reply(types.SessionHeartbeatResponse())

    async def session(self, http: Request) -> Response:
        session = self._sessions.find(http.path_params["session"])
        return reply(types.GetSessionResponse(training_run_ids=[*session.runs], sampler_ids=[*session.samplers]))

    async def finish(self, http: Request) -> Response:
        """Ends a session. Its saved weights stay."""
        session = http.path_params["session"]
        self._sessions.end(session)
        self._results.forget(session)
        return JSONResponse({})

    async def weights_info(self, http: Request) -> Response:
        path = parse(await read(http), WeightsPath).tinker_path
        metadata = self._library.metadata(parse_path(path, "weights"))
        return reply(
            types.WeightsInfoResponse(
                base_model=metadata.base_model,
                is_lora=metadata.rank > 0,
                lora_rank=metadata.rank or None,
                train_unembed=metadata.train_unembed,
                train_mlp=metadata.train_mlp,
                train_attn=metadata.train_attn,
            )
        )

    async def training_run(self, http: Request) -> Response:
        model = http.path_params["model"]
        saved = [(weights, metadata) for weights, metadata in self._library.all(model) if weights.model == model]
        run = self._sessions.known(model)
        if run is None and not saved:
            raise NotFound(f"no model {model!r}: it is not in training, and nothing is saved of it")
        metadata = run.metadata if run is not None else saved[-1][1]
        last = {
            kind: max(
                (self._library.checkpoint(weights, metadata) for weights, metadata in saved if weights.kind == kind),
                key=lambda checkpoint: checkpoint.time,
                default=None,
            )
            for kind in ("weights", "sampler_weights")
        }
        times = [metadata.created for _, metadata in saved] + ([run.used] if run is not None else [])
        return reply(
            types.TrainingRun(
                training_run_id=model,
                base_model=metadata.base_model,
                model_owner="rolltap",
                is_lora=metadata.rank > 0,
                lora_rank=metadata.rank or None,
                last_request_time=moment(max(times)),
                last_checkpoint=last["weights"],
                last_sampler_checkpoint=last["sampler_weights"],
                user_metadata=metadata.run_metadata,
            )
        )

    async def checkpoints(self, http: Request) -> Response:
        saved = self._library.all(http.path_params["model"])
        checkpoints = [self._library.checkpoint(weights, metadata) for weights, metadata in saved]
        return reply(types.CheckpointsListResponse(checkpoints=checkpoints))

    async def delete(self, http: Request) -> Response:
        model, kind, name = (http.path_params[part] for part in ("model", "kind", "name"))
        self._library.remove(parse_path(f"{SCHEME}{model}/{kind}/{name}", kind))
        return Response(status_code=204)

    async def retrieve(self, http: Request) -> Response:
        """The result of a request. Answers 408 if there is none after `POLL_S`, upon which the SDK polls again."""
        id = parse(await read(http), types.FutureRetrieveRequest).request_id
        result = await self._results.wait(id, POLL_S)
        if result is None:
            return JSONResponse({"type": "try_again", "request_id": id, "queue_state": "active"}, 408)
        return Response(result.body, media_type=result.media_type)


MOST_RANK = 1024
Work = Callable[[TrainingRun, TrainedModel, bytes], ResultBody]
"""The work of one request. Its last argument is the request's body."""


class Numbered(BaseModel):
    """The fields that every request to a model has."""

    model_id: str
    seq_id: int


class TrainingRoutes:
    def __init__(self, base: BaseModelInfo, library: Library, sessions: Sessions, results: PendingResults) -> None:
        self._base, self._library, self._sessions, self._results = base, library, sessions, results

    def routes(self) -> Iterator[tuple[str, str, Handler]]:
        yield "POST", "/create_model", self.create
        yield "POST", "/get_info", self.info
        yield "POST", "/load_weights", self.load
        yield "POST", "/forward_backward", self.forward_backward
        yield "POST", "/optim_step", partial(self._in_turn, _optim_step)
        yield "POST", "/save_weights", partial(self._in_turn, self._save)
        yield "POST", "/save_weights_for_sampler", partial(self._in_turn, self._save_for_sampler)

    async def create(self, http: Request) -> Response:
        """Creates a model from the base model: with adapters, or without `lora_config` with all weights trained."""
        body = await read(http)
        request = parse(body, types.CreateModelRequest)
        self._base.check_name(request.base_model)
        _check_optimiser(request.optimizer_config)
        metadata, seed = SavedMetadata(self._base.name, rank=0), None
        if request.lora_config is not None:
            lora = request.lora_config
            metadata, seed = (
                SavedMetadata(self._base.name, lora.rank, lora.train_mlp, lora.train_attn, lora.train_unembed),
                lora.seed,
            )
        metadata = msgspec.structs.replace(metadata, run_metadata=request.user_metadata)
        if not 0 <= metadata.rank <= MOST_RANK:
            raise InvalidRequest(f"lora_config: the rank is {metadata.rank}; 0 (all weights) to {MOST_RANK} are taken")
        self._base.settings_for(metadata)
        build = partial(TrainedModel, self._base, metadata, seed)
        return self._begin(f"{request.session_id}:train:{request.model_seq_id}", body, metadata, build)

    async def info(self, http: Request) -> Response:
        run = self._sessions.run(parse(await read(http), types.GetInfoRequest).model_id)
        rank, name = run.metadata.rank, self._base.name
        data = types.ModelData(arch=self._base.config["architectures"][0], model_name=name, tokenizer_id=name)
        return reply(
            types.GetInfoResponse(
                model_data=data, model_id=run.id, is_lora=rank > 0, lora_rank=rank or None, model_name=name
            )
        )

    async def load(self, http: Request) -> Response:
        """Loads saved weights into a model in training or, if the request has a session, into a new model."""
        body = await read(http)
        request = parse(body, types.LoadWeightsRequest)
        if request.session_id is None:
            return self._queue(request.model_id or "", request.seq_id or 0, body, self._load_into)
        metadata, build = self._builder(request)
        metadata = msgspec.structs.replace(metadata, run_metadata=request.user_metadata)
        return self._begin(f"{request.session_id}:train:{request.model_seq_id}", body, metadata, build)

    async def forward_backward(self, http: Request) -> Response:
        body = await read(http)
        message = read_loss_request(body)

        def work(run: TrainingRun, model: TrainedModel, body: bytes) -> ResultBody:
            logprobs, loss = model.compute(message)
            return ResultBody.protobuf(write_loss_output(logprobs, {"loss:sum": loss}))

        return self._queue(message.model_id, message.seq_id, body, work)

    def _save(self, run: TrainingRun, model: TrainedModel, body: bytes) -> ResultBody:
        request = parse(body, types.SaveWeightsRequest)
        saved = _saved_weights(run, "weights", request.path or f"{request.seq_id}")
        model.save_state(self._library.reserve_name(saved, overwrite=request.overwrite), _metadata(run, request))
        return ResultBody.of(types.SaveWeightsResponse(path=saved.path, type="save_weights"))

    def _save_for_sampler(self, run: TrainingRun, model: TrainedModel, body: bytes) -> ResultBody:
        """Saves sampler weights. Also opens a sampling session on them if the request has a number for one."""
        request = parse(body, types.SaveWeightsForSamplerRequest)
        saved = _saved_weights(run, "sampler_weights", request.path or f"{EPHEMERAL}{request.seq_id}")
        folder = self._library.reserve_name(saved)
        model.save_sampler(folder, _metadata(run, request))
        if request.sampling_session_seq_id is None:
            return ResultBody.of(types.SaveWeightsForSamplerResponseInternal(path=saved.path))
        self._library.forget_snapshots(run.id)
        source = SamplerSource(folder, saved.path, run.id if request.kind == "inflight" else "")
        id = self._sessions.of(run.id).add_sampler(request.sampling_session_seq_id, source)
        return ResultBody.of(types.SaveWeightsForSamplerResponseInternal(sampling_session_id=id))

    def _load_into(self, run: TrainingRun, model: TrainedModel, body: bytes) -> ResultBody:
        """Replaces the run's model by one with the saved weights. Raises `InvalidRequest` if they train other layers.

        The description of the run is what it saves, so it must be the model's.
        """
        request = parse(body, types.LoadWeightsRequest)
        metadata, build = self._builder(request)
        own = run.metadata.trained
        differing = [
            f"{name} is {value} there and {own[name]} in this model"
            for name, value in metadata.trained.items()
            if name in own and value != own[name]
        ]
        if differing:
            raise InvalidRequest(f"{request.path} trains other weights: {', '.join(differing)}")
        run.model = build()
        return ResultBody.of(types.LoadWeightsResponse(path=request.path, model_id=run.id))

    def _builder(self, request: types.LoadWeightsRequest) -> tuple[SavedMetadata, Callable[[], TrainedModel]]:
        """The description of the saved weights, and a function that builds a model from them.

        Raises `InvalidRequest` or `NotFound` if they can't be loaded here.
        """
        if request.weights_access_token:
            raise InvalidRequest("weights_access_token: there is one account here", param="weights_access_token")
        if request.optimizer_config is not None:
            _check_optimiser(request.optimizer_config)
        saved = parse_path(request.path, "weights")
        metadata = self._library.metadata(saved)
        self._base.check_name(request.base_model or metadata.base_model)
        metadata = msgspec.structs.replace(metadata, base_model=self._base.name)  # what is saved of it opens again
        folder = self._library.folder(saved)
        return metadata, partial(TrainedModel, self._base, metadata, None, folder, optimiser=request.optimizer)

    def _begin(self, id: str, body: bytes, metadata: SavedMetadata, build: Callable[[], TrainedModel]) -> Response:
        """Registers a new model with this id, and queues `build`. A repeat of the request only gets the promise again.

        Raises `InvalidRequest` if too many models are in training.
        """
        session = self._sessions.of(id)
        if id not in session.runs:
            self._sessions.make_room()
        if self._results.expect(f"{id}:new", body):
            run = session.runs[id] = TrainingRun(id, metadata)

            def work() -> ResultBody:
                try:
                    run.model = build()
                except Exception:
                    session.runs.pop(id, None)
                    raise
                return ResultBody(msgspec.json.encode({"model_id": id}))

            self._results.compute(f"{id}:new", work)
        return promise(f"{id}:new", id)

    async def _in_turn(self, work: Work, http: Request) -> Response:
        """Queues a request with a JSON body; `work` parses it."""
        body = await read(http)
        request = parse(body, Numbered)
        return self._queue(request.model_id, request.seq_id, body, work)

    def _queue(self, model_id: str, number: int, body: bytes, work: Work) -> Response:
        """Adds request `number` to the model's lane, and answers with a promise. A repeat is not added again."""
        run = self._sessions.run(model_id)
        if number < 1:
            raise InvalidRequest(f"seq_id is {number}; requests to a model are numbered from 1", param="seq_id")
        id = f"{run.id}:{number}"

        def run_work() -> ResultBody:
            assert run.model is not None
            return work(run, run.model, body)

        if self._results.expect(id, body):
            run.lane.add(number, partial(self._results.compute, id, run_work))
        return promise(id, run.id)


def _optim_step(run: TrainingRun, model: TrainedModel, body: bytes) -> ResultBody:
    """Makes a step. Drops the gradient also if the request can't be parsed: it must not leak into the next step."""
    try:
        params = parse(body, types.OptimStepRequest).optim_params
    except InvalidRequest as error:
        model.drop_gradient()
        raise InvalidRequest(f"no step: {error.message}") from error
    return ResultBody.of(types.OptimStepResponse(metrics=model.optim_step(params)))


def _saved_weights(run: TrainingRun, kind: Kind, name: str) -> SavedWeights:
    """The name of the run's weights. Raises `InvalidRequest` if `name` has characters that are not allowed."""
    return parse_path(SavedWeights(run.id, kind, name).path, kind)


def _metadata(
    run: TrainingRun, request: types.SaveWeightsRequest | types.SaveWeightsForSamplerRequest
) -> SavedMetadata:
    """The run's description with the request's expiry and metadata."""
    expires = None if request.ttl_seconds is None else time.time() + request.ttl_seconds
    return msgspec.structs.replace(run.metadata, expires=expires, user_metadata=request.user_metadata)


def _check_optimiser(config: types.OptimizerConfig) -> None:
    """Raises `InvalidRequest` for any optimiser except AdamW."""
    if config.type != "adamw":
        raise InvalidRequest(
            f"optimizer_config: {config.type!r} is not supported here, adamw is", param="optimizer_config"
        )


class CancelRequest(BaseModel):
    request_id: str


class SamplingRoutes:
    def __init__(
        self, base: BaseModelInfo, library: Library, sessions: Sessions, results: PendingResults, samplers: Samplers
    ) -> None:
        self._base, self._library, self._sessions = base, library, sessions
        self._results, self._samplers = results, samplers
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def routes(self) -> Iterator[tuple[str, str, Handler]]:
        yield "POST", "/create_sampling_session", self.create
        yield "GET", "/samplers/{sampler}", self.sampler
        yield "POST", "/asample", self.sample
        yield "POST", "/cancel_future", self.cancel

    async def create(self, http: Request) -> Response:
        """Creates a sampling session for saved weights or for the base model."""
        request = parse(await read(http), types.CreateSamplingSessionRequest)
        session = self._sessions.find(request.session_id)
        if request.model_path is not None:
            saved = parse_path(request.model_path, "sampler_weights")
            self._library.metadata(saved)
            source = SamplerSource(self._library.folder(saved), saved.path)
        else:
            self._base.check_name(request.base_model or "")
            source = SamplerSource(self._base.settings.model)
        id = session.add_sampler(request.sampling_session_seq_id, source)
        return reply(types.CreateSamplingSessionResponse(sampling_session_id=id))

    async def sampler(self, http: Request) -> Response:
        id = http.path_params["sampler"]
        path = self._sessions.sampler(id).path
        return reply(types.GetSamplerResponse(sampler_id=id, base_model=self._base.name, model_path=path))

    async def sample(self, http: Request) -> Response:
        """Starts sampling and answers with a promise. A repeat of a request starts nothing."""
        body = await read(http)
        request = parse(body, types.SampleRequest)
        if request.sampling_session_id is None or request.seq_id is None:
            raise InvalidRequest("sampling_session_id and seq_id: sample from a session", param="sampling_session_id")
        folder = self._sessions.sampler(request.sampling_session_id).folder
        work = sample_work(request, self._base.settings.model)
        id = f"{request.sampling_session_id}:{request.seq_id}"
        if self._results.expect(id, body):

            async def run() -> ResultBody:
                return ResultBody.protobuf(await self._samplers.sample(folder, work, id))

            self._tasks[id] = self._results.settle(id, run())
            self._tasks[id].add_done_callback(lambda _: self._tasks.pop(id, None))
        return promise(id, sequence_ids=[f"{id}:{number}" for number in range(request.num_samples)])

    async def cancel(self, http: Request) -> Response:
        """Aborts a sampling request. An unknown id, or that of a request that has ended, is ignored."""
        if task := self._tasks.get(parse(await read(http), CancelRequest).request_id):
            task.cancel()
        return JSONResponse({})


Body = TypeVar("Body", bound=BaseModel)
Handler = Callable[[Request], Awaitable[Response]]

PREFIX = "/api/v1"
MOST_BYTES = 64 << 20
"""The largest body that is accepted. The SDK sends up to 5 MB in one body."""


async def read(http: Request) -> bytes:
    """The whole body. Raises `InvalidRequest` if it is compressed, `BodyTooLarge` if it is over `MOST_BYTES`."""
    if http.headers.get("content-encoding", "identity") != "identity":
        raise InvalidRequest("compressed bodies are not taken")
    body = bytearray()
    async for part in http.stream():
        body += part
        if len(body) > MOST_BYTES:
            raise BodyTooLarge(f"the body is over {MOST_BYTES >> 20} MB")
    return bytes(body)


def parse(body: bytes, kind: type[Body]) -> Body:
    """Parses a JSON body. Raises `InvalidRequest` with the name of the first invalid field."""
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the body"
        raise InvalidRequest(f"{where}: {first['msg']}", param=where) from error


def reply(value: BaseModel) -> Response:
    return Response(value.model_dump_json(), media_type="application/json")


def promise(id: str, model_id: str | None = None, sequence_ids: list[str] | None = None) -> Response:
    """The reply to a request whose result the client retrieves later by `id`."""
    return reply(UntypedAPIFuture(request_id=id, model_id=model_id, sample_sequence_ids=sequence_ids))
