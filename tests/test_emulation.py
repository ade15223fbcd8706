"""Emulated nodes: their sums by definition, one element at a time, and training with them."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from torch import nn

from narrowgauge import FloatFormat, format_of, gradients
from narrowgauge.gradients import EmulatedNodes, emulate_all_reduce
from tests.matmul_by_hand import Number, float_of, number_of, rounded, total
from tests.numbers_by_hand import same

FORMATS = ["e5m2", "e4m3", "e3m0", "bf16", "fp16", "e6m9", "e8m15", "fp32"]


def minus(x: Number) -> Number:
    return -x


class ByHand:
    """Sums of vectors of exact numbers, after the definitions in emulate_all_reduce."""

    def __init__(self, format: str, compensated: bool = False, local: bool = False) -> None:
        parsed = format_of(format)
        assert isinstance(parsed, FloatFormat)
        self.format, self.compensated, self.local = parsed, compensated, local

    def rounded(self, x: list[Number]) -> list[Number]:
        if not self.local:
            return [rounded(each, self.format) for each in x]
        exponent = self.exponent(max((abs(float_of(each)) for each in x), default=0.0))
        if exponent is None:
            return [math.nan] * len(x)
        return [
            self.shifted(rounded(self.shifted(each, exponent), self.format), -exponent)
            for each in x
        ]

    def exponent(self, largest: float) -> int | None:
        """By trying: the largest power of two under which it stays finite."""
        if not math.isfinite(largest):
            return None
        if largest == 0:
            return 0
        exponent = -160
        while True:
            scaled = rounded(self.shifted(number_of(largest), exponent + 1), self.format)
            if not math.isfinite(float_of(scaled)):
                return max(-149, min(112, exponent))
            exponent += 1

    @staticmethod
    def shifted(x: Number, exponent: int) -> Number:
        if isinstance(x, float):
            return x
        exact = Fraction(x) * Fraction(2) ** exponent
        assert exact.denominator == 1
        return exact.numerator

    def added(
        self, a: tuple[list[Number], list[Number]], b: tuple[list[Number], list[Number]]
    ) -> tuple[list[Number], list[Number]]:
        def sums(x: list[Number], y: list[Number]) -> list[Number]:
            return self.rounded([total([p, q]) for p, q in zip(x, y, strict=True)])

        def negative(x: list[Number]) -> list[Number]:
            return [minus(each) for each in x]

        if not self.compensated:
            return sums(a[0], b[0]), a[1]
        both = (
            sums(a[1], b[1])
            if any(a[1]) and any(b[1])
            else [q if p == 0 else p for p, q in zip(a[1], b[1], strict=True)]
        )
        y = sums(b[0], negative(both))
        t = sums(a[0], y)
        lost = sums(sums(t, negative(a[0])), negative(y))
        return t, [each if math.isfinite(float_of(each)) else 0.0 for each in lost]

    def sequential(self, rows: list[tuple[list[Number], list[Number]]]):
        result = rows[0]
        for row in rows[1:]:
            result = self.added(result, row)
        return result

    def tree(self, rows):
        while len(rows) > 1:
            pairs = [self.added(*rows[i : i + 2]) for i in range(0, len(rows) - 1, 2)]
            rows = pairs + rows[len(rows) - len(rows) % 2 :]
        return rows[0]

    def ring(self, rows, cast=False):
        n, numel = len(rows), len(rows[0][0])
        length = -(-numel // n)
        sums, lost = [], []
        for chunk in range(n):
            span = slice(chunk * length, (chunk + 1) * length)
            parts = [(row[0][span], row[1][span]) for row in rows[chunk:] + rows[:chunk]]
            if cast:
                parts = [(self.rounded(part[0]), part[1]) for part in parts]
            result = self.sequential(parts)
            sums += result[0]
            lost += result[1]
        return sums, lost

    def reduce(self, stacked: torch.Tensor, order: object, exponent: int = 0) -> torch.Tensor:
        rows = [
            ([self.shifted(number_of(x), exponent) for x in row.tolist()], [0.0] * len(row))
            for row in stacked
        ]
        if order != "ring":
            rows = [(self.rounded(row[0]), row[1]) for row in rows]
        if order == "sequential":
            result = self.sequential(rows)
        elif order == "tree":
            result = self.tree(rows)
        elif order == "ring":
            result = self.ring(rows, cast=True)
        else:
            k = order[1]
            groups = [self.sequential(rows[i : i + k]) for i in range(0, len(rows), k)]
            result = self.ring(groups)
        back = [float_of(self.shifted(x, -exponent)) for x in result[0]]
        return torch.tensor(back, dtype=torch.float64)


def gradients_of(nodes: int, numel: int, seed: int = 0, spread: float = 8.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(nodes, numel, generator=generator)
    return x * 2.0 ** (spread * torch.randn(nodes, numel, generator=generator)).round()


ORDERS = ["sequential", "ring", "tree", ("hierarchical", 3), ("hierarchical", 1)]


@pytest.mark.parametrize("compensated", [False, True])
@pytest.mark.parametrize("order", ORDERS, ids=str)
@pytest.mark.parametrize("format", FORMATS)
def test_every_partial_sum_is_rounded_once(format: str, order: object, compensated: bool) -> None:
    for nodes, numel in ((7, 17), (4, 33), (1, 5)):
        if isinstance(order, tuple) and order[1] > nodes:
            continue
        x = gradients_of(nodes, numel, seed=nodes, spread=2.0)
        expected = ByHand(format, compensated).reduce(x, order).float()
        got = emulate_all_reduce(x, format, op="sum", order=order, compensated=compensated)
        assert same(got, expected)


@pytest.mark.parametrize("compensated", [False, True])
@pytest.mark.parametrize("order", ORDERS, ids=str)
@pytest.mark.parametrize("format", ["e5m2", "e4m3", "e3m0", "fp16", "e6m9"])
def test_each_message_has_its_own_scale(format: str, order: object, compensated: bool) -> None:
    x = gradients_of(5, 13, spread=20.0)
    expected = ByHand(format, compensated, local=True).reduce(x, order).float()
    got = emulate_all_reduce(
        x, format, op="sum", order=order, compensated=compensated, scale="local"
    )
    assert same(got, expected)


@pytest.mark.parametrize("order", ["sequential", "ring", "tree", ("hierarchical", 4)], ids=str)
@pytest.mark.parametrize("format", ["e5m2", "e4m3", "e3m0", "int8"])
def test_shared_scales_leave_room_for_the_sum(format: str, order: object) -> None:
    x = gradients_of(16, 40).abs()  # nothing cancels
    largest = float(x.max()) * 16
    parsed = format_of(format)
    exponent = parsed.max_exponent - math.ceil(math.log2(largest))
    got = emulate_all_reduce(x, format, op="sum", order=order, scale="shared")
    assert got.isfinite().all()
    if format != "int8":
        assert same(got, ByHand(format).reduce(x, order, exponent).float())
    assert float(got.max()) * 2.0**exponent <= parsed.largest


@pytest.mark.parametrize("order", ["sequential", "ring", "tree", ("hierarchical", 32)], ids=str)
@pytest.mark.parametrize("format", ["e4m3", "e2m1fn", "int2"])
def test_shared_scales_leave_room_for_the_largest_float32_of_thousand_nodes(
    format: str, order: object
) -> None:
    x = torch.full((1024, 3), 2.0**127)
    x[:, 1], x[:, 2] = 2.0**126, 0.0
    got = emulate_all_reduce(x, format, order=order, scale="shared")
    assert got.isfinite().all()
    if order == "tree" and format == "e4m3":  # powers of two, whose sums are exact
        assert got.tolist() == [2.0**127, 2.0**126, 0.0]


def test_scaled_numbers_below_float32s_normal_ones_are_rounded_once() -> None:
    step = Fraction(2) ** -148  # of e1m2b147fnuz: 0 to 7 of them
    for power in (0, -20, -60, -100):
        x = gradients_of(1, 500, spread=1.0)[0] * 2.0**power
        x = torch.cat([x, x.abs().max() / 7 * (torch.arange(14) + 0.5) / 2])
        exponent, largest = -149, Fraction(float(x.abs().max()))
        while largest * Fraction(2) ** (exponent + 1) / step < Fraction(15, 2):
            exponent += 1
        scale = Fraction(2) ** exponent / step
        expected = [float(min(7, max(-7, round(Fraction(v) * scale))) / scale) for v in x.tolist()]
        got = emulate_all_reduce(x[None], "e1m2b147fnuz", scale="local")
        assert got.tolist() == expected


def test_the_mean_is_divided_at_the_end_and_as_published_at_the_start() -> None:
    x = gradients_of(6, 50)
    summed = emulate_all_reduce(x, "e4m3", op="sum")
    assert same(emulate_all_reduce(x, "e4m3"), (summed.double() / 6).float())
    published = emulate_all_reduce(x, "e4m3", published=True)
    assert same(published, emulate_all_reduce(x / 6, "e4m3", op="sum"))
    small = torch.full((8, 1), 2.0**-9)  # the smallest e4m3; an eighth of it is lost
    assert float(emulate_all_reduce(small, "e4m3")) == 2.0**-9
    assert float(emulate_all_reduce(small, "e4m3", published=True)) == 0.0
    assert float(emulate_all_reduce(small, "e4m3", published=True, scale="shared")) == 2.0**-9


def test_the_gradient_that_is_sent_is_cast_even_by_a_single_node() -> None:
    assert float(emulate_all_reduce(torch.tensor([[1.1]]), "e5m2", published=True)) == 1.0


def test_compensation_loses_less() -> None:
    x = torch.ones(256, 3)
    assert emulate_all_reduce(x, "e5m2", op="sum").tolist() == [8.0] * 3
    assert emulate_all_reduce(x, "e5m2", op="sum", compensated=True).tolist() == [64.0] * 3


def test_non_finite_gradients_stay_visible() -> None:
    x = torch.ones(4, 6)
    x[2, 3] = math.inf
    for scale in ("shared", "local"):
        assert emulate_all_reduce(x, "e5m2", scale=scale).isnan().all()
    assert emulate_all_reduce(x, "e5m2").tolist() == [1, 1, 1, math.inf, 1, 1]
    kahan = emulate_all_reduce(x, "e5m2", compensated=True)
    assert kahan.tolist() == [1, 1, 1, math.inf, 1, 1]
    x[3, 0] = math.nan
    assert emulate_all_reduce(x, "e2m1fn")[0].isnan()


def test_a_scale_and_a_nan_are_a_tensors_own() -> None:
    x, y = torch.full((4, 3), 1e-6), torch.full((4, 2), 1000.0)
    first, second = emulate_all_reduce([x, y], "e4m3", scale="shared", order="ring")
    assert torch.allclose(first, x[0], rtol=0.07)
    assert torch.allclose(second, y[0], rtol=0.07)
    x[0, 0] = math.nan
    first, second = emulate_all_reduce([x, y], "e4m3", scale="local", order="ring")
    assert second.isfinite().all()


@pytest.mark.parametrize("scale", [None, "shared", "local"])
@pytest.mark.parametrize("order", ["sequential", "ring", "tree", ("hierarchical", 2)], ids=str)
def test_zeros_and_empty_tensors_are_welcome(order: object, scale: str | None) -> None:
    got = emulate_all_reduce(torch.zeros(5, 7), "e5m2", order=order, scale=scale)
    assert same(got, torch.zeros(7))
    assert emulate_all_reduce(torch.zeros(5, 0), "e5m2", order=order, scale=scale).shape == (0,)
    first, second = emulate_all_reduce(
        [torch.zeros(5, 0), torch.ones(5, 2, 2)], "e5m2", order=order, scale=scale
    )
    assert first.shape == (0,)
    assert same(second, torch.ones(2, 2))


def test_input_stays_as_it_is_and_its_dtype_comes_back() -> None:
    x = gradients_of(4, 9)
    before = x.clone()
    for scale in (None, "shared", "local"):
        emulate_all_reduce(x, "e5m2", scale=scale, published=scale != "local")
        assert same(x, before)
    assert emulate_all_reduce(x.bfloat16(), "e5m2").dtype == torch.bfloat16


def test_a_thousand_nodes() -> None:
    x = torch.ones(1024, 5)
    assert emulate_all_reduce(x, "e5m2", order="tree").tolist() == [1.0] * 5
    assert emulate_all_reduce(x, "e4m3", order="tree", scale="shared").tolist() == [1.0] * 5
    assert float(emulate_all_reduce(x, "e5m2", op="sum")[0]) == 8.0  # where 8 + 1 = 8


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"order": "star"}, r"order is 'star'; allowed: 'sequential', 'ring', 'tree'"),
        ({"order": ("hierarchical", 5)}, r"order is \('hierarchical', 5\); a group has 1 to 4"),
        ({"order": ("hierarchical", 0)}, r"a group has 1 to 4 ranks"),
        ({"order": ["hierarchical", 2]}, r"order is \['hierarchical', 2\]; allowed: .*\('hier"),
        ({"scale": "global"}, r"scale is 'global'; allowed: 'local', 'shared'"),
        ({"op": "max"}, r"op is 'max'; allowed: 'mean', 'sum'"),
        ({"format": "mxfp8_e4m3"}, r"mxfp8_e4m3, a block format.*use e4m3fn with scale='local'"),
        ({"format": "e8m0"}, r"e8m0, which has no sign"),
        ({"published": True, "order": "ring"}, r"published=True with order='ring'.*'sequential'"),
        ({"published": True, "scale": "local"}, r"published=True.*scale='local'.*'shared'"),
        ({"stacked": torch.zeros(0, 3)}, r"0 nodes; allowed: 1 to 4096"),
        ({"stacked": torch.tensor(1.0)}, r"stacked has no dimension"),
        ({"stacked": [torch.zeros(2, 3), torch.zeros(3, 3)]}, r"gradients of \[2, 3\] nodes"),
    ],
)
def test_bad_input_is_named(arguments: dict, message: str) -> None:
    how = {"stacked": torch.zeros(4, 3), "format": "e5m2", **arguments}
    with pytest.raises(ValueError, match=message):
        emulate_all_reduce(how.pop("stacked"), how.pop("format"), **how)


def test_wrong_types_are_named() -> None:
    with pytest.raises(TypeError, match=r"stacked is torch.int64; allowed: torch.float32"):
        emulate_all_reduce(torch.zeros(2, 2, dtype=torch.int64), "e5m2")
    with pytest.raises(TypeError, match="stacked holds a float; it must hold tensors"):
        emulate_all_reduce([1.0], "e5m2")  # type: ignore[list-item]
    with pytest.raises(TypeError, match=r"n is 2\.5; it must be an int"):
        EmulatedNodes(nn.Linear(2, 2), 2.5)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"model is list; it must be a torch\.nn\.Module"):
        EmulatedNodes([nn.Linear(2, 2)], 2)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"parameter 'weight' is torch\.float64; allowed: torch"):
        EmulatedNodes(nn.Linear(2, 2).double(), 2)


# -- training --------------------------------------------------------------------------------------


def model_and_batches(nodes: int, steps: int) -> tuple[nn.Module, list]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 9), nn.Tanh(), nn.Linear(9, 3))
    return model, [(torch.randn(4, 5), torch.randint(3, (4,))) for _ in range(nodes * steps)]


@pytest.mark.parametrize("scale", [None, "shared", "local"])
@pytest.mark.parametrize("order", ["sequential", "ring", "tree", ("hierarchical", 2)], ids=str)
def test_collected_gradients_are_the_emulated_all_reduce(order: object, scale: str | None) -> None:
    model, batches = model_and_batches(5, 2)
    nodes = EmulatedNodes(model, 5, "e4m3", order=order, scale=scale, keep={"2": "fp32"})
    names = [name for name, _ in model.named_parameters()]
    for step in range(2):
        apart: dict[str, list] = {name: [] for name in names}
        for images, labels in batches[5 * step : 5 * step + 5]:
            nn.functional.cross_entropy(model(images), labels).backward()
            for name, parameter in model.named_parameters():
                apart[name].append(parameter.grad.clone())
            done = nodes.collect()
        assert done
        assert nodes.steps == step + 1
        for format, group in (("e4m3", names[:2]), ("fp32", names[2:])):
            expected = emulate_all_reduce(
                [torch.stack(apart[name]) for name in group], format, order=order, scale=scale
            )
            for name, each in zip(group, expected, strict=True):
                assert same(model.get_parameter(name).grad, each)
        model.zero_grad()


def test_float32_nodes_train_like_one_large_batch() -> None:
    model, batches = model_and_batches(8, 10)
    nodes = EmulatedNodes(model, 8, "fp32")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    again, _ = model_and_batches(1, 1)
    reference = torch.optim.SGD(again.parameters(), lr=0.5)
    for images, labels in batches:
        nn.functional.cross_entropy(model(images), labels).backward()
        if nodes.collect():
            optimizer.step()
            optimizer.zero_grad()
    for step in range(10):
        images, labels = (
            torch.cat(each) for each in zip(*batches[8 * step : 8 * step + 8], strict=True)
        )
        reference.zero_grad()
        nn.functional.cross_entropy(again(images), labels).backward()
        reference.step()
    for ours, theirs in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.allclose(ours, theirs, atol=1e-5)


def test_unused_parameters_count_as_zeros_and_no_gradient_is_an_error() -> None:
    model = nn.ModuleDict({"a": nn.Linear(2, 1), "b": nn.Linear(2, 1)})
    nodes = EmulatedNodes(model, 2, "e5m2")
    with pytest.raises(RuntimeError, match=r"no parameter has a gradient \(node 0 of 2\)"):
        nodes.collect()
    model["a"](torch.ones(1, 2)).sum().backward()
    assert not nodes.collect()
    assert model["a"].weight.grad is None
    model["b"](torch.ones(1, 2)).sum().backward()
    assert nodes.collect()
    assert model["a"].weight.grad.tolist() == model["b"].weight.grad.tolist() == [[0.5, 0.5]]


def test_reset_forgets_half_a_step() -> None:
    model = nn.Linear(2, 1)
    nodes = EmulatedNodes(model, 2, "e5m2")
    (1e4 * model(torch.ones(1, 2))).sum().backward()
    nodes.collect()
    nodes.reset()
    for _ in range(2):
        model(torch.ones(1, 2)).sum().backward()
        nodes.collect()
    assert model.weight.grad.tolist() == [[1.0, 1.0]]


def test_the_error_is_the_papers() -> None:
    model = nn.Linear(3, 1, bias=False)
    nodes = EmulatedNodes(model, 2, "e3m0", measure_error=True)
    for x in (1.4, 0.9):
        model(torch.full((1, 3), x)).sum().backward()
        nodes.collect()
    # 1.4 and 0.9 become 1 and 1, their mean is 1; the exact one is 1.15
    assert nodes.round_off_error == pytest.approx(0.15 / 1.15, rel=1e-6)


def test_only_what_is_trained_takes_part() -> None:
    model, _ = model_and_batches(1, 1)
    model.requires_grad_(False)
    with pytest.raises(ValueError, match="no parameter that requires a gradient"):
        EmulatedNodes(model, 2)
    model[0].requires_grad_(True)
    assert set(EmulatedNodes(model, 2).formats) == {"0.weight", "0.bias"}
    with pytest.raises(ValueError, match="keep names 'fc'"):
        EmulatedNodes(model, 2, keep={"fc": "fp32"})


def test_sparse_gradients_become_dense_and_what_was_frozen_since_gets_none() -> None:
    model = nn.Sequential(nn.Embedding(3, 2, sparse=True), nn.Linear(2, 1))
    nodes = EmulatedNodes(model, 2, "fp32")
    model[1].weight.requires_grad_(False)
    for token in (0, 2):
        model(torch.tensor([token])).sum().backward()
        nodes.collect()
    half = model[1].weight.detach().flatten() / 2
    assert torch.equal(model[0].weight.grad, torch.stack([half, torch.zeros(2), half]))
    assert model[1].weight.grad is None


def test_a_gradient_that_cannot_be_copied_leaves_all_as_it_was() -> None:
    model = nn.Sequential(nn.Linear(2, 1, bias=False), nn.Linear(1, 1, bias=False))
    nodes = EmulatedNodes(model, 2, "e5m2", keep={"1": "fp32"}, measure_error=True)
    model(torch.ones(1, 2)).sum().backward()
    kept = model[0].weight.grad.clone()
    model[1].weight.data = torch.ones(3, 1)
    model[1].weight.grad = torch.ones(3, 1)  # of the second format, and no longer one element
    with pytest.raises(RuntimeError, match="invalid for input of size 1"):
        nodes.collect()
    assert torch.equal(model[0].weight.grad, kept)
    model[1].weight.grad = None
    model[1].weight.data = torch.ones(1, 1)
    model[1].weight.grad = torch.ones(1, 1)
    assert not nodes.collect()  # the first node, not the second
    model[0].weight.grad = kept.clone()
    assert nodes.collect()
    assert same(model[0].weight.grad, emulate_all_reduce(torch.stack([kept, kept]), "e5m2"))


def test_what_was_unfrozen_since_is_refused_by_name() -> None:
    model = nn.Sequential(nn.Linear(2, 1, bias=False), nn.Linear(1, 1, bias=False))
    model[1].weight.requires_grad_(False)
    nodes = EmulatedNodes(model, 2, "e5m2")
    model[1].weight.requires_grad_(True)
    model(torch.ones(1, 2)).sum().backward()
    with pytest.raises(RuntimeError, match=r"parameter '1\.weight' requires a gradient, but"):
        nodes.collect()
    assert model[0].weight.grad is not None


@pytest.mark.filterwarnings("ignore:.*create_graph=True:UserWarning")
def test_gradients_with_a_graph_are_taken_without_it() -> None:
    model = nn.Linear(2, 1)
    nodes = EmulatedNodes(model, 2, "e5m2")
    for _ in range(2):
        model(torch.ones(1, 2)).sum().backward(create_graph=True)
        nodes.collect()
    assert model.weight.grad.tolist() == [[1.0, 1.0]]


def test_public() -> None:
    assert gradients.emulate_all_reduce is emulate_all_reduce
    assert gradients.EmulatedNodes is EmulatedNodes
