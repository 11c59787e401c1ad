"""`--for NAME`: each layout is one that can be written, and its manifest names the least release that reads it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rolltap.errors import DatasetError
from rolltap.reconstructor.exporters import exporter_named
from rolltap.reconstructor.exporters.consumers import CONSUMERS, consumer_named
from rolltap.reconstructor.exporters.dataset import DatasetWriter, Query

from .world import World, lines


def written(out: Path, world: World, name: str) -> tuple[dict[str, Any], Path]:
    layout = consumer_named(name)
    exporter = exporter_named(layout.format, layout.options)
    with DatasetWriter(out, exporter, Query(container=layout.container)) as writer:
        writer.add([world.solved("s").item()])
        manifest = writer.finish()
    return manifest, out / manifest["files"][0]["path"]


@pytest.mark.parametrize("name", CONSUMERS)
def test_every_layout_is_written_with_its_least_release(name: str, world: World, tmp_path: Path) -> None:
    manifest, _ = written(tmp_path / "out", world, name)
    assert manifest["rows"] >= 1
    assert manifest["failed"]["count"] == 0
    least = "4.8" if name in ("trl", "verl") else "4.0"
    assert manifest["least_releases"] == {"datasets": least}
    assert f"`datasets>={least}`" in (tmp_path / "out" / "README.md").read_text()


def test_swift_reads_loss_of_each_message(world: World, tmp_path: Path) -> None:
    _, file = written(tmp_path / "out", world, "ms-swift")
    (row,) = lines(file)
    assert [message.get("loss") for message in row["messages"]] == [None, None, True, None, None, True]
    assert not any("weight" in message for message in row["messages"])


def test_an_unknown_consumer_lists_the_known_ones() -> None:
    with pytest.raises(DatasetError, match=r"no consumer 'trainer'; known: axolotl, datasets-4\.0, "):
        consumer_named("trainer")
