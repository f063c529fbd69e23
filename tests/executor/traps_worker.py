"""Run by torchrun on two processes: what goes wrong silently, or dies obscurely, in plain torch."""

# ruff: noqa: C408 (keyword arguments read better in tables)
from __future__ import annotations

import copy
import faulthandler
import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from executor.compare import _call
from executor.float64 import float64
from executor.parallelize import parallelize
from executor.tensor_plan import apply_plan, hugging_face_plan
from profiler.errors import InvalidInput, UnsupportedLayout
from profiler.trace import trace
from tests.executor import tiny
from tests.executor.cases import Case
from tests.executor.dropout import check_dropout
from tests.executor.precision import check_precision

LIMIT = 1e-10


def _error(model: nn.Module, run: Any, inputs: Any, targets: torch.Tensor, loss: Any) -> float:
    """The largest difference of a gradient from one process, relative to the largest."""
    with float64():
        (loss.total(_call(model, inputs), targets) / loss.count(targets)).backward()
        run.forward_backward(inputs, targets)
    truth = {name: p.grad for name, p in model.named_parameters()}
    scale = max(float(g.abs().max()) for g in truth.values())
    worst = max(float((g - truth[n]).abs().max()) for n, g in run.gradients().items()) / scale
    for parameter in model.parameters():
        parameter.grad = None
    for _, _, parameter in run.named_parameters():
        parameter.grad = None
    return worst


def _pair(case: Case, graphs: Path, **more: Any) -> tuple[Any, Any, tiny.Tiny]:
    """(one process's model, run, data)."""
    graph = tiny.graph(case.model, graphs)
    layout = case.layout(graph)
    made = tiny.build(case.model, layout.request.global_batch, torch.float64)
    alone = copy.deepcopy(made.model)
    run = parallelize(made.model, layout, loss=made.loss, graph=graph, device_type="cpu", **more)
    return alone, run, made


def check_sequence_lengths_change_between_steps(graphs: Path) -> None:
    for mesh in (dict(pp=2), dict(tp=2)):
        alone, run, made = _pair(Case(name="", model="llama", mesh=mesh), graphs)
        for length in (16, 8, 16, 12):
            inputs = {k: v[:, :length].contiguous() for k, v in made.inputs.items()}
            targets = made.targets[:, :length].contiguous()
            targets[:, 0] = 5  # some term is left
            assert _error(alone, run, inputs, targets, made.loss) < LIMIT, (mesh, length)


def check_a_batch_of_another_size_is_refused(graphs: Path) -> None:
    for mesh in (dict(pp=2), dict(dp_shard=2)):
        _, run, made = _pair(Case(name="", model="llama", mesh=mesh), graphs)
        inputs = {k: v[:1].repeat(3, 1) for k, v in made.inputs.items()}
        with pytest.raises(InvalidInput, match=r"must be the global batch [24].*\(3, 16\)"):
            run.forward_backward(inputs, made.targets[:1].repeat(3, 1))
        with pytest.raises(InvalidInput, match="no term of loss"):
            run.forward_backward(made.inputs, torch.full_like(made.targets, -100))


def check_a_tied_table_stays_one_parameter(graphs: Path) -> None:
    for mesh in (dict(dp_shard=2), dict(tp=2), dict(dp_replicate=2)):
        _, run, _ = _pair(Case(name="", model="gpt2", mesh=mesh), graphs)
        model = run.stages[0].model
        assert model.lm_head.weight is model.transformer.wte.weight, mesh


class Attention(nn.Module):
    """Counts on local heads alone, and nobody knows it."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(24, 24) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (m(x).unflatten(-1, (-1, 6)).transpose(1, 2) for m in (self.q, self.k, self.v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(out.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(24), Attention()
        self.up, self.down = nn.Linear(24, 32), nn.Linear(32, 24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm(x))
        return x + self.down(F.silu(self.up(x)))


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(101, 24), nn.Linear(24, 101)
        self.layers = nn.ModuleList([Layer() for _ in range(2)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.table(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


ATTENTION = {f"layers.*.attention.{name}": "colwise" for name in "qkv"} | {
    "layers.*.attention.o": "rowwise"}
MLP = {"layers.*.up": "colwise", "layers.*.down": "rowwise"}


PLANS: list[tuple[dict[str, str], str]] = [
    (MLP, r"layers.0: attention.q, .* must be divided too, since up, down are"),
    ({"layers.*.up": "colwize"}, "style 'colwize' is not one of colwise, rowwise"),
    ({"layers.*.up": "rowwise", "layers.*.down": "rowwise"} | ATTENTION,
     "layers.0.up: rowwise, and the trace of the model says column"),
    ({"blocks.*.up": "colwise"}, r"blocks\.\*\.up: no module of a layer has this name")]


def check_a_plan_is_followed(graphs: Path) -> None:
    torch.manual_seed(3)
    model = Decoder().double()
    graph = trace(model, torch.zeros(2, 16, dtype=torch.int64), name="decoder")
    layout = Case(name="", model="", mesh=dict(tp=2)).layout(graph)
    data = tiny.build("llama", 2, torch.float64)
    inputs = data.inputs["input_ids"] % 101
    targets = data.targets.where(data.targets < 0, data.targets % 101)
    run = parallelize(copy.deepcopy(model), layout, loss=data.loss, graph=graph,
                      device_type="cpu", tensor_parallel_plan=ATTENTION | MLP)
    own = run.stages[0].model.layers[0]
    assert own.up.weight.to_local().shape == (16, 24)
    assert own.attention.q.weight.to_local().shape == (12, 24)
    assert _error(model, run, inputs, targets, data.loss) < LIMIT
    for plan, message in PLANS:
        with pytest.raises(InvalidInput, match=message):
            apply_plan(model, graph, plan)
    with pytest.raises(UnsupportedLayout, match="does not know how to divide Attention"):
        parallelize(model, layout, loss=data.loss, graph=graph, device_type="cpu")


def check_the_plan_of_a_model_is_what_the_trace_finds(graphs: Path) -> None:
    alone, run, made = _pair(Case(name="", model="llama", mesh=dict(tp=2)), graphs,
                             tensor_parallel_plan="auto")
    assert _error(alone, run, made.inputs, made.targets, made.loss) < LIMIT
    _, found, _ = _pair(Case(name="", model="llama", mesh=dict(tp=2)), graphs)
    by_trace = {n: p.placements for n, _, p in found.named_parameters()}
    assert {n: p.placements for n, _, p in run.named_parameters()} == by_trace
    assert hugging_face_plan(alone)["model.layers.*.mlp.down_proj"] == "rowwise"


CHECKS = [
    check_sequence_lengths_change_between_steps, check_a_batch_of_another_size_is_refused,
    check_a_tied_table_stays_one_parameter, check_a_plan_is_followed,
    check_the_plan_of_a_model_is_what_the_trace_finds, check_dropout, check_precision]


def main() -> None:
    """Arguments: the folder of graphs, and the checks' names if not all."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    for check in CHECKS:
        if sys.argv[2:] and check.__name__ not in sys.argv[2:]:
            continue
        faulthandler.dump_traceback_later(90)
        check(Path(sys.argv[1]))
        print(f"{check.__name__}: ok", flush=True)
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    main()
