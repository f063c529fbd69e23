"""From a request to a Layout: search, lift, price, explain.

`planner/best_first.py` searches; this makes its answer a document, with the proof and the
runners-up.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from planner import __version__
from planner.best_first import TOLERANCE, Found, Outcome, Progress, run_search
from planner.costing import Candidate, Coster
from planner.layout import (
    Alternative,
    LayerRun,
    Layout,
    Proof,
    Reference,
    Stage,
)
from planner.legality import check_legal, check_plannable, check_request, padding_notes
from planner.pricing import predict, step_terms
from planner.request import Request
from planner.topology import Topology
from profiler.documents import digest
from profiler.errors import Infeasible, InternalError, Interrupted
from profiler.layer_graph import LayerGraph

__all__ = ["Progress", "describe", "search"]

NUM_ALTERNATIVES = 5


def search(graph: LayerGraph, topology: Topology, request: Request, *,
           progress: Callable[[Progress], None] | None = None, time_limit_s: float | None = None,
           model_name: str | None = None, topology_name: str | None = None) -> Layout:
    """The fastest layout that fits, with its proof.

    Args:
        progress: called now and then with the best step time so far and the bound.
        time_limit_s: wall-clock limit; the best layout so far is then the answer, with its gap.
        model_name, topology_name: what finds the model and the topology again.

    Raises:
        InvalidInput: nothing is legal. Infeasible: nothing fits; says why and what would.
        Interrupted: stopped before there was anything.
    """
    coster = Coster(graph, topology, request)
    check_request(coster)
    check_plannable(coster)
    try:
        outcome = run_search(coster, progress=progress, time_limit_s=time_limit_s)
    except KeyboardInterrupt:
        raise Interrupted("interrupted before a first layout was found") from None
    if outcome.best is None:
        if not outcome.complete:
            raise Interrupted(f"no layout was found within {time_limit_s} s; give it more time")
        from planner.explain import diagnose  # here: most requests fit

        diagnosis = diagnose(graph, topology, request)
        raise Infeasible(f"{graph.name} does not fit on {topology.name} in any layout",
                         diagnosis)
    layout = _layout(coster, outcome.best, model_name or graph.name, topology_name or topology.name)
    check_legal(coster, layout)
    layout = predict(coster, layout)
    return replace(layout, proof=_proof(outcome, layout),
                   alternatives=_alternatives(outcome))


def _layout(coster: Coster, found: Found, model: str, topology: str) -> Layout:
    candidate, request = found.candidate, coster.request
    stages = []
    layer = 0
    for segment in found.segments:
        runs: list[LayerRun] = []
        for _, num_layers, choice in segment:
            if runs and runs[-1].choice == choice:
                runs[-1] = replace(runs[-1], num_layers=runs[-1].num_layers + num_layers)
            else:
                runs.append(LayerRun(first_layer=layer, num_layers=num_layers, choice=choice))
            layer += num_layers
        stages.append(Stage(runs=tuple(runs)))
    notes = padding_notes(coster, candidate.mesh.tp)
    if coster.graph.source.loss == "none":
        notes.append(f"{coster.graph.name} was traced without a loss: what one keeps and takes is "
                     "not counted, and that of a large vocabulary is two or three times the "
                     "logits. Return it with the model: (module, inputs, \"cross-entropy\")")
    unused = coster.topology.num_devices - candidate.mesh.num_devices
    if unused:
        notes.append(f"{unused} of {coster.topology.num_devices} devices are left unused: no "
                     "layout that uses more of them is faster")
    return Layout(
        model=Reference(name=model, digest=digest(coster.graph)),
        topology=Reference(name=topology, digest=digest(coster.topology)),
        request=request, mesh=candidate.mesh, micro_batch=candidate.micro_batch,
        num_micro_batches=candidate.num_micro_batches, schedule=candidate.schedule,
        stages=tuple(stages), notes=tuple(notes), meshwright_version=__version__)


def _proof(outcome: Outcome, layout: Layout) -> Proof:
    assert layout.prediction is not None
    step_s = layout.prediction.step_s
    assert outcome.best is not None
    if abs(step_s - outcome.best.step_s) > TOLERANCE * step_s:
        raise InternalError(f"the layout is priced at {step_s} s, the search had "
                            f"{outcome.best.step_s} s")
    bound = min(outcome.bound_s, step_s)
    return Proof(
        status="OPTIMAL" if outcome.complete else "FEASIBLE", bound_s=bound,
        gap=1 - bound / step_s, space_size=outcome.space_size, candidates=outcome.num_candidates,
        bounded=outcome.num_filled, solved=outcome.num_solved, resolution=TOLERANCE,
        solver="CP-SAT (OR-Tools)")


def describe(candidate: Candidate) -> str:
    """Degrees, micro-batch and schedule in a few words."""
    mesh = candidate.mesh
    degrees = " x ".join(f"{axis} {mesh.degree(axis)}" for axis in
                         ("pp", "dp_replicate", "dp_shard", "tp") if mesh.degree(axis) > 1)
    schedule = candidate.schedule
    name = "" if mesh.pp == 1 else f", {schedule.name}" + (
        f" x{schedule.chunks}" if schedule.chunks > 1 else "")
    return (f"{degrees or 'one device'}, micro-batch {candidate.micro_batch} "
            f"x {candidate.num_micro_batches}{name}")


def _alternatives(outcome: Outcome) -> tuple[Alternative, ...]:
    """The best of other meshes, with the term that grew most."""
    best = outcome.found[0]
    mine = step_terms(best.evaluation, best.candidate)
    seen = {_degrees(best.candidate)}
    result = []
    for found in outcome.found[1:]:
        key = _degrees(found.candidate)
        if key in seen:
            continue
        seen.add(key)
        theirs = step_terms(found.evaluation, found.candidate)
        grew = max(theirs, key=lambda name: theirs[name] - mine.get(name, 0.0))
        result.append(Alternative(
            description=describe(found.candidate), step_s=found.step_s,
            slower_by=found.step_s / best.step_s - 1,
            why=f"{grew.replace('_', ' ')} {mine.get(grew, 0.0):.3g} s -> {theirs[grew]:.3g} s"))
        if len(result) == NUM_ALTERNATIVES:
            break
    return tuple(result)


def _degrees(candidate: Candidate) -> tuple[int, ...]:
    mesh = candidate.mesh
    return mesh.pp, mesh.dp_replicate, mesh.dp_shard, mesh.tp, candidate.micro_batch
