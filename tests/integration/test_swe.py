"""docs/rollouts.md, "A SWE-style task from file to trained step", as it is written there."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from rolltap.engine.tiny import FOLDER

from ..forked_commands import forked_rolltap
from ..plain_python import plain_python
from .service import POLICY, service

HERE = Path(__file__).parent
TEST_PATCH = """\
--- a/test_calc.py
+++ b/test_calc.py
@@ -3,2 +3,6 @@
 def test_zero():
     assert add(0, 0) == 0
+
+
+def test_add():
+    assert add(2, 3) == 5
"""


def git(*arguments: str, at: Path) -> str:
    identity = ("-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "init.defaultBranch=main")
    return subprocess.run(["git", *identity, *arguments], cwd=at, check=True, capture_output=True, text=True).stdout


def repository(folder: Path) -> str:
    """A repository with a bug; returns the commit that has it."""
    folder.mkdir(parents=True)
    (folder / "calc.py").write_text("def add(a, b):\n    return a - b\n")
    (folder / "test_calc.py").write_text("from calc import add\n\ndef test_zero():\n    assert add(0, 0) == 0\n")
    git("init", "-q", at=folder)
    git("add", ".", at=folder)
    git("commit", "-q", "-m", "a calculator", at=folder)
    return git("rev-parse", "HEAD", at=folder).strip()


@pytest.mark.acceptance
@pytest.mark.timeout(600)
async def test_an_instance_becomes_a_trained_step(tmp_path: Path) -> None:
    """12 CPU seconds: four runs of a real agent, their tests, and a trainer, each in processes of its own."""
    instance = {
        "instance_id": "acme__calc-1",
        "repo": "acme/calc",
        "base_commit": repository(tmp_path / "repositories" / "acme__calc"),
        "problem_statement": "add(2, 3) gives -1.",
        "test_patch": TEST_PATCH,
        "FAIL_TO_PASS": json.dumps(["test_calc.py::test_add"]),
        "PASS_TO_PASS": json.dumps(["test_calc.py::test_zero"]),
        "python": plain_python(),
    }
    instances = tmp_path / "instances.jsonl"
    instances.write_text(json.dumps(instance))
    repositories = str(tmp_path / "repositories")
    async with service(tmp_path, HERE / "swe_script.py", start=forked_rolltap) as home:
        words = ("--harness", "mini-swe-agent", "--n", "4", "--repositories", repositories, "--id", "swe")
        status, told = await home.run("run", str(instances), *words)
        assert status == 0, told
        async with home.client() as client:
            (group,) = await client.submission_groups("swe")
        rewards = [reward for rollout in group.rollouts for reward in rollout.rewards]
        assert sorted(reward.value for reward in rewards) == [0.0, 0.0, 1.0, 1.0]
        for reward in rewards:
            hacked = reward.value == 0.0
            assert reward.detail["dropped_test_changes"] == (["test_calc.py"] if hacked else [])
            assert reward.detail["failed"] == (["test_calc.py::test_add"] if hacked else [])
        out = tmp_path / "out"
        home.env["ROLLTAP_TRAINER__REPORT__MISMATCH_STOP"] = "0"  # the scripted engine makes its log-probs up
        options = ("--url", home.trainer_url, "--steps", "1", "--groups", "1", "--threads", "1")
        status, told = await home.run("train", "--policy", POLICY, "--model", str(FOLDER), "--out", str(out), *options)
        assert status == 0, told
        async with home.client() as client:
            (group,) = await client.submission_groups("swe")
            (policy,) = (await client.get("/policies"))["policies"]
    assert group.status == "acknowledged"
    assert policy["version"] == 1
