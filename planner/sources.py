"""How each term of a prediction was obtained, and how much of the step was measured.

Memory that has no entry of its own (parameters, gradients, states) is as traced.

A term is measured if all in it is, extrapolated if some of it lies outside the measured sizes,
analytic if nothing of it was measured, and otherwise a mixture, with its measured share.
"""

from __future__ import annotations

from collections.abc import Iterable

from planner.cost.compute import Source
from planner.costing import Candidate, Coster
from planner.layout import Choice, Layout
from planner.topology_groups import Edge, Span
from profiler.links import Collective

__all__ = ["measured_sources"]

Shares = dict[str, float]
"""Seconds by source."""

_COMPUTE = ("forward_compute", "backward_compute", "recompute")


def measured_sources(coster: Coster, layout: Layout, candidate: Candidate,
                     terms_s: dict[str, float]) -> tuple[dict[str, str], float]:
    """(source of each term, share of the step's time that is measured)."""
    if coster.links is None and all(layers.profile is None for layers in coster.measured):
        return {"compute": "analytic", "collectives": "analytic", "memory": "traced"}, 0.0
    compute = _compute(coster, layout, candidate)
    shares: dict[str, Shares] = dict.fromkeys(_COMPUTE, compute)
    shares |= _links(coster, layout, candidate)
    updates = [coster.measured[g].update(coster.request) for g in range(len(coster.topology.hosts))]
    update: Source = "measured" if all(u is not None for u in updates) else "analytic"
    shares |= {name: {update: 1.0} for name in ("optimizer_step", "gradient_norm")}
    shares["stage_frame"] = {"measured": 1.0}  # priced only where it is measured
    running = [name for name in (*_COMPUTE, "tensor_parallel_collectives", "parameter_gather",
                                 "pipeline_receive", "stage_frame") if terms_s.get(name)]
    shares["pipeline_bubble"] = _mixed((terms_s[name], shares[name]) for name in running)
    sources = _memory(coster, layout, candidate)
    measured = 0.0
    for name, seconds in terms_s.items():
        found = _normal(shares.get(name, {"analytic": 1.0}))
        sources[name] = _words(found)
        measured += seconds * found.get("measured", 0.0)
    total = sum(terms_s.values())
    return sources, measured / total if total > 0 else 0.0


def _compute(coster: Coster, layout: Layout, candidate: Candidate) -> Shares:
    """Of all layers on their ranks, by the seconds of each."""
    shares: Shares = {}
    classes, class_of = coster.contexts(layout.mesh)
    for number, stage in enumerate(layout.stages):
        groups = classes[class_of[number % layout.mesh.pp]].device_groups
        for layer, choice in stage.iter_layers():
            shard = coster.shard(candidate.micro_batch, layout.mesh.tp, choice)
            times = coster.compute(coster.graph.layers[layer].kind, shard, groups)
            shares[times.source] = (shares.get(times.source, 0.0)
                                    + times.forward_s + times.backward_s)
    return shares


def _memory(coster: Coster, layout: Layout, candidate: Candidate) -> dict[str, str]:
    """Of the terms of memory: activations by the bytes of all layers on their ranks."""
    shares: Shares = {}
    for stage in layout.stages:
        for layer, choice in stage.iter_layers():
            shard = coster.shard(candidate.micro_batch, layout.mesh.tp, choice)
            kind = coster.graph.layers[layer].kind
            how = "measured" if coster.has_measured_memory(kind, shard) else "traced"
            held = coster.activations_of(kind, choice.recompute, shard)
            shares[how] = shares.get(how, 0.0) + held.saved_bytes + held.working_set_bytes
    contexts = {layers.context_bytes is not None for layers in coster.measured}
    return {"memory": "traced", "activations": _words(_normal(shares)),
            "working_set": _words(_normal(shares)),
            "optimizer_temporaries": "analytic" if coster.temporary_bytes is None else "measured",
            "context": "measured" if contexts == {True} else "device file"}


def _links(coster: Coster, layout: Layout, candidate: Candidate) -> dict[str, Shares]:
    """Of the collectives, judged by the sizes that the layers exchange most."""
    mesh, size = layout.mesh, coster.request.bytes
    context = coster.contexts(mesh)[0][0]
    group = context.group
    busiest = max(coster.chain.runs, key=lambda run: run.count)
    kind = coster.graph.kinds[busiest.kind]
    shard = coster.shard(candidate.micro_batch, mesh.tp, Choice())
    ports = (*kind.tensor_parallel.entries, *kind.tensor_parallel.exits) if (
        kind.tensor_parallel) else (busiest.input,)
    activation = max((port.at(shard.micro_batch, shard.seq_len) for port in ports), default=0)
    parameters = kind.num_parameters // max(1, shard.tp)
    reduced = parameters * size.reduce_bytes
    found = {
        "tensor_parallel_collectives": _span(
            group.tp, activation * size.compute_bytes,
            ("all_gather", "reduce_scatter") if shard.sequence_parallel else ("all_reduce",)),
        # of replicas: copies, which are priced only where they are measured
        "parameter_gather": {"measured": 1.0} if mesh.dp_shard == 1 else _span(
            group.shard, parameters * size.compute_bytes, ("all_gather",)),
        "gradient_reduction": _span(group.shard, reduced, ("reduce_scatter",)) if (
            mesh.dp_shard > 1) else _span(group.replicate, reduced, ("all_reduce",)),
        "norm_latency": _mixed((1.0, _span(span, 4, ("all_reduce",)))
                               for span in (group.tp, group.shard, group.replicate)
                               if span.size > 1)}
    if mesh.pp > 1:
        edge = coster.placement(mesh).pipeline_edge(mesh.stride("pp"), degree=mesh.pp,
                                                    wrap=layout.schedule.chunks > 1)
        crossing = coster.chain.crossing_before(layout.stages[1].first_layer)
        sent, _ = crossing.bytes_at(candidate.micro_batch, coster.seq_len, size.compute_bytes)
        found["pipeline_receive"] = found["tied_reduction"] = _edge(edge, sent)
    return found


def _span(span: Span, num_bytes: float, collectives: tuple[Collective, ...]) -> Shares:
    if span.fits is None:
        return {"analytic": 1.0}
    return _mixed((1.0, {span.fits.source(c, num_bytes): 1.0}) for c in collectives)


def _edge(edge: Edge, num_bytes: float) -> Shares:
    return {"analytic" if edge.fits is None else edge.fits.source("send", num_bytes): 1.0}


def _normal(shares: Shares) -> Shares:
    total = sum(shares.values())
    return {name: value / total for name, value in shares.items()} if total else {"analytic": 1.0}


def _mixed(parts: Iterable[tuple[float, Shares]]) -> Shares:
    result: Shares = {}
    for weight, shares in parts:
        for name, value in _normal(shares).items():
            result[name] = result.get(name, 0.0) + weight * value
    return result


def _words(shares: Shares) -> str:
    if len(shares) == 1:
        return next(iter(shares))
    return ", ".join(f"{value:.0%} {name}" for name, value in
                     sorted(shares.items(), key=lambda item: -item[1]))
