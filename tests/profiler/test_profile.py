"""The Profile and Links documents: strict, round trip, fits and interpolation by hand."""

from __future__ import annotations

from typing import Any

import pytest

from profiler.documents import dump, parse, to_data
from profiler.errors import InvalidInput
from profiler.layer_graph import Extent, Layer, LayerGraph, LayerKind, Op
from profiler.links import LinkFit, LinkPoint, Links, fit_line
from profiler.measure_links import GroupShape, jumps, shapes_of
from profiler.profile import LayerSeconds, Profile
from profiler.timing import Budget, Samples, median_error, repeat_until_settled, spread


def row(**changes: Any) -> LayerSeconds:
    return LayerSeconds(**{"kind": "block", "micro_batch": 1, "seq_len": 128, "forward_s": 1.0,
                           "backward_s": 2.0, "recompute_selective_s": 0.5, "recompute_full_s": 1.0,
                           "spread": 0.01, "num_repeats": 5} | changes)


def graph(*rows: LayerSeconds) -> LayerGraph:
    profile = Profile(device="cpu", dtype="float32", hardware="here", versions={},
                      date="2000-01-01", layers=rows)
    work = Extent(per_sample=(0, 1000, 0))
    kind = LayerKind(ops=(Op(name="up", kind="matmul", split="column", flops=work,
                             backward_flops=work),))
    return LayerGraph(name="toy", kinds={"block": kind}, profiles=(profile,),
                      layers=(Layer(name="0", kind="block"),))


def test_a_profile_survives_its_document() -> None:
    made = graph(row(), row(micro_batch=2))
    assert parse(LayerGraph, to_data(made), "here") == made
    assert '"profiles"' not in dump(LayerGraph(name="a", kinds=made.kinds, layers=made.layers))


@pytest.mark.parametrize(("change", "message"), [
    ({"kind": "other"}, "not in `kinds`"), ({"forward_s": -1.0}, "greater than or equal to 0"),
    ({"seconds": 1.0}, "unknown key"), ({"micro_batch": 0}, "greater than or equal to 1"),
    ({"forward_s": float("nan")}, "finite"), ({"spread": None}, "valid number")])
def test_a_profile_is_validated(change: dict[str, Any], message: str) -> None:
    data = to_data(graph(row()))
    data["profiles"][0]["layers"][0] |= change
    with pytest.raises(InvalidInput, match=message):
        parse(LayerGraph, data, "here")


def test_a_size_is_measured_once() -> None:
    with pytest.raises(ValueError, match="given twice"):
        graph(row(), row(forward_s=3.0))


def points(*pairs: tuple[int, float]) -> tuple[LinkPoint, ...]:
    return tuple(LinkPoint(num_bytes=size, low_s=seconds, median_s=seconds, num_repeats=5)
                 for size, seconds in pairs)


def test_a_line_is_found_through_its_points() -> None:
    sizes = (2**10, 2**14, 2**18, 2**20, 2**22, 2**24)
    latency, slope, error = fit_line(points(*((s, 3e-4 + s * 2e-9) for s in sizes)))
    assert latency == pytest.approx(3e-4)
    assert slope == pytest.approx(2e-9)
    assert error == pytest.approx(0, abs=1e-9)


def test_a_line_has_neither_negative_latency_nor_negative_bandwidth() -> None:
    latency, slope, _ = fit_line(points((2**20, 1e-3), (2**21, 4e-3), (2**22, 1.6e-2)))
    assert latency == 0
    assert slope > 0
    latency, slope, _ = fit_line(points((2**20, 3e-3), (2**21, 2e-3), (2**22, 1e-3)))
    assert (latency, slope) == (2e-3, 0)


def test_one_strange_size_does_not_turn_the_line() -> None:
    sizes = [2**k for k in range(10, 26, 1)]
    true = {size: 3e-4 + size * 2e-9 for size in sizes}
    latency, slope, error = fit_line(points(*((s, t * (4 if s == 2**22 else 1))
                                              for s, t in true.items())))
    assert latency == pytest.approx(3e-4)
    assert slope == pytest.approx(2e-9)
    assert error == pytest.approx(0.75, abs=0.01)


def test_short_messages_count_by_their_low_percentile_and_long_ones_by_their_median() -> None:
    made = [LinkPoint(num_bytes=size, low_s=1.0, median_s=2.0, num_repeats=5)
            for size in (2**20 - 1, 2**20)]
    assert [point.seconds for point in made] == [1.0, 2.0]


def test_sizes_are_added_where_the_seconds_jump() -> None:
    made = points((2**20, 1.0), (2**21, 2.0), (2**22, 6.0), (2**23, 12.0))
    assert jumps(made) == [3 * 2**20]
    assert jumps(points((2**10, 1.0), (2**12, 99.0))) == []  # short ones are latency


def test_seconds_follow_the_points_and_then_the_line() -> None:
    fit = LinkFit(collective="all_reduce", group_size=2, latency_s=1e-4, s_per_byte=1e-9, error=0.0,
                  points=points((1024, 2e-4), (2048, 4e-4)))
    assert fit.seconds(1) == 2e-4
    assert fit.seconds(1536) == pytest.approx(3e-4)
    assert fit.seconds(2048 + 10**6) == pytest.approx(4e-4 + 1e-3)
    assert fit.is_measured(1536)
    assert not fit.is_measured(4096)


def test_links_survive_their_document() -> None:
    fit = LinkFit(collective="send", group_size=2, latency_s=1e-4, s_per_byte=1e-9, error=0.0,
                  points=points((1024, 2e-4), (2048, 4e-4)))
    links = Links(hardware="here", backend="gloo", versions={"torch": "2"}, date="2000-01-01",
                  processes_per_host=2, fits=(fit,), overlap_slowdown=1.5)
    assert parse(Links, to_data(links), "here") == links
    data = to_data(links)
    data["fits"][0]["points"].reverse()
    with pytest.raises(InvalidInput, match="must increase"):
        parse(Links, data, "here")


@pytest.mark.parametrize(("world", "per_host", "expected"), [
    (2, 2, {(2, 1, 1)}), (2, 1, {(2, 2, 1)}),
    (4, 4, {(2, 1, 1), (2, 1, 2), (4, 1, 1)}),
    (4, 2, {(2, 1, 1), (2, 2, 1), (2, 2, 2), (4, 2, 1)})])
def test_groups_of_every_shape_are_timed(world: int, per_host: int,
                                         expected: set[tuple[int, int, int]]) -> None:
    shapes = shapes_of(world, per_host)
    assert {(s.size, *s.hosts(per_host)) for s in shapes} == expected
    for shape in shapes:
        ranks = [rank for group in shape.groups(world) for rank in group]
        assert len(set(ranks)) == len(ranks) == (shape.size if shape.alone else world)


def test_members_lie_a_stride_apart() -> None:
    assert GroupShape(2, 2, False).groups(4) == [[0, 2], [1, 3]]
    assert GroupShape(2, 1, True).groups(4) == [[0, 1]]


def test_repeats_go_on_until_the_median_is_known() -> None:
    steady, settled = repeat_until_settled(lambda: {"a": 1.0}, ("a",), Budget(warm_up=0))
    assert (len(steady.parts["a"]), settled) == (5, True)
    values = iter(range(1, 1000))
    loose, settled = repeat_until_settled(lambda: {"a": float(next(values))}, ("a",),
                                          Budget(warm_up=0, most=12))
    assert (len(loose.parts["a"]), settled) == (12, False)


def test_differences_are_of_pairs() -> None:
    samples = Samples()
    for slow in (1.0, 10.0, 1.0):  # a disturbance that holds for one repeat
        samples.add(a=slow, b=slow + 0.5)
    assert samples.difference("b", "a") == pytest.approx(0.5)
    assert samples.difference("a", "b") == 0.0
    assert samples.total(("a", "b")) == [2.5, 20.5, 2.5]


def test_spread_by_hand() -> None:
    values = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]
    assert spread(values) == pytest.approx((7 - 3) / 4.5)
    assert median_error(values) == pytest.approx(0.93 * (4 / 4.5) / 8**0.5)
