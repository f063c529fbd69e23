"""From a model and a layout to a `Run`: each technique applied to this rank's part of the model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from torch import nn

from executor.data_parallel import compute_dtype, shard_stage, stored_dtype
from executor.deferred import Deferred, allocate
from executor.fused import copy_whole
from executor.legality import check_layout, check_model, choices, stage_of_layers
from executor.losses import Loss
from executor.mesh import ParallelMesh, build_mesh
from executor.pipeline import SharedParameter, local_stages
from executor.random_state import RandomStreams
from executor.run import Run
from executor.stage import StageModule, copy_with, drop_parameters
from executor.statistics import has_statistics, synchronize_statistics
from executor.tensor_parallel import TensorParallel
from executor.tensor_plan import PlannedGraph, apply_plan, hugging_face_plan
from planner.layout import Layout
from profiler.documents import digest
from profiler.errors import InvalidInput, UnsupportedLayout
from profiler.layer_calls import layer_modules
from profiler.layer_graph import LayerGraph

__all__ = ["parallelize"]


def parallelize(model: nn.Module | Deferred, layout: Layout, *, loss: Loss,
                optimizer: Callable[[Any], torch.optim.Optimizer] | None = None,
                scheduler: Callable[[torch.optim.Optimizer], Any] | None = None,
                graph: LayerGraph | None = None, example_inputs: Any = None,
                max_norm: float | None = None, seed: int = 0,
                device_type: str | None = None,
                tensor_parallel_plan: Mapping[str, str] | Literal["auto"] | None = None) -> Run:
    """Make `model` run as `layout` says, on the processes that are running.

    model: the whole model with its weights, alike on every rank (it is taken apart: do not use it
        after). Or one without weights, of which each rank makes only its shards: a Hugging Face
        model on the meta device, or executor.Deferred.build(function that builds it, seed).
    loss: what is minimised, as sums with counts. optimizer: makes one of (groups of) parameters.
    graph: the model's LayerGraph; else it is traced, which needs `example_inputs` unless the model
        has a Hugging Face config. max_norm: clip gradients to this global norm. seed: of dropout,
        and of a meta model's weights; alike on every rank. tensor_parallel_plan: which modules are
        divided, by name, in Hugging Face's words (see `tensor_plan`); "auto": the plan that the
        model ships with; None: all that the trace divides.

    Raises:
        UnsupportedLayout: the layout is illegal for the model or asks for what the executor has
            not.
        InvalidInput: world size, model or device other than the layout's.
    """
    if not isinstance(loss, Loss):
        raise InvalidInput(
            f"loss is {type(loss).__name__}: an executor.Loss is needed, which gives sums and "
            f"counts (a mean of "
            f"means is wrong for unequal micro-batches): executor.cross_entropy(), or Loss(total=, "
            f"count=)")
    deferred = None
    if isinstance(model, Deferred) or any(p.is_meta for p in model.parameters()):
        deferred = model if isinstance(model, Deferred) else Deferred.of(model, seed)
        model = deferred.model
    graph = graph or _traced(model, layout, example_inputs, loss)
    check_model(layout, graph)
    planned = _planned(model, graph, tensor_parallel_plan)
    check_layout(layout, planned.graph)
    _check_modules(model, layout, graph)
    mesh = build_mesh(layout, device_type)
    _prepare(model, layout)
    random = RandomStreams(mesh)
    tensor_parallel = (TensorParallel(mesh.tp_mesh, random, planned.vouched)
                       if layout.mesh.tp > 1 else None)
    names = _first_names(model)
    shared = _shared(model, layout, graph, mesh, names)
    skeleton = _skeleton(model) if layout.mesh.pp > 1 else None
    tied = {id(p) for name, p in model.named_parameters() if name in {s.name for s in shared}}
    stages = {number: _stage(model, layout, planned.graph, mesh, loss, number, tied,
                             tensor_parallel)
              for number in local_stages(layout, mesh.coordinate("pp"))}
    run = Run(layout=layout, graph=graph, mesh=mesh, loss=loss, stages=stages, names=names,
              shared=shared, random=random, tensor_parallel=tensor_parallel, skeleton=skeleton,
              max_norm=max_norm, seed=seed)
    if deferred is not None:
        _fill(run, deferred)
    if optimizer is not None:
        trainable = [p for _, _, p in run.named_parameters() if p.requires_grad]
        # a rank whose layers are all frozen still keeps time with the others' schedules
        run.optimizer = optimizer(trainable or [nn.Parameter(torch.zeros(0, device=mesh.device))])
        run.scheduler = scheduler(run.optimizer) if scheduler is not None else None
    random.seed(seed, 0)
    return run


def _fill(run: Run, deferred: Deferred) -> None:
    """Give the parameters of this rank their weights, one after the other."""
    places: dict[str, list[nn.Parameter]] = {}
    for name, _, parameter in run.named_parameters():
        places.setdefault(name, []).append(parameter)
    with torch.no_grad():
        for name, whole in deferred.parameters(set(places)):
            for parameter in places[name]:
                copy_whole(parameter.data, whole, run.fused_of(parameter), run.layout.mesh.tp)


def _planned(model: nn.Module, graph: LayerGraph,
             plan: Mapping[str, str] | Literal["auto"] | None) -> PlannedGraph:
    if plan is None:
        return PlannedGraph(graph, frozenset())
    if plan == "auto":
        plan = hugging_face_plan(model)
        if not plan:
            raise InvalidInput(f"{type(model).__name__} ships with no tensor-parallel plan: give "
                               f"one, or none (what the trace finds)")
    return apply_plan(model, graph, plan)


def _traced(model: nn.Module, layout: Layout, example_inputs: Any, loss: Loss) -> LayerGraph:
    config = getattr(model, "config", None)
    if example_inputs is None and config is not None and hasattr(config, "to_dict"):
        from profiler.hugging_face import trace_hugging_face

        return trace_hugging_face(config.to_dict(), name=layout.model.name)
    from profiler.trace import trace

    traced = trace(model, example_inputs, name=layout.model.name)
    if loss.name is not None and layout.model.digest not in (None, digest(traced)):
        return trace(model, example_inputs, name=layout.model.name, loss=loss.name)
    return traced


def _check_modules(model: nn.Module, layout: Layout, graph: LayerGraph) -> None:
    """Refuse what no division of this model's modules would compute rightly."""
    problems = []
    mesh, count = layout.mesh, layout.num_micro_batches
    modules = layer_modules(model, [layer.name for layer in graph.layers])
    held = {id(p) for module in modules for p in module.parameters()}
    outside = [name for name, p in model.named_parameters() if id(p) not in held]
    if outside and (mesh.pp > 1 or mesh.tp > 1):
        problems.append(
            f"parameters outside every layer ({', '.join(outside[:4])}) cannot be cut or divided: "
            f"pp {mesh.pp} and tp {mesh.tp} must be 1")
    chosen = choices(layout)
    statistics = [index for index, module in enumerate(modules)
                  if any(has_statistics(inner) for inner in module.modules())]
    again = [index for index in statistics if chosen[index].recompute != "none"]
    if statistics and count > 1:
        problems.append(
            f"batch normalization ({_listed(graph, statistics)}) takes its statistics from one "
            f"micro-batch, not from the global batch: it needs one micro-batch (got {count}), or "
            f"eval(), or another norm")
    if again:
        problems.append(f"batch normalization ({_listed(graph, again)}) would count its "
                        f"statistics twice with recompute: these layers need recompute none")
    if problems:
        raise UnsupportedLayout(problems)


def _listed(graph: LayerGraph, indices: list[int]) -> str:
    names = [graph.layers[index].name for index in indices]
    return f"{', '.join(names[:4])}{' ...' if names[4:] else ''}"


def _prepare(model: nn.Module, layout: Layout) -> None:
    stored = stored_dtype(layout.request.bytes)
    kept = {p.dtype for p in model.parameters() if p.dtype.is_floating_point}
    if kept - {stored, torch.float64}:  # float64 is for proofs: it stays
        exact = [(m, key, b) for m in model.modules() for key, b in m._buffers.items()
                 if type(m).__name__.endswith("RotaryEmbedding")]
        model.to(stored)
        for module, key, buffer in exact:  # angles of late positions need more than 8 bits
            module._buffers[key] = buffer
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        if getattr(config, "use_cache", False):
            config.use_cache = False  # training needs no keys and values of earlier calls


def _first_names(model: nn.Module) -> dict[str, str]:
    first: dict[int, str] = {}
    return {name: first.setdefault(id(p), name)
            for name, p in model.named_parameters(remove_duplicate=False)}


def _shared(model: nn.Module, layout: Layout, graph: LayerGraph, mesh: ParallelMesh,
            names: dict[str, str]) -> list[SharedParameter]:
    """The parameters that several stages hold, in the model's order."""
    if layout.mesh.pp == 1:
        return []
    modules = layer_modules(model, [layer.name for layer in graph.layers])
    stages: dict[int, set[int]] = {}
    for index, stage in stage_of_layers(layout).items():
        for parameter in modules[index].parameters():
            stages.setdefault(id(parameter), set()).add(stage)
    return [SharedParameter.build(names[name], tuple(sorted(stages[id(p)])), mesh)
            for name, p in model.named_parameters() if len(stages.get(id(p), ())) > 1]


def _skeleton(model: nn.Module) -> nn.Module:
    """The model without its weights, to learn from what crosses the cuts."""
    return copy_with(model, lambda p: nn.Parameter(p.detach().to("meta"),
                                                   requires_grad=p.requires_grad))


def _copy(parameter: nn.Parameter, is_shared: bool) -> nn.Parameter:
    """A stage's own parameter; two stages of one rank must not update the same memory twice."""
    data = parameter.detach().clone() if is_shared else parameter.detach()
    return nn.Parameter(data, requires_grad=parameter.requires_grad)


def _move(model: nn.Module, device: torch.device) -> None:
    """Bring what has values to the device."""
    model._apply(lambda tensor: tensor if tensor.is_meta else tensor.to(device))


def _stage(model: nn.Module, layout: Layout, graph: LayerGraph, mesh: ParallelMesh, loss: Loss,
           number: int, shared: set[int], tensor_parallel: TensorParallel | None) -> StageModule:
    chosen = dict(layout.stages[number].iter_layers())
    names = [layer.name for layer in graph.layers]
    if layout.mesh.pp > 1:
        modules = layer_modules(model, names)
        own = {id(p) for index in chosen for p in modules[index].parameters()}
        original = model
        model = copy_with(model, lambda p: _copy(p, id(p) in shared) if id(p) in own else None)
        modules = layer_modules(model, names)
        drop_parameters(model, original, [modules[index] for index in chosen])
    _move(model, mesh.device)
    synchronize_statistics(model, mesh)
    if tensor_parallel is not None:
        modules = layer_modules(model, names)
        for index, choice in chosen.items():
            tensor_parallel.divide(index, names[index], modules[index], graph.kind_of(index),
                                   choice)
    stage = StageModule(model, names, chosen, loss=loss, is_last=number == len(layout.stages) - 1,
                        tensor_parallel=tensor_parallel,
                        input_dtype=compute_dtype(layout.request.bytes))
    fused = {} if tensor_parallel is None else {
        name: tensor_parallel.fused[p] for name, p in model.named_parameters()
        if p in tensor_parallel.fused}
    shard_stage(stage, stage.layers, mesh, layout.request.bytes)
    allocate(stage, mesh.device)
    for name, parameter in model.named_parameters():
        if name in fused:  # FSDP2 puts a parameter of its own in the place of each
            parameter.meshwright_fused = fused[name]
    return stage
