"""The clients' sessions, with their models in training and their sampling sessions.

They are in memory only. After a restart of the service, a client opens a new session and continues from its saved
weights.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from uuid import uuid4

from rolltap.errors import InvalidRequest, NotFound
from rolltap.trainer_client.endpoint.lanes import RequestLane
from rolltap.trainer_client.endpoint.model import TrainedModel
from rolltap.trainer_client.endpoint.saved import SavedMetadata

SILENT_S = 60.0
"""A session without a request for this many seconds may be ended if its room is needed.

Clients send a heartbeat every 10 s. tinker-cookbook's recipes end without closing their client.
"""


@dataclass(slots=True)
class SamplerSource:
    """The weights of a sampling session: saved weights, or the base model if `path` is None."""

    folder: Path
    path: str | None = None
    follows: str = ""  # id of the model whose newest snapshot this is; "" if it never changes


@dataclass(slots=True)
class TrainingRun:
    """A model of a client. `model` is None until it has loaded. `used` is the time of the last request to it."""

    id: str
    metadata: SavedMetadata
    lane: RequestLane = field(default_factory=RequestLane)
    model: TrainedModel | None = None
    used: float = field(default_factory=time.time)


@dataclass(slots=True)
class SdkSession:
    """A client's session. `seen` is the time (monotonic) of its last request or heartbeat."""

    id: str
    seen: float = field(default_factory=time.monotonic)
    runs: dict[str, TrainingRun] = field(default_factory=dict)
    samplers: dict[str, SamplerSource] = field(default_factory=dict)

    def add_sampler(self, number: int, source: SamplerSource) -> str:
        """Adds a sampling session and returns its id.

        If `source` follows a model, all sampling sessions that follow this model switch to the weights of `source`.
        """
        id = f"{self.id}:sample:{number}"
        self.samplers[id] = source
        for other in list(self.samplers.values()):
            if source.follows and other.follows == source.follows:
                other.folder, other.path = source.folder, source.path
        return id

    @property
    def gone(self) -> bool:
        """Whether the client is silent for so long that its session may be ended, if it has models in training."""
        return bool(self.runs) and time.monotonic() - self.seen > SILENT_S


class Sessions:
    """All sessions. They have at most `most` models in training together."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._by_id: dict[str, SdkSession] = {}

    def open(self) -> SdkSession:
        session = SdkSession(f"s-{uuid4().hex}")
        self._by_id[session.id] = session
        return session

    def find(self, id: str) -> SdkSession:
        """The session, with `seen` set to now. Raises `NotFound` if it is unknown or has ended."""
        session = self._by_id.get(id)
        if session is None:
            raise NotFound(f"session {id!r} has ended, or is of a service that was started anew: make a ServiceClient")
        session.seen = time.monotonic()
        return session

    def of(self, id: str) -> SdkSession:
        """The session that a model's or sampling session's id belongs to. Raises `NotFound` as `find` does."""
        return self.find(id.partition(":")[0])

    def run(self, id: str) -> TrainingRun:
        """The training run of a loaded model, with `used` set to now. Raises `NotFound` if there is none."""
        run = self.of(id).runs.get(id)
        if run is None or run.model is None:
            raise NotFound(f"model {id!r} is not in training here; create it, or go on from what you saved of it")
        run.used = time.time()
        return run

    def known(self, id: str) -> TrainingRun | None:
        """The training run, loaded or not; None if there is none. Changes neither `seen` nor `used`."""
        session = self._by_id.get(id.partition(":")[0])
        return None if session is None else session.runs.get(id)

    def sampler(self, id: str) -> SamplerSource:
        """The weights of a sampling session. Raises `NotFound` if there is no such session."""
        samplers = self.of(id).samplers
        if id not in samplers:
            raise NotFound(f"no sampling session {id!r}")
        return samplers[id]

    def make_room(self) -> None:
        """Makes sure that one more model may be loaded. If need be, ends sessions that are silent, the longest first.

        Raises `InvalidRequest` if the limit is still reached.
        """
        silent = sorted((session for session in self._by_id.values() if session.gone), key=lambda one: one.seen)
        while len(models := [id for session in self._by_id.values() for id in session.runs]) >= self._most and silent:
            self.end(silent.pop(0).id)
        if len(models) >= self._most:
            raise InvalidRequest(
                f"{len(models)} models are in training, as many as --models allows: {', '.join(models)}. Close a "
                f"client of theirs; one that died is forgotten after {SILENT_S:.0f} s"
            )

    def end(self, id: str) -> None:
        """Ends a session and unloads its models. Its saved weights stay."""
        self._by_id.pop(id, None)
