"""The search against brute force: small made-up instances, every layout priced.

Each instance (`instances.py`) has a model of 1 to 10 layers, 1 to 8 devices and little memory.
Brute force (`brute_force.py`) shares the cost functions with the search, and nothing that bounds,
cuts, fills or solves. It takes every contiguous cut into stages, and GPipe and gradients reduced
after each micro-batch everywhere they are legal, though the search leaves them out where another
candidate is never worse.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from math import inf

import pytest

from planner.best_first import TOLERANCE, Found, run_search
from planner.costing import Coster
from profiler.errors import InvalidInput
from tests.planner.brute_force import BruteForce
from tests.planner.instances import make_instance
from tests.planner.measured_instances import make_measured

FIRST, PER_CHUNK, CHUNKS = 1000, 20, 18
NUM_TWICE = 100


def coster_of(seed: int) -> Coster:
    instance = make_instance(seed)
    return Coster(instance.graph, instance.topology, instance.request)


def search(coster: Coster) -> tuple[Found | None, bool]:
    """(the best layout, None if there is none; whether anything is legal)."""
    try:
        outcome = run_search(coster)
    except InvalidInput:
        return None, False
    assert outcome.complete
    return outcome.best, True


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_search_equals_brute_force(chunk: int) -> None:
    wrong = {}
    for seed in range(FIRST + chunk * PER_CHUNK, FIRST + (chunk + 1) * PER_CHUNK):
        coster = coster_of(seed)
        found, legal = search(coster)
        searched = found.step_s if found else inf
        best = BruteForce(coster).best()
        assert legal == (best.num_candidates > 0), seed
        if searched != best.step_s and not abs(searched - best.step_s) <= TOLERANCE * best.step_s:
            wrong[seed] = (searched, best)
    assert not wrong


@pytest.mark.parametrize("chunk", range(3))
def test_search_equals_brute_force_for_other_targets(chunk: int) -> None:
    """What a target can do changes the space and what hides behind what."""
    for seed in range(30_150 + chunk * 20, 30_170 + chunk * 20):
        coster, rng = coster_of(seed), random.Random(seed)
        coster.capabilities = replace(
            coster.capabilities, gradient_overlap_with_pipeline=rng.random() < 0.6,
            gradient_sync_per_micro_batch_with_pipeline=rng.random() < 0.6,
            min_micro_batches_1f1b=rng.choice(["one", "stages"]),
            reshard_per_layer=rng.random() < 0.7, tensor_parallel_per_layer=rng.random() < 0.7,
            tensor_parallel_samples=("tokens", "features"))
        found, legal = search(coster)
        best = BruteForce(coster).best()
        assert legal == (best.num_candidates > 0), seed
        assert (found.step_s if found else inf) == pytest.approx(best.step_s, rel=TOLERANCE), seed


@pytest.mark.parametrize("chunk", range(2))
def test_search_equals_brute_force_on_measured_costs(chunk: int) -> None:
    """Measured seconds are bound by no formula: a larger micro-batch or degree may be cheaper."""
    for seed in range(41_000 + chunk * 15, 41_015 + chunk * 15):
        instance = make_measured(seed)
        coster = Coster(instance.graph, instance.topology, instance.request)
        found, legal = search(coster)
        best = BruteForce(coster).best()
        assert legal == (best.num_candidates > 0), seed
        assert (found.step_s if found else inf) == pytest.approx(best.step_s, rel=TOLERANCE), seed


@pytest.mark.parametrize("chunk", range(4))
def test_brute_force_equals_pricing_one_by_one(chunk: int) -> None:
    """The sums of `brute_force_sums.py` against `evaluate` on every layout of small instances."""
    whole = 0
    for seed in range(chunk * 20, chunk * 20 + 20):
        coster = coster_of(seed)
        space = BruteForce(coster)
        everything = list(space.candidates())
        small = [c for c in everything if space.size(c) <= 300][:40]
        least = inf
        for candidate in small:
            priced = space.priced_least_step(candidate)
            assert space.sums.least_step(candidate) == pytest.approx(priced, rel=1e-9), candidate
            least = min(least, priced)
        if small and len(small) == len(everything):
            whole += 1
            found, _ = search(coster)
            assert (found.step_s if found else inf) == pytest.approx(least, rel=TOLERANCE)
    assert whole >= 3


def test_two_searches_find_the_same_and_everything_occurs() -> None:
    seen: Counter[str] = Counter()
    for seed in range(FIRST, FIRST + NUM_TWICE):
        (one, _), (other, _) = search(coster_of(seed)), search(coster_of(seed))
        if one is None or other is None:
            assert one is other
            seen["nothing"] += 1
            continue
        assert (one.candidate, one.segments, one.step_s) == (
            other.candidate, other.segments, other.step_s)
        mesh, schedule = one.candidate.mesh, one.candidate.schedule
        choices = {choice for stage in one.segments for _, _, choice in stage}
        seen.update(axis for axis in ("pp", "dp_replicate", "dp_shard", "tp")
                    if mesh.degree(axis) > 1)  # type: ignore[arg-type]
        seen.update({choice.recompute for choice in choices})
        seen[schedule.name] += 1
        seen[schedule.gradient_sync] += 1
        seen["some resharded"] += len({choice.reshard for choice in choices}) > 1
        seen["some whole"] += mesh.tp > 1 and any(not c.tensor_parallel for c in choices)
    assert seen["nothing"] >= 0.15 * NUM_TWICE
    for name in ("pp", "tp", "dp_shard", "none", "selective", "full", "1f1b"):
        assert seen[name] >= 3, seen
    for name in ("dp_replicate", "interleaved", "gpipe", "each_micro_batch", "some resharded",
                 "some whole"):
        assert seen[name] >= 1, seen
