"""Attention over packed spans, as an attention function of transformers.

Each span's queries see its ancestors' keys and, causally, its own. On the CPU that is one call of scaled dot product
attention a span, so the cost is the sum of the spans' own, never the square of the pack. On CUDA it is one variable
length flash attention call over all spans, with the keys of shared trunks gathered first (its causal mask is aligned to
the lower right, which is what ancestors before own tokens need); in 32 bits, or where torch has no such call, it goes
span by span there too. Shapes: `N` tokens of the pack, `H` heads, `K`
key-value heads, `D` head width.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from rolltap.errors import ConfigError
from rolltap.trainer_client.packing import TokenSpan

NAME = "rolltap_spans"
"""What the attention is called in transformers' registry."""

FLASH_DTYPES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True, eq=False)
class VariableLengths:
    """A layout as flash attention wants it: cumulative lengths of queries and keys, and which keys, if not all once."""

    queries: Tensor
    keys: Tensor
    longest_query: int
    longest_key: int
    gathered: Tensor | None

    @classmethod
    def of(cls, spans: Sequence[TokenSpan], seen: Sequence[Sequence[slice]], device: torch.device) -> VariableLengths:
        queries = torch.tensor([0, *(len(span) for span in spans)], dtype=torch.int32)
        keys = torch.tensor([0, *(span.position + len(span) for span in spans)], dtype=torch.int32)
        gathered = None
        if any(span.ancestors for span in spans):
            gathered = torch.cat([torch.arange(part.start, part.stop) for parts in seen for part in parts]).to(device)
        return cls(
            queries.cumsum(0, dtype=torch.int32).to(device),
            keys.cumsum(0, dtype=torch.int32).to(device),
            int(queries.max()),
            int(keys.max()),
            gathered,
        )


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """Which tokens a span's queries see: `seen[i]` are slices of the pack, the last one the span itself."""

    spans: tuple[TokenSpan, ...]
    seen: tuple[tuple[slice, ...], ...]
    lengths: VariableLengths | None

    @classmethod
    def of(cls, spans: Sequence[TokenSpan], device: torch.device) -> Layout:
        own = [slice(span.start, span.end) for span in spans]
        seen = tuple((*(own[index] for index in span.ancestors), mine) for span, mine in zip(spans, own, strict=True))
        return cls(tuple(spans), seen, VariableLengths.of(spans, seen, device) if device.type == "cuda" else None)


def span_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    layout: Layout,
    **_: Any,
) -> tuple[Tensor, None]:
    """`query` [1, H, N, D], `key` and `value` [1, K, N, D] → [1, N, H, D]. The layout takes the mask's place."""
    if layout.lengths is not None and query.dtype in FLASH_DTYPES and (varlen := _varlen()) is not None:
        return _flash(varlen, query, key, value, scaling, layout.lengths), None
    return _span_by_span(query, key, value, scaling, layout), None


def _span_by_span(query: Tensor, key: Tensor, value: Tensor, scaling: float | None, layout: Layout) -> Tensor:
    parts = []
    for span, seen in zip(layout.spans, layout.seen, strict=True):
        own, alone = seen[-1], len(seen) == 1
        keys = key[:, :, own] if alone else torch.cat([key[:, :, part] for part in seen], dim=2)
        values = value[:, :, own] if alone else torch.cat([value[:, :, part] for part in seen], dim=2)
        mask = None if alone else _lower_right(len(span), keys.shape[2], query.device)
        parts.append(
            F.scaled_dot_product_attention(
                query[:, :, own], keys, values, mask, is_causal=alone, scale=scaling, enable_gqa=True
            )
        )
    return torch.cat(parts, dim=2).transpose(1, 2)


def _lower_right(queries: int, keys: int, device: torch.device) -> Tensor:
    return torch.ones(queries, keys, dtype=torch.bool, device=device).tril(diagonal=keys - queries)


def _varlen() -> Callable[..., Any] | None:
    """torch's flash attention over rows of variable length; None before 2.11, which has none with a window."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    return varlen_attn if _parameters(varlen_attn) >= {"scale", "window_size"} else None


@cache
def _parameters(function: Callable[..., Any]) -> frozenset[str]:
    return frozenset(inspect.signature(function).parameters)


def _flash(
    varlen: Callable[..., Any],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: float | None,
    lengths: VariableLengths,
) -> Tensor:
    query_NHD, key_NKD, value_NKD = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    if lengths.gathered is not None:
        key_NKD, value_NKD = key_NKD[lengths.gathered], value_NKD[lengths.gathered]
    grouped = {"enable_gqa": True}
    if not grouped.keys() <= _parameters(varlen):  # torch 2.11
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
        scale=scaling,
        window_size=(-1, 0),
        **grouped,
    )
    return attended.unsqueeze(0)


def register() -> None:
    """Makes the attention known to transformers, under `NAME`. Registering it again changes nothing."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, span_attention)
    AttentionMaskInterface.register(NAME, _no_mask)


def _no_mask(*_: Any, **__: Any) -> None:
    return None


def check_supported(config: Any) -> None:
    """`ConfigError` for a model whose layers are more than full causal attention over their tokens."""
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if kinds != {"full_attention"} or getattr(config, "use_sliding_window", False):
        raise ConfigError(
            f"{config.model_type}: layers of {', '.join(sorted(kinds))}; packed training supports full attention only"
        )
