"""Mixtures of experts: replay of the experts that the engine recorded, and the loss that balances the routers.

Engine and trainer round differently, so near a tie their routers choose different experts, and such a token's ratio
compares two different networks. So the recorded choice is replayed (R3: Ma et al. 2025, arXiv 2510.11370). The router's
own scores weigh the recorded experts, so its gradient is unchanged. Only passes that sampled a token are recorded; the
trainer routes the others (of prompts) itself. The network in training replays; references and teachers route by
themselves.

A model's blocks of experts are found by their child `experts`. In such a block, the only `torch.topk` over all experts
is the choice. Shapes: `N` tokens of the pack, `L` layers, `k` experts of a token.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from rolltap.errors import ConfigError
from rolltap.trainer_client.data.recorded import ExpertShape

Choice = tuple[Tensor, Tensor]
"""A router's output for the pack: logits [N, experts] and the chosen experts [N, k]."""


class Mixture:
    """The blocks of experts of a transformers model. The constructor replaces their `forward`."""

    def __init__(self, model: Any) -> None:
        self.shape = ExpertShape(0, (), 0, 0)
        self.recorded: Tensor | None = None
        self._collecting = False
        self._choices: dict[int, Choice] = {}
        blocks = {index: block for index, layer in enumerate(layers_of(model)) if (block := _block(layer)) is not None}
        if not blocks:
            return
        config = model.config.get_text_config()
        experts = next(iter(blocks.values())).experts.num_experts
        self.shape = ExpertShape(len(layers_of(model)), tuple(blocks), experts, config.num_experts_per_tok)
        for place, (index, block) in enumerate(blocks.items()):
            block.forward = _Block(self, place, model.config.model_type, block.forward)
            router = getattr(block, "gate", None) or getattr(block, "router", None)
            if isinstance(router, torch.nn.Module):
                router.register_forward_hook(self._collect(index))

    @contextmanager
    def replaying(self, experts_NX: Tensor | None) -> Iterator[None]:
        """Inside the block, the mixture uses a batch's recorded experts [N, X] where there are some."""
        recorded = None
        if experts_NX is not None and self.shape.layers:
            tokens, width = experts_NX.shape
            recorded = experts_NX.reshape(tokens, -1, self.shape.top_k)[:, list(self.shape.columns(width))]
        with self._recorded(recorded):
            yield

    def checkpoint_contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """Contexts for torch's checkpoint, of the forward pass and its recomputation: both use the same experts."""
        return nullcontext(), self._recorded(self.recorded)

    @contextmanager
    def _recorded(self, recorded_NLk: Tensor | None) -> Iterator[None]:
        before, self.recorded = self.recorded, recorded_NLk
        try:
            yield
        finally:
            self.recorded = before

    @contextmanager
    def choices(self) -> Iterator[dict[int, Choice]]:
        """Collects the routers' choices by layer, of the forward pass inside the block."""
        self._collecting, self._choices = True, {}
        try:
            yield self._choices
        finally:
            self._collecting = False

    def _collect(self, index: int) -> Any:
        def collect(_: Any, __: Any, output: Any) -> None:
            if self._collecting and isinstance(output, tuple) and len(output) == 3:
                self._choices[index] = (output[0], output[2])

        return collect


def layers_of(model: Any) -> Sequence[Any]:
    return getattr(model.get_decoder(), "layers", ())


def _block(layer: Any) -> Any:
    """The layer's block of experts; None for a dense layer."""
    with_experts = (one for one in layer.modules() if hasattr(getattr(one, "experts", None), "num_experts"))
    return next(with_experts, None)


class _Block:
    """The replaced forward of a block: with the recorded experts, if there are some."""

    def __init__(self, mixture: Mixture, place: int, family: str, forward: Any) -> None:
        self._mixture = mixture
        self._place = place
        self._family = family
        self._forward = forward

    def __call__(self, *arguments: Any, **more: Any) -> Any:
        recorded = self._mixture.recorded
        if recorded is None:
            return self._forward(*arguments, **more)
        with _RecordedChoice(recorded[:, self._place], self._mixture.shape) as choice:
            output = self._forward(*arguments, **more)
        if choice.count != 1:
            raise ConfigError(
                f"{self._family}: its routers can't replay recorded experts ({choice.count} choices in a block of "
                'experts); set router.replay = "off" to let them choose themselves'
            )
        return output


class _RecordedChoice(TorchFunctionMode):
    """While active, a choice of `top_k` among all experts returns the recorded one where there is one."""

    def __init__(self, recorded: Tensor, shape: ExpertShape) -> None:
        super().__init__()
        self._recorded_Nk = recorded
        self._shape = shape
        self.count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func not in (torch.topk, Tensor.topk):
            return result
        scores, own_Nk = args[0], result[1]
        if scores.shape != (len(self._recorded_Nk), self._shape.experts) or own_Nk.shape != self._recorded_Nk.shape:
            return result
        self.count += 1
        chosen_Nk = torch.where(self._recorded_Nk < 0, own_Nk, self._recorded_Nk)
        return torch.return_types.topk((scores.gather(-1, chosen_Nk), chosen_Nk))  # pyright: ignore


@dataclass(frozen=True, slots=True)
class RouterLoss:
    """The routers' loss: `balance` times the load-balancing loss and `z` times the z-loss, a mean over layers.

    The load-balancing loss of a row of T tokens is E/k sum_e f_e P_e, f_e the choices of expert e per token and P_e
    its mean probability; it is 1 if all experts have the same share (Fedus et al. 2021, eq. 4, per row as in
    DeepSeek-V3, eq. 17). The z-loss is the mean square of the logits' logsumexp (Zoph et al. 2022, eq. 5). An update's
    loss is the mean over its rows, so it does not depend on packing.
    """

    balance: float = 0.0
    z: float = 0.0

    def __call__(self, choices: Sequence[Choice], places: Sequence[Tensor]) -> Tensor:
        """The sum over rows; `places` has each row's places in the pack."""
        terms = [self._row(logits_NE[place], chosen_Nk[place]) for logits_NE, chosen_Nk in choices for place in places]
        return torch.stack(terms).sum() / len(choices)

    def _row(self, logits_TE: Tensor, chosen_Tk: Tensor) -> Tensor:
        logits_TE = logits_TE.float()
        tokens, experts = logits_TE.shape
        counts_E = torch.bincount(chosen_Tk.reshape(-1), minlength=experts).to(logits_TE.dtype)
        share_E = torch.softmax(logits_TE, dim=-1).mean(0)
        balance = experts / chosen_Tk.shape[1] * (counts_E / tokens * share_E).sum()
        return self.balance * balance + self.z * torch.logsumexp(logits_TE, dim=-1).square().mean()
