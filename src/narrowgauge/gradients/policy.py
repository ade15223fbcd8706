"""Which parameter's gradient travels in which format."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any, TypeVar, overload

from narrowgauge.collectives.reduce import wire_format
from narrowgauge.formats import Format, FormatLike

F = TypeVar("F", bound=Format)


@overload
def parameter_formats(
    names: Iterable[str], format: FormatLike, keep: Mapping[str, FormatLike] | None = None
) -> dict[str, Format]: ...


@overload
def parameter_formats(
    names: Iterable[str],
    format: FormatLike,
    keep: Mapping[str, FormatLike] | None = None,
    *,
    check: Callable[[FormatLike], F],
) -> dict[str, F]: ...


def parameter_formats(
    names: Iterable[str],
    format: FormatLike,
    keep: Mapping[str, FormatLike] | None = None,
    *,
    check: Callable[[FormatLike], Any] = wire_format,
) -> dict[str, Any]:
    """The format of each parameter's gradient on the wire.

    Args:
        names: parameter names as ``named_parameters()`` gives them.
        format: the format of all that ``keep`` does not name.
        keep: exceptions, the first match wins: a parameter's name, a module's name (all parameters
            below it), or a pattern such as ``"*.bias"``, and the format to use there.
        check: makes the format of what names it, or raises; by default those that can travel.

    Raises:
        ValueError: a key of ``keep`` matches no parameter, or a format cannot travel.
    """
    default = check(format)
    exceptions = {key: check(value) for key, value in (keep or {}).items()}
    all_names = list(names)
    for key in exceptions:
        if not any(_matches(name, key) for name in all_names):
            modules = {name.rsplit(".", 1)[0] for name in all_names}
            close = difflib.get_close_matches(key, sorted(modules | set(all_names)), n=1)
            hint = f"; did you mean {close[0]!r}?" if close else "."
            raise ValueError(
                f"keep names {key!r}, which matches no parameter{hint} Parameters: "
                f"{', '.join(all_names[:20])}{', …' if len(all_names) > 20 else ''}"
            )
    return {
        name: next((value for key, value in exceptions.items() if _matches(name, key)), default)
        for name in all_names
    }


def _matches(name: str, key: str) -> bool:
    return name == key or name.startswith(f"{key}.") or fnmatchcase(name, key)
