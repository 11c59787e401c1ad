"""Attention over packed spans, as an attention function of transformers.

Each span's queries see its ancestors' keys and, causally, its own. On the CPU, each span is one call of scaled dot
product attention, so the cost is the sum over spans and not the square of the pack. On CUDA, one call of variable
length flash attention computes all spans, with the keys of shared trunks gathered first (its causal mask is aligned to
the lower right, as ancestors before own tokens need it). In float32, or if torch lacks that call, CUDA also goes span
by span. Both ways apply sliding windows. Soft-capped scores and attention sinks are computed in plain torch, some
queries at a time, since torch has no fused kernel for them.

Shapes: `N` tokens of the pack, `Q` queries, `H` heads, `K` key-value heads, `D` head width.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from rolltap.trainer_client.data.packing import TokenSpan

NAME = "rolltap_spans"
"""Name of the attention in transformers' registry."""

FLASH_DTYPES = (torch.bfloat16, torch.float16)

PIECE = 1024
"""Queries that are computed at once if scores are materialised: those of a piece are [H, PIECE, keys]."""


@dataclass(frozen=True, slots=True, eq=False)
class VariableLengths:
    """A layout for flash attention: cumulative lengths of queries and keys.

    `gathered` are the indices of all spans' keys, one span after another; None: each key is used once, in order.
    """

    queries: Tensor
    keys: Tensor
    longest_query: int
    longest_key: int
    gathered: Tensor | None

    @classmethod
    def of(cls, spans: Sequence[TokenSpan], device: torch.device) -> VariableLengths:
        queries = torch.tensor([0, *(len(span) for span in spans)], dtype=torch.int32)
        keys = torch.tensor([0, *(span.position + len(span) for span in spans)], dtype=torch.int32)
        gathered = None
        if any(span.ancestors for span in spans):
            own = [torch.arange(span.start, span.end) for span in spans]
            paths = [(*span.ancestors, index) for index, span in enumerate(spans)]
            gathered = torch.cat([own[index] for path in paths for index in path]).to(device)
        return cls(
            queries.cumsum(0, dtype=torch.int32).to(device),
            keys.cumsum(0, dtype=torch.int32).to(device),
            int(queries.max()),
            int(keys.max()),
            gathered,
        )


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """The spans of a pack, which follow each other without gaps; each sees its ancestors and, causally, itself."""

    spans: tuple[TokenSpan, ...]
    lengths: VariableLengths | None

    @classmethod
    def of(cls, spans: Sequence[TokenSpan], device: torch.device) -> Layout:
        return cls(tuple(spans), VariableLengths.of(spans, device) if device.type == "cuda" else None)


@dataclass(frozen=True, slots=True, eq=False)
class Scores:
    """How a layer turns queries and keys into weights. `window` is the number of keys that a query sees, with its own.

    `softcap` c turns a score s into c·tanh(s/c) (Gemma 2). `sinks` [H] are extra scores in the softmax, without a value
    (gpt-oss).
    """

    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None

    @classmethod
    def of(cls, width: int, options: Mapping[str, Any], masked: int | None = None) -> Scores:
        """From the options that transformers passes to an attention function; `width` is the head width.

        `masked` is the window of the layer's mask: some families (Phi-3.5-MoE, Qwen2-MoE) set it only there.
        """
        scale, window = options.get("scaling"), options.get("sliding_window")
        return cls(
            width**-0.5 if scale is None else scale,
            masked if window is None else window,
            options.get("softcap"),
            options.get("s_aux"),
        )

    @property
    def fused(self) -> bool:
        """Whether torch's fused kernels can compute these scores."""
        return self.softcap is None and self.sinks is None

    def sees_all(self, keys: int) -> bool:
        """Whether the window hides none of `keys` keys."""
        return self.window is None or self.window >= keys


def span_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: int | None,
    **options: Any,
) -> tuple[Tensor, None]:
    """The attention function: `query` [1, H, N, D], `key` and `value` [1, K, N, D] → [1, N, H, D].

    `options["layout"]` replaces the mask; `attention_mask` is only the mask's window, as `_window` returns it.
    """
    layout: Layout = options["layout"]
    scores = Scores.of(query.shape[-1], options, attention_mask)
    flash = layout.lengths is not None and query.dtype in FLASH_DTYPES and scores.fused
    if flash and layout.lengths is not None and (varlen := _varlen()) is not None:
        return _flash(varlen, (query, key, value), scores, layout.lengths), None
    lengths = [len(span) for span in layout.spans]  # split once: a slice's gradient is as large as the whole pack
    queries, keys, values = (states.split(lengths, dim=2) for states in (query, key, value))
    parts = []
    for index, span in enumerate(layout.spans):
        path = (*span.ancestors, index)
        parts.append(_attend(queries[index], _join(keys, path), _join(values, path), scores))
    return torch.cat(parts, dim=2).transpose(1, 2), None


def _join(parts: Sequence[Tensor], path: Sequence[int]) -> Tensor:
    """The parts with the indices in `path`, concatenated."""
    return parts[path[0]] if len(path) == 1 else torch.cat([parts[index] for index in path], dim=2)


def _attend(query: Tensor, key: Tensor, value: Tensor, scores: Scores) -> Tensor:
    """Attention of one span, whose queries [1, H, Q, D] are at the last positions of the keys. → [1, H, Q, D]"""
    queries, keys = query.shape[2], key.shape[2]
    if scores.fused and scores.sees_all(keys):
        alone = queries == keys
        mask = None if alone else _visible(queries, keys, scores.window, query.device)
        return F.scaled_dot_product_attention(
            query, key, value, mask, is_causal=alone, scale=scores.scale, enable_gqa=True
        )
    pieces = []
    for start in range(0, queries, PIECE):
        end = min(start + PIECE, queries)
        last = keys - queries + end  # the piece's last query sees the keys before this one
        first = 0 if scores.window is None else max(0, last - (end - start) - scores.window + 1)
        part = (query[:, :, start:end], key[:, :, first:last], value[:, :, first:last])
        if torch.is_grad_enabled() and not scores.fused:  # keep no piece's scores for the backward pass
            pieces.append(checkpoint(_attend_piece, *part, scores, use_reentrant=False))
        else:
            pieces.append(_attend_piece(*part, scores))
    return torch.cat(pieces, dim=2)


def _attend_piece(query: Tensor, key: Tensor, value: Tensor, scores: Scores) -> Tensor:
    visible = _visible(query.shape[2], key.shape[2], scores.window, query.device)
    if scores.fused:
        return F.scaled_dot_product_attention(query, key, value, visible, scale=scores.scale, enable_gqa=True)
    shared = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(shared, dim=1), value.repeat_interleave(shared, dim=1)
    score = (query @ key.transpose(2, 3) * scores.scale).float()
    if scores.softcap is not None:
        score = scores.softcap * torch.tanh(score / scores.softcap)
    score = score.masked_fill(~visible, -torch.inf)
    if scores.sinks is None:
        return torch.softmax(score, dim=-1).to(value.dtype) @ value
    sinks = scores.sinks.float().reshape(1, -1, 1, 1).expand(-1, -1, score.shape[2], 1)
    weights = torch.softmax(torch.cat([score, sinks], dim=-1), dim=-1)[..., :-1]
    return weights.to(value.dtype) @ value


def _visible(queries: int, keys: int, window: int | None, device: torch.device) -> Tensor:
    """The mask [Q, keys]: True where a query sees a key. The last query sees the last key."""
    visible = torch.ones(queries, keys, dtype=torch.bool, device=device).tril(diagonal=keys - queries)
    return visible if window is None else visible.triu(diagonal=keys - queries - window + 1)


def _varlen() -> Callable[..., Any] | None:
    """torch's flash attention over rows of variable length; None before torch 2.11, where it has no window."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    return varlen_attn if _parameters(varlen_attn) >= {"scale", "window_size"} else None


@cache
def _parameters(function: Callable[..., Any]) -> frozenset[str]:
    return frozenset(inspect.signature(function).parameters)


def _flash(
    varlen: Callable[..., Any], projections: tuple[Tensor, Tensor, Tensor], scores: Scores, lengths: VariableLengths
) -> Tensor:
    query_NHD, key_NKD, value_NKD = (tensor[0].transpose(0, 1) for tensor in projections)
    if lengths.gathered is not None:
        key_NKD, value_NKD = key_NKD[lengths.gathered], value_NKD[lengths.gathered]
    grouped = {"enable_gqa": True}
    if not grouped.keys() <= _parameters(varlen):  # torch 2.11 lacks it
        grouped, heads = {}, query_NHD.shape[1] // key_NKD.shape[1]
        key_NKD, value_NKD = (tensor.repeat_interleave(heads, dim=1) for tensor in (key_NKD, value_NKD))
    attended = varlen(
        query_NHD.contiguous(),
        key_NKD.contiguous(),
        value_NKD.contiguous(),
        lengths.queries,
        lengths.keys,
        lengths.longest_query,
        lengths.longest_key,
        scale=scores.scale,
        window_size=(-1 if scores.window is None else scores.window - 1, 0),
        **grouped,
    )
    return attended.unsqueeze(0)


def register() -> None:
    """Registers the attention with transformers, under `NAME`. Registering it again changes nothing."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, span_attention)
    AttentionMaskInterface.register(NAME, _window)


def _window(*_: Any, local_size: int | None = None, **__: Any) -> int | None:
    """Replaces a layer's mask by its window: the number of keys that a query sees, with its own; None: all."""
    return local_size
