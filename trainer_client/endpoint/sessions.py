"""Who is connected, what they train and what they sample from. Kept in memory: a client of a service that was started
anew makes a new session, and goes on from what it saved."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from uuid import uuid4

from rolltap.errors import InvalidRequest, NotFound
from rolltap.trainer_client.endpoint.lanes import RequestLane
from rolltap.trainer_client.endpoint.model import TrainedModel
from rolltap.trainer_client.endpoint.saved import About

SILENT_S = 300.0
"""Seconds without a heartbeat (clients send one each 10 s) after which a session's models may go."""


@dataclass(slots=True)
class SamplerSource:
    """What a sampling session samples from: the base model (`path` None) or saved weights."""

    folder: Path
    path: str | None = None
    follows: str = ""  # the model whose newest published snapshot this is


@dataclass(slots=True)
class TrainingRun:
    """A client's model: there once it has loaded."""

    id: str
    about: About
    lane: RequestLane = field(default_factory=RequestLane)
    model: TrainedModel | None = None
    used: float = field(default_factory=time.time)


@dataclass(slots=True)
class SdkSession:
    """A client."""

    id: str
    seen: float = field(default_factory=time.monotonic)
    runs: dict[str, TrainingRun] = field(default_factory=dict)
    samplers: dict[str, SamplerSource] = field(default_factory=dict)

    def add_sampler(self, number: int, source: SamplerSource) -> str:
        """The sampling session's id. Those that follow the same model go over to its weights."""
        id = f"{self.id}:sample:{number}"
        self.samplers[id] = source
        for other in list(self.samplers.values()):
            if source.follows and other.follows == source.follows:
                other.folder, other.path = source.folder, source.path
        return id

    @property
    def gone(self) -> bool:
        return time.monotonic() - self.seen > SILENT_S


class Sessions:
    """Every session, and at most `most` models in training."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._by_id: dict[str, SdkSession] = {}

    def open(self) -> SdkSession:
        session = SdkSession(f"s-{uuid4().hex}")
        self._by_id[session.id] = session
        return session

    def find(self, id: str) -> SdkSession:
        """The session, which is heard of by this. `NotFound` for one that is not known (any more)."""
        session = self._by_id.get(id)
        if session is None:
            raise NotFound(f"session {id!r} has ended, or is of a service that was started anew: make a ServiceClient")
        session.seen = time.monotonic()
        return session

    def of(self, id: str) -> SdkSession:
        """The session of a model, or of a sampling session."""
        return self.find(id.partition(":")[0])

    def run(self, id: str) -> TrainingRun:
        """A model in training."""
        run = self.of(id).runs.get(id)
        if run is None or run.model is None:
            raise NotFound(f"model {id!r} is not in training here; create it, or go on from what you saved of it")
        run.used = time.time()
        return run

    def known(self, id: str) -> TrainingRun | None:
        """The same; None if it is not."""
        session = self._by_id.get(id.partition(":")[0])
        return None if session is None else session.runs.get(id)

    def sampler(self, id: str) -> SamplerSource:
        samplers = self.of(id).samplers
        if id not in samplers:
            raise NotFound(f"no sampling session {id!r}")
        return samplers[id]

    def make_room(self) -> None:
        """Before another model: those of clients that have gone are unloaded. `InvalidRequest` if too many are left."""
        for session in [one for one in self._by_id.values() if one.gone]:
            self.end(session.id)
        loaded = [id for session in self._by_id.values() for id in session.runs]
        if len(loaded) >= self._most:
            raise InvalidRequest(
                f"{len(loaded)} models are in training, as many as --models allows: {', '.join(loaded)}. Close a "
                f"client of theirs; one that died is forgotten after {SILENT_S:.0f} s"
            )

    def end(self, id: str) -> None:
        """Its models are unloaded. What it saved stays."""
        self._by_id.pop(id, None)
