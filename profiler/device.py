"""Device kinds: what one accelerator (or CPU socket) can do, with the source of every figure.

The shipped files lie in `profiler/devices/*.json`. A file says for each figure (`sources`) whether
it was measured, cited, interpolated from what is cited, or assumed.
"""

from __future__ import annotations

import functools
from bisect import bisect_right
from dataclasses import dataclass
from math import log
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from profiler.documents import STRICT, load_shipped
from profiler.errors import UnknownName
from profiler.limits import Ge, Gt, Le, Len, MaxLen

__all__ = ["Curve", "Device", "device_names", "device_of_cuda", "load_device"]

DEVICES = Path(__file__).parent / "devices"
Positive = Annotated[float, Gt(0), Le(1e24)]
Name = Annotated[str, MaxLen(200)]

# A part of the name that CUDA reports, and the device file; the first that occurs is taken.
CUDA_NAMES = (
    ("A100-SXM4-40GB", "a100-40g"), ("A100-SXM4-80GB", "a100-80g"), ("A100-SXM-80GB", "a100-80g"),
    ("H100 PCIe", "h100-pcie-80g"), ("H100 80GB HBM3", "h100-sxm-80g"), ("H200", "h200"),
    ("GB200", "gb200"), ("B200", "b200"), ("V100-SXM2-16GB", "v100-16g"),
    ("V100-SXM2-32GB", "v100-32g"), ("V100-SXM3-32GB", "v100-32g"), ("NVIDIA L4", "l4"),
    ("A10G", "a10g"), ("NVIDIA A10", "a10"), ("NVIDIA A40", "a40"), ("RTX A6000", "a6000"),
    ("RTX 3090", "rtx-3090"), ("RTX 4090", "rtx-4090"), ("RTX 2080 Ti", "rtx-2080ti"),
)
EXACT = ("NVIDIA L4", "NVIDIA A10", "NVIDIA A40")  # these begin the names of other devices too


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """A fraction of the peak against the size of the work, linear in log(size), flat outside."""

    __pydantic_config__: ClassVar = STRICT

    size: Annotated[tuple[Positive, ...], Len(1, 64)]
    fraction: Annotated[tuple[Annotated[float, Gt(0), Le(1)], ...], Len(1, 64)]

    def __post_init__(self) -> None:
        if len(self.size) != len(self.fraction):
            raise ValueError(f"{len(self.size)} sizes and {len(self.fraction)} fractions; "
                             "they must be as many")
        if any(a >= b for a, b in zip(self.size, self.size[1:], strict=False)):
            raise ValueError("sizes must increase")

    def at(self, size: float) -> float:
        """The fraction at `size`."""
        if size <= self.size[0]:
            return self.fraction[0]
        if size >= self.size[-1]:
            return self.fraction[-1]
        right = bisect_right(self.size, size)
        low, high = self.size[right - 1], self.size[right]
        weight = log(size / low) / log(high / low)
        return self.fraction[right - 1] * (1 - weight) + self.fraction[right] * weight


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One kind of device.

    peak_flops_per_s: dense peak by dtype ("bfloat16", "float16", "float32", "tf32", "float64").
    matmul_efficiency: fraction of the peak against (m*n*k)^(1/3) of one local matmul.
    float8_efficiency: as matmul_efficiency, of the float8 peak; None: the same fractions.
    attention_efficiency: fraction of the peak reached by fused attention against sequence length.
    memory_efficiency: fraction of the memory bandwidth against the bytes that a kernel moves.
    kernel_launch_s: least seconds from one kernel to the next.
    partly_aligned, unaligned: what remains of matmul_efficiency where a row of an operand is a
        multiple of 16 bytes but not of 128, and where it is not even that (tensor cores load
        aligned pieces: NVIDIA, "Matrix Multiplication Background", section on alignment).
    scores_share, batched_share: of attention that is not fused: what remains of memory_efficiency
        in kernels over the scores (rows in registers, random numbers for the dropout), and of
        matmul_efficiency in its products, whose inner dimension is as narrow as a head.
    host_kernel_s: what the host needs to launch one kernel: a layer is no faster than all of its.
    context_bytes: taken by the driver's context and the libraries' workspaces.
    communicator_bytes: taken by each communicator (process group) of two or more ranks.
    overlap_slowdown: factor on compute time while a collective runs beside it (>= 1).
    """

    __pydantic_config__: ClassVar = STRICT

    meshwright: Literal["Device"] = "Device"
    version: Literal[1] = 1
    name: Name
    description: Name = ""
    backend: Literal["nccl", "gloo"] = "nccl"
    memory_bytes: Annotated[int, Gt(0), Le(2**50)]
    memory_bandwidth_bytes_per_s: Positive
    peak_flops_per_s: Annotated[dict[Name, Positive], Len(1, 16)]
    matmul_efficiency: Curve
    attention_efficiency: Curve
    float8_efficiency: Curve | None = None
    memory_efficiency: Curve
    kernel_launch_s: Annotated[float, Ge(0), Le(1)]
    host_kernel_s: Annotated[float, Ge(0), Le(1)] = 0.0
    partly_aligned: Annotated[float, Gt(0), Le(1)] = 1.0
    unaligned: Annotated[float, Gt(0), Le(1)] = 1.0
    scores_share: Annotated[float, Gt(0), Le(1)] = 1.0
    batched_share: Annotated[float, Gt(0), Le(1)] = 1.0
    context_bytes: Annotated[int, Ge(0), Le(2**40)] = 0
    communicator_bytes: Annotated[int, Ge(0), Le(2**40)] = 0
    overlap_slowdown: Annotated[float, Ge(1), Le(10)] = 1.0
    sources: dict[Name, Annotated[str, MaxLen(2000)]]

    def peak(self, dtype: str) -> float:
        """Peak FLOP/s of a dtype, however it is scaled; raises UnknownName where the file has
        none."""
        dtype = dtype.removesuffix("_rowwise")
        if dtype not in self.peak_flops_per_s:
            raise UnknownName(f"dtype of device {self.name}", dtype, self.peak_flops_per_s)
        return self.peak_flops_per_s[dtype]


def device_names() -> tuple[str, ...]:
    """Names of the shipped devices."""
    return tuple(sorted(path.stem for path in DEVICES.glob("*.json")))


@functools.cache
def load_device(name: str) -> Device:
    """A shipped device by name."""
    known = device_names()
    if name not in known:
        near = [device for device in known if name.lower() in device]  # "h100": both of them
        raise UnknownName("device", name[:80], near or known)
    return load_shipped(Device, DEVICES / f"{name}.json")


def device_of_cuda(name: str) -> str | None:
    """The shipped device of the name that CUDA reports, or None."""
    for part, device in CUDA_NAMES:
        if name == part or (part in name and part not in EXACT):
            return device
    return None
