"""A real vLLM and a real `rolltap serve` before it, as processes.

vLLM is the CPU build that `scripts/engines.sh` installs into `.cache/engines`, in an environment of its own: rolltap
meets it over HTTP only. It serves the tiny model in float32, so its log-probs can be checked tightly.
"""

from __future__ import annotations

import os
import subprocess
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from rolltap.contract.trainer import PauseMode
from rolltap.engine.tiny import FOLDER
from rolltap.trainer_client.lease.client import TrainerClient
from rolltap.trainer_client.lease.push import push_folder

from ..conftest import ROOT, free_port
from ..integration.service import rolltap

VLLM_VERSION = "0.32.0"
ENVIRONMENT = ROOT / ".cache" / "engines" / f"vllm-{VLLM_VERSION}"
START_S = 300.0
STOP_S = 30.0
MODEL = "tiny"
MAX_TOKENS = 64
CANDIDATES = 4
"""`top_logprobs` of the policy `watched`."""

BASE = ("--served-model-name", MODEL, "--host", "127.0.0.1", "--dtype", "float32", "--enforce-eager")
COMMON = (
    *BASE, "--model", str(FOLDER), "--max-model-len", "4096", "--enable-auto-tool-choice", "--tool-call-parser",
    "hermes", "--reasoning-parser", "qwen3",
)  # fmt: skip
WHOLE = (
    *COMMON, "--enable-scale-out", "--logprobs-mode", "processed_logprobs", "--enable-lora",
    "--weight-transfer-config", '{"backend": "rolltap"}',
)  # fmt: skip
DEVELOPER = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
"""As docs/engines.md says to start vLLM for training, with and without adapters."""

ALLOWED_CORES = sorted(os.sched_getaffinity(0))
CORES = ALLOWED_CORES[1:] or ALLOWED_CORES
"""Of vLLM: all but the first. Its worker computes without a pause, and what shares a core with it (the proxy, the
clients) may wait for seconds until the kernel gives it a turn."""

CPU = {
    "VLLM_TARGET_DEVICE": "cpu",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}


@contextmanager
def vllm(folder: Path, flags: Sequence[str], env: Mapping[str, str]) -> Iterator[str]:
    """A running vLLM; yields its URL. The first chat request after a start is slow, so one is made here."""
    port = free_port()
    command = [str(ENVIRONMENT / "bin" / "python"), "-m", "vllm.entrypoints.openai.api_server", "--port", str(port)]
    log = folder / "vllm.log"
    plugin = {"PYTHONPATH": f"{rolltap_without_requirements(folder / 'site')}{os.pathsep}{ROOT / 'src'}"}
    with log.open("wb") as out:
        process = subprocess.Popen(
            ["taskset", "-c", ",".join(map(str, CORES)), *command, *flags],
            cwd=folder,
            env={**os.environ, **CPU, **plugin, **env},
            stdout=out,
            stderr=subprocess.STDOUT,
        )
    url = f"http://127.0.0.1:{port}"
    try:
        until_up(f"{url}/health", process, log)
        warm = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
        httpx.post(f"{url}/v1/chat/completions", json=warm, timeout=120).raise_for_status()
        yield url
    finally:
        stop(process)


def rolltap_without_requirements(folder: Path) -> Path:
    """What `pip install --no-deps rolltap` tells vLLM's Python of this source tree: its entry points."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    about = folder / "rolltap-0.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: rolltap\nVersion: 0\n")
    groups = project["entry-points"].items()
    lines = [line for group, points in groups for line in (f"[{group}]", *(f"{k} = {v}" for k, v in points.items()))]
    (about / "entry_points.txt").write_text("\n".join(lines) + "\n")
    return folder


@dataclass(frozen=True)
class Proxy:
    """A running `rolltap serve`. `database` is its record, `env` what its commands need to find it."""

    folder: Path
    config: Path
    agent_url: str
    trainer: httpx.Client
    admin: httpx.Client
    trainer_key: str

    @property
    def database(self) -> str:
        return f"sqlite:///{self.folder / 'data' / 'rolltap.db'}"

    def open_session(self, policy: str) -> dict[str, str]:
        """A fresh session: `session_id`, `key`, `base_url`."""
        return self.admin.post("/sessions", json={"policy": policy}).raise_for_status().json()

    def calls(self, session_id: str) -> list[dict]:
        """The session's forest as the admin plane tells it."""
        return self.admin.get(f"/read/sessions/{session_id}").raise_for_status().json()["calls"]

    def push(self, policy: str, weights: Path, mode: PauseMode = "keep", *, adapter: bool = False) -> int:
        """New weights between `begin_update` and `finish_update`, as a trainer pushes them; returns their version."""
        client = self.owner(policy)
        served = client.policy(policy).version
        free = client.rewind(0, {policy: served}).versions[policy]  # another one after a push that failed
        version = max(free, served + 1)
        push_folder(client, policy, weights, version, mode, adapter=adapter)
        return version

    def owner(self, policy: str) -> TrainerClient:
        """A client that owns the policy as it is served now; earlier ones are fenced."""
        client = TrainerClient(str(self.trainer.base_url), self.trainer_key, "trainer", run="tests", patience=5)
        client.rewind(0, {policy: client.policy(policy).version})
        return client


POLICIES = (
    f'[policies.tiny]\nengine = "main"\nmodel = "{MODEL}"\ntokenizer = "{FOLDER}"\nfamily = "qwen3"\n'
    f'[policies.watched]\nengine = "main"\nmodel = "{MODEL}"\ntokenizer = "{FOLDER}"\nfamily = "qwen3"\n'
    f"top_logprobs = {CANDIDATES}\n"
    f'[policies.adapted]\nengine = "main"\ntokenizer = "{FOLDER}"\nfamily = "qwen3"\n'
    f'[policies.chat]\nengine = "chat"\nmodel = "{MODEL}"\n'
)
"""`tiny` and `watched` by tokens, `adapted` by an adapter of its name, `chat` through the chat API."""


@contextmanager
def proxy(folder: Path, engine_url: str, policies: str = POLICIES) -> Iterator[Proxy]:
    """`rolltap serve` before a vLLM, by tokens (`main`) and by its chat API (`chat`)."""
    ports = {plane: free_port() for plane in ("agent", "trainer", "admin")}
    config = folder / "rolltap.toml"
    config.write_text(
        f'data = "{folder / "data"}"\n[listen]\n'
        + "".join(f"{plane}_port = {port}\n" for plane, port in ports.items())
        + f'[engines.main]\nkind = "vllm"\nurl = "{engine_url}"\n'
        + f'[engines.chat]\nkind = "openai_compatible"\nurl = "{engine_url}"\n'
        + policies
    )
    log = folder / "serve.log"
    process = rolltap("serve", "--config", str(config), env={}, log=log)
    urls = {plane: f"http://127.0.0.1:{port}" for plane, port in ports.items()}
    try:
        until_up(f"{urls['admin']}/health", process, log)
        keys = tomllib.loads((folder / "data" / "keys.toml").read_text())
        with _client(urls["trainer"], keys["trainer"]) as trainer, _client(urls["admin"], keys["admin"]) as admin:
            yield Proxy(folder, config, urls["agent"], trainer, admin, keys["trainer"])
    finally:
        stop(process)


def _client(url: str, key: str) -> httpx.Client:
    return httpx.Client(base_url=url, headers={"Authorization": f"Bearer {key}"}, timeout=60)


def until_up(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    """Waits until `url` answers 200; fails with the end of the log if the process ends before."""
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            pytest.fail(f"{log.stem} ended with {process.returncode}: {log.read_text(errors='replace')[-2000:]}")
        try:
            if httpx.get(url, timeout=5).status_code == 200:
                return
        except httpx.TransportError:
            time.sleep(0.2)
    pytest.fail(f"{log.stem} was not up within {START_S:g} s: {log.read_text(errors='replace')[-2000:]}")


def stop(process: subprocess.Popen[bytes]) -> None:
    """Ends it in order, then by force."""
    process.terminate()
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
