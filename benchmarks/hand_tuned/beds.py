"""Where a scenario runs.

A `TestBed` where this machine can be one; else plain processes of this machine, whose links and
shares of a core are whatever they are.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.hand_tuned.scenarios import Processes, Scenario
from benchmarks.testbed import Host, Result, TestBed
from profiler.errors import MeshwrightError

__all__ = ["ROOT", "Bed", "JobFailed", "PlainBed", "bed_of", "checked", "without_limits"]

ROOT = Path(__file__).parents[2]


class JobFailed(MeshwrightError):
    """A job of the contest ended badly; the message has the end of what it said."""


@dataclass(slots=True)
class PlainBed:
    """Processes of this machine without limits, with the methods of a `TestBed`."""

    num_processes: int
    _process: subprocess.Popen[str] | None = None

    def torchrun(self, arguments: Sequence[str], *, timeout_s: float) -> Result:
        """Run one torchrun job and wait for it."""
        values = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone",
                   "--nproc-per-node", str(self.num_processes), "--no-python", sys.executable,
                   *arguments]
        begin, timed_out = time.monotonic(), False
        self._process = subprocess.Popen(command, env=values, cwd=ROOT, text=True,
                                         stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        try:
            output, _ = self._process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            timed_out = True
            self.stop()
            output, _ = self._process.communicate()
        return Result(returncodes=(self._process.returncode,), outputs=(output,),
                      timed_out=timed_out, wall_s=time.monotonic() - begin)

    def stop(self) -> None:
        """End the job if it still runs: torchrun ends its processes."""
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()


Bed = TestBed | PlainBed


def without_limits(scenario: Scenario) -> Scenario:
    """The same with all its processes on one host of their own."""
    share = min(1.0, (os.cpu_count() or 1) / scenario.num_processes)
    return replace(scenario, hosts=(Processes(count=scenario.num_processes, core_share=share),))


@contextlib.contextmanager
def bed_of(scenario: Scenario, limited: bool) -> Iterator[Bed]:
    """The bed of a scenario, gone afterwards."""
    if not limited:
        yield PlainBed(scenario.num_processes)
        return
    os.environ["PYTHONPATH"] = str(ROOT)
    hosts = tuple(Host(num_processes=host.count, core_share=host.core_share)
                  for host in scenario.hosts)
    with TestBed(hosts=hosts, link_bits_per_s=scenario.link_gbit_per_s * 1e9) as bed:
        yield bed


def checked(result: Result, what: str) -> JobFailed:
    """What to raise for a job that ended badly, or before its end."""
    why = "was not done in time" if result.timed_out else f"ended with {result.returncodes}"
    lines = [line.strip() for output in result.outputs for line in output.splitlines()
             if "Error" in line or "error:" in line]
    hung = [line.strip() for output in result.outputs if "Timeout (" in output
            for line in output.splitlines() if f'File "{ROOT}/executor/' in line]
    if hung:
        why, lines = f"hung ({why})", hung
    tail = " | ".join(lines[-3:] or result.outputs[0].splitlines()[-3:])
    return JobFailed(f"{what} {why}: {tail[:800]}")
