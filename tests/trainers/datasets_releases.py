"""Run in an environment with a release of `datasets`: reads files of all formats, compares with what was written.

`python -m tests.trainers.datasets_releases` prints the release, then a JSON object: of each file whether its plain and
its worst rows were read exactly, with rewards and log-probs rounded to ten decimals, with invented nulls, changed, or
refused.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import datasets
import numpy as np

from rolltap.reconstructor.exporters import EXPORTERS, exporter_named
from rolltap.reconstructor.exporters.base import LABEL_TYPES, Container, ExportItem
from rolltap.reconstructor.exporters.consumers import NEEDS_A_READER
from rolltap.reconstructor.exporters.sft import Sft
from rolltap.reconstructor.exporters.writers import FILES

from ..unit.exporters.world import World, says, system, tool, user
from .dataset_world import world_in, written

PLAIN: tuple[dict[str, Any], ...] = ({"path": "a.txt"}, {"query": "b"}, {"limit": 3}, {})
"""Arguments of calls of several tools: of one type for each name."""

WORST: tuple[dict[str, Any], ...] = (
    {"path": "a.txt"},
    {},
    {"path": 3, "limit": [1, "one", None, {"b": []}], "empty": [[], {}, None], "share": 0.1234567891},
    {"offset": 2**63 - 1, "text": str(2**70)},
    {"": "x", "ünï": "\U0001f600\u2028\ufeff\u202e"},
)
"""Arguments that are absent, of two types, unions, nested and empty, large and fine numbers, all kinds of unicode."""

LONG = 10_000_000
"""Characters of the longest text."""


def worst_items(world: World) -> list[ExportItem]:
    """Sessions whose calls have these arguments."""
    return [session(world, f"worst{number}", value) for number, value in enumerate(WORST)]


def session(world: World, name: str, arguments: Mapping[str, Any], reward: float = 1.0, group: str = "") -> ExportItem:
    script = world.script(name)
    history = [system("You are an agent."), user("Look.")]
    reply = says("", ("c1", "bash", dict(arguments)))
    parent = script.ask(history, reply)
    script.ask([*history, reply, tool("c1", "ok")], says(f"done {reward}"), parent=parent)
    return script.item(reward=reward, task=group or name, group=group or f"group-{name}")


def groups(world: World, values: tuple[dict[str, Any], ...], name: str) -> list[list[ExportItem]]:
    """A group of two rollouts for each value; the other one fails."""
    return [
        [session(world, f"{name}{at}-{reward}", value, reward, f"{name}{at}") for reward in (1 / 3, 0.0)]
        for at, value in enumerate(values)
    ]


def cases() -> list[tuple[str, Container, dict[str, str]]]:
    """Every format and container that a data set can hold, with both forms of arguments."""
    return [
        (name, container, {"arguments": form} if form else {})
        for name in EXPORTERS
        for container in exporter_named(name).containers
        if container != "pt"
        for form in (("object", "text") if name in NEEDS_A_READER else ("",))
    ]


def outcome(path: Path, container: str, expected: list[dict[str, Any]], cache: Path) -> str:
    kind = "json" if container == "jsonl" else "parquet"
    try:
        read: Any = datasets.load_dataset(kind, data_files=str(path), split="train", cache_dir=str(cache))
        rows = list(read)
    except Exception:  # noqa: BLE001 - any error is the outcome
        return "refused"
    if [_plain(row, keep_nulls=True) for row in rows] == [_plain(row, keep_nulls=True) for row in expected]:
        return "exact"
    if _same([_plain(row, keep_nulls=True) for row in rows], [_plain(row, keep_nulls=True) for row in expected]):
        return "rounded"
    same = _same([_plain(row, keep_nulls=False) for row in rows], [_plain(row, keep_nulls=False) for row in expected])
    return "nulls" if same else "changed"


def _same(one: Any, other: Any) -> bool:
    """Equal but for the decimals past the tenth of numbers that are not in arguments."""
    if isinstance(one, dict) and isinstance(other, dict):
        pairs = ((name, value, other.get(name)) for name, value in one.items())
        return one.keys() == other.keys() and all(a == b if name in FREE else _same(a, b) for name, a, b in pairs)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, float) and isinstance(other, float):
        return abs(one - other) <= 1e-10
    return type(one) is type(other) and one == other


def _plain(value: Any, *, keep_nulls: bool, inside: bool = False) -> Any:
    """The value as JSON, without keys whose value is null: columns have them for every row. Arguments keep theirs."""
    if isinstance(value, Mapping):
        return {
            key: _plain(one, keep_nulls=keep_nulls, inside=inside or key in FREE)
            for key, one in value.items()
            if one is not None or (inside and keep_nulls)
        }
    if isinstance(value, list | tuple | np.ndarray):
        return [_plain(one, keep_nulls=keep_nulls, inside=inside) for one in value]
    return value.item() if isinstance(value, np.generic) else value


FREE = frozenset({"arguments"})
"""Names of values in which a null is one that was written."""


def rows_in(path: Path, container: str) -> list[dict[str, Any]]:
    """What was written, by readers that know no `datasets`."""
    if container == "jsonl":
        return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]
    import pyarrow.parquet as pq

    table = pq.read_table(path)
    return [
        {name: _decoded(value, table.schema.field(name).type) for name, value in row.items()}
        for row in table.to_pylist()
    ]


def _decoded(value: Any, kind: Any) -> Any:
    """A value of Arrow's JSON type, or of a struct with one, is decoded."""
    import pyarrow as pa

    if value is None:
        return None
    if str(kind).startswith("extension<arrow.json"):
        return json.loads(value)
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return [_decoded(one, kind.value_type) for one in value]
    if pa.types.is_struct(kind):
        parts = [kind.field(at) for at in range(kind.num_fields)]
        return {part.name: _decoded(value[part.name], part.type) for part in parts}
    return value


def main() -> None:
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(100)
    found: dict[str, list[str]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        world = world_in(folder / "model")
        kinds = {"plain": groups(world, PLAIN, "plain"), "worst": groups(world, WORST, "worst")}
        for name, container, options in cases():
            label = " ".join([name, *options.values(), container])
            found[label] = []
            for kind, items in kinds.items():
                path, _ = written(folder / f"{kind}-{label.replace(' ', '-')}", name, items, container, **options)
                found[label].append(outcome(path, container, rows_in(path, container), folder / "cache"))
                path.unlink()
        for container in ("jsonl", "parquet"):
            path = folder / f"long.{container}"
            file = FILES[container](path, Sft(arguments="text").schema())
            message = {"role": "assistant", "content": "ä" * LONG, "weight": 1}
            file.write({"messages": [message], "tools": "[]", **dict.fromkeys(LABEL_TYPES)})
            file.close()
            found[f"sft text {container}"].append(outcome(path, container, rows_in(path, container), folder / "cache"))
    sys.stdout.write(f"{datasets.__version__}\n{json.dumps(found)}\n")


if __name__ == "__main__":
    main()
