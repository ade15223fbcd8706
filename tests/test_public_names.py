"""The public face: names, docstrings, types, and what ships."""

from __future__ import annotations

import ast
import importlib.resources
import inspect
from pathlib import Path

import pytest

import narrowgauge

PACKAGE = Path(__file__).parent.parent / "src" / "narrowgauge"
NAMES = {
    "BlockFormat",
    "Feed",
    "FloatFormat",
    "IntFormat",
    "Ledger",
    "MatmulBackward",
    "OperatorPlan",
    "OperatorSearch",
    "ShardedOptimizer",
    "all_reduce",
    "decode",
    "encode",
    "format_of",
    "matmul",
    "predict",
    "quantize",
    "quantize_",
}
SUBMODULES = {"gradients", "inputs", "nn", "operators", "parameters"}
SOURCES = sorted(PACKAGE.rglob("*.py"))


def test_exactly_the_public_names_are_exported() -> None:
    exported = set()
    for node in ast.parse((PACKAGE / "__init__.py").read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                assert alias.asname == alias.name, f"export {alias.name} as itself, explicitly"
                exported.add(alias.name)
        else:
            assert isinstance(node, ast.Expr), "__init__.py holds a docstring and exports only"
    assert exported == NAMES | SUBMODULES


@pytest.mark.parametrize("name", sorted(NAMES | SUBMODULES))
def test_public_names_are_there_and_documented(name: str) -> None:
    thing = getattr(narrowgauge, name)
    assert inspect.getdoc(thing)


def public_functions(path: Path) -> list[ast.FunctionDef]:
    """Functions and methods without an underscore, not nested in other functions."""
    found = []
    holders: list[ast.Module | ast.ClassDef] = [ast.parse(path.read_text(encoding="utf-8"))]
    while holders:
        for node in holders.pop().body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                holders.append(node)
            if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
                found.append(node)
    return found


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_public_functions_have_docstrings_and_types(path: Path) -> None:
    for function in public_functions(path):
        if any(ast.unparse(decorator) == "overload" for decorator in function.decorator_list):
            continue
        where = f"{path.name}: {function.name}"
        assert ast.get_docstring(function), f"{where} has no docstring"
        assert function.returns is not None, f"{where} does not say what it returns"
        arguments = function.args.posonlyargs + function.args.args + function.args.kwonlyargs
        for argument in arguments:
            assert argument.annotation or argument.arg in ("self", "cls"), (
                f"{where}: {argument.arg} has no type"
            )


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_files_fit_into_the_head(path: Path) -> None:
    lines = len(path.read_text(encoding="utf-8").splitlines())
    assert lines <= 500, f"{path.name} has {lines} lines: it holds two ideas, split it"


def test_types_ship() -> None:
    assert importlib.resources.files("narrowgauge").joinpath("py.typed").is_file()
