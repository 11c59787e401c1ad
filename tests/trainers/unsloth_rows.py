"""Run in an environment with Unsloth, on a CPU: what its SFT trains of `--for unsloth`, with the worst arguments.

Qwen3's template writes a newline after each turn, which is trained with the reply.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import unsloth  # type: ignore[import-not-found]  # noqa: F401  # before TRL, which it changes
from datasets import load_dataset
from transformers import Qwen3Config, Qwen3ForCausalLM
from trl.trainer.sft_config import SFTConfig
from trl.trainer.sft_trainer import SFTTrainer

from rolltap.reconstructor.exporters.consumers import layout

from .dataset_world import conversation, exported, runs, sampled, world_in
from .datasets_releases import worst_items


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        world = world_in(Path(name) / "qwen3")
        items = [conversation(world, f"s{i}", think=True, cut=i == 3) for i in range(4)] + worst_items(world)
        format, options, _ = layout("", "unsloth", {})
        manifest = exported(Path(name) / "out", format, items, None, **options)
        files = [str(Path(name) / "out" / file["path"]) for file in manifest["files"]]
        rows = load_dataset("json", data_files=files, split="train", cache_dir=f"{name}/cache")
        size: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "head_dim": 16}
        heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
        ends = {"eos_token_id": world.tokenizer.eos_token_id, "pad_token_id": world.tokenizer.pad_token_id}
        Qwen3ForCausalLM(Qwen3Config(vocab_size=len(world.tokenizer), **size, **heads, **ends)).save_pretrained(
            f"{name}/model"
        )
        plain: dict[str, Any] = {
            "max_length": None,
            "max_steps": 1,
            "report_to": "none",
            "bf16": False,
            "use_cpu": True,
        }
        arguments = SFTConfig(f"{name}/out", per_device_train_batch_size=4, **plain)
        model = Qwen3ForCausalLM.from_pretrained(f"{name}/model")
        trainer: Any = SFTTrainer(model, arguments, train_dataset=rows, processing_class=world.tokenizer)
        found: list[list[int]] = []
        for batch in trainer.get_train_dataloader():
            for labels in batch["labels"].tolist():
                found += runs(labels, [label != -100 for label in labels])
        assert sorted(found) == [[*reply, *world.ids("\n")] for reply in sampled(items)]
        trainer.train()
    sys.stdout.write(f"\n{len(rows)} replies carry loss on the sampled tokens; a step\n")


if __name__ == "__main__":
    main()
