"""A process's share of a core, kept busy while the process waits.

Processes that share cores stand for devices here, and a device is not faster because its neighbours
wait. A process's companion computes in what the process leaves of its share: it has the idle
policy (SCHED_IDLE), so that the process itself is served first, and it is in the process's control
group or session, whose share it uses up, so that others get no more. Hyperthreads of one core then
do not speed each other up by idling, either.

It naps for a moment every now and then. The kernel looks whose turn it is when somebody stops, else
only at its ticks: without naps a message to a process of the same core waits for the next tick
(4 ms at 250 Hz; 1 ms with naps, and an all-reduce of four processes on two cores takes 6 ms in the
place of 40). Who computes does not nap: where it may (as root), a companion has a `Ticker` beside
it that wakes every TICK_S with the real-time policy, to no other end. Shares of a core then hold
within milliseconds: without, one who computes beside a companion that naps has 64 % in place of 50.

    with Companion():                  # of this process, on the cores that it may use
        ...

Shares without control groups are those of the kernel's "autogroups", one for each session.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

__all__ = ["Companion", "Ticker", "pin"]

SIZE = 64
"""Of the matmuls: three matrices of 16 KiB stay in a core's own caches."""
BUSY_S, NAP_S = 6e-4, 2e-5
"""Between naps, and of one: with little less the timer is over before the kernel has looked. What a
process leaves is used up to 96 %."""
TICK_S = 1e-3


def pin(local_rank: int) -> None:
    """Keep this process, and what it starts, on one core (on Linux): consecutive ranks are dealt to
    the cores in turn."""
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[local_rank % len(cores)]})


class Ticker:
    """A process that only wakes, every TICK_S, so that who shares its core takes turns; it ends
    with its owner. Only on Linux, and where it may have the real-time policy.

    within: a command prefix that puts it where it belongs, if not where its owner is.
    """

    kinds: tuple[str, ...] = ("tick",)

    def __init__(self, within: Sequence[str] = ()) -> None:
        self._within = within
        self._processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Self:
        if hasattr(os, "SCHED_IDLE"):
            self._processes = [subprocess.Popen(
                [*self._within, sys.executable, __file__, kind, str(os.getpid())],
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                env=dict(os.environ) | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"})
                for kind in self.kinds]
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait()
        self._processes = []


class Companion(Ticker):
    """A process that computes while its owner waits, with a ticker; it ends with its owner. Only on
    Linux: where there is no idle policy it is not started."""

    kinds = ("compute", "tick")

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Let others have what this process leaves, for the length of a block."""
        self._signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self._signal(signal.SIGCONT)

    def _signal(self, number: int) -> None:
        for process in self._processes:
            process.send_signal(number)


def _compute(owner: int) -> None:
    """Until the owner is gone."""
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    with contextlib.suppress(OSError):  # else naps are 50 us longer
        Path("/proc/self/timerslack_ns").write_text("1", encoding="ascii")
    import numpy as np

    a, b = (np.ones((SIZE, SIZE), dtype=np.float32) for _ in range(2))
    product = np.empty_like(a)
    while os.getppid() == owner:
        until = time.thread_time() + BUSY_S
        while time.thread_time() < until:
            np.matmul(a, b, out=product)
        time.sleep(NAP_S)


def _tick(owner: int) -> None:
    """Until the owner is gone; at once where it may not."""
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
        while os.getppid() == owner:
            time.sleep(TICK_S)


if __name__ == "__main__":
    {"compute": _compute, "tick": _tick}[sys.argv[1]](int(sys.argv[2]))
