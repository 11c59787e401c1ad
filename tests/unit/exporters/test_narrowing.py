"""`--best`, `--balance` and `--limit`, as choices among sessions and as a dataset."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rolltap.errors import DatasetError
from rolltap.reconstructor.exporters import exporter_named
from rolltap.reconstructor.exporters.base import ExportItem
from rolltap.reconstructor.exporters.dataset import DatasetWriter, FirstPass, Query
from rolltap.reconstructor.exporters.narrowing import Eligible, Narrowing
from rolltap.reconstructor.exporters.select import parse_where

from .world import World, lines


def sessions(count: int) -> list[Eligible]:
    """Of five tasks; three of four by codex, the others by pi; every seventh without a reward."""
    return [
        Eligible(f"s{i:03d}", f"t{i % 5}", "pi" if i % 4 == 3 else "codex", None if i % 7 == 6 else float(i % 10))
        for i in range(count)
    ]


def test_the_best_of_each_task_and_the_older_of_equals():
    rewards = {"a": 1.0, "b": 2.0, "c": 2.0, "d": None, "e": 0.0}
    found = [Eligible(name, "t", "pi", reward) for name, reward in rewards.items()]
    assert Narrowing(best=1).choose(found) == {"b"}
    assert Narrowing(best=2).choose(found) == {"b", "c"}
    assert Narrowing(best=9).choose(found) == {"a", "b", "c", "e"}


def test_balance_takes_as_many_of_each():
    chosen = Narrowing(balance="harness").choose(sessions(40))
    kept = [session for session in sessions(40) if session.session_id in chosen]
    assert [sum(s.harness == name for s in kept) for name in ("codex", "pi")] == [10, 10]


def test_a_limit_within_a_balance_is_balanced():
    chosen = Narrowing(balance="task", limit=10).choose(sessions(43))
    kept = [session for session in sessions(43) if session.session_id in chosen]
    assert [sum(s.task_id == f"t{i}" for s in kept) for i in range(5)] == [2] * 5


@given(st.integers(1, 30), st.integers(0, 5), st.sampled_from(["", "harness", "task"]))
def test_a_higher_limit_keeps_what_a_lower_one_had(limit: int, seed: int, balance: str):
    lower, higher = (
        Narrowing(limit=bound, seed=seed, balance=balance).choose(sessions(40))  # type: ignore[arg-type]
        for bound in (limit, limit + 3)
    )
    assert lower <= higher
    assert len(lower) <= limit


def test_another_seed_draws_others():
    assert Narrowing(limit=10).choose(sessions(40)) != Narrowing(limit=10, seed=1).choose(sessions(40))


@pytest.mark.parametrize(("values", "message"), [({"balance": "colour"}, "--balance"), ({"limit": -1}, "--limit")])
def test_what_cannot_be_chosen_by_is_named(values: dict, message: str):
    with pytest.raises(DatasetError, match=message):
        Narrowing(**values)


def test_a_dataset_holds_what_was_chosen_of_what_where_keeps(world: World, tmp_path: Path):
    items = [
        world.solved(f"s{i}", f"answer {i}").item(reward=float(i), task=f"t{i // 4}", group=f"g{i // 4}")
        for i in range(8)
    ]
    query = Query(where=parse_where(["reward<7"]), narrowing=Narrowing(best=1))
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
