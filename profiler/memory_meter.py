"""Bytes that a piece of work allocates: CUDA's allocator counts, torch's profiler for CPU."""

from __future__ import annotations

import os
from typing import Any

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # it announces every start and stop

import torch

__all__ = ["MemoryMeter"]


class MemoryMeter:
    """Within it, allocations are counted.

    left_bytes: allocated within and not freed when it ends (freed and not allocated: negative).
    peak_bytes: the most at any time, above what there was at its beginning.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.left_bytes = 0
        self.peak_bytes = 0
        self._before = 0
        self._profiler: Any = None

    def __enter__(self) -> MemoryMeter:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
            self._before = torch.cuda.memory_allocated(self.device)
        else:
            self._profiler = torch.profiler.profile(
                activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True,
                acc_events=True)
            self._profiler.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            self.left_bytes = torch.cuda.memory_allocated(self.device) - self._before
            self.peak_bytes = torch.cuda.max_memory_allocated(self.device) - self._before
            return
        self._profiler.__exit__(*error)
        events = [event for event in self._profiler.profiler.kineto_results.events()
                  if event.name() == "[memory]"]
        events.sort(key=lambda event: event.start_ns())
        for event in events:
            self.left_bytes += event.nbytes()
            self.peak_bytes = max(self.peak_bytes, self.left_bytes)
