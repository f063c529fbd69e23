"""Run by torchrun: compares every case of a list with one process, writes results as JSON."""

from __future__ import annotations

import faulthandler
import functools
import importlib
import json
import os
import sys
import time
import traceback
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from executor import compare as compare_module
from executor.compare import Problem, compare
from tests.executor import tiny
from tests.executor.cases import Case

WATCHED_CASE, WATCHED_BLOCK = "llama tp4 kv heads", "model.layers.0"

_known: dict[Any, Any] = {}


def remembered(function: Any) -> Any:
    """The single process's answer, once for all cases of one model and batch."""
    def call(problem: Any, *args: Any) -> Any:
        key = (function.__name__, problem.model, problem.max_norm, *args)
        if key not in _known:
            _known[key] = function(problem, *args)
        return _known[key]
    return call


@dataclass(frozen=True)
class Builder:
    """Builds one model with one batch; equal builders build equal ones."""

    name: str
    batch: int

    def __call__(self, dtype: torch.dtype) -> Any:
        return tiny.build(self.name, self.batch, dtype).model


def problem_of(case: Case, batch: int) -> Problem:
    return Problem(
        model=Builder(case.model, batch),
        inputs=lambda dtype: tiny.build(case.model, batch, dtype).inputs,
        targets=lambda dtype: tiny.build(case.model, batch, dtype).targets,
        loss=tiny.build(case.model, batch, torch.float32).loss, max_norm=case.max_norm)


def watch(run: Any, seen: dict[str, Any]) -> None:
    """Write down the shapes of a block's local parameters, and of what its modules return."""
    block = run.stages[0].model.get_submodule(WATCHED_BLOCK)
    seen["parameters"] = {name: list(parameter.to_local().shape)
                          for name, parameter in block.named_parameters()}
    made = seen["results"] = {}

    def note(name: str, out: Any) -> None:
        made[name] = list((out[0] if isinstance(out, tuple) else out).shape)

    for name, inner in block.named_modules():
        if name:
            inner.register_forward_hook(lambda module, args, out, name=name: note(name, out))


def run_cases(cases: list[Case], folder: Path) -> dict[str, Any]:
    """Compare every case with one process, on the process group that is running."""
    compare_module._alone = remembered(compare_module._alone)
    compare_module._alone_steps = remembered(compare_module._alone_steps)
    results = {}
    for case in cases:
        begin = time.monotonic()
        faulthandler.dump_traceback_later(60)  # where a case hangs, if it does
        graph = tiny.graph(case.model, folder)
        layout = case.layout(graph)
        seen: dict[str, Any] = {}
        change = case.change if case.name != WATCHED_CASE else functools.partial(watch, seen=seen)
        try:
            found = compare(problem_of(case, layout.request.global_batch), layout, graph,
                            change=change)
        except Exception:
            print(f"case {case.name} failed on rank {dist.get_rank()}:\n{traceback.format_exc()}",
                  flush=True)
            os._exit(1)  # at once: an orderly end would wait for the other ranks
        faulthandler.cancel_dump_traceback_later()
        results[case.name] = asdict(found) | {"passed": found.passed, "seen": seen}
        if dist.get_rank() == 0:
            print(f"{case.name}: {found} {time.monotonic() - begin:.1f} s", flush=True)
    return results


def main() -> None:
    module, attribute, folder, out = sys.argv[1:5]
    chosen = sys.argv[5].split(",") if len(sys.argv) > 5 else None
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    cases = [case for case in getattr(importlib.import_module(module), attribute)
             if chosen is None or case.name in chosen]
    results = run_cases(cases, Path(folder))
    if dist.get_rank() == 0:
        Path(out).write_text(json.dumps(results))
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    main()
