"""Processes that measure at once: they stay in step, and their results are averaged.

Started by torchrun, every process of the host measures the same case at the same time, so that
the load is that of a training run; alone, a process is its own team.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from profiler.timing import Samples

__all__ = ["ALONE", "PeerFailed", "Team"]

TIMEOUT_S = 600.0
SPINS, SPIN_S = 3, 0.2
"""Of 50 turns each."""
SHARED = 1.1
"""Wall over own seconds, above which cores are shared."""


class PeerFailed(RuntimeError):
    """Another process could not measure this case."""


class Team:
    """The processes that torchrun started, or this one alone."""

    def __init__(self, size: int, rank: int) -> None:
        self.size, self.rank = size, rank

    @classmethod
    def join(cls) -> Team:
        """Meet the others, over gloo whatever the device."""
        if "RANK" not in os.environ or int(os.environ.get("WORLD_SIZE", 1)) == 1:
            return cls(1, 0)
        if not dist.is_initialized():
            dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT_S))
        return cls(dist.get_world_size(), dist.get_rank())

    @property
    def per_host(self) -> int:
        """Processes on this host."""
        return int(os.environ.get("LOCAL_WORLD_SIZE", 1)) if self.size > 1 else 1

    def _sums(self, values: Sequence[float]) -> list[float]:
        if self.size == 1:
            return list(values)
        tensor = torch.tensor(list(values), dtype=torch.float64)
        dist.all_reduce(tensor)
        return [float(value) for value in tensor]

    def agree(self, stop: bool) -> bool:
        """Whether all want to stop.

        Raises:
            PeerFailed: another called `fail`.
        """
        stopping, failed = self._sums((float(stop), 0.0))
        if failed:
            raise PeerFailed("another process ran out of memory")
        return stopping == self.size

    def align(self) -> None:
        """Wait for the others; raises as `agree`."""
        self.agree(False)

    def fail(self) -> None:
        """Tell the others, who are about to ask `agree`, that this process failed."""
        self._sums((0.0, 1.0))

    def all_true(self, mine: bool) -> bool:
        """Whether it holds on every process."""
        return self._sums((float(mine),))[0] == self.size

    def mean(self, values: Sequence[float]) -> list[float]:
        """Averages over the processes."""
        return [value / self.size for value in self._sums(values)]

    def together(self, samples: Samples) -> tuple[Samples, Samples]:
        """Of each repeat, (the mean over the processes, the one that took longest)."""
        if self.size == 1:
            return samples, samples
        names = sorted(samples.parts)
        total = torch.tensor([samples.parts[name] for name in names], dtype=torch.float64)
        most = total.clone()
        dist.all_reduce(total)
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
        mean, slowest = (Samples(dict(zip(names, values.tolist(), strict=True)))
                         for values in (total / self.size, most))
        return mean, slowest

    def timer(self, device: torch.device) -> Callable[[], float]:
        """What seconds are counted by.

        Processes that share cores take turns on them, and a part shorter than a turn (4 ms of
        250 Hz) is over within it, or is not: by the wall it seems too fast. Counted are then this
        process's own seconds, times how many pass by the wall for each while all are busy.
        """
        if device.type != "cpu" or self.size == 1 or torch.get_num_threads() > 1:
            return time.perf_counter
        stretch = self.mean([statistics.median(self._stretch() for _ in range(SPINS))])[0]
        if stretch < SHARED:
            return time.perf_counter
        return lambda: time.process_time() * stretch

    def _stretch(self) -> float:
        a = torch.ones(64, 64)
        self.align()
        wall, own = time.perf_counter(), time.process_time()
        while time.perf_counter() - wall < SPIN_S:
            a @ a
        return (time.perf_counter() - wall) / (time.process_time() - own)

    def leave(self) -> None:
        """End the meeting."""
        if self.size > 1 and dist.is_initialized():
            dist.destroy_process_group()


ALONE = Team(1, 0)
