"""Layers that attention has after some of its heads were removed."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.spec.compression.steps import Kept, parse_indices


class WideLinear(nn.Linear):
    """A dense layer with fewer rows or columns than the code around it sees: other outputs are zero, other inputs are
    not read."""

    reads: Tensor | None
    places: Tensor | None

    def __init__(self, narrow: nn.Linear, kept: Kept, widths: tuple[int, int]) -> None:
        """`narrow` is the layer after the cut; `widths` are its old numbers of outputs and inputs."""
        super().__init__(1, 1, bias=False, device="meta")
        self.weight, self.bias = narrow.weight, narrow.bias
        self.block = 1
        self.out_features, self.in_features = narrow.out_features, narrow.in_features
        device = narrow.weight.device
        reads = None
        if kept.wide == "inputs" and kept.inputs is not None:
            columns = parse_indices(kept.inputs)
            self.block = _block(columns, widths[1])
            reads = torch.tensor(columns[:: self.block], device=device) // self.block
        self.register_buffer("reads", reads, persistent=False)
        places = None
        if (
            kept.wide == "out" and kept.out is not None
        ):  # the place of each old output among the rows; after the last one there is a zero
            rows = parse_indices(kept.out)
            self.block = _block(rows, widths[0])
            places = torch.full((widths[0] // self.block,), len(rows) // self.block, device=device)
            places[[row // self.block for row in rows[:: self.block]]] = torch.arange(
                len(rows) // self.block, device=device
            )
        self.register_buffer("places", places, persistent=False)

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        x = input if self.reads is None else self._blocks(input).index_select(-2, self.reads).flatten(-2)
        y = F.linear(x, self.weight, self.bias)
        if self.places is None:
            return y
        return F.pad(self._blocks(y), (0, 0, 0, 1)).index_select(-2, self.places).flatten(-2)

    def _blocks(self, x: Tensor) -> Tensor:
        """Whole heads are copied, not single numbers."""
        return x.reshape(*x.shape[:-1], -1, self.block)


def _block(indices: list[int], width: int) -> int:
    """The largest size of blocks that the indices consist of, each at a multiple of its size."""
    ends = [a for a, b in pairwise([*indices, -2]) if b != a + 1]
    starts = [b for a, b in pairwise([-2, *indices]) if b != a + 1]
    return math.gcd(width, *starts, *(end + 1 for end in ends))


class FewerHeads(nn.Module):
    """torch.nn.MultiheadAttention with some of its heads. Its parameters have the same names."""

    def __init__(self, whole: nn.MultiheadAttention, heads: list[int]) -> None:
        super().__init__()
        self.embed_dim, self.num_heads, self.head_dim = whole.embed_dim, len(heads), whole.head_dim
        self.batch_first, self.dropout = whole.batch_first, whole.dropout
        self._qkv_same_embed_dim = False  # torch's fused encoder must not take this layer's weights
        columns = [h * self.head_dim + i for h in heads for i in range(self.head_dim)]
        rows = [part * self.embed_dim + c for part in range(3) for c in columns]
        self.in_proj_weight = nn.Parameter(whole.in_proj_weight.detach()[rows])
        bias = whole.in_proj_bias
        self.in_proj_bias = None if bias is None else nn.Parameter(bias.detach()[rows])
        self.out_proj = nn.Linear(len(columns), self.embed_dim, bias=whole.out_proj.bias is not None)
        self.out_proj.weight = nn.Parameter(whole.out_proj.weight.detach()[:, columns])
        if whole.out_proj.bias is not None:
            self.out_proj.bias = whole.out_proj.bias

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """As torch's. The weights that it returns are those of the heads that are left."""
        if not self.batch_first:
            query, key, value = (x.transpose(0, 1) for x in (query, key, value))
        q, k, v = self._projected(query, key, value)
        mask = _mask(key_padding_mask, attn_mask, q)
        dropout = self.dropout if self.training else 0.0
        weights = None
        if need_weights:
            scores = q @ k.transpose(-1, -2) * self.head_dim**-0.5
            weights = (scores if mask is None else scores + mask).softmax(-1)
            found = F.dropout(weights, dropout) @ v
            weights = weights.mean(1) if average_attn_weights else weights
        else:
            found = F.scaled_dot_product_attention(q, k, v, mask, dropout, is_causal=is_causal and mask is None)
        output = self.out_proj(found.transpose(1, 2).flatten(2))
        return (output if self.batch_first else output.transpose(0, 1)), weights

    def _projected(self, *inputs: Tensor) -> list[Tensor]:
        weights = self.in_proj_weight.chunk(3)
        biases: Any = (None,) * 3 if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        made = [F.linear(x, w, b) for x, w, b in zip(inputs, weights, biases, strict=True)]
        return [x.reshape(*x.shape[:2], self.num_heads, self.head_dim).transpose(1, 2) for x in made]


def _mask(padding: Tensor | None, attention: Tensor | None, like: Tensor) -> Tensor | None:
    """One additive mask; True stands for what is not seen. A mask per head cannot be told to belong to a head."""
    parts = []
    for part in (padding, attention):
        if part is None:
            continue
        if part is attention and part.dim() != 2:
            raise ValueError("an attention mask per head does not fit a layer that has lost heads")
        numbers = (
            torch.zeros_like(part, dtype=like.dtype).masked_fill(part, -torch.inf) if part.dtype == torch.bool else part
        )
        parts.append(numbers.reshape(numbers.shape[0], 1, 1, -1) if part is padding else numbers[None, None])
    return sum(parts[1:], parts[0]) if parts else None
