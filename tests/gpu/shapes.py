"""Models with random weights of real shapes, and agents' rollouts for them: what a machine without a network can have.

Nothing is downloaded: a folder gets Qwen3's architecture, the demo's tokenizer, and weights drawn from a seed.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from rolltap.demo.learn import DemoRecipe
from rolltap.engine.tiny import FOLDER
from rolltap.trainer_client.data.packing import Pack, PackedRow
from rolltap.trainer_client.model.weights import COMPANIONS
from rolltap.types import NO_VERSION, Segment

SHARPER = 4.0
"""Factor of the last norm's weight. Without it random weights choose nearly uniformly (12 nats at 152k ids)."""


@dataclass(frozen=True)
class Shape:
    """Qwen3's architecture with `weights` numbers in matrices that every token passes; the embedding is tied."""

    name: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_width: int
    inner: int
    vocabulary: int
    longest: int

    def folder(self, path: Path, device: torch.device, seed: int = 0) -> Path:
        """Writes a Hugging Face folder in bfloat16."""
        torch.manual_seed(seed)
        config = Qwen3Config(
            hidden_size=self.hidden,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            head_dim=self.head_width,
            intermediate_size=self.inner,
            vocab_size=self.vocabulary,
            max_position_embeddings=self.longest,
            tie_word_embeddings=True,
            eos_token_id=0,
        )
        with device:
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        with torch.no_grad():
            model.model.norm.weight.mul_(SHARPER)
        model.save_pretrained(path)
        for name in COMPANIONS:
            if (FOLDER / name).exists() and name != "generation_config.json":
                shutil.copy(FOLDER / name, path / name)
        return path

    @property
    def weights(self) -> int:
        attention = self.hidden * self.head_width * (2 * self.heads + 2 * self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.inner)

    def flops(self, packs: Sequence[Pack], *, adapters: bool = False) -> float:
        """Of one step's forward and backward passes over the packs, without what is computed twice.

        Per token and weight 2 forward, 2 for the gradient of activations, 2 for that of weights, which `adapters` do
        not need (their own are left out: under 1%). The vocabulary's projection only where a token is predicted; 12 a
        head's width, head, layer and pair of a query and a key that it sees.
        """
        tokens = sum(map(len, packs))
        pairs = sum(
            len(span) * span.position + len(span) * (len(span) + 1) / 2 for pack in packs for span in pack.spans
        )
        predicting = sum(
            len(np.unique(np.concatenate([place[np.flatnonzero(row.segment.loss_mask) - 1] for row, place in rows])))
            for pack in packs
            for rows in [list(zip(pack.rows, pack.places, strict=True))]
        )
        each = 4 if adapters else 6
        return (
            each * (self.weights * tokens + self.hidden * self.vocabulary * predicting)
            + 12 * self.layers * self.heads * self.head_width * pairs
        )


@dataclass(frozen=True)
class Rollouts:
    """An agent's rollouts: `groups` tasks with `each` attempts of `turns` calls.

    A call samples about `sampled` tokens and gets `read` back from its tools. Every fourth rollout has a second row, of
    a branch that leaves it after half of its turns.
    """

    groups: int
    each: int
    prompt: int
    turns: int
    sampled: int
    read: int

    def segments(self, vocabulary: int, seed: int = 0) -> list[list[Segment]]:
        """The segments of each rollout; log-probs are those of a uniform choice."""
        rng = np.random.default_rng(seed)
        rollouts = []
        for _ in range(self.groups):
            prompt = [(rng.integers(0, vocabulary, self.prompt), False)]
            for number in range(self.each):
                turns = self._turns(rng, vocabulary, self.turns)
                parts = [[*prompt, *turns]]
                if number % 4 == 3:
                    kept = self.turns // 2 * 2
                    parts.append([*prompt, *turns[:kept], *self._turns(rng, vocabulary, self.turns - kept // 2)])
                rollouts.append([_segment(part, vocabulary) for part in parts])
        return rollouts

    def rows(self, vocabulary: int) -> list[PackedRow]:
        """As a step's rows, each rollout with an advantage of its own and the loss as a mean over tokens."""
        rollouts = self.segments(vocabulary)
        total = sum(int(segment.loss_mask.sum()) for segments in rollouts for segment in segments)
        numbered = [(rollout, segment) for rollout, segments in enumerate(rollouts) for segment in segments]
        return [
            PackedRow.uniform(segment, rollout, number, (-1.0) ** rollout, 1 / total)
            for number, (rollout, segment) in enumerate(numbered)
        ]

    def _turns(self, rng: np.random.Generator, vocabulary: int, count: int) -> list[tuple[np.ndarray, bool]]:
        parts = []
        for _ in range(count):
            for mean, trained in ((self.sampled, True), (self.read, False)):
                length = int(rng.integers(mean // 2, mean + mean // 2 + 1))
                parts.append((rng.integers(0, vocabulary, length), trained))
        return parts[:-1]  # no tool answers the last call


def _segment(parts: Sequence[tuple[np.ndarray, bool]], vocabulary: int) -> Segment:
    mask = np.concatenate([np.full(len(ids), trained) for ids, trained in parts])
    return Segment(
        np.concatenate([ids for ids, _ in parts]).astype(np.int32),
        mask,
        np.where(mask, -np.log(vocabulary), 0).astype(np.float32),
        np.where(mask, 0, NO_VERSION).astype(np.int32),
        (),
    )


@dataclass(frozen=True)
class Sizes:
    """What a run measures. `update` are the shapes of the trainer's step, first the one that tells most."""

    update: tuple[Shape, ...]
    rollouts: Rollouts
    token_budget: int
    lora_rank: int
    agreement: Shape
    served: Shape
    at_once: tuple[int, ...]
    sampled: int
    demo: DemoRecipe


QWEN3_4B = Shape("4B", 2560, 36, 32, 8, 128, 9728, 151_936, 16_384)
QWEN3_1_7B = Shape("1.7B", 2048, 28, 16, 8, 128, 6144, 151_936, 16_384)
QWEN3_0_6B = Shape("0.6B", 1024, 28, 16, 8, 128, 3072, 151_936, 16_384)
TINY = Shape("tiny", 64, 2, 4, 2, 16, 128, 512, 8192)

ON_A_CARD = Sizes(
    update=(QWEN3_4B, QWEN3_1_7B, QWEN3_0_6B),
    rollouts=Rollouts(groups=2, each=8, prompt=1536, turns=6, sampled=320, read=320),
    token_budget=16_384,
    lora_rank=32,
    agreement=QWEN3_1_7B,
    served=QWEN3_1_7B,
    at_once=(1, 16, 64),
    sampled=256,
    demo=DemoRecipe(steps=10, held_out=32),
)

WITHOUT_A_CARD = Sizes(
    update=(TINY,),
    rollouts=Rollouts(groups=2, each=4, prompt=40, turns=3, sampled=12, read=12),
    token_budget=512,
    lora_rank=4,
    agreement=TINY,
    served=TINY,
    at_once=(1, 4),
    sampled=24,
    demo=DemoRecipe(steps=1, groups=1, rollouts=2, held_out=2),
)
"""Shows that the script works; its figures are of no worth."""
