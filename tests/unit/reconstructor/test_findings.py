"""What is said of a session before anybody trains on it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rolltap.reconstructor.reconstruct import reconstruct
from rolltap.reconstructor.report import report_of, total
from rolltap.reconstructor.rules import session_rules
from rolltap.types import Break, BreakReason, CallShape, Finish, Flaw, Outcome, SamplingFlaw, Session

from .forests import make_call

AGENT = CallShape(tools=1, toolset="t", system="s")
CALLED: dict[str, Any] = {"shape": AGENT, "finish": Finish.TOOL_CALLS}


def two(**last: Any) -> list[Any]:
    """A healthy run of two calls, the second with `last`."""
    fields = {"shape": AGENT, **last}
    return [make_call(0, [1], [2], **CALLED), make_call(1, [1, 2, 3], [4], **fields)]


def names(calls: list[Any], **rules: Any) -> list[str]:
    return [found.name for found in reconstruct(calls, **rules).findings]


def test_a_healthy_run_has_none() -> None:
    assert names(two()) == []


def test_a_question_without_tools_and_its_answer_are_a_whole_session() -> None:
    assert names([make_call(0, [1], [2], finish=Finish.STOP)]) == []


CASES: list[tuple[str, str, list[Any]]] = [
    ("no_call", "warn", []),
    ("no_reply", "fatal", [make_call(0, [1], [], outcome=Outcome.ENGINE_ERROR)]),
    ("nothing_trained", "fatal", two()[:1] and [make_call(0, [1], [2], delivered=False, **CALLED)]),
    ("one_call", "warn", two()[:1]),
    ("turns_truncated", "warn", two(finish=Finish.LENGTH)),
    ("ended_at_output_cap", "warn", two(finish=Finish.LENGTH)),
    ("finish_unknown", "warn", two(remark="the engine gives 'repetition' as its reason for the end")),
    ("no_tool_call", "warn", [make_call(0, [1], [2], shape=AGENT), make_call(1, [1, 2, 3], [4], shape=AGENT)]),
    ("logprobs_positive", "fatal", two(logprobs=np.array([0.5], np.float32))),
    ("logprobs_missing", "fatal", two(flaw=Flaw.LOGPROBS_MISSING, logprobs=np.empty(0, np.float32))),
    ("tokens_missing", "fatal", two(flaw=Flaw.TOKENS_MISSING)),
    ("version_unknown", "warn", two(flaw=Flaw.VERSION_UNKNOWN)),
    ("calls_unparsable", "warn", two(flaw=Flaw.TOOL_CALL_UNPARSABLE)),
    ("sampling_truncated", "warn", two(sampling_flaw=SamplingFlaw.TRUNCATED)),
    ("logprobs_untempered", "warn", two(sampling_flaw=SamplingFlaw.UNTEMPERED)),
    ("calls_refused", "warn", [*two(), make_call(2, [], [], outcome=Outcome.REFUSED)]),
    ("calls_failed", "info", [*two(), make_call(2, [1, 2, 3, 4, 5], [6], outcome=Outcome.ABORTED)]),
    ("tool_choice_not_forced", "info", two(shape=CallShape(tools=1, toolset="t", unapplied=("tool_choice",)))),
    ("effort_not_applied", "info", two(shape=CallShape(tools=1, toolset="t", unapplied=("reasoning_effort",)))),
    ("thinking_budget_not_kept", "info", two(shape=CallShape(tools=1, toolset="t", unapplied=("thinking_budget",)))),
    ("tools_changed", "info", two(break_=Break(BreakReason.TOOLS_CHANGED, "", None, 0))),
    ("system_changed", "info", two(break_=Break(BreakReason.SYSTEM_CHANGED, "", None, 0))),
    ("template_changed", "info", two(break_=Break(BreakReason.TEMPLATE_NOT_BRIDGEABLE, "", None, 0))),
]


@pytest.mark.parametrize(("name", "grade", "calls"), CASES)
def test_each_is_found_and_graded(name: str, grade: str, calls: list[Any]) -> None:
    trajectory = reconstruct(calls)
    assert (name, grade) in [(found.name, found.grade.value) for found in trajectory.findings]
    grades = [found.grade.value for found in trajectory.findings]
    assert grades == sorted(grades, key=["fatal", "warn", "info"].index)


def test_a_session_of_text_alone_is_told_once_and_not_as_fatal() -> None:
    text = [make_call(number, [], [], flaw=Flaw.TOKENS_MISSING, **CALLED) for number in range(2)]
    (found,) = reconstruct(text).findings
    assert (found.name, found.grade.value, found.count) == ("text_only", "info", 2)
    assert found.text == "replies are not trainable: the upstream returned no token ids"


def test_a_few_refused_requests_are_worth_knowing_only() -> None:
    calls = [make_call(0, [1], [2], **CALLED)]
    for number in range(1, 30):
        calls.append(make_call(number, [*calls[-1].prompt_ids, *calls[-1].output_ids, 3], [4], **CALLED))
    refused = make_call(30, [], [], outcome=Outcome.REFUSED)
    assert [(found.name, found.grade.value) for found in reconstruct([*calls, refused]).findings] == [
        ("calls_refused", "info")
    ]


def test_a_report_counts_the_sessions_that_have_a_finding() -> None:
    reports = [report_of(reconstruct(calls)) for calls in (two(), two()[:1], two()[:1])]
    assert total(reports).to_dict()["findings"] == {"one_call": 2}


def test_nothing_of_a_session_that_measures_is_trained() -> None:
    session = Session("s", "p", "", 0.0, 1.0, tags={"purpose": "eval"})
    trajectory = reconstruct(two(), rules=session_rules(session, ["abandoned", "auxiliary"]))
    assert not any(segment.loss_mask.any() for segment in trajectory.segments)
    assert {found.mask for found in trajectory.classifications} <= {"evaluation", "other_policy"}
