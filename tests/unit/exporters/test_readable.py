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
READABLE: dict[str, dict[str, Any]] = {
    "64 bits": {"offset": 2**63 - 1, "text": str(2**70)},
    "deep": nested(30),
    "texts": {"": "x\0y", "ünï": "\U0001f600\u2028\ufeff\u202e"},
    "unions": {"offset": "ten", "a": [1, "one", None, {"b": []}]},
    "long": {"text": "ä" * 100_000},
    "none": {},
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


@pytest.mark.parametrize("container", ["jsonl", "parquet"])
def test_as_text_every_row_is_read_exactly(container: Any, world: World, tmp_path: Path) -> None:
    arguments = {**READABLE, **UNREADABLE}
    manifest, read = export(tmp_path / "out", [called(world, *one) for one in arguments.items()], container, "text")
    assert [json.loads(text) for text in read] == list(arguments.values())
    assert manifest["failed"]["count"] == 0
