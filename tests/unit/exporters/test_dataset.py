"""The pass that every format shares, as a user sees it: files, manifest, splits, selection, secrets, failures."""

from __future__ import annotations

import errno
import json
import math
import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from datasets import load_dataset

from rolltap.errors import DatasetError
from rolltap.reconstructor.exporters import exporter_named
from rolltap.reconstructor.exporters.base import ExportItem, Rendered, Row, SkippedItem
from rolltap.reconstructor.exporters.dataset import DatasetWriter, Query
from rolltap.reconstructor.exporters.redact import detectors_named
from rolltap.reconstructor.exporters.sft import Sft
from rolltap.reconstructor.exporters.where import parse_where

from .world import World, lines, says, user


def write(out: Path, items: list[ExportItem], format: str = "sft", query: Query | None = None, **options: Any) -> dict:
    with DatasetWriter(out, exporter_named(format), query or Query(), **options) as writer:
        for item in items:
            writer.add([item])
        return writer.finish()


@pytest.fixture(scope="module")
def many(world: World) -> list[ExportItem]:
    """Forty tasks, each solved in its own words."""
    return [world.solved(f"s{i:02d}", f"answer {i}").item(reward=i % 2, task=f"task-{i}") for i in range(40)]


def test_the_same_query_gives_the_same_bytes(many: list[ExportItem], tmp_path: Path):
    query = Query(splits={"train": 0.5, "test": 0.5})
    first, second = (write(tmp_path / name, many, "trajectories", query) for name in ("a", "b"))
    assert first == second


def test_no_task_is_on_both_sides_of_a_split_and_none_moves_when_others_join(many: list[ExportItem], tmp_path: Path):
    query = Query(splits={"train": 0.7, "test": 0.3}, seed=3)
    twice = [*many, *(replace(item, session=replace(item.session, id=f"{item.session.id}b")) for item in many)]
    write(tmp_path / "all", twice, "trajectories", replace(query, container="jsonl"))
    write(tmp_path / "half", many[:20], "trajectories", replace(query, container="jsonl"))
    sides = {
        name: {split: {row["task_id"] for row in lines(tmp_path / name / f"{split}-00000-of-00001.jsonl")}
               for split in ("train", "test")}
        for name in ("all", "half")
    }  # fmt: skip
    assert sides["all"]["train"] | sides["all"]["test"] == {f"task-{i}" for i in range(40)}
    assert not sides["all"]["train"] & sides["all"]["test"]
    assert sides["half"]["test"] <= sides["all"]["test"]
    assert 4 <= len(sides["all"]["test"]) <= 20


def test_shards_are_cut_by_size_and_numbered(many: list[ExportItem], tmp_path: Path):
    manifest = write(tmp_path / "out", many, "trajectories", Query(shard_mb=0.02, container="jsonl"))
    files = manifest["files"]
    assert len(files) > 3
    assert [file["path"] for file in files] == [f"train-{i:05d}-of-{len(files):05d}.jsonl" for i in range(len(files))]


def test_equal_conversations_are_one_row_unless_duplicates_are_wanted(world: World, tmp_path: Path):
    items = [world.solved(f"d{i}").item(task="same") for i in range(3)]
    manifest = write(tmp_path / "one", items)
    assert (manifest["rows"], manifest["duplicates_left_out"]) == (1, 2)
    assert write(tmp_path / "all", items, query=Query(duplicates=True))["rows"] == 3
    assert write(tmp_path / "record", items, "trajectories")["rows"] == 3


@pytest.mark.parametrize(
    ("where", "kept"),
    [
        ("reward>=1", 20),
        ("reward=0 and task~task-1*", 5),
        ("harness!=codex", 0),
        ("date>=2026-02-25 and date<2026-02-26", 40),
        ("date<2026-02-25T06:13:20", 0),
        ("tag=files", 40),
        ("tag!=files", 0),
        ("tag.team=a", 0),
        ("status=succeeded and scoring=scored", 40),
        ("length<10", 0),
        ("turns>=2 and version=0", 40),
        ("session=s07", 1),
        ("session=s07 or session=s08", 2),
        ("session in (s07, 's08', \"s09\") and not session=s08", 2),
        ("session not in (s07, s08)", 38),
        ("not (reward>=1 or reward=0)", 0),
        ("reward>=1 and (task=none or length>=10)", 20),
        ("task='no such task'", 0),
        ("finish=stop or finish=tool_calls", 40),
        ("finding=no_reply", 0),
        ("finding!=no_reply and calls>=1 and dialect!=gemini", 40),
        ("break=compaction or tools=never or text~*nowhere*", 0),
    ],
)
def test_where_selects(where: str, kept: int, many: list[ExportItem]):
    assert sum(parse_where([where]).keep(item) is not None for item in many) == kept


def test_a_condition_on_segments_drops_segments(world: World):
    item = world.with_subagent("s").item()
    kept = parse_where(["agent=helper"]).keep(item)
    assert kept is not None
    assert [segment.agent for segment in kept.trajectory.segments] == ["helper"]


@pytest.mark.parametrize(
    ("where", "says_"),
    [
        ("reward>=1 and rewards>1", "no field 'rewards' \\(character 15\\); known: agent"),
        ("task=a b", "from character 8 on \\('b'\\); expected FIELD OP VALUE.*; fields: agent"),
        ("(task=a or reward>1", "from character 20 on"),
        ("task in (a", "from character 11 on"),
        ("reward>many", "reward needs a number"),
        ("task>=a", "task knows = != ~, not >="),
        ("date=soon", "date needs an ISO date"),
        ("just words", "can't read 'just words'"),
    ],
)
def test_a_condition_that_cannot_be_read_is_named(where: str, says_: str):
    with pytest.raises(DatasetError, match=says_):
        parse_where([where])


def test_parquet_without_pyarrow_names_the_extra(
    many: list[ExportItem], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(DatasetError, match=r"pip install .*\[export\]"):
        write(tmp_path / "out", many, "sft-tokens")
    assert not (tmp_path / "out").exists()


def test_a_folder_that_is_not_empty_is_left_alone(many: list[ExportItem], tmp_path: Path):
    (tmp_path / "mine.txt").write_text("precious")
    with pytest.raises(DatasetError, match="not empty"):
        write(tmp_path, many[:1])
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_a_row_that_cannot_be_written_is_named_and_the_others_are_there(many: list[ExportItem], tmp_path: Path):
    broken = replace(many[1], reward=object())  # type: ignore[arg-type]
    for format, container in (("sft", "jsonl"), ("sft", "parquet"), ("sft-tokens", "parquet")):
        query = Query(container=container)  # type: ignore[arg-type]
        manifest = write(tmp_path / f"{format}-{container}", [many[0], broken, many[2]], format, query)
        assert (manifest["rows"], manifest["failed"]["count"]) == (2, 1)
        (named,) = manifest["failed"]["rows"]
        assert (named["session_id"], named["row"]) == ("s01", 0)
        assert "RowError" in named["reason"]
        assert sum(file["rows"] for file in manifest["files"]) == 2


def test_a_group_loses_the_item_that_a_format_cannot_take_and_no_other(many: list[ExportItem], tmp_path: Path):
    class Picky(Sft):
        def rows(self, group: Sequence[ExportItem]) -> Iterable[Row | SkippedItem]:
            for item in group:
                yield from super().rows([item])
                if item.session.id == "s01":
                    raise KeyError("no such role")

    with DatasetWriter(tmp_path / "out", Picky(), Query()) as writer:
        writer.add(many[:3])
        manifest = writer.finish()
    assert [row["session_id"] for row in lines(tmp_path / "out" / "train-00000-of-00001.jsonl")] == ["s00", "s02"]
    assert manifest["failed"]["rows"] == [{"session_id": "s01", "row": 0, "reason": "KeyError: 'no such role'"}]


def test_a_template_that_fails_on_a_row_leaves_it_out(many: list[ExportItem], tmp_path: Path):
    def differs(rendered: Rendered) -> bool:
        if rendered.messages[-1]["content"] == "answer 1":
            raise TypeError("Can only get item pairs from a mapping.\nmore")
        return False

    manifest = write(tmp_path / "out", many[:3], "sft", differs=differs)
    reason = "TypeError: Can only get item pairs from a mapping."
    assert manifest["failed"]["by_reason"] == {reason: 1}
    assert manifest["failed"]["rows"] == [{"session_id": many[1].session.id, "row": 0, "reason": reason}]
    assert (manifest["rows"], manifest["rerendered"]) == (2, {"rows": 2, "differ": 0})


@pytest.mark.parametrize("format", ["trajectories", "sft", "verl-rl", "atif"])
def test_a_dry_run_counts_the_same_and_writes_nothing(format: str, many: list[ExportItem], tmp_path: Path):
    query = Query(where=parse_where(["session!=s03"]), splits={"train": 0.5, "test": 0.5})
    wet = write(tmp_path / "out", many, format, query)
    with DatasetWriter(None, exporter_named(format), query) as writer:
        for item in many:
            writer.add([item])
        dry = writer.finish()
    assert dry | {"files": wet["files"]} == wet
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_full_disk_is_one_clear_error_and_leaves_nothing(many: list[ExportItem], tmp_path: Path):
    class Full(Sft):
        """A format whose second row the disk has no room for."""

        def rows(self, group: Sequence[ExportItem]) -> Iterable[Row | SkippedItem]:
            yield from super().rows(group)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with (
        pytest.raises(DatasetError, match="No space left on device"),
        DatasetWriter(tmp_path / "out", Full(), Query()) as writer,
    ):
        writer.add([many[0]])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("odd", [{"splits": {"train": math.nan, "test": 0.5}}, {"splits": {}}, {"shard_mb": math.inf}])
def test_a_query_has_finite_numbers(odd: dict[str, Any]) -> None:
    with pytest.raises(DatasetError, match="above 0"):
        Query(**odd)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("csv", {}, "no format 'csv'; known: atif, harbor"),
        ("sft", {"colour": "red"}, "sft has no option 'colour'; known: arguments, images, mark, reasoning"),
        ("sft", {"reasoning": "some"}, "expected keep or drop"),
        ("preference", {"margin": "wide"}, "expected a float"),
        *(("preference", {"margin": odd}, "0 or more") for odd in ("nan", "inf", "-0.5")),  # of equal rewards
        *(("kto", {"threshold": odd}, "a finite number") for odd in ("nan", "-inf", "1e999")),
        *(("transitions", {"gamma": odd}, "from 0 to 1") for odd in ("nan", "inf", "-1", "1.01")),
    ],
)
def test_unknown_formats_and_options_list_the_known_ones(name: str, options: dict[str, str], message: str):
    with pytest.raises(DatasetError, match=message):
        exporter_named(name, options)


def test_splits_must_add_up():
    with pytest.raises(DatasetError, match="add up to 1"):
        Query(splits={"train": 0.5, "test": 0.6})


def test_a_format_is_not_written_in_a_container_it_does_not_know(tmp_path: Path):
    with pytest.raises(DatasetError, match="atif is written as jsonl, not parquet"):
        DatasetWriter(tmp_path / "out", exporter_named("atif"), Query(container="parquet"))


def test_the_manifests_figures_are_those_of_the_files(many: list[ExportItem], tmp_path: Path):
    manifest = write(tmp_path / "out", many, "sft-tokens", Query(container="jsonl", duplicates=True))
    rows = [json.loads(line) for path in (tmp_path / "out").glob("*.jsonl") for line in path.read_text().splitlines()]
    split = manifest["splits"]["train"]
    assert (split["tokens"], split["trained"]) == (
        sum(len(row["input_ids"]) for row in rows),
        sum(label != -100 for row in rows for label in row["labels"]),
    )
    assert sum(manifest["lengths"].values()) == manifest["rows"] == len(rows)
    lengths = [2 ** max(len(row["input_ids"]) - 1, 0).bit_length() for row in rows]
    assert manifest["lengths"] == {f"<={size}": lengths.count(size) for size in sorted(set(lengths))}
    assert manifest["schema_version"] == 2
    assert all(found["oldest_version"] == 0 for found in manifest["policies"].values())


def test_the_hub_reads_the_folder_as_it_is(many: list[ExportItem], tmp_path: Path):
    write(tmp_path / "out", many, "sft", Query(splits={"train": 0.5, "test": 0.5}))
    data = load_dataset(str(tmp_path / "out"), cache_dir=str(tmp_path / "cache"))
    assert set(data) == {"train", "test"}
    assert "messages" in data["train"].column_names


def test_secrets_are_counted_by_kind_and_found_by_a_library(world: World, tmp_path: Path):
    pypi = "pypi-AgEIcHlwaS5vcmc" + "A" * 80
    script = world.script("leaky")
    script.ask([user(f"Use {pypi} and AKIAABCDEFGHIJKLMNOP.")], says("Yes."))
    items = [script.item(reward=1.0, task="t")]
    assert write(tmp_path / "own", items, "sft")["secrets_by_kind"] == {"AWS key id": 1}
    found = write(tmp_path / "both", items, "sft", Query(detectors=detectors_named(["detect-secrets"])))[
        "secrets_by_kind"
    ]
    assert found == {"AWS key id": 1, "PyPI Token": 1}
    assert pypi not in next((tmp_path / "both").glob("*.jsonl")).read_text()


def test_the_ids_that_are_written_are_looked_through(many: list[ExportItem], tmp_path: Path):
    secret = "sk-abcdefghijklmnopqrstuvwxyz0123456789"
    with DatasetWriter(tmp_path / "out", exporter_named("sft-tokens"), Query(), decode=lambda ids: secret) as writer:
        writer.add(many[:4])
        manifest = writer.finish()
    assert (manifest["rows"], manifest["rows_with_secrets_left_out"] > 0) == (0, True)


def test_a_row_with_ids_past_the_tokenizer_is_left_out(world: World, tmp_path: Path):
    """As a chat upstream may report them, whose tokenizer nobody knew when they were recorded."""
    item = world.solved("s").item()
    item.trajectory.segments[0].token_ids[-1] = 10**6
    size = len(world.tokenizer)
    with DatasetWriter(
        tmp_path / "out", exporter_named("sft-tokens"), Query(), lacks=lambda ids: max(ids) >= size
    ) as writer:
        writer.add([item])
        writer.add([world.solved("t", answer="other").item()])
        manifest = writer.finish()
    assert (manifest["rows"], [row["session_id"] for row in manifest["failed"]["rows"]]) == (1, ["s"])
