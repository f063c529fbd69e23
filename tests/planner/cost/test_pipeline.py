"""Pipeline schedules: orders that can run, closed forms against the replay, what is in flight."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.capabilities import ScheduleName
from planner.cost.pipeline import (
    TimelineEvent,
    first_moment,
    in_flight,
    operations,
    pipeline_seconds,
    replay,
)

Case = tuple[ScheduleName, int, int, int]
"""(schedule, p, v, m)"""

CASES: list[Case] = [
    *(("gpipe", p, 1, m) for p in (1, 2, 3, 4, 7) for m in (1, 2, 3, 8)),
    *(("1f1b", p, 1, m) for p in (1, 2, 3, 4, 7) for m in (1, 2, 3, 8, 13)),
    *(("interleaved", p, v, p * rounds) for p in (2, 3, 4, 6) for v in (2, 3, 5)
      for rounds in (1, 2, 3))]


def held_over_time(case: Case, rank: int) -> set[tuple[int, ...]]:
    """Micro-batches of each chunk that a rank holds, after each of its operations."""
    schedule, p, v, m = case
    held, seen = [0] * v, set()
    for forward, _, chunk in operations(schedule, p, v, m, rank):
        held[chunk] += 1 if forward else -1
        seen.add(tuple(held))
    assert held == [0] * v
    return seen


def below(a: tuple[int, ...], b: tuple[int, ...]) -> bool:
    return all(x <= y for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("case", CASES)
def test_every_operation_once_and_forward_first(case: Case) -> None:
    schedule, p, v, m = case
    for rank in range(p):
        order = operations(schedule, p, v, m, rank)
        assert len(order) == len(set(order)) == 2 * m * v
        assert {(i, c) for _, i, c in order} == {(i, c) for i in range(m) for c in range(v)}
        for i in range(m):
            for c in range(v):
                assert order.index((True, i, c)) < order.index((False, i, c))


@pytest.mark.parametrize("case", CASES)
def test_closed_form_is_the_replay_of_equal_stages(case: Case) -> None:
    schedule, p, v, m = case
    stages = p * v
    closed = pipeline_seconds(schedule, v, m, [3.0 * v] * p, [5.0 * v] * p)
    assert closed == pytest.approx(replay(schedule, p, v, m, [3.0] * stages, [5.0] * stages))


@given(st.sampled_from(CASES), st.data())
def test_replay_of_any_stages_ends_and_is_no_faster_than_its_work(case: Case, data: st.DataObject
                                                                  ) -> None:
    schedule, p, v, m = case
    seconds = st.lists(st.floats(0.1, 10), min_size=p * v, max_size=p * v)
    forward, backward = data.draw(seconds), data.draw(seconds)
    events: list[TimelineEvent] = []
    total = replay(schedule, p, v, m, forward, backward, events)
    assert len(events) == 2 * p * v * m
    busiest = max(m * sum(forward[k] + backward[k] for k in range(r, p * v, p)) for r in range(p))
    assert total >= busiest - 1e-9
    assert total >= sum(forward) + sum(backward) - 1e-9  # one micro-batch through all stages
    _check_timeline(case, events, forward, backward)


def _check_timeline(case: Case, events: list[TimelineEvent], forward: list[float],
                    backward: list[float]) -> None:
    """No rank does two things at once, and nothing starts before what it needs."""
    _, p, v, _ = case
    done = {(e.forward, e.micro_batch, e.chunk * p + e.rank): e for e in events}
    for (is_forward, micro_batch, stage), event in done.items():
        took = (forward if is_forward else backward)[stage]
        assert event.end_s - event.start_s == pytest.approx(took)
        if is_forward and stage:
            assert event.start_s >= done[True, micro_batch, stage - 1].end_s
        if not is_forward:
            needs = (False, micro_batch, stage + 1) if stage + 1 < p * v else (
                True, micro_batch, stage)
            assert event.start_s >= done[needs].end_s
    for rank in range(p):
        mine = sorted((e.start_s, e.end_s) for e in events if e.rank == rank)
        assert all(a[1] <= b[0] + 1e-12 for a, b in pairwise(mine))


def stages_of(data: st.DataObject, p: int) -> list[float]:
    return data.draw(st.lists(st.floats(0.1, 10), min_size=p, max_size=p))


@given(st.sampled_from([case for case in CASES if case[0] == "gpipe"]), st.data())
def test_the_closed_form_of_gpipe_is_exact_for_any_stages(case: Case, data: st.DataObject) -> None:
    schedule, p, v, m = case
    forward, backward = stages_of(data, p), stages_of(data, p)
    assert pipeline_seconds(schedule, v, m, forward, backward) == pytest.approx(
        replay(schedule, p, v, m, forward, backward))


@given(st.sampled_from([case for case in CASES if case[0] == "1f1b"]), st.data(),
       st.floats(0.5, 4))
def test_the_closed_form_of_1f1b_is_never_too_fast(case: Case, data: st.DataObject, ratio: float
                                                   ) -> None:
    """Where backward takes as many times as long as forward on every stage. It can be too fast
    where one stage is slowest forward and another backward."""
    schedule, p, v, m = case
    forward = stages_of(data, p)
    backward = [ratio * seconds for seconds in forward]
    closed = pipeline_seconds(schedule, v, m, forward, backward)
    assert replay(schedule, p, v, m, forward, backward) <= closed * (1 + 1e-9)


@pytest.mark.parametrize(("p", "v", "m"), [(2, 2, 4), (8, 4, 8), (8, 4, 16), (4, 2, 12)])
@pytest.mark.parametrize("head_s", [0.5, 1.0, 3.0])
def test_interleaving_with_a_head_on_the_last_stage(p: int, v: int, m: int, head_s: float) -> None:
    """Equally many blocks a stage, and more on the last: the closed form is exact here too."""
    forward, backward = [1.0] * (p * v), [2.0] * (p * v)
    forward[-1] += head_s
    backward[-1] += 2 * head_s
    closed = pipeline_seconds("interleaved", v, m, [sum(forward[r::p]) for r in range(p)],
                              [sum(backward[r::p]) for r in range(p)])
    assert closed == pytest.approx(replay("interleaved", p, v, m, forward, backward))


@pytest.mark.parametrize("case", CASES)
def test_in_flight_is_what_the_operations_hold(case: Case) -> None:
    schedule, p, v, m = case
    for rank in range(p):
        held = held_over_time(case, rank)
        peaks = in_flight(schedule, p, v, m, rank)
        assert set(peaks) <= held
        assert all(any(below(moment, peak) for peak in peaks) for moment in held)
        assert not any(a != b and below(a, b) for a in peaks for b in peaks)


@pytest.mark.parametrize("case", CASES)
def test_first_moment_is_held_when_warm_up_ends(case: Case) -> None:
    schedule, p, v, m = case
    for rank in range(p):
        moment = first_moment(schedule, p, v, m, rank)
        held = [0] * v
        for forward, _, chunk in operations(schedule, p, v, m, rank):
            if not forward:
                break
            held[chunk] += 1
        assert moment == tuple(held)


def test_in_flight_by_hand() -> None:
    assert [in_flight("1f1b", 4, 1, 8, rank) for rank in range(4)] == [
        ((4,),), ((3,),), ((2,),), ((1,),)]
    assert in_flight("1f1b", 4, 1, 2, 0) == ((2,),)
    assert in_flight("gpipe", 4, 1, 8, 3) == ((8,),)
    # Two ranks of two chunks, four micro-batches. The last rank warms up with 2 forwards of its
    # first chunk, does one of the second and its backward; then the second of both, ...
    assert first_moment("interleaved", 2, 2, 4, 1) == (2, 1)
    assert first_moment("interleaved", 2, 2, 4, 0) == (3, 2)


def test_interleaving_by_hand() -> None:
    # Warm-up of rank 0 of 2 with 2 chunks: 2 * (2 - 1 - 0) + (2 - 1) * 2 = 4 forwards.
    order = operations("interleaved", 2, 2, 2, 0)
    assert order == [(True, 0, 0), (True, 1, 0), (True, 0, 1), (True, 1, 1),
                     (False, 0, 1), (False, 1, 1), (False, 0, 0), (False, 1, 0)]


def test_bubbles_by_hand() -> None:
    # 4 ranks, 8 micro-batches of 1 s forward and 2 s backward: 24 s of work, 3 x 3 s of bubble.
    one, two = [1.0] * 4, [2.0] * 4
    assert pipeline_seconds("1f1b", 1, 8, one, two) == 33
    assert pipeline_seconds("gpipe", 1, 8, one, two) == 33
    assert pipeline_seconds("interleaved", 3, 8, one, two) == pytest.approx(24 + 9 / 3)
    # One rank has none.
    assert pipeline_seconds("1f1b", 1, 8, [1.0], [2.0]) == 24


def test_gpipe_waits_for_the_slowest_forward_and_the_slowest_backward() -> None:
    # Forward is slowest on rank 0, backward on rank 1.
    forward, backward = [3.0, 1.0], [1.0, 4.0]
    assert pipeline_seconds("gpipe", 1, 5, forward, backward) == 4 * (3 + 4) + 9
    assert replay("gpipe", 2, 1, 5, forward, backward) == 4 * (3 + 4) + 9
    assert pipeline_seconds("1f1b", 1, 5, forward, backward) == 4 * 5 + 9
