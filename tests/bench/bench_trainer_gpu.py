"""The update step beside TRL's: `python -m tests.bench.bench_trainer_gpu`. Writes reports/bench_trainer_gpu.json.

Random models of Qwen3's shape, the same rollouts for both: ours packs them into 8k passes, TRL's `GRPOTrainer` gets a
row a rollout (`--trl-rows` at once, so that with 1 it pads nothing). Both: weights and AdamW in float32, activations in
bfloat16, forward, loss, backward, clip and optimiser step, after one step to warm up. Activations are kept; what does
not fit in memory so is measured with gradient checkpointing (`recompute`). Runs unattended, within
`--minutes`; what can't be measured has its error in the table, and the report is written after every row. Without a GPU
it measures a tiny model in float32, which shows only that it works.

Model FLOPs a step: 6 a weight and token (the output layer only where a token is trained), and 6 * layers * heads *
head width * length^2 a row for causal attention. Recomputation is not counted.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, Qwen3Config

from rolltap import __version__
from rolltap.trainer_client.data.collate import collate
from rolltap.trainer_client.data.packing import PackedRow, Packer
from rolltap.trainer_client.model.learner import Learner, checkpoint_activations
from rolltap.trainer_client.model.loss import PolicyLoss
from rolltap.trainer_client.model.ranks import Ranks
from rolltap.trainer_client.model.routing import Mixture
from rolltap.trainer_client.settings import load_trainer_settings
from rolltap.types import NO_VERSION, Segment

REPORT = Path("reports") / "bench_trainer_gpu.json"
PEAK_BF16 = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12, "4090": 165e12}
"""Dense bfloat16 FLOP/s by a word of the device's name (the vendor's data sheets)."""

GOALS = {"times_trl": 1.3, "mfu_4b": 0.4}


@dataclass(frozen=True)
class Shape:
    """A model and its rollouts: `rollouts` of up to `longest` tokens, the first eighth of it their prompt."""

    name: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_width: int
    inner: int
    vocabulary: int
    rollouts: int
    longest: int

    def config(self) -> Qwen3Config:
        return Qwen3Config(
            hidden_size=self.hidden,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            head_dim=self.head_width,
            intermediate_size=self.inner,
            vocab_size=self.vocabulary,
            max_position_embeddings=2 * self.longest,
            tie_word_embeddings=True,
        )

    def flops(self, rows: Sequence[Segment]) -> float:
        """Of one step's forward and backward passes."""
        attention = self.hidden * self.head_width * (2 * self.heads + 2 * self.kv_heads)
        layer = attention + 3 * self.hidden * self.inner
        tokens, trained = sum(map(len, rows)), sum(int(row.loss_mask.sum()) for row in rows)
        squares = sum(len(row) ** 2 for row in rows)
        return (
            6 * self.layers * layer * tokens
            + 6 * self.hidden * self.vocabulary * trained
            + 6 * self.layers * self.heads * self.head_width * squares
        )


GPU = (
    Shape("0.5B", 1024, 24, 16, 8, 128, 3072, 151_936, 16, 8192),
    Shape("4B", 2560, 36, 32, 8, 128, 9728, 151_936, 8, 8192),
)
CPU = (Shape("tiny", 64, 2, 4, 2, 16, 128, 512, 8, 128),)


@dataclass(frozen=True)
class Result:
    """`mfu` is None where the device's peak is not known; `failure` says why there are no figures."""

    model: str
    trainer: str
    tokens_per_s: float | None = None
    tflops: float | None = None
    mfu: float | None = None
    memory_gb: float | None = None
    steps: int = 0
    checkpointing: bool = False
    failure: str = ""


Step = Callable[[], None]
Make = Callable[[bool], Step]
"""With or without gradient checkpointing."""


def rollouts_of(shape: Shape) -> list[Segment]:
    """Lengths from half the longest to all of it."""
    rng = np.random.default_rng(0)
    prompt = shape.longest // 8
    rows = []
    for length in rng.integers(shape.longest // 2, shape.longest + 1, shape.rollouts):
        mask = np.arange(length) >= prompt
        rows.append(
            Segment(
                rng.integers(0, shape.vocabulary, length).astype(np.int32),
                mask,
                np.where(mask, -np.log(shape.vocabulary), 0).astype(np.float32),
                np.where(mask, 0, NO_VERSION).astype(np.int32),
                (),
            )
        )
    return rows


def ours(shape: Shape, folder: Path, rows: Sequence[Segment], device: torch.device, checkpointing: bool) -> Step:
    settings = load_trainer_settings(
        key="none", policy="bench", model=folder, out=folder,
        compute={"device": str(device), "gradient_checkpointing": checkpointing, "share_prefixes": False},
    )  # fmt: skip
    learner = Learner(folder, settings, Ranks.of_environment(str(device)))
    loss = PolicyLoss()
    total = sum(int(row.loss_mask.sum()) for row in rows)
    scored = [PackedRow.uniform(row, index, index, (-1.0) ** index, 1 / total) for index, row in enumerate(rows)]
    batches = [collate(pack).to(device) for pack in Packer(shape.longest)(scored)]
    done = 0

    def step() -> None:
        nonlocal done
        for batch in batches:
            learner.backward(loss(learner.predict(batch), batch).loss)
        learner.clip()
        done += 1
        learner.apply(done)

    return step


def trl(
    shape: Shape, folder: Path, rows: Sequence[Segment], device: torch.device, at_once: int, checkpointing: bool
) -> Step:
    from datasets import Dataset
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast
    from trl.trainer.grpo_config import GRPOConfig
    from trl.trainer.grpo_trainer import GRPOTrainer

    words = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel({"a": 0, "b": 1}, unk_token="a")), pad_token="a", eos_token="b"
    )
    cuda = device.type == "cuda"
    prompt = shape.longest // 8
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=GRPOConfig(
            output_dir=str(folder / "trl"), per_device_train_batch_size=shape.rollouts, num_generations=shape.rollouts,
            max_completion_length=shape.longest - prompt, beta=0.0, loss_type="dapo", bf16=cuda, use_cpu=not cuda,
            report_to=[],
        ),
        train_dataset=Dataset.from_dict({"prompt": ["a"] * shape.rollouts}),
        processing_class=words,
    )  # fmt: skip
    trainer.current_gradient_accumulation_steps = 1
    model: Any = trainer.model
    model.train()
    if checkpointing:  # as `train()` does, which is not called
        checkpoint_activations(model, Mixture(model))
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-6)
    total = sum(int(row.loss_mask.sum()) for row in rows)
    batches = [_padded(rows[at : at + at_once], prompt, at, total, device) for at in range(0, len(rows), at_once)]

    def step() -> None:
        for batch in batches:
            with torch.autocast(device.type, torch.bfloat16, enabled=cuda):
                loss = trainer._compute_loss(model, batch)
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)

    return step


def _padded(rows: Sequence[Segment], prompt: int, first: int, total: int, device: torch.device) -> dict[str, Any]:
    longest = max(map(len, rows)) - prompt

    def padded(arrays: Sequence[np.ndarray], dtype: Any) -> torch.Tensor:
        return torch.from_numpy(np.stack([np.pad(one, (0, longest - len(one))) for one in arrays]).astype(dtype)).to(
            device
        )

    signs = [(-1.0) ** (first + index) for index in range(len(rows))]
    return {
        "prompt_ids": torch.from_numpy(np.stack([row.token_ids[:prompt] for row in rows]).astype(np.int64)).to(device),
        "prompt_mask": torch.ones(len(rows), prompt, dtype=torch.int64, device=device),
        "completion_ids": padded([row.token_ids[prompt:] for row in rows], np.int64),
        "completion_mask": padded([row.loss_mask[prompt:] for row in rows], np.int64),
        "old_per_token_logps": padded([row.logprobs[prompt:] for row in rows], np.float32),
        "advantages": torch.tensor(signs, device=device),
        "num_items_in_batch": torch.tensor(float(total), device=device),
    }


def timed(step: Step, device: torch.device, seconds: float) -> tuple[float, int]:
    """Seconds a step, and how many were measured: as many as begin within `seconds`, at least one."""

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    step()
    wait()
    started, steps = time.perf_counter(), 0
    while steps == 0 or time.perf_counter() - started < seconds:
        step()
        wait()
        steps += 1
    return (time.perf_counter() - started) / steps, steps


def measure(shape: Shape, name: str, make: Make, rows: Sequence[Segment], seconds: float) -> Result:
    """One row of the table. What does not fit is tried again with gradient checkpointing; an error is its last cell."""
    for checkpointing in (False, True):
        try:
            return _measured(shape, name, make, rows, seconds, checkpointing)
        except torch.OutOfMemoryError as error:
            failure = f"out of memory: {str(error).splitlines()[0]}"
        except Exception as error:  # noqa: BLE001  the other rows are worth having
            traceback.print_exc()
            return Result(shape.name, name, checkpointing=checkpointing, failure=f"{type(error).__name__}: {error}")
        finally:
            Ranks.of_environment(str(_device())).leave()
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
    return Result(shape.name, name, checkpointing=True, failure=failure)


def _measured(
    shape: Shape, name: str, make: Make, rows: Sequence[Segment], seconds: float, checkpointing: bool
) -> Result:
    device = _device()
    cuda = device.type == "cuda"
    if cuda:
        torch.cuda.reset_peak_memory_stats(device)
    took, steps = timed(make(checkpointing), device, seconds)
    speed = shape.flops(rows) / took
    label = torch.cuda.get_device_name(device) if cuda else ""
    peak = next((value for word, value in PEAK_BF16.items() if word in label), None)
    return Result(
        shape.name,
        name,
        tokens_per_s=sum(map(len, rows)) / took,
        tflops=speed / 1e12,
        mfu=speed / peak if peak else None,
        memory_gb=torch.cuda.max_memory_allocated(device) / 1e9 if cuda else None,
        steps=steps,
        checkpointing=checkpointing,
    )


def _device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def compare(shapes: Sequence[Shape], minutes: float, trl_rows: int) -> Iterator[Result]:
    """A row for each model and trainer. Half the time is for making models, the steps to warm up and second tries."""
    deadline = time.monotonic() + 60 * minutes
    device, left = _device(), 2 * len(shapes)
    for shape in shapes:
        rows = rollouts_of(shape)
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            torch.manual_seed(0)
            with device:
                model = AutoModelForCausalLM.from_config(shape.config(), dtype=torch.bfloat16)
            model.save_pretrained(folder)
            del model
            makes = {
                "rolltap": partial(ours, shape, folder, rows, device),
                "trl": partial(trl, shape, folder, rows, device, trl_rows),
            }
            for trainer, make in makes.items():
                yield measure(shape, trainer, make, rows, (deadline - time.monotonic()) / left / 2)
                left -= 1


def shown(results: Sequence[Result], device: str) -> Table:
    columns = ("model", "trainer", "tokens/s", "TFLOP/s", "MFU", "peak GB", "steps", "recompute", "")
    table = Table(*columns, title=f"update step, {device}")
    for one in results:
        numbers = (one.tokens_per_s, one.tflops, one.mfu, one.memory_gb)
        formats = ("{:,.0f}", "{:.2f}", "{:.1%}", "{:.1f}")
        cells = [text.format(value) if value is not None else "-" for text, value in zip(formats, numbers, strict=True)]
        table.add_row(one.model, one.trainer, *cells, str(one.steps), "yes" if one.checkpointing else "no", one.failure)
    return table


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--trl-rows", type=int, default=1)
    parser.add_argument("--report", type=Path, default=REPORT)
    options = parser.parse_args(arguments)
    cuda = _device().type == "cuda"
    name = torch.cuda.get_device_name() if cuda else "CPU: a tiny model, no figure of worth"
    about = {
        "device": name, "goals": GOALS, "version": __version__, "torch": torch.__version__, "cores": os.cpu_count(),
        "python": platform.python_version(), "time": time.time(),
    }  # fmt: skip
    options.report.parent.mkdir(exist_ok=True)
    results: list[Result] = []
    for result in compare(GPU if cuda else CPU, options.minutes, options.trl_rows):
        results.append(result)
        options.report.write_text(json.dumps({"results": [asdict(one) for one in results], **about}, indent=2))
    Console().print(shown(results, name))


if __name__ == "__main__":
    main()
