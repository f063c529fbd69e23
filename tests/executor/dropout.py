"""Dropout under tensor parallelism, and with recompute; on two processes."""

# ruff: noqa: C408 (keyword arguments read better in tables)
from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from executor.parallelize import parallelize
from tests.executor import tiny
from tests.executor.cases import FULL, SELECTIVE, Case

WHOLE = 3
"""The block that is not divided."""


def _model() -> tiny.Tiny:
    made = tiny.build("gpt2", 2, torch.float64)
    for module in made.model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.5
    return made


def _run(graph: Any, choices: Any, mesh: dict[str, int]) -> tuple[dict, dict, float]:
    case = Case(name="", model="gpt2", mesh=mesh, choices=choices, whole=(WHOLE,),
                num_micro_batches=2 // mesh.get("dp_shard", 1))
    made = _model()
    seen: dict[str, torch.Tensor] = {}
    run = parallelize(made.model, case.layout(graph), loss=made.loss, graph=graph,
                      device_type="cpu", seed=7)
    model = run.stages[0].model.transformer

    def keep(name: str) -> Any:
        def hook(module: Any, args: Any, out: Any) -> None:
            local = out.to_local() if isinstance(out, DTensor) else out
            seen.setdefault(name, local.detach().clone())
        return hook
    model.drop.register_forward_hook(keep("between layers"))
    model.h[0].mlp.dropout.register_forward_hook(keep("in a divided layer"))
    model.h[1].mlp.dropout.register_forward_hook(keep("in a whole layer"))
    loss = run.forward_backward(made.inputs, made.targets)
    return seen, run.gradients(), loss


def _of_all(tensor: torch.Tensor) -> list[torch.Tensor]:
    every = [torch.empty_like(tensor) for _ in range(2)]
    dist.all_gather(every, tensor.contiguous())
    return every


def check_dropout(graphs: Path) -> None:
    """Unlike where data are unlike, alike where ranks compute alike, same when recomputed."""
    graph = tiny.graph("gpt2", graphs)
    plain = (FULL.__class__(),)
    seen, gradients, loss = _run(graph, plain, dict(tp=2))
    for name in ("between layers", "in a divided layer"):
        first, second = ((t == 0) for t in _of_all(seen[name]))
        assert 0.3 < first.double().mean() < 0.7, f"{name}: no dropout"
        assert not torch.equal(first, second), f"{name}: shards of a sequence share one mask"
    first, second = _of_all(seen["in a whole layer"])
    assert (first == 0).double().mean() > 0.3
    assert torch.equal(first, second), "ranks that compute alike drew unlike masks"
    seen, _, _ = _run(graph, plain, dict(dp_shard=2))
    first, second = ((t == 0) for t in _of_all(seen["in a divided layer"]))
    assert not torch.equal(first, second), "data-parallel ranks share one mask"
    for choice in (FULL, SELECTIVE):
        _, again, same = _run(graph, (choice,), dict(tp=2))
        assert same == loss, "recompute drew other masks"
        for name, gradient in gradients.items():
            assert torch.allclose(gradient, again[name], rtol=1e-12, atol=1e-15), name
