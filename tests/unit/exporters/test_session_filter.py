"""`--best`, `--balance` and `--limit`, as choices among sessions and as a dataset."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rolltap.errors import DatasetError
from rolltap.reconstructor.exporters import exporter_named
from rolltap.reconstructor.exporters.base import ExportItem
from rolltap.reconstructor.exporters.cleaning import Eligible, NgramIndex, SessionFilter
from rolltap.reconstructor.exporters.dataset import DatasetWriter, FirstPass, Query
from rolltap.reconstructor.exporters.where import parse_where

from .world import World, lines, says, user


def sessions(count: int) -> list[Eligible]:
    """Of five tasks; three of four by codex, the others by pi; every seventh without a reward."""
    return [
        Eligible(f"s{i:03d}", f"t{i % 5}", "pi" if i % 4 == 3 else "codex", None if i % 7 == 6 else float(i % 10))
        for i in range(count)
    ]


def test_the_best_of_each_task_and_the_older_of_equals():
    rewards = {"a": 1.0, "b": 2.0, "c": 2.0, "d": None, "e": 0.0}
    found = [Eligible(name, "t", "pi", reward) for name, reward in rewards.items()]
    assert SessionFilter(best=1).choose(found) == {"b"}
    assert SessionFilter(best=2).choose(found) == {"b", "c"}
    assert SessionFilter(best=9).choose(found) == {"a", "b", "c", "e"}


def test_balance_takes_as_many_of_each():
    chosen = SessionFilter(balance="harness").choose(sessions(40))
    kept = [session for session in sessions(40) if session.session_id in chosen]
    assert [sum(s.harness == name for s in kept) for name in ("codex", "pi")] == [10, 10]


def test_a_limit_within_a_balance_is_balanced():
    chosen = SessionFilter(balance="task", limit=10).choose(sessions(43))
    kept = [session for session in sessions(43) if session.session_id in chosen]
    assert [sum(s.task_id == f"t{i}" for s in kept) for i in range(5)] == [2] * 5


@given(st.integers(1, 30), st.integers(0, 5), st.sampled_from(["", "harness", "task"]))
def test_a_higher_limit_keeps_what_a_lower_one_had(limit: int, seed: int, balance: str):
    lower, higher = (
        SessionFilter(limit=bound, seed=seed, balance=balance).choose(sessions(40))  # type: ignore[arg-type]
        for bound in (limit, limit + 3)
    )
    assert lower <= higher
    assert len(lower) <= limit


def test_another_seed_draws_others():
    assert SessionFilter(limit=10).choose(sessions(40)) != SessionFilter(limit=10, seed=1).choose(sessions(40))


@pytest.mark.parametrize(("values", "message"), [({"balance": "colour"}, "--balance"), ({"limit": -1}, "--limit")])
def test_what_cannot_be_chosen_by_is_named(values: dict, message: str):
    with pytest.raises(DatasetError, match=message):
        SessionFilter(**values)


def test_a_dataset_holds_what_was_chosen_of_what_where_keeps(world: World, tmp_path: Path):
    items = [
        world.solved(f"s{i}", f"answer {i}").item(reward=float(i), task=f"t{i // 4}", group=f"g{i // 4}")
        for i in range(8)
    ]
    query = Query(where=parse_where(["reward<7"]), session_filter=SessionFilter(best=1))
    assert chosen_rows(items, query, tmp_path / "out") == ["s3", "s6"]


def chosen_rows(items: list[ExportItem], query: Query, out: Path) -> list[str]:
    exporter = exporter_named("sft")
    first = FirstPass(exporter, query)
    first.take(items)
    with DatasetWriter(out, exporter, replace(query, chosen=first.chosen())) as writer:
        for item in items:
            writer.add([item])
        manifest = writer.finish()
    assert manifest["sessions_left_out"] == {"not selected": manifest["sessions"] - 1 - manifest["rows"]}
    return [row["session_id"] for row in lines(out / "train-00000-of-00001.jsonl")]


QUESTION = "A train leaves the old station at noon and meets another train after three hours of travel; where?"


def asked(world: World, session_id: str, text: str) -> ExportItem:
    script = world.script(session_id)
    script.ask([user(text)], says("Nowhere."))
    return script.item(reward=1.0, task=session_id)


@pytest.mark.parametrize("suffix", ["txt", "jsonl"])
def test_sessions_that_quote_a_held_out_file_stay_out_and_are_counted(suffix: str, world: World, tmp_path: Path):
    file = tmp_path / f"benchmark.{suffix}"
    file.write_text(QUESTION if suffix == "txt" else json.dumps({"id": 1, "turns": [{"question": QUESTION}]}) + "\n")
    quoted = "Solve this. a TRAIN leaves the old station at noon, and meets another train after three hours of sleep"
    items = [asked(world, "quoted", quoted), asked(world, "near", QUESTION.replace("noon", "dawn")),
             asked(world, "clean", "Make a file.")]  # fmt: skip
    with DatasetWriter(tmp_path / "out", exporter_named("sft"), Query(held_out=NgramIndex([file]))) as writer:
        for item in items:
            writer.add([item])
        manifest = writer.finish()
    assert manifest["sessions_left_out"] == {f"overlaps with benchmark.{suffix}": 1}
    assert manifest["query"]["held_out"] == [f"benchmark.{suffix}"]
    rows = lines(tmp_path / "out" / "train-00000-of-00001.jsonl")
    assert [row["session_id"] for row in rows] == ["near", "clean"]


def test_fewer_words_find_more_and_a_short_text_counts_whole(world: World, tmp_path: Path):
    (tmp_path / "a.txt").write_text(QUESTION)
    (tmp_path / "b.jsonl").write_text('"Make a file!"\n')
    near = asked(world, "near", QUESTION.replace("noon", "dawn"))
    assert NgramIndex([tmp_path / "a.txt"], 5).overlap(near) == "a.txt"
    held_out = NgramIndex([tmp_path / "a.txt", tmp_path / "b.jsonl"])
    assert held_out.overlap(asked(world, "same", "make a file")) == "b.jsonl"
    assert held_out.overlap(asked(world, "longer", "Make a file of words.")) is None


def test_a_held_out_conversation_shares_no_words_by_its_roles_and_names(world: World, tmp_path: Path):
    call = {"id": "c1", "type": "function", "function": {"name": "bash", "arguments": {"command": "ls"}}}
    messages = [user(QUESTION), {**says("Yaren."), "tool_calls": [call]}, {**user("ok"), "name": "bash"}]
    (tmp_path / "chat.jsonl").write_text(json.dumps({"messages": messages}) + "\n")
    held_out = NgramIndex([tmp_path / "chat.jsonl"])
    assert held_out.overlap(asked(world, "other", "Refactor my parser, please.")) is None
    assert held_out.overlap(world.solved("named").item()) == "chat.jsonl", "its arguments are those of the file"
    assert held_out.overlap(asked(world, "role", "user")) is None
    assert held_out.overlap(asked(world, "asked", QUESTION)) == "chat.jsonl"


def test_only_a_newline_ends_a_line_of_a_held_out_file(world: World, tmp_path: Path):
    (tmp_path / "b.jsonl").write_text('"Make\u2028a\x85file!"\n"ls"\n', encoding="utf-8")
    assert NgramIndex([tmp_path / "b.jsonl"]).overlap(asked(world, "same", "make a file")) == "b.jsonl"


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path):
    (tmp_path / "bad.jsonl").write_text("{")
    for name in ("bad.jsonl", "missing.txt"):
        with pytest.raises(DatasetError, match=name):
            NgramIndex([tmp_path / name])
