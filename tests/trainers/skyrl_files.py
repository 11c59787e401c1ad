"""Run in an environment with SkyRL: what its SFT trainer and its prompt dataset read of our files."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

from rolltap.reconstructor.exporters.base import Container, ExportItem

from ..unit.exporters.world import World
from .dataset_world import conversation, world_in, written


def tokens(folder: Path, items: list[ExportItem], container: Container) -> int:
    """Rows of its pretokenised dataset, with its own window of the loss, in its own batch."""
    from skyrl.train.dataset.pretokenized import load_from_pretokenized  # type: ignore[import-not-found]

    file, _ = written(folder / "tokens", "skyrl-sft", [items], container)
    data = load_from_pretokenized(str(file))
    segments = [segment for item in items for segment in item.rows]
    for row, segment in zip(data, segments, strict=True):
        assert row["input_ids"] == segment.token_ids.tolist()
        assert row["num_actions"] == len(segment) - segment.prompt_length
        assert row["loss_mask"] == segment.loss_mask[segment.prompt_length :].tolist()
    return len(segments)


def prompts(folder: Path, items: list[ExportItem], world: World) -> int:
    from skyrl.train.dataset.dataset import PromptDataset  # type: ignore[import-not-found]

    file, _ = written(folder / "prompts", "skyrl-rl", [[item] for item in items], env_class="ours")
    data: Any = PromptDataset(str(file), world.tokenizer, max_prompt_length=4096, num_workers=1)
    for row, item in zip(data.collate_fn([data[index] for index in range(len(data))]), items, strict=True):
        first = next(iter(item.texts.values()))
        assert row["prompt"] == list(first.messages)
        assert row["env_class"] == "ours"
        assert row["env_extras"]["reward_spec"] == {"method": "rule", "ground_truth": '{"kind": "command"}'}
        assert row["env_extras"]["extra_info"]["task_id"] == item.task_id
    return len(data)


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        world = world_in(Path(name) / "model")
        items = [conversation(world, f"s{index}", think=True, cut=index == 1) for index in range(3)]
        rows = [tokens(Path(name), items, container) for container in ("jsonl", "parquet")]
        count = prompts(Path(name), items, world)
    sys.stdout.write(f"{rows[0]} rows of JSONL and {rows[1]} of Parquet with our ids and masks; {count} prompts\n")


if __name__ == "__main__":
    main()
