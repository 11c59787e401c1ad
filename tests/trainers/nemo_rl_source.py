"""NeMo RL's own code, from its source, on a CPU: its clipped loss, and how its workers call it."""

# pyright: reportMissingImports=false

from __future__ import annotations

from typing import Any

import torch

from .sources import absent

absent("wandb", "mlflow", "swanlab", "pynvml", "nemo_automodel", "torch.utils.tensorboard", "hydra", "hydra.utils")
from nemo_rl.algorithms.loss.loss_functions import ClippedPGLossConfig, ClippedPGLossFn  # noqa: E402
from nemo_rl.algorithms.loss.utils import prepare_loss_input  # noqa: E402

torch.Tensor.cuda = lambda tensor, *_, **__: tensor  # type: ignore[method-assign]  # it takes log-probs on a GPU


class Loss(ClippedPGLossFn):
    def __init__(self, *, by_sequence: bool, clip: tuple[float, float]) -> None:
        super().__init__(
            ClippedPGLossConfig(
                ratio_clip_min=clip[0],
                ratio_clip_max=clip[1],
                reference_policy_kl_penalty=0.0,
                token_level_loss=not by_sequence,
            )
        )

    def value(self, logits: torch.Tensor, part: Any, sequences: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """The loss of a part of the batch, by the whole batch's sequences and tokens."""
        given, part = prepare_loss_input(logits, part, self)
        return self(**given, data=part, global_valid_seqs=sequences, global_valid_toks=tokens)[0]
