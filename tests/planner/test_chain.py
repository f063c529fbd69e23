"""Runs of equal layers, and what each cut carries."""

from __future__ import annotations

import random

import pytest

from planner.chain import make_chain
from planner.costing import Coster
from profiler.layer_graph import Edge, Extent, Layer, LayerGraph, LayerKind, Parameter, Tie
from tests.planner.brute_force import BruteForce
from tests.planner.instances import make_instance, per_token

KIND = LayerKind(parameters=(Parameter(name="w", shape=(4, 4)),))
THIN, WIDE = per_token(64), per_token(512)


def graph(kinds: str, *edges: Edge, ties: tuple[Tie, ...] = ()) -> LayerGraph:
    """One layer a letter, which names its kind; a thin tensor from each to the next."""
    chain = tuple(Edge(source=i, target=i + 1, tensor="out", elements=THIN)
                  for i in range(len(kinds) - 1))
    return LayerGraph(name="toy", kinds=dict.fromkeys(kinds, KIND),
                      layers=tuple(Layer(name=str(i), kind=letter)
                                   for i, letter in enumerate(kinds)),
                      edges=chain + edges, ties=ties)


def counts(made: LayerGraph) -> list[tuple[str, int]]:
    return [(run.kind, run.count) for run in make_chain(made).runs]


def skip(source: int, target: int, **changes: object) -> Edge:
    return Edge(source=source, target=target, tensor="skip", elements=WIDE,
                **changes)  # type: ignore[arg-type]


def test_equal_neighbours_are_one_run() -> None:
    chain = make_chain(graph("abbbcb"))
    assert [(r.kind, r.first, r.count) for r in chain.runs] == [
        ("a", 0, 1), ("b", 1, 3), ("c", 4, 1), ("b", 5, 1)]
    assert chain.num_layers == 6
    assert chain.block_run == 1


def test_the_first_layer_has_no_input_and_stands_alone() -> None:
    # A checkpoint of it keeps less than one of the others.
    assert counts(graph("bbb")) == [("b", 1), ("b", 2)]
    runs = make_chain(graph("bbb")).runs
    assert (runs[0].input, runs[1].input) == (Extent(), THIN)


def test_a_skip_is_carried_by_every_cut_under_it() -> None:
    chain = make_chain(graph("abbbbb", skip(1, 4)))
    thin, both = [(THIN, None)], [(THIN, None), (WIDE, None)]
    carried = [list(chain.crossing_before(end).forward) for end in range(1, 6)]
    assert carried == [thin, both, both, both, thin]
    assert [run.count for run in chain.runs] == [1, 3, 1, 1]


def test_a_tensor_with_many_readers_is_sent_once() -> None:
    readers = (skip(0, 2), skip(0, 3), skip(0, 4))
    chain = make_chain(graph("abbbc", *readers))
    assert len(chain.crossing_before(1).forward) == 2
    assert [len(chain.crossing_before(end).forward) for end in (2, 3, 4)] == [2, 2, 2]
    # It is one storage, which no layer alone keeps.
    assert all(run.input == THIN for run in chain.runs[1:])


def test_equal_crossings_are_equal_in_any_order_of_their_tensors() -> None:
    # Layer 1 makes the skip after its output; from layer 2 on the skip is the older one.
    chain = make_chain(graph("abbbb", skip(1, 4)))
    assert chain.crossing_before(2) == chain.crossing_before(3)


def test_what_needs_no_gradient_comes_back_with_none() -> None:
    crossing = make_chain(graph("abc", skip(0, 2, has_gradient=False, bytes_per_element=8))
                          ).crossing_before(1)
    forward, backward = crossing.bytes_at(2, 10, 2)
    assert forward == 2 * 10 * (64 * 2 + 512 * 8)
    assert backward == 2 * 10 * 64 * 2


def test_tied_layers_stand_alone() -> None:
    tie = Tie(places=((0, "w"), (3, "w")))
    chain = make_chain(graph("abbbc", ties=(tie,)))
    assert [run.count for run in chain.runs] == [1, 2, 1, 1]
    assert [run.tied for run in chain.runs] == [((0, "w"),), (), ((0, "w"),), ()]
    assert chain.tied_places == (tie.places,)


def test_there_is_no_cut_outside() -> None:
    chain = make_chain(graph("abc"))
    for layer in (0, 3, 7):
        with pytest.raises(IndexError, match=f"no cut before layer {layer} of 3"):
            chain.crossing_before(layer)


@pytest.mark.parametrize(("kinds", "pp", "chunks"), [
    ("a" + "b" * 8 + "c", 2, [2, 4]), ("a" + "b" * 8, 4, [2]), ("a" + "b" * 8, 3, []),
    ("a" + "b" * 12, 3, [2, 4]), ("a" + "b" * 7, 7, []), ("abbcbb", 2, []), ("abc", 2, [])])
def test_interleaving_needs_equally_many_blocks_a_stage(kinds: str, pp: int, chunks: list[int]
                                                        ) -> None:
    assert make_chain(graph(kinds)).chunks(pp) == chunks


@pytest.mark.parametrize("seed", range(0, 200, 5))
def test_runs_cover_the_layers_and_cuts_carry_what_is_alive(seed: int) -> None:
    instance = make_instance(seed)
    made, chain = instance.graph, make_chain(instance.graph)
    assert [run.kind for run in chain.runs for _ in range(run.count)] == [
        layer.kind for layer in made.layers]
    assert [run.first for run in chain.runs] == [
        sum(run.count for run in chain.runs[:r]) for r in range(len(chain.runs))]
    space = BruteForce(Coster(made, instance.topology, instance.request))
    rng = random.Random(seed)
    for end in range(1, len(made.layers)):
        b, s = rng.randint(1, 8), rng.randint(1, 100)
        assert chain.crossing_before(end).bytes_at(b, s, 2) == space.crossings[
            end - 1].bytes_at(b, s, 2)
