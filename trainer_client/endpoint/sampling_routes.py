"""Routes for sampling sessions and their requests."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from tinker import types

from rolltap.errors import InvalidRequest
from rolltap.trainer_client.endpoint.bodies import Handler, parse, promise, read, reply
from rolltap.trainer_client.endpoint.lanes import PendingResults, ResultBody
from rolltap.trainer_client.endpoint.model import BaseModelInfo
from rolltap.trainer_client.endpoint.samplers import Samplers, sample_work
from rolltap.trainer_client.endpoint.saved import Library, parse_path
from rolltap.trainer_client.endpoint.sessions import SamplerSource, Sessions


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
