"""What the search is made of: costs, cuts, what is judged next, turns, an epoch's verdict."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from narrowgauge import OperatorPlan
from narrowgauge.operators import Recording, record_operators
from narrowgauge.operators.search.check import diverged, seed_band
from narrowgauge.operators.search.costs import (
    Profile,
    cheapest_plan,
    measure,
    never_cheapest,
    saved_bytes,
)
from narrowgauge.operators.search.cut import Edge, cheapest_formats, total_cost
from narrowgauge.operators.search.screening import Screening
from narrowgauge.operators.search.timing import compare, rotated, time_in_turn
from narrowgauge.operators.search.trial import Trial
from narrowgauge.operators.signals import Judge, Signal
from tests.test_operator_signals import taped

# --- costs ---------------------------------------------------------------------------------------


class Chain(nn.Module):
    """Three operators in a row, of which the middle one saves most."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.sigmoid(self.first(x)))


def chain() -> Recording:
    torch.manual_seed(0)
    model = Chain()
    return record_operators(model, lambda: model(torch.randn(4, 8)).sum(), keep_arguments=True)


NAMES = ("first::linear#0", "::sigmoid#0", "second::linear#0", "::sum#0")


def costs_of(cast: float, **low: float) -> tuple[Recording, Profile]:
    recording = chain()
    assert tuple(recording.names) == NAMES
    profile = Profile()
    for call, name in zip(recording, NAMES, strict=True):
        short = name.rpartition("::")[2].partition("#")[0]
        profile.operators[call.signature] = {"fp32": 1.0, "bf16": low.get(short, 1.0)}
    for pair in (("fp32", "bf16"), ("bf16", "fp32")):
        profile.casts[pair] = [(8, cast), (32, cast)]
    return recording, profile


def test_a_gain_must_pay_for_its_casts() -> None:
    allowed = {name: ["bf16"] for name in NAMES}
    cheap = cheapest_plan(*costs_of(0.1, sigmoid=0.5, linear=1.3), allowed)
    assert cheap == dict.fromkeys(NAMES, "fp32") | {"::sigmoid#0": "bf16"}
    dear = cheapest_plan(*costs_of(0.4, sigmoid=0.5, linear=1.3), allowed)
    assert dear == dict.fromkeys(NAMES, "fp32")
    careful = cheapest_plan(*costs_of(0.2, sigmoid=0.5, linear=1.3), allowed, caution=2.0)
    assert careful == dict.fromkeys(NAMES, "fp32")


def test_what_was_excluded_stays_wide() -> None:
    recording, profile = costs_of(0.01, sigmoid=0.1, linear=0.1)
    chosen = cheapest_plan(recording, profile, {NAMES[0]: ["bf16"], NAMES[2]: []})
    assert chosen == dict.fromkeys(NAMES, "fp32") | {NAMES[0]: "bf16"}


def test_memory_counts_as_much_as_it_is_weighed() -> None:
    recording, profile = costs_of(0.001, sigmoid=1.3, linear=1.3)
    allowed = {name: ["bf16"] for name in NAMES}
    assert set(cheapest_plan(recording, profile, allowed).values()) == {"fp32"}
    saving = cheapest_plan(recording, profile, allowed, memory_weight=10.0)
    assert saving == dict.fromkeys(NAMES, "fp32") | {NAMES[0]: "bf16"}  # the second keeps a weight
    assert saved_bytes(recording, saving) < saved_bytes(recording, {})


def test_saved_bytes_are_those_that_autograd_keeps() -> None:
    recording = chain()
    # the input (4 · 8) and the sigmoid (4 · 8), which it keeps and which the second linear takes
    assert saved_bytes(recording, {}) == 2 * 4 * 8 * 4
    narrow = dict.fromkeys(NAMES, "bf16")
    weights = 8 * 8 * 2  # of the second; the first needs no gradient of its input
    assert saved_bytes(recording, narrow) == 2 * 4 * 8 * 2 + weights
    simulated = dict.fromkeys(NAMES, "e4m3/e5m2")
    assert saved_bytes(recording, simulated) == saved_bytes(recording, narrow) / 2
    model = Chain()
    x = torch.randn(4, 8)
    tape = taped(model, lambda: model(x).sum())
    judge = Judge(model, tape, OperatorPlan.uniform(recording, "fp32"))
    assert judge.saved_bytes == saved_bytes(recording, {})
    judge.signal(narrow)
    assert judge.saved_bytes == saved_bytes(recording, narrow)


def test_what_no_plan_would_have_narrow_is_known_beforehand() -> None:
    recording, profile = costs_of(0.1, sigmoid=1.5, linear=1.3)
    found = never_cheapest(recording, profile, ["bf16"])
    assert set(found) == {(NAMES[1], "bf16"), (NAMES[0], "bf16")}  # 0.5 > 4 · 0.1; 0.3 > 2 · 0.1
    assert "takes 1.5 × as long as in float32" in found[NAMES[1], "bf16"]
    for caution in (1.0, 2.0):
        allowed = {name: ["bf16"] for name in NAMES}
        chosen = cheapest_plan(recording, profile, allowed, caution=caution)
        assert all(chosen[name] == "fp32" for name, _ in found)


def test_every_signature_and_cast_is_timed_once() -> None:
    recording = chain()
    profile = measure(recording, ["fp32", "bf16"], seconds=0.0)
    assert set(profile.operators) == {call.signature for call in recording}
    assert all(set(times) == {"fp32", "bf16"} for times in profile.operators.values())
    assert min(min(times.values()) for times in profile.operators.values()) > 0
    assert set(profile.casts) == {("fp32", "bf16"), ("bf16", "fp32")}
    profile.casts["fp32", "bf16"] = [(100, 1.0), (300, 2.0)]
    assert profile.cast("fp32", "bf16", 200) == pytest.approx(1.5)
    assert profile.cast("fp32", "bf16", 500) == pytest.approx(3.0)
    assert profile.cast("fp32", "bf16", 0) == pytest.approx(0.5)
    assert profile.cast("bf16", "bf16", 500) == 0


# --- the cut -------------------------------------------------------------------------------------

costs = st.floats(0, 10, allow_nan=False).map(lambda x: round(x, 2))


@st.composite
def graphs(draw: st.DrawFn, formats: list[str]) -> tuple[dict[str, dict[str, float]], list[Edge]]:
    names = [f"n{i}" for i in range(draw(st.integers(1, 6)))]
    operators = {}
    for name in names:
        allowed = draw(st.lists(st.sampled_from(formats), min_size=1, unique=True))
        operators[name] = {format: draw(costs) for format in allowed}
    edges = []
    for source, target in itertools.combinations(names, 2):
        if draw(st.booleans()):
            pairs = [(a, b) for a in formats for b in formats if a != b]
            edges.append(Edge(source, target, {pair: draw(costs) for pair in pairs}))
    return operators, edges


def brute_force(operators: dict[str, dict[str, float]], edges: list[Edge]) -> float:
    choices = itertools.product(*operators.values())
    return min(total_cost(dict(zip(operators, c, strict=True)), operators, edges) for c in choices)


@settings(max_examples=100, deadline=None)
@given(graphs(["fp32", "bf16"]))
def test_with_two_formats_no_choice_is_cheaper(graph: Any) -> None:
    chosen = cheapest_formats(*graph)
    assert all(chosen[name] in allowed for name, allowed in graph[0].items())
    assert total_cost(chosen, *graph) == pytest.approx(brute_force(*graph), abs=1e-9)


@settings(max_examples=50, deadline=None)
@given(graphs(["fp32", "bf16", "fp16"]))
def test_with_more_formats_no_exchange_is_cheaper(graph: Any) -> None:
    chosen = cheapest_formats(*graph)
    cost = total_cost(chosen, *graph)
    assert brute_force(*graph) <= cost + 1e-9
    for name, allowed in graph[0].items():
        for format in allowed:
            assert cost <= total_cost({**chosen, name: format}, *graph) + 1e-9


@pytest.mark.parametrize(
    ("operators", "edges", "text"),
    [
        ({"a": {}}, [], "'a' may take no format"),
        ({"a": {"fp32": -1.0}}, [], "'a' costs -1.0 in fp32; allowed: finite, from 0"),
        ({"a": {"fp32": math.nan}}, [], "'a' costs nan"),
        ({"a": {"fp32": 1.0}}, [Edge("a", "b", {})], "joins 'b', no operator"),
        ({"a": {"x": 1.0}}, [Edge("a", "a", {("x", "x"): 1.0})], "costs 1.0; .* 0 within a format"),
    ],
)
def test_a_graph_without_sense_is_refused(operators: Any, edges: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        cheapest_formats(operators, edges)


# --- which is judged next ------------------------------------------------------------------------

GOOD, BAD = Signal(0.001, 0.0), Signal(0.5, 0.0)


def screened(harmful: Any, formats: tuple[str, ...] = ("bf16",)) -> tuple[Screening, int]:
    screening = Screening(chain(), formats, simulated=False, bound=0.1)
    judgements = 0
    while not screening.over:
        chosen = screening.next()
        screening.judged(BAD if harmful(chosen) else GOOD)
        judgements += 1
        assert judgements < 50
    return screening, judgements


def test_harm_alone_and_harm_of_two_together_are_found() -> None:
    screening, judgements = screened(lambda chosen: "::sum#0" in chosen and len(chosen) == 1)
    assert set(screening.survivors()) == set(NAMES[:3])
    assert judgements == 4 - 1 + 2 + 1  # linears of equal signature are one; twice all together
    both = {"first::linear#0", "::sigmoid#0"}
    screening, _ = screened(lambda chosen: both <= set(chosen))
    assert not both <= set(screening.survivors())
    assert len(screening.survivors()) == 3


def test_the_next_format_is_taken_where_the_preferred_harms() -> None:
    screening, _ = screened(lambda c: c.get("::sigmoid#0") == "bf16", ("bf16", "fp16"))
    assert screening.survivors() == dict.fromkeys(NAMES, "bf16") | {"::sigmoid#0": "fp16"}


def test_after_a_failed_epoch_all_is_judged_again_and_half_given_up_if_nothing_is_found() -> None:
    screening, _ = screened(lambda chosen: False)
    screening.begin_again(NAMES[:2], "an epoch failed")
    assert not screening.over
    while not screening.over:
        screening.judged(GOOD)
    assert len(screening.survivors()) == 3
    assert "an epoch failed" in screening.excluded.values()
    screening, _ = screened(lambda chosen: False)
    screening.begin_again(NAMES[:2], "an epoch failed")
    while not screening.over:
        screening.judged(BAD if list(screening.next()) == ["::sigmoid#0"] else GOOD)
    assert set(screening.survivors()) == set(NAMES) - {"::sigmoid#0"}
    assert "an epoch failed" not in screening.excluded.values()


# --- turns ---------------------------------------------------------------------------------------


def played(seconds: dict[str, Any], memory: dict[str, int], weight: float = 0.0) -> Trial:
    trial = Trial(memory, weight)
    for step in range(10_000):
        if trial.over:
            return trial
        took = seconds[trial.next]
        if (finished := trial.took(took(step) if callable(took) else took)) is not None:
            trial.add(finished)
    raise AssertionError("the trial does not end")


SAME = {"fp32": 100, "autocast": 100, "plan": 100}


def test_the_fastest_wins_by_more_than_the_noise() -> None:
    trial = played({"fp32": 1.0, "autocast": 0.9, "plan": 0.8}, SAME)
    assert trial.winner()[0] == "plan"
    assert "1.250 × as fast as float32" in trial.winner()[1]
    assert "1.125 × as fast as autocast" in trial.winner()[1]


def test_autocast_is_kept_unless_a_plan_beats_it() -> None:
    noise = itertools.cycle([0.95, 1.05])
    trial = played(
        {"fp32": 1.0, "autocast": 0.9, "plan": lambda step: 0.9 * next(noise)},
        SAME,
    )
    assert trial.winner()[0] == "autocast"


def test_float32_is_kept_if_nothing_beats_it() -> None:
    trial = played({"fp32": 1.0, "autocast": 1.0, "plan": 1.001}, SAME)
    assert trial.winner() == ("fp32", "nothing beats float32 by more than the noise")


def test_what_is_much_slower_leaves_early_unless_its_memory_counts() -> None:
    times = {"fp32": 1.0, "autocast": 3.0, "plan": 2.0}
    trial = played(times, SAME)
    assert set(trial.left) == {"autocast", "plan"}
    assert trial.rounds == 3
    assert trial.winner()[0] == "fp32"
    weighed = played(times, {"fp32": 100, "autocast": 100, "plan": 50}, weight=3.0)
    assert set(weighed.left) == {"autocast"}
    assert weighed.winner()[0] == "plan"  # 2 + 3 · 0.5 is less than 1 + 3


def test_times_are_compared_in_rounds() -> None:
    drift = [1.0, 2.0, 4.0, 8.0, 16.0]  # the machine gets slower; the ratio stays
    found = compare(drift, [1.1 * x for x in drift])
    assert found.ratio == pytest.approx(1.1)
    assert found.noise == pytest.approx(0, abs=1e-12)
    assert found.faster
    assert not compare([1.0] * 3, [2.0] * 3).faster  # too few to know
    with pytest.raises(ValueError, match="2 times of the one and 1 of the other"):
        compare([1.0, 1.0], [1.0])
    with pytest.raises(ValueError, match="a time is 0"):
        compare([0.0], [1.0])


def test_nobody_always_follows_the_same_one() -> None:
    orders = {tuple(rotated(["a", "b", "c"], round)) for round in range(6)}
    assert orders == set(itertools.permutations("abc"))


def test_timing_takes_the_fastest_of_its_rounds() -> None:
    now = itertools.count()
    found = time_in_turn({"a": lambda: None}, rounds=9, seconds=0, clock=lambda: float(next(now)))
    assert found == {"a": 1.0}


# --- an epoch's verdict --------------------------------------------------------------------------


def test_the_band_is_as_wide_as_the_losses_scatter() -> None:
    exact = [1.0] * 80
    assert seed_band([1.001] * 80, exact, 2.0, None)[0] == pytest.approx(0.04)  # 2 % at least
    drifting = [1.0 + (0.05 if step // 8 % 2 else -0.05) for step in range(80)]
    band, how = seed_band(drifting, exact, 2.0, None)
    assert 0.16 < band < 0.24
    assert "as the losses of the same batches scatter" in how
    wild = [1.0 + (0.9 if step // 8 % 2 else -0.9) for step in range(80)]
    assert seed_band(wild, exact, 2.0, None)[0] == pytest.approx(0.5)  # 25 % at most
    assert seed_band([9.0] * 5, [1.0] * 5, 2.0, None)[1].startswith("2%, as there are too few")
    assert seed_band([], [], 2.0, 0.1) == (0.2, "10.0%, as given")


def test_losses_that_run_away_end_the_epoch() -> None:
    assert diverged([1.0], [1.0], 0) is None
    assert diverged([math.nan], [1.0], 0) == "the loss became nan in step 1"
    assert diverged([math.nan], [math.nan], 0) is None  # float32's, too
    assert diverged([5.0] * 20, [1.0] * 20, 0) == "after 20 steps the loss was 5, float32's 1"
    assert diverged([1.1] * 20, [1.0] * 20, 0) is None
    assert "4 of 10 steps were skipped" in str(diverged([1.0] * 10, [1.0] * 10, 4))
