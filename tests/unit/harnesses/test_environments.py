"""Environments of other packages: whose word counts, what is shown to whom, and what is refused."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from rolltap.errors import EvaluatorFailed, TaskInvalid
from rolltap.harnesses.agents.environments import EnvironmentLoop, EnvironmentStep, list_tasks, proof_key, signed_result
from rolltap.harnesses.base import Command, Ending, Endpoint, Evidence, Exit, Job, Limits
from rolltap.harnesses.client import AdminClient
from rolltap.harnesses.evaluators.environment import EnvironmentCheck
from rolltap.harnesses.runner.specs import SAMPLE_JOB, Defaults, build, check
from rolltap.harnesses.runner.tasks import SourceOptions, is_source, parse_arguments, tasks_of
from rolltap.harnesses.runtimes.bubblewrap import INTERPRETER, BubblewrapRuntime
from rolltap.harnesses.runtimes.shown import python_folders
from rolltap.harnesses.runtimes.sources import Empty
from rolltap.types import Task

from .environments import FORGE, signed

CLIENT = AdminClient("http://127.0.0.1:1", "k")


def evaluator(**values: object) -> dict[str, object]:
    return {"kind": "environment", "package": "verifiers", "where": "gsm8k", **values}


def evidence(output: str, session: str = "s") -> Evidence:
    async def none() -> object:
        raise AssertionError("no clean workspace is asked for")

    exit_ = Exit(Ending.DONE, 1.0, 0, output)
    return Evidence(Task("t", "Go."), exit_, None, none, Limits(), session, harness="environment")  # type: ignore[arg-type]


async def judge(output: str, **values: object) -> dict[str, float]:
    settings = EnvironmentCheck("verifiers", "gsm8k", **values)  # type: ignore[arg-type]
    verdict = await settings.build(CLIENT).evaluate(evidence(output))
    return {score.scope: score.value for score in verdict.scores}


async def test_only_the_drivers_own_result_counts() -> None:
    own = signed({"reward": 0.25, "roles": {"user": 0.5}}, "s")
    of_another = signed({"reward": 1.0}, "other session")
    forged = json.dumps({"proof": "00" * 32, "result": '{"reward": 1.0}'})
    noise = f'{forged}\n{{"proof": 1}}\n{{"proof": \n{{"proof": "\u00e9", "result": "x"}}'
    noise += '\n{"proof": "\\ud800", "result": "x"}\n{"proof": "00", "result": "\\udfff"}'
    output = f"chatter\n{of_another}\n{own}\n{forged}\n{noise}\n{of_another}\n"
    assert await judge(output) == {"rollout": 0.25, "role:user": 0.5}
    with pytest.raises(EvaluatorFailed, match="the verifiers environment gave no result"):
        await judge(f"{forged}\n{of_another}\n{noise}")


async def test_an_environment_that_fails_gives_no_reward() -> None:
    with pytest.raises(EvaluatorFailed, match="the verifiers environment failed: no such tool"):
        await judge(signed({"error": "Traceback\nno such tool"}, "s"))
    with pytest.raises(EvaluatorFailed, match="the reward 'nan' is not a number"):
        await judge(signed({"reward": float("nan")}, "s"))


async def test_of_several_scores_one_is_named() -> None:
    output = signed({"parts": {"match": 1.0, "style": 0.5}}, "s")
    with pytest.raises(EvaluatorFailed, match="which reward counts"):
        await judge(output)
    assert await judge(output, reward_key="style") == {"rollout": 0.5}
    assert await judge(signed({"parts": {"match": 0.75}}, "s")) == {"rollout": 0.75}


def test_the_key_and_the_proof_reach_the_driver_by_stdin_alone() -> None:
    loop = EnvironmentCheck("verifiers", "gsm8k", python=sys.executable).loop()
    endpoint = Endpoint("http://127.0.0.1:8710/s/SESSION", "the-key", "tiny", roles={"tiny": 0, "user": 0})
    launch = loop.launch(Job(endpoint, "Go.", Path("/w"), Path("/h")))
    assert isinstance(launch, Command)
    job = json.loads(launch.stdin)
    assert (job["key"], job["url"], job["step"]) == ("the-key", "http://127.0.0.1:8710/s/SESSION/v1", "play")
    seen = json.dumps([launch.argv, dict(launch.env), dict(launch.files)])
    assert job["key"] not in seen
    assert proof_key("SESSION") not in seen
    assert proof_key("SESSION") == job["proof_key"] != proof_key("OTHER")


TOY = """
import subprocess


def play(job):
    print(subprocess.run(["bash", "-c", job["forge"]], capture_output=True, text=True).stdout)
    return {"reward": 0.0}
"""
"""Stands for a package's driver: real packages are played in `make test-trainers`."""

FORKING = """
import ctypes, hmac, json, os, re, sys


def forge():
    frame, found = sys._getframe(), {}
    while frame:
        found.update(frame.f_locals)
        frame = frame.f_back
    result = json.dumps({"reward": 1.0})
    proof = hmac.new(found["key"], result.encode(), "sha256").hexdigest()
    line = json.dumps({"proof": proof, "result": result})
    os.write(1, f"\\n{line}\\nFORGED {found['job'].get('key')}\\n".encode())
    maps = open("/proc/self/maps").read().splitlines() if sys.platform == "linux" else ()
    for line in maps:
        if " rw" in line and "[v" not in line:
            start, end = (int(each, 16) for each in line.split()[0].split("-"))
            memory = ctypes.string_at(start, end - start)
            if re.search(rb"(?:\\xab){32}|(?:ab){32}", memory):  # which holds no such run itself
                os.write(1, b"KEY IN MEMORY\\n")


def play(job):
    child = os.fork()
    if not child:
        forge()
        os._exit(0)
    os.waitpid(child, 0)
    return {"reward": 0.0}
"""
"""A driver whose tool forks: the child looks for the key in all frames and in its memory."""


@pytest.mark.parametrize("guarded", [False, True])
async def test_a_models_command_reads_nothing_of_the_scorer_and_forges_nothing(guarded: bool, tmp_path: Path) -> None:
    workspace = await BubblewrapRuntime(tmp_path).prepare(Empty())
    key = "ab" * 32
    launch = EnvironmentStep("inspect", INTERPRETER, {"forge": FORGE}).command("play", workspace.home, key)
    main = launch.files[".rolltap/environment.py"]
    if not guarded:  # the control: the same command does read it where the guards are gone
        main = main.replace("os.ftruncate(0, 0)", "pass").replace("PR_SET_DUMPABLE, 0", "PR_SET_DUMPABLE, 1")
    files = {".rolltap/environment.py": main, ".rolltap/rolltap_inspect.py": TOY}
    try:
        exit_ = await workspace.run(replace(launch, files=files), Limits(), 100)
    finally:
        await workspace.close()
    assert "SCORER" in exit_.output
    assert ("READ ITS JOB" in exit_.output, "READ ITS MEMORY" in exit_.output) == (not guarded, not guarded)
    assert ("READ ITS" in exit_.output) is not guarded
    assert signed_result(exit_.output, key) == {"reward": 0.0}


@pytest.mark.parametrize("guarded", [False, True])
def test_a_forked_process_can_sign_nothing(guarded: bool, tmp_path: Path) -> None:
    """As tools do that run a model's Python in a `multiprocessing.Process`."""
    key = "ab" * 32
    launch = EnvironmentStep("inspect", sys.executable, {"key": "session-key"}).command("play", tmp_path, key)
    files = {**launch.files, ".rolltap/rolltap_inspect.py": FORKING}
    if not guarded:
        main = files[".rolltap/environment.py"]
        files[".rolltap/environment.py"] = main.replace("os.register_at_fork", "(lambda **_: None)")
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    done = subprocess.run(launch.argv, input=launch.stdin, capture_output=True, text=True, check=True)
    assert "FORGED" in done.stdout
    assert ("session-key" in done.stdout) is not guarded
    assert ("KEY IN MEMORY" in done.stdout) is not guarded
    if guarded:
        assert signed_result(done.stdout, key) == {"reward": 0.0}
    else:
        with pytest.raises(EvaluatorFailed, match="different signed results"):
            signed_result(done.stdout, key)


PLANTING = """
import subprocess

def play(job):
    plant = "for name in {.,~,~/.rolltap}/{statistics,colorsys}.py; do echo FORGED=1 > $name; done"
    subprocess.run(["bash", "-c", plant], check=True)
    import statistics, colorsys
    return {"reward": float(hasattr(statistics, "FORGED") or hasattr(colorsys, "FORGED"))}
"""
"""A driver whose tool writes files, and which imports something later, as packages do."""


@pytest.mark.parametrize("guarded", [False, True])
async def test_what_a_models_command_writes_is_not_imported(guarded: bool, tmp_path: Path) -> None:
    workspace = await BubblewrapRuntime(tmp_path).prepare(Empty())
    key = "ab" * 32
    launch = EnvironmentStep("inspect", INTERPRETER).command("play", workspace.home, key)
    main = launch.files[".rolltap/environment.py"]
    if not guarded:
        main = main.replace("sys.path.remove(", "str(")
    files = {".rolltap/environment.py": main, ".rolltap/rolltap_inspect.py": PLANTING}
    try:
        exit_ = await workspace.run(replace(launch, files=files), Limits(), 100)
    finally:
        await workspace.close()
    assert signed_result(exit_.output, key) == {"reward": float(not guarded)}, exit_.output


def test_what_is_missing_is_named() -> None:
    with pytest.raises(
        TaskInvalid, match=r"has no inspect_ai: .* -m pip install inspect_ai==0\.3\.285, or .* --python"
    ):
        list_tasks("inspect", sys.executable, {"where": "x.py@y"})
    with pytest.raises(TaskInvalid, match="can't list the tasks with /nowhere/python"):
        list_tasks("inspect", "/nowhere/python", {"where": "x.py@y"})
    assert signed_result("", "00") is None


def test_an_agent_is_shown_neither_the_environment_nor_its_python(tmp_path: Path) -> None:
    file = tmp_path / "own" / "env.py"
    file.parent.mkdir()
    file.touch()
    table = evaluator(where=str(file), python=sys.executable)
    by_itself, by_an_agent = (
        build(Task("t", "Go.", {"evaluator": table, **more}), Defaults(runtime="bubblewrap"), CLIENT).runtime
        for more in ({}, {"harness": "command", "argv": ["true"]})
    )
    assert file.parent in by_itself.shown  # type: ignore[attr-defined]
    assert set(python_folders(sys.executable)) <= set(by_itself.shown)  # type: ignore[attr-defined]
    assert by_an_agent.shown == ()  # type: ignore[attr-defined]


def test_a_sandbox_does_not_show_a_servers_data(tmp_path: Path) -> None:
    (tmp_path / "rolltap-data").mkdir()
    loop = EnvironmentCheck("verifiers", str(tmp_path / "env.py"), python=sys.executable).loop()
    with pytest.raises(TaskInvalid, match=r"put env\.py into a folder of its own"):
        _ = loop.needs


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"evaluator": evaluator(package="gym")}, "no package 'gym' of environments; known: verifiers"),
        ({"evaluator": evaluator(package="gymnasium"), "harness": "codex"}, "plays its own episodes"),
        ({"evaluator": {"kind": "session_completed"}, "harness": "environment"}, "needs an evaluator of that kind"),
        ({"evaluator": evaluator(where="env.py")}, "is relative; nodes need absolute paths"),
    ],
)
def test_what_no_node_could_play_is_refused(spec: dict[str, object], message: str) -> None:
    with pytest.raises(TaskInvalid, match=message):
        check(Task("t", "Go.", spec), ["tiny"])


def test_arguments_are_tables_of_json() -> None:
    pairs = ("make.slippery=false", "make.size=4", "split=test", 'actions=["a"]')
    assert parse_arguments(pairs) == {"make": {"slippery": False, "size": 4}, "split": "test", "actions": ["a"]}
    for pair in ("split", "=1", "a..b=1"):
        with pytest.raises(TaskInvalid, match="--arg takes NAME=VALUE"):
            parse_arguments((pair,))


def test_a_source_is_named_by_its_kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert is_source("verifiers:gsm8k")
    assert not is_source("verifiers")
    assert not is_source("folder/nothing:gsm8k")
    with pytest.raises(TaskInvalid, match=r"no kind of tasks 'nothing'; known: .*verifiers"):
        is_source("nothing:gsm8k")
    (tmp_path / "verifiers:gsm8k").touch()
    assert not is_source("verifiers:gsm8k"), "a file of that name is meant"
    with pytest.raises(TaskInvalid, match=r"none\.py: no such file"):
        tasks_of("inspect:none.py@task", SourceOptions())


def test_a_loop_has_no_side_effect() -> None:
    loop = EnvironmentCheck("verifiers", "gsm8k").loop()
    assert isinstance(loop, EnvironmentLoop)
    assert loop.launch(SAMPLE_JOB) == loop.launch(SAMPLE_JOB)
