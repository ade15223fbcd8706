"""What ``narrowgauge doctor`` finds out about this machine and installation."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from narrowgauge import demo, kernels


@dataclass(frozen=True)
class Finding:
    """One line of the examination.

    Attributes:
        part: what was looked at.
        found: what is there.
        advice: what to do about it, a sentence; empty if all is well.
    """

    part: str
    found: str
    advice: str = ""


def examine() -> list[Finding]:
    """Look at kernels, threads, torch, backends and optional helpers."""
    return list(_findings())


def _findings() -> Iterator[Finding]:
    backend = kernels.backend()
    available = ", ".join(kernels.available_backends())
    yield Finding(
        "kernels",
        f"{backend} (available: {available})",
        kernels.MISSING
        if backend == "reference" and len(kernels.available_backends()) == 1
        else "",
    )
    yield Finding("threads", f"{torch.get_num_threads()} of {os.cpu_count()} processor cores")
    yield Finding(
        "Python", f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    )
    yield Finding("torch", torch.__version__)
    yield _distributed()
    for module, package, use in (
        ("sklearn", "scikit-learn", "the demo's digits"),
        ("matplotlib", "matplotlib", "figures and the report"),
    ):
        present = importlib.util.find_spec(module) is not None
        yield Finding(
            package,
            "present" if present else "missing",
            "" if present else f"{package} is missing ({use}): pip install {package}",
        )
    folder = demo.find_fashion_mnist()
    yield Finding(
        "Fashion-MNIST",
        "not found" if folder is None else str(folder),
        f"Fashion-MNIST (optional, a larger demo). {demo.HOW_TO_GET_FASHION_MNIST}"
        if folder is None
        else "",
    )
    tool = shutil.which("ip")
    yield Finding(
        "iproute2",
        tool or "missing",
        ""
        if tool
        else "iproute2 (optional) is missing: benchmarks at limited network rates need it, and "
        "root. On Debian and Ubuntu: apt-get install iproute2",
    )


def _distributed() -> Finding:
    backends = {
        "gloo": torch.distributed.is_gloo_available(),
        "nccl": torch.distributed.is_nccl_available(),
        "mpi": torch.distributed.is_mpi_available(),
    }
    found = [name for name, available in backends.items() if available]
    return Finding(
        "torch.distributed",
        ", ".join(found) or "no backend",
        ""
        if backends["gloo"]
        else "Gloo is missing from this torch: compressed gradients and the demo need it.",
    )
