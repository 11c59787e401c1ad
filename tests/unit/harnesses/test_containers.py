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
from rolltap.harnesses.runner.call_watch import CallWatch
from rolltap.harnesses.runner.snapshots import SnapshotStore, snapshot_in
from rolltap.harnesses.runtimes.containers import BEGAN, RUN, ApptainerRuntime, DockerRuntime
from rolltap.harnesses.runtimes.left_runs import is_left, runner_identity
from rolltap.harnesses.runtimes.process import ProcessRuntime
from rolltap.harnesses.runtimes.sources import Files

CLIENT = """#!{python}
import json, os, sys
with open({log!r}, "a") as log:
    log.write(json.dumps([sys.argv[1:], dict(os.environ)]) + "\\n")
print({answers!r}.get(sys.argv[1], ""))
sys.exit({codes!r}.get(sys.argv[1] if sys.argv[1] != "image" else sys.argv[2], 0))
"""


class Client:
    """A stand-in for a container engine's client. `codes` maps its sub-commands to exit codes, `answers` to what
    they print."""

    def __init__(self, folder: Path, name: str) -> None:
        self.path = folder / "bin" / name
        self.path.parent.mkdir()
        self.log = folder / "log"
        self.answers: dict[str, str] = {}
        self.set({})

    def set(self, codes: dict[str, int]) -> None:
        self.path.write_text(CLIENT.format(python=sys.executable, log=str(self.log), codes=codes, answers=self.answers))
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
    _left, _inspect, (argv, env), (removal, _) = client.calls()
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
    answers = 'case "$1" in version|container|ps|image|rm) exit 0;; esac'
    client.path.write_text(f"#!/bin/sh\n{answers}\ncd {workspace.tmp_folder}\n{marked}; {covers}exit {code}\n")
    for _ in range(2):
        exit_ = await workspace.run(LAUNCH, Limits(), 10)
        assert (exit_.ending, exit_.code) == (Ending.CRASHED, code)
    client.path.write_text(f"#!/bin/sh\n{answers}\nexit {code}\n")
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


@pytest.mark.parametrize("client", ["apptainer"], indirect=True)
async def test_a_fork_in_apptainer_has_the_files_of_its_call(client: Client, tmp_path: Path) -> None:
    """A container reaches the runner's listener, and sees the restored files at the paths of the origin."""
    image = tmp_path / "image.sif"
    image.touch()
    runtime = ApptainerRuntime(str(image), tmp_path)
    first, second = [await runtime.prepare(Files({"a.txt": "the task's"})) for _ in range(2)]
    taken = await SnapshotStore(tmp_path / "snapshots").begin("rollout", "session", first)
    async with CallWatch(Endpoint("http://192.0.2.1/s/x", "k", "m"), taken) as watch:
        assert first.endpoint(watch.endpoint) == watch.endpoint
    (first.folder / "a.txt").write_text("the agent's")
    (first.home_folder / "history").write_text("so far")
    taken.asked("call", await taken.take())
    snapshot = snapshot_in(tmp_path / "snapshots" / "rollout" / "session", "call", None)
    assert snapshot is not None
    assert snapshot.fits(second)
    await snapshot.restore(second)
    await second.run(Command(("agent",)), Limits(), 10)
    ((argv, _),) = client.calls()
    for inside, name, content in (("/workspace", "a.txt", "the agent's"), ("/home/agent", "history", "so far")):
        (source,) = [part.removesuffix(f":{inside}") for part in argv if part.endswith(f":{inside}")]
        assert (Path(source) / name).read_text() == content


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


@pytest.mark.parametrize("client", ["docker"], indirect=True)
@pytest.mark.parametrize(
    ("away", "runs", "lost"), [(1, "false", True), (0, "true", True), (0, "false", False), (0, "", False)]
)
async def test_an_engine_that_dies_under_an_agent_is_no_crash_of_the_agent(
    client: Client, tmp_path: Path, away: int, runs: str, lost: bool
) -> None:
    workspace = await DockerRuntime("i", tmp_path / "workspaces").prepare(Files({}))
    client.path.write_text(
        f"#!/bin/sh\ncase $1 in run) touch {workspace.tmp_folder}/{BEGAN}; exit 125;; version) exit {away};;\n"
        f"container) echo {runs};; rm) [ $2 = --force ] && touch {tmp_path}/removed;; esac\n"
    )
    if lost:
        with pytest.raises(RuntimeFailed, match="lost the container"):
            await workspace.run(LAUNCH, Limits(), 10)
    else:
        assert (await workspace.run(LAUNCH, Limits(), 10)).ending is Ending.CRASHED
    assert (tmp_path / "removed").exists()
    await workspace.close()


def ended_identity() -> str:
    """Of a runner that was killed."""
    shown = "from rolltap.harnesses.runtimes.left_runs import runner_identity as i; print(i())"
    return subprocess.run([sys.executable, "-c", shown], capture_output=True, text=True, check=True).stdout.strip()


def test_a_runner_is_gone_once_its_process_is() -> None:
    ended, own = ended_identity(), runner_identity()
    place, pid, start = own.rsplit(".", 2)
    assert is_left(ended)
    assert is_left(f"{place}.{pid}.{int(start) - 1}")  # its number is another process's now
    others = (own, f"x{ended}", f"{place}0.{ended.rsplit('.', 2)[1]}.1", "", "unknown", "a.b.c.d.e", f"{place}..1")
    assert not [identity for identity in others if is_left(identity)]


@pytest.mark.parametrize("client", ["docker"], indirect=True)
async def test_containers_of_a_killed_runner_are_removed_by_the_next(client: Client, tmp_path: Path) -> None:
    client.answers = {"ps": f"aaa {ended_identity()}\nbbb {runner_identity()}\nccc somebody\nddd {ended_identity()}"}
    client.set({})
    workspace = await DockerRuntime("i", tmp_path / "workspaces").prepare(Files({}))
    await workspace.close()
    assert [argv for argv, _ in client.calls() if argv[0] == "rm"] == [["rm", "--force", "aaa", "ddd"]]
    client.set({"ps": 1})
    await (await DockerRuntime("i", tmp_path / "workspaces").prepare(Files({}))).close()
    assert len([argv for argv, _ in client.calls() if argv[0] == "rm"]) == 1


RUNNER = """
import asyncio, os, signal, sys
from pathlib import Path
from rolltap.harnesses.base import Command, Limits
from rolltap.harnesses.runtimes.process import ProcessRuntime
from rolltap.harnesses.runtimes.sources import Files

async def main():
    workspace = await ProcessRuntime(Path(sys.argv[1])).prepare(Files({}))
    asyncio.get_running_loop().call_later(1, os.kill, os.getpid(), signal.SIGKILL)
    await workspace.run(Command(("/bin/sh", "-c", "echo $$ > pid; exec sleep 60")), Limits(), 50)

asyncio.run(main())
"""


def test_processes_of_a_killed_runner_are_ended_by_the_next(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", RUNNER, str(tmp_path)], check=False)
    (file,) = tmp_path.glob("*/work/pid")
    process = Path(f"/proc/{int(file.read_text())}/stat")
    assert process.exists()
    asyncio.run(ProcessRuntime(tmp_path).prepare(Files({})))
    deadline = time.monotonic() + 10
    while process.exists() and process.read_text().split()[2] != "Z" and time.monotonic() < deadline:
        time.sleep(0.05)
    assert time.monotonic() < deadline
