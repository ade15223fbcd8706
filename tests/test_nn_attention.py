"""Attention with rounded products: it means what it means in torch, and is made of matmul."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from narrowgauge import matmul, quantize
from narrowgauge.nn import LayerFormats, MultiheadAttention
from tests.numbers_by_hand import same

EXACT = LayerFormats(fused=True)  # simulated, in float32
ATTENTIONS: list[dict[str, Any]] = [
    {},
    {"bias": False},
    {"kdim": 3, "vdim": 5},
    {"add_bias_kv": True, "add_zero_attn": True},
    {"dropout": 0.4},
]


@pytest.mark.parametrize("options", ATTENTIONS)
@pytest.mark.parametrize("batch_first", [False, True])
def test_attention_means_what_it_means_in_torch(options: dict[str, Any], batch_first: bool) -> None:
    torch.manual_seed(3)
    layer = MultiheadAttention(8, 2, batch_first=batch_first, **options, formats=EXACT)
    plain = nn.MultiheadAttention(8, 2, batch_first=batch_first, **options)
    if not options.get("kdim"):
        torch.nn.init.normal_(layer.in_proj_weight)
    plain.load_state_dict(layer.state_dict())
    rows, columns, batch = 4, 5, 3
    query, key, value = (
        torch.randn(batch, n, options.get(dim, 8))
        for n, dim in ((rows, ""), (columns, "kdim"), (columns, "vdim"))
    )
    padding = torch.zeros(batch, columns, dtype=torch.bool)
    padding[1, 3:] = padding[2, :1] = True
    masks = [
        {},
        {"key_padding_mask": padding},
        {"attn_mask": torch.randn(rows, columns)},
        {"attn_mask": torch.rand(batch * 2, rows, columns) < 0.3, "key_padding_mask": padding},
        {"attn_mask": torch.ones(rows, columns).triu(2).bool(), "is_causal": True},
    ]
    both = (True,) if options.get("dropout") else (True, False)  # fused kernels draw differently
    for mask, weights, average in itertools.product(masks, both, (True, False)):
        how = {"need_weights": weights, "average_attn_weights": average, **mask}
        inputs = [x if batch_first else x.transpose(0, 1) for x in (query, key, value)]
        compare_attention(layer, plain, inputs, how)
    alone = [x[0] for x in (query, key, value)]
    compare_attention(layer, plain, alone, {"key_padding_mask": padding[0]})
    if "kdim" not in options:
        compare_attention(layer, plain, [inputs[0]] * 3, {})
        compare_attention(layer, plain, [inputs[0], inputs[1], inputs[1]], {})


def test_a_causal_hint_hides_what_it_hides_in_torch() -> None:
    """Without weights the hint is taken for the mask; then it hides the added keys as well."""
    for options in ({"add_bias_kv": True}, {"add_zero_attn": True}, {}):
        layer = MultiheadAttention(8, 2, **options, formats=EXACT)
        plain = nn.MultiheadAttention(8, 2, **options)
        plain.load_state_dict(layer.state_dict())
        x, keys = torch.randn(5, 3, 8), torch.randn(3, 3, 8)
        for need in (True, False):
            how = {"is_causal": True, "need_weights": need}
            causal = nn.Transformer.generate_square_subsequent_mask(5)
            compare_attention(layer, plain, [x, x, x], {"attn_mask": causal, **how})
            compare_attention(layer, plain, [x, keys, keys], {"attn_mask": causal[:, :3], **how})


def compare_attention(
    layer: nn.Module, plain: nn.Module, inputs: list[Tensor], how: dict[str, Any]
) -> None:
    outs, grads = [], []
    for each in (layer, plain):
        torch.manual_seed(4)
        each.zero_grad()
        out, weights = each(*inputs, **how)
        (out.sin().sum() + (0 if weights is None else weights.cos().sum())).backward()
        outs.append((out, weights))
        grads.append([x.grad for x in each.parameters()])
    torch.testing.assert_close(*outs, equal_nan=True, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(*grads, equal_nan=True, rtol=1e-4, atol=1e-4)


def test_attention_is_made_of_rounded_products() -> None:
    torch.manual_seed(5)
    formats = LayerFormats("e4m3", "e3m4", accumulate="fp16")
    layer = MultiheadAttention(8, 2, bias=False, batch_first=True, formats=formats)
    x = torch.randn(3, 5, 8)

    def act(x: Tensor) -> Tensor:
        return quantize(x, "e3m4")

    def weight(x: Tensor) -> Tensor:
        return quantize(x, "e4m3").t()

    projected = matmul(act(x), weight(layer.in_proj_weight), accumulate="fp16")
    q, k, v = (y.view(3, 5, 2, 4).transpose(1, 2) for y in projected.chunk(3, -1))
    scores = matmul(act(q * 0.5), act(k).transpose(2, 3), accumulate="fp16")
    attention = scores.softmax(-1)
    context = matmul(act(attention), act(v), accumulate="fp16").transpose(1, 2).reshape(3, 5, 8)
    expected = matmul(act(context), weight(layer.out_proj.weight), accumulate="fp16")
    out, weights = layer(x, x, x, average_attn_weights=False)
    assert same(out, expected)
    assert same(weights, attention)


def test_a_query_that_may_see_nothing_gives_what_torch_gives() -> None:
    layer = MultiheadAttention(8, 2, formats=EXACT)
    plain = nn.MultiheadAttention(8, 2)
    plain.load_state_dict(layer.state_dict())
    x, mask = torch.randn(3, 1, 8), torch.eye(3).bool().logical_not()
    mask[1] = True
    for need in (True, False):
        how = {"attn_mask": mask, "need_weights": need}
        compare_attention(layer, plain, [x, x, x], how)


def test_errors_say_what_is_allowed() -> None:
    attention = MultiheadAttention(4, 2, formats=EXACT)
    x = torch.ones(3, 2, 4)
    cases: list[tuple[tuple[Tensor, ...], dict[str, Any], type[Exception], str]] = [
        ((x, x, x), {"is_causal": True}, ValueError, "is_causal is True without attn_mask"),
        ((x, x[0], x[0]), {}, ValueError, r"shapes \(3, 2, 4\), \(2, 4\), \(2, 4\); all must"),
        ((x, x, x[:2]), {}, ValueError, "there is a value per key"),
        ((x, x, x), {"attn_mask": torch.ones(2, 3)}, ValueError, r"allowed: \(3, 3\), or \(4, 3"),
        ((x, x, x), {"attn_mask": torch.ones(3, 3).int()}, TypeError, "attn_mask is torch.int32"),
        ((x, x, x), {"key_padding_mask": torch.ones(3)}, ValueError, "it must have 2"),
        ((x, x, x), {"key_padding_mask": torch.ones(2, 2)}, ValueError, r"allowed: \(2, 3\)"),
    ]
    for inputs, options, error, text in cases:
        with pytest.raises(error, match=text):
            attention(*inputs, **options)
