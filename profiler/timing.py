"""Timing on any device: clocks, cold caches, and repeats until the median is known.

On CUDA, events are recorded around the work and read when all repeats are queued; on CPU,
`perf_counter`. Before each timed part a buffer larger than the last-level cache is written, since
between two uses of a layer a step touches the whole rest of the model.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import sqrt
from pathlib import Path
from statistics import median
from typing import Any

import torch

__all__ = ["Budget", "Clock", "Samples", "median_error", "repeat_until_settled", "spread"]

CACHE = Path("/sys/devices/system/cpu/cpu0/cache")
USUAL_CACHE_BYTES = 64 * 2**20
MOST_CACHE_BYTES = 512 * 2**20


@dataclass(slots=True)
class Clock:
    """Marks moments on a device, and empties its caches.

    timer: of the CPU; `time.process_time` leaves out what other processes take, and any waiting.
    align: waits for the processes that measure at once. Those of one host share its cores' units
        and caches: on CPUs each timed part begins at once on all, so that it meets the load of a
        training step, not the others' preparations.
    """

    device: torch.device
    timer: Callable[[], float] = time.perf_counter
    align: Callable[[], object] = lambda: None
    _buffer: torch.Tensor | None = None

    def mark(self) -> Any:
        """A moment, when all work before it is done."""
        if self.device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            return event
        return self.timer()

    @property
    def is_aligned(self) -> bool:
        """Whether timed parts begin together: on an accelerator the host runs ahead of the work."""
        return bool(self.device.type == "cpu")

    def start(self) -> Any:
        """The moment when a timed part begins."""
        if self.is_aligned:
            self.align()
        return self.mark()

    def between(self, begin: Any, end: Any) -> float:
        """Seconds from one moment to another."""
        if self.device.type == "cuda":
            end.synchronize()
            return float(begin.elapsed_time(end)) / 1e3
        return float(end - begin)

    def synchronize(self) -> None:
        """Wait until the device is idle."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def flush(self) -> None:
        """Push everything out of the caches."""
        if self._buffer is None:
            self._buffer = torch.empty(_cache_bytes(self.device), dtype=torch.int8,
                                       device=self.device)
        self._buffer.zero_()


def _cache_bytes(device: torch.device) -> int:
    """Twice the last-level cache."""
    if device.type == "cuda":
        size = getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0)
        return 2 * int(size or USUAL_CACHE_BYTES)
    sizes = []
    for path in CACHE.glob("index*/size"):
        text = path.read_text().strip()
        if text[:-1].isdigit() and text[-1] in "KM":
            sizes.append(int(text[:-1]) * (2**10 if text[-1] == "K" else 2**20))
    return min(2 * max(sizes, default=USUAL_CACHE_BYTES // 2), MOST_CACHE_BYTES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """When to stop repeating.

    error: wanted standard error of the median, as a share of it. most_s: seconds for one case.
    warm_up: repeats that are not counted.
    """

    warm_up: int = 2
    least: int = 5
    most: int = 60
    error: float = 0.01
    most_s: float = 20.0


@dataclass(slots=True)
class Samples:
    """Repeats of one case: seconds by part, in order."""

    parts: dict[str, list[float]] = field(default_factory=dict)

    def add(self, **seconds: float) -> None:
        for name, value in seconds.items():
            self.parts.setdefault(name, []).append(value)

    def median(self, name: str) -> float:
        return float(median(self.parts[name]))

    def difference(self, name: str, other: str) -> float:
        """Median of what `name` took longer than `other`, pair by pair; not below zero."""
        pairs = zip(self.parts[name], self.parts[other], strict=True)
        return max(0.0, median(a - b for a, b in pairs))

    def total(self, names: Sequence[str]) -> list[float]:
        """The sum of some parts, for each repeat."""
        return [sum(values) for values in zip(*(self.parts[n] for n in names), strict=True)]


def spread(values: Sequence[float]) -> float:
    """Interquartile range over the median."""
    ordered = sorted(values)
    middle = median(ordered)
    if len(ordered) < 4 or middle <= 0:
        return 0.0
    return (ordered[3 * len(ordered) // 4] - ordered[len(ordered) // 4]) / middle


def median_error(values: Sequence[float]) -> float:
    """Standard error of the median as a share of it: 0.93 IQR / sqrt(n), of a normal sample."""
    return 0.93 * spread(values) / sqrt(len(values))


def repeat_until_settled(once: Callable[[], dict[str, float]], judged: Sequence[str],
                         budget: Budget, agree: Callable[[bool], bool] = bool
                         ) -> tuple[Samples, bool]:
    """Repeat a measurement until the median of its judged parts is known well enough.

    agree: whether all processes that measure at once want to stop; they stay in step.
    """
    samples = Samples()
    for _ in range(budget.warm_up):
        once()
    begin = time.perf_counter()
    while True:
        samples.add(**once())
        totals = samples.total(judged)
        settled = len(totals) >= budget.least and median_error(totals) <= budget.error
        spent = len(totals) >= budget.most or time.perf_counter() - begin > budget.most_s
        if agree(settled or spent):
            return samples, settled
