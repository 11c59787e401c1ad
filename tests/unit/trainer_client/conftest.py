"""What tests of a trainer share: a trainer plane in memory, its address, and a small model's folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from .making import model_folder
from .plane import Plane, running


@pytest.fixture
def plane() -> Plane:
    return Plane()


@pytest.fixture
def url(plane: Plane) -> Iterator[str]:
    with running(plane) as address:
        yield address


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return model_folder(tmp_path / "model")
