"""The best choices of one rank whose layers are given: an exact knapsack.

    minimise  sum of seconds          one option for each layer
    so that   static + sum_c n_c * activations of chunk c + working set <= room     at each moment n
              static + temporaries of the optimizer <= room of its step             where asked for

A dynamic program over layers keeps the undominated (seconds, bytes) and drops what cannot beat the
best known: the fractional knapsack of the layers still to come bounds every state from below, and a
rounded fractional answer is the first best known. The working set is a maximum, not a sum, so each
size that it can have is tried with the options that keep within it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from math import inf

import numpy as np
from numpy.typing import NDArray

__all__ = ["Group", "Picks", "best_choices", "convex_hull", "price"]

Floats = NDArray[np.float64]
Picks = list[list[int]]
"""For each group, the number of layers with each of its options."""


@dataclass(frozen=True, slots=True)
class Group:
    """`count` equal layers in one chunk; options are (seconds, static, activation, working,
    temporary bytes)."""

    count: int
    chunk: int
    options: tuple[tuple[float, int, int, int, int], ...]


@dataclass(slots=True)
class _Item:
    """A group with the options that a working set allows: seconds (K,), bytes (K, moments), the
    last of them the optimizer step where that is looked at."""

    count: int
    seconds: Floats
    bytes: Floats
    indices: list[int]
    hulls: dict[int, tuple[tuple[float, float], list[tuple[float, float]]]] = field(
        default_factory=dict)

    def hull(self, moment: int) -> tuple[tuple[float, float], list[tuple[float, float]]]:
        """(seconds and bytes of the fastest option, price and bytes of each saving after it)."""
        if moment not in self.hulls:
            hull = convex_hull(list(zip(self.seconds.tolist(), self.bytes[:, moment].tolist(),
                                        strict=True)))
            self.hulls[moment] = hull[0], [(price(a, b), a[1] - b[1]) for a, b in pairwise(hull)]
        return self.hulls[moment]


def convex_hull(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """The lower convex hull of (seconds, bytes), from the fastest to the smallest."""
    hull: list[tuple[float, float]] = []
    for seconds, size in sorted(points):
        if hull and size >= hull[-1][1]:
            continue
        if hull and seconds == hull[-1][0]:
            hull.pop()
        while len(hull) > 1 and price(hull[-2], hull[-1]) >= price(hull[-1], (seconds, size)):
            hull.pop()
        hull.append((seconds, size))
    return hull


def price(a: tuple[float, float], b: tuple[float, float]) -> float:
    """Seconds per byte saved when going from a to b."""
    return (b[0] - a[0]) / (a[1] - b[1])


def best_choices(groups: list[Group], moments: list[tuple[int, ...]], room_bytes: list[float],
                 step_room_bytes: float | None = None) -> tuple[float, Picks] | None:
    """(least seconds, layers per option) or None if nothing fits.

    Args:
        moments: micro-batches in flight per chunk, at each moment that is looked at.
        room_bytes: at each of these moments.
        step_room_bytes: in the optimizer step, if that is looked at.
    """
    sizes = sorted({option[3] for group in groups for option in group.options})
    best: tuple[float, Picks] | None = None
    for working in sizes:
        items = [_item(group, moments, working, step_room_bytes is not None) for group in groups]
        if any(not item.indices for item in items):
            continue
        limit = best[0] if best else inf
        if sum(item.count * float(item.seconds.min()) for item in items) >= limit:
            continue
        room = np.array([r - working for r in room_bytes]
                        + ([] if step_room_bytes is None else [step_room_bytes]))
        found = _solve(items, room, limit)
        if found is not None:
            picks = [[0] * len(group.options) for group in groups]
            for item, counts, row in zip(items, found[1], picks, strict=True):
                for index, count in zip(item.indices, counts, strict=True):
                    row[index] = count
            best = found[0], picks
    return best


def _item(group: Group, moments: list[tuple[int, ...]], working: int, with_step: bool) -> _Item:
    indices = [i for i, option in enumerate(group.options) if option[3] <= working]
    weights = [moment[group.chunk] for moment in moments]
    rows = []
    for i in indices:
        _, static, activation, _, temporary = group.options[i]
        rows.append([*(static + w * activation for w in weights),
                     *([static + temporary] if with_step else [])])
    return _Item(
        count=group.count, indices=indices,
        seconds=np.array([group.options[i][0] for i in indices]),
        bytes=np.array(rows, dtype=float).reshape(len(indices), len(moments) + with_step))


class _Rest:
    """The fractional knapsack of what is still to come, at one moment."""

    def __init__(self, items: list[tuple[int, _Item]], moment: int) -> None:
        self.seconds = self.bytes = 0.0
        steps: list[tuple[float, float]] = []
        for count, item in items:
            first, prices = item.hull(moment)
            self.seconds += count * first[0]
            self.bytes += count * first[1]
            steps += [(p, count * saved) for p, saved in prices]
        steps.sort()
        self.saved = np.cumsum([0.0, *(s for _, s in steps)])
        self.paid = np.cumsum([0.0, *(p * s for p, s in steps)])

    def bound(self, room: Floats) -> Floats:
        """Least seconds of the rest for each amount of room."""
        over = np.maximum(self.bytes - room, 0.0)
        # Whole bytes in doubles: what is saved at most may differ from what is over by rounding.
        extra = np.where(over > self.saved[-1] * (1 + 1e-12) + 1e-3, inf,
                         np.interp(over, self.saved, self.paid))
        return self.seconds + extra


def _solve(items: list[_Item], room: Floats, limit_s: float
           ) -> tuple[float, list[list[int]]] | None:
    best_s, best = limit_s, None
    rounded = _rounded(items, room)
    if rounded is not None and rounded[0] < best_s:
        best_s, best = rounded
    seconds, used = np.zeros(1), np.zeros((1, len(room)))
    trail: list[tuple[NDArray[np.int64], NDArray[np.int64]]] = []
    for position, item in enumerate(items):
        for done in range(1, item.count + 1):
            rest = [(item.count - done, item), *((i.count, i) for i in items[position + 1:])]
            number = len(item.indices)
            parent = np.repeat(np.arange(len(seconds)), number)
            option = np.tile(np.arange(number), len(seconds))
            seconds = seconds[parent] + item.seconds[option]
            used = used[parent] + item.bytes[option]
            bound = seconds + np.max([_Rest(rest, moment).bound(room[moment] - used[:, moment])
                                      for moment in range(len(room))], axis=0)
            keep = _undominated(seconds, used, bound < best_s)
            if not len(keep):
                return None if best is None else (best_s, best)
            seconds, used = seconds[keep], used[keep]
            trail.append((parent[keep], option[keep]))
    winner = int(np.argmin(seconds))
    return float(seconds[winner]), _retrace(items, trail, winner)


def _undominated(seconds: Floats, used: Floats, alive: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Indices of the states that no other equals or beats, fastest first."""
    index = np.flatnonzero(alive)
    keys = [used[index, m] for m in range(used.shape[1] - 1, -1, -1)]
    index = index[np.lexsort([*keys, seconds[index]])]
    if used.shape[1] == 1:
        sizes = used[index, 0]
        smallest = np.minimum.accumulate(np.concatenate([[inf], sizes[:-1]]))
        smaller: NDArray[np.int64] = index[sizes < smallest]
        return smaller
    kept: list[int] = []
    for i in index:
        if not any((used[j] <= used[i]).all() for j in kept):
            kept.append(int(i))
    return np.array(kept, dtype=np.int64)


def _retrace(items: list[_Item], trail: list[tuple[NDArray[np.int64], NDArray[np.int64]]],
             state: int) -> list[list[int]]:
    chosen: list[int] = []
    for parent, option in reversed(trail):
        chosen.append(int(option[state]))
        state = int(parent[state])
    chosen.reverse()
    counts, start = [], 0
    for item in items:
        here = chosen[start:start + item.count]
        counts.append([here.count(o) for o in range(len(item.indices))])
        start += item.count
    return counts


def _rounded(items: list[_Item], room: Floats) -> tuple[float, list[list[int]]] | None:
    """The fractional answer with its last step rounded up to whole layers."""
    counts = [[0] * len(item.indices) for item in items]
    for item, row in zip(items, counts, strict=True):
        row[int(np.argmin(item.seconds))] = item.count
    for _ in range(sum(len(row) for row in counts) * 4):
        used = sum((np.array(row) @ item.bytes for item, row in zip(items, counts, strict=True)),
                   np.zeros(len(room)))
        moment = int(np.argmax(used - room))
        over = used[moment] - room[moment]
        if over <= 0:
            total = sum(float(np.array(row) @ item.seconds)
                        for item, row in zip(items, counts, strict=True))
            return total, counts
        move = _cheapest_move(items, counts, moment)
        if move is None:
            return None
        g, source, target = move
        saved = items[g].bytes[source, moment] - items[g].bytes[target, moment]
        layers = min(counts[g][source], int(-(-over // saved)))
        counts[g][source] -= layers
        counts[g][target] += layers
    return None


def _cheapest_move(items: list[_Item], counts: list[list[int]], moment: int
                   ) -> tuple[int, int, int] | None:
    best: tuple[float, tuple[int, int, int]] | None = None
    for g, item in enumerate(items):
        for source, count in enumerate(counts[g]):
            for target in range(len(item.indices)) if count else ():
                saved = item.bytes[source, moment] - item.bytes[target, moment]
                if saved > 0:
                    cost = (item.seconds[target] - item.seconds[source]) / saved
                    if best is None or cost < best[0]:
                        best = cost, (g, source, target)
    return best and best[1]
