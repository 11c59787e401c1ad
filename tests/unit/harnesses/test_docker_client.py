"""docker's own client reads our command lines: what it asks of an engine, told by a stand-in for the engine."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from rolltap.errors import RuntimeFailed
from rolltap.harnesses.base import Command, Ending, Limits
from rolltap.harnesses.runtimes.containers import RUN, DockerRuntime
from rolltap.harnesses.runtimes.sources import Files

pytestmark = pytest.mark.skipif(shutil.which("docker") is None, reason="docker's client is not installed")

ATTACHED = (
    b"HTTP/1.1 101 UPGRADED\r\nContent-Type: application/vnd.docker.multiplexed-stream\r\n"
    b"Connection: Upgrade\r\nUpgrade: tcp\r\n\r\n"
)


class Engine:
    """Speaks as much of docker's API as one `docker run` takes. `code` is how its containers end."""

    def __init__(self) -> None:
        self.code = 0
        self.has_image = True
        self.created: list[dict[str, Any]] = []
        self.asked: list[str] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while line := await reader.readline():
                method, target, _ = line.decode().split()
                body = await self._body(reader)
                path = target.split("?")[0].partition("/v1.")[2].partition("/")[2] or target
                self.asked.append(f"{method} {path}")
                if path.endswith("/attach"):
                    said = b"hello\n"
                    writer.write(ATTACHED + bytes([1, 0, 0, 0]) + len(said).to_bytes(4, "big") + said)
                    if self.created[-1]["OpenStdin"]:
                        await reader.read()
                    break
                status, answer = self._answer(method, path, body)
                text = b"" if status == 204 else json.dumps(answer).encode()
                head = f"HTTP/1.1 {status} X\r\nApi-Version: 1.47\r\nContent-Type: application/json\r\n"
                writer.write(f"{head}Content-Length: {len(text)}\r\n\r\n".encode() + text)
        finally:
            writer.close()

    async def _body(self, reader: asyncio.StreamReader) -> bytes:
        length = 0
        while (header := (await reader.readline()).decode().strip().lower()) != "":
            if header.startswith("content-length:"):
                length = int(header.partition(":")[2])
        return await reader.readexactly(length)

    def _answer(self, method: str, path: str, body: bytes) -> tuple[int, Any]:
        if path == "containers/create":
            self.created.append(json.loads(body))
            return 201, {"Id": "c0ffee", "Warnings": []}
        if path.endswith("/wait"):
            return 200, {"StatusCode": self.code}
        if path.startswith("images/"):
            return (200, {"Id": "sha256:1"}) if self.has_image else (404, {"message": "no such image"})
        return (204, None) if method != "GET" else (200, {})


@pytest.fixture
async def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Engine]:
    engine = Engine()
    socket = tmp_path / "docker.sock"
    monkeypatch.setenv("DOCKER_HOST", f"unix://{socket}")
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    server = await asyncio.start_unix_server(engine.serve, socket)
    async with server:
        yield engine


async def test_the_client_asks_for_one_contained_container(engine: Engine, tmp_path: Path) -> None:
    workspace = await DockerRuntime("debian:12", tmp_path / "workspaces", network="agents").prepare(Files({"a": "1"}))
    launch = Command(("agent", "--flag", "do it"), env={"API_KEY": "the-key"}, mounts={"/tests": tmp_path})
    exit_ = await workspace.run(launch, Limits(processes=99, open_files=123, file_mb=2), 20)
    assert (exit_.ending, exit_.output) == (Ending.DONE, "hello\n")
    (asked,) = engine.created
    host = asked["HostConfig"]
    command = ["/bin/sh", "-c", RUN, "sh", "agent", "--flag", "do it"]
    assert (asked["Image"], asked["Cmd"], asked["Entrypoint"]) == ("debian:12", command, [""])
    assert asked["WorkingDir"] == "/workspace"
    assert "API_KEY=the-key" in asked["Env"]
    assert "HOME=/home/agent" in asked["Env"]
    assert (host["CapDrop"], host["SecurityOpt"]) == (["ALL"], ["no-new-privileges"])
    assert (host["NetworkMode"], host["PidsLimit"], host["AutoRemove"], host["Init"]) == ("agents", 99, True, True)
    assert {limit["Name"]: limit["Hard"] for limit in host["Ulimits"]} == {"nofile": 123, "fsize": 2 << 20, "core": 0}
    assert {bind.split(":")[1] for bind in host["Binds"]} == {"/workspace", "/home/agent", "/tmp", "/tests"}
    assert not host["Privileged"]
    assert engine.asked[-1].startswith("DELETE containers/rolltap-")
    await workspace.close()


@pytest.mark.parametrize(("code", "ending"), [(1, Ending.CRASHED), (7, Ending.LIMIT)])
async def test_the_containers_exit_code_is_the_agents(
    engine: Engine, tmp_path: Path, code: int, ending: Ending
) -> None:
    engine.code = code
    workspace = await DockerRuntime("debian:12", tmp_path / "workspaces").prepare(Files({}))
    exit_ = await workspace.run(Command(("agent",), stdin="do it", endings={7: Ending.LIMIT}), Limits(), 20)
    assert (exit_.ending, exit_.code) == (ending, code)
    assert engine.created[0]["OpenStdin"]
    await workspace.close()


async def test_an_image_that_cannot_be_pulled_is_the_places_failure(engine: Engine, tmp_path: Path) -> None:
    engine.has_image = False
    with pytest.raises(RuntimeFailed, match="docker can't pull debian:12"):
        await DockerRuntime("debian:12", tmp_path / "workspaces").prepare(Files({}))
