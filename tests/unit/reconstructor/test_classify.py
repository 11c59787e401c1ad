"""What calls are for, judged from the whole session."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from rolltap.reconstructor.reconstruct import reconstruct
from rolltap.reconstructor.report import report_of
from rolltap.reconstructor.rules import Rules
from rolltap.types import Break, BreakReason, Call, CallKind, CallShape, Outcome, Trajectory

from .forests import make_call

AGENT = CallShape(tools=3, toolset="t", system="s")
PLAIN = CallShape(tools=0, system="p")


def after(call: Call, *new: int) -> list[int]:
    return [*call.prompt_ids.tolist(), *call.output_ids.tolist(), *new]


def broken(call: Call, reason: BreakReason, parent: Call | None = None) -> Call:
    return replace(call, break_=Break(reason, call.id, parent.id if parent else None, 0))


def fresh(call: Call) -> Call:
    return broken(call, BreakReason.NEW_CONVERSATION)


def kinds(calls: list[Call]) -> list[tuple[str, str]]:
    return [(found.kind.value, found.rule) for found in reconstruct(calls).classifications]


def masks(trajectory: Trajectory) -> list[str]:
    return [found.mask for found in trajectory.classifications]


def test_a_title_that_is_asked_for_first_is_a_side_call():
    title = make_call(0, [9], [9, 9], shape=PLAIN)
    first = fresh(make_call(1, [1], [2], shape=AGENT))
    second = make_call(2, after(first, 3), [4], shape=AGENT)
    assert kinds([title, first, second]) == [("auxiliary", "aside"), ("main", "agent"), ("main", "agent")]
    assert masks(reconstruct([title, first, second])) == ["auxiliary", "", ""]
    assert masks(reconstruct([title, first, second], rules=Rules().train("auxiliary"))) == ["", "", ""]


def test_a_title_of_the_first_message_under_another_frame_is_a_side_call():
    first = make_call(0, [1], [2], shape=AGENT)
    title = broken(make_call(1, [9, 1], [9], shape=PLAIN), BreakReason.TOOLS_CHANGED, first)
    second = make_call(2, after(first, 3), [4], shape=AGENT)
    assert kinds([first, title, second])[1] == ("auxiliary", "aside")


def test_a_router_that_is_shown_the_agents_history_is_a_side_call():
    """Gemini CLI, resumed: the next call of the agent holds the history that the router was shown, not its choice."""
    first = make_call(0, [1], [2], shape=AGENT)
    router = fresh(make_call(1, [9, 1, 2, 3], [8], shape=replace(PLAIN, replies=1)))
    second = make_call(2, [1, 7, 2, 3], [4], shape=replace(AGENT, replies=1))
    second = broken(second, BreakReason.TOOLS_CHANGED, router)
    assert kinds([first, router, second]) == [("main", "agent"), ("auxiliary", "aside"), ("main", "agent")]


def test_the_last_answer_with_the_tools_withheld_is_the_agents():
    first = make_call(0, [1], [2], shape=AGENT)
    last = broken(make_call(1, [9, 1, 2, 3], [4], shape=replace(PLAIN, replies=1)), BreakReason.TOOLS_CHANGED, first)
    assert kinds([first, last]) == [("main", "agent"), ("main", "agent")]


@pytest.mark.parametrize("count", [2, 4])
def test_an_agent_without_tools_is_an_agent(count: int):
    """A scratchpad loop rebuilds one prompt each turn; planner, critic and writer have a prompt each."""
    calls = [make_call(0, [1], [5], shape=PLAIN)]
    calls += [fresh(make_call(n, [1, n], [5], shape=replace(PLAIN, system=f"s{n}"))) for n in range(1, count)]
    trajectory = reconstruct(calls)
    assert masks(trajectory) == [""] * count
    assert report_of(trajectory).kept == 1.0


def test_the_second_text_conversation_keeps_its_first_turn():
    first = make_call(0, [1], [2], shape=PLAIN)
    critic = fresh(make_call(1, [7], [8], shape=PLAIN))
    again = make_call(2, after(critic, 7), [8], shape=PLAIN)
    assert masks(reconstruct([first, critic, again])) == ["", "", ""]


def test_a_summary_that_the_next_history_quotes_is_masked_unless_switched_on():
    first = make_call(0, [1], [2], shape=AGENT)
    second = make_call(1, after(first, 3), [4], shape=AGENT)
    summary = make_call(2, after(second, 7), [6, 6], shape=AGENT)  # asked for with tools, as part of the conversation
    quoting = replace(AGENT, quotes=(summary.id,))
    behind = broken(make_call(3, [1, 6, 6], [5], shape=quoting), BreakReason.COMPACTION)
    trajectory = reconstruct([first, second, summary, behind])
    assert kinds([first, second, summary, behind])[2] == ("summary", "replaces_history")
    assert masks(trajectory) == ["", "", "summary", ""]
    assert [found.reason for found in trajectory.breaks] == [BreakReason.COMPACTION]
    assert masks(reconstruct([first, second, summary, behind], rules=Rules().train("summary"))) == [""] * 4


def test_a_summary_behind_which_the_last_turn_is_kept_is_one():
    """Claude Code keeps the turn before the compaction beside the summary, so its history goes on from that turn."""
    first = make_call(0, [1], [2], shape=AGENT)
    second = make_call(1, after(first, 3), [4], shape=AGENT)
    summary = make_call(2, after(second, 7), [6, 6], shape=AGENT)
    kept = replace(AGENT, replies=1, quotes=(summary.id,))
    behind = broken(make_call(3, [1, 6, 6, 4], [5], shape=kept), BreakReason.COMPACTION, second)
    assert masks(reconstruct([first, second, summary, behind])) == ["", "", "summary", ""]


def test_a_turn_that_is_kept_beside_a_summary_without_its_thinking_is_no_try_for_it():
    first = make_call(0, [1], [2], shape=AGENT)
    second = make_call(1, after(first, 3), [4], shape=AGENT)
    turn = make_call(3, after(second, 5), [*range(70, 79), *range(50, 90)], shape=AGENT)
    summary = make_call(4, after(second, 5, 7), [6, 6], shape=AGENT)
    kept = replace(AGENT, replies=1, quotes=(summary.id,))
    behind = broken(make_call(5, [1, 6, 6, *turn.output_ids[9:], 8], [9], shape=kept), BreakReason.COMPACTION)
    assert masks(reconstruct([first, second, turn, summary, behind])) == ["", "", "", "summary", ""]


def test_a_last_word_without_tools_that_is_quoted_where_the_history_goes_on_is_the_agents():
    first = make_call(0, [1], [2], shape=AGENT)
    last = broken(make_call(1, [9, 1, 2, 3], [4, 4], shape=replace(PLAIN, replies=1)), BreakReason.TOOLS_CHANGED, first)
    quoting = replace(AGENT, system="later", replies=1, quotes=(last.id,))
    further = broken(make_call(2, [8, 1, 2, 3, 4, 4], [5], shape=quoting), BreakReason.SYSTEM_CHANGED, first)
    assert masks(reconstruct([first, last, further]))[1] != "summary"


def test_a_turn_whose_quoted_reply_ends_a_history_that_goes_on_is_no_summary():
    first = make_call(0, [1], [2], shape=AGENT)
    second = make_call(1, after(first, 3), [4], shape=AGENT)
    other = make_call(2, after(first, 7), [6, 6], shape=AGENT)
    quoting = replace(AGENT, replies=2, quotes=(other.id,))
    behind = broken(make_call(3, [8, 2, 4, 6, 6], [5], shape=quoting), BreakReason.COMPACTION, second)
    assert masks(reconstruct([first, second, other, behind])) == ["", "", "", ""]


def test_a_summary_without_tools_is_one_even_if_the_next_prompt_rewrites_it():
    first = make_call(0, [1], [2], shape=AGENT)
    second = make_call(1, after(first, 3), [4], shape=AGENT)
    asked = replace(PLAIN, replies=2)
    summary = broken(make_call(2, [9, 1, 2, 3, 4, 7], [6], shape=asked), BreakReason.TOOLS_CHANGED, second)
    behind = broken(make_call(3, [1, 8], [5], shape=AGENT), BreakReason.HISTORY_EDITED, first)
    assert kinds([first, second, summary, behind]) == [
        ("main", "agent"),
        ("main", "agent"),
        ("summary", "replaces_history"),
        ("main", "agent"),
    ]


def test_a_history_that_is_summarised_from_one_pasted_message():
    first = make_call(0, [1], [2], shape=AGENT)
    second = make_call(1, after(first, 3), [4], shape=AGENT)
    summary = fresh(make_call(2, [9, 1, 2, 3, 4], [6], shape=PLAIN))
    behind = broken(make_call(3, [1, 6], [5], shape=replace(AGENT, quotes=(summary.id,))), BreakReason.COMPACTION)
    assert kinds([first, second, summary, behind])[2] == ("summary", "replaces_history")


def test_a_reviewer_that_quotes_the_last_reply_makes_it_no_summary():
    first = make_call(0, [1], [2], shape=PLAIN)
    answer = make_call(1, after(first, 3), [4, 4], shape=PLAIN)
    reviewer = replace(PLAIN, system="r", quotes=(answer.id,))
    review = broken(make_call(2, [8, 4, 4], [5], shape=reviewer), BreakReason.COMPACTION)
    trajectory = reconstruct([first, answer, review])
    assert masks(trajectory) == ["", "", ""]
    assert [found.reason for found in trajectory.breaks] == [BreakReason.NEW_CONVERSATION]


def test_a_subagents_answer_in_the_next_prompt_is_no_summary():
    main = make_call(0, [1], [2], shape=AGENT)
    sub = fresh(make_call(1, [7], [8], shape=AGENT))
    answer = make_call(2, after(sub, 7), [6, 6], shape=AGENT)
    clock = replace(AGENT, system="later", replies=1, quotes=(answer.id,))
    back = broken(make_call(3, [1, 2, 6, 6], [3], shape=clock), BreakReason.COMPACTION, main)
    assert masks(reconstruct([main, sub, answer, back])) == ["", "", "", ""]


def test_a_side_call_that_repeats_an_earlier_answer_is_judged_by_its_place():
    first = make_call(0, [1], [2], shape=AGENT)
    second = make_call(1, after(first, 3), [4], shape=AGENT)
    commit = broken(make_call(2, [9, 4], [4], shape=replace(PLAIN, quotes=(second.id,))), BreakReason.COMPACTION)
    third = make_call(3, after(second, 3), [4], shape=AGENT)
    assert masks(reconstruct([first, second, commit, third])) == ["", "", "auxiliary", ""]


@pytest.mark.parametrize("kind", [CallKind.JUDGE, CallKind.SIMULATOR])
def test_judges_and_simulated_users_are_never_trained(kind: CallKind):
    rules = Rules().train("auxiliary", "summary", "abandoned")
    assert masks(reconstruct([make_call(0, [1], [2], kind=kind)], rules=rules)) == [kind.value]


def test_a_call_in_a_role_is_the_agents():
    main = make_call(0, [1], [2], shape=AGENT)
    critic = fresh(make_call(1, [7], [8], agent="critic", shape=replace(PLAIN, role="critic")))
    assert kinds([main, critic])[1] == ("main", "role")


def test_a_reply_forced_by_a_grammar_is_not_trained_by_default():
    call = make_call(0, [1], [2], shape=replace(PLAIN, constrained=True))
    assert masks(reconstruct([call])) == ["constrained"]
    assert masks(reconstruct([call], rules=Rules().train("constrained"))) == [""]


@pytest.mark.parametrize(("names", "mask"), [(("sampling_mask",), "constrained"), (("mask_rows", "mask_table"), "")])
def test_a_constrained_call_is_trained_if_the_ids_that_its_grammar_left_are_on_record(
    names: tuple[str, ...], mask: str
) -> None:
    """Whether an engine's mask of top-k and top-p holds the grammar, too, was tried on none."""
    arrays = {"sampling_mask": np.array([[2]]), "mask_rows": np.array([0]), "mask_table": np.array([2, 2, 7])}
    extras = {name: arrays[name].astype(np.int32) for name in names}
    call = make_call(0, [1], [2], shape=replace(PLAIN, constrained=True), extras=extras)
    assert masks(reconstruct([call])) == [mask]


def test_subagents_without_a_header_have_an_agent_of_their_own():
    main = make_call(0, [1], [2], shape=AGENT)
    subs = [fresh(make_call(n, [7, n], [8], shape=replace(AGENT, toolset="fewer", system="x"))) for n in (1, 2)]
    inner = make_call(3, after(subs[0], 7), [8], shape=replace(AGENT, toolset="fewer", system="x"))
    back = make_call(4, after(main, 8), [3], shape=AGENT)
    trajectory = reconstruct([main, *subs, inner, back])
    names = {segment.turns[-1].call_id: segment.agent for segment in trajectory.segments}
    assert names == {back.id: "", inner.id: "subagent-1", subs[1].id: "subagent-2"}


def test_a_subagent_with_the_main_agents_tools_is_told_by_the_wait():
    main = make_call(0, [1], [2], shape=AGENT)
    sub = fresh(make_call(1, [7], [8], shape=AGENT))
    back = make_call(2, after(main, 8), [3], shape=AGENT)
    assert [found.agent for found in reconstruct([main, sub, back]).classifications] == ["", "subagent-1", ""]
    cleared = reconstruct([main, sub])  # the user began anew: the same agent
    assert [found.agent for found in cleared.classifications] == ["", ""]


def test_four_samples_of_one_request_that_nothing_follows_are_four_good_samples():
    calls = [make_call(n, [1], [n], shape=CallShape(choices=4)) for n in range(4)]
    assert masks(reconstruct(calls)) == [""] * 4
    chosen = make_call(4, after(calls[1], 7), [8])
    assert masks(reconstruct([*calls, chosen])) == ["abandoned", "", "abandoned", "abandoned", ""]


@pytest.mark.parametrize("chosen", [0, 1])
def test_the_sibling_that_was_continued_is_kept_where_the_frame_changed(chosen: int):
    pair = [make_call(0, [1], [2, 3, 4]), make_call(1, [1], [5, 6, 7])]
    follow = make_call(2, [9, 1, *pair[chosen].output_ids.tolist(), 8], [4])
    trajectory = reconstruct([*pair, broken(follow, BreakReason.SYSTEM_CHANGED, pair[0])])
    assert [found.mask == "" for found in trajectory.classifications] == [chosen == 0, chosen == 1, True]


def test_every_delivered_token_is_trained_or_masked_with_a_reason():
    title = make_call(0, [9], [9, 9], shape=PLAIN)
    first = fresh(make_call(1, [1], [2, 2], shape=AGENT))
    lost = make_call(2, after(first, 3), [4], shape=AGENT, delivered=False)
    report = report_of(reconstruct([title, first, lost])).to_dict()
    assert (report["delivered_tokens"], report["trained_tokens"], report["kept"]) == (4, 2, 0.5)
    assert report["masked_tokens"] == {"auxiliary": 2, "undelivered": 1}
    assert report["calls_by_kind"] == {"main": 2, "auxiliary": 1}


def test_a_refused_request_breaks_nothing():
    first = make_call(0, [1], [2])
    refused = make_call(1, [], [], outcome=Outcome.REFUSED)
    assert reconstruct([first, refused]).breaks == ()
