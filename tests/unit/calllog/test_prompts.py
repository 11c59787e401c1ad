"""Prompts rebuilt from deltas equal those that the deltas were made from, for any forest."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rolltap.calllog import sessions
from rolltap.calllog.sessions import Delta, ancestry, in_order, rebuild_prompts
from rolltap.errors import RecordCorrupt, RecordTooLarge

tokens = st.lists(st.integers(0, 9), max_size=4)


@st.composite
def forests(draw: st.DrawFn) -> tuple[list[Delta], dict[str, list[int]]]:
    deltas: list[Delta] = []
    prompts: dict[str, list[int]] = {}
    contexts: dict[str, list[int]] = {}
    for index in range(draw(st.integers(1, 12))):
        call_id = f"{index:02}"
        parent = draw(st.none() | st.sampled_from(sorted(contexts))) if contexts else None
        context = contexts[parent] if parent is not None else []
        shared = draw(st.just(len(context)) | st.integers(0, len(context)))
        new, out = draw(tokens), draw(tokens)
        prompts[call_id] = context[:shared] + new
        contexts[call_id] = prompts[call_id] + out
        deltas.append(Delta(call_id, parent, shared, np.array(new, np.int32), np.array(out, np.int32)))
    return draw(st.permutations(deltas)), prompts


@given(forests())
def test_every_prompt_is_rebuilt(forest: tuple[list[Delta], dict[str, list[int]]]):
    deltas, prompts = forest
    rebuilt = rebuild_prompts(deltas)
    assert {call_id: prompt.tolist() for call_id, prompt in rebuilt.items()} == prompts


@given(forests())
def test_a_call_and_its_ancestors_are_enough(forest: tuple[list[Delta], dict[str, list[int]]]):
    deltas, prompts = forest
    parents = {delta.id: delta.parent_id for delta in deltas}
    for call_id, prompt in prompts.items():
        line = ancestry([call_id], parents)
        assert rebuild_prompts(delta for delta in deltas if delta.id in line)[call_id].tolist() == prompt


def delta(call_id: str, parent: str | None, shared: int = 0) -> Delta:
    return Delta(call_id, parent, shared, np.ones(1, np.int32), np.ones(1, np.int32))


def test_a_conversation_costs_the_tokens_of_its_last_context():
    deltas = [delta(f"{turn:05}", f"{turn - 1:05}" if turn else None, 2 * turn) for turn in range(20_000)]
    rebuilt = rebuild_prompts(deltas)
    whole = rebuilt["19999"]
    assert len(whole) == 2 * 20_000 - 1
    assert all(np.shares_memory(prompt, whole) for prompt in rebuilt.values())
    with pytest.raises(ValueError, match="read-only"):
        whole[0] = 5


def test_prompts_that_branch_have_a_largest_size(monkeypatch: pytest.MonkeyPatch):
    """Few bytes of the record: calls that all continue one long prompt. Of one conversation nothing is copied."""
    monkeypatch.setattr(sessions, "MOST_PROMPT_TOKENS", 100_000)
    first = Delta("first", None, 0, np.ones(9_999, np.int32), np.ones(1, np.int32))
    branches = [delta(f"{number:02}", "first", 9_999) for number in range(9)]
    with pytest.raises(RecordTooLarge, match=r"over 100,000 tokens"):
        rebuild_prompts([first, *branches])
    assert len(rebuild_prompts([first, *branches[:-1]])) == 9
    line = [delta(f"{turn:05}", f"{turn - 1:05}" if turn else None, 2 * turn) for turn in range(50_000)]
    assert len(rebuild_prompts(line)) == 50_000


def test_a_cycle_is_reported():
    with pytest.raises(RecordCorrupt, match="cycle"):
        rebuild_prompts([delta("root", None), delta("a", "b"), delta("b", "a")])


@given(st.permutations([f"{number:02}" for number in range(9)]))
def test_the_order_is_that_of_the_ids_except_that_parents_come_first(line: list[str]):
    parents = {call_id: line[place - 1] if place else None for place, call_id in enumerate(line)}
    assert in_order(parents) == line
    assert in_order(dict.fromkeys(line)) == sorted(line)
