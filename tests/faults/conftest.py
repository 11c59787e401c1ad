"""Servers that keep what they have acknowledged even if the power goes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ..conftest import PostgresServer

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.faults)


@pytest.fixture(scope="session")
def postgres_server_url() -> Iterator[str]:
    """A server's maintenance database."""
    server = PostgresServer()
    server.start()
    yield server.url()
    server.remove()
