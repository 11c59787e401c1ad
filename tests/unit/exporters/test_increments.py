"""`--state`: a dataset grows run by run; killed at any moment, it has every row once in the end."""

from __future__ import annotations

import asyncio
import json
import signal
import sqlite3
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from datasets import load_dataset
from hypothesis import given, settings
from hypothesis import strategies as st

from rolltap.calllog.database import Database
from rolltap.calllog.sql import SqlCallLog
from rolltap.errors import DatasetError
from rolltap.reconstructor.exporters import exporter_named
from rolltap.reconstructor.exporters.base import ExportItem
from rolltap.reconstructor.exporters.dataset import DatasetWriter, Query
from rolltap.reconstructor.exporters.increments import ExportState, GrowingDataset
from rolltap.reconstructor.exporters.where import parse_where

from ...forked_commands import forked_rolltap
from .test_record import CHAT, Log, run
from .world import World, lines

QUERY = Query(splits={"train": 0.5, "test": 0.5}, shard_mb=0.002, container="jsonl")


@pytest.fixture(scope="module")
def items(world: World) -> list[ExportItem]:
    return [world.solved(f"s{i:02d}", f"answer {i % 9}").item(reward=i % 2, task=f"t{i}") for i in range(12)]


def growing(folder: Path, query: Query = QUERY, format: str = "sft") -> GrowingDataset:
    def part(out: Path, known: Mapping[bytes, bytes]) -> DatasetWriter:
        return DatasetWriter(out, exporter_named(format), query, known=known)

    return GrowingDataset(folder / "out", folder / "state", part, query.shard_mb * 1e6)


def grown(folder: Path, items: Sequence[ExportItem], **changes: Any) -> dict[str, Any]:
    with growing(folder, **changes) as dataset:
        add(dataset, items)
        return dataset.finish()


def add(dataset: GrowingDataset, items: Sequence[ExportItem]) -> None:
    for item in items:
        dataset.add([item])


def rows_in(out: Path) -> list[dict[str, Any]]:
    return [row for path in sorted(out.glob("*.jsonl")) for row in lines(path)]


def sessions(out: Path) -> list[str]:
    return sorted(row["session_id"] for row in rows_in(out))


def at_once(folder: Path, items: Sequence[ExportItem]) -> dict[str, Any]:
    with DatasetWriter(folder / "whole", exporter_named("sft"), QUERY) as writer:
        for item in items:
            writer.add([item])
        return writer.finish()


def test_three_runs_make_what_one_export_makes(items: list[ExportItem], tmp_path: Path):
    for upto in (5, 5, 12):
        manifest = grown(tmp_path, items[:upto])
    whole = at_once(tmp_path, items)
    own = {"files", "sessions_waiting"}
    assert {name: manifest[name] for name in manifest if name not in own} == {
        name: whole[name] for name in whole if name not in own
    }
    assert sessions(tmp_path / "out") == sessions(tmp_path / "whole")
    assert manifest == json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert manifest["duplicates_left_out"] == 3
    data = load_dataset(str(tmp_path / "out"), cache_dir=str(tmp_path / "cache"))
    assert {split: data[split].num_rows for split in data} == {
        name: figures["rows"] for name, figures in manifest["splits"].items()
    }


OUTCOMES = st.lists(
    st.lists(st.tuples(st.sampled_from(["x", "y", "z"]), st.sampled_from([0.0, 1.0])), min_size=2, max_size=4),
    min_size=2,
    max_size=4,
)


@settings(max_examples=15)
@given(groups=OUTCOMES, duplicates=st.booleans(), in_one_run=st.booleans())
@pytest.mark.parametrize("format", ["kto", "preference"])
def test_a_run_that_grows_has_the_rows_of_one_export(
    groups: list[list[tuple[str, float]]], duplicates: bool, in_one_run: bool, format: str, world: World
) -> None:
    """Also where a label, or a pair's order, contradicts an earlier run's, or that of an earlier part of the run."""
    query = Query(duplicates=duplicates, container="jsonl", shard_mb=1e-6)
    said = {answer: world.solved(answer, answer) for answer in "xyz"}
    added = [
        [said[one].item(reward=reward, task="t", group=f"g{number}") for one, reward in group]
        for number, group in enumerate(groups)
    ]
    with tempfile.TemporaryDirectory() as name:
        folder, grown_manifest = Path(name), dict[str, Any]()
        for upto in [len(added)] if in_one_run else range(1, len(added) + 1):
            with growing(folder, query, format) as dataset:
                for group in added[:upto]:
                    dataset.add(group)
                grown_manifest = dataset.finish()
        with DatasetWriter(folder / "whole", exporter_named(format), query) as writer:
            for group in added:
                writer.add(group)
            manifest = writer.finish()
        rows = [sorted(map(json.dumps, rows_in(folder / part))) for part in ("out", "whole")]
    counts = [(one["rows"], one["skipped"], one["duplicates_left_out"]) for one in (grown_manifest, manifest)]
    assert (rows[0], counts[0]) == (rows[1], counts[1])


def test_a_state_of_an_earlier_release_is_refused_in_words(items: list[ExportItem], tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / "state")) as connection:
        connection.execute("create table contents (digest blob primary key) without rowid")
    with pytest.raises(DatasetError, match="an earlier release wrote it; begin a new dataset with a new file"):
        grown(tmp_path, items[:1])


def test_what_has_not_ended_waits_for_a_later_run(items: list[ExportItem], tmp_path: Path):
    first = grown(tmp_path, [replace(items[0], settled=False), items[1]])
    assert (sessions(tmp_path / "out"), first["sessions_waiting"]) == (["s01"], 1)
    second = grown(tmp_path, items[:2])
    assert (sessions(tmp_path / "out"), second["sessions_waiting"]) == (["s00", "s01"], 0)


class Died(BaseException):
    """The process ends here: nothing is cleaned up after it."""


POINTS: dict[str, tuple[type, str]] = {
    "before the state": (ExportState, "enter"),
    "behind the state": (GrowingDataset, "_move"),
    "before the manifest": (GrowingDataset, "_describe"),
}


@pytest.mark.parametrize("point", POINTS)
def test_a_run_that_dies_between_its_steps_is_made_good_by_the_next(
    point: str, items: list[ExportItem], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def die(*_: object) -> None:
        raise Died

    dataset = growing(tmp_path).__enter__()
    add(dataset, items[:3])
    with monkeypatch.context() as patch:
        patch.setattr(*POINTS[point], die)
        with pytest.raises(Died):
            add(dataset, items[3:])
    dataset._state.close()  # as the end of the process does
    grown(tmp_path, items)
    assert sessions(tmp_path / "out") == sorted(item.session.id for item in items[:9])
    assert not (tmp_path / ".out.parts").exists()


def test_another_query_another_folder_or_a_second_export_is_refused(items: list[ExportItem], tmp_path: Path):
    grown(tmp_path, items[:1])
    with pytest.raises(DatasetError, match="was made with format sft, not kto"):
        grown(tmp_path, items, format="kto")
    with pytest.raises(DatasetError, match="was made with query"):
        grown(tmp_path, items, query=replace(QUERY, where=parse_where(["reward>0"])))
    with growing(tmp_path), pytest.raises(DatasetError, match="another export is using it"):
        growing(tmp_path)
    next((tmp_path / "out").glob("*.jsonl")).unlink()
    with pytest.raises(DatasetError, match="is gone"):
        grown(tmp_path, items)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "out").mkdir()
    (tmp_path / "other" / "out" / "mine.txt").write_text("precious")
    with pytest.raises(DatasetError, match="knows nothing of it"):
        grown(tmp_path / "other", items)
    (tmp_path / "words").write_text("no state at all, but a text of some length")
    with pytest.raises(DatasetError, match="is not a state of an export"):
        ExportState(tmp_path / "words")


async def _recorded(url: str, names: Sequence[str]) -> None:
    log = SqlCallLog(Database(url))
    await log.start()
    for name in names:
        await Log(log).session(name, "openai_chat", CHAT, f"the answer of {name}")
        await log.close_session(name, 1_772_000_009.0)
    await log.close()


@pytest.mark.acceptance
@pytest.mark.timeout(300)
def test_killed_again_and_again_it_has_each_session_once(tmp_path: Path):
    url, out = f"sqlite:///{tmp_path}/rolltap.db", tmp_path / "out"
    names = [f"session{i:03d}" for i in range(150)]
    asyncio.run(_recorded(url, names))
    args = ["-f", "sft", "--option", "arguments=object", "--shard-mb", "0.0001", "--state", str(tmp_path / "state")]

    def files() -> int:
        return len(list(out.glob("*.jsonl"))) if out.exists() else 0

    kills = 0
    for more in (1, 2, 17, 5, 40):
        before = files()
        export = forked_rolltap("export", str(out), "--store", url, *args, env={}, log=tmp_path / "log")
        while export.poll() is None and files() < before + more:
            time.sleep(0.01)
        kills += export.poll() is None
        export.send_signal(signal.SIGKILL)
        export.wait()
    assert kills >= 3
    exit_code, output = run(url, out, *args)
    assert exit_code == 0, output
    assert Counter(sessions(out)) == Counter(names)
    assert json.loads((out / "manifest.json").read_text())["rows"] == len(names)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--limit", "3"], "choose among all sessions"),
        (["--near-duplicates", "0.9"], "--near-duplicates compares with all rows"),
        (["--dry-run"], "leave out --dry-run"),
    ],
)
def test_what_a_state_cannot_be_joined_with_is_named(args: list[str], message: str, tmp_path: Path):
    url = f"sqlite:///{tmp_path}/rolltap.db"
    asyncio.run(_recorded(url, ["one"]))
    code, output = run(url, tmp_path / "out", "--state", str(tmp_path / "state"), *args)
    assert (code, message in output) == (1, True)
