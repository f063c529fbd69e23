"""The planner: the fastest layout of a training run over a cluster, and its proof.

    >>> import planner
    >>> layout = planner.plan("llama3-8b", "dgx-h100:2", global_batch=256, seq_len=8192)
    >>> layout.prediction.step_s
    >>> print(planner.dump(layout))

Importing this package is cheap: what needs a solver, a graph library or torch is imported when it
is used.
"""

from __future__ import annotations

import importlib
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from planner.layout import Layout
    from planner.request import Request
    from planner.search import Progress
    from planner.topology import Topology
    from profiler.documents import dump, load
    from profiler.errors import (
        Infeasible,
        Interrupted,
        InvalidInput,
        MeshwrightError,
        UnknownName,
        UnsupportedLayout,
    )
    from profiler.layer_graph import LayerGraph

__all__ = ["Infeasible", "Interrupted", "InvalidInput", "LayerGraph", "Layout", "MeshwrightError",
           "Request", "Topology", "UnknownName", "UnsupportedLayout", "__version__", "check",
           "dump", "load", "plan"]

__version__ = "0.1.0"

_HOMES = {
    "planner.layout": ("Layout",),
    "planner.request": ("Request",),
    "planner.topology": ("Topology",),
    "profiler.documents": ("dump", "load"),
    "profiler.errors": ("Infeasible", "Interrupted", "InvalidInput", "MeshwrightError",
                        "UnknownName", "UnsupportedLayout"),
    "profiler.layer_graph": ("LayerGraph",),
}


def plan(model: Any, topology: str | Path | Topology, *, global_batch: int,
         seq_len: int | None = None, example_inputs: Any = None, loss: str | None = None,
         links: str | Path | None = None,
         progress: Callable[[Progress], None] | None = None, time_limit_s: float | None = None,
         **fields: Any) -> Layout:
    """The fastest layout that fits.

    model: a name of the catalogue, a file (LayerGraph or Hugging Face config),
        "package.module:function", an `nn.Module` (with `example_inputs`) or a LayerGraph.
    topology: a preset ("dgx-h100:2"), a file, "local", or a Topology.
    seq_len: tokens per sample; only needed where samples are tokens.
    loss: of an `nn.Module` that returns predictions: "cross-entropy" or "mean-squared-error".
    links: a file of measured collectives (`python -m profiler links`).
    progress: called now and then with the best step time so far and its bound.
    fields: any other field of `Request`: precision, optimizer, memory_margin, tp, pp, ...

    Raises:
        InvalidInput: an argument cannot be used; the message lists every reason.
        Infeasible: nothing fits; `.diagnosis` says which stage, by how much, and what would.
    """
    from planner import inputs, link_fits, search, topology_files

    graph, model_name = inputs.resolve_model(model, example_inputs, loss)
    devices = topology_files.resolve(topology)
    if links is not None:
        devices = link_fits.with_links(devices, links)
    fields |= {"global_batch": global_batch, "seq_len": seq_len}
    request = inputs.make_request(graph, fields)
    found = search.search(graph, devices, request, progress=progress, time_limit_s=time_limit_s,
                          model_name=model_name,
                          topology_name=inputs.topology_name(topology, devices))
    return found if links is None else replace(
        found, links=inputs.links_reference(links, devices))


def check(layout: Layout | str | Path, *, model: Any = None,
          topology: str | Path | Topology | None = None, example_inputs: Any = None,
          loss: str | None = None, links: str | Path | None = None) -> Layout:
    """The same layout with its `prediction`: the memory of each stage, and the step time.

    model, topology, links: instead of those that the layout names. loss: see `plan`.

    Raises:
        InvalidInput: a reference cannot be found again, or what it names has changed since.
        UnsupportedLayout: the layout is illegal; the message lists every violation.
    """
    from planner import inputs

    return inputs.check(layout, model, topology, example_inputs, links, loss).layout


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(home), name)
    raise AttributeError(f"module 'planner' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
