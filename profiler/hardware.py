"""What is measured on, and what disturbs it: names, versions, and load by others."""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

import torch

from profiler.device import device_of_cuda

__all__ = ["LoadWatch", "context_bytes", "device_name", "hardware_name", "pick_device", "today",
           "versions"]

CPUINFO = Path("/proc/cpuinfo")
STAT = Path("/proc/stat")
BUSY_SHARE = 0.1
"""Share of the cores used by others from which a measurement is called disturbed."""
DRIFT = 1.1
"""A reference matmul that takes this many times as long as before: throttled or disturbed."""
THROTTLED = 0x4 | 0x8 | 0x20 | 0x40 | 0x80
"""NVML's clocks_event_reasons: power cap, hardware slow-down, and thermal ones."""


def pick_device(name: str | None) -> torch.device:
    """The device asked for, or CUDA where there is one."""
    kind = name or ("cuda" if torch.cuda.is_available() else "cpu")
    if kind == "cuda":
        local = int(os.environ.get("LOCAL_RANK", 0))
        torch.cuda.set_device(local)
        return torch.device("cuda", local)
    return torch.device("cpu")


def hardware_name(device: torch.device) -> str:
    """What the maker calls it, and how many cores there are of it."""
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    name = platform.processor() or platform.machine()
    if CPUINFO.exists():
        for line in CPUINFO.read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                name = line.partition(":")[2].strip()
                break
    return f"{name}, {os.cpu_count()} cores"


def device_name(device: torch.device) -> str:
    """The device file that a measurement belongs to."""
    if device.type != "cuda":
        return "cpu"
    name = str(torch.cuda.get_device_name(device))
    return device_of_cuda(name) or name.lower().replace(" ", "-")


def versions(device: torch.device) -> dict[str, str]:
    """Software that the seconds depend on."""
    found = {"python": platform.python_version(), "torch": str(torch.__version__)}
    try:
        import transformers

        found["transformers"] = transformers.__version__
    except ImportError:
        pass
    if device.type == "cuda":
        found["cuda"] = str(torch.version.cuda)
        found["driver"] = _nvidia_smi(device, "driver_version") or "unknown"
    return found


def today() -> str:
    """The date, as a document has it."""
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d")


def context_bytes(device: torch.device) -> int:
    """What the process holds before there is any model."""
    if device.type == "cuda":
        torch.ones(8, 8, device=device) @ torch.ones(8, 8, device=device)
        torch.cuda.synchronize(device)
        free, total = torch.cuda.mem_get_info(device)
        return int(total - free - torch.cuda.memory_reserved(device))
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


def _nvidia_smi(device: torch.device, fields: str) -> str | None:
    """One line of nvidia-smi's query of this device, or None where there is none."""
    try:
        identity = str(torch.cuda.get_device_properties(device).uuid)
        done = subprocess.run(
            ["nvidia-smi", f"--id=GPU-{identity.removeprefix('GPU-')}", f"--query-gpu={fields}",
             "--format=csv,noheader,nounits"], capture_output=True, text=True, timeout=20,
            check=True)
    except (OSError, subprocess.SubprocessError, AttributeError):
        return None
    return done.stdout.strip() or None


@dataclass(slots=True)
class LoadWatch:
    """Notices that a device is busy with others, or slower than at the beginning.

    num_processes: of ours that work on this host at once.
    """

    device: torch.device
    num_processes: int = 1
    _cpu: tuple[float, float, float] | None = None
    _reference_s: float | None = None
    notes: list[str] = field(default_factory=list)

    def begin(self) -> None:
        """The measurement starts."""
        self._cpu = _cpu_seconds()
        self._reference_s = self._reference()
        if self.device.type == "cuda":
            used = _nvidia_smi(self.device, "utilization.gpu,memory.used")
            free, total = torch.cuda.mem_get_info(self.device)
            if total - free > 2 * 2**30:
                self.notes.append(f"before the measurement {(total - free) / 2**30:.1f} GiB of the "
                                  f"device were in use (utilization and MiB: {used})")

    def end(self) -> tuple[str, ...]:
        """What was noticed since."""
        before, after = self._cpu, _cpu_seconds()
        if before and after:
            whole, busy, own = (b - a for a, b in zip(before, after, strict=True))
            others = (busy - own * self.num_processes) / whole if whole > 0 else 0.0
            if others > BUSY_SHARE:
                self.notes.append(f"other processes used {others:.0%} of the host's cores "
                                  "meanwhile")
        if self._reference_s:
            ratio = self._reference() / self._reference_s
            if not 1 / DRIFT < ratio < DRIFT:
                self.notes.append(f"a reference matmul takes {ratio:.2f} times as long at the end "
                                  "as at the beginning: the device was throttled or shared")
        if self.device.type == "cuda":
            text = _nvidia_smi(self.device, "clocks_event_reasons.active")
            reasons = int(text, 16) if text and text.startswith("0x") else 0
            if reasons & THROTTLED:
                self.notes.append(f"the clocks are held down (clocks_event_reasons {reasons:#x})")
        return tuple(self.notes)

    def _reference(self) -> float:
        """Seconds of the fastest of some equal matmuls."""
        from profiler.timing import Clock

        size = 4096 if self.device.type == "cuda" else 512
        a = torch.full((size, size), 0.5, device=self.device)
        clock, times = Clock(self.device), []
        for _ in range(12):
            begin = clock.mark()
            a @ a
            times.append(clock.between(begin, clock.mark()))
        return min(times)


def _cpu_seconds() -> tuple[float, float, float] | None:
    """(all, busy, this process's) CPU seconds so far; None where the system does not tell."""
    if not STAT.exists():
        return None
    words = STAT.read_text().splitlines()[0].split()[1:]
    ticks = [int(word) for word in words[:8]]
    per_s = os.sysconf("SC_CLK_TCK")
    idle = ticks[3] + ticks[4]
    own = sum(os.times()[:2])
    return sum(ticks) / per_s, (sum(ticks) - idle) / per_s, own
