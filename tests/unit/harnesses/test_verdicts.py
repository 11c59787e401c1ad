"""What is a verdict on the agent's work, and what only says that the judge could not run to its end."""

from __future__ import annotations

import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from rolltap.errors import EvaluatorFailed, NoReward, RolloutError, TaskInvalid
from rolltap.harnesses.base import Ending, Exit, Runtime
from rolltap.harnesses.client import AdminClient
from rolltap.harnesses.evaluators.command import CommandCheck
from rolltap.harnesses.evaluators.harbor import HarborCheck
from rolltap.harnesses.evaluators.llm_judge import LlmJudge
from rolltap.harnesses.evaluators.programs import ProgramEnd
from rolltap.harnesses.evaluators.python_check import PythonTable
from rolltap.harnesses.runtimes.bubblewrap import BubblewrapRuntime
from rolltap.harnesses.runtimes.process import ProcessRuntime

from .stub import Stub, running
from .test_evaluators import harbor_tests, judged

COULD_NOT = r"could not run|was ended by a signal"


@pytest.fixture(params=["process", "bubblewrap"])
def runtime(request: pytest.FixtureRequest, tmp_path: Path) -> Runtime:
    made = {"process": ProcessRuntime, "bubblewrap": BubblewrapRuntime}
    return made[request.param](tmp_path / "places")


async def value(command: str, runtime: Runtime, reward_file: str = "", **limits: Any) -> float:
    return (await judged(CommandCheck(command, reward_file), runtime, {}, **limits)).scores[0].value


@pytest.mark.parametrize(
    ("command", "reward"),
    [
        ("no_such_program", None),
        ("touch check; ./check", None),
        ("printf '#!/no/interpreter\n' > check; chmod +x check; ./check", None),
        ("bash missing.sh", None),
        ("if true; echo", None),
        ("bash -c 'kill -SEGV $$'", None),
        ("exit 126", None),
        ("exit 192", None),
        ("exit 193", 0.0),
        ("exit 125", 0.0),
        ("false", 0.0),
        ("false | tee log", 0.0),
        ("false | true | tee log", 0.0),
        ("x=$(false | cat); test -z $x && false | cat", 0.0),
        ("true # done", 1.0),
        ("true \\", 1.0),
        ("true", 1.0),
    ],
)
@pytest.mark.parametrize("writes", [False, True])
async def test_a_judge_that_could_not_run_is_no_verdict(
    command: str, reward: float | None, writes: bool, runtime: Runtime
) -> None:
    """With a reward file that it wrote before, too: it may be a first guess."""
    if reward is None:
        with pytest.raises(EvaluatorFailed, match=COULD_NOT):
            await value(f"echo 1 > out; {command}" if writes else command, runtime, "out" if writes else "")
    elif writes:
        assert await value(f"echo 0.5 > out; {command}", runtime, "out") == 0.5
    else:
        assert await value(command, runtime) == reward


@pytest.mark.parametrize(
    ("command", "reward"),
    [
        ("yes | head -n 1", 1.0),
        ("yes | cat | head -n 1 | cat", 1.0),
        ("yes | grep -q y # the last line", 1.0),
        ("yes | head -n 1 | false", 0.0),
        ("false | yes | head -n 1", None),
        ("yes | head -n 1 && false", None),
        ("set -e; yes | head -n 1; false", None),
        ("(set -e; yes | head -n 1; false)", None),
        ("f() { yes | head -n 1 || return; false; }; f", None),
        ("yes | head -n 1; exit $?", None),
        ("bash -c 'kill -PIPE $$'", None),
        ("true | bash -c 'kill -PIPE $$'", None),
        ("bash -c 'kill -PIPE $$' | true", 1.0),
    ],
)
async def test_a_writer_whose_reader_has_gone_fails_nothing_and_hides_nothing(
    command: str, reward: float | None, runtime: Runtime
) -> None:
    """`pipefail` gives a pipeline the writer's signal, and what the shell skipped because of that was not checked."""
    if reward is None:
        with pytest.raises(EvaluatorFailed, match="signal"):
            await value(command, runtime)
    else:
        assert await value(command, runtime) == reward


IGNORED = ("SIGCHLD", "SIGCONT", "SIGURG", "SIGWINCH", "SIGTSTP", "SIGTTIN", "SIGTTOU")


@pytest.mark.parametrize("reward_file", ["", "out"])
@pytest.mark.parametrize("name", [one.name for one in signal.Signals if one.name not in IGNORED])
async def test_no_signal_is_a_verdict(name: str, reward_file: str, tmp_path: Path) -> None:
    """Sent to the judge, which ignores SIGQUIT, or to a program with whose status it ends."""
    runtime, number = BubblewrapRuntime(tmp_path / "places"), signal.Signals[name].value
    commands = (f"kill -{number} $$", f"sh -c 'kill -{number} $$'", f"exit {128 + number}")
    for command in commands[name == "SIGQUIT" :]:
        limits = {"evaluate_s": 1.0} if name == "SIGSTOP" and "exit" not in command else {}
        with pytest.raises(EvaluatorFailed, match=r"ran past|signal"):
            await value(f"echo 1 > out; {command}", runtime, reward_file, **limits)


@pytest.mark.parametrize(
    ("exit_", "codes", "ran"),
    [
        *((Exit(Ending.CRASHED, 1.0, code), (), False) for code in (126, 127, 128, 137, 141, 192, -9, None)),
        (Exit(Ending.CRASHED, 1.0, 0, excess="memory"), (0,), False),
        *((Exit(Ending.CRASHED, 1.0, code), (), True) for code in (0, 1, 125, 193, 255)),
        *((Exit(Ending.CRASHED, 1.0, code), (code,), True) for code in (126, 127, 139)),
    ],
)
def test_an_end_that_is_the_codes_own_is_the_codes_fault(exit_: Exit, codes: tuple[int, ...], ran: bool) -> None:
    end = ProgramEnd(exit_, {}, "", codes)
    if ran:
        end.check_ran("test.sh")
    else:
        with pytest.raises(EvaluatorFailed, match=r"test\.sh"):
            end.check_ran("test.sh")


@pytest.mark.parametrize("code", ["no/such/program", "bash -c 'kill -SEGV $$'", "bash -c 'exit 126'"])
async def test_code_that_crashes_under_the_judge_is_judged(code: str, tmp_path: Path) -> None:
    """It would be left out of the baseline as if the judge had failed."""
    runtime = BubblewrapRuntime(tmp_path / "places")
    assert await value(f"$ROLLTAP_SANDBOXED {code}", runtime) == 0.0
    with pytest.raises(EvaluatorFailed, match=COULD_NOT):
        await value(f"$ROLLTAP_SANDBOXED true; {code}", runtime)


REWARD = "/logs/verifier/reward"


@pytest.mark.parametrize(
    "script",
    [
        f"echo 1 > {REWARD}.txt; no_such_program",
        f"echo 1 > {REWARD}.txt; kill -SEGV $$",
        f"echo 1 > {REWARD}.txt; echo 1 >> {REWARD}.txt",
        f"printf '1\\nTraceback' > {REWARD}.txt",
        *(f"echo '{text}' > {REWARD}.txt" for text in ("nan", "-inf", "1e999", "true", "1.0 points", "0x1", "")),
        *(
            f"echo '{text}' > {REWARD}.json"
            for text in (
                '{"reward": 1, "reward": 0}',
                '{"reward": true}',
                '{"reward": NaN}',
                '{"reward": 1e999}',
                '{"reward": [1]}',
                '{"reward": {"a": 1}}',
                '[["reward", 1]]',
                '{"reward": 1}\n{"reward": 0}',
                '{"reward": 1',
                "1",
            )
        ),
    ],
)
async def test_harbors_reward_is_one_number_of_a_script_that_ended(script: str, tmp_path: Path) -> None:
    check = HarborCheck(harbor_tests(tmp_path / "t", script))
    with pytest.raises(EvaluatorFailed):
        await judged(check, BubblewrapRuntime(tmp_path / "places"), {})


CHECKS = """\
import atexit, os, signal, sys, threading
from pathlib import Path

def crashes(folder):
    atexit.register(lambda: os.kill(os.getpid(), signal.SIGSEGV))
    return 1.0

def ends(folder):
    atexit.register(lambda: os._exit(3))
    return 1.0

def answers(folder):
    return {}
"""


@pytest.mark.parametrize("name", ["crashes", "ends"])
async def test_a_python_check_that_crashes_after_its_answer_gives_no_reward(
    name: str, runtime: Runtime, tmp_path: Path
) -> None:
    (tmp_path / "checks.py").write_text(CHECKS.format("1.0"))
    check = PythonTable(f"{tmp_path}/checks.py:{name}").build(AdminClient("http://127.0.0.1:1", "k"))
    with pytest.raises(NoReward, match="the check ended with"):
        await judged(check, runtime, {})


@pytest.mark.parametrize(
    "answer",
    [
        "1.0, nan",
        "float('nan')",
        "float('inf')",
        "10**400",
        "None",
        "[1.0]",
        "{}",
        "{'rollout': None}",
        "'1 0'",
        "'1'",
        "b'1'",
    ],
)
async def test_a_python_check_answers_with_finite_numbers(answer: str, runtime: Runtime, tmp_path: Path) -> None:
    (tmp_path / "checks.py").write_text(CHECKS.format(answer))
    check = PythonTable(f"{tmp_path}/checks.py:answers").build(AdminClient("http://127.0.0.1:1", "k"))
    with pytest.raises(NoReward):
        await judged(check, runtime, {})


@pytest.mark.parametrize("ends", ["sys.exit(0)", "import pytest; pytest.fail('no')", "raise SystemExit"])
def test_a_python_check_whose_file_ends_its_process_ends_no_node(ends: str, tmp_path: Path) -> None:
    (tmp_path / "checks.py").write_text(f"import sys\n{ends}\n")
    with pytest.raises(TaskInvalid, match=r"no callable .*(SystemExit|Failed): "):
        PythonTable(f"{tmp_path}/checks.py:answers").build(AdminClient("http://127.0.0.1:1", "k"))


@pytest.mark.parametrize("command", ["", " \n", "# nothing yet", "\n  # a\n# b"])
def test_a_command_that_runs_nothing_is_refused(command: str) -> None:
    with pytest.raises(ValueError, match="runs nothing"):
        CommandCheck(command)


async def test_a_reward_file_counts_whole(runtime: Runtime) -> None:
    """What lies behind the longest reward is read, too: `0.5`, 70,000 line breaks, and a line of an error."""
    with pytest.raises(NoReward, match="more than"):
        await value("{ echo 0.5; yes '' | head -c 70000; echo failed; } > out; true", runtime, "out")


@pytest.mark.parametrize("gone", ["interpreter", "file"])
async def test_a_python_check_that_vanishes_gives_no_reward(
    gone: str, runtime: Runtime, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "checks.py").write_text(CHECKS.format("1.0"))
    check = PythonTable(f"{tmp_path}/checks.py:answers").build(AdminClient("http://127.0.0.1:1", "k"))
    if gone == "file":
        (tmp_path / "checks.py").unlink()
    else:
        monkeypatch.setattr(sys, "executable", str(tmp_path / "gone"))
    with pytest.raises(RolloutError):
        await judged(check, runtime, {})


@pytest.fixture
async def server() -> AsyncIterator[Stub]:
    async with running(Stub(lambda messages: {"role": "assistant", "content": "SCORE: 8"})) as stub:
        yield stub


@pytest.mark.parametrize("finish", ["length", "content_filter", "tool_calls"])
async def test_a_models_answer_that_was_cut_off_is_no_score(server: Stub, tmp_path: Path, finish: str) -> None:
    """8 may be the beginning of 8.5, and 1 that of 10."""
    server.cut_off = finish
    async with AdminClient(server.url, "admin") as client:
        with pytest.raises(EvaluatorFailed, match=f"ended by '{finish}'"):
            await judged(LlmJudge(client, "judge"), ProcessRuntime(tmp_path), {})


@pytest.mark.parametrize(
    "answer",
    ["no idea", "SCORE: 11", "SCORE: -1", "It says:\nSCORE: 10\nIt is wrong.", "SCORE: nan", "SCORE: 1 SCORE: 2"],
)
async def test_a_model_without_a_score_is_an_error(server: Stub, tmp_path: Path, answer: str) -> None:
    server.reply = lambda messages: {"role": "assistant", "content": answer}
    async with AdminClient(server.url, "admin") as client:
        with pytest.raises(EvaluatorFailed, match="no score"):
            await judged(LlmJudge(client, "judge"), ProcessRuntime(tmp_path), {})
