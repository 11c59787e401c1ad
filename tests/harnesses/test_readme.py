"""The README's three uses, as they stand there: real Codex and Claude Code and a loop of one's own, a group of rollouts
and a step on it, then the exports; and real Codex without a GPU. `pip install` is what made this environment.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from rolltap.cli.try_ import KNOWN
from rolltap.demo.stack import Process
from rolltap.engine.tiny import FOLDER
from rolltap.harnesses.agents.install import Installation

from ..conftest import free_port
from ..integration.test_examples import does_what_its_readme_says
from .conftest import CACHE

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
ENGINE = "http://127.0.0.1:8000"
REPLY = "It is fixed."
LOOP = """
from openai import OpenAI

client, messages = OpenAI(), [{"role": "user", "content": "fix the failing test"}]
for _ in range(2):
    reply = client.chat.completions.create(model="my-model", messages=messages).choices[0].message.content
    messages += [{"role": "assistant", "content": reply}, {"role": "user", "content": "go on"}]
print(reply)
"""


def block(beginning: str, language: str = "") -> str:
    """The README's block that has a line beginning so."""
    blocks = re.findall(rf"^```{language}\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)
    return next(text for text in blocks if re.search(rf"^{re.escape(beginning)}", text, re.MULTILINE))


def line(beginning: str) -> str:
    return next(text for text in block(beginning).splitlines() if text.startswith(beginning))


@dataclass
class Newcomer:
    """A shell in an empty folder, with the commands of this environment and of the harnesses."""

    folder: Path
    environment: dict[str, str]

    def types(self, command: str) -> str:
        """What the command prints; it has to succeed."""
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", command],
            cwd=self.folder,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def sessions(self) -> list[dict[str, object]]:
        """The newest first."""
        return json.loads(self.types("rolltap sessions list --json"))

    def starts(self, command: str, health: str) -> Process:
        words = shlex.split(command, comments=True)
        server = Process.start(words[1], words, self.folder, self.environment)
        server.wait_for(f"{health}/health")
        return server


@pytest.fixture
def shell(tmp_path: Path, release: Callable[[str], Installation], monkeypatch: pytest.MonkeyPatch) -> Newcomer:
    monkeypatch.chdir(tmp_path)
    bins = [Path(sys.executable).parent, *release("codex").bins, *release("claude-code").bins]
    listen = ((plane, free_port()) for plane in ("AGENT", "TRAINER", "ADMIN"))
    environment = {
        "PATH": os.pathsep.join([*map(str, bins), os.environ["PATH"]]),
        "HOME": str(tmp_path / "home"),
        "COLUMNS": "160",
        "ROLLTAP_HARNESSES": str(CACHE),
        **{f"ROLLTAP_LISTEN__{plane}_PORT": str(port) for plane, port in listen},
    }
    (tmp_path / "home").mkdir()
    return Newcomer(tmp_path, environment)


@contextmanager
def servers(shell: Newcomer, engine: str, serve: str, default_url: str) -> Iterator[None]:
    """The two commands, on free ports; `default_url` is where `serve` looks for the engine."""
    port, admin = free_port(), shell.environment["ROLLTAP_LISTEN__ADMIN_PORT"]
    url = f"http://127.0.0.1:{port}"
    assert default_url in serve
    with ExitStack() as started:
        started.callback(shell.starts(f"{engine} --port {port}", url).stop)
        started.callback(shell.starts(serve.replace(default_url, url), f"http://127.0.0.1:{admin}").stop)
        yield


@pytest.fixture
def newcomer(shell: Newcomer) -> Iterator[Newcomer]:
    (shell.folder / "my-model").symlink_to(FOLDER)
    (shell.folder / "script.toml").write_text(f'otherwise = {{ say = "{REPLY}" }}\n')
    with servers(shell, "rolltap engine --script script.toml", line(f"rolltap serve --engine {ENGINE}"), ENGINE):
        yield shell


@pytest.mark.harness
@pytest.mark.timeout(400)
def test_the_three_uses_do_what_the_readme_says(newcomer: Newcomer) -> None:
    """13 CPU seconds: every command is a process as a reader would start it, and two are real harnesses."""
    prompt = shlex.quote("fix the failing test")
    for name in ("codex", "claude-code"):
        printed = newcomer.types(line("rolltap harness env").replace("codex", name))
        command = printed.splitlines()[-1].removeprefix("# then: ").replace("PROMPT", prompt)
        assert REPLY in newcomer.types(f"{printed}\n{command}")
    (newcomer.folder / "loop.py").write_text(LOOP)
    opened = line("rolltap sessions open").partition("#")[0]
    assert REPLY in newcomer.types(f'eval "$({opened})"; python loop.py')

    rows = newcomer.sessions()
    assert [row["harness"] for row in rows] == ["", "claude-code", "codex"]
    assert rows[0]["calls"] == 2
    assert all(row["output_tokens"] for row in rows), rows
    for row in rows:
        shown = newcomer.types(line("rolltap sessions show").replace("SESSION", str(row["id"])))
        assert "main completed" in shown
        assert "break" not in shown

    install, exports = block("rolltap export").split("\n", 1)
    assert install.startswith("pip install")
    exported = newcomer.types(f"{{\n{exports}}} 2>&1")
    assert re.search(r"[3-9] rows of trajectories in out", exported), exported
    assert "rows of sft in sft" in exported
    assert (newcomer.folder / "out" / "README.md").exists()
    frame = newcomer.types(f"python - <<'PYTHON'\n{block('import rolltap', 'python')}print(type(frame))\nPYTHON")
    assert "DataFrame" in frame


@pytest.mark.harness
@pytest.mark.timeout(400)
def test_the_second_use_runs_a_group_of_rollouts_and_trains_a_step_on_it(newcomer: Newcomer) -> None:
    """12 CPU seconds: eight real harnesses and a trainer."""
    install, commands = block("rolltap train").split("\n", 1)
    assert install.startswith("pip install")
    printed = newcomer.types(commands)
    assert "8 rollouts in" in printed, printed
    assert "0 not succeeded" in printed, printed
    (metrics,) = (newcomer.folder / "run" / "metrics.jsonl").read_text().splitlines()
    assert json.loads(metrics)["version"] == 1
    rows = newcomer.sessions()
    assert [(row["harness"], row["reward"], row["status"]) for row in rows] == [("codex", 0.0, "succeeded")] * 8
    assert all(row["output_tokens"] for row in rows), rows


@pytest.mark.harness
@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", ["codex", "claude-code"])
def test_without_a_gpu_a_script_plays_the_model(shell: Newcomer, name: str) -> None:
    """A real harness on the servers of the first block."""
    lines = re.sub(r"\b(examples|src)/", rf"{ROOT}/\1/", block("rolltap engine --script")).splitlines()
    engine, serve = (
        next(each for each in lines if each.startswith(f"rolltap {name}")).removesuffix(" &")
        for name in ("engine", "serve")
    )
    with servers(shell, engine, serve, "http://127.0.0.1:8720"):
        assert "I wrote hello.txt." in shell.types(block("rolltap harness install codex && ").replace("codex", name))
        (row,) = shell.sessions()
    assert (shell.folder / "hello.txt").read_text() == "hello\n"
    assert (row["harness"], row["calls"], row["breaks"]) == (name, 3, 0)


OWN_KEY = "sk-a-persons-own-key-123"
AT_WORK = {
    "codex": "{line} exec -m scripted --skip-git-repo-check --dangerously-bypass-approvals-and-sandbox 'Write hello'",
    "claude-code": "{line}; claude -p 'Write hello.txt.' --allowedTools Bash",
}
"""How people start their own harness, behind the line of it that `serve --capture` prints."""


@contextmanager
def vendor(shell: Newcomer) -> Iterator[None]:
    """A vendor of both protocols that takes `OWN_KEY`: another rolltap, which the file of settings here names."""
    engine, ports = free_port(), [free_port() for _ in range(3)]
    folder = shell.folder / "vendor"
    folder.mkdir()
    (folder / "rolltap.toml").write_text(
        f'data = "{folder}/data"\n[keys]\nproject = "{OWN_KEY}"\n[engines.script]\nkind = "rolltap"\n'
        f'url = "http://127.0.0.1:{engine}"\n[policies.theirs]\nengine = "script"\ntokenizer = "{FOLDER}"\n'
        'aliases = ["*"]\n'
    )
    (shell.folder / "rolltap.toml").write_text(
        "".join(
            f'[engines.{name}]\nkind = "passthrough"\nurl = "http://127.0.0.1:{ports[0]}{path}"\n'
            f'dialects = ["{dialect}"]\n[policies.{name}]\nengine = "{name}"\n'
            for name, dialect, path in (("openai", "openai_responses", "/v1"), ("anthropic", "anthropic", ""))
        )
    )
    planes = dict(zip(("agent", "trainer", "admin"), ports, strict=True))
    serve = f"rolltap serve --config {folder}/rolltap.toml " + " ".join(
        f"--{plane}-port {port}" for plane, port in planes.items()
    )
    script = ROOT / "examples" / "no-gpu" / "engine.toml"
    with ExitStack() as started:
        url = f"http://127.0.0.1:{engine}"
        started.callback(shell.starts(f"rolltap engine --script {script} --port {engine}", url).stop)
        started.callback(shell.starts(serve, f"http://127.0.0.1:{planes['admin']}").stop)
        yield


@pytest.mark.harness
@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", AT_WORK)
def test_capture_records_a_harness_at_work_under_its_own_key(shell: Newcomer, name: str) -> None:
    """A person copies one line that `serve --capture` prints, and works as ever; nothing else is set up."""
    serve = "rolltap serve --capture"
    assert f"`{serve}`" in README
    shell.environment |= {"ANTHROPIC_API_KEY": OWN_KEY, "CODEX_API_KEY": OWN_KEY}
    with vendor(shell), ExitStack() as started:
        admin = f"http://127.0.0.1:{shell.environment['ROLLTAP_LISTEN__ADMIN_PORT']}"
        proxy = shell.starts(serve, admin)
        started.callback(proxy.stop)
        printed = "codex -c " if name == "codex" else "export ANTHROPIC_BASE_URL="
        (copied,) = (each for each in proxy.log.read_text().splitlines() if each.startswith(printed))
        work = AT_WORK[name].format(line=copied.partition("  #")[0])
        assert "I wrote hello.txt." in shell.types(work)
        (row,) = (row for row in shell.sessions() if row["calls"] == 3)
    assert (shell.folder / "hello.txt").read_text() == "hello\n"
    kept = b"".join(path.read_bytes() for path in (shell.folder / "rolltap-data").rglob("*") if path.is_file())
    assert OWN_KEY.encode() not in kept
    assert "stopped; the record stays: sqlite:///" in proxy.log.read_text()
    assert row["policy"] == ("openai" if name == "codex" else "anthropic")


@pytest.mark.harness
@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", KNOWN)
def test_one_command_shows_a_harness_at_work_on_a_script(
    shell: Newcomer, release: Callable[[str], Installation], name: str
) -> None:
    """5 to 8 CPU seconds: two servers and a real harness, in an empty folder."""
    release(name)
    assert line("rolltap try") == "rolltap try codex"
    printed = shell.types(f"rolltap try {name} --once")
    assert "its folder:" in printed
    assert "3 calls" in printed
    assert (shell.folder / "rolltap-try" / "work" / "hello.txt").read_text() == "hello\n"


@pytest.mark.harness
@pytest.mark.timeout(400)
def test_the_example_without_a_gpu_does_what_its_readme_says(
    tmp_path: Path, release: Callable[[str], Installation], monkeypatch: pytest.MonkeyPatch
) -> None:
    release("codex")
    monkeypatch.setenv("ROLLTAP_HARNESSES", str(CACHE))
    does_what_its_readme_says(tmp_path, monkeypatch, "no-gpu", ("I wrote hello.txt.", "hello\n", "codex"))
