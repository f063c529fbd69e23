"""The parts of the report, each a table or a few lines; `sections` puts them in order."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from planner.costing import Coster
from planner.layout import Axis, Layout, Prediction
from planner.report.stages import memory_tables, stage_table
from planner.report.tables import figures, lines
from planner.report.verdict import overflows
from planner.report.words import printable, scaled, seconds, share, term
from planner.topology import Topology
from profiler.layer_graph import LayerGraph

__all__ = ["Subject", "sections"]

AXIS_WORDS: dict[Axis, str] = {
    "pp": "layers in stages",
    "dp_replicate": "replicas",
    "dp_shard": "parameters, gradients and optimizer states sharded",
    "cp": "sequences divided",
    "tp": "layers divided",
    "ep": "experts spread",
}
SYNC_WORDS = {"last_micro_batch": "once a step", "each_micro_batch": "after each micro-batch"}
STATUS_WORDS = {
    "OPTIMAL": "under the cost model no layout of this space that fits is faster",
    "FEASIBLE": "stopped early; a faster layout may exist",
    "MANUAL": "not searched",
}


class Subject:
    """What is reported: a layout with its prediction, and what it is about."""

    def __init__(self, layout: Layout, graph: LayerGraph, topology: Topology,
                 wall_s: float | None) -> None:
        if layout.prediction is None:
            raise ValueError("a layout is reported with its prediction")
        self.layout = layout
        self.graph = graph
        self.topology = topology
        self.wall_s = wall_s
        self.prediction: Prediction = layout.prediction
        self.coster = Coster(graph, topology, layout.request)

    @property
    def tokens(self) -> bool:
        return self.graph.sample == "tokens"


def sections(subject: Subject) -> Iterator[RenderableType]:
    """The whole report."""
    yield _heading(subject)
    yield _title("Layout")
    yield _layout(subject)
    yield _title("Stages")
    yield stage_table(subject.layout, subject.graph)
    yield _title("Memory of one device at its peak, GiB")
    yield from memory_tables(subject.layout)
    yield _title("Step time")
    yield _step(subject.prediction)
    yield _title("Throughput")
    yield _throughput(subject)
    yield _title("Proof")
    yield _proof(subject)
    if subject.layout.alternatives:
        yield _title("Best alternatives")
        yield _alternatives(subject.layout)
    if subject.layout.notes:
        yield _title("Notes")
        yield lines([("-", printable(note)) for note in subject.layout.notes])
    over = overflows(subject.layout)
    if over:
        yield _title("Does not fit")
        yield lines([("-", line) for line in over])
    elif subject.wall_s is None:
        yield _title("Legal, and it fits")


def _title(text: str) -> Text:
    return Text(f"\n{text}", style="bold")


def _heading(subject: Subject) -> RenderableType:
    layout, request, topology = subject.layout, subject.layout.request, subject.topology
    kinds = dict.fromkeys(group.device.name for group in topology.hosts)
    samples = f"{request.global_batch:,} samples a step"
    if subject.tokens:
        samples += f" of {request.seq_len:,} tokens"
    title = Text(f"{printable(layout.model.name)} on {printable(layout.topology.name)}: "
                 f"{seconds(subject.prediction.step_s)} a step", style="bold")
    title.append("\n")
    title.append_text(Text(
        f"{subject.graph.num_parameters:,} parameters, {len(subject.graph.layers):,} layers; "
        f"{topology.num_devices:,} x {' / '.join(map(printable, kinds))} in "
        f"{topology.num_hosts:,} host{'' if topology.num_hosts == 1 else 's'}\n"
        f"{samples}, {request.precision}, {request.optimizer}", style="not bold"))
    return title


def _layout(subject: Subject) -> Table:
    layout = subject.layout
    mesh, total = layout.mesh, subject.topology.num_devices
    used = f"{mesh.num_devices:,} of {total:,} devices"
    idle = total - mesh.num_devices
    rows = [("mesh", f"{used}{f' ({idle:,} idle)' if idle else ''}"
             f"{', outermost axis first:' if mesh.num_devices > 1 else ''}")]
    rows += [("", _axis(subject, axis)) for axis in mesh.order if mesh.degree(axis) > 1]
    schedule = layout.schedule
    name: str = schedule.name if mesh.pp > 1 else "no pipeline"
    if schedule.chunks > 1:
        name += f", {schedule.chunks} chunks of layers on each pipeline rank"
    rows.append(("schedule", name))
    ranks = f"each of {mesh.dp:,} data-parallel ranks" if mesh.dp > 1 else "one data-parallel rank"
    rows.append(("micro-batch", f"{_samples(layout.micro_batch)} on {ranks}, "
                 f"{layout.num_micro_batches:,} a step"))
    if mesh.dp > 1:
        rows.append(("gradients", f"reduced {SYNC_WORDS[schedule.gradient_sync]}"))
    return lines(rows)


def _samples(count: int) -> str:
    return f"{count:,} sample{'' if count == 1 else 's'}"


def _axis(subject: Subject, axis: Axis) -> str:
    mesh = subject.layout.mesh
    span = subject.coster.placement(mesh).span(mesh.degree(axis), mesh.stride(axis))
    where = "inside a host"
    if span.num_hosts > 1:
        where = f"spans {span.num_hosts:,} hosts"
    words = AXIS_WORDS[axis]
    if axis == "tp" and subject.coster.sequence_parallel(mesh.tp):
        words += ", sequences between them"
    return f"{axis} {mesh.degree(axis):,}: {words}; {where}"


def _step(prediction: Prediction) -> Table:
    table = figures("term", "time", "share", right=("time", "share"))
    terms = {name: value for name, value in prediction.step_terms_s.items() if value}
    for name, value in sorted(terms.items(), key=lambda item: -item[1]):
        table.add_row(printable(term(name)), seconds(value), share(value / prediction.step_s))
    table.add_section()
    table.add_row("step", seconds(prediction.step_s), share(1.0))
    difference = prediction.replay_s / prediction.step_s - 1
    table.add_row("replayed event by event", seconds(prediction.replay_s),
                  f"{100 * difference:+.1f} %" if abs(difference) >= 5e-4 else "the same")
    return table


def _throughput(subject: Subject) -> Table:
    prediction, layout = subject.prediction, subject.layout
    rows = [("samples/s", f"{prediction.samples_per_s:,.2f}")]
    if subject.tokens:
        rows.append(("tokens/s/device", f"{prediction.tokens_per_s_per_device:,.0f}"))
    dtype = layout.request.bytes.dtype
    peaks = dict.fromkeys(group.device.peak(dtype) for group in subject.topology.hosts
                          if dtype in group.device.peak_flops_per_s)
    peak = " / ".join(scaled(value, "FLOP/s") for value in peaks)
    rows.append(("MFU", f"{share(prediction.mfu)} of the dense {dtype} peak, {peak} a device. "
                 "Counted: matmuls and attention of one forward and backward, attention in full "
                 "even where causal; recompute is not."))
    if prediction.sources:
        rows.append(("sources", ", ".join(f"{printable(term(what))} {printable(how)}"
                                          for what, how in prediction.sources.items())))
    if prediction.measured_share:
        rows.append(("measured", f"{share(prediction.measured_share)} of the step"))
    return lines(rows)


def _proof(subject: Subject) -> Table:
    proof = subject.layout.proof
    if proof is None:
        return lines([("MANUAL", "priced, not searched; `plan MODEL` finds the fastest")])
    rows: list[tuple[str, str]] = [(proof.status, STATUS_WORDS[proof.status])]
    rows.append(("bound", f"{seconds(proof.bound_s)}: no step of the space is shorter"))
    rows.append(("gap", f"{share(proof.gap)} of the step" if proof.gap else
                 f"0, to a resolution of {proof.resolution:.0e}"))
    rows.append(("space", f"{_large(proof.space_size)} meshes, micro-batches and schedules, each "
                 "with every cut into stages and every choice of the layers"))
    rows.append(("search", f"{proof.candidates:,} candidates priced, {proof.bounded:,} bounded "
                 f"with their memory, {proof.solved:,} solved as programs; bounds rule out the "
                 "rest"))
    if proof.solver:
        rows.append(("solver", printable(proof.solver)))
    if subject.wall_s is not None:
        rows.append(("seconds", f"{subject.wall_s:.2f}"))
    return lines(rows)


def _large(count: int) -> str:
    """A count in full while it can be read, then as a power of ten."""
    if count < 10**12:
        return f"{count:,}"
    digits = str(count)
    return f"{digits[0]}.{digits[1]} x 10^{len(digits) - 1}"


def _alternatives(layout: Layout) -> Table:
    table = figures("layout", "step", "slower", "what grows most", right=("step", "slower"),
                    unbroken=("step", "slower"))
    for other in layout.alternatives:
        table.add_row(printable(other.description), seconds(other.step_s), share(other.slower_by),
                      printable(term(other.why)))
    return table
