"""The knapsack of one rank against every way to choose."""

from __future__ import annotations

import random
from itertools import combinations_with_replacement, pairwise, product
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.choices import Group, best_choices, convex_hull, price

Option = tuple[float, int, int, int, int]


def every_choice(groups: list[Group], moments: list[tuple[int, ...]], room: list[float],
                 step_room: float | None) -> float:
    """The least seconds of all choices that fit; inf if none does."""
    best = inf
    each = [combinations_with_replacement(group.options, group.count) for group in groups]
    for picked in product(*(list(options) for options in each)):
        seconds = sum(o[0] for options in picked for o in options)
        static = sum(o[1] for options in picked for o in options)
        working = max(o[3] for options in picked for o in options)
        held = [sum(o[2] for o in options) for options in picked]
        needs = [static + working + sum(moment[g.chunk] * h for g, h in
                                        zip(groups, held, strict=True)) for moment in moments]
        step = static + sum(o[4] for options in picked for o in options)
        if all(n <= r for n, r in zip(needs, room, strict=True)) and (
                step_room is None or step <= step_room):
            best = min(best, seconds)
    return best


def random_case(rng: random.Random) -> tuple[list[Group], list[tuple[int, ...]], list[float],
                                             float | None]:
    chunks = rng.choice([1, 1, 2, 3])
    sizes = rng.choice([10, 100, 10**9])

    def option() -> Option:
        return (rng.choice([rng.randint(1, 9), rng.random()]), rng.randint(0, sizes),
                rng.randint(0, sizes), rng.choice([0, sizes // 2, rng.randint(0, 2 * sizes)]),
                rng.randint(0, sizes))
    groups = [Group(rng.randint(1, 4), rng.randrange(chunks),
                    tuple(option() for _ in range(rng.randint(1, 4))))
              for _ in range(rng.randint(1, 3))]
    moments = [tuple(rng.randint(0, 4) for _ in range(chunks)) for _ in range(rng.randint(1, 3))]
    layers = sum(group.count for group in groups)
    room = [rng.uniform(0.3, 2.0) * sizes * layers * (1 + sum(moment) / chunks) / 2
            for moment in moments]
    step_room = rng.uniform(0.5, 1.5) * sizes * layers if rng.random() < 0.3 else None
    return groups, moments, room, step_room


@pytest.mark.parametrize("chunk", range(4))
def test_best_choices_equal_every_choice(chunk: int) -> None:
    nothing = 0
    for seed in range(chunk * 120, chunk * 120 + 120):
        groups, moments, room, step_room = random_case(random.Random(seed))
        least = every_choice(groups, moments, room, step_room)
        found = best_choices(groups, moments, room, step_room)
        nothing += found is None
        assert (found[0] if found else inf) == pytest.approx(least, rel=1e-12), seed
        if found:
            _check(groups, moments, room, step_room, found)
    assert 10 < nothing < 110


def _check(groups: list[Group], moments: list[tuple[int, ...]], room: list[float],
           step_room: float | None, found: tuple[float, list[list[int]]]) -> None:
    """The picks are of all layers, fit, and take the seconds they are said to take."""
    seconds, picks = found
    assert [sum(counts) for counts in picks] == [group.count for group in groups]
    fixed = tuple(
        Group(1, group.chunk, (option,)) for group, counts in zip(groups, picks, strict=True)
        for option, count in zip(group.options, counts, strict=True) for _ in range(count))
    assert every_choice(list(fixed), moments, room, step_room) == pytest.approx(seconds)


def test_by_hand() -> None:
    # Two layers; the slow choice saves 6 of 10 bytes: one of them must be slow in 15.
    group = Group(2, 0, ((1.0, 0, 10, 0, 0), (3.0, 0, 4, 0, 0)))
    assert best_choices([group], [(1,)], [20]) == (2.0, [[2, 0]])
    assert best_choices([group], [(1,)], [15]) == (4.0, [[1, 1]])
    assert best_choices([group], [(1,)], [8]) == (6.0, [[0, 2]])
    assert best_choices([group], [(1,)], [7]) is None
    # Twice as many in flight need twice the room.
    assert best_choices([group], [(2,)], [30]) == (4.0, [[1, 1]])


def test_one_working_set_is_held_however_many_layers_need_it() -> None:
    group = Group(3, 0, ((1.0, 1, 0, 50, 0), (2.0, 2, 0, 0, 0)))
    assert best_choices([group], [(1,)], [53]) == (3.0, [[3, 0]])
    # No room for it, so that no layer may need it.
    assert best_choices([group], [(1,)], [52]) == (6.0, [[0, 3]])


def test_the_optimizer_step_holds_temporaries_and_nothing_in_flight() -> None:
    group = Group(2, 0, ((1.0, 10, 100, 0, 10), (2.0, 5, 100, 0, 5)))
    assert best_choices([group], [(1,)], [1000], 40) == (2.0, [[2, 0]])
    assert best_choices([group], [(1,)], [1000], 30) == (3.0, [[1, 1]])
    assert best_choices([group], [(1,)], [1000], 19) is None


POINTS = st.lists(st.tuples(st.integers(0, 50).map(float), st.integers(0, 50).map(float)),
                  min_size=1, max_size=12)


@given(POINTS, st.floats(0, 10))
def test_hull_has_the_best_point_at_every_price(points: list[tuple[float, float]],
                                                per_byte: float) -> None:
    hull = convex_hull(points)
    assert set(hull) <= set(points)
    assert min(s + per_byte * b for s, b in hull) == pytest.approx(
        min(s + per_byte * b for s, b in points))
    assert all(a[0] < b[0] and a[1] > b[1] for a, b in pairwise(hull))
    prices = [price(a, b) for a, b in pairwise(hull)]
    assert all(a < b for a, b in pairwise(prices))
