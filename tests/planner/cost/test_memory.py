"""Memory of a layer, worked by hand at each way to shard, keep and recompute."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.cost.compute import Shard
from planner.cost.memory import BLOCK_BYTES, LayerMemory, layer_memory, local_parameters
from planner.layout import Choice
from planner.request import Request
from profiler.layer_graph import LayerKind, Parameter, TensorGroup
from tests.planner.instances import per_token

KIND = LayerKind(
    parameters=(Parameter(name="up", shape=(1024, 512), split="column", split_dim=0),
                Parameter(name="norm", shape=(512,)),
                Parameter(name="table", shape=(16, 64), trainable=False)),
    buffer_bytes=100,
    saved=(TensorGroup(name="input", elements=per_token(512), split="sequence", is_input=True),
           TensorGroup(name="up", elements=per_token(1024), split="feature",
                       kept_by_selective=True),
           TensorGroup(name="act", elements=per_token(2048), split="feature"),
           TensorGroup(name="mask", elements=per_token(1024), split="replicated",
                       bytes_per_element=1)),
    kept_only_by_selective=(TensorGroup(name="out", elements=per_token(512), split="sequence"),),
    forward_working_set=(TensorGroup(name="tmp", elements=per_token(4096), split="feature"),),
    backward_working_set=(TensorGroup(name="grad", elements=per_token(1024), split="feature"),))
TRAINABLE = 1024 * 512 + 512  # 524,800
FROZEN = 16 * 64  # 1,024
TOKENS = 2 * 64
SHARD = Shard(micro_batch=2, seq_len=64)
MIXED = Request(global_batch=8, seq_len=64)  # bf16-mixed, AdamW: 4 + 2 + 4 + 2 * 4 bytes
KEPT = Choice(reshard=False)


def memory(choice: Choice = KEPT, shard: Shard = SHARD, *, request: Request = MIXED,
           dp_shard: int = 1, unsharded: bool = False) -> LayerMemory:
    return layer_memory(KIND, choice, shard, request=request, dp_shard=dp_shard,
                        unsharded_gradients=unsharded)


def blocks(num_bytes: float) -> int:
    return -(-int(num_bytes) // 512) * 512


def test_unsharded_layer_in_mixed_precision() -> None:
    held = memory()
    assert held.parameter_bytes == 4 * TRAINABLE + 2 * FROZEN == 2_101_248
    assert held.compute_copy_bytes == 2 * TRAINABLE  # a frozen one is kept in bf16 only
    assert held.gradient_bytes == 4 * TRAINABLE
    assert held.optimizer_state_bytes == 2 * 4 * TRAINABLE
    assert held.buffer_bytes == 512
    assert held.static_bytes == 18 * TRAINABLE + 2 * FROZEN + 512
    # 128 tokens x (2 x (512 + 1024 + 2048) + 1024) bytes
    assert held.activation_bytes == TOKENS * 8192
    assert held.working_set_bytes == TOKENS * 2 * 4096
    assert held.optimizer_temporary_bytes == 0


def test_replicas_that_are_copied_to_be_computed_with() -> None:
    whole = replace(MIXED, precision="fp32")
    for request, width in ((MIXED, 2), (whole, 4)):
        plain, copied = (layer_memory(
            KIND, KEPT, SHARD, request=request, dp_shard=1, unsharded_gradients=False,
            copies_replicas=copies) for copies in (False, True))
        assert copied.compute_copy_bytes == blocks(width * (TRAINABLE + FROZEN))
        assert plain.compute_copy_bytes == (2 * TRAINABLE if width == 2 else 0)
        assert replace(copied, compute_copy_bytes=plain.compute_copy_bytes) == plain


def test_sharded_and_gathered_again() -> None:
    held = memory(Choice(), dp_shard=4)
    assert held.parameter_bytes == blocks((4 * TRAINABLE + 2 * FROZEN) / 4)
    assert held.compute_copy_bytes == 0
    assert held.gradient_bytes == blocks(4 * TRAINABLE / 4)
    assert held.optimizer_state_bytes == blocks(8 * TRAINABLE / 4)
    # Twice the gathered parameters, and this unit's gradient in bf16 and in float32.
    assert held.working_set_bytes == blocks(
        TOKENS * 8192 + 2 * 2 * (TRAINABLE + FROZEN) + 6 * TRAINABLE)


def test_sharded_and_kept_after_forward() -> None:
    held = memory(dp_shard=4)
    assert held.compute_copy_bytes == blocks(2 * (TRAINABLE + FROZEN))
    assert held.working_set_bytes == blocks(TOKENS * 8192 + 6 * TRAINABLE)


def test_gradients_that_wait_are_whole() -> None:
    held = memory(Choice(), dp_shard=4, unsharded=True)
    assert held.gradient_bytes == 4 * TRAINABLE
    assert held.working_set_bytes == blocks(TOKENS * 8192 + 4 * (TRAINABLE + FROZEN))
    assert memory(dp_shard=4, unsharded=True, request=replace(MIXED, precision="bf16")
                  ).gradient_bytes == 2 * TRAINABLE


def test_pure_bf16_needs_no_copy_until_it_is_sharded() -> None:
    half = replace(MIXED, precision="bf16", optimizer="sgd")
    assert memory(request=half).static_bytes == blocks(2 * (TRAINABLE + FROZEN)) + blocks(
        2 * TRAINABLE) + 512
    assert memory(request=half, dp_shard=2).compute_copy_bytes == blocks(2 * (TRAINABLE + FROZEN))


def test_an_optimizer_that_is_not_fused_copies_its_shard() -> None:
    unfused = replace(MIXED, fused_optimizer=False)
    assert memory(request=unfused).optimizer_temporary_bytes == 4 * TRAINABLE
    assert memory(request=unfused, dp_shard=4).optimizer_temporary_bytes == TRAINABLE


def test_recompute_keeps_the_input_and_what_its_policy_saves() -> None:
    none, selective, full = (memory(Choice(recompute=mode, reshard=False))
                             for mode in ("none", "selective", "full"))
    assert full.activation_bytes == TOKENS * 2 * 512
    # Input, the matmul output that autograd keeps, and the one that only the policy keeps.
    assert selective.activation_bytes == TOKENS * 2 * (512 + 1024 + 512)
    # Backward has what was dropped, besides its own 1024 elements.
    assert full.working_set_bytes == TOKENS * (2 * 1024 + 8192)
    assert selective.working_set_bytes == TOKENS * (2 * 1024 + 8192 - 2 * 1024)
    assert none.static_bytes == selective.static_bytes == full.static_bytes


def test_a_checkpoint_keeps_an_input_that_autograd_would_not() -> None:
    kind = replace(KIND, saved=KIND.saved[1:], inputs=KIND.saved[:1])
    kept = [layer_memory(kind, Choice(recompute=mode), SHARD, request=MIXED, dp_shard=1,
                         unsharded_gradients=False).activation_bytes
            for mode in ("none", "full")]  # type: ignore[arg-type]
    assert kept == [TOKENS * (8192 - 1024), TOKENS * 2 * 512]


def test_tensor_parallel_divides_what_is_split() -> None:
    divided = memory(shard=replace(SHARD, tp=4))
    assert local_parameters(KIND, 4) == (1024 * 512 // 4 + 512, FROZEN)
    assert divided.optimizer_state_bytes == blocks(8 * (1024 * 512 // 4 + 512))
    # Input by the sequence, up and act by features; the mask is whole.
    assert divided.activation_bytes == TOKENS * (2 * 3584 // 4 + 1024)
    alone = memory(shard=replace(SHARD, tp=4, sequence_parallel=False))
    assert alone.activation_bytes == TOKENS * (2 * 512 + 2 * 3072 // 4 + 1024)


def test_a_vocabulary_is_padded() -> None:
    kind = LayerKind(parameters=(
        Parameter(name="embed", shape=(1001, 64), split="vocabulary", split_dim=0),))
    assert local_parameters(kind, 4) == (251 * 64, 0)


def test_tied_parameters_are_charged_elsewhere() -> None:
    assert local_parameters(KIND, 1, frozenset({"up"})) == (512, FROZEN)


SHARDS = st.builds(Shard, micro_batch=st.integers(1, 8), seq_len=st.just(64),
                   tp=st.sampled_from([1, 2, 4, 8]), sequence_parallel=st.booleans())
CHOICES = st.builds(Choice, recompute=st.sampled_from(["none", "selective", "full"]),
                    reshard=st.booleans())
PRECISIONS = st.sampled_from(["bf16-mixed", "fp16-mixed", "bf16", "fp32"])


@given(SHARDS, CHOICES, PRECISIONS, st.integers(2, 64), st.integers(1, 8), st.booleans())
def test_more_shards_never_hold_more(shard: Shard, choice: Choice, precision: str, degree: int,
                                     times: int, unsharded: bool) -> None:
    request = replace(MIXED, precision=precision)  # type: ignore[arg-type]
    few, many = (memory(choice, shard, request=request, dp_shard=d, unsharded=unsharded)
                 for d in (degree, degree * times))
    assert many.static_bytes <= few.static_bytes
    assert many.working_set_bytes == few.working_set_bytes


@given(SHARDS, CHOICES, PRECISIONS, st.integers(1, 64), st.sampled_from([2, 4]))
def test_a_larger_group_never_holds_more(shard: Shard, choice: Choice, precision: str,
                                         degree: int, times: int) -> None:
    request = replace(MIXED, precision=precision)  # type: ignore[arg-type]
    few, many = (memory(choice, s, request=request, dp_shard=degree)
                 for s in (shard, replace(shard, tp=shard.tp * times)))
    assert many.static_bytes <= few.static_bytes
    assert many.activation_bytes <= few.activation_bytes
    assert many.working_set_bytes <= few.working_set_bytes


@given(SHARDS, CHOICES, st.integers(1, 64), st.booleans())
def test_everything_is_in_whole_blocks(shard: Shard, choice: Choice, degree: int,
                                       unsharded: bool) -> None:
    held = memory(choice, shard, dp_shard=degree, unsharded=unsharded)
    figures = [getattr(held, name) for name in LayerMemory.__dataclass_fields__]
    assert all(figure % BLOCK_BYTES == 0 and figure >= 0 for figure in figures)


def test_recompute_never_keeps_more_than_it_saves() -> None:
    held = [memory(Choice(recompute=mode)) for mode in ("none", "selective", "full")
            ]  # type: ignore[arg-type]
    assert held[0].activation_bytes > held[1].activation_bytes > held[2].activation_bytes
    assert held[0].working_set_bytes <= held[1].working_set_bytes <= held[2].working_set_bytes
    with pytest.raises(AttributeError):
        held[0].activation_bytes = 0  # type: ignore[misc]
