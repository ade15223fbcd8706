"""The native library, by ctypes: which levels of it this machine can run, and how it is called."""

from __future__ import annotations

MISSING = (
    "narrowgauge was installed without its native kernels, so the slow reference kernels in plain "
    "torch are in use. To get the fast ones, install it again where a C++17 compiler is found: "
    "pip install --force-reinstall --no-cache-dir narrowgauge"
)


def levels() -> list[str]:
    return []


class Native:
    def __init__(self, name: str) -> None: ...
