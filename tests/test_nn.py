"""Layers whose operands, products and sums are rounded, against loops and against torch."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from narrowgauge import FloatFormat, MatmulBackward, format_of, matmul, quantize
from narrowgauge.nn import (
    Conv1d,
    Conv2d,
    Conv3d,
    LayerFormats,
    Linear,
    MultiheadAttention,
    Quantizer,
    convert,
)
from tests.matmul_by_hand import element, float_of, number_of, rounded, total
from tests.numbers_by_hand import same

STORED = {"weights": "e4m3", "activations": "e3m4", "gradients": "e5m2"}
EXACT = LayerFormats(fused=True)  # simulated, in float32
LAYERS = [
    lambda formats: Linear(6, 4, formats=formats),
    lambda formats: Conv2d(6, 4, 3, stride=2, padding=1, formats=formats),
    lambda formats: MultiheadAttention(6, 2, batch_first=True, formats=formats),
]
INPUTS = [(5, 6), (2, 6, 5, 4), (2, 3, 6)]


def floating(name: str) -> FloatFormat:
    format = format_of(name)
    assert isinstance(format, FloatFormat)
    return format


def run(layer: nn.Module, x: Tensor) -> Tensor:
    out = layer(x, x, x)[0] if isinstance(layer, nn.MultiheadAttention) else layer(x)
    assert isinstance(out, Tensor)
    return out


def grad_of(x: Tensor) -> Tensor:
    assert x.grad is not None
    return x.grad


# -- equal to loops over single numbers ------------------------------------------------------------

SUMS: list[dict[str, Any]] = [
    {"accumulate": "e5m4"},
    {"multiply": "e4m3", "accumulate": "fp16", "backward": MatmulBackward(accumulate="e5m4")},
    {"accumulate": "bf16", "compensated": True, "fused": True},
    {"accumulate": "fp16", "fused": True, "chunk": 4, "rounding": "toward-zero"},
]


def elements(formats: LayerFormats, forward: bool) -> Any:
    """The sum of products of two lists, by hand."""
    sums = formats.forward_sums if forward else formats.backward_sums
    accumulate = floating(sums["accumulate"])
    multiply = floating(sums["multiply"]) if sums["multiply"] else accumulate
    how = (None if sums["fused"] else multiply, accumulate, sums["compensated"], sums["chunk"])

    def one(pairs: Sequence[tuple[Tensor, Tensor]]) -> float:
        a, b = [float(x) for x, _ in pairs], [float(y) for _, y in pairs]
        return element(a, b, *how, sums["rounding"])

    return one


def plus_bias(y: float, bias: float, formats: LayerFormats) -> float:
    assert isinstance(formats.accumulate, str)
    accumulate, rounding = floating(formats.accumulate), formats.rounding
    narrow = rounded(number_of(bias), accumulate, rounding)
    return float_of(rounded(total([number_of(y), narrow]), accumulate, rounding))


@pytest.mark.parametrize("sums", SUMS)
def test_linear_equals_the_loop(sums: dict[str, Any]) -> None:
    formats = LayerFormats(**STORED, **sums)
    torch.manual_seed(0)
    layer = Linear(7, 3, formats=formats)
    x, grad = torch.randn(2, 4, 7, requires_grad=True), torch.randn(2, 4, 3)
    out = layer(x)
    out.backward(grad)
    how = {"rounding": formats.rounding}
    xq = quantize(x.detach(), "e3m4", **how).view(8, 7)
    wq = quantize(layer.weight.detach(), "e4m3", **how)
    gq = quantize(grad, "e5m2", rounding=formats.backward_sums["rounding"]).view(8, 3)
    forward, backward = elements(formats, True), elements(formats, False)
    bias = layer.bias.tolist()
    y = [
        [plus_bias(forward(list(zip(row, w, strict=True))), bias[o], formats) for o, w in rows(wq)]
        for row in xq
    ]
    assert same(out.detach(), torch.tensor(y).view(2, 4, 3))
    grad_x = [[backward(list(zip(g, w, strict=True))) for w in wq.t()] for g in gq]
    assert same(grad_of(x), torch.tensor(grad_x).view(2, 4, 7))
    grad_w = [[backward(list(zip(g, c, strict=True))) for c in xq.t()] for g in gq.t()]
    assert same(grad_of(layer.weight), torch.tensor(grad_w))
    grad_b = [backward([(torch.tensor(1.0), each) for each in g]) for g in gq.t()]
    assert same(grad_of(layer.bias), torch.tensor(grad_b))


def rows(x: Tensor) -> list[tuple[int, Tensor]]:
    return list(enumerate(x))


GEOMETRIES: list[tuple[Any, tuple[int, ...], dict[str, Any]]] = [
    (Conv1d, (9,), {"kernel_size": 3, "stride": 2, "padding": 2, "dilation": 2, "groups": 2}),
    (Conv1d, (7,), {"kernel_size": 4, "padding": "same", "padding_mode": "circular"}),
    (Conv2d, (4, 5), {"kernel_size": (2, 3), "stride": (3, 2), "padding": (1, 0)}),
    (Conv2d, (5, 4), {"kernel_size": 2, "padding": "same", "dilation": (1, 2), "groups": 4}),
    (Conv2d, (4, 3), {"kernel_size": 3, "padding": 1, "padding_mode": "reflect", "groups": 2}),
    (Conv3d, (3, 2, 3), {"kernel_size": 2, "stride": (2, 1, 2), "padding": (1, 0, 1), "groups": 2}),
    (Conv3d, (2, 3, 2), {"kernel_size": (1, 2, 1), "padding": "valid", "bias": False}),
]


@pytest.mark.parametrize(("kind", "size", "options"), GEOMETRIES)
@pytest.mark.parametrize("sums", SUMS[:3:2] + SUMS[1:2])
def test_convolutions_equal_the_loop(
    kind: Any, size: tuple[int, ...], options: dict[str, Any], sums: dict[str, Any]
) -> None:
    formats = LayerFormats(**STORED, **sums)
    torch.manual_seed(1)
    layer = kind(4, 4, **options, formats=formats)
    x = torch.randn(2, 4, *size, requires_grad=True)
    out = layer(x)
    grad = torch.randn(out.shape)
    out.backward(grad)
    xq = quantize(x.detach(), "e3m4").requires_grad_()
    wq, gq = quantize(layer.weight.detach(), "e4m3"), quantize(grad, "e5m2")
    mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
    padded = F.pad(xq, layer._reversed_padding_repeated_twice, mode=mode)
    y, grad_x, grad_w, grad_b = convolution_by_hand(layer, padded.detach(), wq, gq, formats)
    assert same(out.detach(), y)
    padded.backward(grad_x)  # padding copies; what was copied is added up by torch
    assert same(grad_of(x), grad_of(xq))
    assert same(grad_of(layer.weight), grad_w)
    if layer.bias is not None:
        assert same(grad_of(layer.bias), grad_b)


def convolution_by_hand(
    layer: Any, x: Tensor, w: Tensor, g: Tensor, formats: LayerFormats
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Output and gradients by the definition, for an input that is padded already."""
    forward, backward = elements(formats, True), elements(formats, False)
    stride, dilation = layer.stride, layer.dilation
    ins, outs = x.shape[1] // layer.groups, w.shape[0] // layer.groups
    positions = list(itertools.product(*map(range, g.shape[2:])))
    places = list(itertools.product(*map(range, w.shape[2:])))  # of the kernel
    zero, one = torch.tensor(0.0), torch.tensor(1.0)

    def at(p: tuple[int, ...], k: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(a * s + b * d for a, b, s, d in zip(p, k, stride, dilation, strict=True))

    y, grad_x = torch.empty_like(g), torch.empty_like(x)
    grad_w, grad_b = torch.empty_like(w), torch.empty(w.shape[0])
    for n, o, p in itertools.product(range(x.shape[0]), range(w.shape[0]), positions):
        first = o // outs * ins
        seen = [(c, k) for c in range(ins) for k in places]
        value = forward([(w[(o, c, *k)], x[(n, first + c, *at(p, k))]) for c, k in seen])
        if layer.bias is not None:
            value = plus_bias(value, layer.bias[o].item(), formats)
        y[(n, o, *p)] = value
    for n, c in itertools.product(range(x.shape[0]), range(x.shape[1])):
        first = c // ins * outs
        for s in itertools.product(*map(range, x.shape[2:])):
            terms = []  # a place of the kernel that no output put here meets a zero
            for o, k in itertools.product(range(first, first + outs), reversed(places)):
                hit = [g[(n, o, *p)] for p in positions if at(p, k) == s]
                terms.append((w[(o, c % ins, *k)], hit[0] if hit else zero))
            grad_x[(n, c, *s)] = backward(terms)
    for o in range(w.shape[0]):
        samples = [(n, p) for n in range(x.shape[0]) for p in positions]
        for c, k in itertools.product(range(ins), places):
            terms = [(g[(n, o, *p)], x[(n, o // outs * ins + c, *at(p, k))]) for n, p in samples]
            grad_w[(o, c, *k)] = backward(terms)
        grad_b[o] = backward([(one, g[(n, o, *p)]) for n, p in samples])
    return y, grad_x, grad_w, grad_b


# -- equal to torch --------------------------------------------------------------------------------

ODD: list[dict[str, Any]] = [
    {"kernel_size": 3},
    {"kernel_size": 3, "stride": 2, "dilation": 2, "groups": 2, "padding": 1},
    {"kernel_size": 3, "padding": "same", "dilation": 2, "padding_mode": "circular"},
    {"kernel_size": 3, "stride": 3, "padding": 2, "padding_mode": "reflect"},
    {"kernel_size": 2, "padding": "same", "padding_mode": "replicate"},
    {"kernel_size": 2, "padding": "same"},
    {"kernel_size": 1, "stride": 2, "padding": 3},
]


@pytest.mark.filterwarnings("ignore:Using padding='same'")  # with even kernels torch is slower
@pytest.mark.parametrize("kind", [Conv1d, Conv2d, Conv3d])
@pytest.mark.parametrize("options", ODD)
def test_convolutions_of_whole_numbers_equal_torch(kind: Any, options: dict[str, Any]) -> None:
    torch.manual_seed(2)
    layer = kind(4, 6, **options, formats=EXACT)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randint(-3, 4, parameter.shape))
    double = getattr(nn, kind.__name__)(4, 6, **options).double()
    double.load_state_dict(layer.state_dict())
    x = torch.randint(-3, 4, (2, 4, *(7, 8, 9)[: layer.weight.dim() - 2])).float().requires_grad_()
    wide = x.detach().double().requires_grad_()
    out, expected = layer(x), double(wide)
    grad = torch.randint(-3, 4, expected.shape)
    out.backward(grad.float())
    expected.backward(grad.double())
    assert torch.equal(out.double(), expected)
    assert torch.equal(grad_of(x).double(), grad_of(wide))
    assert torch.equal(grad_of(layer.weight).double(), grad_of(double.weight))
    assert torch.equal(grad_of(layer.bias).double(), grad_of(double.bias))
    assert torch.equal(layer(x[0]), out[0])  # without a batch


def test_gradients_of_gradients_of_a_convolution_equal_torch() -> None:
    layer = Conv2d(2, 4, 3, stride=2, padding=1, groups=2, bias=False, formats=EXACT)
    with torch.no_grad():
        layer.weight.copy_(torch.randint(-2, 3, layer.weight.shape))
    plain = nn.Conv2d(2, 4, 3, stride=2, padding=1, groups=2, bias=False)
    plain.load_state_dict(layer.state_dict())
    x = torch.randint(-2, 3, (2, 2, 5, 4)).float().requires_grad_()
    results = []
    for each in (layer, plain):
        (first,) = torch.autograd.grad((each(x) ** 2).sum(), x, create_graph=True)
        results.append(torch.autograd.grad((first**2).sum(), (x, each.weight)))
    for ours, theirs in zip(*results, strict=True):
        assert torch.equal(ours, theirs)


# -- torch's own products of rounded operands ------------------------------------------------------


def test_without_accumulators_products_are_torchs() -> None:
    torch.manual_seed(6)
    layer = Conv2d(3, 4, 3, padding=1, padding_mode="circular", formats=LayerFormats(**STORED))
    x, grad = torch.randn(2, 3, 5, 5, requires_grad=True), torch.randn(2, 4, 5, 5)
    layer(x).backward(grad)
    plain = nn.Conv2d(3, 4, 3, padding=1, padding_mode="circular")
    plain.load_state_dict(layer.state_dict())
    with torch.no_grad():
        plain.weight.copy_(quantize(layer.weight, "e4m3"))
    wide = quantize(x.detach(), "e3m4").requires_grad_()
    out = plain(wide)
    out.backward(quantize(grad, "e5m2"))
    assert same(layer(x), out)
    assert same(grad_of(x), grad_of(wide))
    for ours, theirs in zip(layer.parameters(), plain.parameters(), strict=True):
        assert same(grad_of(ours), grad_of(theirs))


@pytest.mark.parametrize(("make", "shape"), list(zip(LAYERS, INPUTS, strict=True)))
def test_nothing_rounded_passes_gradcheck(make: Any, shape: tuple[int, ...]) -> None:
    layer = make(None).double()
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    inputs = (x, *layer.parameters())
    assert torch.autograd.gradcheck(lambda x, *_: run(layer, x), inputs, fast_mode=True)


def test_parameters_are_masters() -> None:
    layer = Linear(4, 4, formats=LayerFormats("e2m1fn", "e4m3", accumulate="bf16"))
    before = layer.weight.detach().clone()
    layer(torch.randn(3, 4)).sum().backward()
    assert torch.equal(layer.weight, before)
    assert layer.weight.dtype == torch.float32
    assert list(layer.state_dict()) == ["weight", "bias"]


def test_the_quantizer_rounds_forward_and_backward() -> None:
    x, grad = torch.randn(9, requires_grad=True), torch.randn(9)
    out = Quantizer("e4m3", "e5m2")(x)
    out.backward(grad)
    assert same(out.detach(), quantize(x.detach(), "e4m3"))
    assert same(grad_of(x), quantize(grad, "e5m2"))
    assert Quantizer()(x) is x
    y = Quantizer(None, "e5m2")(x * 1)
    nn.functional.relu(y, inplace=True).sum().backward()  # may be written in place
    assert "e4m3, None, rounding='up'" in repr(Quantizer("e4m3", rounding="up"))
    blocks = Quantizer("mxfp8_e4m3", "mxfp8_e5m2")(x)
    assert same(blocks.detach(), quantize(x.detach(), "mxfp8_e4m3"))


# -- block formats ---------------------------------------------------------------------------------


def test_blocks_lie_along_each_sum() -> None:
    torch.manual_seed(7)
    block = LayerFormats("e4m3@4", "e3m4@4", "e5m2@4", accumulate="fp16")
    linear = Linear(10, 7, bias=False, formats=block)
    x, grad = torch.randn(9, 10, requires_grad=True), torch.randn(9, 7)
    out = linear(x)
    out.backward(grad)
    w, xd = linear.weight.detach(), x.detach()
    for ours, a, b, operands in (
        (out.detach(), xd, w.t(), ("e3m4@4", "e4m3@4")),
        (grad_of(x), grad, w, ("e5m2@4", "e4m3@4")),
        (grad_of(linear.weight), grad.t(), xd, ("e5m2@4", "e3m4@4")),
    ):
        assert same(ours, matmul(a, b, operands=operands, accumulate="fp16"))
    conv = Conv2d(4, 6, 3, stride=2, padding=1, groups=2, formats=block)
    x, grad = torch.randn(2, 4, 5, 5, requires_grad=True), torch.randn(2, 6, 3, 3)
    out = conv(x)
    out.backward(grad)
    assert conv.bias is not None
    for g in range(2):  # each group is a product of torch's columns
        columns = F.unfold(x.detach()[:, 2 * g : 2 * g + 2], 3, padding=1, stride=2)
        columns = columns.transpose(0, 1).reshape(18, 18)
        w = conv.weight.detach()[3 * g : 3 * g + 3].reshape(3, 18)
        part = grad[:, 3 * g : 3 * g + 3].transpose(0, 1).reshape(3, 18)
        y = matmul(w, columns, operands=("e4m3@4", "e3m4@4"), accumulate="fp16")
        bias = quantize(conv.bias.detach()[3 * g : 3 * g + 3], "fp16")[:, None]
        y = quantize(y.double() + bias.double(), "fp16").float()
        assert same(out.detach()[:, 3 * g : 3 * g + 3].transpose(0, 1).reshape(3, 18), y)
        grad_w = matmul(part, columns.t(), operands=("e5m2@4", "e3m4@4"), accumulate="fp16")
        assert same(grad_of(conv.weight)[3 * g : 3 * g + 3].reshape(3, 18), grad_w)
        grad_b = matmul(part, torch.ones(18), operands=("e5m2@4", None), accumulate="fp16")
        assert same(grad_of(conv.bias)[3 * g : 3 * g + 3], grad_b)


def test_standard_blocks_come_close_and_train() -> None:
    torch.manual_seed(8)
    for make, shape in zip(LAYERS, INPUTS, strict=True):
        layer = make(LayerFormats("mxfp8_e4m3", "mxfp8_e4m3", "mxfp8_e5m2"))
        plain = make(None)
        plain.load_state_dict(layer.state_dict())
        x = torch.randn(shape)
        out = run(layer, x)
        torch.testing.assert_close(out, run(plain, x), rtol=0.1, atol=0.1)
        out.square().sum().backward()
        assert all(bool(grad_of(p).isfinite().all()) for p in layer.parameters())


# -- edges -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("make", "shape"), list(zip(LAYERS, INPUTS, strict=True)))
@pytest.mark.parametrize("formats", [LayerFormats(**STORED), LayerFormats(**STORED, **SUMS[0])])
def test_an_empty_batch(make: Any, shape: tuple[int, ...], formats: LayerFormats) -> None:
    layer = make(formats)
    x = torch.randn(0, *shape[1:], requires_grad=True)
    out = run(layer, x)
    assert out.shape == run(make(None), x).shape
    out.sum().backward()
    assert all(torch.equal(grad_of(p), torch.zeros_like(p)) for p in layer.parameters())
    assert grad_of(x).shape == x.shape


def test_infinities_and_nan_go_where_torch_puts_them() -> None:
    for make, shape in zip(LAYERS[:2], INPUTS, strict=False):
        layer, plain = make(LayerFormats(accumulate="bf16")), make(None)
        plain.load_state_dict(layer.state_dict())
        x = torch.randn(shape)
        x[0].view(-1)[2], x[1].view(-1)[1] = math.inf, math.nan
        for each in (layer, plain):
            each.zero_grad()
            run(each, x).sum().backward()
        ours, theirs = run(layer, x), run(plain, x)
        for a, b in [(ours, theirs), (grad_of(layer.weight), grad_of(plain.weight))]:
            assert torch.equal(a.isnan(), b.isnan())
            assert torch.equal(a.isinf(), b.isinf())


@pytest.mark.parametrize(("make", "shape"), list(zip(LAYERS, INPUTS, strict=True)))
def test_stochastic_rounding_obeys_seeds_on_any_number_of_threads(
    make: Any, shape: tuple[int, ...]
) -> None:
    threads = torch.get_num_threads()
    x = torch.randn(shape)
    for sums in ({}, {"accumulate": "e5m4"}):
        layer = make(LayerFormats(**STORED, **sums, rounding="stochastic"))
        results = []
        try:
            for seed, count in ((0, 1), (0, 2), (1, 2)):
                torch.set_num_threads(count)
                torch.manual_seed(seed)
                layer.zero_grad()
                out = run(layer, x)
                out.sum().backward()
                results.append([out.detach(), *(grad_of(p) for p in layer.parameters())])
        finally:
            torch.set_num_threads(threads)
        assert all(same(a, b) for a, b in zip(results[0], results[1], strict=True))
        assert not same(results[0][0], results[2][0])


def test_making_formats_draws_no_random_number() -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    LayerFormats(accumulate="e5m2", rounding="stochastic")
    assert torch.equal(torch.get_rng_state(), before)


# -- dtypes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("make", "shape"), list(zip(LAYERS, INPUTS, strict=True)))
def test_half_precision_models(make: Any, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    for sums in ({}, {"accumulate": "fp16"}):
        layer = make(LayerFormats(**STORED, **sums)).to(dtype)
        x = torch.randn(shape).to(dtype).requires_grad_()
        out = run(layer, x)
        assert out.dtype == dtype
        out.sum().backward()
        assert {grad_of(each).dtype for each in (x, *layer.parameters())} == {dtype}
        if sums and not isinstance(layer, MultiheadAttention):  # all in float32, then converted
            wide = copy.deepcopy(layer).float()
            assert same(out, run(wide, x.float()).to(dtype))


@pytest.mark.parametrize(("make", "shape"), list(zip(LAYERS, INPUTS, strict=True)))
def test_layers_that_round_ignore_autocast(make: Any, shape: tuple[int, ...]) -> None:
    x = torch.randn(shape).bfloat16().float()
    for formats in (LayerFormats("e4m3"), LayerFormats("e4m3", accumulate="bf16")):
        layer = make(formats)
        expected = run(layer, x)
        with torch.autocast("cpu", torch.bfloat16):
            assert same(run(layer, x), expected)
            assert same(run(layer, x.bfloat16()), expected)
            assert run(make(None), x).dtype == torch.bfloat16  # nothing rounded: torch's own


@pytest.mark.parametrize("dtype", [torch.int64, torch.complex64, torch.float64])
@pytest.mark.parametrize(("make", "shape"), list(zip(LAYERS, INPUTS, strict=True)))
def test_in_autocast_other_dtypes_are_refused_as_outside(
    make: Any, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    layer = make(LayerFormats("e4m3"))
    with (
        torch.autocast("cpu", torch.bfloat16),
        pytest.raises(TypeError, match=f"the input is {dtype} and the layer's weight torch.float"),
    ):
        run(layer, torch.ones(shape).to(dtype))


@pytest.mark.parametrize("formats", [LayerFormats(**STORED), LayerFormats(accumulate="bf16")])
@pytest.mark.parametrize(("make", "shape"), list(zip(LAYERS, INPUTS, strict=True)))
def test_backward_ignores_autocast_too(
    make: Any, shape: tuple[int, ...], formats: LayerFormats
) -> None:
    layer, x = make(formats), torch.randn(shape, requires_grad=True)
    outside = torch.autograd.grad(run(layer, x).sin().sum(), [x, *layer.parameters()])
    loss = run(layer, x).sin().sum()
    with torch.autocast("cpu", torch.bfloat16):
        inside = torch.autograd.grad(loss, [x, *layer.parameters()])
    assert all(same(a, b) for a, b in zip(inside, outside, strict=True))


@pytest.mark.parametrize("shape", [(6,), (5, 6), (2, 3, 6)])
@pytest.mark.parametrize("bias", [True, False])
def test_linear_of_rounded_operands_has_torchs_bits_and_gradients_of_gradients(
    shape: tuple[int, ...], bias: bool
) -> None:
    layer = Linear(6, 4, bias, formats=LayerFormats("fp16", "fp16"))
    plain = nn.Linear(6, 4, bias)
    with torch.no_grad():
        for ours, theirs in zip(layer.parameters(), plain.parameters(), strict=True):
            theirs.copy_(ours.copy_(quantize(ours, "fp16")))
    x = quantize(torch.randn(shape), "fp16").requires_grad_()
    results = []
    for each in (layer, plain):
        out = each(x)
        first = torch.autograd.grad(out.sin().sum(), [x, *each.parameters()], create_graph=True)
        second = torch.autograd.grad(sum(g.square().sum() for g in first), [x, each.weight])
        results.append(([out.relu_(), *first], second))
    (ours, our_second), (theirs, their_second) = results
    assert all(same(a, b) for a, b in zip(ours, theirs, strict=True))
    torch.testing.assert_close(our_second, their_second)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_linear_can_be_mapped_over_a_batch() -> None:
    layer, x = Linear(6, 4, formats=LayerFormats("e4m3", "e4m3")), torch.randn(3, 2, 6)
    assert same(torch.func.vmap(layer)(x), layer(x))


@pytest.mark.parametrize(("make", "shape"), list(zip(LAYERS, INPUTS, strict=True)))
def test_without_formats_float64_has_torchs_bits(make: Any, shape: tuple[int, ...]) -> None:
    layer = make(LayerFormats()).double()
    plain = getattr(nn, type(layer).__name__).__new__(getattr(nn, type(layer).__name__))
    plain.__dict__.update(copy.deepcopy(layer).__dict__)
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    how = {"need_weights": False} if isinstance(layer, MultiheadAttention) else {}
    results = []
    for each in (layer, plain):
        out = each(x, x, x, **how)[0] if how else each(x)
        results.append([out, *torch.autograd.grad(out.sin().sum(), [x, *each.parameters()])])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize(("make", "shape"), list(zip(LAYERS, INPUTS, strict=True)))
def test_float64_rounds_operands_and_refuses_simulated_sums(
    make: Any, shape: tuple[int, ...]
) -> None:
    x = torch.randn(shape, dtype=torch.float64)
    layer = make(LayerFormats(**STORED)).double()
    assert run(layer, x).dtype == torch.float64
    exact = run(make(LayerFormats("fp32", "fp32")).double(), x + 2.0**-40)
    assert exact.dtype == torch.float64
    for sums in ({"accumulate": "fp32"}, {"chunk": 4}, {"gradients": "mxfp8_e4m3"}):
        layer.formats = LayerFormats(**sums)
        with pytest.raises(TypeError, match=r"float64, whose sums are not simulated, but the la"):
            run(layer, x)


# -- errors ----------------------------------------------------------------------------------------


def test_errors_of_formats_say_what_is_allowed() -> None:
    cases: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"weights": "e4m3fm"}, ValueError, "did you mean 'e4m3fn'"),
        ({"activations": "e8m0"}, ValueError, "activations is e8m0, which has no sign and no zero"),
        ({"gradients": 8}, TypeError, "a format is a name, a torch.dtype"),
        ({"accumulate": "mxfp8_e4m3"}, ValueError, "accumulate is mxfp8_e4m3, a block format"),
        ({"accumulate": "e8m0"}, ValueError, "accumulate is e8m0, which has no sign"),
        ({"multiply": "e5m2", "fused": True}, ValueError, "multiply is e5m2, but fused=True"),
        ({"fused": "no"}, TypeError, "fused is 'no'; it must be True or False"),
        ({"compensated": 1}, TypeError, "compensated is 1; it must be True or False"),
        (
            {"backward": MatmulBackward(fused="no")},  # type: ignore[arg-type]
            TypeError,
            "backward.fused is 'no'; it must be",
        ),
        ({"chunk": 0}, ValueError, "chunk is 0; it must be an integer of at least 1"),
        ({"rounding": "nearest"}, ValueError, "rounding is 'nearest'; allowed: 'nearest-even'"),
        ({"backward": "e5m2"}, TypeError, "backward is str; it must be a MatmulBackward"),
        ({"backward": MatmulBackward("e5m2")}, ValueError, "backward.gradient is 'e5m2'; the for"),
        ({"backward": MatmulBackward(chunk=0)}, ValueError, "backward.chunk is 0; it must be an"),
    ]
    for options, error, text in cases:
        with pytest.raises(error, match=text):
            LayerFormats(**options)
    with pytest.raises(TypeError, match="formats is str; it must be a narrowgauge"):
        Linear(2, 2, formats="e4m3")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="rounding is 'nearest'; allowed"):
        Quantizer("e4m3", rounding="nearest")


def test_errors_of_inputs_say_what_is_allowed() -> None:
    conv = Conv2d(3, 4, 3, dilation=2, formats=EXACT)
    with pytest.raises(ValueError, match=r"shape \(2, 4, 9, 9\); a 2-dimensional convolution of 3"):
        conv(torch.ones(2, 4, 9, 9))
    with pytest.raises(ValueError, match=r"padded input has size \(4, 9\), but .*\(5, 5\)"):
        conv(torch.ones(2, 3, 4, 9))
    for formats in (EXACT, LayerFormats("e4m3")):
        for shape, text in (((2, 5), r"\(2, 5\)"), ((), r"\(\)")):
            with pytest.raises(
                ValueError, match=rf"{text}; a layer of 4 input features takes \(..., 4"
            ):
                Linear(4, 3, formats=formats)(torch.ones(shape))


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors:UserWarning")
@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"kernel_size": 0}, r"kernel_size is \(0, 0\); each must be an integer of at least 1"),
        ({"stride": (1, 0)}, r"stride is \(1, 0\); each must be an integer of at least 1"),
        ({"dilation": 0}, r"dilation is \(0, 0\); each must be an integer of at least 1"),
        ({"padding": -1}, r"padding is \(-1, -1\); each must be an integer of at least 0"),
    ],
)
def test_convolutions_that_torch_refuses_are_refused(options: dict[str, Any], text: str) -> None:
    options = {"kernel_size": 2, **options}
    with pytest.raises(ValueError, match=text):
        Conv2d(1, 1, **options, formats=EXACT)
    converted = convert(nn.Conv2d(1, 1, **options), EXACT)
    with pytest.raises(ValueError, match=text):
        converted(torch.ones(1, 1, 4, 4))


def test_what_is_no_tensor_is_refused() -> None:
    with pytest.raises(TypeError, match="the input is list; it must be a"):
        Linear(1, 1, formats=EXACT)([1.0])
    attention = MultiheadAttention(4, 2, formats=EXACT)
    with pytest.raises(TypeError, match="key is NoneType; it must be a"):
        attention(torch.ones(3, 2, 4), None, None)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_are_refused() -> None:
    with pytest.raises(TypeError, match="the input is a nested tensor; it must be a dense one"):
        Linear(2, 2, formats=EXACT)(torch.nested.nested_tensor([torch.ones(1, 2)]))


SUMS = LayerFormats("e4m3", "e4m3", accumulate="bf16")


def test_other_dtypes_than_the_weights_are_refused_as_by_torch() -> None:
    message = r"the input is torch\.int64 and the layer's weight torch\.float32; convert one"
    with pytest.raises(TypeError, match=message):
        Linear(3, 2, formats=SUMS)(torch.ones(1, 3, dtype=torch.int64))
    with pytest.raises(TypeError, match=r"the input is torch\.bfloat16 and"):
        Conv2d(1, 1, 1, formats=SUMS)(torch.ones(1, 1, 2, 2, dtype=torch.bfloat16))


def test_attention_does_not_broadcast_batches() -> None:
    attention = MultiheadAttention(8, 2, batch_first=True, formats=SUMS)
    keys = torch.randn(1, 5, 8)
    with pytest.raises(
        ValueError, match=r"query has a batch of 4 \(dimension 0\) and key one of 1"
    ):
        attention(torch.randn(4, 3, 8), keys, keys)


@pytest.mark.parametrize("size", [1, 2])
def test_what_a_convolution_gives_can_be_written_in_place(size: int) -> None:
    layer = Conv2d(4, 1, 3, bias=False, formats=SUMS)
    out = layer(torch.randn(1, 4, size + 2, size + 2)).relu_()
    out.sum().backward()
    assert layer.weight.grad is not None


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors:UserWarning")
def test_layers_without_outputs_and_on_the_meta_device() -> None:
    assert Linear(5, 0, formats=SUMS)(torch.randn(2, 5)).shape == (2, 0)
    layer = Linear(5, 3, device="meta", formats=LayerFormats("e4m3", "e4m3"))
    assert layer(torch.randn(2, 5, device="meta")).shape == (2, 3)
