"""Routes for the service itself, client sessions, saved weights, and the results of promises."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from tinker import types

from rolltap.errors import NotFound
from rolltap.trainer_client.endpoint.bodies import Handler, parse, read, reply
from rolltap.trainer_client.endpoint.lanes import PendingResults
from rolltap.trainer_client.endpoint.model import BaseModelInfo
from rolltap.trainer_client.endpoint.saved import SCHEME, Library, moment, parse_path
from rolltap.trainer_client.endpoint.sessions import Sessions

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
                key=_time,
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


def _time(checkpoint: types.Checkpoint) -> float:
    return checkpoint.time.timestamp()
