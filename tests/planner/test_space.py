"""The space against an enumeration of its own definition, and what is refused."""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import replace
from typing import Any

import pytest

from planner.costing import Candidate, Coster
from planner.request import Request
from planner.space import (
    Row,
    candidates,
    divisors,
    host_group_orders,
    legal_tensor_degrees,
    meshes,
    rows,
    space_size,
)
from profiler.errors import InvalidInput
from profiler.layer_graph import LayerGraph, LayerKind, TensorParallel
from tests.planner.brute_force import BruteForce
from tests.planner.instances import (
    make_blocks,
    make_graph,
    make_instance,
    make_request,
    make_topology,
)

NAMES = ("tp", "pp", "dp", "micro_batch", "num_micro_batches")


def all_candidates(coster: Coster) -> list[Candidate]:
    table = rows(coster)
    return [candidate
            for values in zip(*(table[name].tolist() for name in NAMES), strict=True)
            for mesh in meshes(coster, Row(*values))
            for candidate in candidates(coster, Row(*values), mesh)]


def without_placement(candidate: Candidate) -> tuple[object, ...]:
    mesh = candidate.mesh
    return (mesh.pp, mesh.dp_replicate, mesh.dp_shard, mesh.tp, candidate.micro_batch,
            candidate.num_micro_batches, candidate.schedule)


def may_be_left_out(candidate: Candidate) -> bool:
    """Never better than another: GPipe where 1F1B is legal, one micro-batch reduced by itself."""
    m, schedule = candidate.num_micro_batches, candidate.schedule
    return (schedule.name == "gpipe" and m >= candidate.mesh.pp) or (
        schedule.gradient_sync == "each_micro_batch" and m == 1)


@pytest.mark.parametrize("chunk", range(4))
def test_space_is_its_definition(chunk: int) -> None:
    """Same degrees, micro-batches and schedules; and of the placements all that differ in cost."""
    compared = 0
    for seed in range(7000 + chunk * 20, 7020 + chunk * 20):
        instance = make_instance(seed)
        if instance.request.schedule is not None:
            continue
        coster = Coster(instance.graph, instance.topology, instance.request)
        space = BruteForce(coster)
        defined = [c for c in space.candidates() if not may_be_left_out(c)]
        if not defined:
            with pytest.raises(InvalidInput):
                rows(coster)
            continue
        made = all_candidates(coster)
        assert len({(without_placement(c), c.mesh.order, c.mesh.host_groups) for c in made}
                   ) == len(made)
        groups: dict[object, list[list[Candidate]]] = defaultdict(lambda: [[], []])
        for side, found in enumerate((made, defined)):
            for candidate in found:
                groups[without_placement(candidate)][side].append(candidate)
        for key, (mine, all_of_them) in groups.items():
            assert mine and all_of_them, (seed, key)
        drawn = random.Random(seed).sample(sorted(groups, key=repr), min(len(groups), 3))
        for key in drawn:
            steps = [{f"{space.sums.least_step(c):.9e}" for c in side} for side in groups[key]]
            assert steps[0] == steps[1]
        compared += 1
    assert compared > 8


def test_size_counts_every_placement() -> None:
    counted = 0
    for seed in range(7100, 7160):
        instance = make_instance(seed)
        coster = Coster(instance.graph, instance.topology, instance.request)
        defined = [c for c in BruteForce(coster).candidates() if not may_be_left_out(c)]
        if instance.request.schedule is None and defined:
            assert space_size(coster, rows(coster)) == len(defined), seed
            counted += 1
    assert counted > 20


@pytest.mark.parametrize("number", [1, 2, 12, 36, 97, 1024, 3072])
def test_divisors(number: int) -> None:
    assert divisors(number) == [d for d in range(1, number + 1) if number % d == 0]


def coster(graph: LayerGraph | None = None, *, devices: int = 8, **changes: Any) -> Coster:
    rng = random.Random(5)
    graph = graph or make_blocks(rng, 1, 8, 1)
    request = make_request(rng, global_batch=8, **changes)
    return Coster(graph, make_topology(1, devices, 2**34), request)


def divided_by(**sizes: int) -> LayerGraph:
    """A model whose layers all have these dimensions to divide."""
    made = make_graph(random.Random(1), 3, num_kinds=1)
    kinds = {name: replace(kind, tensor_parallel=TensorParallel(divides=sizes))
             for name, kind in made.kinds.items()}
    return replace(made, kinds=kinds, sample="tokens")


def test_tensor_degrees_divide_heads_and_the_sequence() -> None:
    graph = divided_by(heads=24, ffn=480)
    # 48 tokens: 5 divides the feed-forward dimension alone.
    assert legal_tensor_degrees(coster(graph), 64) == [1, 2, 3, 4, 6, 8, 12, 24]
    assert legal_tensor_degrees(coster(graph), 5) == [1, 2, 3, 4]
    images = coster(replace(graph, sample="images"))
    assert legal_tensor_degrees(images, 64) == [1]  # the executor divides models of tokens
    odd = coster(replace(divided_by(heads=20), sample="features"))
    for other, legal in ((images, [1, 2, 3, 4, 6, 8, 12, 24]), (odd, [1, 2, 4, 5, 10, 20])):
        other.capabilities = replace(other.capabilities, tensor_parallel_samples=(
            "tokens", "images", "features"))
        assert legal_tensor_degrees(other, 64) == legal


def test_a_vocabulary_is_padded_and_kv_heads_are_not_copied() -> None:
    assert legal_tensor_degrees(coster(divided_by(heads=8, vocabulary=1001)), 64) == [1, 2, 4, 8]
    assert legal_tensor_degrees(coster(divided_by(heads=8, kv_heads=2)), 64) == [1, 2]


def test_a_degree_must_divide_half_of_the_work() -> None:
    rng = random.Random(2)
    made = make_graph(rng, 4, num_kinds=1)
    [kind] = made.kinds.values()
    kinds = {"divided": replace(kind, tensor_parallel=TensorParallel(divides={"heads": 8})),
             "whole": replace(kind, tensor_parallel=None)}

    def degrees(names: list[str]) -> list[int]:
        layers = tuple(replace(layer, kind=n)
                       for layer, n in zip(made.layers, names, strict=True))
        used: dict[str, LayerKind] = {n: kinds[n] for n in names}
        return legal_tensor_degrees(coster(replace(made, layers=layers, kinds=used,
                                                   sample="tokens")), 4)
    assert degrees(["divided", "divided", "whole", "whole"]) == [1, 2, 4]
    assert degrees(["divided", "whole", "whole", "whole"]) == [1]


@pytest.mark.parametrize(("changes", "message"), [
    ({"pp": 8, "tp": 2}, "pp 8 x tp 2 = 16 devices; toy has 8"),
    ({"dp_shard": 3}, "global batch 8 is not divisible by data-parallel degree 3"),
    ({"micro_batch": 16}, "global batch 8 is not divisible by .* x micro-batch 16"),
    ({"pp": 11}, "pp 11 is more than the 10 layers"),
    ({"tp": 5}, "tp 5 is not legal for toy: .*sequence length 48 is not divisible by 5"),
    ({"schedule": "interleaved", "pp": 1}, "'interleaved' is legal for none .* 8 blocks of toy"),
    ({"schedule": "1f1b", "pp": 4, "micro_batch": 8}, "as many micro-batches as stages"),
])
def test_demands_that_leave_nothing_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        rows(coster(devices=16 if changes.get("pp") == 11 else 8, **changes))


def test_all_devices_can_be_demanded() -> None:
    table = rows(coster(use_all_devices=True))
    assert set((table["tp"] * table["pp"] * table["dp"]).tolist()) == {8}
    with pytest.raises(InvalidInput, match="no legal degrees use all 7 devices"):
        rows(coster(make_blocks(random.Random(5), 1, 2, 1), devices=7, use_all_devices=True))


def test_every_demand_is_met() -> None:
    demands = {"pp": 2, "dp_replicate": 1, "dp_shard": 2, "tp": 2, "micro_batch": 2,
               "schedule": "1f1b"}
    for candidate in all_candidates(coster(**demands)):
        mesh = candidate.mesh
        assert (mesh.pp, mesh.dp_replicate, mesh.dp_shard, mesh.tp) == (2, 1, 2, 2)
        assert (candidate.micro_batch, candidate.schedule.name) == (2, "1f1b")


def test_host_groups_in_every_order() -> None:
    rng = random.Random(0)
    graph, request = make_graph(rng, 2), make_request(rng)
    speeds = (1.0, 0.5, 2.0)

    def orders(number: int) -> list[tuple[int, ...]]:
        topology = make_topology(1, 2, 2**30, speeds=(speeds * 2)[:number])
        return host_group_orders(Coster(graph, topology, request))
    assert orders(1) == [()]
    assert orders(2) == [(), (1, 0)]
    assert len(orders(3)) == 6
    # Too many: as listed, backwards, and by speed both ways.
    assert orders(5) == [(), (4, 3, 2, 1, 0), (2, 0, 3, 1, 4), (4, 1, 3, 0, 2)]


def test_request_has_no_more_demands_than_are_tested() -> None:
    fields = set(Request.__dataclass_fields__) - {
        "global_batch", "seq_len", "precision", "optimizer", "fused_optimizer", "memory_margin",
        "target", "stack", "sequence_parallel", "__pydantic_config__"}
    assert fields == {"pp", "dp_replicate", "dp_shard", "tp", "micro_batch", "schedule",
                      "recompute", "use_all_devices"}
