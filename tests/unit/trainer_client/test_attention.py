"""Flash attention of variable length, as torch's releases have it, is given spans so that it computes what is meant."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import varlen

from rolltap.trainer_client.data.packing import TokenSpan
from rolltap.trainer_client.model.attention import Layout, VariableLengths, span_attention

SPANS = (
    TokenSpan(0, 6, 0),
    TokenSpan(6, 10, 6, (0,)),
    TokenSpan(10, 13, 6, (0,)),
    TokenSpan(13, 18, 0),
    TokenSpan(18, 20, 9, (0, 2)),
)
"""Two trunks; the first has two branches, one of them a branch of its own."""

Varlen = Callable[..., Tensor]


def layouts(spans: Sequence[TokenSpan]) -> tuple[Layout, Layout]:
    """As on the CPU, and as on CUDA."""
    plain = Layout.of(spans, torch.device("cpu"))
    return plain, Layout(plain.spans, VariableLengths.of(spans, torch.device("cpu")))


def tensors(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value of 20 tokens, four heads over two."""
    torch.manual_seed(0)
    return tuple(torch.randn(1, heads, 20, 8, dtype=dtype) for heads in (4, 2, 2))  # type: ignore[return-value]


def row_by_row(
    query: Tensor, key: Tensor, value: Tensor, cu_q: Tensor, cu_k: Tensor, scale: float | None, before: int
) -> Tensor:
    """What flash attention says it does with a window of (`before`, 0): so many keys before a query's own, -1 all."""
    rows = []
    for row in range(len(cu_q) - 1):
        q, k = slice(int(cu_q[row]), int(cu_q[row + 1])), slice(int(cu_k[row]), int(cu_k[row + 1]))
        queries, keys = q.stop - q.start, k.stop - k.start
        mask = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)
        mask = mask if before < 0 else mask.triu(keys - queries - before)
        heads = [tensor.transpose(0, 1) for tensor in (query[q], key[k], value[k])]
        attended = F.scaled_dot_product_attention(heads[0], heads[1], heads[2], mask, scale=scale, enable_gqa=True)
        rows.append(attended.transpose(0, 1))
    return torch.cat(rows)


def of_torch_2_11(
    query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor, max_q: int, max_k: int, *,
    return_aux: Any = None, scale: float | None = None, window_size: tuple[int, int] = (-1, -1),
) -> Tensor:  # fmt: skip
    assert query.shape[1] == key.shape[1] == value.shape[1]
    assert (window_size[1], max_q, max_k) == (0, 6, 11)
    return row_by_row(query, key, value, cu_seq_q, cu_seq_k, scale, window_size[0])


def of_torch_2_13(
    query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor, max_q: int, max_k: int, *,
    scale: float | None = None, window_size: tuple[int, int] = (-1, -1), enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    assert enable_gqa
    assert (window_size[1], key.shape[1]) == (0, 2)
    return row_by_row(query, key, value, cu_seq_q, cu_seq_k, scale, window_size[0])


def of_torch_2_10(query: Tensor, key: Tensor, value: Tensor, *lengths: Any, is_causal: bool = False) -> Tensor:
    raise AssertionError("it has no window that is aligned to the lower right")


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("offered", [of_torch_2_10, of_torch_2_11, of_torch_2_13])
def test_packed_spans_are_given_to_flash_attention_as_it_takes_them(
    offered: Varlen, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(varlen, "varlen_attn", offered)
    plain, packed = layouts(SPANS)
    parts, module = tensors(torch.bfloat16), torch.nn.Identity()
    wanted, _ = span_attention(module, *parts, None, scaling=0.3, sliding_window=window, layout=plain)
    found, _ = span_attention(module, *parts, None, scaling=0.3, sliding_window=window, layout=packed)
    assert found.shape == (1, 20, 4, 8)
    torch.testing.assert_close(found, wanted, atol=2e-2, rtol=2e-2)


def test_what_flash_attention_cannot_do_is_done_span_by_span() -> None:
    """It computes in 16 bits only."""
    plain, packed = layouts(SPANS)
    parts, module = tensors(torch.float32), torch.nn.Identity()
    wanted, _ = span_attention(module, *parts, None, layout=plain)
    found, _ = span_attention(module, *parts, None, layout=packed)
    torch.testing.assert_close(found, wanted)
