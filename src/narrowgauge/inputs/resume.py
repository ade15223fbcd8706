"""Arguments and saved states of a feed: what they must be, and what they say when they are not."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from narrowgauge.inputs.source import Position, Source, StreamSource, empty_digest
from narrowgauge.inputs.split import TAILS
from narrowgauge.ledger import Ledger

STATE_VERSION = 1
_SHORTEST = timedelta(milliseconds=50)  # ranks say three times as often that they live
_LONGEST = timedelta(days=365)
_KEYS = ("version", "epoch", "samples", "digest", "full", "seed", "length", "source")


def check_arguments(
    source: Any,
    depth: Any,
    max_bytes: Any,
    on_device: Any,
    tail: Any,
    timeout: Any,
    seed: Any,
    ledger: Any,
) -> timedelta:
    """Raise TypeError or ValueError for wrong arguments of a feed; the timeout, as a timedelta."""
    for name, given, allowed in (
        ("source", source, ("shard", "rank0")),
        ("tail", tail, TAILS),
    ):
        if given not in allowed:
            raise ValueError(f"{name} is {given!r}; allowed: {', '.join(map(repr, allowed))}")
    for name, number in (("depth", depth), ("max_bytes", max_bytes)):
        if isinstance(number, bool) or not isinstance(number, int) or number < 1:
            raise ValueError(f"{name} is {number!r}; allowed: whole numbers from 1")
    if on_device is not None and not callable(on_device):
        raise TypeError(
            f"on_device is {on_device!r}; allowed: a function of a batch, or None. Where batches "
            "go is the argument device"
        )
    if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int)):
        raise TypeError(f"seed is {seed!r}; allowed: a whole number, or None")
    if seed is not None and not 0 <= seed < 1 << 63:
        raise ValueError(f"seed is {seed}; allowed: 0 to 2**63 - 1")
    if not isinstance(ledger, (Ledger, type(None))):
        raise TypeError(f"ledger is {ledger!r}; allowed: a Ledger, or None")
    limit = timeout
    if isinstance(timeout, (int, float)) and not isinstance(timeout, bool):
        try:
            limit = timedelta(seconds=timeout)
        except (ValueError, OverflowError):  # NaN, infinity
            limit = None
    if not isinstance(limit, timedelta) or not _SHORTEST <= limit <= _LONGEST:
        raise ValueError(
            f"timeout is {timeout!r}; allowed: {_SHORTEST.total_seconds():g} seconds to "
            f"{_LONGEST.days} days, as a number of seconds or a timedelta"
        )
    return limit


def saved_state(position: Position, seed: int, length: int | None) -> dict[str, Any]:
    """A position as a dict of plain values."""
    return {
        "version": STATE_VERSION,
        "epoch": position.epoch,
        "samples": position.samples,
        "digest": position.digest or empty_digest(),
        "full": position.full,
        "seed": seed,
        "length": length,
        "source": position.state,
    }


def check_state(
    state: Any, source: Source | None, length: int | None, skip: bool
) -> tuple[Position, int]:
    """The position and the seed of a saved state.

    Args:
        state: what was saved.
        source: what this rank reads, if anything.
        length: samples in an epoch of it, if known.
        skip: whether samples may be read again to throw them away.

    Raises:
        ValueError: it is damaged, of another source, or of one that cannot go on from there.
    """
    missing = [key for key in _KEYS if not isinstance(state, Mapping) or key not in state]
    if missing:
        raise ValueError(
            f"the state lacks {', '.join(map(repr, missing))}; pass what state_dict() gave"
        )
    if state["version"] != STATE_VERSION:
        raise ValueError(
            f"the state's version is {state['version']!r}; this narrowgauge knows {STATE_VERSION}"
        )
    for key in ("epoch", "samples", "full", "seed"):
        number = state[key]
        if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number < 1 << 63:
            raise ValueError(f"{key} of the state is {number!r}; allowed: whole numbers from 0")
    digest = state["digest"]
    if not isinstance(digest, str) or len(digest) != 32 or set(digest) - set("0123456789abcdef"):
        raise ValueError(f"digest of the state is {digest!r}; allowed: 32 hexadecimal digits")
    if state["length"] != length:
        raise ValueError(
            f"the state is of a source with {state['length']} samples, this one has {length}; go "
            "on with the data set of the saved run"
        )
    if length is not None and state["samples"] > length:
        raise ValueError(
            f"the state is behind sample {state['samples']} of {length}: it is damaged"
        )
    own = state["source"]
    if state["samples"] and isinstance(source, StreamSource) and not skip:
        if not source.seekable:
            raise ValueError(
                f"this source cannot begin behind sample {state['samples']}: it has no indices "
                "and no state of its own. Use a DataLoader over a dataset with indices, or "
                "torchdata's StatefulDataLoader, or call load_state_dict(state, skip=True) to read "
                "these samples again and throw them away"
            )
        if own is None:
            raise ValueError(
                "the state does not hold the state of the source, which only ranks that read have; "
                "load the one that rank 0 saved, or call load_state_dict(state, skip=True)"
            )
    used = own if isinstance(source, StreamSource) and not skip else None
    position = Position(state["epoch"], state["samples"], digest, state["full"], used)
    return position, state["seed"]
