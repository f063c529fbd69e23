"""Compute time of ops and layers, worked by hand on a device of round figures."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.cost.compute import Shard, layer_compute, op_seconds, split_degree
from profiler.device import Curve, Device
from profiler.errors import UnknownName
from profiler.layer_graph import AttentionShape, Extent, LayerKind, MatmulShape, Op
from tests.planner.instances import make_device, per_token

FLAT = Curve(size=(1.0,), fraction=(0.5,))
DEVICE = replace(make_device(2**30), matmul_efficiency=FLAT)
"""100 TFLOP/s of which half is reached, 1 TB/s of which half is reached, 2 us a kernel."""

SHARD = Shard(micro_batch=2, seq_len=100)


def matmul(*, split: str = "column", rows: int = 1, columns: int = 1000, inner: int = 500) -> Op:
    """rows x 500 x 1000 for each token."""
    flops = per_token(2 * rows * columns * inner)
    return Op(name="matmul", kind="matmul", split=split, flops=flops,  # type: ignore[arg-type]
              backward_flops=flops + flops, elements_moved=per_token(columns + inner),
              backward_elements_moved=per_token(2 * (columns + inner)),
              matmul=MatmulShape(rows=per_token(rows), columns=Extent(fixed=(columns, 0, 0)),
                                 inner=Extent(fixed=(inner, 0, 0))))


def pointwise(split: str = "feature", elements: int = 1000) -> Op:
    return Op(name="act", kind="pointwise", split=split,  # type: ignore[arg-type]
              elements_moved=per_token(elements), backward_elements_moved=per_token(3 * elements))


def attention(*, causal: bool) -> Op:
    flops = Extent(per_sample=(0, 0, 4 * 512))  # s x s x 512, twice
    return Op(name="attention", kind="attention", split="heads", flops=flops,
              backward_flops=flops + flops,
              attention=AttentionShape(heads=8, kv_heads=8, head_dim=64, queries=per_token(1),
                                       keys=per_token(1), causal=causal))


def test_a_matmul_is_bound_by_its_flops() -> None:
    # 200 tokens x 1 MFLOP at 50 TFLOP/s: 4 us; 600 kB at 500 GB/s take 1.2 us less than that.
    forward, backward = op_seconds(matmul(), SHARD, DEVICE)
    assert forward == pytest.approx(4e-6 + 2e-6)
    assert backward == pytest.approx(8e-6 + 2e-6)


def test_pointwise_work_is_bound_by_its_bytes() -> None:
    # 200 tokens x 1000 elements x 2 bytes at 500 GB/s
    forward, backward = op_seconds(pointwise(), SHARD, DEVICE)
    assert forward == pytest.approx(0.8e-6 + 2e-6)
    assert backward == pytest.approx(2.4e-6 + 2e-6)


def test_bytes_of_a_fixed_type_do_not_shrink_with_the_dtype() -> None:
    op = Op(name="mask", kind="pointwise", split="replicated", bytes_moved=per_token(1000),
            elements_moved=per_token(1000), kernels=3)
    half, _ = op_seconds(op, SHARD, DEVICE)
    whole, _ = op_seconds(op, replace(SHARD, compute_bytes=4), DEVICE)
    assert half == pytest.approx(200 * (1000 + 2000) / 5e11 + 3 * 2e-6)
    assert whole == pytest.approx(200 * (1000 + 4000) / 5e11 + 3 * 2e-6)


def test_an_op_without_backward_launches_none() -> None:
    op = Op(name="mask", kind="other", split="replicated", elements_moved=per_token(8))
    assert op_seconds(op, SHARD, DEVICE)[1] == 0


def test_what_a_group_divides() -> None:
    divided = ("column", "row", "heads", "feature", "vocabulary")
    assert [split_degree(split, 4, False) for split in divided] == [4] * 5
    assert split_degree("sequence", 4, True) == 4
    assert split_degree("sequence", 4, False) == 1
    assert split_degree("replicated", 4, True) == 1
    assert split_degree("gathered", 4, True) == 1


def test_a_group_divides_flops_and_bytes_but_not_launches() -> None:
    four = replace(SHARD, tp=4)
    assert op_seconds(matmul(), four, DEVICE)[0] == pytest.approx(1e-6 + 2e-6)
    assert op_seconds(pointwise(), four, DEVICE)[0] == pytest.approx(0.2e-6 + 2e-6)
    assert op_seconds(pointwise("replicated"), four, DEVICE)[0] == pytest.approx(0.8e-6 + 2e-6)
    without = replace(four, sequence_parallel=False)
    assert op_seconds(pointwise("sequence"), four, DEVICE)[0] == pytest.approx(0.2e-6 + 2e-6)
    assert op_seconds(pointwise("sequence"), without, DEVICE)[0] == pytest.approx(0.8e-6 + 2e-6)


def test_a_shard_of_a_small_matmul_runs_slower_per_flop() -> None:
    rising = replace(DEVICE, matmul_efficiency=Curve(size=(10.0, 1000.0), fraction=(0.1, 0.9)),
                     kernel_launch_s=0.0)
    # 200 x 1000 x 500 = (464.2)^3: log(46.42)/log(100) of the way from 0.1 to 0.9
    efficiency = 0.1 + 0.8 * 0.8333  # 1e8 = 464.159^3, log10(46.4159) / 2 = 0.8333
    assert op_seconds(matmul(), SHARD, rising)[0] == pytest.approx(
        2e8 / (1e14 * efficiency), rel=1e-4)
    # Divided by 8, it is half as wide: 232.08
    efficiency = 0.1 + 0.8 * 0.68282
    assert op_seconds(matmul(), replace(SHARD, tp=8), rising)[0] == pytest.approx(
        2e8 / 8 / (1e14 * efficiency), rel=1e-4)
    # Heads are a batch of matmuls, which fill the device together: as one of their volume.
    assert op_seconds(matmul(split="heads"), replace(SHARD, tp=8), rising)[0] == pytest.approx(
        2e8 / 8 / (1e14 * efficiency), rel=1e-4)


def test_causal_attention_does_about_half() -> None:
    # 2 samples x 100 x 100 x 2048 FLOPs at 50 TFLOP/s; causal keeps (s + 1) / 2s of them.
    full, full_backward = op_seconds(attention(causal=False), SHARD, DEVICE)
    half, half_backward = op_seconds(attention(causal=True), SHARD, DEVICE)
    assert full - 2e-6 == pytest.approx(2 * 100 * 100 * 2048 / 5e13)
    assert (half - 2e-6) / (full - 2e-6) == pytest.approx(101 / 200)
    assert (half_backward - 2e-6) / (full_backward - 2e-6) == pytest.approx(101 / 200)


def test_layer_adds_up_and_recompute_repeats_what_it_drops() -> None:
    ops = (matmul(), pointwise(), attention(causal=True), pointwise("sequence", 500))
    times = layer_compute(LayerKind(ops=ops), SHARD, DEVICE)
    each = [op_seconds(op, SHARD, DEVICE) for op in ops]
    assert times.forward_s == pytest.approx(sum(forward for forward, _ in each))
    assert times.backward_s == pytest.approx(sum(backward for _, backward in each))
    assert times.recompute_selective_s == pytest.approx(each[1][0] + each[3][0])
    assert times.recompute_s("full") == times.forward_s


def test_an_unknown_dtype_is_said() -> None:
    with pytest.raises(UnknownName, match="dtype of device toy 'float8'"):
        op_seconds(matmul(), replace(SHARD, dtype="float8"), DEVICE)


OPS = st.builds(matmul, columns=st.integers(1, 4096), inner=st.integers(1, 4096),
                split=st.sampled_from(["column", "row", "replicated"]))


@given(OPS, st.integers(1, 64), st.integers(1, 32), st.booleans())
def test_a_larger_group_is_no_slower_but_wins_less_than_its_size(
        op: Op, batch: int, tp: int, curved: bool) -> None:
    device: Device = make_device(2**30) if curved else DEVICE
    shard = Shard(micro_batch=batch, seq_len=64)
    one, _ = op_seconds(op, shard, device)
    many, _ = op_seconds(op, replace(shard, tp=tp), device)
    assert one / tp <= many * (1 + 1e-9)
    if not curved:
        assert many <= one * (1 + 1e-9)


@given(OPS, st.integers(1, 64), st.integers(1, 64))
def test_more_samples_take_longer(op: Op, a: int, b: int) -> None:
    less, more = sorted((a, b))
    device = make_device(2**30)
    times = [op_seconds(op, Shard(micro_batch=batch, seq_len=64), device)[0]
             for batch in (less, more)]
    assert times[0] <= times[1] * (1 + 1e-9)
