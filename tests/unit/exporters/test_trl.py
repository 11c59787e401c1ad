"""TRL's own trainers take a few steps on what we export, and train on the tokens that were sampled."""

from __future__ import annotations

import importlib
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import load_dataset
from transformers import Qwen3Config, Qwen3ForCausalLM

from rolltap.reconstructor.exporters import exporter_named
from rolltap.reconstructor.exporters.base import ExportItem
from rolltap.reconstructor.exporters.dataset import DatasetWriter, Query

from .world import World

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning")

STEPS = 2


@pytest.fixture(scope="module")
def items(world: World) -> list[ExportItem]:
    """Two groups of four."""
    return [
        world.solved(f"s{i}", f"answer {i}", path=f"{i}.txt").item(
            reward=i % 4 / 4, task=f"t{i // 4}", group=f"g{i // 4}"
        )
        for i in range(8)
    ]


@pytest.fixture(scope="module")
def trl() -> Any:
    return importlib.import_module("trl")


@pytest.fixture
def model(world: World, tmp_path: Path) -> Any:
    """A random one of the Qwen3 architecture, from a folder as trainers like it."""
    torch.manual_seed(0)
    size: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads: dict[str, Any] = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
    ends = {"eos_token_id": world.tokenizer.eos_token_id, "pad_token_id": world.tokenizer.pad_token_id}
    config = Qwen3Config(vocab_size=len(world.tokenizer), **size, **heads, **ends)
    Qwen3ForCausalLM(config).save_pretrained(tmp_path / "model")
    return Qwen3ForCausalLM.from_pretrained(tmp_path / "model")


def exported(folder: Path, format: str, items: list[ExportItem]) -> Any:
    with DatasetWriter(folder / "out", exporter_named(format), Query()) as writer:
        for group in (items[:4], items[4:]):
            writer.add(group)
        manifest = writer.finish()
    kind = "parquet" if manifest["container"] == "parquet" else "json"
    files = [str(folder / "out" / file["path"]) for file in manifest["files"]]
    return load_dataset(kind, data_files=files, split="train", cache_dir=str(folder / "cache"))


def settings(folder: Path) -> dict[str, Any]:
    return {
        "output_dir": str(folder / "trainer"),
        "max_steps": STEPS,
        "per_device_train_batch_size": 2,
        "report_to": "none",
        "use_cpu": True,
        "bf16": False,
        "save_strategy": "no",
        "logging_steps": 1,
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        "gradient_checkpointing": False,
        "max_length": None,
    }


def losses(trainer: Any) -> list[float]:
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def test_sft_on_labelled_tokens_trains_the_sampled_tokens_and_no_other(
    items: list[ExportItem], world: World, model: Any, trl: Any, tmp_path: Path
):
    data = exported(tmp_path, "sft-tokens", items)
    args = trl.SFTConfig(**settings(tmp_path), dataset_kwargs={"skip_prepare_dataset": True})
    trainer = trl.SFTTrainer(model=model, args=args, train_dataset=data, processing_class=world.tokenizer)
    trained: list[list[int]] = []
    for batch in trainer.get_train_dataloader():
        for labels, ids in zip(batch["labels"].tolist(), batch["input_ids"].tolist(), strict=True):
            assert all(label in (-100, token) for label, token in zip(labels, ids, strict=True))
            trained.append([label for label in labels if label != -100])
    sampled = [[token for call in item.calls.values() for token in call.output_ids.tolist()] for item in items]
    assert sorted(trained) == sorted(sampled)
    assert all(math.isfinite(loss) for loss in losses(trainer))
    assert trainer.state.global_step == STEPS


def test_sft_on_messages(items: list[ExportItem], world: World, model: Any, trl: Any, tmp_path: Path):
    data = exported(tmp_path, "sft", items)
    trainer = trl.SFTTrainer(
        model=model, args=trl.SFTConfig(**settings(tmp_path)), train_dataset=data, processing_class=world.tokenizer
    )
    rendered = {tuple(row["input_ids"]) for row in trainer.train_dataset}
    for item in items:
        (segment,) = item.rows
        ids = segment.token_ids.tolist()
        assert any(list(row[: len(ids)]) == ids for row in rendered)
    assert all(math.isfinite(loss) for loss in losses(trainer))


def covers_the_record(batch: Any, items: list[ExportItem]) -> int:
    """Whether each row is a recorded conversation whose loss begins with the first sampled token; how many are.

    TRL's loss covers the whole completion, tools' answers too: every token of the record's mask, and those between.
    """
    recorded = [item.rows[0] for item in items]
    count = 0
    for ids, mask in zip(batch["input_ids"].tolist(), batch["completion_mask"].tolist(), strict=True):
        segment = next(found for found in recorded if ids[: len(found)] == found.token_ids.tolist())
        assert mask[: segment.prompt_length] == [0] * segment.prompt_length
        assert mask[segment.prompt_length : len(segment)] == [1] * (len(segment) - segment.prompt_length)
        assert all(on for on, sampled in zip(mask, segment.loss_mask.tolist(), strict=False) if sampled)
        count += 1
    return count


def test_dpo_on_pairs(items: list[ExportItem], world: World, model: Any, trl: Any, tmp_path: Path):
    data = exported(tmp_path, "preference", items)
    assert len(data) == 4
    trainer = trl.DPOTrainer(
        model=model, args=trl.DPOConfig(**settings(tmp_path)), train_dataset=data, processing_class=world.tokenizer
    )
    assert sum(covers_the_record(batch, items) for batch in trainer.get_train_dataloader()) == 8
    first = losses(trainer)[0]
    assert first == pytest.approx(math.log(2), abs=1e-3)


def test_kto_on_labels(items: list[ExportItem], world: World, model: Any, trl: Any, tmp_path: Path):
    data = exported(tmp_path, "kto", items)
    assert {row["label"] for row in data} == {True, False}
    trainer = trl.KTOTrainer(
        model=model, args=trl.KTOConfig(**settings(tmp_path)), train_dataset=data, processing_class=world.tokenizer
    )
    batches = list(trainer.get_train_dataloader())
    assert sum(covers_the_record(batch, items) for batch in batches) == 8
    assert all(math.isfinite(loss) for loss in losses(trainer))
