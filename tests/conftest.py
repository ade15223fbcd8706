"""Settings and fixtures of all tests."""

import itertools
import math
import os
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from hypothesis import settings

# Triton decides when a kernel is decorated, its own library's when it is imported, whether it will
# be compiled or interpreted. So this must be said before any test imports it.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from narrowgauge import kernels

# A time limit per example says more about the machine's load than about the code.
settings.register_profile("narrowgauge", deadline=None)
settings.load_profile("narrowgauge")


@pytest.fixture(params=kernels.available_backends())
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each implementation of the CPU kernels in turn; its name."""
    before = kernels.backend()
    kernels.select(request.param)
    yield request.param
    kernels.select(before)


@pytest.fixture(scope="module")
def steady_clock() -> Iterator[None]:
    """For the search of operators everything takes the same time, so that it finds the same."""
    from narrowgauge.operators.search import contenders, costs

    with pytest.MonkeyPatch.context() as patch:
        ticks = itertools.count()
        patch.setattr(contenders, "time", SimpleNamespace(perf_counter=lambda: float(next(ticks))))
        patch.setattr(contenders, "_EPOCHS", math.inf)  # no turns end because time is up
        patch.setattr(costs, "time_in_turn", lambda functions, **_: dict.fromkeys(functions, 1e-3))
        yield
