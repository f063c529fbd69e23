"""The topology of the machine that this runs on.

With CUDA: its GPUs, by the shipped device of their name, with the memory that the driver reports.
Without: one process for each core, or as many as asked for, which share its cores and memory. What
was not read from the machine is marked so in the sources; `profiler` measures it.
"""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import replace
from pathlib import Path

from planner.topology import MAX_DEVICES, HostGroup, Link, Topology
from profiler.device import Device, device_of_cuda, load_device
from profiler.errors import InvalidInput

__all__ = ["local_topology"]

MEMINFO = Path("/proc/meminfo")
MAX_PROCESSES = 1024

# Whose links a device has, unless measured: those of the preset that it comes in.
LINKS_OF = {"a100-40g": "dgx-a100-40g", "a100-80g": "dgx-a100-80g", "h100-sxm-80g": "dgx-h100",
            "h200": "dgx-h200", "b200": "dgx-b200", "gb200": "gb200-nvl72",
            "v100-16g": "dgx1-v100", "v100-32g": "dgx1-v100", "l4": "l4x8"}


def local_topology(count: int | None = None) -> Topology:
    """This machine, as `count` devices: its first GPUs, or that many processes on its cores.

    Raises:
        InvalidInput: more than there are, or a GPU of which no device file tells.
    """
    group = _cuda_group(count) or _cpu_group(count)
    return Topology(name="local" if count is None else f"local:{count}", hosts=(group,))


def _cuda_group(count: int | None) -> HostGroup | None:
    try:
        import torch  # 3 s, and not needed to plan for other machines
    except ImportError:
        return None
    if not torch.cuda.is_available():
        return None
    present = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    if count is not None and count > len(present):
        raise InvalidInput(f"local:{count}: this machine has {len(present)} GPUs")
    used = present[:count]
    kinds = Counter(properties.name for properties in used)
    if len(kinds) > 1:
        raise InvalidInput(f"local: GPUs of several kinds ({', '.join(sorted(kinds))}); write a "
                           "file with `hosts`, a group for each kind")
    return cuda_group(used[0].name, min(p.total_memory for p in used), len(used))


def cuda_group(name: str, memory_bytes: int, count: int) -> HostGroup:
    """`count` GPUs of one host, from what CUDA says of them."""
    from planner.topology_files import resolve

    known = _device_of(name)
    if known is None:
        raise InvalidInput(f"local: no device file tells of {name!r}; write a topology file with "
                           "`device`, or measure it with `python -m profiler`")
    sources = known.sources | {"memory_bytes": f"measured: what CUDA reports of {name}"}
    device = replace(known, memory_bytes=memory_bytes, sources=sources)
    preset = LINKS_OF.get(known.name, "rtx4090x8")
    links = resolve(preset).hosts[0]
    return replace(links, devices_per_host=count, device=device,
                   device_link=_not_measured(links.device_link, preset),
                   network_card=_not_measured(links.network_card, preset))


def _device_of(name: str) -> Device | None:
    found = device_of_cuda(name)
    return load_device(found) if found is not None else None


def _not_measured(link: Link, preset: str) -> Link:
    return replace(link, source=f"not measured, as in {preset}: {link.source}")


def _cpu_group(count: int | None) -> HostGroup:
    from planner.topology_files import resolve

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    cores = cores or 1
    count = cores if count is None else count
    if not 1 <= count <= min(MAX_PROCESSES, MAX_DEVICES):
        raise InvalidInput(f"local:{count}: 1 to {MAX_PROCESSES:,} processes are possible")
    host = resolve("cpu-host").hosts[0]
    share = cores / count
    core, memory = host.device, _total_memory_bytes()
    sources = {field: f"not measured: {text}" for field, text in core.sources.items()}
    for field in ("memory_bandwidth_bytes_per_s", "peak_flops_per_s"):
        sources[field] = f"not measured, {share:g} times a core's: {core.sources[field]}"
    if memory is not None:
        sources["memory_bytes"] = f"measured: MemTotal of {memory:,} bytes over {count} processes"
    device = replace(
        core,
        description=f"{share:g} cores of this machine",
        memory_bytes=core.memory_bytes if memory is None else memory // count,
        memory_bandwidth_bytes_per_s=core.memory_bandwidth_bytes_per_s * share,
        peak_flops_per_s={dtype: peak * share for dtype, peak in core.peak_flops_per_s.items()},
        sources=sources,
    )
    bus = (host.device_link.aggregate_bytes_per_s or 0) * cores / host.devices_per_host
    link = replace(_not_measured(host.device_link, "cpu-host"), aggregate_bytes_per_s=bus or None)
    return replace(host, devices_per_host=count, device=device, device_link=link,
                   network_card=_not_measured(host.network_card, "cpu-host"))


def _total_memory_bytes() -> int | None:
    """MemTotal, or None where there is no /proc."""
    try:
        text = MEMINFO.read_text(encoding="ascii")
    except (OSError, UnicodeDecodeError):
        return None
    for line in text.splitlines():
        words = line.split()
        if words[:1] == ["MemTotal:"] and len(words) > 1 and words[1].isdigit():
            return int(words[1]) * 1024
    return None
