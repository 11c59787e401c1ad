"""The examples, run as their READMEs say: the two blocks before the last start servers, the last is what a user does
then; earlier ones make what these need."""

from __future__ import annotations

import asyncio
import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import load_dataset
from PIL import Image
from safetensors.torch import load_file
from tokenizers import Tokenizer

from rolltap.calllog.facts import CallRow
from rolltap.datasets.record import open_record
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
    with as_its_readme_says(folder, monkeypatch, name) as (said, _):
        for word in words:
            assert word in said, said


@pytest.mark.acceptance
@pytest.mark.timeout(240)
def test_a_web_page_by_screenshots_is_recorded_and_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """30 CPU seconds: two Chromiums, a trainer, and the commands of the README.

    The record has the engine's own tokens, one chain a rollout, and each screenshot once; the step changes the part of
    the model that sees; the exported rows have the pictures.
    """
    with as_its_readme_says(tmp_path, monkeypatch, "web-screenshots") as (said, engine):
        for word in ("0.500", "3 parts", "all sound", "step 1 ", "2 rows of sft"):
            assert word in said, said
        with urllib.request.urlopen(f"{engine}/scripted/log") as answer:
            requests = json.load(answer)["requests"]
    rows, files = asyncio.run(recorded(f"sqlite:///{tmp_path}/web-screenshots/rolltap-data/rolltap.db"))
    asked = [entry for entry in requests if entry["session"] in {row.intent.session_id for row in rows}]  # no probes
    calls = [(row.prompt_ids.tolist(), row.completion.output_ids.tolist()) for row in rows if row.completion]
    assert sorted(calls) == sorted((entry["prompt_ids"], entry["output_ids"]) for entry in asked)
    assert len(calls) == 4
    assert sorted(str(entry["extends"]) for entry in asked) == ["None", "None", "True", "True"]
    tokenizer = Tokenizer.from_file("model/tokenizer.json")
    for ids in (ids for _, ids in calls):
        text = tokenizer.decode(ids[:-1])
        assert text.rpartition("\n")[2] in ("click 160 165", "answer 4711", "click 160 95", "answer 9034")
        assert ids[:-1] != tokenizer.encode(text, add_special_tokens=False).ids
    shown = [[image.digest for image in row.intent.images] for row in rows]
    assert sorted(map(len, shown)) == [1, 1, 2, 2]
    assert len({digests[0] for digests in shown}) == 1  # all begin at the same sight
    assert {digest for digests in shown for digest in digests} == files.keys()
    assert {Image.open(io.BytesIO(file)).size for file in files.values()} == {(320, 224)}
    folders = (Path("model"), Path("run", "checkpoints", "step-1"))
    before, after = (load_file(folder / "model.safetensors") for folder in folders)
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert any("visual" in name for name in moved)
    data: Any = load_dataset("out", split="train", cache_dir=str(tmp_path / "cache"))
    assert [[image.size for image in row["images"]] for row in data] == [[(320, 224)], [(320, 224)] * 2]


async def recorded(store: str) -> tuple[list[CallRow], dict[str, bytes]]:
    """All calls with the files of their images."""
    log = open_record(store)
    await log.start()
    try:
        rows = [row for session in await log.sessions() for row in await log.rows(session.id)]
        return rows, dict(await log.images({image.digest for row in rows for image in row.intent.images}))
    finally:
        await log.close()


@contextmanager
def as_its_readme_says(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> Iterator[tuple[str, str]]:
    """What the commands said, and the engine's URL while the servers run."""
    folder, ports = folder / name, [free_port() for _ in range(4)]
    *first, engine, server, commands = copied(name, folder, ports)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1", "COLUMNS": "160"}
    environment["ROLLTAP_ADMIN_URL"] = f"http://127.0.0.1:{ports[3]}"
    monkeypatch.chdir(folder)
    for command in first:
        subprocess.run(shlex.split(command), env=environment, check=True)
    with ExitStack() as started:
        for command, port in ((engine, ports[0]), (server, ports[3])):
            process = Process.start(shlex.split(command)[1], shlex.split(command), folder, environment)
            started.callback(process.stop)
            process.wait_for(f"http://127.0.0.1:{port}/health")
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", commands],
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        yield done.stdout + done.stderr, f"http://127.0.0.1:{ports[0]}"


def test_the_recipe_of_the_example_is_one() -> None:
    recipe = recipe_class(str(ROOT / "examples" / "own-recipe" / "bolder.py"))
    assert (recipe.__name__, recipe.settings) == ("Bolder", {"loss": {"clip_high": 0.28}})


TINY = {"trace": 8, "appo": 4, "tcod": 3, "tree_grpo": 3, "user_dialogue": 6}
"""The examples that the tiny model plays, and the least groups that they leave."""


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", TINY)
def test_an_example_runs_on_the_tiny_model_and_is_trained(name: str) -> None:
    """It takes more than 60 CPU seconds where the machine is busy: two servers and a trainer start, each with torch."""
    command = [sys.executable, "tiny.py", name]
    done = subprocess.run(command, cwd=ROOT / "examples" / "systems", capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    assert found["groups"] >= TINY[name]
    assert found["step"]["groups"] == found["groups"]
    assert found["step"]["tokens"] > 0
    assert found["step"]["grad_norm"] > 0
    played = found["played"]
    if name == "appo":
        assert all(len({place[1] for place in one["places"]}) == 2 for one in played), "scores of real entropies"
    if name == "tree_grpo":
        assert all(one["rollouts"] == 2 + 2 * 2 * 2 for one in played)
        assert len({earned for one in played for tree in one["trees"] for earned in tree}) > 1
    if name == "tcod":
        assert [one["kept"] for one in played] == [2, 1, 0]
    if name == "trace":
        assert len(played["forks"]) == 8
    if name == "user_dialogue":
        assert len({one["goes on"] for one in played}) == 3
