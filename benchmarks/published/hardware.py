"""The hardware and the software stack that a row names: topology and stack, with every guess."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache

from benchmarks.published.table import Cells, UnusableRow
from planner.topology import HostGroup, Link, Topology
from planner.topology_files import resolve
from profiler.device import load_device

__all__ = ["stack_of", "topology_of"]

PRESETS: tuple[tuple[str, str, str | None], ...] = (
    (r"H100.*96GB", "dgx-h100", "h100-96g"),
    (r"A100.*40GB(?!;)(?!.*80GB)", "dgx-a100-40g", None),
    (r"A100", "dgx-a100-80g", None),
    (r"H200", "dgx-h100", "h200"),
    (r"H100", "dgx-h100", None),
    (r"GB200", "gb200-nvl72", None),
    (r"\bB200", "dgx-b200", None),
    (r"V100.*16GB", "dgx1-v100", "v100-16g"),
    (r"V100", "dgx1-v100", "v100-32g"),
    (r"\bL4\b", "l4x8", None),
)
"""(pattern of the gpu column, preset, device instead of the preset's), first match."""

OMNI_PATH = Link(
    bandwidth_bytes_per_s=12.5e9, latency_s=4e-6, efficiency=0.8,
    source="cited: Omni-Path 100, 100 Gb/s; efficiency as of InfiniBand EDR")
HDR = Link(
    bandwidth_bytes_per_s=25e9, latency_s=4e-6, efficiency=0.92,
    source="cited: InfiniBand HDR, 200 Gb/s (as the dgx-a100 presets)")
NETWORKS: tuple[tuple[str, Link, int, str], ...] = (
    (r"Jean Zay|Omni-Path|OPA", OMNI_PATH, 4, "network: 4 x Omni-Path 100 per host"),
    (r"inter_node_bandwidth 800", HDR, 4, "network: 800 Gb/s per host, as 4 x HDR"),
    (r"1600 Gbps", HDR, 8, "network: 1,600 Gb/s of RoCE per host, as 8 x 200 Gb/s"),
)
"""(pattern of the interconnect column, card, cards per host, what that infers)."""

STACKS: tuple[tuple[str, str], ...] = (
    (r"mosaicml|llm.?foundry|flash-attn \(triton\)", "llm-foundry"),
    (r"torchtitan.*async ?TP", "torchtitan-async-tp"),
    (r"torchtitan eager", "torchtitan"),
    (r"torchtitan", "torchtitan-compile"),
    (r"alephalpha.*RMS kernel", "neox-flash2-rms"),
    (r"alephalpha.*flash_attention2", "neox-flash2"),
    (r"alephalpha.*flash_attentionv1", "neox-flash1"),
    (r"alephalpha.*fused", "neox-fused-softmax"),
    (r"alephalpha", "neox"),
    (r"bigscience", "bigscience"),
    (r"mtnlg", "megatron-deepspeed-2021"),
    (r"DeepSpeed|vtrain|amp_", "megatron-deepspeed"),
    (r"korthikanti|Megatron-LM 2022", "megatron-lm-2022"),
    (r"no flash|sc21|megatron_readme_gpt3", "megatron-lm-2021"),
    (r"NeMo|Bridge|bridge|megatron|mcore|Pre-Training", "megatron-core"),
    (r"FSDP2", "torchtitan"),
)
"""(pattern of "source implementation sharding", stack), first match."""


TESTS_WITHOUT_FUSED_ATTENTION = re.compile(
    r"lts.* gpt3_mcore_|deterministic.* gpt3_mcore_(?!.*resume)| gpt3_mcore_(?!te_)")
"""Of "implementation model": the configurations of Megatron-LM's functional tests say
`attention-backend: unfused` but for those that resume, and `transformer-impl: local` without "te";
the containers called lts have no fused attention for them."""


def stack_of(cells: Cells, inferences: list[str]) -> str:
    """The software stack of a row."""
    if TESTS_WITHOUT_FUSED_ATTENTION.search(f"{cells.text('impl')} {cells.text('model')}"):
        inferences.append("attention: not fused, by the name of the test")
        return "megatron-core-unfused"
    text = f"{cells.text('source_id')} {cells.text('impl')} {cells.text('dp_shard')} " + (
        cells.text("precision"))
    for pattern, stack in STACKS:
        if re.search(pattern, text, re.IGNORECASE):
            return stack
    inferences.append("stack: not recognised, taken as pytorch-eager")
    return "pytorch-eager"


@cache
def _host(preset: str, device: str | None) -> HostGroup:
    group = resolve(preset).hosts[0]
    return group if device is None else replace(group, device=load_device(device))


def topology_of(cells: Cells, num_devices: int, inferences: list[str]) -> Topology:
    """Hosts for `num_devices` of the row's devices.

    Raises:
        UnusableRow: no device file describes them.
    """
    gpu = cells.text("gpu")
    for pattern, preset, device in PRESETS:
        if re.search(pattern, gpu):
            group = _host(preset, device)
            break
    else:
        raise UnusableRow(f"no device file for gpu {gpu[:40]!r}")
    if re.fullmatch(r"[A-Z]?A100", gpu):
        inferences.append("gpu: A100 of 80 GB")
    elif gpu == "H100":
        inferences.append("gpu: H100 SXM of 80 GB")
    per_host = cells.count("gpus_per_node") or group.devices_per_host
    if group.devices_per_host > 8:  # one NVLink domain over many trays
        per_host = group.devices_per_host
        inferences.append(f"links: one NVLink domain of {per_host}")
    card, cards = group.network_card, max(1, group.cards_per_host * per_host
                                          // group.devices_per_host)
    interconnect = cells.text("interconnect")
    for pattern, link, number, inference in NETWORKS:
        if re.search(pattern, interconnect):
            card, cards = link, number
            inferences.append(inference)
            break
    else:
        if num_devices > per_host:
            inferences.append(f"network: as {resolve(preset).name}")
    group = replace(group, count=-(-num_devices // per_host),
                    devices_per_host=per_host,
                    network_card=card, cards_per_host=cards)
    return Topology(name=preset, hosts=(group,))
