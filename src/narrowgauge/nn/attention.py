"""Attention with its products rounded: both projections, q·kᵀ and attention·v.

What lies between them (scaling, masks, softmax, dropout) is not a sum of products and stays
torch's own, in the layer's dtype. So no fused attention kernel can be used, and the attention
weights of all heads take memory, as they do in torch with ``need_weights=True``.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from narrowgauge.nn import products
from narrowgauge.nn.layer_formats import LayerFormats
from narrowgauge.nn.layers import RoundedLayer, as_input

_SCORES, _CONTEXT = ("activations", "activations"), ("activations", "activations")


class MultiheadAttention(RoundedLayer, nn.MultiheadAttention):
    """:class:`torch.nn.MultiheadAttention` with rounded operands, products and sums.

    ``formats.weights`` is that of the projections' weights, ``formats.activations`` that of every
    other operand: inputs, scaled queries, keys, values, attention weights, and what is projected
    out. ``out_proj`` is part of this layer, and its formats are this layer's.

    Args:
        embed_dim: as in torch, and so are the others.
        num_heads: as there.
        dropout: as there.
        bias: as there.
        add_bias_kv: as there.
        add_zero_attn: as there.
        kdim: as there.
        vdim: as there.
        batch_first: as there.
        device: as there.
        dtype: as there.
        formats: what is rounded to what; ``None``: nothing.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        formats: LayerFormats | None = None,
    ) -> None:
        more = (add_bias_kv, add_zero_attn, kdim, vdim, batch_first, device, dtype)
        super().__init__(embed_dim, num_heads, dropout, bias, *more)
        self.formats = formats

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
        """Arguments, shapes and results as in torch."""
        masks = (key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal)
        dtype = self.out_proj.weight.dtype
        if not self.formats.rounds_in(dtype):
            outputs: tuple[Tensor, Tensor | None] = super().forward(query, key, value, *masks)
            return outputs
        named = (("query", query), ("key", key), ("value", value))
        taken = {id(x): as_input(x, name, dtype) for name, x in named}  # the same stay the same
        query, key, value = taken[id(query)], taken[id(key)], taken[id(value)]
        with products.without_autocast(query.device):
            return self._rounded_forward(query, key, value, *masks)

    def _rounded_forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None,
        need_weights: bool,
        attn_mask: Tensor | None,
        average_attn_weights: bool,
        is_causal: bool,
    ) -> tuple[Tensor, Tensor | None]:
        _check(query, key, value, key_padding_mask)
        batch = 0 if self.batch_first else 1
        if query.dim() == 3 and query.shape[batch] != key.shape[batch]:
            raise ValueError(
                f"query has a batch of {query.shape[batch]} (dimension {batch}) and key one of "
                f"{key.shape[batch]}; they must be equal (batch_first is {self.batch_first})"
            )
        if is_causal and attn_mask is None:
            raise ValueError(
                "is_causal is True without attn_mask; it is a hint that attn_mask is the causal "
                "one, so give that (nn.Transformer.generate_square_subsequent_mask makes it)"
            )
        formats = self.formats
        batched = query.dim() == 3
        # From here on: (batch, sequence, feature), and (batch, head, sequence, feature).
        q, k, v = (self._batch_first(x, batched) for x in self._projected(query, key, value))
        if self.bias_k is not None and self.bias_v is not None:
            k = torch.cat([k, self.bias_k.expand(k.shape[0], 1, -1)], 1)
            v = torch.cat([v, self.bias_v.expand(v.shape[0], 1, -1)], 1)
        q, k, v = (x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for x in (q, k, v))
        if self.add_zero_attn:
            k, v = F.pad(k, (0, 0, 0, 1)), F.pad(v, (0, 0, 0, 1))
        q = q * math.sqrt(1 / self.head_dim)
        scores = products.product(q, k.transpose(-2, -1), _SCORES, formats)
        if is_causal and key_padding_mask is None and not need_weights:
            # As torch does: the hint is taken for the mask, and hides added keys as well.
            hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
            masks = [_additive("attn_mask", hidden, q.dtype)]
        else:
            masks = self._masks(key_padding_mask, attn_mask, q, k.shape[2])
        for mask in masks:
            scores = scores + mask
        weights = _softmax(scores, need_weights)
        weights = F.dropout(weights, self.dropout, self.training)
        context = products.product(weights, v, _CONTEXT, formats).transpose(1, 2).flatten(2)
        out = products.linear(context, self.out_proj.weight, self.out_proj.bias, formats)
        if not batched:
            out, weights = out.squeeze(0), weights.squeeze(0)
        elif not self.batch_first:
            out = out.transpose(0, 1)
        if not need_weights:
            return out, None
        return out, weights.mean(-3) if average_attn_weights else weights

    def _batch_first(self, x: Tensor, batched: bool) -> Tensor:
        if not batched:
            return x.unsqueeze(0)
        return x if self.batch_first else x.transpose(0, 1)

    def _projected(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        """One product for what is the same tensor, so that its gradient is one long sum."""
        formats, bias = self.formats, self.in_proj_bias
        if self.in_proj_weight is None:  # kdim or vdim differs
            three = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
            biases = (None,) * 3 if bias is None else bias.chunk(3)
            inputs = zip((query, key, value), three, biases, strict=True)
            return tuple(products.linear(x, w, b, formats) for x, w, b in inputs)
        parts = [(query, 3)] if query is key is value else [(query, 1), (key, 2)]
        if key is not value:
            parts = [(query, 1), (key, 1), (value, 1)]
        outputs: list[Tensor] = []
        for x, count in parts:
            rows = slice(len(outputs) * self.embed_dim, (len(outputs) + count) * self.embed_dim)
            part = None if bias is None else bias[rows]
            y = products.linear(x, self.in_proj_weight[rows], part, formats)
            outputs += y.chunk(count, -1)
        return tuple(outputs)

    def _masks(
        self, padding: Tensor | None, attention: Tensor | None, q: Tensor, columns: int
    ) -> list[Tensor]:
        """What is added to the scores (batch, head, rows, columns); added keys are not masked."""
        masks = []
        batch, heads, rows, _ = q.shape
        added = (self.bias_k is not None) + self.add_zero_attn
        given = columns - added
        if attention is not None:
            allowed = ((rows, given), (batch * heads, rows, given))
            if tuple(attention.shape) not in allowed:
                raise ValueError(
                    f"attn_mask has shape {tuple(attention.shape)}; allowed: {allowed[0]}, or "
                    f"{allowed[1]} for one per batch element and head"
                )
            mask = attention if attention.dim() == 2 else attention.view(batch, heads, rows, given)
            masks.append(_additive("attn_mask", mask, q.dtype))
        if padding is not None:
            if padding.shape[-1] != given or padding.numel() != batch * given:
                raise ValueError(
                    f"key_padding_mask has shape {tuple(padding.shape)}; allowed: "
                    f"{(batch, given)}, without the batch if the inputs have none"
                )
            mask = _additive("key_padding_mask", padding, q.dtype)
            masks.append(mask.view(batch, 1, 1, given))
        return [F.pad(mask, (0, added)) for mask in masks]


def _check(query: Tensor, key: Tensor, value: Tensor, padding: Tensor | None) -> None:
    if query.dim() not in (2, 3) or key.dim() != query.dim() or value.dim() != query.dim():
        raise ValueError(
            f"query, key and value have shapes {_shapes(query, key, value)}; all must have 3 "
            "dimensions, or without a batch 2"
        )
    if key.shape[:-1] != value.shape[:-1]:
        raise ValueError(
            f"query, key and value have shapes {_shapes(query, key, value)}; there is a value per "
            "key"
        )
    if padding is not None and padding.dim() != query.dim() - 1:
        raise ValueError(
            f"key_padding_mask has {padding.dim()} dimensions; with a query of {query.dim()} "
            f"dimensions it must have {query.dim() - 1}"
        )


def _shapes(*tensors: Tensor) -> str:
    """Called where an error is raised only: a compiler cannot make text of a variable size."""
    return ", ".join(str(tuple(x.shape)) for x in tensors)


def _additive(name: str, mask: Tensor, dtype: torch.dtype) -> Tensor:
    if mask.dtype == torch.bool:
        return torch.zeros_like(mask, dtype=dtype).masked_fill(mask, -math.inf)
    if not mask.is_floating_point():
        raise TypeError(f"{name} is {mask.dtype}; it must be torch.bool or floating-point")
    return mask.to(dtype)


def _softmax(scores: Tensor, need_weights: bool) -> Tensor:
    """Softmax; a query whose keys are all masked gives NaN or, without weights, 0: as in torch."""
    if need_weights:
        return scores.softmax(-1)
    nothing = scores.isneginf().all(-1, keepdim=True)
    return scores.masked_fill(nothing, 0).softmax(-1).masked_fill(nothing, 0)
