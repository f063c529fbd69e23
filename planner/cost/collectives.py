"""Collective communication over a Span, by the alpha-beta model.

Symbols: S = bytes of the whole tensor, n = ranks in the group, h = hosts under it, k = its members
in a host; W_d, a_d = bandwidth and latency between devices of a host; W_n, a_n = what one group has
between hosts (its share of cards and uplinks) and the latency there. To each, start_s of the links
is added once: what a collective takes however small it is.

    all-gather, reduce-scatter:
        ring          S (n-1)/n / min(W_d, W_n) + (n-h) a_d + h a_n
    all-reduce, the cheapest that the group allows of
        ring          a reduce-scatter and an all-gather
        hierarchical  2 (S (k-1)/k / W_d + (k-1) a_d + S (h-1)/h / W_n + (h-1) a_n)    (equal k)
        tree          2 S / min(W_d, W_n) + 2 (k-1) a_d + 2 ceil(log2 h) a_n

NCCL and gloo gather and scatter by rings (NCCL's tuning has no tree for them), and reduce by rings
or by trees over hosts. Ring and tree: Thakur, Rabenseifner & Gropp, "Optimization of Collective
Communication Operations in MPICH" (2005); hierarchical: its phases one after the other. The
bandwidths already carry the link's efficiency and the sharing between groups
(`planner/topology_groups.py`). Where a span carries measured collectives, those are taken instead.
"""

from __future__ import annotations

from collections.abc import Callable
from math import ceil, log2

from planner.topology_groups import Edge, Span
from profiler.links import Collective

__all__ = ["all_gather_seconds", "all_reduce_seconds", "reduce_scatter_seconds", "send_seconds"]


def all_gather_seconds(num_bytes: float, span: Span) -> float:
    """Every rank ends with the whole tensor of `num_bytes`, of which it held 1/n."""
    return _seconds("all_gather", num_bytes, span, _ring)


def reduce_scatter_seconds(num_bytes: float, span: Span) -> float:
    """Every rank ends with its 1/n of the sum of tensors of `num_bytes`: an all-gather
    backwards."""
    return _seconds("reduce_scatter", num_bytes, span, _ring)


def all_reduce_seconds(num_bytes: float, span: Span) -> float:
    """Every rank ends with the sum of tensors of `num_bytes`."""
    return _seconds("all_reduce", num_bytes, span, _all_reduce)


def _seconds(collective: Collective, num_bytes: float, span: Span,
             analytic: Callable[[float, Span], float]) -> float:
    if span.size == 1 or num_bytes <= 0:
        return 0.0
    seconds = analytic(num_bytes, span) + span.start_s
    return seconds if span.fits is None else span.fits.or_analytic(collective, num_bytes, seconds)


def _ring(num_bytes: float, span: Span) -> float:
    n, h = span.size, span.num_hosts
    width = min(span.device_bytes_per_s, span.network_bytes_per_s)
    return (num_bytes * (n - 1) / n / width
            + (n - h) * span.device_latency_s + (h if h > 1 else 0) * span.network_latency_s)


def _all_reduce(num_bytes: float, span: Span) -> float:
    h = span.num_hosts
    ring = 2 * _ring(num_bytes, span)
    width = min(span.device_bytes_per_s, span.network_bytes_per_s)
    tree = (2 * num_bytes / width + 2 * (span.max_members_per_host - 1) * span.device_latency_s
            + 2 * ceil(log2(h)) * span.network_latency_s)
    k = span.members_per_host
    if h == 1 or k == 1 or k != span.max_members_per_host:
        return min(ring, tree)
    hierarchical = 2 * (num_bytes * (k - 1) / k / span.device_bytes_per_s
                        + (k - 1) * span.device_latency_s
                        + num_bytes * (h - 1) / h / span.network_bytes_per_s
                        + (h - 1) * span.network_latency_s)
    return min(ring, tree, hierarchical)


def send_seconds(num_bytes: float, edge: Edge) -> float:
    """One tensor from a pipeline stage to its neighbour."""
    if num_bytes <= 0:
        return 0.0
    analytic_s = num_bytes / edge.bytes_per_s + edge.latency_s
    return analytic_s if edge.fits is None else edge.fits.or_analytic("send", num_bytes,
                                                                      analytic_s)
