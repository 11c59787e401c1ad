"""Calls of a session's origin are context: in the tokens of each segment that continues them, and nowhere else."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rolltap.reconstructor.reconstruct import reconstruct
from rolltap.types import Call, Trajectory, VersionSpan

ONE = {"calls": 1, "sampled_tokens": 2, "delivered_tokens": 2, "trained_tokens": 2}


def a_call(call_id: str, prompt: list[int], output: list[int], *, session: str = "own", by: str = "") -> Call:
    ids, logprobs = np.array(output, np.int32), np.full(len(output), -0.5, np.float32)
    spans = (VersionSpan(0, 0, len(output)),) if output else ()
    return Call(
        call_id, session, np.array(prompt, np.int32), ids, logprobs, versions=spans, delivered=True, sampled_by=by
    )


ORIGIN = [
    a_call("1", [1, 2], [3], session="first", by="r1"),
    a_call("2", [1, 2, 3, 4], [5, 6], session="first", by="r1"),
]


def trained(trajectory: Trajectory) -> list[list[int]]:
    return [segment.token_ids[segment.loss_mask].tolist() for segment in trajectory.segments]


@pytest.mark.parametrize("strategy", ["tree", "prefix", "per_call"])
def test_origin_calls_are_context_with_the_rollout_that_sampled_them(strategy: str):
    own = a_call("3", [1, 2, 3, 4, 5, 6, 7], [8, 9])
    trajectory = reconstruct([*ORIGIN, own], strategy=strategy)
    assert (trajectory.session_id, trajectory.breaks, [one.call_id for one in trajectory.classifications]) == (
        "own", (), ["3"],
    )  # fmt: skip
    assert [ids for ids in trained(trajectory) if ids] == [[8, 9]]
    assert {name: trajectory.counts[name] for name in ONE} == ONE
    assert (trajectory.counts["masked_calls.origin"], trajectory.counts["masked_tokens.origin"]) == (2, 3)
    if strategy != "per_call":
        (segment,) = trajectory.segments
        assert segment.token_ids.tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9]
        assert [(turn.call_id, turn.sampled_by, turn.trained) for turn in segment.turns] == [
            ("1", "r1", False), ("2", "r1", False), ("3", "", True)
        ]  # fmt: skip
        assert segment.versions.tolist() == [-1] * 7 + [0, 0]


def test_an_origin_that_no_call_continues_makes_no_segment():
    other = a_call("3", [9, 9], [8, 9])
    trajectory = reconstruct([*ORIGIN, other])
    (segment,) = trajectory.segments
    assert [turn.call_id for turn in segment.turns] == ["3"]
    assert [one.call_id for one in trajectory.breaks] == ["3"]
    assert reconstruct(ORIGIN).segments == ()
    assert reconstruct(ORIGIN).session_id == ""


def test_a_fork_before_a_reply_s_first_token_is_a_sample_of_its_own():
    cut = replace(ORIGIN[1], output_ids=np.empty(0, np.int32), logprobs=np.empty(0, np.float32), versions=())
    own = [a_call("3", [1, 2, 3, 4], [5, 7])]
    trajectory = reconstruct([ORIGIN[0], cut, *own])
    assert trained(trajectory) == [[5, 7]]
    assert trajectory.breaks == ()


@given(st.integers(1, 4), st.integers(1, 5), st.data())
def test_every_token_of_forks_is_trained_once_in_its_own_session(turns: int, forks: int, data: st.DataObject):
    """Each session is a chain of turns; forks begin after or inside any reply of any earlier session."""
    sessions: dict[str, list[Call]] = {}
    number = 0
    for index in range(forks):
        name, before = f"s{index}", []
        if sessions and data.draw(st.booleans()):
            chain = sessions[data.draw(st.sampled_from(sorted(sessions)))]
            end = data.draw(st.integers(1, len(chain)))
            at = data.draw(st.integers(0, len(chain[end - 1].output_ids)))
            last = chain[end - 1]
            cut = replace(last, output_ids=last.output_ids[:at], logprobs=last.logprobs[:at],
                          versions=(VersionSpan(0, 0, at),) if at else ())  # fmt: skip
            before = [replace(call, sampled_by=call.sampled_by or call.session_id) for call in [*chain[: end - 1], cut]]
        context = [*before[-1].prompt_ids.tolist(), *before[-1].output_ids.tolist()] if before else []
        calls = [call for call in before if len(call.output_ids)]
        for turn in range(turns):
            prompt = context + ([1000 + number] if turn or not before else [])
            number += 1
            output = [2000 + 10 * number + k for k in range(data.draw(st.integers(1, 3)))]
            calls.append(a_call(f"{number:06}", prompt, output, session=name))
            context = prompt + output
        sessions[name] = calls
    for name, calls in sessions.items():
        trajectory = reconstruct(calls)
        own = [id for call in calls if call.session_id == name for id in call.output_ids.tolist()]
        assert sorted(id for ids in trained(trajectory) for id in ids) == sorted(own)
        assert trajectory.breaks == ()
        (segment,) = trajectory.segments
        assert segment.token_ids.tolist() == [*calls[-1].prompt_ids.tolist(), *calls[-1].output_ids.tolist()]
