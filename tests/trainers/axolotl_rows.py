"""Run in an environment with axolotl: what it trains of `--for axolotl`, token by token, with the worst arguments.

Qwen2.5's template: with one that opens `<think>`, axolotl trains a reply from after that tag on.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

from datasets import load_dataset

from rolltap.reconstructor.exporters.consumers import layout

from ..unit.continuation.making import trl_template
from .dataset_world import conversation, exported, runs, sampled, world_in
from .datasets_releases import worst_items


def main() -> None:
    from axolotl.prompt_strategies.chat_template import load  # type: ignore[import-not-found]
    from axolotl.utils.dict import DictDefault  # type: ignore[import-not-found]

    with tempfile.TemporaryDirectory() as name:
        world = world_in(Path(name) / "qwen2_5", trl_template("qwen2_5"))
        items = [conversation(world, f"s{i}", think=False, cut=i == 3) for i in range(4)] + worst_items(world)
        format, options, _ = layout("", "axolotl", {})
        manifest = exported(Path(name) / "out", format, items, None, **options)
        files = [str(Path(name) / "out" / file["path"]) for file in manifest["files"]]
        told = {"type": "chat_template", "message_field_training": "weight"}
        config = DictDefault({"chat_template": "tokenizer_default", "train_on_inputs": False, "sequence_len": 1 << 16})
        strategy = load(world.tokenizer, config, told)
        rows: list[Any] = list(load_dataset("json", data_files=files, split="train", cache_dir=f"{name}/cache"))
        made = [strategy.tokenize_prompt(row) for row in rows]
        found = sorted(run for row in made for run in runs(row["input_ids"], [one != -100 for one in row["labels"]]))
        assert found == sampled(items)
    sys.stdout.write(f"\n{len(rows)} conversations, {len(found)} replies carry loss on the sampled tokens\n")


if __name__ == "__main__":
    main()
