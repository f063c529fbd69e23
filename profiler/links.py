"""The Links document: measured collectives of one machine or cluster, and what was fitted to them.

Each fit is of one collective over groups of one shape: `group_size` members on `num_hosts` hosts,
`groups_at_once` groups on each host running it at the same time. Its bytes are those of the whole
tensor: what a rank has after an all-gather or before a reduce-scatter, all-reduce or all-to-all.

    seconds(bytes) = latency_s + bytes * s_per_byte

Small messages of gloo take one of two times: the line is fitted to the low percentile of their
repeats. From 1 MiB on it is fitted to the median: two ranks that both send and receive get a turn
each in some repeats and both at once in others. A step is a sum of many collectives, slow ones and
quick ones, so what it is expected to take is made of the means. All three figures are kept of every
size. Between measured sizes the points are followed.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from statistics import median
from typing import Annotated, ClassVar, Literal

from profiler.documents import STRICT
from profiler.limits import Ge, Gt, Le, Len, MaxLen

__all__ = ["COLLECTIVES", "Collective", "LinkFit", "LinkPoint", "Links", "fit_line"]

Collective = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send"]
COLLECTIVES: tuple[Collective, ...] = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all",
                                       "send")

Name = Annotated[str, MaxLen(400)]
Seconds = Annotated[float, Gt(0), Le(1e6)]
Count = Annotated[int, Ge(1), Le(2**20)]


LARGE_BYTES = 2**20
"""From here on a message is long: its median counts, and the bandwidth is fitted to it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkPoint:
    """One size: the low percentile of its repeats, their median, and their mean without the slowest
    of every twenty (a machine that was away for a moment)."""

    __pydantic_config__: ClassVar = STRICT

    num_bytes: Annotated[int, Ge(1), Le(2**50)]
    low_s: Seconds
    median_s: Seconds
    num_repeats: Annotated[int, Ge(1)]
    mean_s: Seconds | None = None

    @property
    def seconds(self) -> float:
        """What the line is fitted to: see above."""
        return self.median_s if self.num_bytes >= LARGE_BYTES else self.low_s

    @property
    def expected_s(self) -> float:
        """Its part in the sum that a step is."""
        return self.seconds if self.mean_s is None else self.mean_s


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkFit:
    """One collective over groups of one shape.

    error: the largest relative error of the line at a measured size of 1 MiB or more.
    """

    __pydantic_config__: ClassVar = STRICT

    collective: Collective
    group_size: Annotated[int, Ge(2), Le(2**20)]
    num_hosts: Count = 1
    groups_at_once: Count = 1
    latency_s: Annotated[float, Ge(0), Le(1e6)]
    s_per_byte: Annotated[float, Ge(0), Le(1e3)]
    error: Annotated[float, Ge(0)]
    points: Annotated[tuple[LinkPoint, ...], Len(2, 200)]

    def __post_init__(self) -> None:
        if any(a.num_bytes >= b.num_bytes for a, b in pairwise(self.points)):
            raise ValueError("points: num_bytes must increase")

    @property
    def bytes_per_s(self) -> float:
        """What the line says of long messages."""
        return 1.0 / self.s_per_byte if self.s_per_byte > 0 else float("inf")

    def is_measured(self, num_bytes: float) -> bool:
        """Whether it lies between measured sizes."""
        return self.points[0].num_bytes <= num_bytes <= self.points[-1].num_bytes

    def seconds(self, num_bytes: float) -> float:
        """Between measured sizes linear in bytes; below as the smallest; above on by the line."""
        return self._follow(num_bytes, lambda point: point.seconds)

    def expected_seconds(self, num_bytes: float) -> float:
        """The same of the means: what one of many in a step takes."""
        return self._follow(num_bytes, lambda point: point.expected_s)

    def _follow(self, num_bytes: float, seconds_of: Callable[[LinkPoint], float]) -> float:
        first, last = self.points[0], self.points[-1]
        if num_bytes <= first.num_bytes:
            return seconds_of(first)
        if num_bytes >= last.num_bytes:
            return seconds_of(last) + (num_bytes - last.num_bytes) * self.s_per_byte
        right = bisect_right(self.points, num_bytes, key=lambda point: point.num_bytes)
        low, high = self.points[right - 1], self.points[right]
        weight = (num_bytes - low.num_bytes) / (high.num_bytes - low.num_bytes)
        return seconds_of(low) * (1 - weight) + seconds_of(high) * weight


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """What was measured between the processes of one run.

    overlap_slowdown: factor on compute time while a collective runs beside it.
    communicator_bytes: what one more process group takes on each rank.
    """

    __pydantic_config__: ClassVar = STRICT

    meshwright: Literal["Links"] = "Links"
    version: Literal[1] = 1
    hardware: Name
    backend: Literal["nccl", "gloo"]
    versions: dict[Name, Name]
    date: Name
    num_hosts: Count = 1
    processes_per_host: Count
    fits: Annotated[tuple[LinkFit, ...], MaxLen(10_000)]
    overlap_slowdown: Annotated[float, Ge(1), Le(10)] | None = None
    communicator_bytes: Annotated[int, Ge(0), Le(2**40)] | None = None
    busy: Annotated[tuple[Annotated[str, Len(1, 1000)], ...], MaxLen(100)] = ()


def fit_line(points: Sequence[LinkPoint]) -> tuple[float, float, float]:
    """(latency_s, s_per_byte, error) of a robust line.

    Bandwidth: the median of the slopes between any two long messages (Theil, 1950; Sen, 1968), or
    between any two at all if fewer than two are long. Latency: the median of what the line leaves
    of short ones. Neither is let below zero.
    """
    long = [point for point in points if point.num_bytes >= LARGE_BYTES]
    slopes = [(b.seconds - a.seconds) / (b.num_bytes - a.num_bytes)
              for a, b in combinations(long if len(long) > 1 else points, 2)]
    slope = max(0.0, median(slopes))
    short = [point for point in points if point.num_bytes < LARGE_BYTES] or points
    latency = max(0.0, median(point.seconds - slope * point.num_bytes for point in short))
    error = max(abs((latency + slope * point.num_bytes) / point.seconds - 1)
                for point in long or points)
    return latency, slope, error
