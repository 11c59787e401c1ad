"""Run in an environment with verl: what its SFT trainer trains of our files, token by token."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

from ..unit.continuation.making import trl_template
from .dataset_world import conversation, exported, runs, sampled, world_in
from .datasets_releases import worst_items


def dataset(files: list[str], tokenizer: Any, **settings: Any) -> Any:
    """The dataset that verl's SFT trainer makes of files."""
    from omegaconf import OmegaConf  # type: ignore[import-not-found]
    from verl.trainer.sft_trainer import create_sft_dataset  # type: ignore[import-not-found]

    own = {"path": None, "name": None}
    config = OmegaConf.create({"max_length": 4096, "pad_mode": "no_padding", "custom_cls": own, **settings})
    return create_sft_dataset(files, config, tokenizer, None)


def ours(name: str) -> dict[str, str]:
    return {"path": "pkg://rolltap.trainer_client.adapters.verl_sft", "name": name}


def trained(rows: Any) -> list[list[int]]:
    """The stretches that carry loss, of every row."""
    return [run for row in rows for run in runs(row["input_ids"].tolist(), row["loss_mask"].tolist())]


def files_of(out: Path, manifest: dict[str, Any]) -> list[str]:
    return [str(out / file["path"]) for file in manifest["files"]]


def sampled_tokens(folder: Path) -> int:
    """`sft-tokens` by our dataset: exactly what the record trains, also around a reply that was cut off."""
    world = world_in(folder / "qwen3")
    items = [conversation(world, f"s{i}", think=True, cut=i % 2 > 0) for i in range(4)]
    manifest = exported(folder / "tokens", "sft-tokens", items)
    own = ours("SampledTokensDataset")
    for mode in ("no_padding", "right"):
        rows = dataset(files_of(folder / "tokens", manifest), world.tokenizer, custom_cls=own, pad_mode=mode)
        assert sorted(trained(rows)) == sampled(items), mode
        assert {len(row["input_ids"]) for row in rows} == {4096} or mode == "no_padding"
    batch = collated(rows)
    assert batch["loss_mask"].sum() == sum(map(len, sampled(items)))
    return len(rows)


def collated(rows: Any) -> Any:
    from verl.utils.dataset.dataset_utils import SFTTensorCollator  # type: ignore[import-not-found]

    return SFTTensorCollator("right")([rows[index] for index in range(len(rows))])


def messages(folder: Path) -> int:
    """`sft` by verl's own rendering, message by message: the sampled replies and the template's newline."""
    world = world_in(folder / "qwen2_5", trl_template("qwen2_5"))
    plain = [conversation(world, f"s{i}", think=False, cut=i % 2 > 0) for i in range(4)]
    items = [*worst_items(world), *plain]
    out = folder / "messages"
    manifest = exported(out, "sft", items, container="parquet")
    rows = dataset(files_of(out, manifest), world.tokenizer, custom_cls=ours("RecordedMessagesDataset"))
    newline = world.ids("\n")
    assert sorted(trained(rows)) == [reply + newline for reply in sampled(items)]
    for row, item in zip(rows, items, strict=True):
        (segment,) = item.rows
        assert row["input_ids"].tolist() == segment.token_ids.tolist() + newline
    return len(rows)


def prompts(folder: Path) -> int:
    """`verl-rl` by verl's dataset of prompts."""
    from omegaconf import OmegaConf  # type: ignore[import-not-found]
    from verl.utils.dataset.rl_dataset import RLHFDataset  # type: ignore[import-not-found]

    world = world_in(folder / "prompts-model")
    items = [conversation(world, f"s{i}", think=True) for i in range(2)]
    manifest = exported(folder / "prompts", "verl-rl", items)
    config = OmegaConf.create(
        {"max_prompt_length": 4096, "cache_dir": str(folder / "cache"), "filter_overlong_prompts": False}
    )
    data = RLHFDataset(files_of(folder / "prompts", manifest), world.tokenizer, config)
    for row, item in zip(data, items, strict=True):
        (call, _) = item.texts.values()
        assert row["raw_prompt"] == list(call.messages)
        assert row["index"] == item.task_id
    return len(data)


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        count = sampled_tokens(Path(name)), messages(Path(name)), prompts(Path(name))
    trained = f"{count[0]} rows of sft-tokens and {count[1]} of sft carry loss on the sampled tokens"
    sys.stdout.write(f"{trained}; {count[2]} prompts\n")


if __name__ == "__main__":
    main()
