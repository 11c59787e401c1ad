"""What text is a reward: a number as JSON or a shell's tools write it, and nothing else that Python reads as one."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rolltap.errors import NoReward
from rolltap.harnesses.base import Runtime
from rolltap.harnesses.evaluators.command import CommandCheck
from rolltap.harnesses.evaluators.harbor import HarborCheck
from rolltap.harnesses.evaluators.rewards import parse_reward
from rolltap.harnesses.runtimes.bubblewrap import BubblewrapRuntime

from .test_evaluators import harbor_tests, judged

NUMBERS = {"1": 1.0, "0.5\n": 0.5, " -2e-1 \r\n": -0.2, ".5": 0.5, "1.": 1.0, "+1": 1.0, "-0": 0.0, "1E2": 100.0}
OTHERS = (
    *("1_0", "01_0", "01", "0x10", "0b1", "1e400", "-1e400", "nan", "-nan", "inf", "Infinity", "", "e", "1e", ".", "+"),
    *("\u0661", "1\u0660", "\uff11", "\u00a01", "1\u2003", "\x0b1", "1\0", "1 1", "1\n1", "1,0", "1%", "true"),
)  # fmt: skip


@pytest.fixture
def runtime(tmp_path: Path) -> Runtime:
    return BubblewrapRuntime(tmp_path / "places")


@pytest.mark.parametrize("text", NUMBERS)
def test_a_number_is_a_reward(text: str) -> None:
    assert parse_reward(text) == NUMBERS[text]


@pytest.mark.parametrize("text", OTHERS)
def test_what_is_no_number_is_no_reward(text: str) -> None:
    with pytest.raises(NoReward):
        parse_reward(text)


@given(st.text("0123456789-+._eExX \n\u0663naif", max_size=8))
def test_a_reward_is_what_json_calls_a_number(text: str) -> None:
    """But for a sign and a point, with which JSON begins and ends none."""
    try:
        value = parse_reward(text)
    except NoReward:
        with pytest.raises((ValueError, AssertionError)):
            assert math.isfinite(json.loads(text, parse_constant=float))
        return
    plain = text.strip().removeprefix("+").replace("-.", "-0.").replace(".e", ".0e").replace(".E", ".0E")
    plain = f"0{plain}" if plain.startswith(".") else plain
    assert json.loads(f"{plain}0" if plain.endswith(".") else plain) == value


@pytest.mark.parametrize("text", ["1_0", "\u0661", "0x1", "nan", "1e400", "1e10"])
async def test_no_reward_file_has_another_number(text: str, runtime: Runtime, tmp_path: Path) -> None:
    with pytest.raises(NoReward):
        await judged(CommandCheck(f"printf %s '{text}' > out", "out"), runtime, {})
    others = "time_ns", "1700000000000000000"
    for file, content in (("txt", text), ("json", json.dumps({"reward": text, others[0]: others[1]}))):
        tests = harbor_tests(tmp_path / file, f"printf %s '{content}' > /logs/verifier/reward.{file}")
        with pytest.raises(NoReward):
            await judged(HarborCheck(str(tests)), runtime, {})
