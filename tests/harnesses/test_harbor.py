"""Harbor's agents on Harbor's tasks, without Docker: ids in `result.json`, rewards in the ledger, groups leased.

Harbor runs in an environment of its own (`make trainers`): Python 3.12. Engine, server and command are processes.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shlex
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rolltap.engine.scripted import Script, ScriptedReply
from rolltap.harnesses.agents.install import Installation
from rolltap.trainer_client.lease.client import AsyncTrainerClient
from rolltap.types import Segment

from ..conftest import ROOT
from ..integration.service import POLICY, Service, service
from .conftest import CACHE
from .scenarios import TOOLS, script_of

ENVIRONMENT = ROOT / ".cache" / "trainers" / "harbor-0.25.0"
AGENTS = ("claude-code", "codex", "opencode")

TOML = """\
version = "1.0"
[agent]
timeout_sec = 120.0
[verifier]
timeout_sec = 60.0
[environment]
build_timeout_sec = 60.0
"""
DOCKERFILE = "FROM ubuntu:24.04\nWORKDIR /app\nCOPY a.txt .\nRUN mkdir data && \\\n  echo ready > data/state\n"
TEST = """\
#!/bin/bash
env > /logs/verifier/env.txt
ls -A /tests ~ /tmp > /logs/verifier/left.txt
score=0
grep -q hello /app/out.txt && test -f /app/a.txt -a -f /app/data/state && score=1
echo $score > /logs/verifier/reward.txt
"""
PLANT = "for f in ~ /tests /tmp; do echo x > $f/planted; done; echo 1 > /logs/verifier/reward.txt"


def harbor_task(folder: Path, *, dockerfile: str = DOCKERFILE, test: str = TEST) -> Path:
    files = {
        "task.toml": TOML,
        "instruction.md": "MAINTASK: write the word hello into /app/out.txt.\n",
        "environment/Dockerfile": dockerfile,
        "environment/a.txt": "x\n",
        "tests/test.sh": test,
    }
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


TERMINAL_BENCH = {
    "task.yaml": "instruction: 'MAINTASK: write the word %s into /app/out.txt.'\ndifficulty: easy\n",
    "Dockerfile": "FROM ubuntu:24.04\nCOPY a.txt .\n",
    "docker-compose.yaml": """\
services:
  client:
    build:
      dockerfile: Dockerfile
    image: ${T_BENCH_TASK_DOCKER_CLIENT_IMAGE_NAME}
    container_name: ${T_BENCH_TASK_DOCKER_CLIENT_CONTAINER_NAME}
    command: [ "sh", "-c", "sleep infinity" ]
    environment:
      - TEST_DIR=${T_BENCH_TEST_DIR}
    volumes:
      - ${T_BENCH_TASK_LOGS_PATH}:${T_BENCH_CONTAINER_LOGS_PATH}
      - ${T_BENCH_TASK_AGENT_LOGS_PATH}:${T_BENCH_CONTAINER_AGENT_LOGS_PATH}
""",
    "a.txt": "x\n",
    "run-tests.sh": "#!/bin/bash\npython3 $TEST_DIR/test_outputs.py\n",
    "solution.sh": "#!/bin/bash\necho %s > out.txt\n",
    "tests/test_outputs.py": """\
from pathlib import Path

assert Path("/app/a.txt").exists()
assert Path("/app/out.txt").read_text().strip() == "%s"
""",
}
"""A task's files as terminal-bench 1 has them; `%s` is the word. Its own tests install pytest from the network."""


def migrated_terminal_bench(folder: Path, *words: str) -> Path:
    """A folder of Harbor's tasks, which Harbor's own command makes of terminal-bench's, one a word."""
    for word in words:
        for name, text in TERMINAL_BENCH.items():
            path = folder / "terminal-bench" / word / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text.replace("%s", word))
            path.chmod(0o600)  # as files are made under umask 077
    command = [str(ENVIRONMENT / "bin" / "harbor"), "task", "migrate"]
    subprocess.run([*command, "-i", folder / "terminal-bench", "-o", folder / "tasks"], check=True, timeout=100)
    return folder / "tasks"


def script(agent: str, command: str = "echo hello > /app/out.txt") -> Script:
    tools = TOOLS[agent]
    return script_of(
        ScriptedReply(think="I make it.", call=(tools.run(command),)),
        ScriptedReply(say="Now I look.", call=(tools.run("cat /app/out.txt"),)),
        tools.end("It holds hello."),
    )


@dataclass
class Played:
    """What `rolltap run --harbor` printed and left; `results` are the trials' `result.json` by their folders."""

    status: int
    output: str
    results: dict[Path, dict[str, Any]]
    groups: list[dict[str, Any]]


async def play(server: Service, tasks: Path, agent: str, n: int, *more: str) -> Played:
    env = {**os.environ, **server.env, "PYTHONPATH": str(ROOT / "src"), "ROLLTAP_HARNESSES": str(CACHE)}
    command = [str(ENVIRONMENT / "bin" / "python"), "-m", "rolltap", "run", "--harbor", str(tasks), "-a", agent]
    done = await asyncio.to_thread(
        subprocess.run,
        [*command, "--n", str(n), *more],
        cwd=server.folder,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=500,
    )
    found = sorted(server.folder.glob("jobs/*/*/result.json"))
    results = {path.parent: json.loads(path.read_text()) for path in found}
    async with server.client() as client:
        lines = await client.get("/read/groups")
        details = [await client.get(f"/read/groups/{line['id']}") for line in lines]
    groups = [{**each["line"], "rollouts": [one["rollout"] for one in each["rollouts"]]} for each in details]
    return Played(done.returncode, done.stdout, results, groups)


async def leased(server: Service) -> dict[str, tuple[Segment, ...]]:
    """The segments of the only group, as a trainer leases it, by their sessions."""
    async with AsyncTrainerClient(server.trainer_url, server.env["ROLLTAP_TRAINER_KEY"], "t") as trainer:
        lease = await trainer.lease(POLICY, groups=1)
        assert lease is not None
        (group,) = lease.groups
        return {
            str(record.rollout.session_id): tuple(each for each in record.trajectory.segments if each.loss_mask.any())
            for record in group.rollouts
        }


def same_tokens(details: Sequence[Mapping[str, Any]], segments: Sequence[Segment]) -> None:
    """Harbor's details are the leased segments, turn by turn: a prompt is what stands before the sampled tokens."""
    assert len(details) == len(segments) > 0
    for detail, segment in zip(details, segments, strict=True):
        turns = [turn for turn in segment.turns if turn.trained]
        assert detail["prompt_token_ids"] == [segment.token_ids[: turn.start].tolist() for turn in turns]
        assert detail["completion_token_ids"] == [segment.token_ids[turn.start : turn.end].tolist() for turn in turns]
        assert detail["logprobs"] == [segment.logprobs[turn.start : turn.end].tolist() for turn in turns]


@pytest.mark.trainers
@pytest.mark.timeout(900)
@pytest.mark.parametrize("agent", AGENTS)
async def test_a_group_of_trials(agent: str, tmp_path: Path, release: Callable[[str], Installation]) -> None:
    release(agent)
    path = tmp_path / "script.json"
    path.write_bytes(msgspec.json.encode(script(agent, f"{PLANT}; echo hello > /app/out.txt")))
    async with service(tmp_path, path) as server:
        played = await play(server, harbor_task(tmp_path / "tasks" / "hello").parent, agent, 2)
        assert played.status == 0, played.output
        (group,) = played.groups
        assert [rollout["status"] for rollout in group["rollouts"]] == ["succeeded"] * 2
        assert len(played.results) == 2
        sessions = {rollout["session_id"]: rollout for rollout in group["rollouts"]}
        segments = await leased(server)
        for folder, result in played.results.items():
            session_id = result["agent_result"]["metadata"]["rolltap"]["session_id"]
            assert result["agent_info"]["name"] == agent
            assert result["agent_info"]["version"] not in ("", "unknown")
            assert result["verifier_result"]["rewards"] == {"reward": 1.0}
            assert [reward["value"] for reward in sessions.pop(session_id)["rewards"]] == [1.0]
            details = result["agent_result"]["rollout_details"]
            same_tokens(details, segments[session_id])
            same_steps(folder, details[0])
            held_back(folder)


@pytest.mark.trainers
@pytest.mark.timeout(600)
async def test_harbor_reads_no_logs_without_an_end(tmp_path: Path, release: Callable[[str], Installation]) -> None:
    """The tokens come from the record: they are there, and the reward counts."""
    release("codex")
    command = "head -c 70000000 /dev/zero | tr '\\0' '[' > /logs/agent/trajectory.json; echo hello > /app/out.txt"
    path = tmp_path / "script.json"
    path.write_bytes(msgspec.json.encode(script("codex", command)))
    async with service(tmp_path, path) as server:
        played = await play(server, harbor_task(tmp_path / "tasks" / "hello").parent, "codex", 1)
        ((folder, result),) = played.results.items()
        agents = result["agent_result"]
        assert (agents["n_input_tokens"], agents["model_usage"]) == (None, {}), played.output
        assert "MB: Harbor does not read them" in (folder / "trial.log").read_text()
        assert result["verifier_result"]["rewards"] == {"reward": 1.0}
        (segments,) = (await leased(server)).values()
        same_tokens(agents["rollout_details"], segments)


SANDBOXED = """\
#!/bin/bash
$ROLLTAP_SANDBOXED python3 /app/solve.py > /tmp/answer.txt
diff -q /tmp/answer.txt /tests/answer.txt && echo 1 > /logs/verifier/reward.txt || echo 0 > /logs/verifier/reward.txt
"""
FORGE = "import os; os.system('echo 1 > /logs/verifier/reward.txt; kill -9 -1; cat /tests/answer.txt')"
WORK = {
    "print(6 * 7)": ("succeeded", [1.0]),
    FORGE: ("succeeded", [0.0]),
    "import time; time.sleep(600)": ("failed", [0.0]),
}
"""What an agent writes to `/app/solve.py`, and what its rollout comes to."""


@pytest.mark.trainers
@pytest.mark.timeout(600)
@pytest.mark.parametrize("work", WORK)
async def test_what_test_sh_starts_apart_writes_no_reward(
    work: str, tmp_path: Path, release: Callable[[str], Installation]
) -> None:
    release("codex")
    task = harbor_task(tmp_path / "tasks" / "one", test=SANDBOXED)
    (task / "tests" / "answer.txt").write_text("42\n")
    (task / "task.toml").write_text(TOML.replace("timeout_sec = 60.0", "timeout_sec = 20.0", 1))
    path = tmp_path / "script.json"
    path.write_bytes(msgspec.json.encode(script("codex", f"printf %s {shlex.quote(work)} > /app/solve.py")))
    async with service(tmp_path, path) as server:
        played = await play(server, task.parent, "codex", 1)
        (rollout,) = played.groups[0]["rollouts"]
        assert (rollout["status"], [each["value"] for each in rollout["rewards"]]) == WORK[work], played.output
        assert rollout["attempt"] == 1
        if rollout["status"] == "failed":  # it took the verifier's time: it is not left out of the baseline
            assert (rollout["cause"], rollout["scoring"]) == ("evaluation", "masked")
        else:
            assert "unprotected" not in rollout["rewards"][0]["detail"]


def same_steps(folder: Path, detail: Mapping[str, Any]) -> None:
    """The agent's steps in ATIF are the main agent's turns, with their tokens."""
    steps = json.loads((folder / "agent" / "trajectory.json").read_text())["steps"]
    filled = [step["metrics"] for step in steps if step.get("metrics", {}).get("completion_token_ids")]
    for name in ("prompt_token_ids", "completion_token_ids", "logprobs"):
        assert [metrics[name] for metrics in filled] == detail[name], name


def held_back(folder: Path) -> None:
    """The verifier had neither what the agent planted nor the key of its session; no file of the trial has a key."""
    seen = (folder / "verifier" / "env.txt").read_text()
    assert not re.search(r"^(OPENAI|ANTHROPIC|GEMINI|ROLLTAP)\w*(KEY|URL)=", seen, re.MULTILINE)
    assert "planted" not in (folder / "verifier" / "left.txt").read_text()
    for path in folder.rglob("*"):
        if path.is_file():
            assert not re.search(rb"rt-[\w-]{30,}", path.read_bytes()), path


@pytest.mark.trainers
@pytest.mark.timeout(600)
async def test_the_sandbox_failed_and_nobody_is_given_zero(
    tmp_path: Path, release: Callable[[str], Installation]
) -> None:
    """A Dockerfile that needs root is the machinery's failure: tried again, then left without a reward."""
    release("codex")
    tasks = harbor_task(tmp_path / "tasks" / "root", dockerfile="FROM debian\nRUN touch /usr/bin/tool\n").parent
    async with service(tmp_path) as server:
        played = await play(server, tasks, "codex", 1)
        (rollout,) = played.groups[0]["rollouts"]
        assert (played.status, rollout["status"], rollout["cause"]) == (1, "failed", "infrastructure"), played.output
        assert rollout["rewards"] == []
        assert rollout["attempt"] > 1 or rollout["reason"].startswith("SandboxBuildFailedError")
        assert "RUN touch /usr/bin/tool fails without Docker" in rollout["reason"]


@pytest.mark.trainers
@pytest.mark.timeout(600)
async def test_several_rewards_ask_which_one_counts(tmp_path: Path, release: Callable[[str], Installation]) -> None:
    release("codex")
    test = '#!/bin/bash\necho \'{"style": 0.25, "tests": 1}\' > /logs/verifier/reward.json\n'
    tasks = harbor_task(tmp_path / "tasks" / "two", test=test).parent
    path = tmp_path / "script.json"
    path.write_bytes(msgspec.json.encode(script("codex")))
    async with service(tmp_path, path) as server:
        unsaid = await play(server, tasks, "codex", 1)
        (rollout,) = unsaid.groups[0]["rollouts"]
        assert (rollout["status"], rollout["cause"], rollout["rewards"]) == ("failed", "evaluation", [])
        assert "which reward counts" in rollout["reason"]
        said = await play(server, tasks, "codex", 1, "--reward-key", "tests")
        (rollout,) = said.groups[0]["rollouts"]
        assert [reward["value"] for reward in rollout["rewards"]] == [1.0]


@pytest.mark.trainers
@pytest.mark.timeout(600)
async def test_tasks_of_terminal_bench_1_run_once_harbor_has_migrated_them(
    tmp_path: Path, release: Callable[[str], Installation]
) -> None:
    release("codex")
    tasks = migrated_terminal_bench(tmp_path, "hello", "goodbye")
    path = tmp_path / "script.json"
    path.write_bytes(msgspec.json.encode(script("codex")))
    async with service(tmp_path, path) as server:
        played = await play(server, tasks, "codex", 1)
        assert played.status == 0, played.output
        rollouts = {group["task_id"]: group["rollouts"][0] for group in played.groups}
        rewards = {task: rollout["rewards"][0]["value"] for task, rollout in rollouts.items()}
        assert rewards == {"hello": 1.0, "goodbye": 0.0}
