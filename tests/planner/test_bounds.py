"""Every bound against the true least step, which brute force finds."""

from __future__ import annotations

import random
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.best_first import TOLERANCE
from planner.bounds import SLACK, CandidateBounds, MeshBounds, ideal_span, row_bounds
from planner.cost.collectives import all_gather_seconds, all_reduce_seconds
from planner.costing import Coster
from planner.formulation import relaxed_bound
from planner.problem import make_problem
from planner.room import may_fit
from planner.space import Row, candidates, meshes, rows
from planner.topology import HostGroup, Link, Topology
from planner.topology_groups import Placement
from planner.waterfill import Waterfill
from profiler.errors import InvalidInput
from tests.planner.brute_force import BruteForce
from tests.planner.instances import make_device, make_graph, make_instance, make_request

NAMES = ("tp", "pp", "dp", "micro_batch", "num_micro_batches")


@pytest.mark.parametrize("chunk", range(6))
def test_no_bound_is_above_the_least_step(chunk: int) -> None:
    compared = infeasible = refused = 0
    for seed in range(3000 + chunk * 15, 3015 + chunk * 15):
        instance = make_instance(seed)
        coster = Coster(instance.graph, instance.topology, instance.request)
        try:
            table = rows(coster)
        except InvalidInput:
            continue
        space, mesh_bounds, bounds = BruteForce(coster), MeshBounds(coster), CandidateBounds(coster)
        columns = [table[name].tolist() for name in NAMES]
        drawn = random.Random(seed)
        everything = [
            (of_row, row, mesh, candidate)
            for of_row, row in zip(row_bounds(coster, table).tolist(),
                                   (Row(*values) for values in zip(*columns, strict=True)),
                                   strict=True)
            for mesh in meshes(coster, row) for candidate in candidates(coster, row, mesh)]
        for of_row, row, mesh, candidate in drawn.sample(everything, min(len(everything), 12)):
            least = space.sums.least_step(candidate)
            if not may_fit(coster, candidate):
                assert least == inf, (seed, candidate)
                refused += 1
            problem = make_problem(coster, candidate)
            exact, slowest = bounds.bound(candidate)
            found = {"row": of_row, "mesh": mesh_bounds.bound(row, mesh), "candidate": exact}
            filled = Waterfill(problem)
            slowest, _ = filled.fill(slowest)
            if slowest < inf:
                found["relaxed"] = relaxed_bound(problem, slowest * SLACK) * (1 - TOLERANCE / 4)
            if slowest == inf:
                found["filled"] = inf
            else:
                limit = least / candidate.num_micro_batches * (1 + 1e-9)
                total = filled.least_sum(limit) if limit < inf else 0.0
                found["filled"] = bounds.step(candidate, slowest * SLACK, total)
            high = {name: bound for name, bound in found.items() if bound > least}
            assert not high, (seed, candidate, least, high)
            compared += 1
            infeasible += least == inf
    assert compared > 60 and infeasible > 5 and refused > infeasible / 3


@st.composite
def topologies(draw: st.DrawFn) -> Topology:
    def link() -> Link:
        return Link(bandwidth_bytes_per_s=draw(st.sampled_from([1e9, 1e10, 1e11])),
                    latency_s=draw(st.sampled_from([0.0, 1e-6])),
                    aggregate_bytes_per_s=draw(st.sampled_from([None, 2e10])))
    return Topology(name="toy", hosts=tuple(
        HostGroup(count=draw(st.integers(1, 3)), devices_per_host=draw(st.integers(1, 4)),
                  device=make_device(2**30), device_link=link(), network_card=link(),
                  cards_per_host=draw(st.integers(1, 4)))
        for _ in range(draw(st.integers(1, 2)))))


@given(topologies(), st.integers(0, 10**6))
@settings(max_examples=300)
def test_no_span_is_better_than_the_ideal_one(topology: Topology, seed: int) -> None:
    rng = random.Random(seed)
    coster = Coster(make_graph(rng, 2), topology, make_request(rng))
    size = rng.randint(1, topology.num_devices)
    stride = rng.randint(1, topology.num_devices // size)
    blocks = rng.randint(1, topology.num_devices // (size * stride))
    order = rng.sample(range(len(topology.hosts)), len(topology.hosts))
    devices = [d for g in order for d, of in enumerate(topology.group_of_device()) if of == g]
    span = Placement(topology, devices[:size * stride * blocks]  # type: ignore[arg-type]
                     ).span(size, stride)
    ideal = ideal_span(coster, size)
    for collective in (all_gather_seconds, all_reduce_seconds):
        for num_bytes in (4.0, 1e6, 1e9):
            assert collective(num_bytes, ideal) <= collective(num_bytes, span) * (1 + 1e-12)
