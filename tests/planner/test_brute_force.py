"""The search against brute force: small made-up instances, every layout priced.

Each instance has a model of 2 to 8 layers of unlike cost (with repeated blocks, skip connections,
tied and frozen parameters, layers that cannot be divided), 1 to 8 devices on one or two hosts or of
two kinds, and little memory. Brute force (`brute_force.py`) shares the cost functions with the
search, and nothing that bounds, cuts, fills or solves.
"""

from __future__ import annotations

from collections import Counter
from math import inf

import pytest

from planner.best_first import TOLERANCE, run_search
from planner.costing import Coster
from profiler.errors import InvalidInput
from tests.planner.brute_force import BruteForce
from tests.planner.instances import make_instance

FIRST, PER_CHUNK, CHUNKS = 1000, 20, 17
INSTANCES = range(FIRST, FIRST + PER_CHUNK * CHUNKS)


def solve(seed: int) -> tuple[float, float]:
    """(step of the search, step of brute force); inf: nothing fits, -1: nothing is legal."""
    instance = make_instance(seed)
    coster = Coster(instance.graph, instance.topology, instance.request)
    try:
        outcome = run_search(coster)
        assert outcome.complete
        searched = outcome.best.step_s if outcome.best else inf
    except InvalidInput:
        searched = -1.0
    best = BruteForce(coster, ends_stay=False).best()
    return searched, best.step_s if best.num_candidates else -1.0


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_search_equals_brute_force(chunk: int) -> None:
    start = FIRST + chunk * PER_CHUNK
    wrong = {}
    kinds: Counter[str] = Counter()
    for seed in range(start, start + PER_CHUNK):
        searched, exhaustive = solve(seed)
        kinds["none" if exhaustive == inf else "illegal" if exhaustive < 0 else "found"] += 1
        if searched != exhaustive and abs(searched - exhaustive) > TOLERANCE * abs(exhaustive):
            wrong[seed] = (searched, exhaustive)
    assert not wrong
    assert kinds["found"] and kinds["found"] < PER_CHUNK  # some fit, some do not


def test_two_searches_find_the_same() -> None:
    for seed in range(FIRST, FIRST + PER_CHUNK):
        instance = make_instance(seed)
        found = []
        for _ in range(2):
            coster = Coster(instance.graph, instance.topology, instance.request)
            try:
                best = run_search(coster).best
            except InvalidInput:
                best = None
            found.append(best and (best.candidate, best.segments, best.step_s))
        assert found[0] == found[1]
