"""How far a model scales: the best layout for each of several numbers of devices.

Symbols: N devices, t the seconds of a step, B its samples. One sample costs N t / B device-seconds;
linear scaling means that this stays what it was on the fewest devices where the model fits:

    linear(N) = (N_0 t_0 / B_0) / (N t / B)

What is lost is the growth of a sample's device-seconds, and each named term of the step has its
part in it; the limiting term is the one with the largest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from planner import inputs, topology_files
from planner.layout import Layout
from profiler.errors import Infeasible, InvalidInput

if TYPE_CHECKING:
    from planner.topology import Topology
    from profiler.layer_graph import LayerGraph

__all__ = ["ScalePoint", "device_seconds", "scale", "topologies"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalePoint:
    """One number of devices; `layout` is None where nothing fits, `problem` says why.

    linear: share of linear scaling from the first point that fits. limiting: the term whose
    device-seconds per sample grew most since then, limiting_share: by how much of that first
    point's device-seconds; None where nothing is lost.
    """

    num_devices: int
    global_batch: int
    layout: Layout | None
    problem: str = ""
    linear: float | None = None
    limiting: str | None = None
    limiting_share: float | None = None


def topologies(preset: str, devices: Sequence[int]) -> list[Topology]:
    """A preset with as many hosts as each number of devices needs.

    Raises:
        InvalidInput: not the name of a preset alone, or a number that is no whole hosts.
    """
    if ":" in preset or "+" in preset or preset.strip() not in topology_files.names():
        raise InvalidInput(f"topology {preset[:80]!r}: scaling needs the name of a preset alone, "
                           f"for example dgx-h100; the numbers of devices say how many hosts")
    host = topology_files.resolve(preset).hosts[0].devices_per_host
    wrong = [n for n in devices if n < 1 or n % host]
    if wrong:
        raise InvalidInput(f"{preset} has hosts of {host} devices: {', '.join(map(str, wrong))} "
                           f"is not a multiple of {host}")
    return [topology_files.resolve(f"{preset}:{n // host}") for n in devices]


def scale(graph: LayerGraph, model_name: str, preset: str, devices: Sequence[int],
          fields: Mapping[str, Any], *, samples_per_device: float | None = None,
          progress: Callable[[int], None] | None = None) -> list[ScalePoint]:
    """Plan for each number of devices, in increasing order.

    Args:
        fields: of the Request; `global_batch` is the batch of every point (strong scaling).
        samples_per_device: instead of that, so many samples a step for each device (weak scaling).
        progress: called with each number of devices before it is planned.

    Raises:
        InvalidInput: as `topologies`, or a batch that is not whole.
    """
    from planner import search

    ordered = sorted(set(devices))
    batches = [_batch(n, fields, samples_per_device) for n in ordered]
    points: list[ScalePoint] = []
    for topology, n, batch in zip(topologies(preset, ordered), ordered, batches, strict=True):
        if progress is not None:
            progress(n)
        request = inputs.make_request(graph, {**fields, "global_batch": batch})
        try:
            layout = search.search(graph, topology, request, model_name=model_name,
                                   topology_name=topology.name)
        except Infeasible as error:
            points.append(ScalePoint(num_devices=n, global_batch=batch, layout=None,
                                     problem=str(error)))
            continue
        first = next((point for point in points if point.layout is not None), None)
        points.append(_point(n, batch, layout, first))
    return points


def _batch(n: int, fields: Mapping[str, Any], samples_per_device: float | None) -> int:
    given = fields.get("global_batch")
    if (given is None) == (samples_per_device is None):
        raise InvalidInput("give either a global batch (strong scaling: the same work on more "
                           "devices) or samples per device (weak scaling)")
    if samples_per_device is None:
        return int(str(given))
    batch = n * samples_per_device
    if batch != int(batch) or batch < 1:
        raise InvalidInput(f"{samples_per_device:g} samples per device on {n} devices are "
                           f"{batch:g} samples a step, which is no whole number")
    return int(batch)


def _point(n: int, batch: int, layout: Layout, first: ScalePoint | None) -> ScalePoint:
    if first is None:
        return ScalePoint(num_devices=n, global_batch=batch, layout=layout, linear=1.0)
    before, now = device_seconds(first), device_seconds(
        ScalePoint(num_devices=n, global_batch=batch, layout=layout))
    was, total = sum(before.values()), sum(now.values())
    growth = {name: seconds - before.get(name, 0.0) for name, seconds in now.items()}
    worst = max(growth, key=lambda name: growth[name])
    grew = total > was
    return ScalePoint(num_devices=n, global_batch=batch, layout=layout, linear=was / total,
                      limiting=worst if grew else None,
                      limiting_share=growth[worst] / was if grew else None)


def device_seconds(point: ScalePoint) -> dict[str, float]:
    """Device-seconds that one sample takes, by term of the step; devices left idle count too."""
    assert point.layout is not None and point.layout.prediction is not None
    each = point.num_devices / point.global_batch
    return {name: seconds * each
            for name, seconds in point.layout.prediction.step_terms_s.items()}
