"""A mixture of experts in place of a layer's feed-forward, as in Qwen3-MoE, and what its router chose."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn


class ExpertBlock(nn.Module):
    """A router's `top_k` of `count` experts a token, weighed by probability (by their shares of its sum if `normed`).

    `choices` [B,T,top_k] are the experts of the last pass. Parameters are named as Hugging Face saves them.
    """

    def __init__(self, hidden: int, count: int, top_k: int, expert: Callable[[], nn.Module], *, normed: bool) -> None:
        super().__init__()
        self.gate = nn.Linear(hidden, count, bias=False)
        self.experts = nn.ModuleList(expert() for _ in range(count))
        self.choices = torch.zeros(0, 0, top_k, dtype=torch.long)
        self._top_k = top_k
        self._normed = normed

    def forward(self, x: Tensor) -> Tensor:
        flat_NH = x.flatten(0, 1)
        weights_Nk, choices_Nk = torch.softmax(self.gate(flat_NH), dim=-1).topk(self._top_k, dim=-1)
        if self._normed:
            weights_Nk = weights_Nk / weights_Nk.sum(-1, keepdim=True)
        out_NH = torch.zeros_like(flat_NH)
        for number, expert in enumerate(self.experts):
            tokens, places = torch.where(choices_Nk == number)
            if len(tokens):
                out_NH = out_NH.index_add(0, tokens, expert(flat_NH[tokens]) * weights_Nk[tokens, places, None])
        self.choices = choices_Nk.view(*x.shape[:2], self._top_k)
        return out_NH.view_as(x)
