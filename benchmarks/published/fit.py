"""Fit the constants of software stacks on a stated part of a table, and score them on the rest.

    python -m benchmarks.published.fit --table measured.csv     writes planner/stacks/fitted.json

What is fitted are constants that no formula or datasheet gives (`planner/stacks`: how efficient the
kernels of a stack are on a kind of device, what the host needs to launch one, what its collectives
reach of the links), never a row, and never a model: each group names the models that it is fitted
on, whole, and every other model of its sources is held out. Least squares on log(predicted /
measured) by Gauss-Newton; a prior holds each constant to the device and topology files, whose
figures are cited, so that what the rows do not tell stays as it is. Rows far off count less
(weights of Huber's loss).
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import click
import numpy as np
from numpy.typing import NDArray

from benchmarks.published.adapter import Case, make_case
from benchmarks.published.price import measured_seconds, price_case
from benchmarks.published.table import MeasuredRow, UnusableRow, measured_rows
from planner.costing import Coster
from planner.layout import Layout
from planner.pricing import candidate_of, evaluate, segments_of
from planner.stacks import FITTED, Fit, FittedConstants, Kernels, load_stack
from planner.stacks.equipment import equip_with
from planner.topology import Topology
from profiler.device import Curve, Device
from profiler.documents import dump, write_atomically
from profiler.errors import MeshwrightError

Floats = NDArray[np.float64]
KNOTS = (256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0)
HUBER, SIGMA = 0.08, 0.03
"""Relative error beyond which a row counts less, and what one that fits may have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Constant:
    """One fitted constant: log of it relative to `start`, held there by a prior of width `sd`."""

    name: str
    start: float
    sd: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """What is fitted together: the kernels of some stacks on some kinds of device.

    sources: pattern of the source. models: those fitted on; the rest is held out.
    constants: which of the names below, besides the matmul curve. starts: where the search begins
        for some of them ("matmul": the curve), as logarithms beside the device file. also: other
        kernels that get these constants, none of whose rows is fitted on.
    """

    kernels: str
    devices: tuple[str, ...]
    sources: str
    models: str
    constants: tuple[str, ...]
    starts: tuple[tuple[str, float], ...] = ()
    also: tuple[str, ...] = ()
    most_rows: int = 60
    most_hosts: int | None = None

    @property
    def label(self) -> str:
        return f"{self.kernels} {self.devices[0]} {self.sources}"


SDS = {"attention": 0.6, "memory": 0.15, "host": 1.5, "host_link": 0.3, "network": 0.4,
       "overlap": 0.5, "partly": 0.4, "unaligned": 1.0, "small": 0.4, "gap": 0.5, "float8": 0.3,
       "scores": 0.5, "batched": 0.5}
STARTS = {"host": 1e-5, "gap": 2e-6, "overlap": 0.19, "partly": 0.7, "unaligned": 0.5,
          "scores": 0.9, "batched": 0.9}
CACHED_BYTES = 1e7
"""Kernels that move less find much of it in the second-level cache (40 MB on A100, 50 on H100)."""
HOST_STARTS = (-1.0, 0.5, 1.0, 1.5, 2.0)
"""Where the search for what the host needs begins: it counts only where the device is faster."""
A100 = ("a100-80g", "a100-40g")
V100 = ("v100-32g", "v100-16g")
H100 = ("h100-sxm-80g", "h100-96g", "h200")

GROUPS: tuple[Group, ...] = (
    Group(kernels="megatron-lm-2022", devices=A100, sources="korthikanti", models="175B|1T",
          constants=("memory", "host", "host_link", "network")),
    Group(kernels="megatron-lm-2021", devices=A100, sources="sc21|readme_gpt3",
          models="3.6B|39B|310B",
          constants=("memory", "host", "host_link", "network", "partly")),
    Group(kernels="megatron-deepspeed", devices=A100, sources="vtrain_single",
          models="L24-H1024|L12-H2048", most_hosts=1, most_rows=90,
          constants=("memory", "small", "gap", "host", "host_link", "network", "unaligned",
                     "scores")),
    Group(kernels="megatron-deepspeed", devices=A100, sources="vtrain_multi", models="L30-H3072",
          constants=("memory", "host", "host_link", "network", "scores", "batched")),
    Group(kernels="bigscience", devices=A100, sources="bigscience_tr11", models="181B|200B",
          constants=("memory", "host", "host_link", "network", "partly")),
    Group(kernels="neox", devices=A100, sources="alephalpha", models="13B",
          constants=("memory", "host", "host_link", "network")),
    Group(kernels="neox-flash1", devices=A100, sources="alephalpha", models="13B",
          constants=("attention", "memory", "host", "host_link", "network")),
    Group(kernels="neox-flash2", devices=A100, sources="alephalpha", models="13B",
          constants=("attention", "memory", "host", "host_link", "network")),
    Group(kernels="bigscience", devices=V100, sources="bigscience_1B3|bigscience_gpt2",
          models="1.3B", constants=("memory", "host", "host_link", "network", "partly")),
    Group(kernels="llm-foundry", devices=A100, sources="foundry", models="125m|1b|13b",
          constants=("attention", "memory", "host", "overlap", "network"), most_rows=50),
    Group(kernels="llm-foundry", devices=H100, sources="foundry", models="760m|MPT-3b",
          constants=("attention", "memory", "host", "overlap", "network", "float8"),
          most_rows=50),
    Group(kernels="torchtitan", devices=A100, sources="torchtitan", models="8B",
          constants=("attention", "memory", "host", "overlap", "network")),
    Group(kernels="torchtitan", devices=H100, sources="torchtitan", models="8B",
          constants=("attention", "memory", "host", "overlap", "host_link", "network",
                     "float8"), starts=(("attention", -0.6), ("matmul", -0.2))),
    Group(kernels="megatron-core", devices=H100, sources="readme_h100|nemo|bridge",
          models="7.1B|32B|119B|462B|LLAMA3_8B",
          constants=("attention", "memory", "host", "overlap", "host_link", "network",
                     "float8")),
    Group(kernels="megatron-core", devices=("b200", "gb200"), sources="bridge",
          models="LLAMA3_8B",
          constants=("attention", "memory", "host", "overlap", "network", "float8")),
)


@dataclass(slots=True)
class Sample:
    """One row as it is fitted."""

    row: MeasuredRow
    model: str
    kernels: str
    device: str
    case: Case
    layout: Layout
    measured_s: float


def constants_of(group: Group, x: Floats, device: Device) -> Kernels:
    """The kernels that a vector of logarithms means for a device."""
    values = dict(zip(group.constants, x[len(KNOTS):].tolist(), strict=True))
    curve = device.matmul_efficiency
    fractions = [min(0.98, curve.at(size) * float(np.exp(shift)))
                 for size, shift in zip(KNOTS, x, strict=False)]
    fractions = np.maximum.accumulate(fractions).tolist()

    def scaled(old: Curve, name: str) -> Curve | None:
        if name not in values:
            return None
        factor = float(np.exp(values[name]))
        return replace(old, fraction=tuple(round(min(0.98, f * factor), 4) for f in old.fraction))

    def number(name: str) -> float | None:
        return STARTS[name] * float(np.exp(values[name])) if name in values else None

    overlap = number("overlap")
    return Kernels(
        matmul_efficiency=Curve(size=KNOTS, fraction=tuple(round(f, 4) for f in fractions)),
        attention_efficiency=scaled(device.attention_efficiency, "attention"),
        float8_efficiency=None if "float8" not in values else Curve(
            size=KNOTS, fraction=tuple(round(min(0.98, f * float(np.exp(values["float8"]))), 4)
                                       for f in fractions)),
        memory_efficiency=_memory(device.memory_efficiency, values),
        kernel_launch_s=number("gap"),
        host_kernel_s=number("host"),
        partly_aligned=_share(number("partly")), unaligned=_share(number("unaligned")),
        scores_share=_share(number("scores")), batched_share=_share(number("batched")),
        overlap_slowdown=None if overlap is None else min(2.0, 1 + overlap),
        host_link_scale=float(np.exp(values["host_link"])) if "host_link" in values else None,
        network_scale=float(np.exp(values["network"])) if "network" in values else None)


def _memory(old: Curve, values: dict[str, float]) -> Curve | None:
    """`memory` scales the whole curve; `small` what fits the caches of the device besides."""
    if "memory" not in values:
        return None
    fractions = [f * float(np.exp(values["memory"] + (values.get("small", 0.0)
                                                      if size <= CACHED_BYTES else 0.0)))
                 for size, f in zip(old.size, old.fraction, strict=True)]
    return replace(old, fraction=tuple(round(min(0.98, f), 4) for f in fractions))


def _share(value: float | None) -> float | None:
    return None if value is None else min(1.0, value)


def seconds(sample: Sample, kernels: Kernels) -> float:
    """The planner's price of a row with given constants."""
    topology = unnamed(equip_with(sample.case.topology, kernels))
    coster = Coster(sample.case.graph, topology, sample.layout.request)
    return evaluate(coster, candidate_of(sample.layout),
                    segments_of(coster, sample.layout.stages)).step_s


def unnamed(topology: Topology) -> Topology:
    """The same devices under a name for which nothing is fitted."""
    return replace(topology, hosts=tuple(
        replace(g, device=replace(g.device, name=f"{g.device.name} (fitting)"))
        for g in topology.hosts))


def samples_of(group: Group, rows: Iterable[MeasuredRow]) -> list[Sample]:
    """The rows of a group, each with the layout that the benchmark takes for it."""
    samples = []
    for row in rows:
        if row.status != "ok" or not re.search(group.sources, row.source_id):
            continue
        try:
            case = make_case(row.cells)
            measured = measured_seconds(row.cells)
        except (UnusableRow, MeshwrightError, ValueError):
            continue
        device = case.topology.hosts[0].device.name
        if load_stack(case.layouts[0].request.stack_name).kernels != group.kernels or (
                device not in group.devices):
            continue
        if case.layouts[0].request.precision == "fp8-rowwise-mixed":
            continue  # what it costs beside fp8-mixed has a source of its own (`FLOAT8`)
        if group.most_hosts is not None and case.topology.num_hosts > group.most_hosts:
            continue
        try:
            layout = replace(price_case(case), prediction=None)
        except MeshwrightError:
            continue
        samples.append(Sample(row=row, model=row.cells.text("model"), kernels=group.kernels,
                              device=device, case=case, layout=layout, measured_s=measured))
    return samples


def errors(group: Group, samples: Sequence[Sample], x: Floats) -> Floats:
    """log(predicted / measured) of each sample."""
    kernels = {device: constants_of(group, x, next(
        s.case.topology.hosts[0].device for s in samples if s.device == device))
        for device in {s.device for s in samples}}
    return np.array([np.log(seconds(s, kernels[s.device]) / s.measured_s) for s in samples])


def fit(group: Group, samples: Sequence[Sample], rounds: int = 7) -> Floats:
    """The constants that fit the samples best."""
    sds = np.array([0.25] * len(KNOTS) + [SDS[name] for name in group.constants])
    x = np.zeros(len(sds))
    if "host" in group.constants:
        at = len(KNOTS) + group.constants.index("host")
        x[at] = min(HOST_STARTS, key=lambda start: _loss(errors(
            group, samples, np.where(np.arange(len(x)) == at, start, 0.0))))
    for name, start in group.starts:
        x[len(KNOTS) + group.constants.index(name) if name in group.constants
          else slice(0, len(KNOTS))] = start
    smooth, prior = _smoothness(len(x)), np.diag(1 / sds**2)
    residual, damping = errors(group, samples, x), 1.0
    for _ in range(rounds):
        weight = np.minimum(1.0, HUBER / np.maximum(np.abs(residual), 1e-9)) / SIGMA**2
        jacobian = np.empty((len(samples), len(x)))
        for i in range(len(x)):
            step = np.zeros(len(x))
            step[i] = 0.03
            jacobian[:, i] = (errors(group, samples, x + step) - residual) / 0.03
        normal = jacobian.T @ (weight[:, None] * jacobian) + prior + smooth
        gradient = jacobian.T @ (weight * residual) + prior @ x + smooth @ x
        before = _loss(residual) / SIGMA**2 + x @ (prior + smooth) @ x / 2
        gained = 0.0
        for _ in range(5):
            move = -np.linalg.solve(normal + damping * prior, gradient)
            move *= min(1.0, 0.4 / float(np.abs(move).max() + 1e-12))
            trial = errors(group, samples, x + move)
            after = _loss(trial) / SIGMA**2 + (x + move) @ (prior + smooth) @ (x + move) / 2
            if after < before:
                gained, damping = before - after, damping / 4
                x, residual = x + move, trial
                break
            damping *= 8
        if gained < 3e-3 * before:
            break
    return x


def _smoothness(size: int) -> Floats:
    """Neighbouring knots of the curve shift alike."""
    matrix = np.zeros((size, size))
    for i in range(len(KNOTS) - 1):
        matrix[i:i + 2, i:i + 2] += np.array([[1.0, -1.0], [-1.0, 1.0]]) / 0.15**2
    return matrix


def _loss(residual: Floats) -> float:
    size = np.abs(residual)
    return float(np.sum(np.where(size < HUBER, size**2 / 2, HUBER * (size - HUBER / 2))))


def mean_error(residual: Floats) -> float:
    """Mean absolute relative error."""
    return float(np.mean(np.abs(np.exp(residual) - 1)))


def _thinned(samples: Sequence[Sample], most: int) -> list[Sample]:
    """At most about `most` samples, as many of each model, evenly over its rows."""
    models = sorted({s.model for s in samples})
    share = max(1, most // max(1, len(models)))
    if len(samples) <= most:
        return list(samples)
    return [s for model in models for of in ([s for s in samples if s.model == model],)
            for s in of[::max(1, -(-len(of) // share))]]


def fit_group(group: Group, rows: Sequence[MeasuredRow]) -> list[Fit]:
    """Fit one group; one entry for each kind of device, whose curve is its own."""
    samples = samples_of(group, rows)
    chosen = [s for s in samples if re.search(group.models, s.model)]
    rest = [s for s in samples if not re.search(group.models, s.model)]
    if not chosen:
        return []
    thin = _thinned(chosen, group.most_rows)
    x = fit(group, thin)
    fitted = mean_error(errors(group, chosen, x))
    held_out = mean_error(errors(group, rest, x)) if rest else None
    print(group.kernels, "fitted on", len(thin), "rows of", sorted({s.model for s in thin}),
          f"mean error {100 * fitted:.1f} %; held out", len(rest), "rows:",
          "none" if held_out is None else f"{100 * held_out:.1f} %", flush=True)
    return [Fit(kernels=name, devices=(device,), rows=len(thin),
                most_hosts=group.most_hosts,
                constants=constants_of(group, x, next(
                    s.case.topology.hosts[0].device for s in samples if s.device == device)),
                models=tuple(sorted({s.model for s in thin})), error_fitted=round(fitted, 4),
                error_held_out=None if held_out is None else round(held_out, 4),
                rows_held_out=len(rest))
            for name in (group.kernels, *group.also)
            for device in sorted({s.device for s in samples})]


@click.command()
@click.option("--table", required=True, type=click.Path(path_type=Path))
@click.option("--only", default="", help="a pattern of the groups to fit; others are kept")
@click.option("-o", "--output", default=FITTED, type=click.Path(path_type=Path))
def main(table: Path, only: str, output: Path) -> None:
    """Fit every group and write the file of constants."""
    from planner.stacks.record import fitted_constants

    try:
        rows = measured_rows(table)
        chosen = [group for group in GROUPS if re.search(only, group.label)]
        made = {(name, device, g.most_hosts) for g in chosen for device in g.devices
                for name in (g.kernels, *g.also)}
        fits = [f for f in fitted_constants().fits if only and
                (f.kernels, f.devices[0], f.most_hosts) not in made]
        for group in chosen:
            fits += fit_group(group, rows)
        fits.sort(key=lambda f: (f.kernels, f.devices, f.most_hosts is None))
        write_atomically(output, dump(FittedConstants(
            made_by="benchmarks/published/fit.py", fits=tuple(fits))))
    except MeshwrightError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
