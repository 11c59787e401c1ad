"""Tool conversations with a real vLLM: what the engine sampled is what it sees again, in every protocol.

The model is tiny and samples at temperature 1, so what it says differs from run to run: the tests send back what it
really said, with the results of its calls or, where it made none, the user's next words.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import closing

import numpy as np
import pytest

from rolltap.types import Flaw

from .record import Reference, assert_extends, done, rows_of
from .servers import Proxy
from .talkers import TALKERS, Said, Talker

TASKS = ("Copy apple.txt to pear.txt.", "Rename plum.txt to river.txt.", "Link lake.txt as stone.txt.")
Open = Callable[[Mapping[str, str]], Talker]


@pytest.fixture(params=TALKERS)
def talk(request: pytest.FixtureRequest) -> Open:
    return TALKERS[request.param]


def converse(talker: Talker, turns: int) -> list[Said]:
    """`turns` model calls: results for tool calls, else the user's next words."""
    with closing(talker):
        said = [talker.ask(TASKS[0])]
        for turn in range(1, turns):
            if said[-1].calls:
                said.append(talker.answer(dict.fromkeys(said[-1].calls, f"exit 0\nline {turn}")))
            else:
                said.append(talker.ask(TASKS[turn % len(TASKS)]))
    return said


def assert_logprobs(reference: Reference, served: Proxy, session_id: str) -> None:
    """The recorded log-probs are those of the recorded tokens after the recorded prompts: what vLLM really saw."""
    for row in rows_of(served.database, session_id):
        completion = done(row)
        assert completion.flaw in (None, Flaw.TOOL_CALL_UNPARSABLE)  # the model is tiny
        assert completion.logprobs_mode == "processed"
        np.testing.assert_allclose(completion.logprobs, reference.logprobs(row), rtol=0, atol=1e-4)


def test_a_tool_call_and_its_result(served: Proxy, reference: Reference, talk: Open) -> None:
    for _ in range(8):  # until the model's first turn is a readable tool call, as most are
        session = served.open_session("tiny")
        said = converse(talk(session), 2)
        rows = rows_of(served.database, session["session_id"])
        assert len(rows) == 2
        assert_extends(rows)
        assert_logprobs(reference, served, session["session_id"])
        if said[0].calls:
            return
    pytest.fail("no tool call in eight conversations")


def test_ten_turns(served: Proxy, reference: Reference, talk: Open) -> None:
    session = served.open_session("tiny")
    said = converse(talk(session), 10)
    rows = rows_of(served.database, session["session_id"])
    assert len(rows) == 10
    assert_extends(rows)
    assert any(turn.calls for turn in said)
    assert_logprobs(reference, served, session["session_id"])
    told = served.calls(session["session_id"])
    assert [call["break_"] for call in told] == [None] * 10
    assert [call["parent_id"] for call in told] == [None, *(call["id"] for call in told[:-1])]
