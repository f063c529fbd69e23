"""A companion uses what is left, lets others have their turn, and ends."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from benchmarks.companion import Companion

pytestmark = pytest.mark.skipif(not hasattr(os, "SCHED_IDLE"), reason="there is no idle policy")


NAPS = 50
"""More than it stops for while it starts."""


def _child_of_this() -> Path:
    listed = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    (found,) = (Path(f"/proc/{pid}") for pid in listed
                if b"compute" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0"))
    return found


def _naps(process: Path) -> int:
    (line,) = (text for text in (process / "status").read_text().splitlines()
               if text.startswith("voluntary_ctxt_switches:"))
    return int(line.split()[1])


def test_companion() -> None:
    with Companion() as companion:
        process = _child_of_this()
        end = time.monotonic() + 120  # it has only what others leave
        while _naps(process) < NAPS and time.monotonic() < end:
            time.sleep(0.02)
        assert _naps(process) >= NAPS, "it has stopped for nobody"
        assert os.sched_getscheduler(int(process.name)) == os.SCHED_IDLE
        with companion.paused():
            time.sleep(0.05)
            before = _naps(process)
            time.sleep(0.05)
            assert _naps(process) == before
    assert not process.exists()
