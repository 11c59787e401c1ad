"""What every adapter is tried on: groups with everything that trainers stumble over, a tiny model, a trainer plane."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from rolltap.contract.trainer import LeasedGroup
from rolltap.types import Scoring, Segment

from ..unit.trainer_client.making import VOCABULARY, group, model_folder, random_segment, record, segment

TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def policy_folder(folder: Path) -> Path:
    """A model with its tokenizer and chat template, as a trainer is given it."""
    model_folder(folder)
    words = Tokenizer(WordLevel({f"w{index}": index for index in range(VOCABULARY)}, unk_token="w0"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", eos_token="w1")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


def branching_group(name: str, seed: int, *, version: int = 0) -> LeasedGroup:
    """Five rollouts: of three rows with gaps in their masks, of one row, masked, unscorable, and of two rows."""
    rng = np.random.default_rng(seed)
    prompt = rng.integers(2, VOCABULARY, 12).tolist()
    rollouts = [
        record(name, 0, [gappy(rng, prompt, version) for _ in range(3)], 1.0),
        record(name, 1, [random_segment(rng, prompt, 7, version=version)], 0.0),
        record(name, 2, [random_segment(rng, prompt, 5, version=version)], 0.25, Scoring.MASKED),
        record(name, 3, [], None, Scoring.UNSCORABLE),
        record(name, 4, [gappy(rng, prompt[:9], version), random_segment(rng, prompt, 4, version=version)], 0.5),
    ]
    return group(name, rollouts, oldest=version, newest=version)


def without_tokens(name: str, seed: int) -> LeasedGroup:
    """Three rollouts: two that are trained, and a masked one of which nothing was recorded but its reward."""
    rng = np.random.default_rng(seed)
    prompt = rng.integers(2, VOCABULARY, 12).tolist()
    rollouts = [record(name, index, [gappy(rng, prompt, 0)], float(index)) for index in range(2)]
    return group(name, [*rollouts, record(name, 2, [], 4.0, Scoring.MASKED)], oldest=0, newest=0)


def groups(count: int, start: int = 0) -> list[LeasedGroup]:
    return [branching_group(f"g{index}", index) for index in range(start, start + count)]


def gappy(rng: np.random.Generator, prompt: list[int], version: int) -> Segment:
    """Two turns with an observation between them, and one behind, which is context of nothing."""
    lengths = rng.integers(2, 6, 4)
    ids = [*prompt, *rng.integers(2, VOCABULARY, int(lengths.sum())).tolist()]
    first, second = len(prompt), len(prompt) + int(lengths[0] + lengths[1])
    trained = [*range(first, first + int(lengths[0])), *range(second, second + int(lengths[2]))]
    made = segment(ids, trained, version=version)
    noise = np.where(made.loss_mask, rng.normal(0, 0.2, len(made)), 0).astype(np.float32)
    return Segment(made.token_ids, made.loss_mask, made.logprobs + noise, made.versions, ())


def trained_rows(of: list[LeasedGroup]) -> list[Segment]:
    """Every segment that a trainer must see, once."""
    return [
        part
        for one in of
        for rollout in one.rollouts
        if rollout.rollout.scoring is Scoring.SCORED
        for part in rollout.trajectory.segments
    ]
