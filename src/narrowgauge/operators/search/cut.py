"""Which format for each operator: the cheapest choice over a graph of operators and casts.

An operator costs what it takes in its format, an edge between two operators what the cast takes if
they differ. With two formats the sum of both is smallest along a minimum s-t cut, and that is found
exactly (Greig, Porteous and Seheult 1989), in milliseconds for hundreds of operators. With more
formats the problem is NP-hard: pairs of formats are exchanged by exact cuts until none lowers the
sum (α-β swaps, Boykov, Veksler and Zabih 2001), which ends in a good choice, not always in the
best.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations


@dataclass(frozen=True)
class Edge:
    """What one operator hands to another.

    Args:
        source: the operator that makes it.
        target: the operator that takes it.
        cast: cost by (format of the source, format of the target); what is missing costs nothing.
    """

    source: str
    target: str
    cast: Mapping[tuple[str, str], float]


def total_cost(
    choice: Mapping[str, str], costs: Mapping[str, Mapping[str, float]], edges: Sequence[Edge]
) -> float:
    """What a choice costs: its operators and its casts, in the unit of ``costs``."""
    return sum(costs[name][choice[name]] for name in costs) + sum(
        edge.cast.get((choice[edge.source], choice[edge.target]), 0.0) for edge in edges
    )


def cheapest_formats(
    costs: Mapping[str, Mapping[str, float]], edges: Sequence[Edge]
) -> dict[str, str]:
    """The format of each operator, such that operators and casts cost least together.

    Args:
        costs: for each operator its cost in each format that it may take; an operator with a single
            format is pinned to it.
        edges: casts; both ends must be among the operators, casts within a format are free.

    Returns:
        The format of each operator: the cheapest choice of all if there are two formats, otherwise
        one that no exchange of two formats makes cheaper.

    Raises:
        ValueError: an operator without formats, an edge of an unknown operator, a cost or cast that
            is negative or not finite.
    """
    _check(costs, edges)
    formats = sorted({format for allowed in costs.values() for format in allowed})
    starts = [{n: min(c, key=lambda f: c[f]) for n, c in costs.items()}]
    if len(formats) > 2:
        starts += [
            {n: wanted if wanted in costs[n] else start for n, start in starts[0].items()}
            for wanted in formats
        ]
    ends = [_improve(start, formats, costs, edges) for start in starts]
    return min(ends, key=lambda choice: total_cost(choice, costs, edges))


def _check(costs: Mapping[str, Mapping[str, float]], edges: Sequence[Edge]) -> None:
    for name, allowed in costs.items():
        if not allowed:
            raise ValueError(f"the operator {name!r} may take no format; give it at least one")
        for format, cost in allowed.items():
            if not (math.isfinite(cost) and cost >= 0):
                raise ValueError(
                    f"the operator {name!r} costs {cost} in {format}; allowed: finite, from 0"
                )
    for edge in edges:
        for name in (edge.source, edge.target):
            if name not in costs:
                raise ValueError(
                    f"the edge {edge.source!r} → {edge.target!r} joins {name!r}, no operator"
                )
        for pair, cost in edge.cast.items():
            if not (math.isfinite(cost) and cost >= 0) or (pair[0] == pair[1] and cost):
                raise ValueError(
                    f"the cast {pair[0]} → {pair[1]} between {edge.source!r} and {edge.target!r} "
                    f"costs {cost}; allowed: finite, from 0, and 0 within a format"
                )


def _improve(
    choice: dict[str, str],
    formats: Sequence[str],
    costs: Mapping[str, Mapping[str, float]],
    edges: Sequence[Edge],
) -> dict[str, str]:
    """Exchange pairs of formats until none lowers the cost; with two formats one cut is enough."""
    cost = total_cost(choice, costs, edges)
    while True:
        before = cost
        for first, second in combinations(formats, 2):
            new = _swap(choice, first, second, costs, edges)
            if (new_cost := total_cost(new, costs, edges)) < cost:
                choice, cost = new, new_cost
        if len(formats) <= 2 or cost >= before * (1 - 1e-12):
            return choice


def _swap(
    choice: Mapping[str, str],
    first: str,
    second: str,
    costs: Mapping[str, Mapping[str, float]],
    edges: Sequence[Edge],
) -> dict[str, str]:
    """The best choice in which operators of the two formats may exchange them, and no others."""
    free = {
        name: position
        for position, name in enumerate(costs)
        if choice[name] in (first, second) and first in costs[name] and second in costs[name]
    }
    as_first = {name: costs[name][first] for name in free}
    as_second = {name: costs[name][second] for name in free}
    pairs: dict[tuple[str, str], float] = {}  # first at the one, second at the other
    for edge in edges:
        u, v = edge.source, edge.target
        if u in free and v in free:
            pairs[u, v] = pairs.get((u, v), 0.0) + edge.cast.get((first, second), 0.0)
            pairs[v, u] = pairs.get((v, u), 0.0) + edge.cast.get((second, first), 0.0)
        elif u in free:
            as_first[u] += edge.cast.get((first, choice[v]), 0.0)
            as_second[u] += edge.cast.get((second, choice[v]), 0.0)
        elif v in free:
            as_first[v] += edge.cast.get((choice[u], first), 0.0)
            as_second[v] += edge.cast.get((choice[u], second), 0.0)
    at_source = _minimum_cut(as_first, as_second, pairs)
    return {**choice, **{name: first if name in at_source else second for name in free}}


def _minimum_cut(
    source_side: Mapping[str, float],
    sink_side: Mapping[str, float],
    pairs: Mapping[tuple[str, str], float],
) -> set[str]:
    """The nodes on the source's side of a minimum cut, by Dinic's algorithm.

    Args:
        source_side: what a node costs on the source's side.
        sink_side: what it costs on the sink's.
        pairs: what it costs if the one node is on the source's side and the other on the sink's.
    """
    index = {name: position for position, name in enumerate(source_side, start=2)}
    heads: list[int] = []  # of each arc; the arc that leads back is the one beside it
    room: list[float] = []
    arcs: list[list[int]] = [[] for _ in range(len(index) + 2)]
    source, sink = 0, 1

    def add(tail: int, head: int, capacity: float) -> None:
        for begin, end, space in ((tail, head, capacity), (head, tail, 0.0)):
            arcs[begin].append(len(heads))
            heads.append(end)
            room.append(space)

    for name, position in index.items():
        add(source, position, sink_side[name])
        add(position, sink, source_side[name])
    for (u, v), capacity in pairs.items():
        add(index[u], index[v], capacity)

    while True:
        level = [-1] * len(arcs)  # distance from the source along arcs with room
        level[source], queue = 0, [source]
        for node in queue:
            for arc in arcs[node]:
                if room[arc] > 0 and level[heads[arc]] < 0:
                    level[heads[arc]] = level[node] + 1
                    queue.append(heads[arc])
        if level[sink] < 0:
            return {name for name, position in index.items() if level[position] >= 0}
        next_arc = [0] * len(arcs)
        path: list[int] = []
        node = source
        while True:
            if node == sink:
                flow = min(room[arc] for arc in path)
                for arc in path:
                    room[arc] -= flow  # exactly 0 where it was the least
                    room[arc ^ 1] += flow
                path, node = [], source
            while next_arc[node] < len(arcs[node]):
                arc = arcs[node][next_arc[node]]
                if room[arc] > 0 and level[heads[arc]] == level[node] + 1:
                    break
                next_arc[node] += 1
            else:  # a dead end
                if node == source:
                    break
                node = heads[path.pop() ^ 1]
                next_arc[node] += 1
                continue
            path.append(arc)
            node = heads[arc]
