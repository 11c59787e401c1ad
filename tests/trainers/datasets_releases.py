"""Run in an environment with a release of `datasets`: reads files of the worst rows, compares with what was written.

`python -m tests.trainers.datasets_releases` prints a line for each file: read exactly, changed or refused.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import datasets

from rolltap.reconstructor.exporters.base import ExportItem
from rolltap.reconstructor.exporters.sft import Sft
from rolltap.reconstructor.exporters.writers import FILES

from ..unit.exporters.world import World, says, system, tool, user

WORST: tuple[dict[str, Any], ...] = (
    {"path": "a.txt"},
    {},
    {"path": 3, "limit": [1, "one", None, {"b": []}]},
    {"offset": 2**63 - 1, "text": str(2**70)},
    {"": "x", "ünï": "\U0001f600\u2028\ufeff\u202e"},
    {"text": "ä" * 10_000_000},
)
"""Arguments of tool calls: absent, of two types, unions, large numbers, all kinds of unicode, 10 MB."""


def rows(arguments: str) -> list[dict[str, Any]]:
    """Rows as `sft` writes them, one tool call each; the labels are empty at first."""
    made = []
    for number, value in enumerate(WORST):
        given = value if arguments == "object" else json.dumps(value, ensure_ascii=False)
        call = {"id": "call00001", "type": "function", "function": {"name": "bash", "arguments": given}}
        message = {"role": "assistant", "content": "", "tool_calls": [call], "weight": 1}
        label = None if number < 3 else f"g{number}"
        labels = {"session_id": f"s{number}", "rollout_id": label, "group_id": label, "task_id": label}
        made.append({"messages": [message], "tools": "[]", **labels, "reward": None if number < 3 else 0.5})
    return made


def worst_items(world: World) -> list[ExportItem]:
    """Sessions whose calls have these arguments, but for the longest."""
    items = []
    for number, value in enumerate(WORST[:-1]):
        script = world.script(f"worst{number}")
        history = [system("You are an agent."), user("Look.")]
        reply = says("", ("c1", "bash", value))
        parent = script.ask(history, reply)
        script.ask([*history, reply, tool("c1", "ok")], says("done"), parent=parent)
        items.append(script.item(reward=1.0, task=f"worst{number}"))
    return items


def outcome(container: Any, arguments: Any, folder: Path) -> str:
    path = folder / f"{arguments}.{container}"
    file = FILES[container](path, Sft(arguments=arguments).schema())
    written = rows(arguments)
    for row in written:
        file.write(row)
    file.close()
    kind = "json" if container == "jsonl" else "parquet"
    try:
        read: Any = datasets.load_dataset(kind, data_files=str(path), split="train", cache_dir=str(folder / "cache"))
    except Exception as error:  # noqa: BLE001 - any error is the outcome
        return f"refused: {type(error).__name__}"
    pairs = zip(read, written, strict=True)
    return "exact" if all(_given(one) == _given(other) for one, other in pairs) else "changed"


def _given(row: dict[str, Any]) -> Any:
    """The arguments of a row, and its labels."""
    function = row["messages"][0]["tool_calls"][0]["function"]
    return function["arguments"], row["session_id"], row["task_id"], row["reward"]


if __name__ == "__main__":
    datasets.disable_progress_bars()
    with tempfile.TemporaryDirectory() as scratch:
        print(datasets.__version__)
        for container in ("jsonl", "parquet"):
            for arguments in ("object", "text"):
                print(f"{container} {arguments}: {outcome(container, arguments, Path(scratch))}")
