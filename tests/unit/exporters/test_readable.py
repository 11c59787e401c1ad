"""A row that readers can't hold is left out and named: it would make its whole file unreadable, or another one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from datasets import load_dataset

from rolltap.reconstructor.exporters import exporter_named
from rolltap.reconstructor.exporters.base import ExportItem
from rolltap.reconstructor.exporters.dataset import DatasetWriter, Query

from .world import World, says, system, tool, user


def nested(levels: int) -> Any:
    return {"a": nested(levels - 1)} if levels else 1


UNREADABLE: dict[str, dict[str, Any]] = {
    "more than 64 bits": {"offset": 2**70},
    "not as a whole number": {"ids": [1, {"id": -(2**63) - 1}]},
    "too deep": nested(60),
    "NUL in a name": {"a\0b": 1},
}
FINE: dict[str, dict[str, Any]] = {
    name: {"tolerance": value}
    for name, value in (("small", 1e-12), ("long", 0.30000000000000004), ("large", 1.2345678901234567e300))
}
"""Numbers that `datasets` from 4.7 on rounds in JSON Lines, the first one to 0."""

READABLE: dict[str, dict[str, Any]] = {
    "64 bits": {"offset": 2**63 - 1, "text": str(2**70)},
    "deep": nested(30),
    "texts": {"": "x\0y", "ünï": "\U0001f600\u2028\ufeff\u202e"},
    "unions": {"offset": "ten", "a": [1, "one", None, {"b": []}]},
    "long": {"text": "ä" * 100_000},
    "none": {},
    "numbers": {"lr": 1e-5, "share": 0.1234567891, "many": [1e22, -2.5, 12345.678]},
}


def called(world: World, name: str, arguments: dict[str, Any]) -> ExportItem:
    script = world.script(name)
    start = [system("You are an agent."), user(f"Do {name}.")]
    first = says("", ("c1", "bash", arguments))
    parent = script.ask(start, first)
    script.ask([*start, first, tool("c1", "ok")], says("done"), parent=parent)
    return script.item()


def export(out: Path, items: list[ExportItem], container: Any, arguments: str) -> tuple[dict[str, Any], list[Any]]:
    """The manifest, and the arguments of each row as `datasets` reads them."""
    with DatasetWriter(out, exporter_named("sft", {"arguments": arguments}), Query(container=container)) as writer:
        for item in items:
            writer.add([item])
        manifest = writer.finish()
    files = [str(out / file["path"]) for file in manifest["files"]]
    kind = "parquet" if container == "parquet" else "json"
    rows: Any = load_dataset(kind, data_files=files, split="train", cache_dir=str(out.parent / "cache"))
    return manifest, [row["messages"][2]["tool_calls"][0]["function"]["arguments"] for row in rows]


@pytest.mark.parametrize("container", ["jsonl", "parquet"])
def test_one_row_that_readers_cannot_hold_spoils_no_other(container: Any, world: World, tmp_path: Path) -> None:
    items = [called(world, name, arguments) for name, arguments in {**READABLE, **UNREADABLE}.items()]
    manifest, read = export(tmp_path / "out", items, container, "object")
    assert read == list(READABLE.values())
    assert [row["session_id"] for row in manifest["failed"]["rows"]] == list(UNREADABLE)
    reasons = " ".join(manifest["failed"]["by_reason"])
    assert all(word in reasons for word in ("more than 64 bits", "more than 50 levels", "a name with a NUL"))


def test_numbers_that_readers_of_json_lines_round_are_left_out_of_them(world: World, tmp_path: Path) -> None:
    items = [called(world, *one) for one in {**FINE, "none": {}}.items()]
    manifest, read = export(tmp_path / "out", items, "jsonl", "object")
    assert read == [{}]
    assert [row["session_id"] for row in manifest["failed"]["rows"]] == list(FINE)
    assert "rounds to 10 decimals in JSON Lines; --container parquet" in next(iter(manifest["failed"]["by_reason"]))
    manifest, read = export(tmp_path / "again", items, "parquet", "object")
    assert manifest["failed"]["count"] == 0
    assert read == [pytest.approx(value, rel=1e-15) for value in (*FINE.values(), {})]


@pytest.mark.parametrize("container", ["jsonl", "parquet"])
def test_as_text_every_row_is_read_exactly(container: Any, world: World, tmp_path: Path) -> None:
    arguments = {**READABLE, **UNREADABLE, **FINE}
    manifest, read = export(tmp_path / "out", [called(world, *one) for one in arguments.items()], container, "text")
    assert [json.loads(text) for text in read] == list(arguments.values())
    assert manifest["failed"]["count"] == 0
