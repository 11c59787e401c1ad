"""Trainers that no package index has, run from their source: `make test-sources SOURCES=/folder/of/check-outs`.

The suite of `test_contract.py` runs with their own code, and the schemas that other tests use are held against it.
"""

from __future__ import annotations

import ast
import asyncio
import json
import os
import subprocess
from pathlib import Path

import pytest

from rolltap.trainer_client.adapters.nemo_gym_agent import GymAgent

from ..conftest import ROOT
from ..harnesses.house import POLICY, house
from ..integration.test_nemo_gym_agent import SCRIPT, node, row, rows_of
from .proofs import SOURCES, SUITES
from .sources import FOLDER, SCHEMAS, Field, schema

NAMES = sorted(path.stem for path in SCHEMAS.glob("*.json"))


def test_each_adapter_that_needs_a_source_has_a_schema() -> None:
    assert sorted(name for name, suite in SUITES.items() if suite.with_source) == NAMES


@pytest.mark.trainers
@pytest.mark.sources
@pytest.mark.parametrize("name", NAMES)
def test_the_schema_is_the_sources_at_its_commit(name: str) -> None:
    of = schema(name)
    assert FOLDER, "ROLLTAP_SOURCES names no folder of check-outs"
    if (of.checkout / ".git").exists():
        command = ["git", "-C", str(of.checkout), "rev-parse", "HEAD"]
        assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip() == of.commit
    for key, fields in of.classes.items():
        file, _, kind = key.partition(":")
        assert fields_of(of.checkout / file, kind) == list(fields), key


def fields_of(path: Path, kind: str) -> list[Field]:
    """The annotated fields of a class in a file."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    (definition,) = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name == kind]
    return [
        (ast.unparse(line.target), ast.unparse(line.annotation), ast.unparse(line.value) if line.value else None)
        for line in definition.body
        if isinstance(line, ast.AnnAssign)
    ]


@pytest.mark.trainers
@pytest.mark.sources
@pytest.mark.timeout(600)
def test_adapters_keep_the_contract_with_the_trainers_own_code() -> None:
    python = ROOT / ".cache" / "trainers" / SOURCES / "bin" / "python"
    variables = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'src'}", "ROLLTAP_TRAINERS": SOURCES}
    tests = ["tests/trainers/test_contract.py", "tests/trainers/test_nemo_rl.py"]
    command = [str(python), "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests]
    done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=580)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


@pytest.mark.trainers
@pytest.mark.sources
@pytest.mark.timeout(300)
async def test_nemo_rls_own_code_makes_its_messages_of_the_recorded_tokens(tmp_path: Path) -> None:
    async with house(SCRIPT, tmp_path) as home, node(home):
        reply = await GymAgent(home.client, POLICY).run(row("Count the files."))
        calls = [each.call() for each in await rows_of(home, reply["session_id"])]
    python = ROOT / ".cache" / "trainers" / SOURCES / "bin" / "python"
    variables = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'src'}"}
    command = [str(python), "-m", "tests.trainers.nemo_rl_gym"]
    options = {"cwd": ROOT, "env": variables, "capture_output": True, "text": True, "timeout": 200}
    done = await asyncio.to_thread(subprocess.run, command, input=json.dumps(reply), **options)
    assert done.returncode == 0, done.stderr[-4000:]
    messages = json.loads(done.stdout)
    assert [message["role"] for message in messages] == ["user", "assistant"] * len(calls)
    sampled = [(message["ids"], message["logprobs"]) for message in messages[1::2]]
    assert sampled == [(call.output_ids.tolist(), call.logprobs.tolist()) for call in calls]
    whole = [id for message in messages for id in message["ids"]]
    assert whole == [*calls[-1].prompt_ids.tolist(), *calls[-1].output_ids.tolist()]
