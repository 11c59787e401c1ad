"""The trainer's update step beside TRL's, on the same rows, with all weights and with adapters.

Both: weights and AdamW in float32, activations in bfloat16 on a card, forward, loss, backward, clip and optimiser step,
after one step to warm up. Ours packs the rows and computes shared trunks once; TRL's `GRPOTrainer` gets a row at a
time, so that it pads nothing. tokens/s counts the tokens of the rows, for both; MFU only what is computed. What does
not fit in memory is measured with gradient checkpointing (`recompute`).
"""

from __future__ import annotations

import gc
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from rolltap.trainer_client.data.collate import collate
from rolltap.trainer_client.data.packing import Pack, PackedRow, Packer
from rolltap.trainer_client.model.learner import Learner, checkpoint_activations
from rolltap.trainer_client.model.loss import PolicyLoss
from rolltap.trainer_client.model.ranks import Ranks
from rolltap.trainer_client.model.routing import Mixture
from rolltap.trainer_client.settings import load_trainer_settings

from .shapes import Shape, Sizes

PEAK_BF16 = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12, "4090": 165e12}
"""Dense bfloat16 FLOP/s by a word of the device's name (the vendor's data sheets)."""

STATE_BYTES = 16
"""Of weights, gradient and AdamW's moments in float32, a weight."""


@dataclass(frozen=True)
class Result:
    """`computed` are the step's tokens after sharing, of `tokens` in its rows. `mfu` is None where the device's peak is
    not known; `failure` says why there are no figures."""

    model: str
    trainer: str
    tokens: int = 0
    computed: int = 0
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


def ours(folder: Path, packs: Sequence[Pack], device: torch.device, lora_rank: int, checkpointing: bool) -> Step:
    settings = load_trainer_settings(
        key="none", policy="bench", model=folder, out=folder, lora={"rank": lora_rank},
        compute={"device": device.type, "gradient_checkpointing": checkpointing},
    )  # fmt: skip
    learner = Learner(folder, settings, Ranks.of_environment(device.type))
    loss = PolicyLoss()
    batches = [collate(pack).to(device) for pack in packs]
    done = 0

    def step() -> None:
        nonlocal done
        for batch in batches:
            learner.backward(loss(learner.predict(batch), batch).loss)
        learner.clip()
        done += 1
        learner.apply(done)

    return step


def trl(folder: Path, rows: Sequence[PackedRow], device: torch.device, lora_rank: int, checkpointing: bool) -> Step:
    from datasets import Dataset
    from peft import LoraConfig
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast
    from trl.trainer.grpo_config import GRPOConfig
    from trl.trainer.grpo_trainer import GRPOTrainer

    words = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel({"a": 0, "b": 1}, unk_token="a")), pad_token="a", eos_token="b"
    )
    cuda = device.type == "cuda"
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=GRPOConfig(
            output_dir=str(folder / "trl"), per_device_train_batch_size=len(rows), num_generations=len(rows),
            max_completion_length=max(map(len, rows)), beta=0.0, loss_type="dapo", bf16=cuda, use_cpu=not cuda,
            report_to=[],
        ),
        train_dataset=Dataset.from_dict({"prompt": ["a"] * len(rows)}),
        processing_class=words,
        peft_config=LoraConfig(r=lora_rank, target_modules="all-linear") if lora_rank else None,
    )  # fmt: skip
    trainer.current_gradient_accumulation_steps = 1
    model: Any = trainer.model
    model.train()
    if checkpointing:  # as `train()` does, which is not called
        model.enable_input_require_grads()
        checkpoint_activations(model, Mixture(model))
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    optimiser = torch.optim.AdamW(trained, lr=1e-6)
    total = sum(int(row.segment.loss_mask.sum()) for row in rows)
    batches = [_inputs(row, total, device) for row in rows]

    def step() -> None:
        for batch in batches:
            with torch.autocast(device.type, torch.bfloat16, enabled=cuda):
                loss = trainer._compute_loss(model, batch)
            loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)

    return step


def _inputs(row: PackedRow, total: int, device: torch.device) -> dict[str, Any]:
    """TRL's batch of one row; what its tools said is in the completion, masked."""
    segment = row.segment
    prompt = int(np.flatnonzero(segment.loss_mask)[0])
    ids = torch.from_numpy(segment.token_ids.astype(np.int64)).to(device)[None]
    return {
        "prompt_ids": ids[:, :prompt],
        "prompt_mask": torch.ones_like(ids[:, :prompt]),
        "completion_ids": ids[:, prompt:],
        "completion_mask": torch.from_numpy(segment.loss_mask[prompt:].astype(np.int64)).to(device)[None],
        "old_per_token_logps": torch.from_numpy(segment.logprobs[prompt:]).to(device)[None],
        "advantages": torch.from_numpy(row.advantages[:1]).to(device),
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


@dataclass(frozen=True)
class Measured:
    """One row of the table to be: `flops` and `computed` of a step of `tokens` row tokens; `state` bytes of memory that
    it needs at least."""

    model: str
    trainer: str
    make: Make
    flops: float
    tokens: int
    computed: int
    state: float

    def result(self, device: torch.device, seconds: float) -> Result:
        """What does not fit is tried again with gradient checkpointing; an error is in the result."""
        failure = ""
        for checkpointing in (False, True):
            if not checkpointing and device.type == "cuda" and self.state > 0.6 * _memory(device):
                continue
            try:
                return self._timed(device, seconds, checkpointing)
            except torch.OutOfMemoryError as error:
                failure = f"out of memory: {str(error).splitlines()[0]}"
            except Exception as error:  # noqa: BLE001  the other rows are worth having
                traceback.print_exc()
                failure = f"{type(error).__name__}: {error}"
                break
            finally:
                Ranks.of_environment(device.type).leave()
                gc.collect()
                if torch.cuda.is_available():
                    torch.cuda.empty_cache()
        return Result(self.model, self.trainer, checkpointing=checkpointing, failure=failure)

    def _timed(self, device: torch.device, seconds: float, checkpointing: bool) -> Result:
        cuda = device.type == "cuda"
        if cuda:
            torch.cuda.reset_peak_memory_stats(device)
        took, steps = timed(self.make(checkpointing), device, seconds)
        label = torch.cuda.get_device_name(device) if cuda else ""
        peak = next((value for word, value in PEAK_BF16.items() if word in label), None)
        return Result(
            self.model,
            self.trainer,
            tokens=self.tokens,
            computed=self.computed,
            tokens_per_s=self.tokens / took,
            tflops=self.flops / took / 1e12,
            mfu=self.flops / took / peak if peak else None,
            memory_gb=torch.cuda.max_memory_allocated(device) / 1e9 if cuda else None,
            steps=steps,
            checkpointing=checkpointing,
        )


def _memory(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).total_memory


def compare(sizes: Sizes, device: torch.device, seconds: float) -> Iterator[Result]:
    """A row for each model, kind of weights and trainer, within `seconds`: what does not begin in time says so.

    Half of a row's share is for the model, the step that warms up and a second try.
    """
    deadline, left = time.monotonic() + seconds, 4 * len(sizes.update)
    for shape in sizes.update:
        with tempfile.TemporaryDirectory() as name:
            folder = shape.folder(Path(name), device)
            for measured in rows_of(sizes, shape, folder, device):
                remaining = deadline - time.monotonic()
                if remaining > 0:
                    yield measured.result(device, remaining / left / 2)
                else:
                    yield Result(measured.model, measured.trainer, failure="no time was left")
                left -= 1


def rows_of(sizes: Sizes, shape: Shape, folder: Path, device: torch.device) -> Iterator[Measured]:
    rows = sizes.rollouts.rows(shape.vocabulary)
    tokens = sum(map(len, rows))
    shared = Packer(sizes.token_budget, share=True)(rows)
    alone = Packer(sizes.token_budget, alone=True)(rows)
    for rank in (0, sizes.lora_rank):
        kind = f", LoRA {rank}" if rank else ""
        state = (4 if rank else STATE_BYTES) * (shape.weights + shape.vocabulary * shape.hidden)
        for trainer, packs, make in (
            ("rolltap", shared, partial(ours, folder, shared, device, rank)),
            ("trl", alone, partial(trl, folder, rows, device, rank)),
        ):
            flops, computed = shape.flops(packs, adapters=rank > 0), sum(map(len, packs))
            yield Measured(shape.name, trainer + kind, make, flops, tokens, computed, state)
