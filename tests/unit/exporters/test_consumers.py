"""`--for NAME`: each layout is one that can be written, and its manifest names the least release that reads it."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from rolltap.errors import DatasetError
from rolltap.reconstructor.exporters import EXPORTERS, exporter_named
from rolltap.reconstructor.exporters.consumers import CONSUMERS, NEEDS_A_READER, consumer_named, layout, layouts
from rolltap.reconstructor.exporters.dataset import DatasetWriter, Query

from .world import World, lines

PAIR = (("done", 1.0), ("gave up", 0.0))
LAYOUTS = [(name, format) for name, consumer in CONSUMERS.items() for format in consumer.formats]


def written(out: Path, world: World, name: str, format: str = "") -> tuple[dict[str, Any], Path]:
    chosen, options, container = layout(format, name, {})
    exporter = exporter_named(chosen, options)
    with DatasetWriter(out, exporter, Query(container=container)) as writer:
        writer.add([world.solved(f"s{said}", said).item(reward=reward, task="t", group="g") for said, reward in PAIR])
        manifest = writer.finish()
    return manifest, out / manifest["files"][0]["path"]


@pytest.mark.parametrize(("name", "format"), LAYOUTS)
def test_every_layout_is_written_with_its_least_release(name: str, format: str, world: World, tmp_path: Path) -> None:
    manifest, _ = written(tmp_path / "out", world, name, format)
    assert manifest["failed"]["count"] == 0
    least = "4.7" if name in ("trl", "verl") else "4.0"
    assert manifest["least_releases"] == {"datasets": least}
    assert f"`datasets>={least}`" in (tmp_path / "out" / "README.md").read_text()


@pytest.mark.parametrize("format", sorted(NEEDS_A_READER))
def test_nobody_gets_a_form_of_arguments_by_default(format: str) -> None:
    """Objects come with invented nulls to `datasets` before 4.7; most chat templates fail on texts."""
    with pytest.raises(DatasetError, match=r"who reads the files\? .* --for .*trl.* or --option arguments=object"):
        layout(format, "", {})
    assert layout(format, "", {"arguments": "text"}) == (format, {"arguments": "text"}, None)
    assert all({"arguments"} <= one.formats[format].keys() for one in CONSUMERS.values() if format in one.formats)


def test_each_format_that_can_choose_needs_a_reader() -> None:
    able = {name for name in EXPORTERS if "arguments" in {field.name for field in fields(exporter_named(name))}}  # type: ignore[arg-type]
    assert able - {"sharegpt"} == NEEDS_A_READER
    assert "sft for trl" in layouts(EXPORTERS)
    assert not NEEDS_A_READER & set(layouts(EXPORTERS))


def test_a_consumer_reads_its_formats_only() -> None:
    assert layout("", "", {}) == ("trajectories", {}, None)
    assert layout("kto", "unsloth", {"threshold": "1"})[1] == {"arguments": "text", "threshold": "1"}
    with pytest.raises(DatasetError, match="--for verl reads sft, not kto"):
        layout("kto", "verl", {})


def test_swift_reads_loss_and_thinking_of_each_message(world: World, tmp_path: Path) -> None:
    _, file = written(tmp_path / "out", world, "ms-swift")
    row = lines(file)[0]
    assert [message.get("loss") for message in row["messages"]] == [None, None, True, None, None, True]
    assert not any({"weight", "reasoning_content"} & message.keys() for message in row["messages"])
    assert row["messages"][2]["content"] == "<think>\nwhat is here?\n</think>\n\nI look around."


def test_an_unknown_consumer_lists_the_known_ones() -> None:
    with pytest.raises(DatasetError, match=r"no consumer 'trainer'; known: axolotl, datasets-4\.0, "):
        consumer_named("trainer")
