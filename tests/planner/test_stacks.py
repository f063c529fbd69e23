"""Software stacks: lowering worked by hand, and what they change in a price."""

from dataclasses import replace

import pytest

from planner.cost.compute import (
    ComputeTimes,
    FusedOp,
    Shard,
    layer_compute,
    op_seconds,
    reduced_entries,
)
from planner.cost.layer import working_seconds
from planner.costing import Candidate, Coster
from planner.layout import Choice, Mesh, Schedule
from planner.models import resolve
from planner.request import Request
from planner.stacks import kernels_for, load_stack, stack_names
from planner.stacks.equipment import equip
from planner.stacks.lowering import lower
from planner.topology_files import resolve as topology
from profiler.device import load_device
from profiler.errors import UnknownName
from profiler.layer_graph import Extent, LayerKind, MatmulShape, Op

GPT = resolve("gpt3-175b")
LLAMA = resolve("llama3-8b")
B, S, H, A = 1, 2048, 12288, 96


def block(name: str, graph: object = GPT) -> LayerKind:
    lowered = lower(GPT if graph is GPT else LLAMA, load_stack(name))
    return lowered.kinds["GPT2Block" if graph is GPT else "LlamaDecoderLayer"]


def saved_bytes(kind: LayerKind) -> int:
    return sum(g.bytes_at(B, S, 2) for g in kind.saved)


@pytest.mark.parametrize("name", stack_names())
def test_every_stack_reads_and_lowers(name: str) -> None:
    stack = load_stack(name)
    assert stack.name == name
    assert stack.sources
    assert lower(GPT, stack).num_parameters == GPT.num_parameters
    assert lower(LLAMA, stack).num_parameters == LLAMA.num_parameters


def test_the_executors_stack_changes_nothing() -> None:
    assert lower(GPT, load_stack("pytorch-eager")) is GPT
    place = topology("dgx-a100-80g")
    assert equip(place, load_stack("pytorch-eager")) is place


def test_unknown_stacks_are_said() -> None:
    with pytest.raises(UnknownName, match="stack"):
        Coster(GPT, topology("dgx-a100-80g"), Request(global_batch=8, seq_len=S, stack="no"))


def test_attention_in_three_kernels_keeps_what_korthikanti_counts() -> None:
    """s b h (34 + 5 a s / h) bytes a layer (Korthikanti et al. 2022, section 4.1), and the two
    statistics of each norm."""
    expected = S * B * H * 34 + 5 * A * S * S * B + 2 * 2 * 2 * S * B
    assert saved_bytes(block("megatron-lm-2021")) == expected


def test_attention_in_three_kernels_computes_the_whole_square() -> None:
    inside = [op for op in block("megatron-lm-2021").ops if op.kind == "attention"]
    assert sum(op.flops.at(B, S) for op in inside) == 4 * S * S * H
    assert sum(op.backward_flops.at(B, S) for op in inside) == 8 * S * S * H
    softmax = next(op for op in inside if op.name == "softmax")
    assert softmax.elements_moved.at(B, S) == 2 * A * S * S


def test_selective_recompute_of_the_core_of_attention() -> None:
    kind = block("megatron-lm-2021")
    kept = sum(g.bytes_at(B, S, 2) for g in kind.saved if g.kept_by_selective)
    assert kept == saved_bytes(kind) - 5 * A * S * S * B
    times = layer_compute(kind, Shard(micro_batch=B, seq_len=S), load_device("a100-80g"))
    inside = sum(op_seconds(op, Shard(micro_batch=B, seq_len=S), load_device("a100-80g"))[0]
                 for op in kind.ops if op.kind == "attention")
    assert times.recompute_selective_s == pytest.approx(inside)


def test_alternate_matmuls_run_again() -> None:
    kind = block("torchtitan", LLAMA)
    again = [op.name for op in kind.ops if op.kept_by_selective is False]
    assert again == [f"{name}.matmul" for name in ("self_attn.k_proj", "self_attn.o_proj",
                                                   "mlp.up_proj")]


def test_fused_pointwise_work_moves_each_tensor_once() -> None:
    h, f, k, q = 4096, 14336, 1024, 4096
    ops = {op.name: op for op in block("torchtitan-compile", LLAMA).ops}
    assert ops["rotary"].elements_moved.at(B, S) == 2 * (q + k) * S
    assert ops["activation"].elements_moved.at(B, S) == 3 * f * S
    assert ops["activation"].backward_elements_moved.at(B, S) == 5 * f * S
    assert ops["input_layernorm.normalization"].elements_moved.at(B, S) == 2 * h * S
    assert saved_bytes(block("torchtitan-compile", LLAMA)) < saved_bytes(
        block("pytorch-eager", LLAMA))


def test_the_host_bounds_a_layer() -> None:
    times = ComputeTimes(forward_s=2.0, backward_s=4.0, recompute_selective_s=0.5,
                         recompute_full_s=2.0, host_forward_s=3.0, host_backward_s=3.0,
                         host_selective_s=0.2)
    # It launches collectives' neighbours as well: beside 0.4 s of them 2.6 s are left of its 3.
    assert working_seconds(Choice(recompute="full"), times, (0.4, 0.4, 0.4)) == (2.6, 4.0, 3.0)
    assert working_seconds(Choice(recompute="selective"), times, (0.0, 0.0, 0.0)) == (3.0, 4.0, 0.5)


@pytest.mark.parametrize(("columns", "left"), [(4096, 1.0), (4104, 0.5), (4101, 0.25)])
def test_unaligned_rows_are_slower(columns: int, left: float) -> None:
    device = replace(load_device("a100-80g"), partly_aligned=0.5, unaligned=0.25,
                     kernel_launch_s=0.0)
    whole = replace(device, partly_aligned=1.0, unaligned=1.0)
    work = Op(name="matmul", kind="matmul", split="column", flops=Extent(per_sample=(0, 10**9, 0)),
              matmul=MatmulShape(rows=Extent(per_sample=(0, 1, 0)),
                                 inner=Extent(fixed=(4096, 0, 0)),
                                 columns=Extent(fixed=(columns, 0, 0))))
    shard = Shard(micro_batch=1, seq_len=2048)
    assert op_seconds(work, shard, whole)[0] == pytest.approx(
        left * op_seconds(work, shard, device)[0])


def test_float8_matmuls_are_faster_and_pay_their_casts() -> None:
    shard = Shard(micro_batch=4, seq_len=4096)
    device = load_device("h100-sxm-80g")
    work = next(op for op in LLAMA.kinds["LlamaDecoderLayer"].ops if "gate_proj" in op.name)
    half, eighth = (op_seconds(work, replace(shard, dtype=dtype), device)[0]
                    for dtype in ("bfloat16", "float8"))
    assert half / 2 < eighth < half
    attention = next(op for op in LLAMA.kinds["LlamaDecoderLayer"].ops if op.attention)
    assert op_seconds(attention, replace(shard, dtype="float8"), device) == op_seconds(
        attention, shard, device)


def test_a_scale_for_each_row_costs_second_casts_and_a_slower_matmul() -> None:
    """Twice 5 bytes an element instead of once 6, and 0.8 of the rate (`FLOAT8`)."""
    device = replace(load_device("h100-sxm-80g"), kernel_launch_s=0.0)
    work = next(op for op in LLAMA.kinds["LlamaDecoderLayer"].ops if "o_proj" in op.name)
    tensor, row = (op_seconds(work, Shard(micro_batch=4, seq_len=4096, dtype=dtype), device)
                   for dtype in ("float8", "float8_rowwise"))
    elements = 4 * 4096 * 4096 + 4096 * 4096
    cast = [n * elements / device.memory_bandwidth_bytes_per_s
            / device.memory_efficiency.at(n * elements) for n in (5, 6)]
    assert row[0] - cast[0] == pytest.approx((tensor[0] - cast[1]) / 0.8)
    assert row[1] > tensor[1]
    request = Request(global_batch=8, seq_len=S, precision="fp8-rowwise-mixed")
    assert device.peak(request.bytes.dtype) == device.peak("float8")


@pytest.mark.parametrize(("tp", "micro_batch", "seq_len", "steps"), [
    (8, 1, 2048, 1), (24, 2, 2048, 1), (48, 1, 2048, 5), (48, 2, 2048, 1), (8, 1, 4096, 5)])
def test_the_fused_softmax_takes_some_shapes(tp: int, micro_batch: int, seq_len: int,
                                             steps: int) -> None:
    """96 heads: 12 a rank, 4 times 2 samples, 2, 2 times 2; sequences of 2,048 at most."""
    softmax = next(op for op in block("megatron-lm-2021").ops if op.name == "softmax")
    assert isinstance(softmax, FusedOp)
    assert softmax.on(Shard(micro_batch=micro_batch, seq_len=seq_len, tp=tp)).kernels == steps


def test_the_host_launches_collectives() -> None:
    device = replace(load_device("a100-80g"), host_kernel_s=1.0)
    kind = block("megatron-lm-2021")
    alone, group, without = (layer_compute(kind, Shard(
        micro_batch=1, seq_len=S, tp=tp, sequence_parallel=sp), device).host_forward_s
        for tp, sp in ((1, True), (8, True), (8, False)))
    assert (group - alone, without - alone) == (4.0, 2.0)


@pytest.mark.parametrize(("name", "field"), [("softmax", "scores_share"),
                                             ("scores", "batched_share")])
def test_attention_in_three_kernels_has_shares_of_its_own(name: str, field: str) -> None:
    device = replace(load_device("a100-80g"), kernel_launch_s=0.0)
    shares = [replace(device, **{field: share}) for share in (1.0, 0.125, 0.0625)]
    shard = Shard(micro_batch=B, seq_len=S)
    for op in block("megatron-lm-2021").ops:
        whole, slow, slower = (sum(op_seconds(op, shard, d)) for d in shares)
        if op.name == name:  # the products are bound by memory at first
            assert whole < slow
            assert slower == pytest.approx(2 * slow)
        elif op.kind != "attention":
            assert slower == whole


def test_each_column_matmul_of_a_gated_mlp_is_reduced_apart() -> None:
    once, again = (block(name, LLAMA).tensor_parallel for name in ("torchtitan", "neox"))
    assert once is not None
    assert again is not None
    assert len(reduced_entries(once)) == len(once.entries) == len(again.entries) == 2
    assert reduced_entries(again) == (*once.entries, once.entries[-1])
    device = replace(load_device("a100-80g"), host_kernel_s=1.0)
    launched = [layer_compute(block("neox", LLAMA), Shard(
        micro_batch=1, seq_len=S, tp=8, sequence_parallel=sp), device) for sp in (False, True)]
    assert launched[1].host_forward_s - launched[0].host_forward_s == 2.0
    assert launched[1].host_backward_s - launched[0].host_backward_s == 1.0


def test_a_loss_over_a_divided_vocabulary() -> None:
    """32 bytes a logit forward and 8 backward beside the cast."""
    loss = next(op for op in lower(GPT, load_stack("megatron-lm-2021")).kinds["Linear"].ops
                if op.kind == "loss")
    v = 51200 if loss.bytes_moved.at(1, 1) % 51200 == 0 else 50257
    assert loss.bytes_moved.at(1, 1) == 32 * v
    assert loss.backward_bytes_moved.at(1, 1) == 8 * v


def test_gradients_of_a_stack() -> None:
    mixed = Request(global_batch=8, seq_len=S, precision="fp16-mixed")
    assert mixed.bytes.gradient_bytes == 4
    deepspeed = replace(mixed, stack="megatron-deepspeed")
    assert (deepspeed.bytes.gradient_bytes, deepspeed.bytes.reduce_bytes) == (2, 2)


def test_sequence_parallelism_can_be_refused() -> None:
    request = Request(global_batch=8, seq_len=S)
    place = topology("dgx-a100-80g")
    assert Coster(GPT, place, request).sequence_parallel(8)
    assert not Coster(GPT, place, replace(request, sequence_parallel=False)).sequence_parallel(8)
    assert not Coster(GPT, place, replace(request, stack="megatron-deepspeed")
                      ).sequence_parallel(8)


def test_constants_are_fitted_per_device() -> None:
    stack = load_stack("megatron-lm-2022")
    assert kernels_for(stack, "a100-80g", 8).matmul_efficiency is not None
    assert kernels_for(stack, "cpu", 1).matmul_efficiency is None
    assert kernels_for(load_stack("pytorch-eager"), "a100-80g", 1).matmul_efficiency is None


def test_what_aleph_alphas_layers_keep() -> None:
    """Each norm keeps its input and what it normalised in float32 and its result, attention both
    halves of queries and keys; SwiGLU four times its width."""
    h, kv, f = 4096, 1024, 14336
    statistics = 2 * 4 + 32 * 4  # of two norms and of attention
    per_token = 2 * (4 + 4 + 2) * h + 2 * (3 * h + 3 * kv) + 2 * 4 * f + statistics
    assert saved_bytes(block("neox-flash2", LLAMA)) == B * S * per_token
    fused = per_token - 2 * 6 * h - 2 * 4  # FlashAttention's: the input and the result alone
    assert saved_bytes(block("neox-flash2-rms", LLAMA)) == B * S * fused
    square = 32 * S * S * B
    assert saved_bytes(block("neox", LLAMA)) == B * S * (per_token - 32 * 4) + 6 * square


@pytest.mark.parametrize(("stack", "num_bytes"), [
    ("megatron-core", 6), ("neox-flash2", 20), ("neox-flash2-rms", 24)])
def test_bytes_of_a_logit_at_the_peak_of_the_loss(stack: str, num_bytes: int) -> None:
    kinds = lower(LLAMA, load_stack(stack)).kinds.values()
    head = next(kind for kind in kinds if any(op.kind == "loss" for op in kind.ops))
    logits = [g for g in (*head.saved, *head.backward_working_set) if g.elements.at(1, 1) > 128000]
    assert sum(g.bytes_at(B, S, 2) for g in logits) == num_bytes * 128256 * B * S
    assert not any(g.elements.at(1, 1) > 128000 for g in head.forward_working_set)


def test_bfloat16_gradients_beside_float32_ones() -> None:
    mixed = Request(global_batch=8, seq_len=S, target="any", stack="bigscience")
    assert mixed.bytes.beside_bytes == 2
    assert replace(mixed, precision="fp16-mixed").bytes.beside_bytes == 0
    assert replace(mixed, stack=None).bytes.beside_bytes == 0
    costs = []
    for request in (mixed, replace(mixed, precision="fp16-mixed")):
        coster = Coster(LLAMA, topology("dgx-a100-80g"), request)
        candidate = Candidate(mesh=Mesh(dp_shard=8), micro_batch=1, num_micro_batches=1,
                              schedule=Schedule())
        run = coster.chain.runs[coster.chain.block_run or 0]
        costs.append((coster.memory(run, Choice(), candidate),
                      coster.local_parameters(run, 1)[0]))
    (more, count), (less, _) = costs
    assert more.gradient_bytes == pytest.approx(less.gradient_bytes + 2 * count, abs=512)
