"""The weights that a scripted engine pretends to have: a version, a pause, and requests that are told to stop."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path


class WeightJob:
    """A request under way: the version that each of its tokens was sampled with, and whether it was told to stop."""

    __slots__ = ("aborted", "id", "versions")

    def __init__(self, id: str) -> None:
        self.id = id
        self.aborted = False
        self.versions: list[str] = []

    def spans(self) -> list[dict[str, int | str]]:
        spans, start = [], 0
        for version, tokens in groupby(self.versions):
            end = start + len(list(tokens))
            spans.append({"version": version, "start": start, "end": end})
            start = end
        return spans


def digest_of_files(folder: str) -> str:
    """The digest of a folder's safetensors; empty if it has none."""
    files = sorted(Path(folder).glob("*.safetensors"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest() if files else ""


class Weights:
    """`path` is the model folder that was loaded last, `digest` that of its files, `adapters` their folders by name."""

    def __init__(self) -> None:
        self.version = "default"
        self.path: str | None = None
        self.digest = ""
        self.adapters: dict[str, str] = {}
        self.loads = 0
        self.paused = False
        self._closed = False
        self._jobs: set[WeightJob] = set()
        self._change = asyncio.Event()

    @property
    def running(self) -> int:
        return len(self._jobs)

    def load(self, path: str) -> None:
        self.path = path
        self.digest = digest_of_files(path)
        self.loads += 1

    async def pause(self, mode: str) -> None:
        """ "keep": requests stand still; "wait": they end first; "abort": they are ended. New ones are held."""
        self._closed = True
        if mode == "wait":
            while self._jobs:
                await self._change.wait()
        elif mode == "abort":
            self.abort(None)
        self.paused = True

    def resume(self) -> None:
        self.paused = self._closed = False
        self._signal()

    def abort(self, ids: Sequence[str] | None) -> int:
        """Ends the requests of these ids (None: all) before their next token."""
        jobs = [job for job in self._jobs if ids is None or job.id in ids]
        for job in jobs:
            job.aborted = True
        self._signal()
        return len(jobs)

    async def enter(self, id: str) -> WeightJob:
        while self._closed:
            await self._change.wait()
        job = WeightJob(id)
        self._jobs.add(job)
        return job

    def leave(self, job: WeightJob) -> None:
        self._jobs.discard(job)
        self._signal()

    async def ready(self, job: WeightJob) -> None:
        """Waits while paused, unless the job is told to stop."""
        while self.paused and not job.aborted:
            await self._change.wait()

    def _signal(self) -> None:
        change, self._change = self._change, asyncio.Event()
        change.set()
