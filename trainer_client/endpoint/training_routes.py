"""Routes for models in training.

Each request to a model has a number, and the requests run in this order. A request that will be refused takes its place
in the order, too: the client has already sent later ones, which wait for it. So most of a request is checked only when
it runs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial

import msgspec
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response
from tinker import types

from rolltap.errors import InvalidRequest
from rolltap.trainer_client.endpoint.bodies import Handler, parse, promise, read, reply
from rolltap.trainer_client.endpoint.lanes import PendingResults, ResultBody
from rolltap.trainer_client.endpoint.messages import read_loss_request, write_loss_output
from rolltap.trainer_client.endpoint.model import BaseModelInfo, TrainedModel
from rolltap.trainer_client.endpoint.saved import EPHEMERAL, Kind, Library, SavedMetadata, SavedWeights, parse_path
from rolltap.trainer_client.endpoint.sessions import SamplerSource, Sessions, TrainingRun

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
        if metadata.trained != run.metadata.trained:
            differing = [
                f"{name} is {metadata.trained[name]} there and {own} in this model"
                for name, own in run.metadata.trained.items()
                if metadata.trained[name] != own
            ]
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
