"""TRL's own trainers take a few steps on what we export, and train on the tokens that were sampled."""

from __future__ import annotations

import importlib
import math
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset, load_dataset
from transformers import Qwen3Config, Qwen3ForCausalLM

from rolltap.reconstructor.exporters import exporter_named
from rolltap.reconstructor.exporters.base import ExportItem
from rolltap.reconstructor.exporters.dataset import DatasetWriter, Query

from ...trainers.datasets_releases import worst_items
from .readers import PAGE
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


def exported(folder: Path, format: str, items: list[ExportItem], **options: str) -> Any:
    with DatasetWriter(folder / "out", exporter_named(format, options), Query()) as writer:
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


def test_sft_on_replies_trains_each_once_with_the_worst_arguments(
    items: list[ExportItem], world: World, model: Any, trl: Any, tmp_path: Path
):
    items = [*items, *worst_items(world)]
    data = exported(tmp_path, "sft", items, targets="split")
    args = trl.SFTConfig(**settings(tmp_path))
    trainer = trl.SFTTrainer(model=model, args=args, train_dataset=data, processing_class=world.tokenizer)
    batches = list(trainer.get_train_dataloader())
    trained = [[token for token in labels if token != -100] for b in batches for labels in b["labels"].tolist()]
    sampled = [call.output_ids.tolist() for item in items for call in item.calls.values()]
    newline = world.ids("\n")
    assert sorted(trained) == sorted(reply + newline for reply in sampled)
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


@pytest.mark.filterwarnings("ignore")  # of TRL about its own experiments
def test_grpo_replays_recorded_rollouts(items: list[ExportItem], world: World, model: Any, trl: Any, tmp_path: Path):
    """The program of docs/exports.md: a `rollout_func` that gives back the rows of each prompt's group."""
    (program,) = re.findall(r"```python\n([^`]*?rollout_func=replay.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    exported(tmp_path, "trl-grpo", items)
    _, _, functions = program.partition("rows = ")
    functions, _, _ = functions.partition("args = ")
    names: dict[str, Any] = {"load_dataset": load_dataset, "defaultdict": defaultdict}
    exec("rows = " + functions.replace("out/", f"{tmp_path}/out/"), names)
    chosen = {name: value for name, value in settings(tmp_path).items() if name != "max_length"}
    batch = {"per_device_train_batch_size": 8, "num_generations": 4, "max_completion_length": 4096}
    args = trl.GRPOConfig(**{**chosen, **batch, "beta": 0.0})
    groups = Dataset.from_dict({"prompt": list(names["rows"])})
    trainer = trl.GRPOTrainer(
        model, names["recorded"], args, groups, processing_class=world.tokenizer, rollout_func=names["replay"]
    )
    seen: list[tuple[list[int], list[int], float]] = []

    def loss(model: Any, inputs: Any) -> Any:
        for ids, mask, on, advantage in zip(
            inputs["completion_ids"], inputs["completion_mask"], inputs["tool_mask"], inputs["advantages"], strict=True
        ):
            whole = mask.bool()
            seen.append((ids[whole].tolist(), on[whole].tolist(), advantage.item()))
        return compute(model, inputs)

    compute, trainer._compute_loss = trainer._compute_loss, loss
    assert all(math.isfinite(loss) for loss in losses(trainer))
    recorded = []
    for item in items:
        start = item.rows[0].prompt_length
        recorded.append((item.rows[0].token_ids[start:].tolist(), item.rows[0].loss_mask[start:].tolist()))
    assert sorted((ids, mask) for ids, mask, _ in seen[:8]) == sorted(recorded)
    order = [recorded.index((ids, [bool(on) for on in mask])) for ids, mask, _ in seen[:8]]
    advantages = {index: advantage for index, (*_, advantage) in zip(order, seen[:8], strict=True)}
    assert [advantages[index] > 0 for index in range(8)] == [False, False, True, True] * 2
