"""The installed command: what must happen before its modules are there."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType

import pytest
import typer

from rolltap.__main__ import main
from rolltap.cli.main import app

from .odd_values import commands


class Interrupted:
    """A finder that is interrupted at the command's module."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name == "rolltap.cli.main":
            raise KeyboardInterrupt
        return None


def test_an_interrupt_while_modules_load_is_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "rolltap.cli.main", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Interrupted(), *sys.meta_path])
    monkeypatch.setattr(sys, "argv", ["rolltap", "status"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 130


def test_the_installed_command_is_this_one() -> None:
    (script,) = entry_points(group="console_scripts", name="rolltap")
    assert script.load() is main


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can have mounts of its own")
def test_a_node_has_mounts_of_its_own(tmp_path: Path) -> None:
    """So that each of its runs can have a file system."""
    environment = {**os.environ, "ROLLTAP_RUNNER_KEY": "rt-x", "HOME": str(tmp_path)}
    argv = [sys.executable, "-m", "rolltap", "node", "--url", "http://127.0.0.1:9"]
    with subprocess.Popen(argv, env=environment, cwd=tmp_path, stdout=subprocess.DEVNULL) as node:
        try:
            deadline, ours = time.monotonic() + 20, os.readlink("/proc/self/ns/mnt")
            while os.readlink(f"/proc/{node.pid}/ns/mnt") == ours:
                assert time.monotonic() < deadline
                time.sleep(0.02)
        finally:
            node.kill()


def interrupt(**_: object) -> None:
    raise KeyboardInterrupt


GROUP = typer.main.get_command(app)
COMMANDS = dict(commands(GROUP))


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_an_interrupt_ends_every_command_in_a_line(
    words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(COMMANDS[words], "parse_args", lambda context, arguments: [])
    monkeypatch.setattr(COMMANDS[words], "callback", interrupt)
    with pytest.raises(SystemExit) as ended:
        GROUP.main(list(words))
    assert ended.value.code == 130
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("stopped")
