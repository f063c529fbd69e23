"""From what a user gives, on the command line or in Python, to the records of a search."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from planner import models
from planner.layout import Layout, Reference
from planner.link_fits import with_links
from planner.request import Request
from profiler.documents import digest, load, make
from profiler.errors import InvalidInput

if TYPE_CHECKING:
    from planner.topology import Topology
    from profiler.layer_graph import LayerGraph
    from profiler.links import Links

__all__ = ["Checked", "check", "links_reference", "make_request", "resolve_model", "topology_name"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """A layout with its prediction, and what it is about."""

    layout: Layout
    graph: LayerGraph
    topology: Topology


def resolve_model(model: Any, example_inputs: Any = None, loss: str | None = None
                  ) -> tuple[LayerGraph, str]:
    """The graph of a model, and the name under which a layout finds it again."""
    from profiler.layer_graph import LayerGraph

    if isinstance(model, (LayerGraph, str, Path)):
        given = [name for name, value in (("example_inputs", example_inputs), ("loss", loss))
                 if value is not None]
        if given:
            kind = "a LayerGraph" if isinstance(model, LayerGraph) else f"named {str(model)!r}"
            raise InvalidInput(f"{' and '.join(given)}: of an nn.Module alone; the model is "
                               f"{kind}, which has its own")
        return ((model, model.name) if isinstance(model, LayerGraph) else
                (models.resolve(model), str(model)))
    torch = sys.modules.get("torch")  # whoever has an nn.Module has imported it
    if torch is not None and isinstance(model, torch.nn.Module):
        from profiler.trace import trace

        name = type(model).__name__
        return trace(model, example_inputs, name=name, loss=loss), name
    raise InvalidInput(f"a model is a name, a path, package.module:function, an nn.Module or a "
                       f"LayerGraph, not {type(model).__name__}")


def links_reference(given: Links | str | Path, topology: Topology) -> Reference:
    """How a layout finds its measured links again."""
    name = str(given) if isinstance(given, (str, Path)) else "links"
    return Reference(name=name, digest=digest(topology.links))


def topology_name(given: str | Path | Topology, topology: Topology) -> str:
    """The name under which a layout finds its topology again."""
    return str(given) if isinstance(given, (str, Path)) else topology.name


def make_request(graph: LayerGraph, fields: Mapping[str, Any]) -> Request:
    """The request; a `seq_len` of None takes the only length that the model allows.

    Raises:
        InvalidInput: a field is out of range, or the model takes no such sequence.
    """
    fields = dict(fields)
    if fields.get("seq_len") is None:
        fields["seq_len"] = _only_seq_len(graph)
    known = Request.__dataclass_fields__
    unknown = [f"{name}: a request has no such field; it has {', '.join(known)}"
               for name in fields if name not in known]
    if unknown:
        raise InvalidInput(unknown)
    request = make(Request, fields, "request")
    _check_has_sequence(graph, request.seq_len)
    return request


def _only_seq_len(graph: LayerGraph) -> int:
    if graph.fixed_seq_len is not None:
        return graph.fixed_seq_len
    if graph.sample != "tokens":
        return 1
    most = f", at most {graph.max_seq_len:,} of them" if graph.max_seq_len else ""
    raise InvalidInput(f"sequence length (--seq-len): missing; a sample of {graph.name} is "
                       f"tokens{most}")


def _check_has_sequence(graph: LayerGraph, seq_len: int) -> None:
    """Other limits are the search's to check; it sees only a polynomial in the length."""
    if graph.sample != "tokens" and graph.fixed_seq_len is None and seq_len != 1:
        raise InvalidInput(f"sequence length {seq_len}: {graph.name} takes {graph.sample}, which "
                           "have none; leave it out, or give 1")


def check(layout: Layout | str | Path, model: Any = None,
          topology: str | Path | Topology | None = None, example_inputs: Any = None,
          links: Links | str | Path | None = None, loss: str | None = None) -> Checked:
    """Find what a layout is about, and price it.

    Proof and alternatives are dropped: they are of a search, and nothing here repeats it.

    Raises:
        InvalidInput: see `planner.check`.
    """
    from planner import pricing, topology_files

    where = "layout"
    if not isinstance(layout, Layout):
        where = str(layout)
        layout = load(Layout, layout)
    graph, model_name = resolve_model(layout.model.name if model is None else model,
                                      example_inputs, loss)
    given = layout.topology.name if topology is None else topology
    devices = topology_files.resolve(given)
    reference = layout.links
    if links is not None or (reference is not None and topology is None):
        measured = links if links is not None else reference.name  # type: ignore[union-attr]
        devices = with_links(devices, measured)
        reference = links_reference(measured, devices)
    changed = []
    if model is None:
        changed += _changed(where, "model", layout.model, digest(graph))
    if topology is None:
        changed += _changed(where, "topology", layout.topology, digest(devices))
    if changed:
        raise InvalidInput(changed)
    _check_has_sequence(graph, layout.request.seq_len)
    layout = replace(
        layout, prediction=None, proof=None, alternatives=(),
        links=None if devices.links is None else reference,
        model=Reference(name=model_name, digest=digest(graph)),
        topology=Reference(name=topology_name(given, devices), digest=digest(devices)))
    return Checked(layout=pricing.price(graph, devices, layout), graph=graph, topology=devices)


def _changed(where: str, what: str, reference: Reference, found: str) -> list[str]:
    if reference.digest in (None, found):
        return []
    return [f"{where}: {what} {reference.name!r} is not what it was when the layout was made: its "
            f"digest is {found[:19]}..., the layout has {str(reference.digest)[:19]}...; to price "
            f"the layout for what it is now, give --{what}"]
