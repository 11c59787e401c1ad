"""A command that handles signals gives them back: it may run inside another program, as it does here."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest
from typer.testing import CliRunner

from rolltap.cli import up
from rolltap.cli.common import interrupted_by_term, signals_put_back
from rolltap.cli.main import app
from rolltap.cli.server_address import claimed
from rolltap.deployment.local import LocalOptions
from rolltap.errors import ConfigError
from rolltap.settings import LimitSettings


def ours(*_: object) -> None:
    """The handler of the program around the command."""


@pytest.fixture(autouse=True)
def handled() -> Iterator[None]:
    before = signal.signal(signal.SIGTERM, ours)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize("arguments", [["run", "nobody", "--", "hi"], ["try", "nobody"], ["run", "no/such.jsonl"]])
def test_a_command_that_fails_puts_the_handlers_back(arguments: list[str]) -> None:
    assert CliRunner().invoke(app, arguments).exit_code == 1
    assert signal.getsignal(signal.SIGTERM) is ours


async def wait() -> None:
    signal.raise_signal(signal.SIGTERM)
    await asyncio.sleep(30)


def run_a_loop() -> None:
    asyncio.run(wait())


def run_plainly() -> None:
    signal.raise_signal(signal.SIGTERM)


@pytest.mark.parametrize("interrupts", [signal.default_int_handler, signal.SIG_IGN], ids=["terminal", "background"])
@pytest.mark.parametrize("work", [run_a_loop, run_plainly])
def test_sigterm_ends_a_command_like_an_interrupt(work: Callable[[], None], interrupts: signal.Handlers) -> None:
    before = signal.signal(signal.SIGINT, interrupts)
    try:
        with pytest.raises(KeyboardInterrupt), interrupted_by_term():
            work()
        assert signal.getsignal(signal.SIGTERM) is ours
    finally:
        signal.signal(signal.SIGINT, before)


@dataclass
class Deployment:
    """One that gets a signal while it runs."""

    options: LocalOptions
    stopped: ClassVar[list[float]] = []
    urls: ClassVar[dict[str, str]] = {}

    def start(self, report: Callable[[str], None]) -> None:
        report("postgres")

    def look(self) -> list[str]:
        signal.raise_signal(signal.SIGTERM)
        return []

    def stop(self, *, drain_s: float = 0.0) -> None:
        self.stopped.append(drain_s)


@pytest.mark.parametrize("interrupts", [signal.default_int_handler, signal.SIG_IGN], ids=["terminal", "background"])
def test_sigterm_drains_a_local_deployment(
    interrupts: signal.Handlers, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(up, "LocalDeployment", Deployment)
    monkeypatch.setattr(up, "_show", lambda deployment: None)
    monkeypatch.setattr(Deployment, "stopped", [])
    before = signal.signal(signal.SIGINT, interrupts)
    try:
        up.run_local(None, tmp_path, 0, None, redis=False)
    finally:
        signal.signal(signal.SIGINT, before)
    assert Deployment.stopped == [LimitSettings().drain_s]
    assert signal.getsignal(signal.SIGTERM) is ours


def test_a_local_deployment_whose_folder_is_taken_leaves_the_handlers(tmp_path: Path) -> None:
    with claimed(tmp_path), pytest.raises(ConfigError, match="already runs"):
        up.run_local(None, tmp_path, 0, None, redis=False)
    assert signal.getsignal(signal.SIGTERM) is ours


def test_what_a_loop_took_is_put_back() -> None:
    async def serve() -> None:
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, print)

    with signals_put_back(signal.SIGTERM):
        asyncio.run(serve())
    assert signal.getsignal(signal.SIGTERM) is ours
