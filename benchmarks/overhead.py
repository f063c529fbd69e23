"""What the executor costs over the same layout written by hand in plain torch.

Three layouts on CPU processes (gloo): FSDP2, tensor parallel, a 1F1B pipeline. Both sides train the
same weights on the same batch with the same loss, clipping and AdamW, and return the mean loss of
the global batch; the losses of all steps are compared, so neither can leave out work. Steps are
taken in pairs, ours first in every other one, so that a slow moment of the machine meets both. The
median over the pairs of (seconds by hand / seconds ours) should be at least 0.97.

    torchrun --nproc-per-node 2 benchmarks/overhead.py [--repeats 15] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

sys.path.insert(0, str(Path(__file__).parent.parent))

from executor.losses import cross_entropy, whole
from executor.parallelize import parallelize
from planner.layout import LayerRun, Layout, Mesh, Reference, Stage
from planner.request import Request
from profiler.documents import write_atomically
from profiler.hugging_face import trace_hugging_face
from profiler.layer_graph import LayerGraph

BATCH, LENGTH, MICRO_BATCHES = 8, 128, 4
CONFIG = {"model_type": "llama", "hidden_size": 256, "num_hidden_layers": 4,
          "num_attention_heads": 4, "num_key_value_heads": 4, "intermediate_size": 688,
          "vocab_size": 8192, "max_position_embeddings": 512, "use_cache": False}
TARGET = 0.97
SETTLING = 2
"""First pairs of steps that are not counted: they allocate and connect."""

SAME = 1e-4
"""Largest difference between the losses of the two sides, in float32 after all steps."""

Step = Callable[[torch.Tensor, torch.Tensor], float]
"""One optimizer step on (inputs, targets) of the global batch: the mean loss."""


def model() -> Any:
    import transformers

    torch.manual_seed(0)
    values = {k: v for k, v in CONFIG.items() if k != "model_type"}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**values)).train()


def _update(optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter]) -> None:
    torch.nn.utils.clip_grad_norm_(parameters, 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def _accumulate(net: nn.Module, inputs: torch.Tensor, targets: torch.Tensor, num_terms: int,
                before: Callable[[bool], None] = lambda is_last: None) -> torch.Tensor:
    rows, mean = inputs.shape[0] // MICRO_BATCHES, torch.zeros(())
    for k in range(MICRO_BATCHES):
        before(k == MICRO_BATCHES - 1)
        part = slice(k * rows, (k + 1) * rows)
        logits = net(inputs[part])
        loss = F.cross_entropy(logits.flatten(0, 1), targets[part].flatten(), reduction="sum")
        loss = loss / num_terms
        loss.backward()
        mean += whole(loss.detach())
    return mean


class Logits(nn.Module):
    """The model, returning logits alone."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, ids: torch.Tensor, **kwargs: Any) -> Any:
        return self.net(input_ids=ids, **kwargs).logits


def fsdp_by_hand() -> Step:
    net = Logits(model())
    for layer in net.net.model.layers:
        fully_shard(layer)
    for other in (net.net.model.embed_tokens, net.net.model.norm, net.net.lm_head):
        fully_shard(other)
    fully_shard(net, reshard_after_forward=False)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4)
    size, rank = dist.get_world_size(), dist.get_rank()

    def before(is_last: bool) -> None:
        net.set_requires_gradient_sync(is_last)
        net.set_is_last_backward(is_last)

    def step(inputs: torch.Tensor, targets: torch.Tensor) -> float:
        mine = slice(rank * BATCH // size, (rank + 1) * BATCH // size)
        loss = _accumulate(net, inputs[mine], targets[mine], BATCH * LENGTH // size, before)
        _update(optimizer, list(net.parameters()))
        dist.all_reduce(loss)
        return float(loss) / size
    return step


def tensor_by_hand() -> Step:
    """The plan that torchtitan has for Llama: one gather for q, k and v, one for gate and up."""
    net = Logits(model())
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    inner = net.net
    positions = torch.arange(LENGTH)[None]
    for layer in inner.model.layers:
        parallelize_module(layer, mesh, {
            "input_layernorm": SequenceParallel(),
            "self_attn": PrepareModuleInput(
                input_kwarg_layouts={"hidden_states": Shard(1)},
                desired_input_kwarg_layouts={"hidden_states": Replicate()}),
            "self_attn.q_proj": ColwiseParallel(), "self_attn.k_proj": ColwiseParallel(),
            "self_attn.v_proj": ColwiseParallel(),
            "self_attn.o_proj": RowwiseParallel(output_layouts=Shard(1)),
            "post_attention_layernorm": SequenceParallel(),
            "mlp": PrepareModuleInput(input_layouts=(Shard(1),),
                                      desired_input_layouts=(Replicate(),)),
            "mlp.gate_proj": ColwiseParallel(), "mlp.up_proj": ColwiseParallel(),
            "mlp.down_proj": RowwiseParallel(output_layouts=Shard(1))})
    parallelize_module(inner, mesh, {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "model.norm": SequenceParallel(),
        "lm_head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1),
                                   use_local_output=False)})
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4)

    def call(inputs: torch.Tensor) -> Any:
        return net(inputs, position_ids=positions)

    def step(inputs: torch.Tensor, targets: torch.Tensor) -> float:
        with loss_parallel():
            loss = _accumulate(call, inputs, targets, BATCH * LENGTH)  # type: ignore[arg-type]
        _update(optimizer, list(net.parameters()))
        return float(loss)
    return step


class HalfModel(nn.Module):
    """Every other half of the layers, written out."""

    def __init__(self, net: Any, rank: int) -> None:
        super().__init__()
        layers = list(net.model.layers)
        half = len(layers) // 2
        self.layers = nn.ModuleList(layers[:half] if rank == 0 else layers[half:])
        self.embed = net.model.embed_tokens if rank == 0 else None
        self.norm, self.head = (None, None) if rank == 0 else (net.model.norm, net.lm_head)
        self.rotary = net.model.rotary_emb

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.embed is not None:
            x = self.embed(x)
        places = torch.arange(LENGTH)[None]
        rotary = self.rotary(x, position_ids=places)
        for layer in self.layers:
            x = layer(x, position_embeddings=rotary, position_ids=places)
        return x if self.head is None else self.head(self.norm(x))


def pipeline_by_hand() -> Step:
    rank = dist.get_rank()
    net = HalfModel(model(), rank)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4)

    def loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        total = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
        return total / (BATCH * LENGTH)
    schedule = Schedule1F1B(PipelineStage(net, rank, 2, torch.device("cpu")), MICRO_BATCHES,
                            loss_fn=loss, scale_grads=False)

    def step(inputs: torch.Tensor, targets: torch.Tensor) -> float:
        losses: list[torch.Tensor] = []
        if rank == 0:
            schedule.step(inputs)
        else:
            schedule.step(target=targets, losses=losses, return_outputs=False)
        mean = torch.stack(losses).sum().detach() if losses else torch.zeros(())
        dist.all_reduce(mean)
        parameters = list(net.parameters())
        norm = torch.nn.utils.get_total_norm([p.grad for p in parameters]) ** 2
        dist.all_reduce(norm)
        torch.nn.utils.clip_grads_with_norm_(parameters, 1.0, norm.sqrt())
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(mean)
    return step


def ours(graph: LayerGraph, mesh: Mesh) -> Step:
    count = len(graph.layers)
    half = 1 + CONFIG["num_hidden_layers"] // 2  # type: ignore[operator]
    cuts = [(0, half), (half, count)] if mesh.pp == 2 else [(0, count)]
    layout = Layout(
        model=Reference(name=graph.name), topology=Reference(name="here"),
        request=Request(global_batch=BATCH, seq_len=LENGTH, precision="fp32"), mesh=mesh,
        micro_batch=BATCH // MICRO_BATCHES // mesh.dp, num_micro_batches=MICRO_BATCHES,
        stages=tuple(Stage(runs=(LayerRun(first_layer=a, num_layers=b - a),)) for a, b in cuts))
    run = parallelize(model(), layout, loss=cross_entropy(), graph=graph, max_norm=1.0,
                      device_type="cpu", optimizer=lambda ps: torch.optim.AdamW(ps, lr=1e-4))

    return lambda inputs, targets: run.step({"input_ids": inputs}, targets)


def _timed(step: Step, batch: tuple[torch.Tensor, torch.Tensor]) -> tuple[float, float]:
    """(seconds until the last rank is done, loss)."""
    dist.barrier()
    begin = time.perf_counter()
    loss = step(*batch)
    dist.barrier()
    return time.perf_counter() - begin, loss


def compared(by_hand: Step, own: Step, batch: tuple[torch.Tensor, torch.Tensor],
             repeats: int) -> dict[str, float]:
    """Medians over `repeats` pairs of steps, after two that settle."""
    hand_s, own_s, apart = [], [], 0.0
    for number in range(-SETTLING, repeats):
        if number % 2:
            mine, theirs = _timed(own, batch), _timed(by_hand, batch)
        else:
            theirs, mine = _timed(by_hand, batch), _timed(own, batch)
        apart = max(apart, abs(theirs[1] - mine[1]))
        if number >= 0:
            hand_s.append(theirs[0])
            own_s.append(mine[0])
    if apart > SAME:
        raise SystemExit(f"the two sides train differently: losses are {apart:.1e} apart")
    ratios = [a / b for a, b in zip(hand_s, own_s, strict=True)]
    low, middle, high = quantiles(ratios, n=4)
    return {"by_hand_s": median(hand_s), "ours_s": median(own_s), "throughput_ratio": middle,
            "lower_quartile": low, "upper_quartile": high, "loss_difference": apart}


def _table(results: dict[str, dict[str, float]]) -> None:
    print(f"{'':<18}{'by hand (ms)':>14}{'ours (ms)':>12}{'throughput':>12}{'quartiles':>16}")
    for name, row in results.items():
        verdict = "" if row["throughput_ratio"] >= TARGET else f"  below {TARGET}"
        spread = f"{row['lower_quartile']:.3f}-{row['upper_quartile']:.3f}"
        print(f"{name:<18}{row['by_hand_s'] * 1e3:>14.1f}{row['ours_s'] * 1e3:>12.1f}"
              f"{row['throughput_ratio']:>12.3f}{spread:>16}{verdict}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--only", help="Layouts to compare, by parts of their names.")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    holder: list[Any] = [None]
    if dist.get_rank() == 0:
        holder = [trace_hugging_face(CONFIG, name="llama")]
    dist.broadcast_object_list(holder)
    tokens = torch.randint(8192, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    batch = (tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
    results = {name: compared(by_hand(), ours(holder[0], mesh), batch, options.repeats)
               for name, by_hand, mesh in (("fsdp", fsdp_by_hand, Mesh(dp_shard=2)),
                                           ("tensor parallel", tensor_by_hand, Mesh(tp=2)),
                                           ("pipeline 1f1b", pipeline_by_hand, Mesh(pp=2)))
               if options.only is None or options.only in name}
    if dist.get_rank() == 0:
        _table(results)
        if options.json:
            write_atomically(options.json, json.dumps(results, indent=1) + "\n")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
