"""What a step measured: as a line, as JSON lines, for TensorBoard."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from profiler.errors import InvalidInput

__all__ = ["Metrics", "Recorder", "peak_memory_bytes", "reset_peak_memory"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Metrics:
    """One step. step_s and tokens_per_s are of the whole job; memory is this rank's peak.

    mfu: of the peak of the devices that the layout was planned for; None where it says none.
    """

    step: int
    loss: float
    grad_norm: float
    learning_rate: float
    step_s: float
    tokens_per_s: float
    tflops_per_s_per_device: float
    mfu: float | None
    peak_memory_bytes: int | None

    def line(self) -> str:
        parts = [f"step {self.step:>6}", f"loss {self.loss:.4f}", f"norm {self.grad_norm:.3f}",
                 f"lr {self.learning_rate:.2e}", f"{self.step_s * 1e3:.1f} ms",
                 f"{self.tokens_per_s:,.0f} tokens/s",
                 f"{self.tflops_per_s_per_device:.3g} TFLOP/s/device" if self.mfu is None
                 else f"MFU {self.mfu:.1%}"]
        if self.peak_memory_bytes is not None:
            parts.append(f"{self.peak_memory_bytes / 2**30:.2f} GiB")
        return "  ".join(parts)


class Recorder:
    """Writes metrics: to standard output, and where asked to a file and for TensorBoard.

    Raises:
        InvalidInput: the file or folder cannot be written, or tensorboard is not installed.
    """

    def __init__(self, file: str | None, tensorboard: str | None) -> None:
        self._file: Any = None
        self._board: Any = None
        try:
            if file is not None:
                self._file = Path(file).open("a", encoding="utf-8")  # noqa: SIM115  (see close)
            if tensorboard is not None:
                self._board = _board(tensorboard)
        except OSError as error:
            raise InvalidInput(f"{error.filename or file or tensorboard}: cannot be written: "
                               f"{error.strerror or error}") from None

    def write(self, metrics: Metrics) -> None:
        print(metrics.line(), flush=True)
        if self._file is not None:
            self._file.write(json.dumps(asdict(metrics)) + "\n")
            self._file.flush()
        if self._board is not None:
            for key, value in asdict(metrics).items():
                if value is not None and key != "step":
                    self._board.add_scalar(key, value, metrics.step)

    def close(self) -> None:
        for place in (self._file, self._board):
            if place is not None:
                place.close()


def _board(folder: str) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise InvalidInput("--tensorboard needs the package tensorboard, which is not installed") \
            from None
    return SummaryWriter(folder)


def reset_peak_memory(device: torch.device) -> None:
    """What was needed so far does not count."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    except OSError:
        return  # the peak of the whole process is what is left to report


def peak_memory_bytes(device: torch.device) -> int | None:
    """Most memory held since the reset; None where the system does not say.

    CUDA: what the allocator reserved and the CUDA context beside it. CPU: the resident set of the
    process, Python and its libraries included.
    """
    if device.type == "cuda":
        return int(torch.cuda.max_memory_reserved(device)) + _outside_allocator_bytes(device)
    try:
        status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    for line in status.splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return None


def _outside_allocator_bytes(device: torch.device) -> int:
    """Used on the device beside this process's allocator: its context, communicators, libraries.

    Other processes on the same device count too: there should be none.
    """
    free, total = torch.cuda.mem_get_info(device)
    return max(0, int(total - free - torch.cuda.memory_reserved(device)))
