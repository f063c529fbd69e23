"""How long each of this rank's stages computes, forward and backward, micro-batch by micro-batch.

On a CUDA device events are recorded and read after the step, so that nothing waits for them.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Literal

import torch

__all__ = ["Clock"]

Pass = Literal["forward", "backward"]


@dataclass(slots=True)
class Clock:
    """Spans of every stage of this rank, in seconds, by (stage, pass)."""

    device: torch.device
    spans_s: dict[tuple[int, Pass], list[float]] = field(default_factory=dict)
    _pending: list[tuple[tuple[int, Pass], Any, Any]] = field(default_factory=list)

    @contextmanager
    def span(self, stage: int, which: Pass) -> Iterator[None]:
        begin = self._now()
        yield
        self._pending.append(((stage, which), begin, self._now()))

    def watch(self, stage: int, which: Pass, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, timed."""
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            with self.span(stage, which):
                return function(*args, **kwargs)
        return call

    def _now(self) -> Any:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def settle(self) -> None:
        """A step is over, and the device has done all of it."""
        for key, begin, end in self._pending:
            spent = (end - begin if isinstance(begin, float) else begin.elapsed_time(end) / 1e3)
            self.spans_s.setdefault(key, []).append(spent)
        self._pending.clear()

    def forget(self) -> None:
        """Leave out what was measured so far."""
        self.spans_s.clear()

    def micro_batch_s(self) -> float | None:
        """Seconds of a median micro-batch through all stages of this rank; None if unmeasured."""
        return sum(median(spans) for spans in self.spans_s.values()) if self.spans_s else None
