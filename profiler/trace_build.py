"""From the runs of a model to its LayerGraph: layers, edges, ties, and one kind a cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from profiler.documents import digest
from profiler.errors import InvalidInput
from profiler.layer_graph import Edge, Layer, LayerGraph, LayerKind, ModelSource, Tie
from profiler.trace_costs import LayerCosts, ParameterPlace
from profiler.trace_events import Run
from profiler.trace_fit import Fit
from profiler.trace_local import Sizes
from profiler.trace_split import infer_splits, vocabulary_of
from profiler.trace_view import LayerView, layer_views

__all__ = ["build_graph"]


def build_graph(model: nn.Module, layers: dict[str, nn.Module], parameters: dict[str, nn.Parameter],
                runs: Sequence[Run], fit: Fit, *, name: str,
                sample: Literal["tokens", "images", "features"], max_seq_len: int | None,
                source: ModelSource, reference: tuple[int, int]) -> LayerGraph:
    """Put the graph together; `parameters` are the real ones by every name they have."""
    views = layer_views(runs[0])
    if not views:
        raise InvalidInput(f"{name}: the forward calls none of its layer modules "
                           f"({', '.join(list(layers)[:5])})")
    builder = _Builder(model, layers, parameters, runs, fit, views, sample == "tokens", reference)
    names = builder.layer_names()
    kinds, kind_names = builder.kinds()
    return LayerGraph(
        name=name, kinds=kinds, edges=builder.edges(), ties=builder.ties(), sample=sample,
        layers=tuple(Layer(name=n, kind=k) for n, k in zip(names, kind_names, strict=True)),
        max_seq_len=max_seq_len, source=source)


@dataclass(slots=True)
class _Builder:
    model: nn.Module
    modules: dict[str, nn.Module]
    parameters: dict[str, nn.Parameter]
    runs: Sequence[Run]
    fit: Fit
    views: list[LayerView]
    is_tokens: bool
    reference: tuple[int, int]

    # ---- names and parameters ----

    def layer_names(self) -> list[str]:
        """The name of every call: a module called twice needs a second name of its own."""
        aliases: dict[int, list[str]] = {}
        for path, module in self.model.named_modules(remove_duplicate=False):
            aliases.setdefault(id(module), []).append(path)
        names = []
        for view in self.views:
            free = aliases[id(self.modules[view.path])]
            if not free:
                raise InvalidInput(
                    f"the module {view.path or 'of the model'!r} is called more than once in a "
                    f"forward; a layer is called once (register it under a second name, or "
                    f"call two modules that share their parameters)")
            names.append(free.pop(0))
        return names

    def places(self) -> list[list[ParameterPlace]]:
        """The parameters of every layer, those outside all layer modules included."""
        storage_of = {real: index for index, real in self.runs[0].parameters.items()}
        places: list[list[ParameterPlace]] = []
        held: set[int] = set()
        for view in self.views:
            own = list(self.modules[view.path].named_parameters())
            held |= {id(p) for _, p in own}
            places.append([_place(storage_of[id(p)], n, p) for n, p in own])
        for name, parameter in self.parameters.items():
            if id(parameter) not in held:
                held.add(id(parameter))
                storage = storage_of[id(parameter)]
                reader = next((op.layer for op in self.runs[0].ops
                               if any(use.storage == storage for use in op.reads)), 0)
                places[reader].append(_place(storage, f"/{name}", parameter))
        return places

    def ties(self) -> tuple[Tie, ...]:
        found: dict[int, list[tuple[int, str]]] = {}
        for index, places in enumerate(self.places()):
            for place in places:
                found.setdefault(place.storage, []).append((index, place.name))
        return tuple(Tie(places=tuple(places)) for places in found.values() if len(places) > 1)

    def _buffer_bytes(self) -> list[int]:
        counts = []
        seen: set[int] = set()
        for view in self.views:
            own = {id(b): b for b in self.modules[view.path].buffers()}
            seen |= set(own)
            counts.append(sum(b.numel() * b.element_size() for b in own.values()))
        rest = {id(b): b for b in self.model.buffers() if id(b) not in seen}
        counts[0] += sum(b.numel() * b.element_size() for b in rest.values())
        return counts

    # ---- kinds ----

    def _kept(self) -> list[dict[int, bool]]:
        """The saved storages that each layer answers for, every storage at one layer, and whether
        they stay whatever that layer recomputes: made and kept outside of its module."""
        storages = self.runs[0].storages
        savers: dict[int | tuple[int, int], list[tuple[int, int]]] = {}
        for view in self.views:
            for saved in view.saved:
                savers.setdefault(view.actual[saved], []).append((view.index, saved))
        kept: list[dict[int, bool]] = [{} for _ in self.views]
        for actual, places in savers.items():
            layer, saved = places[0]
            stays = saved in self.views[layer].saved_outside
            if isinstance(actual, int):
                storage = storages[actual]
                if not storage.external and not storage.derived:
                    layer = storage.layer  # a table that many layers may be given
                    saved = self.views[layer].names.get(actual, actual)
                    stays = (not self._made_inside(self.views[layer], saved)
                             or any(place[0] != layer for place in places))
                else:
                    outer = [place for place in places
                             if not self.views[place[0]].is_own(storage)]
                    layer, saved = outer[0] if outer else places[0]
                    stays = saved in self.views[layer].saved_outside
            kept[layer][saved] = stays
        return kept

    def _made_inside(self, view: LayerView, storage: int) -> bool:
        """Whether the module of a layer made a storage, as the layer's view names it."""
        made = self.runs[0].storages[storage]
        return (view.is_own(made) and made.creator is not None
                and self.runs[0].ops[made.creator].inside)

    def _entering(self, kept_of: list[dict[int, bool]]) -> list[list[int]]:
        """The storages that the module of each layer is given, at their first reader.

        They are what a checkpoint of the layer keeps, so that they are none where the layer has no
        backward, and tables that depend on no sample are at the layer that made them.
        """
        ignored, seen = set(self.runs[0].parameters) | self.runs[0].buffers, set[int]()
        entering: list[list[int]] = []
        for view, kept in zip(self.views, kept_of, strict=True):
            read = dict.fromkeys(use.storage for _, op in view.forward if op.inside
                                 for use in op.reads if view.backward)
            fresh = [s for s in read if s not in ignored and self._enters(view, s)
                     and not kept.get(s, False) and view.back.get(s, s) not in seen]
            seen |= {view.back.get(s, s) for s in fresh}
            entering.append(fresh)
        return entering

    def _enters(self, view: LayerView, storage: int) -> bool:
        """Whether a layer's module is given an activation, and does not make it."""
        made = self.runs[0].storages[storage]
        if view.is_own(made):
            return made.derived and not self._made_inside(view, storage)
        return made.learned or (made.external and made.derived)

    def kinds(self) -> tuple[dict[str, LayerKind], list[str]]:
        """Every distinct kind, and the name of each layer's."""
        run = self.runs[0]
        parameters = set(run.parameters)
        vocabulary, tables = vocabulary_of(self.views, run.storages, parameters)
        if not self.is_tokens:
            vocabulary, tables = None, set()
        kept, places, buffers = self._kept(), self.places(), self._buffer_bytes()
        inputs = self._entering(kept)
        entered = {view.back.get(s, s) for view, own in zip(self.views, inputs, strict=True)
                   for s in own}
        saved = {actual for view in self.views for actual in view.actual.values()}
        names: dict[Any, str] = {}
        kinds: dict[str, LayerKind] = {}
        by_digest: dict[str, str] = {}
        result = []
        for view in self.views:
            outside = tuple(k for k, op in view.forward if not op.inside)
            key = (view.like, outside, tuple(kept[view.index].items()),
                   tuple(inputs[view.index]), buffers[view.index],
                   tuple((p.name, p.trainable) for p in places[view.index]))
            if key not in names:
                splits = infer_splits(view, run.storages, parameters, vocabulary, tables,
                                      self.runs[-1].ops,
                                      Sizes(self.fit.points[0], self.fit.points[-1]))
                touched = {use.storage for _, op in view.forward + view.backward
                           for use in op.reads + op.writes}
                anywhere = set(view.saved) | {s for s in touched if view.back.get(s, s) in saved}
                passed = {s for s in touched if view.back.get(s, s) in entered}
                kind = LayerCosts(
                    self.runs, self.fit, view, splits, self._renamed(places, view), buffers[
                        view.index], kept[view.index], inputs[view.index], anywhere, passed,
                    self.is_tokens, self.reference, self.modules[view.path]).kind()
                names[key] = self._name(kind, view, kinds, by_digest)
            result.append(names[key])
        return kinds, result

    def _renamed(self, places: list[list[ParameterPlace]], view: LayerView) -> list[ParameterPlace]:
        """The layer's parameters, with the storages that the operations of the view name."""
        like = {place.name: place.storage for place in places[view.like]}
        return [ParameterPlace(like.get(p.name, p.storage), p.name, p.shape, p.dtype, p.trainable)
                for p in places[view.index]]

    def _name(self, kind: LayerKind, view: LayerView, kinds: dict[str, LayerKind],
              by_digest: dict[str, str]) -> str:
        key = digest(kind)
        if key not in by_digest:
            base = type(self.modules[view.path]).__name__
            name, number = base, 2
            while name in kinds:
                name, number = f"{base}.{number}", number + 1
            by_digest[key], kinds[name] = name, kind
        return by_digest[key]

    # ---- edges ----

    def edges(self) -> tuple[Edge, ...]:
        run = self.runs[0]
        found: dict[tuple[int, int, int], Edge] = {}
        labels: dict[int, dict[int, str]] = {}

        def add(source: int, target: int, storage: int, requires_grad: bool,
                size_at: Any) -> None:
            made = run.storages[storage]
            if source in (-1, target) or made.external or not made.learned:
                return
            known = labels.setdefault(source, {})
            label = known.setdefault(storage, f"output.{len(known)}" if known else "output")
            edge = Edge(source=source, target=target, tensor=label, elements=self.fit.of(size_at),
                        bytes_per_element=made.itemsize if made.fixed_dtype else None,
                        has_gradient=requires_grad)
            before = found.get((source, target, storage))
            if before is None or (requires_grad and not before.has_gradient):
                found[source, target, storage] = edge

        read_by = self._inputs_read()
        for index, call in enumerate(run.calls):
            for position, (use, writer) in enumerate(zip(call.inputs, call.writers, strict=True)):
                if position in read_by[call.like]:
                    add(writer, index, use.storage, use.requires_grad,
                        lambda i, c=index, p=position: self.runs[i].calls[c].inputs[p].numel)
        writers: dict[int, int] = {}
        for number, op in enumerate(run.ops):
            if not op.forward:
                continue
            for position, use in enumerate(op.reads):
                writer = writers.get(use.storage, run.storages[use.storage].layer)
                add(writer, op.layer, use.storage, use.requires_grad,
                    lambda i, n=number, p=position: self.runs[i].ops[n].reads[p].numel)
            for use in op.writes:
                writers[use.storage] = op.layer
        return tuple(sorted(found.values(), key=lambda e: (e.source, e.target, e.tensor)))

    def _inputs_read(self) -> dict[int, set[int]]:
        """For each layer that was run: the positions of the arguments that its work reads."""
        run = self.runs[0]
        reads: dict[int, set[int]] = {}
        for op in run.ops:
            if op.forward and op.inside:
                reads.setdefault(op.layer, set()).update(use.storage for use in op.reads)
        return {call.like: {p for p, use in enumerate(run.calls[call.like].inputs)
                            if use.storage in reads.get(call.like, ())}
                for call in run.calls}


def _place(storage: int, name: str, parameter: nn.Parameter) -> ParameterPlace:
    return ParameterPlace(storage, name, tuple(parameter.shape),
                          str(parameter.dtype).removeprefix("torch."), parameter.requires_grad)
