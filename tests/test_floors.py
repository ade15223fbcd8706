"""The floors of the house: who may import whom, read from the source with ``ast``."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "src" / "narrowgauge"

# Each room, and the floor it stands on. A room may import rooms below its own floor, and those
# named in ALSO; never its neighbours.
FLOORS = [
    {"formats"},
    {"scaling"},
    {"kernels"},
    {"rounding", "codec", "matmul"},
    {"collectives", "nn", "ledger"},
    {"gradients", "operators", "parameters", "inputs"},
    {"costmodel", "report"},
    {"demo", "search"},
    {"doctor", "cli_plan", "cli_search"},
    {"cli"},
]
ALSO = {("rounding", "codec"), ("matmul", "codec"), ("nn", "ledger"), ("collectives", "ledger")}
KNOW_DISTRIBUTED = {
    "collectives",
    "gradients",
    "operators",
    "parameters",
    "inputs",
    "costmodel",
    "demo",
}
FLOOR_OF = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


def imports(path: Path) -> set[str]:
    """Absolute names of all imported modules, wherever in the file they are imported."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute here"
            module = node.module or ""
            if module in ("narrowgauge", "torch"):
                found |= {f"{module}.{alias.name}" for alias in node.names}
            else:
                found.add(module)
    return found


SOURCES = [path for path in sorted(PACKAGE.rglob("*.py")) if path != PACKAGE / "__init__.py"]


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_only_from_below(path: Path) -> None:
    room = room_of(path)
    assert room in FLOOR_OF, f"{room} has no floor; give it one in this test and in the docs"
    for name in imports(path):
        parts = name.split(".")
        if parts[0] != "narrowgauge":
            continue
        assert len(parts) > 1, f"{path}: import the room, not the whole house"
        used = parts[1]
        assert used in FLOOR_OF, f"{path} imports {name}, which is no room"
        below = FLOOR_OF[used] < FLOOR_OF[room]
        assert used == room or below or (room, used) in ALSO, f"{room} may not import {name}"


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_only_few_rooms_know_torch_distributed(path: Path) -> None:
    if any(
        name.startswith("torch.distributed") or "DistributedDataParallel" in name
        for name in imports(path)
    ):
        assert room_of(path) in KNOW_DISTRIBUTED


def test_the_walls_are_found() -> None:
    assert {"formats", "kernels", "report", "cli"} <= {room_of(path) for path in SOURCES}
