"""What every format of a dataset must do, ours and installed packages': the same tests for each known name."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from rolltap.engine.tiny import tokenizer as tiny
from rolltap.extras import known_names
from rolltap.reconstructor.exporters import ENTRY_POINTS, EXPORTERS, exporter_named
from rolltap.reconstructor.exporters.base import ExportItem
from rolltap.reconstructor.exporters.dataset import DatasetWriter, Query
from rolltap.reconstructor.exporters.writers import TYPES

from ..unit.exporters.world import World, says, user

NAMES = known_names(EXPORTERS, ENTRY_POINTS)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    folder = tmp_path_factory.mktemp("tokenizer")
    tiny.save(tiny.train(tiny.corpus("")), folder)
    return World(folder)


@pytest.fixture(scope="module")
def solved(world: World) -> list[ExportItem]:
    """Six tasks, each solved in its own words."""
    return [world.solved(f"s{i:02d}", f"answer {i}").item(reward=i % 2, task=f"task-{i}") for i in range(6)]


def write(out: Path, groups: Sequence[Sequence[ExportItem]], format: str, query: Query) -> dict[str, Any]:
    with DatasetWriter(out, exporter_named(format), query) as writer:
        for group in groups:
            writer.add(group)
        return writer.finish()


@pytest.mark.parametrize("format", NAMES)
def test_a_format_declares_what_it_is(format: str):
    exporter = exporter_named(format)
    assert exporter.name == format
    assert exporter.containers
    assert set(exporter.containers) <= {"jsonl", "parquet", "pt"}
    assert {column.removeprefix("list<").removesuffix(">") for column in exporter.schema().values()} <= set(TYPES)
    assert exporter.schema() or "parquet" not in exporter.containers


@pytest.mark.parametrize("format", NAMES)
def test_every_format_writes_what_its_manifest_says(format: str, solved: list[ExportItem], tmp_path: Path):
    exporter = exporter_named(format)
    for container in exporter.containers:
        out = tmp_path / container
        manifest = write(out, [[item] for item in solved], format, Query(container=container))
        assert manifest == json.loads((out / "manifest.json").read_text())
        assert manifest["token_faithful"] == exporter.faithful
        names = {path.name for path in out.iterdir()}
        assert names == {"manifest.json", "README.md", *(file["path"] for file in manifest["files"])}
        for file in manifest["files"]:
            data = (out / file["path"]).read_bytes()
            assert (len(data), hashlib.sha256(data).hexdigest()) == (file["bytes"], file["sha256"])
        assert sum(file["rows"] for file in manifest["files"]) == manifest["rows"]
    assert [path.name for path in tmp_path.iterdir()] == list(exporter.containers) or len(exporter.containers) > 1


SECRETS = {
    "configured": "open sesame 42",
    "openai": "sk-" + "proj-abcdefghijklmnop1234",
    "github": "ghp" + "_abcdefghijklmnopqrstuvwxyz0123456789",
    "aws": "AKIA" + "ABCDEFGHIJKLMNOP",
    "rolltap": "rt-" + "session-ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghij0123456",
}


@pytest.mark.parametrize("kind", sorted(SECRETS))
@pytest.mark.parametrize("format", NAMES)
def test_no_secret_reaches_a_dataset(kind: str, format: str, world: World, tmp_path: Path):
    secret = SECRETS[kind]
    script = world.script("leaky")
    script.ask([user(f"The key is {secret}, use it.")], says(f"I use {secret}."))
    other = world.script("other")
    other.ask([user(f"The key is {secret}, use it.")], says("I don't."))
    group = [script.item(reward=1.0, task="t"), other.item(reward=0.0, task="t")]
    container = exporter_named(format).containers[-1]
    query = Query(secrets=["open sesame 42"], container=container)
    manifest = write(tmp_path / "out", [group], format, query)
    for file in manifest["files"]:
        path = tmp_path / "out" / file["path"]
        data = str(pq.read_table(path).to_pylist()).encode() if path.suffix == ".parquet" else path.read_bytes()
        assert secret.encode() not in data
    if exporter_named(format).faithful:
        assert manifest["rows"] == 0
        assert manifest["rows_with_secrets_left_out"] > 0
    else:
        assert manifest["rows"] > 0
        assert manifest["secrets_redacted"] > 0
