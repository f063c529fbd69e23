"""A parity case: a tiny model and a layout, in few words."""


from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from planner.layout import Choice, LayerRun, Layout, Mesh, Reference, Schedule, Stage
from planner.request import Request
from profiler.layer_graph import LayerGraph
from tests.executor.tiny import LENGTH


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """cuts: first layers of the stages after the first. choices: by layer, repeated as needed.

    whole: layers that are not divided. change: breaks the run, for tests of what is found.
    """

    name: str
    model: str
    mesh: dict[str, Any] = field(default_factory=dict)
    micro_batch: int = 1
    num_micro_batches: int = 2
    schedule: str = "1f1b"
    chunks: int = 1
    sync: str = "last_micro_batch"
    cuts: tuple[int, ...] = ()
    choices: tuple[Choice, ...] = (Choice(),)
    whole: tuple[int, ...] = ()
    max_norm: float | None = 0.1
    change: Callable[[Any], None] = lambda run: None

    def layout(self, graph: LayerGraph, precision: str = "fp32") -> Layout:
        mesh = Mesh(**self.mesh)
        count = len(graph.layers)
        starts = (0, *(self.cuts or even_cuts(count, mesh.pp * self.chunks)))
        stages = []
        for start, end in zip(starts, (*starts[1:], count), strict=True):
            stages.append(Stage(runs=tuple(
                LayerRun(first_layer=i, num_layers=1, choice=self._choice(i))
                for i in range(start, end))))
        return Layout(
            model=Reference(name=graph.name), topology=Reference(name="here"),
            request=Request(global_batch=mesh.dp * self.micro_batch * self.num_micro_batches,
                            seq_len=LENGTH if graph.sample == "tokens" else 1,
                            precision=precision),
            mesh=mesh, micro_batch=self.micro_batch, num_micro_batches=self.num_micro_batches,
            schedule=Schedule(name=self.schedule, chunks=self.chunks, gradient_sync=self.sync),
            stages=tuple(stages))

    def _choice(self, layer: int) -> Choice:
        choice = self.choices[layer % len(self.choices)]
        if layer in self.whole:
            choice = Choice(recompute=choice.recompute, reshard=choice.reshard,
                            tensor_parallel=False)
        return choice


def even_cuts(layers: int, stages: int) -> Sequence[int]:
    return tuple(round(k * layers / stages) for k in range(1, stages))


FULL, SELECTIVE = Choice(recompute="full"), Choice(recompute="selective")
KEPT = Choice(reshard=False)
MIXED = (Choice(), FULL, Choice(recompute="selective", reshard=False), KEPT)
