"""Our losses and gradients against TRL's `GRPOTrainer` on one fixed batch, where the formulas agree.

TRL has a row a rollout, padded prompts on the left and completions on the right; `sampling_per_token_logps` plays no
part without vLLM, so what the engine sampled with goes in as `old_per_token_logps`: our `correction = "engine"`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from trl.trainer.grpo_config import GRPOConfig
from trl.trainer.grpo_trainer import GRPOTrainer

from rolltap.contract.trainer import LeasedGroup
from rolltap.trainer_client.data.collate import collate
from rolltap.trainer_client.data.packing import Packer
from rolltap.trainer_client.data.scoring import Normalise
from rolltap.trainer_client.model.loss import PolicyLoss, RatioKind

from .making import config, network, random_group, rows_of

LENGTH = 30
GROUPS = [random_group(f"g{index}", [1.0, 0.0, 0.25, 0.5], seed=index) for index in range(2)]


@pytest.fixture
def plain() -> Any:
    """The network of our policy as transformers has it."""
    model = AutoModelForCausalLM.from_config(config(), attn_implementation="eager")
    model.load_state_dict(network().model.state_dict())
    return model


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    words = Tokenizer(WordLevel({f"w{index}": index for index in range(64)}, unk_token="w0"))
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", eos_token="w1")


def theirs(model: Any, tokenizer: Any, folder: Path, **settings: Any) -> GRPOTrainer:
    arguments = GRPOConfig(
        output_dir=str(folder),
        per_device_train_batch_size=8,
        num_generations=4,
        max_completion_length=LENGTH,
        temperature=1.0,
        beta=0.0,
        report_to=[],
        use_cpu=True,
        bf16=False,
        **settings,
    )
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=arguments,
        train_dataset=Dataset.from_dict({"prompt": ["w2"] * 8}),
        processing_class=tokenizer,
    )
    trainer.current_gradient_accumulation_steps = 1
    return trainer


def batch_of(groups: list[LeasedGroup]) -> dict[str, Tensor]:
    """The groups as TRL's loss takes them."""
    rows = rows_of(groups)
    prompts, completions, logprobs = [], [], []
    for row in rows:
        part = row.segment
        cut = part.prompt_length
        prompts.append(part.token_ids[:cut])
        completions.append(part.token_ids[cut:])
        logprobs.append(part.logprobs[cut:])
    longest = max(map(len, completions))

    def padded(rows: list[Any], dtype: Any) -> Tensor:
        return torch.from_numpy(np.stack([np.pad(row, (0, longest - len(row))) for row in rows]).astype(dtype))

    return {
        "prompt_ids": torch.from_numpy(np.stack(prompts).astype(np.int64)),
        "prompt_mask": torch.ones(len(prompts), len(prompts[0]), dtype=torch.int64),
        "completion_ids": padded(completions, np.int64),
        "completion_mask": padded([np.ones(len(row)) for row in completions], np.int64),
        "old_per_token_logps": padded(logprobs, np.float32),
        "advantages": torch.tensor([float(row.advantages[-1]) for row in rows]),
        "num_items_in_batch": torch.tensor(float(sum(map(len, completions)))),
    }


@pytest.mark.filterwarnings("ignore")  # of transformers, accelerate and TRL about themselves
@pytest.mark.parametrize(
    ("loss_type", "level", "normalise", "ratio"),
    [
        ("grpo", "token", "rollout", "token"),
        ("dapo", "token", "token", "token"),
        ("dr_grpo", "token", "constant", "token"),
        ("grpo", "sequence", "rollout", "sequence"),
    ],
)
def test_loss_and_gradient_agree(
    plain: Any, tokenizer: Any, tmp_path: Path, loss_type: str, level: str, normalise: Normalise, ratio: RatioKind
) -> None:
    trainer = theirs(
        plain, tokenizer, tmp_path, loss_type=loss_type, importance_sampling_level=level, epsilon=0.1, epsilon_high=0.15
    )
    model: Any = trainer.model
    model.train()
    their_loss = trainer._compute_loss(model, batch_of(GROUPS))
    their_loss.backward()

    policy = network()
    loss, total = PolicyLoss(0.1, 0.15, ratio=ratio), 0.0
    for pack in Packer(60, share=True, whole=ratio == "sequence")(rows_of(GROUPS, normalise=normalise, length=LENGTH)):
        batch = collate(pack)
        terms = loss(policy(batch), batch)
        terms.loss.backward()
        total += float(terms.loss)

    assert total == pytest.approx(float(their_loss), abs=1e-5)
    named = dict(model.named_parameters())
    for name, weight in policy.model.named_parameters():
        torch.testing.assert_close(weight.grad, named[name].grad, atol=1e-5, rtol=1e-4)
