"""Models turned into their rounding twins, in place, and back."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from narrowgauge.nn import LayerFormats, Linear, MultiheadAttention, convert, deconvert
from tests.numbers_by_hand import same

FP32 = LayerFormats("fp32", "fp32", "fp32", accumulate="fp32")
NARROW = LayerFormats("e4m3", "e4m3", "e5m2", accumulate="bf16")


class Block(nn.Module):
    """As in a ResNet: strided, with a shortcut and activations in place."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(4, 8, 3, stride=2, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(8)
        self.second = nn.Conv2d(8, 8, 3, padding=1, groups=2)
        self.shortcut = nn.Conv2d(4, 8, 1, stride=2)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.norm(self.first(x)))
        result: Tensor = self.relu(self.second(y) + self.shortcut(x))
        return result


def encoder_layer() -> nn.Module:
    return nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)


MODELS = [(Block, (2, 4, 9, 7)), (encoder_layer, (3, 5, 8))]


def everything(model: nn.Module, x: Tensor) -> list[Tensor]:
    """Output, input's and parameters' gradients, and buffers."""
    torch.manual_seed(1)
    x = x.clone().requires_grad_()
    model.zero_grad()
    out = model(x)
    out.square().sum().backward()
    grads = [x.grad, *(p.grad for p in model.parameters())]
    return [out.detach(), *(g.clone() for g in grads if g is not None), *model.buffers()]


def all_same(first: list[Tensor], second: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


# -- all in fp32 it is the same model --------------------------------------------------------------


@pytest.mark.parametrize(("make", "shape"), MODELS)
@pytest.mark.parametrize("mode", ["train", "eval", "inference"])
def test_converted_to_fp32_every_bit_is_the_same(
    make: Callable[[], nn.Module], shape: tuple[int, ...], mode: str
) -> None:
    torch.manual_seed(0)
    model, x = make().train(mode == "train"), torch.randn(shape)
    twin = convert(copy.deepcopy(model), FP32)
    if mode == "inference":  # where torch may take another way
        with torch.no_grad():
            assert torch.equal(twin(x), model(x))
    else:
        assert all_same(everything(twin, x), everything(model, x))


@pytest.mark.parametrize(("make", "shape"), MODELS)
def test_a_converted_model_in_float64_passes_gradcheck(
    make: Callable[[], nn.Module], shape: tuple[int, ...]
) -> None:
    model = convert(make().eval(), LayerFormats()).double()
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(
        lambda x, *_: model(x), (x, *model.parameters()), fast_mode=True
    )


# -- what stays and what changes -------------------------------------------------------------------


def test_parameters_names_hooks_modes_and_optimizers_stay_valid() -> None:
    model = Block()
    model.second.eval()
    calls = []
    model.first.register_forward_hook(lambda *_: calls.append("hook"))
    parameters, state = dict(model.named_parameters()), list(model.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert convert(model, NARROW) is model
    assert list(model.state_dict()) == state
    assert all(parameters[name] is p for name, p in model.named_parameters())
    assert model.training
    assert not model.second.training
    before = model.first.weight.detach().clone()
    model(torch.randn(2, 4, 9, 7)).sum().backward()
    optimizer.step()
    assert calls == ["hook"]
    assert not torch.equal(model.first.weight, before)
    assert isinstance(model.first, nn.Conv2d)
    assert "formats=LayerFormats(weights='e4m3'" in repr(model.first)


@pytest.mark.parametrize(("make", "shape"), MODELS)
def test_deconvert_restores_the_original_exactly(
    make: Callable[[], nn.Module], shape: tuple[int, ...]
) -> None:
    torch.manual_seed(0)
    model, x = make(), torch.randn(shape)
    original = copy.deepcopy(model)
    convert(model, NARROW)
    assert not torch.equal(everything(copy.deepcopy(model), x)[0], everything(original, x)[0])
    deconvert(model)
    for ours, theirs in zip(model.modules(), original.modules(), strict=True):
        assert type(ours) is type(theirs)
        assert ours.__dict__.keys() == theirs.__dict__.keys()
        assert not ours._forward_pre_hooks


def test_converting_again_replaces_formats() -> None:
    model = convert(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), NARROW)
    convert(model, {"0": None, "1": FP32})
    assert type(model[0]) is nn.Linear
    assert type(model[1]) is Linear
    assert model[1].formats == FP32
    assert not model[0]._forward_pre_hooks
    assert not model[1]._forward_pre_hooks  # which keeps torch's fused kernels away
    model[1].formats = NARROW
    assert len(model[1]._forward_pre_hooks) == 1


def test_a_layer_by_itself_and_one_that_is_used_twice() -> None:
    layer = convert(nn.Linear(3, 2), NARROW)
    assert type(layer) is Linear
    shared = nn.Linear(3, 3)
    model = convert(nn.Sequential(shared, nn.ReLU(), shared), NARROW)
    assert model[0] is model[2]
    assert type(shared) is Linear
    with pytest.raises(ValueError, match="one layer is used as '0', '2', which match different"):
        convert(model, {"0": NARROW, "2": None})
    with pytest.raises(ValueError, match="one layer is used as '0', '2', which match different"):
        convert(model, {"0": NARROW})


@pytest.mark.parametrize(("make", "shape"), MODELS)
def test_copies_and_files(make: Callable[[], nn.Module], shape: tuple[int, ...]) -> None:
    model, x = convert(make(), NARROW).eval(), torch.randn(shape)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    expected = everything(model, x)
    others = [
        copy.deepcopy(model),
        pickle.loads(pickle.dumps(model)),
        torch.load(file, weights_only=False),
    ]
    for other in others:
        assert all_same(everything(other, x), expected)
        deconvert(other)
        plain = make()
        plain.load_state_dict(model.state_dict())
        assert all_same(everything(other, x), everything(plain.eval(), x))


def test_patterns_choose_layers_and_the_first_match_wins() -> None:
    model = nn.TransformerDecoderLayer(8, 2, 16)
    wide = LayerFormats("fp16")
    convert(model, {"linear2": None, "linear*": NARROW, "self_attn": wide})
    assert type(model.linear2) is nn.Linear
    assert isinstance(model.linear1, Linear)
    assert model.linear1.formats == NARROW
    assert isinstance(model.self_attn, MultiheadAttention)
    assert model.self_attn.formats == wide
    assert type(model.multihead_attn) is nn.MultiheadAttention
    both = nn.ModuleDict({"a": copy.deepcopy(model), "b": model})
    deconvert(both)
    convert(both, {"a": NARROW})
    assert isinstance(both["a"].linear2, Linear)
    assert type(both["b"].linear2) is nn.Linear


# -- torch's fused kernels -------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize(
    "formats",
    [
        NARROW,
        LayerFormats("e4m3"),
        {"layers.0.self_attn": NARROW},
        {"layers.0.linear1": NARROW},
        {"layers.1.linear2": LayerFormats("e4m3")},
    ],
)
def test_evaluation_goes_through_the_converted_layers(
    formats: LayerFormats | Mapping[str, LayerFormats],
) -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    model = nn.TransformerEncoder(layer, 2).eval()
    x, padding = torch.randn(2, 5, 8), torch.zeros(2, 5, dtype=torch.bool)
    padding[1, 3:] = True
    with torch.no_grad():
        fused = model(x, src_key_padding_mask=padding)
    plain = model(x, src_key_padding_mask=padding).detach()  # gradients keep fused kernels away
    convert(model, formats)
    expected = model(x.requires_grad_(), src_key_padding_mask=padding).detach()
    assert (expected - plain)[~padding].abs().max() > 1e-3
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            out = model(x, src_key_padding_mask=padding)
            torch.testing.assert_close(out[~padding], expected[~padding], rtol=1e-5, atol=1e-5)
    assert not model.use_nested_tensor
    deconvert(model)
    assert model.use_nested_tensor
    with torch.no_grad():
        assert torch.equal(model(x, src_key_padding_mask=padding), fused)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_part_of_an_encoder_that_is_given_nested_tensors_says_so() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    model = nn.TransformerEncoder(layer, 2).eval()
    convert(model.layers[1], NARROW)  # which knows nothing of the encoder around it
    padding = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    with (
        torch.no_grad(),
        pytest.raises(TypeError, match=r"whole encoder .again, if"),
    ):
        model(torch.randn(2, 5, 8), src_key_padding_mask=padding)


def test_fp32_rounds_float64_in_evaluation_too() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    x = torch.randn(2, 5, 8, dtype=torch.float64)
    early = convert(copy.deepcopy(layer), LayerFormats("fp32", "fp32")).double()
    late = convert(copy.deepcopy(layer).double(), LayerFormats("fp32", "fp32"))
    expected = early(x).detach()  # gradients keep fused kernels away
    assert not torch.equal(expected, layer.double()(x))
    with torch.no_grad():
        assert torch.equal(early(x), expected)
        assert torch.equal(late(x), expected)
        early.float().load_state_dict(late.state_dict(), assign=True)
        assert torch.equal(early(x), expected)
        assert not early.float().linear1._forward_pre_hooks
    assert not convert(layer, LayerFormats()).linear1._forward_pre_hooks  # in no dtype


def test_a_shallow_copy_is_deconverted_alone() -> None:
    layer = convert(nn.Linear(2, 2), NARROW)
    other = deconvert(copy.copy(layer))
    assert type(other) is nn.Linear
    assert not other._forward_pre_hooks
    assert layer.formats == NARROW
    assert len(layer._forward_pre_hooks) == 1


def test_layers_made_by_hand_are_used_too() -> None:
    layer, x = encoder_layer().eval(), torch.randn(2, 5, 8)
    plain = layer(x)
    rounding = Linear(8, 16, formats=LayerFormats("e2m1fn"))
    rounding.load_state_dict(layer.linear1.state_dict())
    layer.linear1 = rounding
    with torch.no_grad():
        out = layer(x)
    torch.testing.assert_close(out, layer(x).detach(), rtol=1e-5, atol=1e-5)
    assert (out - plain).abs().max() > 1e-3


# -- what is refused -------------------------------------------------------------------------------


class Own(nn.Linear):
    """A user's subclass, which may compute anything."""


class Derived(Linear):
    """A user's subclass of a layer that rounds."""


def test_subclasses_are_refused_unless_left_out() -> None:
    model = nn.Sequential(nn.Linear(2, 2), Own(2, 2), Derived(2, 2))
    text = (
        "layer '1' is a Own, a subclass of Linear that may compute something else; derive it from"
    )
    for formats in (NARROW, {"1": NARROW}):
        with pytest.raises(ValueError, match=text):
            convert(model, formats)
    assert type(model[0]) is nn.Linear  # nothing was changed
    convert(model, {"1": None, "*": NARROW})
    assert type(model[0]) is Linear
    assert type(model[1]) is Own
    assert type(model[2]) is Derived
    assert model[2].formats == NARROW
    deconvert(model)
    assert model[2].formats == LayerFormats()


def test_a_lazy_layer_is_to_be_called_first() -> None:
    model = nn.Sequential(nn.LazyLinear(2))
    with pytest.raises(ValueError, match="'0' is a LazyLinear, whose size is not known yet; call"):
        convert(model, NARROW)
    model(torch.ones(1, 3))
    assert type(convert(model, NARROW)[0]) is Linear


def test_a_projection_of_attention_used_elsewhere_is_not_passed_over() -> None:
    model = nn.ModuleDict({"attention": nn.MultiheadAttention(4, 2)})
    model["head"] = model["attention"].out_proj
    for formats in (NARROW, {"head": NARROW}):
        with pytest.raises(ValueError, match=r"'head' is a NonDyn.* make 'head' an nn.Linear with"):
            convert(model, formats)
    assert type(model["attention"]) is nn.MultiheadAttention  # nothing was changed
    convert(model, {"head": None, "*": NARROW})
    assert type(model["attention"]) is MultiheadAttention
    head = nn.Linear(4, 4)
    model["attention"].out_proj = model["head"] = head
    convert(model, NARROW)
    assert type(head) is Linear


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated")
def test_parametrizations_come_after_converting() -> None:
    layer = nn.utils.parametrizations.weight_norm(nn.Linear(4, 3))
    with pytest.raises(ValueError, match="layer '' is parametrized; convert it before that, or le"):
        convert(layer, NARROW)
    x = torch.randn(5, 4)
    for norm in (
        nn.utils.parametrizations.weight_norm,
        nn.utils.parametrizations.spectral_norm,
        nn.utils.weight_norm,  # the old way: a hook, which may come before
    ):
        layer = norm(convert(nn.Linear(4, 3), NARROW)).eval()
        plain = convert(nn.Linear(4, 3), NARROW)
        with torch.no_grad():
            plain.weight.copy_(layer.weight)
            plain.bias.copy_(layer.bias)
        assert same(layer(x), plain(x))
        deconvert(layer)
        torch.testing.assert_close(layer(x), nn.functional.linear(x, layer.weight, layer.bias))
    assert type(convert(nn.utils.weight_norm(nn.Linear(4, 3)), NARROW)) is Linear


def test_errors_say_what_is_allowed() -> None:
    model = nn.Sequential()
    model.add_module("encoder", nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
    model.add_module("attention", nn.MultiheadAttention(4, 2))
    unknown = r"'encodr', which matches no Linear, Conv1d.*; did you mean 'encoder'\? Layers: enc"
    part = "'attention.out_proj', which is a part of 'attention', a MultiheadAttention; name that"
    cases: list[tuple[Any, Any, type[Exception], str]] = [
        (model, {"encodr": NARROW}, ValueError, unknown),
        (model, {"encoder.1": None}, ValueError, "'encoder.1', which matches no Linear"),
        (model, {"attention.out_proj": NARROW}, ValueError, part),
        (nn.ReLU(), NARROW, ValueError, "matches no Linear.* Layers: none"),
        (model, {"encoder": "e4m3"}, TypeError, r"formats\['encoder'\] is str; it must be a"),
        (model, {0: NARROW}, TypeError, "formats has the key 0, which is int; it must be a str: a"),
        (model, "e4m3", TypeError, "formats is str; it must be a LayerFormats, or a dict"),
        ([nn.Linear(1, 1)], NARROW, TypeError, "model is list; it must be a torch.nn.Module"),
    ]
    for what, formats, error, text in cases:
        with pytest.raises(error, match=text):
            convert(what, formats)
    assert type(model.encoder[0]) is nn.Linear
