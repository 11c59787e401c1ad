"""The engines that a Tinker service samples with."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from rolltap.errors import NotFound
from rolltap.trainer_client.endpoint import samplers
from rolltap.trainer_client.endpoint.samplers import Samplers


@pytest.mark.asyncio
@pytest.mark.parametrize("error", [OSError(24, "Too many open files"), MemoryError(), NotFound("gone")])
async def test_an_engine_that_was_not_loaded_is_loaded_by_the_next_request(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    loads: list[Path] = []

    def load(folder: Path, slots: int) -> Any:
        loads.append(folder)
        raise error

    monkeypatch.setattr(samplers, "_load", load)
    engines = Samplers(2)
    for _ in range(3):
        with pytest.raises(type(error)):
            await engines.sample(Path("weights"), None, "id")  # type: ignore[arg-type]
    assert len(loads) == 3


@pytest.mark.asyncio
async def test_requests_at_the_same_time_load_an_engine_once(monkeypatch: pytest.MonkeyPatch) -> None:
    loads: list[Path] = []

    def load(folder: Path, slots: int) -> Any:
        loads.append(folder)
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(samplers, "_load", load)
    engines = Samplers(2)
    work: Any = None
    ended = await asyncio.gather(
        *(engines.sample(Path("weights"), work, "id") for _ in range(3)), return_exceptions=True
    )
    assert [type(one) for one in ended] == [OSError] * 3
    assert len(loads) == 1
