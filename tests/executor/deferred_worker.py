"""Run by torchrun on four processes: models without weights, and checkpoints behind training."""

# ruff: noqa: C408 (keyword arguments read better in tables)
from __future__ import annotations

import os
import sys
import tempfile
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from executor.deferred import Deferred
from executor.losses import mean_squared_error
from executor.metrics import peak_memory_bytes, reset_peak_memory
from executor.parallelize import parallelize
from profiler.errors import InvalidInput
from profiler.trace import trace
from tests.executor import tiny
from tests.executor.cases import MIXED, Case
from tests.executor.test_deferred import SEED, hugging_face

CASES = [
    Case(name="", model="gpt2", mesh=dict(dp_shard=2, tp=2), choices=MIXED),
    Case(name="", model="gpt2", mesh=dict(pp=2, dp_shard=2)),
    Case(name="", model="mixtral", mesh=dict(dp_replicate=2, tp=2)),
    Case(name="", model="t5", mesh=dict(dp_replicate=2, dp_shard=2)),
]


class Deep(nn.Module):
    """128 MiB of parameters in many layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(1024, 1024, bias=False) for _ in range(32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


def _equal(run: Any, plain: nn.Module) -> None:
    wanted = dict(plain.named_parameters())
    for name, _, parameter in run.named_parameters():
        assert torch.equal(run.whole(parameter, parameter.data), wanted[name]), name


def check_weights(folder: Path) -> None:
    for case in CASES:
        graph = tiny.graph(case.model, folder)
        layout = case.layout(graph)
        data = tiny.build(case.model, layout.request.global_batch, torch.float32)
        torch.manual_seed(SEED)
        plain = hugging_face(case.model)
        options: Any = dict(loss=data.loss, graph=graph, device_type="cpu", seed=SEED)
        if case.model == "t5":
            with torch.device("meta"):
                model: Any = hugging_face(case.model)
        else:
            model = Deferred.build(lambda case=case: hugging_face(case.model), SEED)
        run = parallelize(model, layout, **options)
        _equal(run, plain)
        loss = run.forward_backward(data.inputs, data.targets)
        other = parallelize(plain, layout, **options).forward_backward(data.inputs, data.targets)
        assert loss == other, f"{case}: {loss} and {other}"


def check_memory() -> None:
    """A rank needs memory for its share of the model, not for the whole."""
    graph = trace(Deep(), torch.zeros(2, 1024), name="deep")
    layout = Case(name="", model="deep", mesh=dict(dp_shard=4), num_micro_batches=1).layout(graph)
    whole = sum(p.numel() * 4 for p in Deep().parameters())
    device = torch.device("cpu")
    reset_peak_memory(device)
    before = peak_memory_bytes(device)
    run = parallelize(Deferred.build(Deep, SEED), layout, graph=graph, device_type="cpu",
                      loss=mean_squared_error())
    after = peak_memory_bytes(device)
    assert before is not None and after is not None
    held = sum(p.to_local().numel() * 4 for _, _, p in run.named_parameters())
    assert held <= whole / 4
    assert after - before < whole / 2, f"{(after - before) / 2**20:.0f} MiB for a share of {held}"


def check_background_save(folder: Path) -> None:
    """What is saved is the state at the call, though training goes on at once."""
    case = CASES[0]
    graph = tiny.graph(case.model, folder)
    layout = case.layout(graph)
    data = tiny.build(case.model, layout.request.global_batch, torch.float32)

    def make() -> Any:
        return parallelize(tiny.build(case.model, 2, torch.float32).model, layout, loss=data.loss,
                           graph=graph, device_type="cpu",
                           optimizer=lambda ps: torch.optim.AdamW(ps, lr=1e-2, fused=True))
    place: list[Any] = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(place)
    run = make()
    run.step(data.inputs, data.targets)
    run.save(place[0], asynchronous=True, mark=7)
    losses = [run.step(data.inputs, data.targets) for _ in range(3)]
    run.wait_for_save()
    dist.barrier()
    again = make()
    assert again.load(place[0]) == {"mark": 7}
    assert again.num_steps == 1
    assert [again.step(data.inputs, data.targets) for _ in range(3)] == losses
    again.graph = replace(graph, name="other")
    with pytest.raises(InvalidInput, match="is a checkpoint of model 'gpt2'"):
        again.load(place[0])
    with pytest.raises(InvalidInput, match="no whole checkpoint there"):
        again.load(folder)
    with pytest.raises(InvalidInput, match="must be the global batch 4, or this rank's 2 of it"):
        run.step({"input_ids": data.inputs["input_ids"][:3]}, data.targets[:3])


class Normalized(nn.Module):
    """Batch normalization keeps running statistics, and the frame a buffer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("offset", torch.zeros(1))
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.offset
        for layer in self.layers:
            x = x + layer(x)
        return x


def check_statistics_are_saved() -> None:
    """Of every layer, from whichever stage has it, for whichever layout goes on."""
    place: list[Any] = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(place)
    graph = trace(Normalized(), torch.randn(8, 8), name="normalized")
    x = torch.randn(8, 8, generator=torch.Generator().manual_seed(3))
    wanted: dict[str, torch.Tensor] = {}
    for mesh in (dict(pp=2, dp_replicate=2), dict(dp_shard=4), dict(pp=4)):
        degree = mesh.get("dp_shard", 1) * mesh.get("dp_replicate", 1)
        layout = Case(name="", model="", mesh=mesh, micro_batch=8 // degree,
                      num_micro_batches=1, schedule="gpipe").layout(graph)
        run = parallelize(Normalized(), layout, graph=graph, device_type="cpu",
                          loss=mean_squared_error(), optimizer=lambda ps: torch.optim.SGD(ps, 0.0))
        mine = {name: buffer for stage in run.stages.values()
                for name, buffer in stage.named_own_buffers()}
        if wanted:
            run.load(place[0])
        else:
            with torch.no_grad():
                mine["offset"].fill_(0.5)
            run.step(x, torch.zeros_like(x))
            assert all(buffer.abs().sum() > 0 for buffer in mine.values())
            run.save(place[0])
            for part in _gathered(mine):
                wanted |= part
            assert len(wanted) == 1 + 4 * 3
        for name, buffer in mine.items():
            assert torch.equal(buffer, wanted[name]), name
        dist.barrier()


def _gathered(value: Any) -> list[Any]:
    said: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(said, value)
    return said


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    folder = Path(sys.argv[1])
    check_memory()
    check_weights(folder)
    check_background_save(folder)
    check_statistics_are_saved()
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    main()
