"""Run in an environment with ms-swift: what its preprocessor makes of `--for ms-swift`, with the worst arguments.

It makes a message of each tool call and reads `loss`; of a reply it keeps the content alone, so thinking stands there.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

from datasets import load_dataset

from rolltap.reconstructor.exporters.consumers import layout

from .dataset_world import conversation, exported, world_in
from .datasets_releases import WORST, worst_items


def main() -> None:
    from swift.dataset.preprocessor.core import AutoPreprocessor  # type: ignore[import-not-found]

    with tempfile.TemporaryDirectory() as name:
        world = world_in(Path(name) / "qwen3")
        items = [*worst_items(world), *(conversation(world, f"s{i}", think=True, cut=i == 3) for i in range(4))]
        format, options, _ = layout("", "ms-swift", {})
        manifest = exported(Path(name) / "out", format, items, None, **options)
        files = [str(Path(name) / "out" / file["path"]) for file in manifest["files"]]
        data = load_dataset("json", data_files=files, split="train", cache_dir=f"{name}/cache")
        rows: list[Any] = [row["messages"] for row in AutoPreprocessor()(data)]
    calls = [one["content"]["arguments"] for row in rows for one in row if one["role"] == "tool_call"]
    assert calls == [*WORST, *({"command": f"ls s{number}"} for number in range(4))]
    replies = [(one["loss"], one["content"]) for one in rows[-1] if one["role"] == "assistant"]
    assert replies == [
        (True, "<think>\nwhat is there?\n</think>\n\nI look."),
        (False, "<think>\nit is done\n</think>\n\nThe file of s3 is there."),
        (True, "<think>\nsure\n</think>\n\nIt is."),
    ]
    sys.stdout.write(f"\n{len(rows)} conversations with {len(calls)} calls, their marks and thinking\n")


if __name__ == "__main__":
    main()
