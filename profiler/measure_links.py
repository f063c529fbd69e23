"""Times the collectives of the running processes: each of every shape of group, at every size.

A shape is (members, hosts, groups at once on a host), as tensor, data and pipeline groups lie on
a mesh: members are ranks r, r + stride, r + 2 stride, ... . For each divisor n of the processes and
each stride that fits, all groups run at once; with groups inside one host, the first one alone is
timed as well, so that what groups take from each other is seen.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from profiler.hardware import LoadWatch, context_bytes, hardware_name, pick_device, today, versions
from profiler.links import (
    COLLECTIVES,
    LARGE_BYTES,
    Collective,
    LinkFit,
    LinkPoint,
    Links,
    fit_line,
)
from profiler.timing import Clock

__all__ = ["GroupShape", "LinkOptions", "measure_links", "shapes_of"]

SMALLEST_BYTES = 1024
LOW_PERCENTILE = 10
WARM_UP = 2
JUMP = 1.3
"""How much more than its share by bytes a message takes where something changes, such as the way
its buffers are allocated."""
REFINEMENTS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkOptions:
    """most_bytes: the largest message; sizes: these instead. most_s: seconds for one size.
    repeats: at most."""

    most_bytes: int = 64 * 2**20
    sizes: tuple[int, ...] = ()
    most_s: float = 2.0
    repeats: int = 100
    device: str | None = None
    collectives: tuple[Collective, ...] = COLLECTIVES


@dataclass(frozen=True, slots=True)
class GroupShape:
    """Groups of `size` ranks, `stride` apart; `alone`: only the first of them works."""

    size: int
    stride: int
    alone: bool

    def groups(self, world: int) -> list[list[int]]:
        """The ranks of every group."""
        block = self.size * self.stride
        made = [[start + offset + k * self.stride for k in range(self.size)]
                for start in range(0, world, block) for offset in range(self.stride)]
        return made[:1] if self.alone else made

    def hosts(self, per_host: int) -> tuple[int, int]:
        """(hosts under one group, groups at once on one host)."""
        return self._spread(0, per_host), 1 if self.alone else per_host // self._members(per_host)

    def _spread(self, first: int, per_host: int) -> int:
        return len({(first + k * self.stride) // per_host for k in range(self.size)})

    def _members(self, per_host: int) -> int:
        return self.size // self._spread(0, per_host)


def shapes_of(world: int, per_host: int) -> list[GroupShape]:
    """Every shape whose groups have equally many members on each host they touch."""
    found: dict[tuple[int, int, int], GroupShape] = {}
    for size in (n for n in range(2, world + 1) if world % n == 0):
        for stride in (s for s in range(1, world // size + 1) if world % (size * s) == 0):
            for alone in (False, True):
                shape = GroupShape(size, stride, alone)
                spreads = {shape._spread(group[0], per_host)
                           for group in GroupShape(size, stride, False).groups(world)}
                if len(spreads) > 1 or size % next(iter(spreads)):
                    continue
                hosts, at_once = shape.hosts(per_host)
                found.setdefault((size, hosts, at_once), shape)
    return list(found.values())


def _sizes(most_bytes: int) -> list[int]:
    """Powers of four from the smallest on, and of two from 1 MiB on, where time is spent."""
    sizes, size = [], SMALLEST_BYTES
    while size <= most_bytes:
        sizes.append(size)
        size *= 2 if size >= 2**20 else 4
    return sizes


def jumps(points: Sequence[LinkPoint]) -> list[int]:
    """Sizes midway between two long messages of which the larger takes more than its share."""
    return [(a.num_bytes + b.num_bytes) // 2 // 4096 * 4096 for a, b in pairwise(points)
            if a.num_bytes >= LARGE_BYTES and b.num_bytes - a.num_bytes >= LARGE_BYTES
            and b.seconds / a.seconds > JUMP * b.num_bytes / a.num_bytes]


def measure_links(options: LinkOptions, advance: Callable[[str], None] = lambda text: None
                  ) -> Links:
    """Measure on every process of the running group; all of them get the same document."""
    device = pick_device(options.device)
    backend = "nccl" if device.type == "cuda" else "gloo"
    if not dist.is_initialized():
        dist.init_process_group(backend, timeout=timedelta(minutes=10))
    world = dist.get_world_size()
    per_host = int(os.environ.get("LOCAL_WORLD_SIZE", world))
    watch = LoadWatch(device, per_host)
    watch.begin()
    communicator = _communicator_bytes(device, world)
    fits: list[LinkFit] = []
    for shape in shapes_of(world, per_host):
        bench = _Bench(shape, device, options)
        for collective in options.collectives:
            if collective == "send" and shape.size != 2:
                continue
            advance(f"{collective.replace('_', '-')}, {shape.size} ranks"
                    f"{', one group alone' if shape.alone else ''}")
            points = bench.points(collective)
            hosts, at_once = shape.hosts(per_host)
            latency, slope, error = fit_line(points)
            fits.append(LinkFit(
                collective=collective, group_size=shape.size, num_hosts=hosts,
                groups_at_once=at_once, latency_s=latency, s_per_byte=slope, error=error,
                points=tuple(points)))
        bench.close()
    advance("compute beside a collective")
    slowdown = _overlap_slowdown(device)
    return Links(hardware=hardware_name(device), backend=backend, versions=versions(device),  # type: ignore[arg-type]
                 date=today(), num_hosts=world // per_host, processes_per_host=per_host,
                 fits=tuple(fits), communicator_bytes=communicator,
                 overlap_slowdown=min(10.0, max(1.0, slowdown)),
                 busy=watch.end())


class _Bench:
    """The groups of one shape."""

    def __init__(self, shape: GroupShape, device: torch.device, options: LinkOptions) -> None:
        self.device, self.options, self.size = device, options, shape.size
        self.clock = Clock(device)
        self.group: Any = None
        self.made: list[Any] = []
        for ranks in shape.groups(dist.get_world_size()):
            group = dist.new_group(ranks)
            self.made.append(group)
            if dist.get_rank() in ranks:
                self.group, self.ranks = group, ranks

    def close(self) -> None:
        for group in self.made:
            if group != dist.GroupMember.NON_GROUP_MEMBER:
                dist.destroy_process_group(group)

    def points(self, collective: Collective) -> list[LinkPoint]:
        """Every size, and more of them where the seconds jump: of each repeat the slowest rank
        counts."""
        points = self._turns(collective, self.options.sizes or _sizes(self.options.most_bytes))
        for _ in range(REFINEMENTS):
            between = jumps(points)
            if not between:
                break
            points = sorted([*points, *self._turns(collective, between)],
                            key=lambda point: point.num_bytes)
        return points

    def _turns(self, collective: Collective, sizes: Sequence[int]) -> list[LinkPoint]:
        """Sizes take turns, so that what slows the machine for a while slows all of them."""
        runs = [self._runner(collective, num_bytes) if self.group is not None else None
                for num_bytes in sizes]
        counts = [self._count(run) for run in runs]
        seconds: list[list[float]] = [[] for _ in sizes]
        for turn in range(max(counts)):
            for run, count, found in zip(runs, counts, seconds, strict=True):
                # A size of few repeats takes its turns spread over all of them.
                if (turn + 1) * count // max(counts) > len(found):
                    found.append(self._once(run))
        points = []
        for num_bytes, found in zip(sizes, seconds, strict=True):
            slowest = self._slowest(found)
            points.append(LinkPoint(
                num_bytes=num_bytes, low_s=float(np.percentile(slowest, LOW_PERCENTILE)),
                median_s=statistics.median(slowest), num_repeats=len(slowest),
                mean_s=statistics.mean(sorted(slowest)[:len(slowest) - len(slowest) // 20])))
        return points

    def _count(self, run: Callable[[], Any] | None) -> int:
        """How often a size is repeated, the same on every rank."""
        for _ in range(WARM_UP):
            self._once(run)
        estimate = self._slowest([self._once(run)])[0]
        return max(5, min(self.options.repeats, int(self.options.most_s / max(estimate, 1e-6))))

    def _once(self, run: Callable[[], Any] | None) -> float:
        """Seconds of one collective, all ranks having met before."""
        dist.barrier()
        self.clock.synchronize()
        begin = self.clock.mark()
        if run is not None:
            run()
        return self.clock.between(begin, self.clock.mark()) if run is not None else 0.0

    def _slowest(self, seconds: list[float]) -> list[float]:
        tensor = torch.tensor(seconds, dtype=torch.float64, device=self.device)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        return [float(value) for value in tensor]

    def _runner(self, collective: Collective, num_bytes: int) -> Callable[[], Any]:
        n, group = self.size, self.group
        numel = max(1, num_bytes // 4 // n)
        whole = torch.ones(numel * n, device=self.device)
        part = torch.ones(numel, device=self.device)
        if collective == "all_reduce":
            return lambda: dist.all_reduce(whole, group=group)
        if collective == "all_gather":
            return lambda: dist.all_gather_into_tensor(whole, part, group=group)
        if collective == "reduce_scatter":
            return lambda: dist.reduce_scatter_tensor(part, whole, group=group)
        if collective == "all_to_all":
            received = torch.ones_like(whole)
            return lambda: dist.all_to_all_single(received, whole, group=group)
        first, second = self.ranks
        if dist.get_rank() == first:
            return lambda: dist.send(whole, second, group=group)
        return lambda: dist.recv(whole, first, group=group)


def _communicator_bytes(device: torch.device, world: int) -> int:
    """What a group takes once it has worked: the most of any rank."""
    one = torch.ones(1, device=device)
    dist.all_reduce(one)
    before = context_bytes(device)
    group = dist.new_group(list(range(world)))
    dist.all_reduce(one, group=group)
    taken = torch.tensor(max(0, context_bytes(device) - before), device=device)
    dist.destroy_process_group(group)
    dist.all_reduce(taken, op=dist.ReduceOp.MAX)
    return int(taken)


def _overlap_slowdown(device: torch.device) -> float:
    """How many times longer matmuls take while an all-reduce of all ranks runs beside them."""
    size = 4096 if device.type == "cuda" else 384
    a = torch.full((size, size), 1e-3, device=device)
    clock = Clock(device)
    message = torch.ones((16 if device.type == "cuda" else 4) * 2**20 // 4, device=device)

    def matmuls(count: int) -> float:
        begin = clock.mark()
        for _ in range(count):
            a @ a
        return clock.between(begin, clock.mark())

    def reductions() -> float:
        dist.barrier()
        clock.synchronize()
        begin = clock.mark()
        dist.all_reduce(message)
        return clock.between(begin, clock.mark())

    matmuls(3)
    reductions()
    alone_s = min(matmuls(4) for _ in range(5)) / 4
    collective_s = min(reductions() for _ in range(3))
    count = max(1, int(collective_s * 2 / alone_s))
    ratios = []
    for _ in range(5):
        dist.barrier()
        clock.synchronize()
        apart_s = matmuls(count)
        dist.barrier()
        clock.synchronize()
        work = dist.all_reduce(message, async_op=True)
        beside_s = matmuls(count)
        work.wait()
        # Of `count` matmuls only those beside the collective were slowed.
        slowed_s = min(collective_s, apart_s)
        ratios.append(1 + max(0.0, beside_s - apart_s) / slowed_s)
    tensor = torch.tensor(statistics.median(ratios), dtype=torch.float64, device=device)
    dist.all_reduce(tensor)
    return float(tensor) / float(dist.get_world_size())
