"""Run in an environment with LLaMA-Factory: what it trains of our ShareGPT files, with the worst arguments, token by
token, and a step."""

from __future__ import annotations

import importlib.util
import json
import sys
import tempfile
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from rolltap.reconstructor.exporters.base import ExportItem

from ..unit.exporters.world import World
from .dataset_world import conversation, exported, runs, sampled, world_in
from .datasets_releases import worst_items

if importlib.util.find_spec("torchaudio") is None:  # imported for sounds, of which there are none here
    sys.modules["torchaudio"] = ModuleType("torchaudio")
    sys.modules["torchaudio"].__spec__ = ModuleSpec("torchaudio", None)

COLUMNS = {"messages": "conversations", "system": "system", "tools": "tools"}


def arguments(folder: Path, out: Path, manifest: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """LLaMA-Factory's settings for a file of ours."""
    (file,) = manifest["files"]
    info = {"ours": {"file_name": file["path"], "formatting": "sharegpt", "columns": COLUMNS}}
    (out / "dataset_info.json").write_text(json.dumps(info))
    return {
        "model_name_or_path": str(folder), "dataset": "ours", "dataset_dir": str(out), "template": "qwen3",
        "cutoff_len": 4096, "stage": "sft", "do_train": True, "finetuning_type": "full",
        "output_dir": f"{out}-trained", "overwrite_cache": True, "report_to": "none", "use_cpu": True,
        "save_strategy": "no", "max_steps": 1, "per_device_train_batch_size": 4, "logging_steps": 1, **changes,
    }  # fmt: skip


def labelled(world: World, settings: dict[str, Any]) -> list[list[int]]:
    """The stretches that carry loss, of every row of its data set."""
    from llamafactory.data import get_dataset, get_template_and_fix_tokenizer  # type: ignore[import-not-found]
    from llamafactory.hparams import get_train_args  # type: ignore[import-not-found]

    model_args, data_args, training_args, _, _ = get_train_args(dict(settings))
    template = get_template_and_fix_tokenizer(world.tokenizer, data_args)
    data = get_dataset(template, model_args, data_args, training_args, stage="sft", tokenizer=world.tokenizer)
    rows = list(data["train_dataset"])
    return [run for row in rows for run in runs(row["input_ids"], [label != -100 for label in row["labels"]])]


def model(world: World, folder: Path) -> None:
    """Random weights beside the tokenizer."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    size: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads: dict[str, Any] = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
    Qwen3ForCausalLM(Qwen3Config(vocab_size=len(world.tokenizer), **size, **heads)).save_pretrained(folder)


def step(settings: dict[str, Any]) -> float:
    """The loss of its own trainer's step."""
    from llamafactory.train.tuner import run_exp  # type: ignore[import-not-found]

    run_exp(settings)
    log = json.loads((Path(settings["output_dir"]) / "trainer_state.json").read_text())
    assert log["global_step"] == 1
    return float(log["log_history"][0]["loss"])


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        world = world_in(folder / "model")
        model(world, folder / "model")
        newline = world.ids("\n")
        plain = [conversation(world, f"s{i}", think=True, cut=i == 3) for i in range(4)]
        items: list[ExportItem] = [*worst_items(world), *plain]
        whole = exported(folder / "whole", "sharegpt", items)
        assert whole["skipped"] == {"a reply that may not be trained": 1}
        settings = arguments(folder / "model", folder / "whole", whole)
        assert sorted(labelled(world, settings)) == [reply + newline for reply in sampled(items[:-1])]
        split = exported(folder / "split", "sharegpt", items, targets="split")
        last_only = {"mask_history": True, "preserve_thinking": True}
        each = labelled(world, arguments(folder / "model", folder / "split", split, **last_only))
        assert sorted(each) == [reply + newline for reply in sampled(items)]
        loss = step(settings)
        assert 0 < loss < 20
    counts = SimpleNamespace(whole=whole["rows"], split=split["rows"])
    sys.stdout.write(
        f"{counts.whole} conversations and {counts.split} replies carry loss on the sampled tokens; a step\n"
    )


if __name__ == "__main__":
    main()
