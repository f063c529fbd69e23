"""Run by torchrun: every case of a list against one process, first in float64, then 5 steps in float32."""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import sys
import time
import traceback
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from executor.float64 import float64
from executor.parallelize import parallelize
from tests.executor import tiny
from tests.executor.cases import Case
from profiler.layer_graph import LayerGraph

STEPS = 5


def reference(case: Case, batch: int, dtype: torch.dtype) -> tuple[float, dict[str, torch.Tensor]]:
    made = tiny.build(case.model, batch, dtype)
    inputs = made.inputs if isinstance(made.inputs, dict) else {"x": made.inputs}
    with float64():
        outputs = made.model(**inputs)
        loss = made.loss.total(getattr(outputs, "logits", outputs), made.targets)
        loss = loss / made.loss.count(made.targets)
        loss.backward()
    return float(loss), {n: p.grad for n, p in made.model.named_parameters() if p.grad is not None}


def reference_losses(case: Case, batch: int) -> list[float]:
    made = tiny.build(case.model, batch, torch.float32)
    inputs = made.inputs if isinstance(made.inputs, dict) else {"x": made.inputs}
    parameters = [p for p in made.model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=1e-3)
    losses = []
    for _ in range(STEPS):
        outputs = made.model(**inputs)
        loss = made.loss.total(getattr(outputs, "logits", outputs), made.targets)
        loss = loss / made.loss.count(made.targets)
        loss.backward()
        if case.max_norm is not None:
            torch.nn.utils.clip_grad_norm_(parameters, case.max_norm)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    return losses


_known: dict[object, object] = {}


def cached(function, case: Case, *args):
    key = (function.__name__, case.model, case.max_norm, *args)
    if key not in _known:
        _known[key] = function(case, *args)
    return _known[key]


def run_case(case: Case, graph: LayerGraph) -> dict[str, float]:
    layout = case.layout(graph)
    batch = layout.request.global_batch
    loss, gradients = cached(reference, case, batch, torch.float64)
    made = tiny.build(case.model, batch, torch.float64)
    run = parallelize(made.model, layout, loss=made.loss, graph=graph, device_type="cpu")
    with float64():
        got = run.forward_backward(made.inputs, made.targets)
    scale = max(float(g.abs().max()) for g in gradients.values())
    worst, where = 0.0, ""
    seen = run.gradients()
    for name, gradient in seen.items():
        truth = gradients[name]
        error = float((gradient - truth).abs().max()) / max(float(truth.abs().max()), 1e-6 * scale)
        if not error <= worst:
            worst, where = error, name
    missing = [n for n, _, p in run.named_parameters() if p.requires_grad and n not in seen]
    result = {"gradient": worst, "where": where, "compared": len(seen), "loss": abs(got - loss) / abs(loss),
              "missing": len([n for n in missing if n in gradients])}
    made = tiny.build(case.model, batch, torch.float32)
    run = parallelize(made.model, layout, loss=made.loss, graph=graph, device_type="cpu",
                      optimizer=lambda ps: torch.optim.AdamW(ps, lr=1e-3), max_norm=case.max_norm)
    losses = [run.step(made.inputs, made.targets) for _ in range(STEPS)]
    wanted = cached(reference_losses, case, batch)
    result["steps"] = max(abs(a - b) for a, b in zip(losses, wanted, strict=True))
    return result


def main() -> None:
    module, attribute, folder, out = sys.argv[1:5]
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    cases = getattr(importlib.import_module(module), attribute)
    chosen = sys.argv[5].split(",") if len(sys.argv) > 5 else None
    results = {}
    for case in cases:
        if chosen and case.name not in chosen:
            continue
        begin = time.monotonic()
        faulthandler.dump_traceback_later(45)  # where a case hangs, if it does
        try:
            mine = run_case(case, tiny.graph(case.model, Path(folder)))
        except Exception:
            print(f"case {case.name} failed on rank {dist.get_rank()}:\n{traceback.format_exc()}",
                  flush=True)
            os._exit(1)  # at once: an orderly end would wait for the other ranks
        every: list = [None] * dist.get_world_size()
        dist.all_gather_object(every, mine)
        worst = max(every, key=lambda r: r["gradient"])
        results[case.name] = worst | {"missing": sum(r["missing"] for r in every),
                                      "steps": max(r["steps"] for r in every),
                                      "seconds": time.monotonic() - begin}
        if dist.get_rank() == 0:
            print(case.name, results[case.name], flush=True)
    if dist.get_rank() == 0:
        Path(out).write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
