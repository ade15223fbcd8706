"""Settings and fixtures of all tests."""

import os
from collections.abc import Iterator

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
