"""Whether a layout is legal for its model, devices and executor: every violation at once."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from planner.costing import Coster
from planner.division import divisible
from planner.layout import AXES, Axis, Layout, Mesh
from planner.space import (
    divisors,
    legal_tensor_degrees,
    model_limits,
    needs_one_micro_batch,
)
from profiler.errors import InvalidInput, UnsupportedLayout

__all__ = ["check_legal", "check_plannable", "check_request", "padding_notes", "violations"]

MOST_PRODUCTS = 6
"""Legal products of degrees that a message lists."""

UNSUPPORTED: tuple[Axis, ...] = ("cp", "ep")
"""Axes that no executor runs yet."""


def check_request(coster: Coster) -> None:
    """Refuse a request that no layout can meet, whatever the devices.

    Raises:
        InvalidInput: a sequence longer than the model allows, or of another length than it has.
    """
    graph, seq_len = coster.graph, coster.request.seq_len
    if graph.max_seq_len is not None and seq_len > graph.max_seq_len:
        raise InvalidInput(f"sequence length {seq_len}: {graph.name} allows at most "
                           f"{graph.max_seq_len}")
    if graph.fixed_seq_len is not None and seq_len != graph.fixed_seq_len:
        raise InvalidInput(f"sequence length {seq_len}: {graph.name} was traced at "
                           f"{graph.fixed_seq_len} and has no other")


def check_plannable(coster: Coster) -> None:
    """Refuse a request for which no layout would run on its target.

    Raises:
        InvalidInput: a precision that the target has not.
    """
    capabilities, precision = coster.capabilities, coster.request.precision
    if precision not in capabilities.precisions:
        raise InvalidInput(f"precision {precision}: {capabilities.target} runs "
                           f"{', '.join(capabilities.precisions)}")


def check_legal(coster: Coster, layout: Layout) -> None:
    """Raise UnsupportedLayout with every violation of a layout."""
    problems = violations(coster, layout)
    if problems:
        raise UnsupportedLayout(problems)


def violations(coster: Coster, layout: Layout) -> list[str]:
    """What is illegal about a layout; empty if it is legal."""
    structural = _mesh(coster, layout) + _batch(layout) + _schedule(coster, layout)
    covering = _stages(coster, layout)
    problems = structural + covering
    if not covering:
        problems += _choices(coster, layout)
    return problems


def _mesh(coster: Coster, layout: Layout) -> list[str]:
    mesh, topology, problems = layout.mesh, coster.topology, []
    factors = " x ".join(f"{axis} {mesh.degree(axis)}" for axis in AXES if mesh.degree(axis) > 1)
    if mesh.num_devices > topology.num_devices:
        legal = _products(mesh, topology.num_devices)
        problems.append(f"mesh {factors} = {mesh.num_devices} devices; {topology.name} has "
                        f"{topology.num_devices}: " + (f"legal products: {'; '.join(legal)}"
                                                       if legal else "lower one of the degrees"))
    for axis in UNSUPPORTED:
        if mesh.degree(axis) > 1:
            problems.append(f"{axis} {mesh.degree(axis)}: only 1 is supported")
    groups = mesh.host_groups
    if groups and sorted(groups) != list(range(len(topology.hosts))):
        problems.append(f"host_groups {list(groups)} is not an order of the "
                        f"{len(topology.hosts)} host groups of {topology.name}")
    return problems


def _products(mesh: Mesh, num_devices: int) -> list[str]:
    """Degrees of the mesh's axes, none above what was asked, that use all the devices."""
    axes = [axis for axis in AXES if mesh.degree(axis) > 1 and axis not in UNSUPPORTED]

    def factors(rest: int, index: int) -> Iterator[tuple[int, ...]]:
        if index == len(axes):
            if rest == 1:
                yield ()
            return
        for degree in reversed(divisors(rest)):
            if degree <= mesh.degree(axes[index]):
                yield from ((degree, *others) for others in factors(rest // degree, index + 1))

    return [" x ".join(f"{axis} {degree}" for axis, degree in zip(axes, found, strict=True))
            for found in islice(factors(num_devices, 0), MOST_PRODUCTS)]


def _batch(layout: Layout) -> list[str]:
    request, mesh = layout.request, layout.mesh
    product = mesh.dp * layout.micro_batch * layout.num_micro_batches
    if product == request.global_batch:
        return []
    legal = [str(m) for m in divisors(request.global_batch)
             if mesh.dp * m <= request.global_batch
             and request.global_batch % (mesh.dp * m) == 0]
    hint = (f"with data-parallel degree {mesh.dp}, micro_batch x num_micro_batches must be "
            f"{request.global_batch // mesh.dp}; legal micro_batch: {', '.join(legal[:20])}"
            if request.global_batch % mesh.dp == 0 else
            f"data-parallel degree {mesh.dp} does not divide it; its divisors: "
            f"{', '.join(map(str, divisors(request.global_batch)[:20]))}")
    return [f"global batch {request.global_batch} is not dp_replicate {mesh.dp_replicate} x "
            f"dp_shard {mesh.dp_shard} x micro_batch {layout.micro_batch} x num_micro_batches "
            f"{layout.num_micro_batches} = {product}: {hint}"]


def _schedule(coster: Coster, layout: Layout) -> list[str]:
    capabilities, schedule = coster.capabilities, layout.schedule
    pp, m, chunks = layout.mesh.pp, layout.num_micro_batches, schedule.chunks
    problems = []
    if schedule.name not in capabilities.schedules:
        problems.append(f"schedule {schedule.name!r}: {capabilities.target} runs "
                        f"{', '.join(capabilities.schedules)}")
    if (schedule.name == "interleaved") != (chunks > 1):
        problems.append(f"schedule {schedule.name!r} with {chunks} chunks: interleaved has 2 or "
                        "more, the others 1")
    if schedule.name == "interleaved" and pp == 1:
        problems.append("schedule 'interleaved' with pp 1: it needs 2 pipeline ranks or more")
    if schedule.name == "1f1b" and m < pp and capabilities.min_micro_batches_1f1b == "stages":
        problems.append(f"schedule '1f1b' with {m} micro-batches on {pp} stages: "
                        f"{capabilities.target} needs as many micro-batches as stages (or gpipe)")
    if (schedule.name == "interleaved" and m % pp
            and capabilities.interleaved_micro_batches == "multiple_of_pp"):
        problems.append(f"schedule 'interleaved' with {m} micro-batches: their number must be a "
                        f"multiple of pp {pp}")
    if (schedule.gradient_sync == "each_micro_batch" and pp > 1
            and not capabilities.gradient_sync_per_micro_batch_with_pipeline):
        problems.append(f"gradient_sync 'each_micro_batch' with pp {pp}: {capabilities.target} "
                        "reduces once a step when there are pipeline stages")
    return problems


def _stages(coster: Coster, layout: Layout) -> list[str]:
    names = [layer.name for layer in coster.graph.layers]
    wanted = layout.mesh.pp * layout.schedule.chunks
    problems = []
    if len(layout.stages) != wanted:
        problems.append(f"{len(layout.stages)} stages; pp {layout.mesh.pp} x chunks "
                        f"{layout.schedule.chunks} = {wanted}")
    expected = 0
    for index, stage in enumerate(layout.stages):
        for run in stage.runs:
            if run.first_layer != expected:
                problems.append(f"stage {index}: a run starts at layer {run.first_layer}, expected "
                                f"{expected}: each layer must be in one stage, in order")
                return problems
            expected += run.num_layers
    if expected != len(names):
        missing = (f"; {', '.join(names[expected:][:3])} ... would be dropped"
                   if expected < len(names) else "")
        problems.append(f"the stages hold {expected} layers; {coster.graph.name} has "
                        f"{len(names)}{missing}")
    return problems


def _choices(coster: Coster, layout: Layout) -> list[str]:
    capabilities, tp = coster.capabilities, layout.mesh.tp
    problems = dict.fromkeys(model_limits(coster, tp=tp, pp=layout.mesh.pp))
    problems |= dict.fromkeys(_batch_statistics(coster, layout))
    if (tp > 1 and coster.graph.sample == "tokens" and coster.wants_sequence_parallel
            and coster.seq_len % tp):
        problems[f"sequence length {coster.seq_len} is not divisible by tp {tp} "
                 "(sequence parallelism)"] = None
    for stage in layout.stages:
        for run in stage.runs:
            if run.choice.recompute not in capabilities.recompute:
                problems[f"recompute {run.choice.recompute!r}: {capabilities.target} has "
                         f"{', '.join(capabilities.recompute)}"] = None
            for layer in range(run.first_layer, run.first_layer + run.num_layers):
                if tp == 1 or not run.choice.tensor_parallel:
                    continue
                for why in divisible(coster.graph.kind_of(layer), tp, capabilities):
                    legal = legal_tensor_degrees(coster, coster.topology.num_devices)
                    problems[f"tp {tp}: {why}; legal degrees of {coster.graph.name}: "
                             f"{', '.join(map(str, legal))}"] = None
    return list(problems)


def _batch_statistics(coster: Coster, layout: Layout) -> list[str]:
    if coster.capabilities.batch_statistics:
        return []
    names = [coster.graph.layers[layer].name for stage in layout.stages
             for layer, choice in stage.iter_layers() if choice.recompute != "none"
             and coster.graph.kind_of(layer).batch_statistics]
    problems = []
    if layout.num_micro_batches > 1 and needs_one_micro_batch(coster):
        problems.append(f"{layout.num_micro_batches} micro-batches: {coster.graph.name} normalizes "
                        "by statistics of the batch, so it needs one")
    if names:
        problems.append(f"recompute of {', '.join(names[:4])}{' ...' if names[4:] else ''}: batch "
                        "normalization would count its statistics twice")
    return problems


def padding_notes(coster: Coster, tp: int) -> list[str]:
    """What tensor parallelism pads, to be said in the layout."""
    sizes = {kind.tensor_parallel.divides["vocabulary"] for kind in coster.graph.kinds.values()
             if kind.tensor_parallel and "vocabulary" in kind.tensor_parallel.divides}
    return [f"vocabulary {size} is padded to {-(-size // tp) * tp} for tp {tp}"
            for size in sorted(sizes) if size % tp]
