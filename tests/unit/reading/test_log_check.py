"""A harness's own log beside the record: what agrees, and each way in which it may not."""

from __future__ import annotations

import time
from typing import Any

import pytest

from rolltap.contract.admin import HarnessLog, LogEntry
from rolltap.ids import new_id
from rolltap.reading.log_check import RecordedReply, compare
from rolltap.types import LogVerdict

FIRST, SECOND, THIRD, SIDE = (new_id() for _ in range(4))


def handle(call_id: str) -> str:
    return f"call_{call_id}000123456789ab"


RECORD = [
    RecordedReply(SIDE, 9, (), frozenset({"user"}), required=False),
    RecordedReply(FIRST, 12, (handle(FIRST),), frozenset({"system", "user"}), required=True),
    RecordedReply(SECOND, 7, (handle(SECOND),), frozenset({"tool"}), required=True),
    RecordedReply(THIRD, 5, (), frozenset({"tool"}), required=True),
]


def log(**changes: Any) -> list[LogEntry]:
    entries = {
        "prompt": LogEntry("user"),
        "first": LogEntry("assistant", "", 12, (handle(FIRST),)),
        "first_result": LogEntry("tool", handle(FIRST)),
        "second": LogEntry("assistant", "", 7, (handle(SECOND),)),
        "second_result": LogEntry("tool", handle(SECOND)),
        "third": LogEntry("assistant", "", 5),
    }
    return [entry for entry in (entries | changes).values() if entry is not None]


def verdict(entries: list[LogEntry], record: list[RecordedReply] = RECORD, **fields: Any) -> tuple[str, str]:
    check = compare(HarnessLog(entries, **fields), record)
    return check.verdict.value, check.text


def test_a_log_that_says_the_same_matches_whatever_side_calls_there_are() -> None:
    assert verdict(log()) == ("match", "3 replies (3 with token counts) and 2 tool calls are as recorded")


def test_a_log_without_ids_is_compared_by_place_and_tokens() -> None:
    bare = [LogEntry("assistant", "", 12, ("x1",)), LogEntry("assistant", "", 7, ("x2",)), LogEntry("assistant")]
    assert verdict(bare)[0] == "match"


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"second": None}, "1 recorded replies are not in the log"),
        ({"third": None, "second": None, "second_result": None}, "2 recorded replies are not in the log"),
        ({"third": LogEntry("assistant", "", 6)}, "reply 3 of the log (6 tokens, 0 tool calls) is not in the record"),
        ({"first": LogEntry("assistant", "", 13, (handle(FIRST),))}, "has 13 tokens, recorded are 12"),
        ({"first": LogEntry("assistant", "", 12, (handle(new_id()),))}, "is not in the record"),
        ({"first": LogEntry("assistant", "", 12, (handle(FIRST), "call_9"))}, "makes the tool calls"),
        ({"again": LogEntry("assistant", "", 12, (handle(FIRST),))}, "a second time"),
        ({"third": LogEntry("assistant", f"msg_{handle(new_id())}")}, "is not in the record"),
        ({"first_result": LogEntry("user")}, "the log has a message of role user, the record none"),
        ({"third_result": LogEntry("tool", handle(new_id()))}, "which no recorded reply made"),
    ],
)  # fmt: skip
def test_what_differs_is_said(changes: dict[str, Any], text: str) -> None:
    found, said = verdict(log(**changes))
    assert (found, text in said) == ("mismatch", True), said


def test_replies_in_another_order() -> None:
    swapped = [LogEntry("assistant", "", 7, (handle(SECOND),)), LogEntry("assistant", "", 12, (handle(FIRST),))]
    assert "was made before" in verdict(swapped)[1]


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("ids", [True, False])
def test_the_logs_of_a_fork_and_of_the_conversation_that_it_leaves_have_any_order(first: bool, ids: bool) -> None:
    fourth = new_id()
    said = frozenset({"user"})
    record = [
        RecordedReply(FIRST, 12, (), said, required=True),
        RecordedReply(SECOND, 7, (), said, required=True, parent=FIRST),
        RecordedReply(THIRD, 5, (), said, required=True, parent=FIRST),
        RecordedReply(fourth, 6, (), said, required=True, parent=SECOND),
    ]
    begins, *rest = [
        [LogEntry("user"), LogEntry("assistant", f"chatcmpl-{reply.call_id}" if ids else "", reply.tokens)]
        for reply in record
    ]
    forked, other = [*rest[0], *rest[2]], rest[1]
    assert verdict([*begins, *forked, *other] if first else [*begins, *other, *forked], record)[0] == "match"


@pytest.mark.parametrize("first", [True, False])
def test_a_harness_that_runs_within_another_is_read_before_or_after_it(first: bool) -> None:
    outer = [RecordedReply(FIRST, 12, (handle(FIRST),), None, required=True)]
    inner = [RecordedReply(SECOND, 7, (), None, required=False)]
    record = [*outer, *inner, RecordedReply(THIRD, 5, (), frozenset({"tool"}), required=True)]
    main = [LogEntry("assistant", "", 12, (handle(FIRST),)), LogEntry("tool", handle(FIRST)),
            LogEntry("assistant", f"chatcmpl-{THIRD}", 5)]  # fmt: skip
    nested = [LogEntry("assistant", f"chatcmpl-{SECOND}", 7)]
    assert verdict([*nested, *main] if first else [*main, *nested], record)[0] == "match"


@pytest.mark.parametrize("first", [True, False])
def test_a_harness_within_another_is_found_where_the_logs_have_no_ids(first: bool) -> None:
    fourth = new_id()
    record = [
        RecordedReply(FIRST, 12, ("a",), None, required=True),
        RecordedReply(SECOND, 7, ("b",), None, required=False),
        RecordedReply(THIRD, 9, (), frozenset({"tool"}), required=False, parent=SECOND),
        RecordedReply(fourth, 5, (), frozenset({"tool"}), required=True, parent=FIRST),
    ]
    outer = [LogEntry("assistant", "", 12, ("x",)), LogEntry("tool", "x"), LogEntry("assistant", "", 5)]
    inner = [LogEntry("assistant", "", 7, ("y",)), LogEntry("tool", "y"), LogEntry("assistant", "", 9)]
    assert verdict([*inner, *outer] if first else [*outer, *inner], record)[0] == "match"
    made_up = [LogEntry("assistant", "", 8, ("y",))]
    assert verdict([*made_up, *outer] if first else [*outer, *made_up], record)[0] == "mismatch"


def test_a_side_calls_reply_of_the_same_length_is_not_taken_for_the_agents() -> None:
    title = RecordedReply(SIDE, 5, (), None, required=False)
    record = [title, RecordedReply(FIRST, 5, (), None, required=True)]
    assert verdict([LogEntry("assistant", "", 5)], record)[0] == "match"
    resumed = RecordedReply(THIRD, 5, (), None, required=True)
    router = RecordedReply(SECOND, 5, (), None, required=False)
    assert verdict([LogEntry("assistant", "", 5)] * 2, [*record, router, resumed])[0] == "match"
    assert verdict([LogEntry("assistant", "", 5)], [*record, router, resumed])[0] == "mismatch"


def test_replies_without_ids_in_another_order() -> None:
    record = [
        RecordedReply(FIRST, 12, ("a",), None, required=True),
        RecordedReply(SECOND, 7, (), frozenset({"tool"}), required=True, parent=FIRST),
    ]
    swapped = [LogEntry("assistant", "", 7), LogEntry("assistant", "", 12, ("x",))]
    assert "was made before" in verdict(swapped, record)[1]


def test_the_last_reply_may_be_missing_where_the_harness_was_ended() -> None:
    assert verdict(log(third=None), complete=False)[0] == "match"
    assert verdict(log(third=None))[0] == "mismatch"
    assert verdict(log(second=None, third=None, second_result=None), complete=False)[0] == "mismatch"


def test_a_call_that_broke_off_may_be_in_the_log_in_part() -> None:
    cut = RecordedReply(SECOND, None, (), frozenset(), required=False, completed=False)
    record = [RECORD[1], cut, RECORD[3]]
    assert verdict(log(), record)[0] == "match"
    assert verdict(log(second=LogEntry("assistant", f"msg_{handle(SECOND)}", 2), second_result=None), record) == (
        "match",
        "3 replies (3 with token counts) and 1 tool calls are as recorded",
    )


@pytest.mark.parametrize("digits", [24, 32])
def test_a_vendors_own_ids_are_not_taken_for_ours(digits: int) -> None:
    number = "0123456789abcdef" * 2
    relayed = [RecordedReply(FIRST, 12, (f"call_{number[:digits]}",), None, required=True)]
    reply = LogEntry("assistant", f"chatcmpl-{number}", 12, (f"call_{number[:digits]}",))
    assert verdict([reply, LogEntry("tool", f"call_{number[:digits]}")], relayed)[0] == "match"


@pytest.mark.parametrize("entries", [[], [LogEntry("user"), LogEntry("tool", "x")]])
def test_nothing_to_compare_is_none(entries: list[LogEntry]) -> None:
    assert compare(HarnessLog(entries), RECORD).verdict is LogVerdict.NONE
    assert compare(HarnessLog(problem="torn"), RECORD).text == "torn"


def test_a_forged_log_of_any_size_costs_little() -> None:
    record = [RecordedReply(new_id(), 1, (), frozenset(), required=True) for _ in range(2000)]
    started = time.perf_counter()
    assert compare(HarnessLog([LogEntry("assistant", "", 1)] * 100_000), record).verdict is LogVerdict.MISMATCH
    assert time.perf_counter() - started < 5


def test_results_of_replies_that_broke_off_take_time_that_grows_with_their_number() -> None:
    """A log may hold very many results, and the record very many replies: no result is looked for among all of them."""

    def seconds(size: int) -> float:
        cut = [
            RecordedReply(new_id(), 1, (), frozenset({"tool"}), required=False, completed=False) for _ in range(size)
        ]
        entries = [LogEntry("tool", handle(each.call_id)) for each in cut]
        began = time.thread_time()
        assert "which no recorded reply made" not in verdict(entries, cut)[1]
        return time.thread_time() - began

    assert min(seconds(12_000) for _ in range(2)) < 40 * max(min(seconds(1_000) for _ in range(2)), 0.01)
