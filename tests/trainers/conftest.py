"""The policy's model, its trainer plane, and a run against them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from rolltap.trainer_client.model.weights import tokenizer_hash

from ..unit.trainer_client.plane import Plane, running
from .driver import Driver, Run
from .proofs import SUITES
from .world import policy_folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return policy_folder(tmp_path_factory.mktemp("policy") / "model")


@pytest.fixture
def driver(request: pytest.FixtureRequest) -> Driver:
    return SUITES[request.param].load()


@pytest.fixture
def plane(model: Path) -> Plane:
    return Plane(tokenizer_hash=tokenizer_hash(model))


@pytest.fixture
def run(plane: Plane, model: Path, tmp_path: Path) -> Iterator[Run]:
    with running(plane) as url:
        yield Run(url, model, tmp_path / "out", steps=1)
