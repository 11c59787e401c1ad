"""What computing shared beginnings once saves: `python -m tests.bench.bench_prefixes`. Writes its report as JSON.

Groups of 8 rollouts of one prompt and 256 sampled tokens each, and rollouts of four branches that leave a common trunk
of calls, through forward and backward passes of a small model on one thread. Counted is CPU time, the best of three,
which other work on the machine changes little. That the gradients are equal is tested in
`tests/unit/trainer_client/test_gradients.py`.
"""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, Qwen3Config

from rolltap import __version__
from rolltap.trainer_client.data.collate import Batch, collate
from rolltap.trainer_client.data.packing import PackedRow, Packer
from rolltap.trainer_client.model import attention
from rolltap.trainer_client.model.loss import PolicyLoss
from rolltap.trainer_client.model.network import PolicyNetwork
from rolltap.types import NO_VERSION, Segment

REPORT = Path("reports") / "bench_prefixes.json"
VOCABULARY = 512
SAMPLED = 256
BUDGET = 16_384


@dataclass(frozen=True)
class Result:
    """`tokens` are computed in one step, `cpu_s` is what its forward and backward passes take."""

    rollouts: str
    plain_tokens: int
    shared_tokens: int
    plain_cpu_s: float
    shared_cpu_s: float


def policy() -> PolicyNetwork:
    torch.manual_seed(0)
    attention.register()
    config = Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=128, intermediate_size=384, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=8192,
    )  # fmt: skip
    return PolicyNetwork(AutoModelForCausalLM.from_config(config, attn_implementation=attention.NAME))


def row(rng: np.random.Generator, prefix: np.ndarray) -> Segment:
    """`prefix` as prompt, then `SAMPLED` trained tokens."""
    ids = np.concatenate([prefix, rng.integers(0, VOCABULARY, SAMPLED)]).astype(np.int32)
    mask = np.arange(len(ids)) >= len(prefix)
    logprobs = np.where(mask, -np.log(VOCABULARY), 0).astype(np.float32)
    return Segment(ids, mask, logprobs, np.where(mask, 0, NO_VERSION).astype(np.int32), ())


def group(rng: np.random.Generator, prompt: int) -> list[list[Segment]]:
    """Eight rollouts of one prompt."""
    prefix = rng.integers(0, VOCABULARY, prompt)
    return [[row(rng, prefix)] for _ in range(8)]


def branches(rng: np.random.Generator) -> list[list[Segment]]:
    """Two rollouts of four rows, each of which goes on from a later point of the first one's tokens."""
    rollouts = []
    for _ in range(2):
        trunk = rng.integers(0, VOCABULARY, 2048)
        rollouts.append([row(rng, trunk[:end]) for end in (1280, 1536, 1792, 2048)])
    return rollouts


def batches(rollouts: Sequence[Sequence[Segment]], *, share: bool) -> list[Batch]:
    tokens = sum(SAMPLED for rows in rollouts for _ in rows)
    trained = [
        PackedRow.uniform(row, index, 0, (-1.0) ** index, 1 / tokens)
        for index, rows in enumerate(rollouts)
        for row in rows
    ]
    return [collate(pack) for pack in Packer(BUDGET, share=share)(trained)]


def cpu_seconds(network: PolicyNetwork, step: Sequence[Batch]) -> float:
    loss, best = PolicyLoss(), float("inf")
    for _ in range(3):
        started = time.process_time()
        for batch in step:
            loss(network(batch), batch).loss.backward()
        best = min(best, time.process_time() - started)
        network.zero_grad()
    return best


def compare(name: str, rollouts: Sequence[Sequence[Segment]]) -> Result:
    network = policy()
    plain, shared = (batches(rollouts, share=share) for share in (False, True))
    return Result(
        name,
        sum(batch.tokens for batch in plain),
        sum(batch.tokens for batch in shared),
        cpu_seconds(network, plain),
        cpu_seconds(network, shared),
    )


def main() -> None:
    torch.set_num_threads(1)
    rng = np.random.default_rng(0)
    results = [compare(f"8 of one prompt of {prompt:,}", group(rng, prompt)) for prompt in (256, 1024, 4096)]
    results.append(compare("2 of 4 branches", branches(rng)))
    table = Table("rollouts", "tokens, plain", "shared", "CPU s, plain", "shared", "times faster")
    for one in results:
        times = one.plain_cpu_s / one.shared_cpu_s
        cells = (f"{one.plain_tokens:,}", f"{one.shared_tokens:,}", f"{one.plain_cpu_s:.2f}", f"{one.shared_cpu_s:.2f}")
        table.add_row(one.rollouts, *cells, f"{times:.1f}")
    Console().print(table)
    REPORT.parent.mkdir(exist_ok=True)
    about = {"version": __version__, "python": platform.python_version(), "cores": os.cpu_count(), "time": time.time()}
    REPORT.write_text(json.dumps({"results": [asdict(one) for one in results], **about}, indent=2))


if __name__ == "__main__":
    main()
