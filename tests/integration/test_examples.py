"""The examples, run as their READMEs say: the blocks but the last start servers, the last is what a user does then."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from rolltap.demo.stack import Process
from rolltap.trainer_client.recipes import recipe_class

from ..conftest import free_port

ROOT = Path(__file__).parents[2]
ENGINE = "http://127.0.0.1:8720"


def copied(name: str, folder: Path, ports: list[int]) -> list[str]:
    """The example in `folder`, with ports of its own, and the blocks of its README."""
    shutil.copytree(ROOT / "examples" / name, folder)
    engine, agent, trainer, admin = ports
    settings = folder / "rolltap.toml"
    text = settings.read_text(encoding="utf-8").replace(ENGINE, f"http://127.0.0.1:{engine}")
    listen = f"[listen]\nagent_port = {agent}\ntrainer_port = {trainer}\nadmin_port = {admin}\n"
    settings.write_text(text.replace("../../src", f"{ROOT}/src") + listen, encoding="utf-8")
    readme = (folder / "README.md").read_text(encoding="utf-8").replace("../../src", f"{ROOT}/src")
    readme = readme.replace("rolltap engine", f"rolltap engine --port {engine}")
    return re.findall(r"^```\n(.*?)^```$", readme, re.DOTALL | re.MULTILINE)


@pytest.mark.acceptance
@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("openai-loop", ("It is Paris.", "1 session, 2 calls", "1 row of trajectories")),
        ("rollouts", ("1 1 1 1", "0 0 0 0", "1 row of sft", "duplicates left out: 3")),
        ("user-simulator", ("1 1", "0 0", "8 rows of trajectories", "other_policy 8")),
        ("systems", ("Answer with digits only.", "reflects=instructions")),
        pytest.param("own-recipe", ("8 rollouts", "step 1 "), marks=pytest.mark.long),
    ],
)
def test_an_example_does_what_its_readme_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, words: tuple[str, ...]
) -> None:
    """6 to 9 CPU seconds: the commands of the README, each a process as a reader would start it."""
    does_what_its_readme_says(tmp_path, monkeypatch, name, words)


def does_what_its_readme_says(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, words: tuple[str, ...]) -> None:
    folder, ports = folder / name, [free_port() for _ in range(4)]
    *servers, commands = copied(name, folder, ports)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1", "COLUMNS": "160"}
    environment["ROLLTAP_ADMIN_URL"] = f"http://127.0.0.1:{ports[3]}"
    monkeypatch.chdir(folder)
    with ExitStack() as started:
        for command, port in zip(servers, (ports[0], ports[3]), strict=True):
            server = Process.start(shlex.split(command)[1], shlex.split(command), folder, environment)
            started.callback(server.stop)
            server.wait_for(f"http://127.0.0.1:{port}/health")
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", commands],
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
    assert done.returncode == 0, done.stdout + done.stderr
    for word in words:
        assert word in done.stdout + done.stderr, done.stdout + done.stderr


def test_the_recipe_of_the_example_is_one() -> None:
    recipe = recipe_class(str(ROOT / "examples" / "own-recipe" / "bolder.py"))
    assert (recipe.__name__, recipe.settings) == ("Bolder", {"loss": {"clip_high": 0.28}})
