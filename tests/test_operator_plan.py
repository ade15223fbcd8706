"""Plans as data: names, formats, files, and what is said when they do not fit."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from narrowgauge import OperatorPlan, format_of
from narrowgauge.operators import OperatorMismatch, Recording, record_operators
from narrowgauge.operators.autocast import _LISTS
from narrowgauge.operators.compute import compute_of
from narrowgauge.operators.functions import OPERATORS
from narrowgauge.operators.names import operator_name, split_name
from tests.operator_models import Blocks, Residual, blocks_batch, recorded

X = torch.randn(2, 4, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def residual() -> tuple[Residual, Recording]:
    model = Residual()
    return model, record_operators(model, lambda: F.mse_loss(model(X), X))


def test_names_say_which_module_calls_which_operator_for_the_how_manieth_time() -> None:
    model = Blocks()
    x, y = blocks_batch()
    names = record_operators(model, lambda: F.cross_entropy(model(x), y)).names
    first = [
        "blocks.0.attention::linear#0",
        "blocks.0.attention::scaled_dot_product_attention#0",
        "blocks.0.attention::linear#1",
        "blocks.0::add#0",
        "blocks.0.wide::linear#0",
        "blocks.0::relu#0",
        "blocks.0.narrow::linear#0",
        "blocks.0::add#1",
        "blocks.0.norm::layer_norm#0",
    ]
    assert names[:9] == first
    assert names[9:18] == [name.replace("blocks.0", "blocks.1") for name in first]
    assert names[18:21] == [  # the first block is called again: its count goes on
        "blocks.0.attention::linear#2",
        "blocks.0.attention::scaled_dot_product_attention#1",
        "blocks.0.attention::linear#3",
    ]
    assert names[-3:] == ["head::linear#0", "::mean#0", "::cross_entropy#0"]
    assert len(set(names)) == len(names)


def test_a_change_in_one_module_leaves_the_names_in_others() -> None:
    class Longer(Residual):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x * 2.0) * 2.0

    plain, longer = (nn.Sequential(m, Residual()) for m in (Residual(), Longer()))
    names, more = (recorded(m, X).names for m in (plain, longer))
    assert set(names) < set(more)
    assert [name for name in more if name not in names] == ["0::mul#0", "0::mul#1"]


@given(
    st.from_regex(r"([a-z_0-9]+(\.[a-z_0-9]+)*)?", fullmatch=True),
    st.sampled_from(sorted(set(OPERATORS.values()))),
    st.integers(0, 10**6),
)
def test_names_are_taken_apart_as_they_were_made(path: str, operator: str, call: int) -> None:
    assert split_name(operator_name(path, operator, call)) == (path, operator, call)


@pytest.mark.parametrize(
    "name",
    [
        *("", "fc", "fc::linear", "fc::#0", "fc::linear#", "fc::linear#x"),
        *("fc::linear#01", "fc::linear#9999999999"),  # another's name; more calls than memory
    ],
)
def test_what_is_no_name_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r"no name of an operator; one reads module\.path::op"):
        OperatorPlan({name: "fp32"})


def test_edges_go_through_what_only_moves_data() -> None:
    class Moving(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            a, b = F.relu(x), torch.tanh(y)
            both = torch.cat([a.view(-1), b[1:].reshape(-1)])
            c = torch.empty(12)
            c[:] = both
            return torch.sigmoid(c)

    x, y = torch.randn(2, 4, requires_grad=True), torch.randn(2, 4)
    edges = recorded(Moving(), x, y).edges
    assert [(e.producer, e.consumer, e.numel) for e in edges] == [
        ("::relu#0", "::sigmoid#0", 8),
        ("::tanh#0", "::sigmoid#0", 4),
        ("::sigmoid#0", "::sum#0", 12),
    ]
    assert all(e.requires_grad for e in edges)


def test_a_call_tells_what_it_was_given_and_what_it_keeps(
    residual: tuple[Residual, Recording],
) -> None:
    linear, relu, add, loss = residual[1]
    assert linear.signature == (
        "linear(float32[2,4](4,1), float32[4,4](4,1) parameter, float32[4](1) parameter)"
    )
    assert [x.bytes for x in linear.outputs] == [32]
    assert [x.shape for x in linear.saved] == [(2, 4)]  # its input, whose size is a result's
    assert relu.saved[0].storage == relu.outputs[0].storage
    assert add.saved == ()
    assert (add.inside, loss.inside) == (True, False)


def test_equal_calls_have_equal_signatures_and_others_do_not() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4, bias=False))
    x = X.clone().requires_grad_() * 1  # a result, as the inputs of the later layers are
    first, second, third, *_ = recorded(model, x)
    assert first.signature == second.signature != third.signature
    column_major, *_ = recorded(model, torch.randn(4, 2).requires_grad_().t())
    assert column_major.signature != first.signature


def test_arguments_are_kept_for_the_first_call_of_each_signature() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    x = X.clone().requires_grad_() * 1
    calls = record_operators(model, lambda: model(x), keep_arguments=True).calls
    (x_given, weight, _), _ = calls[0].arguments or pytest.fail("no arguments")
    assert torch.equal(x_given, X)
    assert x_given.requires_grad
    assert x_given.is_leaf
    assert weight.data_ptr() == model[0].weight.data_ptr()
    assert calls[1].arguments is None


def test_recording_changes_neither_statistics_nor_random_numbers() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    torch.manual_seed(3)
    expected = torch.rand(3)
    torch.manual_seed(3)
    recorded(model, X)
    assert torch.equal(torch.rand(3), expected)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


@pytest.mark.parametrize(
    ("run", "text"),
    [(3, "run is int; it must be a function"), (lambda: None, "calls no operator of the model")],
)
def test_recording_nothing_is_an_error(run: object, text: str) -> None:
    with pytest.raises((TypeError, ValueError), match=text):
        record_operators(Residual(), run)  # type: ignore[arg-type]


# --- plans ---------------------------------------------------------------------------------------


def test_a_plan_is_read_as_it_was_written(
    residual: tuple[Residual, Recording], tmp_path: Path
) -> None:
    plan = OperatorPlan.uniform(residual[1], "bf16").with_formats({"::add#0": "e4m3/e5m2"})
    plan = plan.with_evidence({"::add#0": {"loss change": 0.01}}, {"found by": "hand"})
    plan.save(tmp_path / "plan.json")
    again = OperatorPlan.load(tmp_path / "plan.json")
    assert again == plan
    assert again.formats == {
        "fc::linear#0": "bf16",
        "::relu#0": "bf16",
        "::add#0": "e4m3/e5m2",
        "::mse_loss#0": "bf16",
    }
    assert again.evidence == {"::add#0": {"loss change": 0.01}}
    assert again.outside == {"::mse_loss#0"}
    assert again.environment["torch"] == torch.__version__
    assert [path.name for path in tmp_path.iterdir()] == ["plan.json"]
    assert repr(again).startswith("OperatorPlan(4 operators: 3 bf16, 1 e4m3/e5m2; ")


def test_a_write_that_fails_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    OperatorPlan({"::add#0": "bf16"}).save(path)
    before = path.read_text()
    with pytest.raises(TypeError):
        OperatorPlan({"::add#0": "fp32"}, evidence={"::add#0": object()}).save(path)
    assert path.read_text() == before
    assert [p.name for p in tmp_path.iterdir()] == ["plan.json"]


def broken(change: Callable[[Any], object]) -> str:
    data = json.loads(json.dumps(OperatorPlan({"::add#0": "bf16", "::mul#0": "fp32"})._as_json()))
    change(data)
    return json.dumps(data)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is no operator plan: not JSON"),
        ("[" * 100_000, "is no operator plan: not JSON"),
        ("[1]", 'is no operator plan: it lacks "kind"'),
        (broken(lambda d: d.update(version=99)), "of version 99; this narrowgauge reads version 1"),
        (broken(lambda d: d.pop("default")), "no whole operator plan: 'default' is miss"),
        (broken(lambda d: d["operators"].pop()), "operators were added or removed by hand"),
        (
            broken(lambda d: d["operators"][0].update(format="bf61")),
            "operator '::add#0': format 'bf61' is unknown; did you mean 'bf16'",
        ),
        (broken(lambda d: d["operators"][0].update(name="add")), "'add' is no name of an operator"),
        (broken(lambda d: d["operators"].append(d["operators"][0])), "names '::add#0' twice"),
        (broken(lambda d: d.update(operators=3)), "is no valid operator plan"),
        (broken(lambda d: d.update(training="false")), "training is 'false'; it must be true or f"),
        (
            broken(lambda d: d["operators"][0].update(outside="no")),
            "outside of '::add#0' is 'no'; it must be true or false",
        ),
        (broken(lambda d: d["operators"][0].update(name="\ud800::add#0")), "half of a surrogate"),
    ],
)
def test_a_file_that_is_no_plan_says_why(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        OperatorPlan.load(path)


def test_a_file_that_is_not_text_says_so(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="not JSON"):
        OperatorPlan.load(tmp_path / "plan.json")


def test_changing_formats_leaves_the_first_plan_and_the_fingerprint(
    residual: tuple[Residual, Recording],
) -> None:
    plan = OperatorPlan.uniform(residual[1], "fp32")
    other = plan.with_formats({"fc::linear#0": torch.bfloat16})
    assert (plan.formats["fc::linear#0"], other.formats["fc::linear#0"]) == ("fp32", "bf16")
    assert plan.fingerprint == other.fingerprint
    assert plan != other
    with plan.applied(residual[0]):
        assert residual[0](X).dtype == torch.float32
    with pytest.raises(
        ValueError, match=r"no operator 'fc::liner#0' \(did you mean 'fc::linear#0'"
    ):
        plan.with_formats({"fc::liner#0": "bf16"})
    with pytest.raises(ValueError, match=r"no operator 'fc::liner#0' \(did you mean"):
        plan.with_evidence({"fc::liner#0": {}})


def test_merged_plans_have_the_operators_of_both_and_the_formats_of_the_second() -> None:
    first = OperatorPlan({"::add#0": "fp32", "::mul#0": "fp32"}, evidence={"::add#0": "first"})
    second = OperatorPlan({"::add#0": "bf16", "::div#0": "bf16"})
    merged = first.merge(second)
    assert merged.formats == {"::add#0": "bf16", "::mul#0": "fp32", "::div#0": "bf16"}
    assert merged.evidence == {}  # it was for another format


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([],), "formats is list; it must be a dict"),
        (({"::add#0": "e9m9"},), "operator '::add#0': "),
        (({"::add#0": 3},), "operator '::add#0': the format is int"),
        (({"::add#0": "e8m0"},), "which has no sign"),
        (({"::add#0": "bf16/"},), "operator '::add#0': "),
        (({"::relu_#0": "bf16"},), "writes into its input and so computes in that tensor's dtype"),
        (({"::add#0": "bf16"}, "nope"), "format 'nope' is unknown"),
    ],
)
def test_bad_formats_are_refused_by_name(arguments: tuple[object, ...], message: str) -> None:
    formats, *default = arguments
    with pytest.raises((TypeError, ValueError), match=message):
        OperatorPlan(formats, **dict(zip(["default"], default, strict=False)))  # type: ignore[arg-type]


def test_evidence_on_an_operator_that_is_not_there_is_refused() -> None:
    with pytest.raises(ValueError, match=r"evidence names '::ad#0', .* mean '::add#0'"):
        OperatorPlan({"::add#0": "bf16"}, evidence={"::ad#0": 1})


def test_formats_are_names_objects_and_dtypes() -> None:
    assert compute_of("float32").name == compute_of(torch.float32).name == "fp32"
    assert compute_of(format_of("e4m3")).name == "e4m3"
    assert compute_of("bf16/bf16") == compute_of("bf16")
    assert compute_of("bf16/e5m2").dtype == torch.float32


# --- fit -----------------------------------------------------------------------------------------


class Renamed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fcc = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.relu(self.fcc(x))


def test_a_module_that_the_model_lacks_is_an_error_at_once(
    residual: tuple[Residual, Recording],
) -> None:
    plan = OperatorPlan.uniform(residual[1], "bf16")
    with pytest.raises(
        OperatorMismatch,
        match=r"plan names 'fc::linear#0', which the model lacks.*no module 'fc' \(did you mean",
    ):
        plan.attach(Renamed())


def test_operators_that_appeared_or_vanished_are_named_with_near_names(
    residual: tuple[Residual, Recording],
) -> None:
    class Other(Residual):
        def forward(self, x: Tensor) -> Tensor:
            return x * F.relu6(self.fc(x))

    plan = OperatorPlan.uniform(residual[1], "bf16")
    text = (
        r"the model calls '::relu6#0' \(did you mean '::relu#0'\?\), '::mul#0', which the plan "
        r"lacks; and the plan names '::relu#0' \(did you mean '::relu6#0'\?\), '::add#0', which the"
        r" model lacks. Record the model's operators again"
    )
    other = Other()
    with pytest.raises(OperatorMismatch, match=text), plan.applied(other):
        other(X)
    with pytest.raises(OperatorMismatch, match=r"'::mul#0'.*lacks.*'::add#0'.*lacks"):
        plan.check(record_operators(other, lambda: F.mse_loss(other(X), X)))
    plan.check(residual[1])
    assert other(X).dtype == torch.float32  # and the model is free again


def test_a_loss_that_the_plan_does_not_know_is_an_error(
    residual: tuple[Residual, Recording],
) -> None:
    plan = OperatorPlan.uniform(residual[1], "bf16")
    with (
        pytest.raises(OperatorMismatch, match="the model calls '::l1_loss#0'"),
        plan.applied(residual[0]),
    ):
        F.l1_loss(residual[0](X), X)


def test_changing_control_flow_is_allowed_by_name_and_warned_of_once() -> None:
    class Dynamic(Residual):
        extra = False

        def forward(self, x: Tensor) -> Tensor:
            x = super().forward(x)
            return torch.tanh(x) if self.extra else x

    model = Dynamic()
    recording = recorded(model, X)
    plan = OperatorPlan.uniform(recording, "bf16")
    model.extra = True
    with plan.applied(model, mismatch="warn"), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model(X).sum()
        assert model(X).dtype == torch.bfloat16  # tanh follows the default, promote
    assert [str(warning.message) for warning in caught] == [
        "the plan does not fit the model: the model calls '::tanh#0', which the plan lacks. "
        "They follow the plan's default, promote"
    ]
    merged = OperatorPlan.uniform(recorded(model, X), "fp32").merge(plan)
    with merged.applied(model, mismatch="ignore"):
        assert model(X).dtype == torch.float32
    assert merged.formats["::tanh#0"] == "fp32"
    assert merged.formats["::add#0"] == "bf16"


def test_in_evaluation_operators_of_training_may_be_missing() -> None:
    class Stochastic(Residual):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * 2.0 if self.training else super().forward(x)

    model = Stochastic()
    plan = OperatorPlan.uniform(recorded(model, X), "bf16")
    model.eval()
    with plan.applied(model), torch.no_grad():
        model(X).sum()


def test_arguments_of_applied_are_checked() -> None:
    plan = OperatorPlan({})
    with pytest.raises(TypeError, match=r"model is int; it must be a torch\.nn\.Module"):
        plan.applied(3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="mismatch is 'raise'; allowed: 'error', 'warn', 'ignore'"):
        plan.attach(Residual(), mismatch="raise")
    with pytest.raises(TypeError, match=r"operators is .*record_operators"):
        OperatorPlan.uniform(Residual(), "fp32")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"torch\.autocast knows 'bf16' and 'fp16'"):
        OperatorPlan.from_autocast_rules([], "fp32")
    with pytest.raises(ValueError, match="device is 'tpu'; allowed: 'cpu', 'cuda'"):
        OperatorPlan.from_autocast_rules([], "bf16", "tpu")


@pytest.mark.parametrize("device", sorted(_LISTS))
def test_the_lists_of_autocast_name_operators(device: str) -> None:
    low, wide = _LISTS[device]
    assert not low & wide
    assert (low | wide) <= set(OPERATORS.values())


def test_the_list_for_cpus_is_that_of_this_torch() -> None:
    """Each operator here that torch.autocast knows is in a list, and no other."""
    low, wide = _LISTS["cpu"]
    known = set()
    for operator in set(OPERATORS.values()):
        names = (operator, f"linalg_{operator}", f"{operator}_loss")
        for name in names:
            try:
                if torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "AutocastCPU"):
                    known.add(operator)
            except RuntimeError:  # no such operator in torch
                continue
    composite = {  # made of others inside torch, or of another name there
        *["einsum", "multi_dot", "chain_matmul", "tensordot", "inner", "grid_sample", "inverse"],
        *["lstm", "gru", "rnn_tanh", "rnn_relu", "lstm_cell", "gru_cell", "rnn_tanh_cell"],
        *["rnn_relu_cell", "max_unpool1d"],
    }
    assert known - (low | wide) == set()
    assert (low | wide) - known <= composite | {"conv_transpose2d", "conv_transpose3d", "ctc_loss"}
