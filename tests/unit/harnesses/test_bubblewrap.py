"""The sandbox's walls, tried by a hostile script from inside. `make test` installs bubblewrap where it is missing."""

from __future__ import annotations

import asyncio
import os
import platform
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from rolltap.errors import RuntimeFailed, TaskInvalid
from rolltap.harnesses.base import Command, Ending, Endpoint, Exit, Limits, PythonCall
from rolltap.harnesses.runtimes.bubblewrap import INTERPRETER, BubblewrapRuntime, BubblewrapWorkspace, refusal
from rolltap.harnesses.runtimes.containers import DockerRuntime
from rolltap.harnesses.runtimes.process import ProcessRuntime
from rolltap.harnesses.runtimes.registry import runtime_for
from rolltap.harnesses.runtimes.relay import Target
from rolltap.harnesses.runtimes.sources import Files
from rolltap.harnesses.runtimes.thread import ThreadRuntime

LIMITS = Limits()
LISTENERS = (
    'cat /proc/net/tcp /proc/net/tcp6 /proc/net/udp /proc/net/udp6 | awk \'$4 == "0A" || $4 == "07" {print $2}\''
)
"""Every address at which anything can be reached in the agent's network."""


@asynccontextmanager
async def listening(greeting: bytes) -> AsyncIterator[int]:
    """A server on loopback that greets whoever connects, and echoes."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(greeting)
        while data := await reader.read(1 << 16):
            writer.write(data)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1]


REFUSED = refusal()
"""On a machine that allows no user namespaces the walls can't be tried; what is said there is proved instead."""


@pytest.fixture
async def workspace(tmp_path: Path) -> AsyncIterator[BubblewrapWorkspace]:
    workspace = await BubblewrapRuntime(tmp_path / "workspaces").prepare(Files({"mine.txt": "mine"}))
    if REFUSED:
        with pytest.raises(RuntimeFailed, match="bubblewrap could not make the sandbox"):
            await attempt(workspace, "true")
        pytest.skip(f"this machine allows no sandbox: {REFUSED}")
    yield workspace
    await workspace.close()


async def attempt(workspace: BubblewrapWorkspace, script: str, *, reach: str = "", timeout: float = 20) -> Exit:
    return await workspace.run(Command(("/bin/bash", "-c", script), env={"KEY": "k"}), LIMITS, timeout, reach=reach)


async def test_the_agent_sees_its_own_files_and_writes_them(workspace: BubblewrapWorkspace) -> None:
    exit_ = await attempt(
        workspace, "cat mine.txt; echo; pwd && echo new > out.txt && echo $HOME $KEY && id -u && touch ~/x"
    )
    assert (exit_.ending, exit_.output.split()) == (
        Ending.DONE,
        ["mine", "/workspace", "/home/agent", "k", "1000"],
    )
    assert (workspace.folder / "out.txt").read_text() == "new\n"


@pytest.fixture
def runner_process() -> Iterator[int]:
    """A process of the same user, started with a secret in its environment; its id."""
    with subprocess.Popen(["sleep", "60"], env={"ROLLTAP_KEYS__ADMIN": "hush-in-the-environment"}) as process:
        yield process.pid
        process.kill()


async def test_a_hostile_script_finds_nothing_of_the_machine(
    workspace: BubblewrapWorkspace, runner_process: int, tmp_path: Path
) -> None:
    other = await BubblewrapRuntime(tmp_path / "workspaces").prepare(Files({"secret.txt": "hush-of-another-rollout"}))
    database = tmp_path / "rolltap.db"
    database.write_text("hush-in-the-database")
    script = f"""{{
        cat {other.folder}/secret.txt; ls -R {tmp_path}; cat {database} {__file__}
        cat /proc/{runner_process}/environ /proc/*/environ; cat /proc/1/root{database}; env
        ls /proc/{os.getpid()} /root /etc /var/lib /run; cat /etc/shadow
        }} 2>&1 | grep -aoE 'hush[a-z-]+|No such file' | sort -u
        find / -xdev -name '*.db' -exec cat {{}} + 2>/dev/null; grep -rs hush- /dev/shm /tmp /home"""
    exit_ = await attempt(workspace, script)
    unwalled = await ProcessRuntime(tmp_path / "workspaces").prepare(Files({}))
    found = await unwalled.run(Command(("/bin/bash", "-c", script.partition("find /")[0])), LIMITS, 20)
    await other.close()
    await unwalled.close()
    assert exit_.output == "No such file\n"
    for secret in ("hush-of-another-rollout", "hush-in-the-database", "hush-in-the-environment"):
        assert secret in found.output, "the script would find it where there are no walls"


@pytest.mark.parametrize(
    "script",
    [
        "echo x > /usr/x",
        "echo x > /etc/passwd",
        "mount -t tmpfs none /workspace",
        "unshare -U true",
        "kill -9 $$PARENT",
        "ls /sys/kernel",
        "cat /dev/mem",
        "ulimit -n 1000000",
    ],
)
async def test_what_the_walls_forbid(workspace: BubblewrapWorkspace, script: str) -> None:
    exit_ = await attempt(workspace, script.replace("$$PARENT", str(os.getpid())))
    assert exit_.ending is Ending.CRASHED, exit_.output


CLONE = {"x86_64": 56, "aarch64": 220}
NEW_NAMESPACE = """
import ctypes, os, sys
made = ctypes.CDLL(None).syscall(int(sys.argv[1]), 0x10000000 | 17, 0, 0, 0, 0)  # CLONE_NEWUSER, SIGCHLD
if made == 0:
    os._exit(0)
sys.exit(made > 0)
"""


@pytest.mark.skipif(platform.machine() not in CLONE, reason="the number of the call is not known here")
async def test_no_user_namespace_can_be_made_by_any_call(workspace: BubblewrapWorkspace) -> None:
    """seccomp refuses `unshare`; `clone` it can't, as every fork is one."""
    command = (INTERPRETER, "-I", "-S", "-c", NEW_NAMESPACE, str(CLONE[platform.machine()]))
    exit_ = await workspace.run(Command(command), LIMITS, 20)
    assert exit_.code == 0, exit_.output


async def test_only_the_proxy_can_be_reached(workspace: BubblewrapWorkspace) -> None:
    async with listening(b"proxy\n") as proxy, listening(b"admin plane\n") as admin:
        talk = "exec 3<>/dev/tcp/127.0.0.1/{} && head -1 <&3"
        reach = f"http://127.0.0.1:{proxy}/s/abc"
        allowed = await attempt(workspace, talk.format(proxy), reach=reach)
        refused = await attempt(workspace, talk.format(admin), reach=reach)
        outside = await attempt(workspace, "exec 3<>/dev/tcp/1.1.1.1/53", reach=reach)
        without = await attempt(workspace, talk.format(proxy))
        listeners = await attempt(workspace, LISTENERS, reach=reach)
    assert (allowed.ending, allowed.output) == (Ending.DONE, "proxy\n")
    assert refused.ending is outside.ending is without.ending is Ending.CRASHED
    assert "admin" not in refused.output + without.output
    assert listeners.output == f"0100007F:{proxy:04X}\n"


async def test_the_relay_carries_megabytes_and_ends_each_direction(workspace: BubblewrapWorkspace) -> None:
    script = """python3 - <<'X'
import socket, threading
c = socket.create_connection(("127.0.0.1", PORT)); data = bytes(range(256)) * 20_000
def send(): c.sendall(data); c.shutdown(socket.SHUT_WR)
threading.Thread(target=send).start()
got = b""
while part := c.recv(65536): got += part
print(got == b"hello" + data)
X"""
    async with listening(b"hello") as port:
        exit_ = await attempt(workspace, script.replace("PORT", str(port)), reach=f"http://127.0.0.1:{port}")
    assert exit_.output == "True\n"


async def test_daemons_end_with_the_sandbox(workspace: BubblewrapWorkspace) -> None:
    script = "setsid nohup sh -c 'while true; do date +%N > /workspace/alive; done' >/dev/null 2>&1 & sleep 60"
    exit_ = await attempt(workspace, script, timeout=1)
    assert exit_.ending is Ending.TIMED_OUT
    before = (workspace.folder / "alive").read_text()
    await asyncio.sleep(0.2)  # nothing to await: the point is that nothing happens
    assert (workspace.folder / "alive").read_text() == before


async def test_a_machine_that_refuses_user_namespaces_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bwrap = tmp_path / "bin" / "bwrap"
    bwrap.parent.mkdir()
    bwrap.write_text("#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2\nexit 1\n")
    bwrap.chmod(0o755)
    monkeypatch.setenv("PATH", f"{bwrap.parent}:{os.environ['PATH']}")
    workspace = await BubblewrapRuntime(tmp_path / "workspaces").prepare(Files({}))
    with pytest.raises(RuntimeFailed, match="No permissions to create new namespace; allow user namespaces"):
        await attempt(workspace, "true")
    await workspace.close()
    refusal.cache_clear()
    assert refusal() == "bwrap: No permissions to create new namespace"
    with pytest.raises(RuntimeFailed, match=r"no sandbox for agents \(bwrap: No permissions"):
        runtime_for("auto", Command)
    refusal.cache_clear()


def test_the_sandbox_is_the_default_where_it_works() -> None:
    if not REFUSED:
        assert runtime_for("", Command) is BubblewrapRuntime
    assert runtime_for("", PythonCall) is ThreadRuntime
    assert runtime_for("docker", Command) is DockerRuntime
    with pytest.raises(TaskInvalid, match="the runtime 'thread' runs Python calls only; use 'bubblewrap'"):
        runtime_for("thread", Command)


def test_the_address_inside() -> None:
    endpoint = Endpoint("https://rollouts.example/s/x", "k", "m")
    inside = Target.of(endpoint.base_url).inside(endpoint)
    assert inside.base_url == "http://127.0.0.1:10443/s/x"
    with pytest.raises(TaskInvalid, match="not an http URL"):
        Target.of("ftp://x")


@pytest.mark.parametrize("script", ["echo 'bwrap: no such sandbox' >&2; exit 1", "printf 'bwrap: x'; exec false"])
async def test_what_an_agent_prints_and_returns_is_no_failure_of_the_sandbox(
    workspace: BubblewrapWorkspace, script: str
) -> None:
    exit_ = await attempt(workspace, script)
    assert (exit_.ending, exit_.code) == (Ending.CRASHED, 1)


async def test_a_sandbox_that_cannot_be_made_is_the_machines_failure(workspace: BubblewrapWorkspace) -> None:
    mounts = {"/data": workspace.folder / "nowhere"}
    with pytest.raises(RuntimeFailed, match="bubblewrap could not make the sandbox"):
        await workspace.run(Command(("true",), mounts=mounts), LIMITS, 20)
