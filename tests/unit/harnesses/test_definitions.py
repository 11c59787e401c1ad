"""Every harness definition: pure data that points the harness at the session, in HOME and nowhere else."""

from __future__ import annotations

import json
import os
import socket
import stat
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rolltap.errors import TaskInvalid
from rolltap.harnesses.agents.command import AnyCommand
from rolltap.harnesses.agents.registry import HARNESSES, get_harness
from rolltap.harnesses.base import Command, Ending, Endpoint, Job, Limits
from rolltap.harnesses.runtimes.folders import Folders

BASE = "http://127.0.0.1:8710/s/SESSION"
JOB = Job(Endpoint(BASE, "the-key", "tiny"), "Do it; don't `rm`.", Path("/w"), Path("/h"))


def told(launch: Command) -> str:
    return json.dumps([launch.argv, dict(launch.env), dict(launch.files)])


@pytest.mark.parametrize("name", ["claude-code", "qwen-code", "gemini-cli", "mini-swe-agent", "openai-agents"])
def test_the_cap_of_turns_is_told_at_launch(name: str) -> None:
    capped = HARNESSES[name].launch(replace(JOB, limits=Limits(turns=17)))
    assert isinstance(capped, Command)
    assert "17" in told(capped)


def test_exit_codes_that_mean_the_cap_of_turns() -> None:
    launch = HARNESSES["gemini-cli"].launch(JOB)
    assert isinstance(launch, Command)
    assert [launch.ending(code) for code in (0, 53, 1, None, -9)] == [
        Ending.DONE,
        Ending.LIMIT,
        Ending.CRASHED,
        Ending.CRASHED,
        Ending.CRASHED,
    ]


def test_unknown_names_list_the_known_ones() -> None:
    with pytest.raises(TaskInvalid, match=r"no harness 'codecs'; known: aider, .*codex"):
        get_harness("codecs")
    with pytest.raises(TaskInvalid, match=r"no dialect of pi 'soap'; known: anthropic, gemini"):
        get_harness("pi", dialect="soap")
    with pytest.raises(TaskInvalid, match="codex speaks openai_responses only"):
        get_harness("codex", dialect="gemini")
    with pytest.raises(TaskInvalid, match="mini-swe-agent speaks openai_chat only"):
        get_harness("mini-swe-agent", dialect="gemini")
    with pytest.raises(TaskInvalid, match="no dialect of mini-swe-agent-inprocess 'gemini'"):
        get_harness("mini-swe-agent-inprocess", dialect="gemini")
    with pytest.raises(TaskInvalid, match="needs the command"):
        get_harness("command")


def test_resuming_is_refused_by_those_that_cannot() -> None:
    with pytest.raises(TaskInvalid, match="can't continue"):
        HARNESSES["cline"].launch(replace(JOB, resume=True))
    resumed = HARNESSES["codex"].launch(replace(JOB, resume=True))
    assert isinstance(resumed, Command)
    assert resumed.argv[1:4] == ("exec", "resume", "--last")


@given(st.text(st.characters(exclude_characters="\0")))
def test_a_command_gets_the_prompt_verbatim(prompt: str) -> None:
    job = replace(JOB, instruction=prompt)
    inline = AnyCommand(("agent", "--task={prompt}", "{other}", "{model}")).launch(job)
    assert inline.argv == ("agent", f"--task={prompt}", "{other}", "tiny")
    assert inline.stdin == ""
    assert AnyCommand(("agent",)).launch(job).stdin == prompt


def test_nothing_is_written_outside_home(tmp_path: Path) -> None:
    folders = Folders(tmp_path)
    folders.home.mkdir()
    with pytest.raises(TaskInvalid, match="leaves the task's folder"):
        folders.write_home({"../outside": "x"})


def _link(path: Path, outside: Path) -> None:
    path.symlink_to(outside)


def _dangling_link(path: Path, outside: Path) -> None:
    path.symlink_to(outside.with_name("nowhere"))


def _loop(path: Path, outside: Path) -> None:
    path.symlink_to(path)


def _hard_link(path: Path, outside: Path) -> None:
    path.hardlink_to(outside / "config")


def _pipe(path: Path, outside: Path) -> None:
    os.mkfifo(path)


def _socket(path: Path, outside: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(path))


def _file_without_rights(path: Path, outside: Path) -> None:
    path.write_text("old")
    path.chmod(0)


def _full_folder(path: Path, outside: Path) -> None:
    (path / "deep" / "deeper").mkdir(parents=True)
    (path / "deep" / "link").symlink_to(outside)


def _folder_without_rights(path: Path, outside: Path) -> None:
    _full_folder(path, outside)
    path.chmod(0)


LEFT = (
    _link,
    _dangling_link,
    _loop,
    _hard_link,
    _pipe,
    _socket,
    _file_without_rights,
    _full_folder,
    _folder_without_rights,
)


@pytest.mark.timeout(20)
@pytest.mark.parametrize("place", [".rc", ".agent", ".agent/config"])
@pytest.mark.parametrize("leave", LEFT, ids=lambda leave: leave.__name__.strip("_"))
def test_files_of_a_launch_replace_whatever_an_earlier_run_left(
    leave: Callable[[Path, Path], None], place: str, tmp_path: Path
) -> None:
    folders = Folders(tmp_path)
    folders.home.mkdir()
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "config").write_text("precious")
    left = folders.home / place
    left.parent.mkdir(exist_ok=True)
    leave(left, outside)
    folders.write_home({".agent/config": "new", ".rc": "new"})
    assert [path.name for path in outside.iterdir()] == ["config"]
    assert (outside / "config").read_text() == "precious"
    for written in (folders.home / ".agent" / "config", folders.home / ".rc"):
        status = written.lstat()
        assert (written.read_text(), stat.S_IMODE(status.st_mode), status.st_nlink) == ("new", 0o600, 1)
