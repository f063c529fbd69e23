"""What `plan topologies` prints: one line for each preset, or all that is known of one topology."""

from __future__ import annotations

from collections.abc import Iterable

from planner.topology import HostGroup, Link, Topology

__all__ = ["describe", "summary"]

GIB = 2**30
GB = 1e9


def summary(topology: Topology) -> tuple[str, str, str, str, str]:
    """(name, devices, memory of each, link inside a host, network of a host), as text."""
    groups = topology.hosts
    return (
        topology.name,
        _distinct(f"{group.num_devices} x {group.device.name}" for group in groups),
        _distinct(f"{group.device.memory_bytes / GIB:.1f} GiB" for group in groups),
        _distinct(f"{group.device_link.bandwidth_bytes_per_s / GB:g} GB/s" for group in groups),
        _distinct(_cards(group) for group in groups),
    )


def describe(topology: Topology) -> str:
    """Every group of hosts with its figures and their sources, then the network above them."""
    hosts, devices = topology.num_hosts, topology.num_devices
    lines = [f"{topology.name}: {hosts:,} {_plural(hosts, 'host')}, "
             f"{devices:,} {_plural(devices, 'device')}"]
    for group in topology.hosts:
        lines += ["", *_describe_group(group)]
    for level in topology.network:
        uplink = level.uplink_bytes_per_s
        up = "non-blocking" if uplink is None else f"{uplink / GB:g} GB/s up"
        lines += ["", f"network level {level.name!r}: {level.hosts_per_group:,} hosts a switch, "
                      f"{up}, {level.latency_s * 1e6:g} us"]
    return "\n".join(lines)


def _describe_group(group: HostGroup) -> list[str]:
    device = group.device
    peaks = ", ".join(f"{dtype} {peak / 1e12:g}" for dtype, peak in device.peak_flops_per_s.items())
    matmul, attention = device.matmul_efficiency, device.attention_efficiency
    figures = {
        "memory_bytes": f"memory {device.memory_bytes / GIB:.2f} GiB, of which "
                        f"{device.context_bytes / GIB:.2f} for the context and "
                        f"{device.communicator_bytes / GIB:.2f} for each communicator",
        "memory_bandwidth_bytes_per_s":
            f"memory bandwidth {device.memory_bandwidth_bytes_per_s / GB:,.0f} GB/s",
        "peak_flops_per_s": f"peak TFLOP/s: {peaks}",
        "matmul_efficiency": f"matmul: {max(matmul.fraction):.0%} of the peak at best, "
                             f"{matmul.at(1024):.0%} at 1024 cubed",
        "attention_efficiency": f"attention: {max(attention.fraction):.0%} at best, "
                                f"{attention.at(2048):.0%} at 2,048 tokens",
        "overlap_slowdown": f"compute beside a collective: {device.overlap_slowdown:g} x slower",
    }
    lines = [f"{group.count:,} {_plural(group.count, 'host')} of {group.devices_per_host} "
             f"{device.name} ({device.description or device.backend})"]
    for field, text in figures.items():
        lines += [f"  {text}", *_source(device.sources.get(field, ""))]
    lines += _describe_link("between devices", group.device_link)
    cards = group.cards_per_host
    lines += _describe_link(f"network, {cards} {_plural(cards, 'card')} a host, each",
                            group.network_card)
    return lines


def _describe_link(what: str, link: Link) -> list[str]:
    bus = ""
    if link.aggregate_bytes_per_s is not None:
        bus = f", {link.aggregate_bytes_per_s / GB:g} GB/s all together"
    return [f"  {what}: {link.bandwidth_bytes_per_s / GB:g} GB/s, of which collectives reach "
            f"{link.efficiency:.0%}{bus}; {link.latency_s * 1e6:g} us", *_source(link.source)]


def _source(source: str) -> list[str]:
    return [f"      {source}"] if source else []


def _cards(group: HostGroup) -> str:
    gigabits = group.network_card.bandwidth_bytes_per_s * 8 / GB
    return f"{group.cards_per_host} x {gigabits:g} Gb/s"


def _distinct(texts: Iterable[str]) -> str:
    return " + ".join(dict.fromkeys(texts))


def _plural(count: int, noun: str) -> str:
    return noun if count == 1 else f"{noun}s"
