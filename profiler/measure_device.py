"""The figures of a Device file, measured: matmul, attention, pointwise and copy speed against size.

Each curve is a fraction of a peak, as `profiler/device.py` reads it, with the launch taken out:

    matmul      2 n^3 / (seconds * peak)                            squares of n
    attention   14 h s^2 d (s + 1) / 2s / (seconds * peak)          causal, forward and backward
    memory      bytes read and written / (seconds * bandwidth)      one pointwise operation

The bandwidth is that of the fastest large copy. The peak is the shipped device's, if the hardware
has a file of its own, else the fastest matmul.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F

from profiler.building import DTYPES
from profiler.device import Curve, Device, device_names, load_device
from profiler.hardware import (
    LoadWatch,
    context_bytes,
    device_name,
    hardware_name,
    pick_device,
    today,
    versions,
)
from profiler.measure import MEMINFO
from profiler.team import Team
from profiler.timing import Budget, Clock, repeat_until_settled

__all__ = ["DeviceOptions", "measure_device"]

CPU_SIZES = (32, 64, 128, 256, 512, 1024, 2048)
CUDA_SIZES = (128, 256, 512, 1024, 2048, 4096, 8192, 16384)
CPU_LENGTHS, CUDA_LENGTHS = (128, 256, 512, 1024, 2048), (512, 1024, 2048, 4096, 8192, 16384)
CPU_BYTES = tuple(2**k for k in range(14, 29, 2))
CUDA_BYTES = tuple(2**k for k in range(16, 33, 2))
LAUNCHES = 200
HEADS, HEAD_DIM = 8, 64


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceOptions:
    """name: of the device; by default the hardware's own. most_s: seconds for one point."""

    name: str | None = None
    device: str | None = None
    threads: int | None = None
    error: float = 0.02
    most_s: float = 2.0


@dataclass(slots=True)
class _Bench:
    device: torch.device
    clock: Clock
    budget: Budget
    team: Team
    advance: Callable[[str], None]
    launch_s: float = 0.0

    def seconds(self, run: Callable[[], object], *, flush: bool = True) -> float:
        """Of one call, cold, the launch included."""
        def once() -> dict[str, float]:
            if flush:
                self.clock.flush()
            begin = self.clock.mark()
            run()
            return {"work": self.clock.between(begin, self.clock.mark())}

        samples, _ = repeat_until_settled(once, ("work",), self.budget, self.team.agree)
        return self.team.mean([samples.median("work")])[0]

    def without_launch(self, seconds: float, kernels: int = 1) -> float:
        """What is left of a time; of the shortest ones, a tenth at least."""
        return max(seconds - kernels * self.launch_s, seconds / 10)


def measure_device(options: DeviceOptions, advance: Callable[[str], None] = lambda text: None
                   ) -> tuple[Device, tuple[str, ...]]:
    """(the device, what disturbed the measurement); every process of torchrun takes part."""
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    device, team = pick_device(options.device), Team.join()
    context = context_bytes(device)
    watch = LoadWatch(device, team.per_host)
    watch.begin()
    bench = _Bench(device, Clock(device), Budget(error=options.error, most_s=options.most_s), team,
                   advance)
    known = device_name(device)
    base = load_device(known if known in device_names() else "cpu")
    is_known = device.type == "cuda" and known in device_names()
    bench.launch_s = _launch(bench)
    bandwidth, memory = _memory(bench)
    main = "bfloat16" if device.type == "cuda" else "float32"
    speeds = _matmuls(bench, main)
    peaks = _peaks(bench, main, max(speeds.values()), base if is_known else None)
    peak = peaks[main]
    busy = watch.end()
    made = _measured_text(device, team, busy)
    sources = dict.fromkeys((
        "memory_bytes", "memory_bandwidth_bytes_per_s", "matmul_efficiency",
        "attention_efficiency", "memory_efficiency", "kernel_launch_s", "context_bytes"), made)
    sources["peak_flops_per_s"] = (base.sources["peak_flops_per_s"] if is_known else
                                   f"{made}; the fastest matmul")
    for field in ("communicator_bytes", "overlap_slowdown"):
        sources[field] = f"not measured here, as in {base.name}: {base.sources[field]}"
    return replace(
        base, name=options.name or known, description=hardware_name(device)[:200],
        memory_bytes=_memory_bytes(device, team), memory_bandwidth_bytes_per_s=bandwidth,
        peak_flops_per_s=peaks, matmul_efficiency=_curve(speeds, peak),
        attention_efficiency=_curve(_attention(bench, main), peak),
        memory_efficiency=_curve(memory, bandwidth), kernel_launch_s=bench.launch_s,
        context_bytes=context, sources=sources), busy


def _measured_text(device: torch.device, team: Team, busy: Sequence[str]) -> str:
    software = ", ".join(f"{name} {version}" for name, version in versions(device).items())
    load = f", {team.size} processes at once" if team.size > 1 else ""
    threads = "" if device.type == "cuda" else f", {torch.get_num_threads()} threads"
    disturbed = f"; disturbed: {'; '.join(busy)}" if busy else ""
    return f"measured: {hardware_name(device)}{threads}{load}, {software}, {today()}{disturbed}"


def _curve(speeds: dict[int, float], peak: float) -> Curve:
    """Fractions of the peak; a cache may be faster than the memory behind it, the curve is not."""
    return Curve(size=tuple(float(size) for size in speeds),
                 fraction=tuple(min(1.0, speed / peak) for speed in speeds.values()))


def _launch(bench: _Bench) -> float:
    """From one tiny operation to the next."""
    bench.advance("launch")
    x = torch.ones(8, device=bench.device)

    def many() -> None:
        for _ in range(LAUNCHES):
            x.add_(1.0)
    return bench.seconds(many, flush=False) / LAUNCHES


def _memory(bench: _Bench) -> tuple[float, dict[int, float]]:
    """(bytes per second of the fastest large copy, of a pointwise operation by bytes moved)."""
    speeds: dict[int, float] = {}
    copies = []
    for moved in CUDA_BYTES if bench.device.type == "cuda" else CPU_BYTES:
        bench.advance(f"pointwise, {moved:,} bytes")
        x = torch.ones(moved // 8, device=bench.device)
        seconds = bench.without_launch(bench.seconds(lambda x=x: x * 1.5))  # type: ignore[misc]
        speeds[moved] = moved / seconds
        if moved >= 2**24:
            y = torch.empty_like(x)
            copies.append(moved / bench.without_launch(
                bench.seconds(lambda x=x, y=y: y.copy_(x))))  # type: ignore[misc]
    return max(copies), speeds


def _matmuls(bench: _Bench, dtype: str) -> dict[int, float]:
    """FLOP per second of squares by their size."""
    speeds = {}
    for size in CUDA_SIZES if bench.device.type == "cuda" else CPU_SIZES:
        bench.advance(f"{dtype} matmul of {size}")
        speeds[size] = _matmul(bench, dtype, size)
    return speeds


def _matmul(bench: _Bench, dtype: str, size: int) -> float:
    a = torch.randn(size, size, device=bench.device).to(DTYPES.get(dtype, torch.float64))
    seconds = bench.without_launch(bench.seconds(lambda: a @ a))
    return 2.0 * size**3 / seconds


def _peaks(bench: _Bench, main: str, fastest: float, known: Device | None) -> dict[str, float]:
    """Of a known device its data sheet's; else the fastest matmul in each dtype."""
    if known is not None:
        return dict(known.peak_flops_per_s)
    peaks = {main: fastest}
    for dtype in ("float32", "bfloat16", "float64"):
        if dtype not in peaks:
            bench.advance(f"{dtype} peak")
            peaks[dtype] = _matmul(bench, dtype, 1024)
    return peaks


def _attention(bench: _Bench, dtype: str) -> dict[int, float]:
    """FLOP per second of causal attention, forward and backward, by length."""
    speeds = {}
    for length in CUDA_LENGTHS if bench.device.type == "cuda" else CPU_LENGTHS:
        bench.advance(f"attention over {length}")
        q = torch.randn(1, HEADS, length, HEAD_DIM, device=bench.device,
                        dtype=DTYPES[dtype]).requires_grad_()
        grad = torch.ones_like(q).detach()

        def run(q: torch.Tensor = q, grad: torch.Tensor = grad) -> None:
            F.scaled_dot_product_attention(q, q, q, is_causal=True).backward(grad)
            q.grad = None
        flops = 14 * HEADS * length**2 * HEAD_DIM * (length + 1) / (2 * length)
        speeds[length] = flops / bench.without_launch(bench.seconds(run), kernels=2)
    return speeds


def _memory_bytes(device: torch.device, team: Team) -> int:
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    for line in Path(MEMINFO).read_text(encoding="ascii").splitlines():
        if line.startswith("MemTotal:"):
            return int(line.split()[1]) * 1024 // team.per_host
    return load_device("cpu").memory_bytes
