"""The life of rollouts against a server over HTTP: stages, budgets, retries, and exactly one terminal state."""

from __future__ import annotations

import asyncio
import itertools
import re
import sys
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import uvloop

from rolltap.errors import RuntimeFailed
from rolltap.harnesses.agents.mini_swe_agent import MiniSweAgentInProcess
from rolltap.harnesses.base import (
    Command,
    Ending,
    Evaluator,
    Evidence,
    Exit,
    Job,
    Launch,
    Limits,
    PythonCall,
    Score,
    Source,
    Verdict,
)
from rolltap.harnesses.client import AdminClient, OpenedSession
from rolltap.harnesses.evaluators.command import CommandCheck
from rolltap.harnesses.evaluators.python_check import PythonCheck
from rolltap.harnesses.evaluators.registry import SessionCompleted
from rolltap.harnesses.runner import attempts
from rolltap.harnesses.runner.attempts import Progress, Slots, Stage, run_groups
from rolltap.harnesses.runner.lifecycle import Assignment, RolloutRunner
from rolltap.harnesses.runtimes.process import ProcessRuntime, ProcessWorkspace
from rolltap.harnesses.runtimes.sources import Files
from rolltap.harnesses.runtimes.thread import ThreadRuntime
from rolltap.types import Task

from .stub import Stub, running, tool_call

SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"


class Shell:
    """A harness that runs one shell command and calls no model."""

    name, package, dialect, quirks = "shell", None, "openai_chat", ()

    def __init__(self, command: str) -> None:
        self.command = command

    def launch(self, job: Job) -> Launch:
        return Command(("/bin/sh", "-c", self.command), env={"KEY": job.endpoint.key, "TASK": job.instruction})


def workspaces_in(base: Path) -> list[Path]:
    return list(base.iterdir())


def assignment(harness, runtime, evaluator, files=None, **limits) -> Assignment:
    task = Task("t1", "Copy a.txt to b.txt.")
    return Assignment(task, Files(files or {}), harness, runtime, evaluator, Limits(**limits))


class Surprise(Shell):
    """A harness whose definition is broken."""

    def launch(self, job: Job) -> Launch:
        raise RuntimeError("the definition is broken")


@pytest.fixture
async def server() -> AsyncIterator[Stub]:
    async with running(Stub(lambda messages: tool_call("true"))) as stub:
        yield stub


async def test_mini_swe_agent_runs_tasks_in_threads_and_is_rewarded(server: Stub, tmp_path: Path) -> None:
    steps = ("cp a.txt b.txt", SUBMIT)
    server.reply = lambda messages: tool_call(steps[sum(m["role"] == "assistant" for m in messages)], len(messages))
    check = PythonCheck(lambda folder: float((folder / "b.txt").read_text() == "hello"))
    job = assignment(MiniSweAgentInProcess(), ThreadRuntime(tmp_path), check, {"a.txt": "hello"})
    async with AdminClient(server.url, "admin") as client:
        (group,) = await run_groups(RolloutRunner(client), [job], policy="tiny", n=4)
    assert group.rewards == (1.0,) * 4
    assert [body["status"] for body in server.finished.values()] == ["succeeded"] * 4
    assert all(len(calls) == 2 and calls[0]["model"] == "tiny" for calls in server.calls.values())
    assert len(server.calls) == 4
    assert server.closed == set(server.sessions.values())
    assert not workspaces_in(tmp_path), "workspaces are torn down"


async def test_mini_swe_agent_endings_become_statuses(server: Stub, tmp_path: Path) -> None:
    server.reply = lambda messages: {"role": "assistant", "content": "I can't."}
    job = assignment(MiniSweAgentInProcess(), ThreadRuntime(tmp_path), SessionCompleted())
    async with AdminClient(server.url, "admin") as client:
        (group,) = await run_groups(RolloutRunner(client), [job], policy="tiny", n=1)
    (rollout,) = group.rollouts
    assert (rollout.status, rollout.reward) == ("succeeded", 0.0)
    assert rollout.reason == "agent limit: RepeatedFormatError"


async def test_processes_are_kept_from_the_runners_environment(
    server: Stub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROLLTAP_SECRET", "hush")
    harness = Shell('env > env.txt; pwd > pwd.txt; test "$TASK" = "Copy a.txt to b.txt."')
    seen: dict[str, str] = {}

    def check(folder: Path) -> float:
        seen["env"] = (folder / "env.txt").read_text()
        return 1.0

    job = assignment(harness, ProcessRuntime(tmp_path), PythonCheck(check))
    async with AdminClient(server.url, "admin") as client:
        (group,) = await run_groups(RolloutRunner(client), [job], policy="p", n=1)
    assert group.rollouts[0].status == "succeeded"
    assert "hush" not in seen["env"]
    assert f"HOME={tmp_path}" in seen["env"]


async def test_a_harness_that_is_done_without_an_answer_has_failed(server: Stub, tmp_path: Path) -> None:
    server.answered = False
    job = assignment(Shell("echo no network; exit 0"), ProcessRuntime(tmp_path), SessionCompleted())
    async with AdminClient(server.url, "admin") as client:
        (group,) = await run_groups(RolloutRunner(client), [job], policy="p", n=1)
    (rollout,) = group.rollouts
    assert (rollout.status, rollout.reward) == ("failed", None)
    assert rollout.reason == "nothing_sampled: no model answered; the agent ended with exit code 0: no network"
    assert not server.rewards


async def test_a_harness_out_of_time_is_killed_with_its_daemons_and_still_evaluated(
    server: Stub, tmp_path: Path
) -> None:
    harness = Shell("echo half > result; setsid sh -c 'sleep 60; echo late > result' & sleep 60")
    check = CommandCheck(
        "! pgrep -f 'echo late > resul[t]' && cat result > reward && sed -i s/half/0.5/ reward", "reward"
    )
    job = assignment(harness, ProcessRuntime(tmp_path), check, agent_s=2.0)
    async with AdminClient(server.url, "admin") as client:
        (group,) = await run_groups(RolloutRunner(client), [job], policy="p", n=1)
    (rollout,) = group.rollouts
    assert (rollout.status, rollout.cause, rollout.reward) == ("timed_out", "agent", 0.5)
    assert rollout.seconds[Stage.RUN] < 30


async def test_a_crash_is_a_failed_rollout_with_its_reason_and_its_reward(server: Stub, tmp_path: Path) -> None:
    job = assignment(Shell("echo boom >&2; exit 3"), ProcessRuntime(tmp_path), SessionCompleted())
    async with AdminClient(server.url, "admin") as client:
        await run_groups(RolloutRunner(client), [job], policy="p", n=1)
    (body,) = server.finished.values()
    assert (body["status"], body["cause"]) == ("failed", "agent")
    assert body["reason"] == "agent crashed (exit code 3): boom"
    assert [reward["value"] for reward in server.rewards] == [0.0]


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        *(
            (value, "finite")
            for value in (float("nan"), float("inf"), {"rollout": float("-inf")}, {"role:a": 1, "b": float("nan")})
        ),
        *((value, "ValueError") for value in ("x", "", "1", b"1", {"rollout": "0,5"}, {"role:a": 1, "b": "nan"})),
        *((value, "TypeError") for value in (None, [], [1.0], {"rollout": None}, 1j)),
        ({}, "no reward"),
    ],
)
async def test_an_unusable_reward_fails_the_rollout(server: Stub, tmp_path: Path, value: object, reason: str) -> None:
    job = assignment(Shell("true"), ProcessRuntime(tmp_path), PythonCheck(lambda _: value))  # type: ignore[arg-type,return-value]
    async with AdminClient(server.url, "admin") as client:
        await run_groups(RolloutRunner(client), [job], policy="p", n=1)
    (body,) = server.finished.values()
    assert (body["status"], body["cause"]) == ("failed", "evaluation")
    assert body["scoring"] == "masked", "it counts 0 among its siblings, and is not trained"
    assert reason in body["reason"]
    assert ("Traceback" in body.get("evaluation", "")) == reason.endswith("Error")
    assert [reward["value"] for reward in server.rewards] == [0.0]


async def test_a_reward_of_an_unknown_scope_fails_the_rollout(server: Stub, tmp_path: Path) -> None:
    job = assignment(Shell("true"), ProcessRuntime(tmp_path), PythonCheck(lambda _: {"nowhere": 1.0}))
    async with AdminClient(server.url, "admin") as client:
        await run_groups(RolloutRunner(client), [job], policy="p", n=1)
    (body,) = server.finished.values()
    assert (body["status"], body["cause"]) == ("failed", "evaluation")
    assert "no reward scope 'nowhere'" in body["reason"]


def leaves(folder: Path) -> float:
    sys.exit(0)


def fails_as_a_test(folder: Path) -> float:
    pytest.fail("no")


def is_cancelled(folder: Path) -> float:
    raise asyncio.CancelledError


def interrupts(folder: Path) -> float:
    raise KeyboardInterrupt


class OwnEvaluator:
    """An evaluator of another package, in the runner's process."""

    name, needs_clean_workspace, reward_files = "own", False, ()

    def __init__(self, check: Callable[[Path], float]) -> None:
        self._check = check

    async def evaluate(self, evidence: Evidence) -> Verdict:
        return Verdict((Score(self._check(evidence.workspace.folder)),))


@pytest.mark.parametrize(
    ("evaluator", "check"),
    [
        *itertools.product((PythonCheck, OwnEvaluator), (leaves, fails_as_a_test, is_cancelled)),
        (PythonCheck, interrupts),  # in a thread; in the main one it may be Ctrl-C
    ],
)
async def test_an_evaluator_that_ends_its_process_fails_its_rollout_alone(
    server: Stub, tmp_path: Path, evaluator: Callable[..., Evaluator], check: Callable[[Path], float]
) -> None:
    jobs = [assignment(Shell("true"), ProcessRuntime(tmp_path), one) for one in (evaluator(check), SessionCompleted())]
    async with AdminClient(server.url, "admin") as client:
        broken, sound = await run_groups(RolloutRunner(client), jobs, policy="p", n=1)
    assert [rollout.status for rollout in sound.rollouts] == ["succeeded"]
    (ended,) = broken.rollouts
    assert ended.status == "failed"
    assert re.search("raised .*(SystemExit|Failed|CancelledError|KeyboardInterrupt)", ended.reason)


@pytest.mark.parametrize("when", ["it is launched", "it runs"])
async def test_an_agent_that_ends_its_process_fails_its_rollout_alone(server: Stub, tmp_path: Path, when: str) -> None:
    agent = Leaver("true", at_once=when == "it is launched")
    jobs = [
        assignment(harness, runtime, SessionCompleted())
        for harness, runtime in ((agent, ThreadRuntime(tmp_path)), (Shell("true"), ProcessRuntime(tmp_path)))
    ]
    async with AdminClient(server.url, "admin") as client:
        broken, sound = await run_groups(RolloutRunner(client), jobs, policy="p", n=1)
    assert [rollout.status for rollout in sound.rollouts] == ["succeeded"]
    assert [(one.status, one.reason) for one in broken.rollouts] == [
        ("failed", "internal_error: RuntimeError: SystemExit: 0")
    ]


class Leaver(Shell):
    """An agent in the runner's process that ends it."""

    def __init__(self, command: str, *, at_once: bool) -> None:
        super().__init__(command)
        self._at_once = at_once

    def launch(self, job: Job) -> Launch:
        return sys.exit(0) if self._at_once else PythonCall(lambda stop: sys.exit(0))


class Flaky(ProcessRuntime):
    """Its first `failures` workspaces are lost while the agent runs."""

    def __init__(self, base: Path, failures: int) -> None:
        super().__init__(base)
        object.__setattr__(self, "failures", itertools.count(failures, -1))

    async def prepare(self, source: Source) -> ProcessWorkspace:
        workspace = await super().prepare(source)
        if next(self.failures) > 0:  # type: ignore[attr-defined]

            async def lost(*_: object, **__: object):
                raise RuntimeFailed("the node went away")

            workspace.run = lost  # type: ignore[method-assign]
        return workspace


@pytest.mark.parametrize(("failures", "status", "attempts"), [(2, "succeeded", 3), (4, "failed", 4)])
async def test_a_lost_place_is_tried_again_with_a_new_key(
    server: Stub, tmp_path: Path, failures: int, status: str, attempts: int
) -> None:
    job = assignment(Shell("true"), Flaky(tmp_path, failures), SessionCompleted())
    async with AdminClient(server.url, "admin") as client:
        await run_groups(RolloutRunner(client), [job], policy="p", n=1)
    (body,) = server.finished.values()
    assert (body["status"], body["attempt"]) == (status, attempts)
    assert len(server.sessions) == attempts
    assert not workspaces_in(tmp_path)


async def test_the_end_is_reported_however_often_a_balancer_answers(
    server: Stub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attempts, "REPORT_PAUSE_S", 0.01)
    server.bad_gateways = 5
    job = assignment(Shell("true"), ProcessRuntime(tmp_path), SessionCompleted())
    async with AdminClient(server.url, "admin", patience=0) as client:  # two tries each
        await run_groups(RolloutRunner(client), [job], policy="p", n=1)
    (body,) = server.finished.values()
    assert (body["status"], server.bad_gateways) == ("succeeded", 0)


async def test_a_setup_that_raises_or_hangs_ends_its_rollout_only(server: Stub, tmp_path: Path) -> None:
    def broken(folder: Path) -> None:
        raise KeyError("no such image")

    release = threading.Event()

    tried = 0

    def slow(folder: Path) -> None:
        nonlocal tried
        tried += 1
        release.wait(60)

    def with_source(source: Source, setup_s: float = 60.0) -> Assignment:
        limits = Limits(setup_s=setup_s)
        return Assignment(Task("t", "x"), source, Shell("true"), ProcessRuntime(tmp_path), SessionCompleted(), limits)

    def progress(step: Progress) -> None:
        if len(server.finished) == 3:
            release.set()

    async with AdminClient(server.url, "admin") as client:
        jobs = [with_source(broken), with_source(slow, setup_s=0.2), with_source(Files({}))]
        groups = await run_groups(RolloutRunner(client, progress=progress), jobs, policy="p", n=1)
    ends = [group.rollouts[0] for group in groups]
    assert [(end.status, end.cause) for end in ends] == [
        ("failed", "infrastructure"),
        ("timed_out", "infrastructure"),
        ("succeeded", None),
    ]
    assert "no such image" in ends[0].reason
    assert "the set-up ran past 0.2 s" in ends[1].reason
    assert tried == 4


async def test_a_setup_that_hangs_once_is_tried_again(server: Stub, tmp_path: Path) -> None:
    release = threading.Event()
    waits = itertools.chain((10,), itertools.repeat(0))

    def slow_at_first(folder: Path) -> None:
        release.wait(next(waits))

    job = Assignment(
        Task("t", "x"),
        slow_at_first,
        Shell("true"),
        ProcessRuntime(tmp_path),
        SessionCompleted(),
        Limits(setup_s=0.5),
    )
    async with AdminClient(server.url, "admin") as client:
        (group,) = await run_groups(
            RolloutRunner(client, progress=lambda step: step.summary and release.set()), [job], policy="p", n=1
        )
    assert group.rollouts[0].status == "succeeded"
    assert not workspaces_in(tmp_path)


async def test_what_nobody_expected_fails_its_rollout_and_no_other(server: Stub, tmp_path: Path) -> None:
    jobs = [
        assignment(harness, ProcessRuntime(tmp_path), SessionCompleted())
        for harness in (Surprise("true"), Shell("true"))
    ]
    async with AdminClient(server.url, "admin") as client:
        broken, sound = await run_groups(RolloutRunner(client), jobs, policy="p", n=2)
    assert {rollout.status for rollout in sound.rollouts} == {"succeeded"}
    assert {(rollout.status, rollout.reason) for rollout in broken.rollouts} == {
        ("failed", "internal_error: RuntimeError: the definition is broken")
    }
    assert not workspaces_in(tmp_path)


LEFT = {
    "a deep tree": 'python3 -c \'import os\nfor _ in range(3000):\n os.mkdir("d"); os.chdir("d")\'',
    "folders without rights": "mkdir -p a/b/c && touch a/b/c/f && chmod 0 a/b/c a/b a",
    "odd kinds": "mkfifo pipe; ln -s / everything; python3 -c 'import socket; socket.socket(1).bind(\"s\")'",
    "a pipe where its output was": 'rm -f "$HOME/../out"; mkfifo "$HOME/../out"',
    "a folder where its output was": 'rm -f "$HOME/../out"; mkdir "$HOME/../out"',
    "names": "touch -- '-rf' \"$(printf 'a\\nb')\"; mkdir -p -- '--' ' '",
}


@pytest.mark.parametrize("script", LEFT.values(), ids=LEFT)
async def test_what_an_agent_leaves_changes_no_verdict_and_stays_nowhere(
    server: Stub, tmp_path: Path, script: str
) -> None:
    job = assignment(Shell(script), ProcessRuntime(tmp_path), SessionCompleted())
    async with AdminClient(server.url, "admin") as client:
        await run_groups(RolloutRunner(client), [job], policy="p", n=1)
    (body,) = server.finished.values()
    assert (body["status"], body["attempt"]) == ("succeeded", 1)
    assert not workspaces_in(tmp_path)


@pytest.mark.parametrize(
    ("left", "says"),
    [
        ("mkdir -p out/reward && touch out/reward/x", 0.5),
        ("mkdir out && mkfifo out/reward", 0.5),
        ("ln -s /etc out", 0.5),
        ("echo 1 > out", 0.5),
        ("mkdir -p out/reward/deep && chmod 0 out/reward", 0.5),
    ],
)
async def test_whatever_is_in_a_rewards_place_the_evaluator_writes_it(
    server: Stub, tmp_path: Path, left: str, says: float
) -> None:
    check = CommandCheck("mkdir -p out && echo 0.5 > out/reward", reward_file="out/reward")
    job = assignment(Shell(left), ProcessRuntime(tmp_path), check)
    async with AdminClient(server.url, "admin") as client:
        await run_groups(RolloutRunner(client), [job], policy="p", n=1)
    assert [reward["value"] for reward in server.rewards] == [says]


@pytest.mark.parametrize("error", [RuntimeFailed("no space"), ValueError("a surprise"), RecursionError()])
async def test_an_error_after_the_agent_ran_is_not_tried_again(
    server: Stub, tmp_path: Path, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(SessionCompleted, "evaluate", fail)
    job = assignment(Shell("true"), ProcessRuntime(tmp_path), SessionCompleted())
    async with AdminClient(server.url, "admin") as client:
        await run_groups(RolloutRunner(client), [job], policy="p", n=1)
    (body,) = server.finished.values()
    assert (body["status"], body["cause"], body["attempt"]) == ("failed", "evaluation", 1)


async def test_an_evaluation_that_fails_after_tampering_is_worth_nothing(server: Stub, tmp_path: Path) -> None:
    """Left out of the baseline it would be worth more than a failure."""
    check = CommandCheck("exit 127", reward_file="reward.txt")
    job = assignment(Shell("echo 1.0 > reward.txt"), ProcessRuntime(tmp_path), check)
    async with AdminClient(server.url, "admin") as client:
        await run_groups(RolloutRunner(client), [job], policy="p", n=1)
    (body,) = server.finished.values()
    assert (body["status"], [reward["value"] for reward in server.rewards]) == ("succeeded", [0.0])
    assert body["tampering"]


def test_a_command_need_not_read_what_it_is_given(tmp_path: Path) -> None:
    async def run() -> list[Exit]:
        workspace = await ProcessRuntime(tmp_path).prepare(Files({}))
        prompt = "x" * 1_000_000
        commands = [Command(("true",), stdin=prompt), Command(("wc", "-c"), stdin=prompt), Command(("cat",))]
        exits = [await workspace.run(command, Limits(), 20) for command in commands]
        await workspace.close()
        return exits

    for runner in (asyncio.run, uvloop.run):  # Ray's actors and the server run on uvloop
        ends = runner(run())
        assert [(exit_.ending, exit_.output.strip()) for exit_ in ends] == [
            (Ending.DONE, ""),
            (Ending.DONE, "1000000"),
            (Ending.DONE, ""),
        ]


async def test_cancelling_ends_every_rollout_as_cancelled(server: Stub, tmp_path: Path) -> None:
    running_now = asyncio.Event()

    def progress(step: Progress) -> None:
        if step.stage is Stage.RUN:
            running_now.set()

    job = assignment(Shell("sleep 60"), ProcessRuntime(tmp_path), SessionCompleted())
    async with AdminClient(server.url, "admin") as client:
        work = asyncio.create_task(
            run_groups(RolloutRunner(client, Slots(run=2), progress=progress), [job], policy="p", n=3)
        )
        await running_now.wait()
        work.cancel()
        with pytest.raises(asyncio.CancelledError):
            await work
    assert [body["status"] for body in server.finished.values()] == ["cancelled"] * 3
    assert not workspaces_in(tmp_path)


class SlowToStart(AdminClient):
    """A client that learns late that its rollouts have begun."""

    began: asyncio.Event
    released: asyncio.Event

    async def start_rollout(self, *args: Any, **options: Any) -> OpenedSession:
        session = await super().start_rollout(*args, **options)
        self.began.set()
        await self.released.wait()
        return session


async def test_a_rollout_that_is_cancelled_as_it_begins_is_ended_by_its_attempt(server: Stub, tmp_path: Path) -> None:
    job = assignment(Shell("sleep 60"), ProcessRuntime(tmp_path), SessionCompleted())
    async with SlowToStart(server.url, "admin") as client:
        client.began, client.released = asyncio.Event(), asyncio.Event()
        work = asyncio.create_task(run_groups(RolloutRunner(client), [job], policy="p", n=1))
        await client.began.wait()
        work.cancel()
        asyncio.get_running_loop().call_soon(client.released.set)
        with pytest.raises(asyncio.CancelledError):
            await work
    assert [(body["status"], body["attempt"]) for body in server.finished.values()] == [("cancelled", 1)]


async def test_a_rollout_that_is_ended_elsewhere_is_left_alone(server: Stub, tmp_path: Path) -> None:
    job = assignment(Shell("true"), ProcessRuntime(tmp_path), SessionCompleted())
    server.refuse_finish = "cancelled"
    async with AdminClient(server.url, "admin") as client:
        (group,) = await run_groups(RolloutRunner(client), [job], policy="p", n=1)
    (rollout,) = group.rollouts
    assert (rollout.status, rollout.reason) == ("cancelled", "the rollout has ended as cancelled")


class Meeting:
    """An evaluator and a harness that can only end together: the test hangs if one stage blocks the other."""

    name, package, dialect, quirks, needs_clean_workspace = "meeting", None, "openai_chat", (), False
    reward_files = ()

    def __init__(self) -> None:
        self.second_agent_ran = threading.Event()
        self.runs = 0

    def launch(self, job: Job) -> Launch:
        self.runs += 1
        run = self.runs

        def agent(stop: threading.Event) -> tuple[Ending, str]:
            if run == 2:
                self.second_agent_ran.set()
            return Ending.DONE, ""

        return PythonCall(agent)

    async def evaluate(self, evidence: Evidence) -> Verdict:
        met = await asyncio.to_thread(self.second_agent_ran.wait, 10)
        return Verdict((Score(float(met)),))


async def test_a_slow_evaluation_does_not_block_the_next_agent(server: Stub, tmp_path: Path) -> None:
    meeting = Meeting()
    job = assignment(meeting, ThreadRuntime(tmp_path), meeting)
    async with AdminClient(server.url, "admin") as client:
        (group,) = await run_groups(RolloutRunner(client, Slots(prepare=1, run=1, evaluate=1)), [job], policy="p", n=2)
    assert group.rewards == (1.0, 1.0)


async def test_groups_wait_for_the_ledger(server: Stub, tmp_path: Path) -> None:
    server.groups_allowed = 1
    jobs = [assignment(Shell("true"), ProcessRuntime(tmp_path), SessionCompleted()) for _ in range(4)]
    async with AdminClient(server.url, "admin") as client:
        groups = await run_groups(RolloutRunner(client), jobs, policy="p", n=2)
    assert len(groups) == 4
    assert server.refusals > 0
