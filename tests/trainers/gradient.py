"""Our trainer's gradient of a step, which other trainers' is compared with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from rolltap.contract.trainer import LeasedGroup
from rolltap.trainer_client.data.collate import collate
from rolltap.trainer_client.data.packing import Packer
from rolltap.trainer_client.model import attention
from rolltap.trainer_client.model.loss import PolicyLoss
from rolltap.trainer_client.model.network import PolicyNetwork

from ..unit.trainer_client.making import rows_of
from .driver import CLIP, Driver


def our_gradient(driver: Driver, model: Path, of: list[LeasedGroup]) -> dict[str, torch.Tensor]:
    attention.register()
    clip: Any = getattr(driver, "clip", CLIP)
    policy = PolicyNetwork(AutoModelForCausalLM.from_pretrained(model, attn_implementation=attention.NAME))
    for pack in Packer(500, share=True)(rows_of(of, driver.advantage, normalise=driver.normalise, length=100)):
        batch = collate(pack)
        PolicyLoss(*clip)(policy(batch), batch).loss.backward()
    return {name: weight.grad for name, weight in policy.model.named_parameters() if weight.grad is not None}
