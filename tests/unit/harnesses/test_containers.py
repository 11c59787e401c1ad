"""docker and apptainer by their command lines: stand-in clients on PATH record what they are asked."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from rolltap.errors import RuntimeFailed, TaskInvalid
from rolltap.harnesses.base import CodeWork, Command, Ending, Endpoint, Limits
from rolltap.harnesses.runtimes.containers import BEGAN, RUN, ApptainerRuntime, DockerRuntime
from rolltap.harnesses.runtimes.sources import Files

CLIENT = """#!{python}
import json, os, sys
with open({log!r}, "a") as log:
    log.write(json.dumps([sys.argv[1:], dict(os.environ)]) + "\\n")
sys.exit({codes!r}.get(sys.argv[1] if sys.argv[1] != "image" else sys.argv[2], 0))
"""


class Client:
    """A stand-in for a container engine's client. `codes` maps its sub-commands to exit codes."""

    def __init__(self, folder: Path, name: str) -> None:
        self.path = folder / "bin" / name
        self.path.parent.mkdir()
        self.log = folder / "log"
        self.set({})

    def set(self, codes: dict[str, int]) -> None:
        self.path.write_text(CLIENT.format(python=sys.executable, log=str(self.log), codes=codes))
        self.path.chmod(0o755)

    def calls(self) -> list[tuple[list[str], dict[str, str]]]:
        return [tuple(json.loads(line)) for line in self.log.read_text().splitlines()]


@pytest.fixture
def client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Client:
    made = Client(tmp_path, request.param)
    monkeypatch.setenv("PATH", f"{made.path.parent}:/usr/bin:/bin")
    monkeypatch.setenv("ROLLTAP_SECRET", "hush")
    return made


LAUNCH = Command(("agent", "do it"), env={"API_KEY": "the-key"}, files={".rc": "x"}, endings={7: Ending.LIMIT})


def options(argv: list[str], name: str) -> list[str]:
    return [argv[index + 1] for index, part in enumerate(argv) if part == name]


@pytest.mark.parametrize("client", ["docker"], indirect=True)
async def test_docker_runs_one_contained_container(client: Client, tmp_path: Path) -> None:
    workspace = await DockerRuntime("debian:12", tmp_path / "workspaces").prepare(Files({"a": "1"}))
    endpoint = workspace.endpoint(Endpoint("http://127.0.0.1:8710/s/x", "k", "m"))
    exit_ = await workspace.run(LAUNCH, Limits(processes=99), 10)
    await workspace.close()
    assert exit_.ending is Ending.DONE
    assert endpoint.base_url == "http://host.docker.internal:8710/s/x"
    _inspect, (argv, env), (removal, _) = client.calls()
    assert argv[:3] == ["run", "--rm", "--init"]
    assert argv[argv.index("debian:12") :] == ["debian:12", "/bin/sh", "-c", RUN, "sh", "agent", "do it"]
    assert options(argv, "--cap-drop") == ["ALL"]
    assert options(argv, "--pids-limit") == ["99"]
    assert options(argv, "--workdir") == ["/workspace"]
    assert [volume.split(":")[1] for volume in options(argv, "--volume")] == ["/home/agent", "/workspace", "/tmp"]
    assert "API_KEY" in options(argv, "--env")
    assert "the-key" not in " ".join(argv)
    assert env["API_KEY"] == "the-key"
    assert "ROLLTAP_SECRET" not in env
    assert removal == ["rm", "--force", *options(argv, "--name")]


@pytest.mark.parametrize("client", ["docker"], indirect=True)
async def test_docker_failures_are_the_places_and_the_agents_are_not(client: Client, tmp_path: Path) -> None:
    runtime = DockerRuntime("nowhere/none", tmp_path / "workspaces")
    client.set({"inspect": 1, "pull": 1})
    with pytest.raises(RuntimeFailed, match="can't pull nowhere/none"):
        await runtime.prepare(Files({}))
    client.set({"run": 125})
    workspace = await runtime.prepare(Files({}))
    with pytest.raises(RuntimeFailed, match="could not run nowhere/none"):
        await workspace.run(LAUNCH, Limits(), 10)
    client.set({"run": 7})
    assert (await workspace.run(LAUNCH, Limits(), 10)).ending is Ending.LIMIT
    client.set({"run": 1})
    assert (await workspace.run(LAUNCH, Limits(), 10)).ending is Ending.CRASHED
    await workspace.close()


@pytest.mark.parametrize("client", ["docker", "apptainer"], indirect=True)
@pytest.mark.parametrize(
    "covers",
    ["", f"rm -f {BEGAN}; ", f"rm -f {BEGAN}; touch -d @0 .; ", f"ln -sf {'a' * 300} {BEGAN}; "],
    ids=["nothing", "removed", "time", "link that nobody can follow"],
)
async def test_an_agent_that_ran_is_no_failure_of_the_engine(client: Client, tmp_path: Path, covers: str) -> None:
    """It traces the first command of its container and lets it end as the engine itself does."""
    image = tmp_path / "image.sif"
    image.touch()
    made = DockerRuntime("i") if client.path.name == "docker" else ApptainerRuntime(str(image))
    workspace = await replace(made, base=tmp_path / "workspaces").prepare(Files({}))
    code = {"docker": 125, "apptainer": 255}[client.path.name]
    marked = f"{{ true > {BEGAN}; }}"
    assert RUN.startswith(marked.replace(BEGAN, f"/tmp/{BEGAN}"))
    client.path.write_text(f"#!/bin/sh\ncd {workspace.tmp_folder}\n{marked}; {covers}exit {code}\n")
    for _ in range(2):
        exit_ = await workspace.run(LAUNCH, Limits(), 10)
        assert (exit_.ending, exit_.code) == (Ending.CRASHED, code)
    client.path.write_text(f"#!/bin/sh\nexit {code}\n")
    with pytest.raises(RuntimeFailed, match="could not run"):
        await workspace.run(LAUNCH, Limits(), 10)
    await workspace.close()


@pytest.mark.parametrize("client", ["apptainer"], indirect=True)
async def test_apptainer_contains_everything(client: Client, tmp_path: Path) -> None:
    image = tmp_path / "agent.sif"
    image.write_text("")
    workspace = await ApptainerRuntime(str(image), tmp_path / "workspaces").prepare(Files({}))
    endpoint = workspace.endpoint(Endpoint("http://127.0.0.1:8710/s/x", "k", "m"))
    exit_ = await workspace.run(LAUNCH, Limits(), 10)
    await workspace.close()
    assert exit_.ending is Ending.DONE
    assert endpoint.base_url == "http://127.0.0.1:8710/s/x"
    ((argv, env),) = client.calls()
    assert argv[:3] == ["--quiet", "exec", "--containall"]
    assert argv[argv.index(str(image)) :][-2:] == ["agent", "do it"]
    assert options(argv, "--home")[0].endswith("/home:/home/agent")
    assert env["APPTAINERENV_API_KEY"] == "the-key"
    assert "the-key" not in " ".join(argv)
    assert "ROLLTAP_SECRET" not in env


@pytest.mark.parametrize(
    ("image", "message"),
    [("", "needs an image"), ("-v/:/host", "not an image"), ("ftp://x", "no ftp:// images"), ("none.sif", "no image")],
)
def test_images_that_cannot_be(image: str, message: str) -> None:
    with pytest.raises(TaskInvalid, match=message):
        ApptainerRuntime(image)


@pytest.mark.parametrize(("code", "seen"), [(0, 0), (1, 1), (7, 7), (125, 1), (126, 126), (137, 137), (255, 1)])
def test_a_command_in_a_container_returns_no_code_of_the_engines(code: int, seen: int) -> None:
    ended = subprocess.run(["/bin/sh", "-c", RUN, "sh", "/bin/sh", "-c", f"exit {code}"], check=False)
    assert ended.returncode == seen


@pytest.mark.parametrize("client", ["docker", "apptainer"], indirect=True)
async def test_code_under_test_gets_a_container_beside_the_judges(client: Client, tmp_path: Path) -> None:
    """The folder that is named, another HOME, no mount of the judge's; with docker no network."""
    image = tmp_path / "image.sif"
    image.touch()
    places = tmp_path / "places"
    is_docker = client.path.name == "docker"
    made = DockerRuntime("python:3", places) if is_docker else ApptainerRuntime(str(image), places)
    workspace = await made.prepare(Files({"solution.sh": ""}))
    (code_folder := tmp_path / "agents").mkdir()
    after: list[str] = []
    work = CodeWork(code_folder, lambda: after.append("taken"))
    async with workspace.code_helper(Limits(), time.monotonic() + 60, work) as helper:
        (place,) = helper.mounts.values()
        judge = replace(LAUNCH, env=helper.env, mounts={"/logs": tmp_path, **helper.mounts})
        await workspace.run(judge, Limits(), 60)
        running = await asyncio.create_subprocess_exec(sys.executable, place / "sandboxed", "./solution", cwd=tmp_path)
        assert await running.wait() == 0
        assert (helper.runs, after) == (1, ["taken"])
    judges, code = [argv for argv, _ in client.calls() if argv[0] in ("run", "--quiet")]
    bindings = [options(argv, "--volume") + options(argv, "--bind") for argv in (judges, code)]
    seen, hidden = [{each.split(":")[1]: each for each in some} for some in bindings]
    assert {"/logs", "/run/rolltap", "/workspace"} <= seen.keys()
    assert hidden.keys() & {"/logs", "/run/rolltap"} == set()
    assert hidden["/workspace"] == f"{code_folder}:/workspace"
    assert seen["/workspace"] == f"{workspace.folder}:/workspace"
    if is_docker:
        assert options(code, "--network") == ["none"]
        assert "--interactive" in code
    assert code[-1] == "./solution"
    await workspace.close()
