"""Whether a layout can be run at all: everything that is known before a process group starts.

All violations are said at once. Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Iterator

from planner.capabilities import Capabilities, load_capabilities
from planner.division import divisible
from planner.layout import Choice, Layout
from profiler.documents import digest
from profiler.errors import InvalidInput, UnsupportedLayout
from profiler.layer_graph import LayerGraph, LayerKind

__all__ = ["check_layout", "check_model", "choices", "stage_of_layers"]

MAX_DEGREE = 1024
"""The largest tensor-parallel degree that a message lists."""

MAX_LISTED = 8
"""How many layers one violation names before it says how many more there are."""


def choices(layout: Layout) -> dict[int, Choice]:
    """The choice made for every layer, by layer index."""
    return {index: choice for stage in layout.stages for index, choice in stage.iter_layers()}


def stage_of_layers(layout: Layout) -> dict[int, int]:
    """The stage of every layer, by layer index."""
    return {index: number for number, stage in enumerate(layout.stages)
            for index, _ in stage.iter_layers()}


def check_model(layout: Layout, graph: LayerGraph) -> None:
    """Refuse a model other than the one that the layout was made for.

    Raises:
        InvalidInput: the layout carries a digest, and the graph has another.
    """
    wanted = layout.model.digest
    if wanted is not None and wanted != digest(graph):
        raise InvalidInput(
            f"the layout was made for model {layout.model.name!r} with digest {wanted[:19]}..., "
            f"the model given ({graph.name!r}) has {digest(graph)[:19]}...: plan again for it")


def check_layout(layout: Layout, graph: LayerGraph, capabilities: Capabilities | None = None
                 ) -> None:
    """Refuse a layout that is illegal for its model or that this executor cannot run.

    Raises:
        UnsupportedLayout: every violation, with the values and what would be legal.
    """
    known = capabilities or load_capabilities("executor")
    problems = [*_coverage(layout, graph), *_batch(layout), *_features(layout, known),
                *_schedule(layout, known)]
    if not problems:
        problems += [*_recompute(layout, known), *_tensor_parallel(layout, graph, known)]
    if problems:
        raise UnsupportedLayout(problems)


def _coverage(layout: Layout, graph: LayerGraph) -> Iterator[str]:
    listed = [index for stage in layout.stages for index, _ in stage.iter_layers()]
    count = len(graph.layers)
    if listed == list(range(count)):
        return
    missing = sorted(set(range(count)) - set(listed))
    twice = sorted({index for index in listed if listed.count(index) > 1})
    beyond = sorted({index for index in listed if index >= count})
    details = [f"{what} {items[:MAX_LISTED]}{' ...' if len(items) > MAX_LISTED else ''}"
               for what, items in (("missing:", missing), ("twice:", twice),
                                   ("not in the model:", beyond)) if items]
    yield (f"stages must hold the layers 0..{count - 1} of {graph.name!r}, each once, in order; "
           f"{'; '.join(details) or 'they are out of order'}")


def _batch(layout: Layout) -> Iterator[str]:
    dp, micro, count = layout.mesh.dp, layout.micro_batch, layout.num_micro_batches
    if dp * micro * count != layout.request.global_batch:
        yield (f"global_batch {layout.request.global_batch} must equal dp_replicate x dp_shard x "
               f"micro_batch x num_micro_batches = {layout.mesh.dp_replicate} x "
               f"{layout.mesh.dp_shard} x {micro} x {count} = {dp * micro * count}")


def _features(layout: Layout, known: Capabilities) -> Iterator[str]:
    mesh = layout.mesh
    for axis, degree in (("cp", mesh.cp), ("ep", mesh.ep)):
        if degree > 1:
            yield f"{axis} is {degree}: the executor runs only {axis} = 1"
    if layout.request.precision not in known.precisions:
        yield (f"precision {layout.request.precision}: the executor runs "
               f"{', '.join(known.precisions)} (fp16 needs dynamic loss scaling, which it has not)")
    if mesh.pp > 1 and layout.schedule.gradient_sync == "each_micro_batch" \
            and not known.gradient_sync_per_micro_batch_with_pipeline:
        yield ("gradient_sync each_micro_batch needs pp = 1 (torch reduces once a step within a "
               f"pipeline); pp is {mesh.pp}: use last_micro_batch")


def _schedule(layout: Layout, known: Capabilities) -> Iterator[str]:
    pp, schedule = layout.mesh.pp, layout.schedule
    stages, count = len(layout.stages), layout.num_micro_batches
    if stages != pp * schedule.chunks:
        yield (f"{stages} stages, but pp x chunks = {pp} x {schedule.chunks} = "
               f"{pp * schedule.chunks}")
    if schedule.chunks > 1 and (schedule.name != "interleaved" or pp == 1):
        yield f"chunks {schedule.chunks} > 1 needs schedule interleaved and pp > 1"
    if pp == 1:
        return
    if schedule.name not in known.schedules:
        yield f"schedule {schedule.name!r}: known are {', '.join(known.schedules)}"
    if schedule.name == "1f1b" and known.min_micro_batches_1f1b == "stages" and count < pp:
        yield f"schedule 1f1b needs num_micro_batches >= pp = {pp}, got {count}"
    if schedule.name == "interleaved":
        if schedule.chunks == 1:
            yield "schedule interleaved needs chunks > 1; with one chunk a rank use 1f1b"
        if known.interleaved_micro_batches == "multiple_of_pp" and count % pp:
            yield (f"schedule interleaved needs num_micro_batches to be a multiple of pp = {pp}, "
                   f"got {count}")


def _recompute(layout: Layout, known: Capabilities) -> Iterator[str]:
    unknown = sorted({c.recompute for c in choices(layout).values()} - set(known.recompute))
    if unknown:
        yield f"recompute {unknown}: known are {', '.join(known.recompute)}"


def _tensor_parallel(layout: Layout, graph: LayerGraph, known: Capabilities) -> Iterator[str]:
    tp = layout.mesh.tp
    if tp == 1:
        return
    if graph.sample not in known.tensor_parallel_samples:
        yield (f"tp {tp}: only models of {', '.join(known.tensor_parallel_samples)} are divided, "
               f"{graph.name!r} takes {graph.sample}")
        return
    if layout.request.seq_len % tp:
        yield (f"tp {tp} must divide seq_len {layout.request.seq_len} (sequence parallelism); "
               f"legal "
               f"degrees: {_divisors(layout.request.seq_len)}")
    chosen = choices(layout)
    seen: set[str] = set()
    for index, layer in enumerate(graph.layers):
        split = graph.kind_of(index).tensor_parallel
        if split is None or not chosen[index].tensor_parallel or layer.kind in seen:
            continue
        seen.add(layer.kind)
        kind = graph.kind_of(index)
        for problem in divisible(kind, tp, known):
            yield (f"tp {tp}: layer {index} ({layer.name}): {problem}; legal degrees: "
                   f"{_degrees(kind, known)}, or tensor_parallel false for it")
    for tie in graph.ties:
        kept = {chosen[index].tensor_parallel for index, _ in tie.places}
        if len(kept) > 1:
            names = [f"{index} ({graph.layers[index].name})" for index, _ in tie.places]
            yield (f"layers {', '.join(names)} share a parameter: tensor_parallel must be the same "
                   f"for all of them")


def _degrees(kind: LayerKind, known: Capabilities) -> str:
    """The degrees that divide a layer."""
    assert kind.tensor_parallel is not None
    most = min(max(kind.tensor_parallel.divides.values()), MAX_DEGREE)
    return ", ".join(str(n) for n in range(1, most + 1) if n == 1 or not divisible(kind, n, known))


def _divisors(number: int) -> str:
    return ", ".join(str(n) for n in range(1, min(number, MAX_DEGREE) + 1) if number % n == 0)
