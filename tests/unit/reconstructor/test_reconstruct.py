"""The reconstructor on sessions that a reader can follow."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import pytest

from rolltap.errors import AlignmentError, ConfigError, RecordCorrupt
from rolltap.reconstructor.reconstruct import reconstruct
from rolltap.reconstructor.report import report_of, total
from rolltap.reconstructor.rules import MaskReason, Rules
from rolltap.reconstructor.segments import KeptCalls, SegmentPlan, Strategy
from rolltap.types import (
    Break,
    BreakReason,
    Call,
    CallKind,
    Finish,
    Flaw,
    Outcome,
    PromptImage,
    Segment,
    Trajectory,
    VersionSpan,
)

from .forests import make_call


def after(call: Call, *new: int) -> list[int]:
    """The prompt that continues `call` with new tokens."""
    return [*call.prompt_ids.tolist(), *call.output_ids.tolist(), *new]


def trained(trajectory: Trajectory) -> list[list[str]]:
    """By segment, the calls that carry loss."""
    return [[turn.call_id for turn in segment.turns if turn.trained] for segment in trajectory.segments]


def masked(segment: Segment) -> str:
    """The tokens as text, those with loss in brackets."""
    return " ".join(f"[{t}]" if on else f"{t}" for t, on in zip(segment.token_ids, segment.loss_mask, strict=True))


def test_a_conversation_is_one_segment_with_loss_on_what_was_sampled():
    first = make_call(0, [1, 2], [3, 4])
    second = make_call(1, after(first, 5), [6])
    (segment,) = reconstruct([first, second]).segments
    assert masked(segment) == "1 2 [3] [4] 5 [6]"
    assert segment.logprobs[[2, 3, 5]].tolist() == [*first.logprobs, *second.logprobs]
    assert segment.versions.tolist() == [-1, -1, 0, 0, -1, 1]
    assert segment.prompt_length == 2
    assert [(turn.start, turn.end, turn.index) for turn in segment.turns] == [(2, 4, 0), (5, 6, 1)]


def test_branches_train_their_trunk_once():
    trunk = make_call(0, [1], [2])
    left = make_call(1, after(trunk, 3), [4])
    right = make_call(2, after(trunk, 5), [6, 6])
    tree = reconstruct([trunk, left, right])
    assert [masked(segment) for segment in tree.segments] == ["1 [2] 5 [6] [6]", "1 2 3 [4]"]
    assert [turn.trained for turn in tree.segments[1].turns] == [False, True]
    assert trained(reconstruct([trunk, left, right], strategy="prefix")) == [[trunk.id, left.id], [right.id]]
    assert trained(reconstruct([trunk, left, right], strategy="per_call")) == [[trunk.id], [left.id], [right.id]]


def test_sampled_tokens_must_match_not_only_the_prompts():
    first = make_call(0, [1], [2, 3])
    again = make_call(1, [1, 2, 4, 5], [6], parent_id="000000")
    trajectory = reconstruct([first, again])
    assert trained(trajectory) == [["000000"], ["000001"]]
    assert trajectory.breaks == (Break(BreakReason.TOKENS_DIFFER, "000001", "000000", token_index=2),)


def test_a_wrong_hint_is_found_out_and_a_missing_one_made_up_for():
    a, b = make_call(0, [1], [2]), make_call(1, [1], [3])
    follows_b = make_call(2, [1, 3, 9], [4], parent_id=a.id)
    trajectory = reconstruct([a, b, follows_b])
    assert trained(trajectory) == [[b.id, follows_b.id]]
    assert trajectory.counts["masked_calls.abandoned"] == 1


@pytest.mark.parametrize("later", ["first", "second"])
def test_of_retries_the_one_that_was_continued_is_trained(later: str):
    first, second = make_call(0, [1], [2]), make_call(1, [1], [3])
    taken = first if later == "first" else second
    last = make_call(2, after(taken, 4), [5])
    assert trained(reconstruct([first, second, last])) == [[taken.id, last.id]]


def test_the_last_of_retries_is_trained_where_none_was_continued():
    assert trained(reconstruct([make_call(i, [1], [i + 2]) for i in range(3)])) == [["000002"]]


def test_two_samples_that_were_both_continued_are_both_trained():
    a, b = make_call(0, [1], [2]), make_call(1, [1], [3])
    follow = [make_call(2, after(a, 7), [8]), make_call(3, after(b, 7), [8])]
    assert trained(reconstruct([a, b, *follow])) == [["000000", "000002"], ["000001", "000003"]]


def test_a_retry_continued_in_other_tokens_counts_as_continued():
    """The template dropped the thinking, so the next prompt is rendered anew; it still goes on from the first reply."""
    first, second = make_call(0, [1], [2]), make_call(1, [1], [3])
    dropped = Break(BreakReason.THINKING_DROPPED, "000002", "000000", 1)
    anew = make_call(2, [1, 9, 9], [4], parent_id="000000", break_=dropped)
    assert trained(reconstruct([first, second, anew])) == [["000000"], ["000002"]]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"outcome": Outcome.ABORTED}, "aborted"),
        ({"outcome": Outcome.ENGINE_ERROR}, "engine_error"),
        ({"delivered": False}, "undelivered"),
    ],
)
def test_a_call_that_came_to_nothing_is_context_at_most(changes: dict, reason: str):
    spoiled = replace(make_call(0, [1], [2]), **changes)
    continued = make_call(1, after(spoiled, 3), [4])
    trajectory = reconstruct([spoiled, continued])
    assert [masked(segment) for segment in trajectory.segments] == ["1 2 3 [4]"]
    assert trajectory.counts[f"masked_calls.{reason}"] == 1
    assert reconstruct([spoiled]).segments == ()


@pytest.mark.parametrize(
    ("rule", "changes"),
    [
        ("length_truncated", {"finish": Finish.LENGTH}),
        ("tool_call_unparsable", {"flaw": Flaw.TOOL_CALL_UNPARSABLE}),
        ("version_unknown", {"versions": (), "flaw": Flaw.VERSION_UNKNOWN}),
        ("summary", {"kind": CallKind.SUMMARY}),
    ],
)
def test_each_rule_masks_counts_and_can_be_switched(rule: str, changes: dict):
    calls = [make_call(0, [1], [2, 2], **changes), make_call(1, [5], [6])]
    strict = reconstruct(calls)
    assert trained(strict) == [[], ["000001"]]
    assert (strict.counts[f"masked_calls.{rule}"], strict.counts[f"masked_tokens.{rule}"]) == (1, 2)
    lenient = reconstruct(calls, rules=Rules().train(rule))
    assert trained(lenient) == [["000000"], ["000001"]]
    assert f"masked_calls.{rule}" not in lenient.counts


def test_abandoned_samples_are_trained_on_request():
    both = [make_call(0, [1], [2]), make_call(1, [1], [3])]
    assert trained(reconstruct(both, rules=Rules().train(MaskReason.ABANDONED))) == [["000000"], ["000001"]]


@pytest.mark.parametrize("kind", [CallKind.AUXILIARY, CallKind.JUDGE, CallKind.SIMULATOR])
def test_side_calls_are_kept_for_reading_and_not_trained(kind: CallKind):
    main, side = make_call(0, [1], [2]), make_call(1, [9], [9, 9], kind=kind)
    follow = make_call(2, after(main, 3), [4])
    trajectory = reconstruct([main, side, follow])
    assert [(segment.kind, masked(segment)) for segment in trajectory.segments] == [
        (CallKind.MAIN, "1 [2] 3 [4]"),
        (kind, "9 9 9"),
    ]


def test_a_side_call_that_hangs_on_the_conversation_does_not_lengthen_its_row():
    main = make_call(0, [1], [2])
    probe = make_call(1, after(main, 8), [8], kind=CallKind.AUXILIARY)
    assert [masked(segment) for segment in reconstruct([main, probe]).segments] == ["1 [2]", "1 2 8 8"]


def test_not_a_number_is_never_trained():
    call = replace(make_call(0, [1], [2, 3]), logprobs=np.asarray([-1, np.nan], np.float32))
    trajectory = reconstruct([call], rules=Rules(mask=frozenset()))
    assert trained(trajectory) == [[]]
    assert trajectory.counts["masked_calls.logprobs_not_finite"] == 1


def test_compaction_begins_a_segment_and_the_turns_count_on():
    first = make_call(0, [1], [2])
    summary = make_call(1, after(first, 7), [8], kind=CallKind.SUMMARY)
    compact = Break(BreakReason.COMPACTION, "000002", "000001", 0)
    resumed = make_call(2, [5, 8], [3], parent_id="000001", break_=compact)
    trajectory = reconstruct([first, summary, resumed])
    assert trained(trajectory) == [["000000"], [], ["000002"]]
    assert [found.reason for found in trajectory.breaks] == [BreakReason.COMPACTION]
    assert trajectory.segments[2].turns[0].index == 2


def test_subagents_are_lineages_of_their_own():
    main = make_call(0, [1], [2])
    sub = make_call(1, [9], [8], agent="explorer")
    sub_again = make_call(2, after(sub, 7), [6], agent="explorer")
    follow = make_call(3, after(main, 3), [4])
    trajectory = reconstruct([main, sub, sub_again, follow])
    assert [(segment.agent, masked(segment)) for segment in trajectory.segments] == [
        ("", "1 [2] 3 [4]"),
        ("explorer", "9 [8] 7 [6]"),
    ]
    assert [turn.index for turn in trajectory.segments[1].turns] == [0, 1]
    assert [found.reason for found in trajectory.breaks] == [BreakReason.NEW_CONVERSATION]


def test_another_policys_calls_are_not_merged_and_can_be_left_out():
    ours, theirs = make_call(0, [1], [2]), make_call(1, [1, 2, 3], [4], policy="other", parent_id="000000")
    trajectory = reconstruct([ours, theirs], rules=Rules(policy="p"))
    assert trained(trajectory) == [["000000"], []]
    assert [found.reason for found in trajectory.breaks] == [BreakReason.POLICY_CHANGED]
    assert trajectory.counts["masked_calls.other_policy"] == 1


def test_versions_that_change_within_a_call_stay_on_their_tokens():
    call = make_call(0, [1], [2, 3, 4], versions=(VersionSpan(4, 0, 1), VersionSpan(5, 1, 3)))
    assert reconstruct([call]).segments[0].versions.tolist() == [-1, 4, 5, 5]


def test_extras_are_full_width_and_say_where_the_engine_gave_none():
    entropy = {"entropy": np.asarray([0.5], np.float32), "experts": np.asarray([[1, 2]], np.int16)}
    first = make_call(0, [1], [2], extras=entropy)
    second = make_call(1, after(first, 3), [4])
    extras = reconstruct([first, second]).segments[0].extras
    assert np.array_equal(extras["entropy"], np.asarray([0, 0.5, 0, np.nan], np.float32), equal_nan=True)
    assert extras["experts"].tolist() == [[0, 0], [1, 2], [0, 0], [-1, -1]]


def test_a_session_outlasts_another_number_of_candidates():
    """`top_logprobs` and `sampling_mask` are the server's settings: it may start again with others in mid-session."""
    first = make_call(0, [1], [2], extras={"top_ids": np.asarray([[2, 7, 8]], np.int32), "top": np.zeros((1, 3), "f4")})
    more = {"top_ids": np.asarray([[4, 7, 8, 9]], np.int32), "top": np.zeros((1, 4), np.float32)}
    second = make_call(1, after(first, 3), [4], extras=more)
    extras = reconstruct([first, second]).segments[0].extras
    assert extras["top_ids"].tolist() == [[0, 0, 0, 0], [2, 7, 8, -1], [0, 0, 0, 0], [4, 7, 8, 9]]
    assert np.isnan(extras["top"]).tolist() == [[False] * 4, [False, False, False, True], [False] * 4, [False] * 4]


@pytest.mark.parametrize("other", [np.zeros((1, 3), np.float64), np.zeros((1, 3, 1), np.float32)])
def test_extras_of_two_forms_are_refused(other: np.ndarray):
    first = make_call(0, [1], [2], extras={"top": np.zeros((1, 3), np.float32)})
    second = make_call(1, after(first, 3), [4], extras={"top": other})
    with pytest.raises(AlignmentError, match="'top' has several dtypes or shapes in one segment: calls 000000, 000001"):
        reconstruct([first, second])


def test_a_duplicate_that_differs_is_corrupt_but_a_later_delivery_is_news():
    call = make_call(0, [1], [2], delivered=None)
    with pytest.raises(RecordCorrupt, match="call 000000 is recorded twice with different output_ids"):
        reconstruct([call, make_call(0, [1], [3])])
    assert trained(reconstruct([call, replace(call, delivered=True)])) == [["000000"]]
    missed = replace(call, delivered=False)
    assert reconstruct([call, missed]).segments == ()
    assert trained(reconstruct([missed, replace(call, delivered=True), missed])) == [["000000"]]


def test_sessions_are_not_mixed():
    with pytest.raises(RecordCorrupt, match="call 000001: session other, not s"):
        reconstruct([make_call(0, [1], [2]), make_call(1, [1], [2], session_id="other")])


def test_a_strategy_is_held_to_its_contract():
    class Forgetful:
        def plans(self, kept: KeptCalls) -> Iterable[SegmentPlan]:
            return [SegmentPlan((node,), 0) for node in kept.nodes[1:]]

    class Confused:
        def plans(self, kept: KeptCalls) -> Iterable[SegmentPlan]:
            return [SegmentPlan(kept.nodes, 0)]

    def cut(strategy: Strategy) -> Trajectory:
        return reconstruct([make_call(0, [1], [2]), make_call(1, [5], [6])], strategy=strategy)

    with pytest.raises(ConfigError, match="own every kept call once; wrong for 000000"):
        cut(Forgetful())
    with pytest.raises(ConfigError, match="put call 000001 after 000000, which it does not extend"):
        cut(Confused())


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: reconstruct([], strategy="linear"), "no strategy 'linear'; known: per_call, prefix, tree"),
        (lambda: Rules().train("aborted"), "no rule 'aborted'; switchable: abandoned"),
        (lambda: Rules(mask=frozenset({MaskReason.ABORTED})), "cannot be switched"),
    ],
)
def test_unknown_names_list_the_known_ones(wrong, message: str):
    with pytest.raises(ConfigError, match=message):
        wrong()


def test_reports_add_up():
    first = make_call(0, [1, 1], [2])
    calls = [first, make_call(1, after(first, 3), [4]), make_call(2, [9], [9], kind=CallKind.AUXILIARY)]
    report = total([report_of(reconstruct(calls)), report_of(reconstruct(calls[:1]))])
    told = report.to_dict()
    assert (told["trajectories"], told["calls"], told["rows"], told["trained_calls"]) == (2, 4, 2, 3)
    assert (told["kept"], told["merge_ratio"], told["trained"]) == (0.75, 1.5, 0.75)
    assert told["saved"] == pytest.approx(3 / 11)
    assert told["breaks_by_reason"] == {"new_conversation": 1}
    assert told["masked_calls"] == {"auxiliary": 1}


def test_a_session_of_2000_calls_and_500_branches_takes_less_than_a_second():
    rng = np.random.default_rng(0)
    tips = [make_call(0, rng.integers(0, 9000, 4000).tolist(), [1])] * 500
    calls = tips[:1]
    for number in range(1, 2000):
        tip = tips[number % 500]
        tips[number % 500] = make_call(number, after(tip, *rng.integers(0, 9000, 50)), [2], parent_id=tip.id)
        calls.append(tips[number % 500])
    start = time.process_time()
    trajectory = reconstruct(calls)
    assert time.process_time() - start < 1.0
    assert trajectory.counts["rows"] == 500
    assert trajectory.counts["trained_tokens"] == 2000


def test_a_conversation_of_thousands_of_calls_is_no_recursion():
    calls = [make_call(0, [1], [2])]
    for number in range(1, 3000):
        calls.append(make_call(number, after(calls[-1]), [2], parent_id=calls[-1].id))
    (segment,) = reconstruct(calls).segments
    assert len(segment.turns) == 3000


def shown(call: Call, *digests: str) -> Call:
    """The call with an image of two tokens at 1, 4, 7..."""
    places = range(1, 1 + 3 * len(digests), 3)
    images = [PromptImage(at, at + 2, (1, 2, 4), digest) for at, digest in zip(places, digests, strict=True)]
    return replace(call, images=tuple(images))


def test_a_call_continues_another_only_with_its_images():
    first = shown(make_call(0, [1, 9, 9], [3]), "a")
    same = shown(make_call(1, after(first, 9, 9, 5), [6]), "a", "b")
    other = shown(make_call(2, after(first, 9, 9, 5), [6], parent_id=first.id), "c", "b")
    trajectory = reconstruct([first, same, other])
    assert trained(trajectory) == [[first.id, same.id], [other.id]]
    assert [segment.images for segment in trajectory.segments] == [same.images, other.images]
    (found,) = trajectory.breaks
    assert (found.call_id, found.token_index) == (other.id, 1)


def test_calls_with_other_images_are_no_retries():
    """Neither reply is taken for an abandoned sample of the other's prompt."""
    calls = [shown(make_call(at, [1, 9, 9], [3 + at]), digest) for at, digest in enumerate("ab")]
    assert trained(reconstruct(calls)) == [[call.id] for call in calls]
    same = [replace(call, images=calls[0].images) for call in calls]
    assert trained(reconstruct(same)) == [[calls[1].id]]
