"""A tensor-parallel plan that the user gives: which modules are divided, in Hugging Face's words.

    {"model.layers.*.mlp.up_proj": "colwise", "model.layers.*.mlp.down_proj": "rowwise"}

The plan chooses the layers that are divided, and answers for the classes whose code the executor
does not know (attention that counts on local heads alone). A plan against the trace is refused: it
would compute something else; and so is one that leaves part of a layer whole, since a divided layer
sees a part of the sequence, and attention has to see all of it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch import nn

from planner.capabilities import load_capabilities
from profiler.errors import InvalidInput
from profiler.layer_graph import Layer, LayerGraph, LayerKind, Parameter, Split

__all__ = ["PlannedGraph", "apply_plan", "hugging_face_plan"]

_STYLES: dict[str, frozenset[Split]] = {
    "colwise": frozenset({"column", "vocabulary"}), "rowwise": frozenset({"row"}),
    "colwise_gather_output": frozenset({"vocabulary"}), "colwise_rep": frozenset({"vocabulary"}),
    "embedding_rowwise": frozenset({"vocabulary"}),
    "replicate": frozenset({"replicated"}), "replicated": frozenset({"replicated"}),
    "replicated_with_grad_allreduce": frozenset({"replicated"})}
"""Which of the trace's divisions a style may stand for. Logits stay divided: so is the loss."""


@dataclass(frozen=True, slots=True)
class PlannedGraph:
    """The graph with the plan's division; `vouched`: classes that the plan answers for."""

    graph: LayerGraph
    vouched: frozenset[str]


def hugging_face_plan(model: nn.Module) -> dict[str, str]:
    """The plan that a Hugging Face model ships with; empty if it has none.

    It says nothing of embeddings and seldom of the head, which stay as the trace divides them.
    """
    config = getattr(model, "config", None)
    prefix = getattr(model, "base_model_prefix", "")
    inner = getattr(config, "base_model_tp_plan", None) or {}
    outer = getattr(type(model), "_tp_plan", None) or {}
    return {f"{prefix}.{name}" if prefix else name: style for name, style in inner.items()} | outer


def apply_plan(model: nn.Module, graph: LayerGraph, plan: Mapping[str, str]) -> PlannedGraph:
    """Divide the layers that a plan names as it says.

    plan: fully qualified module names, `*` for one part of a name, and a style for each.

    Raises:
        InvalidInput: an unknown style, a name that no layer has, or a division that the trace of
            the model contradicts; all of them at once.
    """
    problems = [f"{name}: style {style!r} is not one of {', '.join(_STYLES)}"
                for name, style in plan.items() if style not in _STYLES]
    if problems:
        raise InvalidInput(["tensor-parallel plan: " + problem for problem in problems])
    patterns = {name: re.compile(re.escape(name).replace(r"\*", r"[^.]+")) for name in plan}
    known, modules = load_capabilities("executor"), dict(model.named_modules())
    kinds, layers = dict(graph.kinds), []
    made: dict[tuple[str, tuple[tuple[str, str], ...]], str] = {}
    unused, vouched = set(plan), set[str]()
    for layer in graph.layers:
        styles: dict[str, str] = {}
        for path, _ in modules[layer.name].named_modules():
            full = f"{layer.name}.{path}" if path else layer.name
            for name, pattern in patterns.items():
                if pattern.fullmatch(full):
                    styles[path] = plan[name]
                    unused.discard(name)
        if not styles:
            layers.append(layer)
            continue
        key = (layer.kind, tuple(sorted(styles.items())))
        if key not in made:
            made[key] = f"{layer.kind}/plan{len(made)}"
            kinds[made[key]], found = _planned(graph.kinds[layer.kind], layer, styles)
            problems += found
            split = graph.kinds[layer.kind].tensor_parallel
            own = type(modules[layer.name]).__name__
            unknown = set(split.callers if split else ()) - set(known.tensor_parallel_classes or ())
            vouched |= unknown
            if own in unknown:
                problems.append(f"{layer.name}: the code of {own} itself works on more than one "
                                f"token at a time, and the executor does not know it")
        layers.append(Layer(name=layer.name, kind=made[key]))
    problems += [f"{name}: no module of a layer has this name" for name in sorted(unused)]
    if problems:
        raise InvalidInput(["tensor-parallel plan: " + problem for problem in problems])
    used = {layer.kind for layer in layers}
    return PlannedGraph(replace(graph, layers=tuple(layers),
                                kinds={n: k for n, k in kinds.items() if n in used}),
                        frozenset(vouched))


def _planned(kind: LayerKind, layer: Layer, styles: Mapping[str, str]
             ) -> tuple[LayerKind, list[str]]:
    """The kind with only what the plan divides; and what is wrong with the plan."""
    parameters: list[Parameter] = []
    problems: list[str] = []
    sides: dict[bool, dict[str, None]] = {}
    for parameter in kind.parameters:
        path, _, key = parameter.name.rpartition(".")
        style = styles.get(path, "replicated")
        is_divided = _STYLES[style] != {"replicated"}
        if key == "weight" and is_divided and parameter.split not in _STYLES[style]:
            problems.append(f"{layer.name}.{path}: {style}, and the trace of the model says "
                            f"{parameter.split}")
        if parameter.split != "replicated":
            sides.setdefault(is_divided, {})[path or layer.name] = None
        parameters.append(parameter if is_divided else
                          replace(parameter, split="replicated", split_dim=None))
    if len(sides) > 1:
        problems.append(f"{layer.name}: {', '.join(sides[False])} must be divided too, since "
                        f"{', '.join(sides[True])} are")
    split = kind.tensor_parallel
    if split is not None:
        split = replace(split, callers=()) if any(
            p.split != "replicated" for p in parameters) else None
    return replace(kind, parameters=tuple(parameters), tensor_parallel=split), problems
