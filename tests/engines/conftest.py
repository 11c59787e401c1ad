"""One vLLM and one proxy for the whole stage."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from rolltap.engine.tiny import FOLDER

from ..conftest import ROOT
from .record import Reference
from .servers import DEVELOPER, ENVIRONMENT, WHOLE, Proxy, proxy, vllm

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.engines)
            item.add_marker(pytest.mark.timeout(400))  # the first one waits for the servers


@pytest.fixture(scope="session")
def installed() -> None:
    """The CPU build of vLLM, installed where it is not yet (minutes, once)."""
    subprocess.run([ROOT / "scripts" / "engines.sh", ENVIRONMENT], check=True)


@pytest.fixture(scope="session")
def vllm_url(installed: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """vLLM as docs/engines.md says to start it for training."""
    with vllm(tmp_path_factory.mktemp("vllm"), WHOLE, DEVELOPER) as url:
        yield url


@pytest.fixture(scope="session")
def served(vllm_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proxy]:
    with proxy(tmp_path_factory.mktemp("proxy"), vllm_url) as running:
        yield running


@pytest.fixture(scope="session")
def reference() -> Reference:
    return Reference(FOLDER)
