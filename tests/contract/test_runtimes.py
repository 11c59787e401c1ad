"""What every runtime promises, over the registry and over those that installed packages bring.

The same small actions are run as commands or as Python calls, whichever the runtime takes. Docker and apptainer need a
daemon or an image, so their command lines are tested apart (tests/unit/harnesses/test_containers.py).
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from rolltap.errors import TaskInvalid
from rolltap.extras import known_names
from rolltap.harnesses.base import (
    Command,
    Ending,
    Endpoint,
    Launch,
    Limits,
    PythonCall,
    Runtime,
    RuntimeOptions,
    Workspace,
)
from rolltap.harnesses.runtimes.registry import ENTRY_POINTS, RUNTIMES, runtime_class, runtime_for
from rolltap.harnesses.runtimes.sources import Files

NAMES = [name for name in known_names(RUNTIMES, ENTRY_POINTS) if name not in ("docker", "apptainer")]
LIMITS = Limits()


@pytest.fixture(params=NAMES)
def runtime(request: pytest.FixtureRequest, tmp_path: Path) -> Runtime:
    return runtime_class(request.param).create(RuntimeOptions(tmp_path / "workspaces"))


@pytest.fixture
async def workspace(runtime: Runtime) -> AsyncIterator[Workspace]:
    workspace = await runtime.prepare(Files({"mine.txt": "mine"}))
    yield workspace
    await workspace.close()


def launch(runtime: Runtime, script: str, call: Callable[[threading.Event], tuple[Ending, str]]) -> Launch:
    """The same action in the form that `runtime` takes."""
    return PythonCall(call) if runtime.launches is PythonCall else Command(("/bin/sh", "-c", script))


def copy_mine(workspace: Workspace) -> Callable[[threading.Event], tuple[Ending, str]]:
    def call(stop: threading.Event) -> tuple[Ending, str]:
        (workspace.folder / "copy.txt").write_text((workspace.folder / "mine.txt").read_text())
        return Ending.DONE, "copied"

    return call


def wait(stop: threading.Event) -> tuple[Ending, str]:
    stop.wait()
    return Ending.CANCELLED, "stopped"


async def test_it_runs_in_a_copy_of_the_source_and_says_how_it_ended(runtime: Runtime, workspace: Workspace) -> None:
    action = launch(runtime, "cat mine.txt > copy.txt && echo copied", copy_mine(workspace))
    exit_ = await workspace.run(action, LIMITS, 30)
    assert (exit_.ending, exit_.output.strip()) == (Ending.DONE, "copied")
    assert (workspace.folder / "copy.txt").read_text() == "mine"


async def test_a_crash_is_an_ending(runtime: Runtime, workspace: Workspace) -> None:
    action = launch(runtime, "echo boom; exit 3", lambda stop: (Ending.CRASHED, "boom"))
    exit_ = await workspace.run(action, LIMITS, 30)
    assert (exit_.ending, exit_.output.strip()) == (Ending.CRASHED, "boom")


async def test_a_run_past_its_time_is_ended(runtime: Runtime, workspace: Workspace) -> None:
    exit_ = await workspace.run(launch(runtime, "sleep 600", wait), LIMITS, 0.5)
    assert exit_.ending is Ending.TIMED_OUT
    assert exit_.seconds < 60


async def test_a_cancelled_run_ends(runtime: Runtime, workspace: Workspace) -> None:
    running = asyncio.create_task(workspace.run(launch(runtime, "sleep 600", wait), LIMITS, 600))
    await asyncio.sleep(0)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(running, 60)


async def test_workspaces_are_apart_and_leave_nothing(runtime: Runtime, tmp_path: Path) -> None:
    one, other = await runtime.prepare(Files({"a": "1"})), await runtime.prepare(Files({"a": "2"}))
    assert ((one.folder / "a").read_text(), (other.folder / "a").read_text()) == ("1", "2")
    assert one.home_folder != other.home_folder
    locked = one.folder / "locked"
    locked.mkdir()
    locked.chmod(0)
    await one.close()
    await other.close()
    assert not list((tmp_path / "workspaces").iterdir())


async def test_the_endpoint_keeps_its_session_key_and_model(workspace: Workspace) -> None:
    inside = workspace.endpoint(Endpoint("http://127.0.0.1:8710/s/one", "the-key", "tiny"))
    assert inside.base_url.endswith("/s/one")
    assert (inside.key, inside.model) == ("the-key", "tiny")


@pytest.mark.parametrize("name", NAMES)
async def test_the_other_kind_of_launch_is_refused(name: str, tmp_path: Path) -> None:
    runtime = runtime_class(name)
    other: Launch = Command(("true",)) if runtime.launches is PythonCall else PythonCall(wait)
    assert runtime_for(name, runtime.launches) is runtime
    with pytest.raises(TaskInvalid, match=f"the runtime '{name}' runs .* only; use"):
        runtime_for(name, type(other))
    workspace = await runtime.create(RuntimeOptions(tmp_path / "workspaces")).prepare(Files({}))
    with pytest.raises(TaskInvalid, match="only; use"):
        await workspace.run(other, LIMITS, 5)
    await workspace.close()
