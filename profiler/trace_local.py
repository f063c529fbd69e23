"""What the operations of a layer prove about running its code on shards, and what they do not.

A divided layer runs on a shard of the sequence, and between a column and a row matmul on a shard of
the features. Code that works on each token, or on each feature, alone cannot tell. That is proven
here from the operations seen, at two sequence lengths:

    outside a divided region   elementwise operations, matmuls by parameters and norms over the
                               features, on operands of shape (batch, sequence, ...)
    inside                     elementwise operations on operands as wide as the column matmul

What is not proven (attention by heads, routing to experts, positions, a mean over tokens) is a
matter of the class: `Splits.unproven` lists the parameters whose callers must be known, and "" for
the layer itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import prod

from profiler.trace_events import RawOp, Use
from profiler.trace_view import kind_of_op

__all__ = ["ELEMENTWISE", "Sizes", "is_by_token", "is_feature_wise",
           "is_token_wise"]

ELEMENTWISE = frozenset({
    "abs", "add", "add_", "addcmul", "bitwise_not", "clamp", "clamp_max", "clamp_min", "clone",
    "copy_", "div", "div_", "elu", "eq", "erf", "exp", "ge", "gelu", "gt", "hardswish", "hardtanh",
    "le", "leaky_relu", "log", "log_sigmoid_forward", "logical_not", "lt", "masked_fill", "mish",
    "mul", "mul_", "native_dropout", "ne", "neg", "pow", "reciprocal", "relu", "relu_", "rsqrt",
    "rsub", "sigmoid", "sign", "silu", "softplus", "sqrt", "square", "sub", "sub_", "tanh", "where",
    "_to_copy"})
"""Operations whose every result element depends on the operands' elements of its place alone."""

_OVER_FEATURES = frozenset({"native_layer_norm", "_fused_rms_norm", "mean", "var", "var_mean",
                            "sum", "linalg_vector_norm"})
"""Within a norm: reductions that keep (batch, sequence) and so are over features."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """(micro-batch, sequence length) of the run that is looked at and of the longer one."""

    short: tuple[int, int]
    longer: tuple[int, int]


def is_by_token(one: Use, two: Use, sizes: Sizes, *, flat: bool = False) -> bool:
    """Whether a tensor has the dims (batch, sequence, ...), in the two runs.

    flat: or (batch * sequence, ...), as the matmul of a linear layer sees it.
    """
    if flat and len(one.shape) == 2:
        return (one.shape[0], two.shape[0]) == (prod(sizes.short), prod(sizes.longer))
    return one.shape[:2] == sizes.short and two.shape[:2] == sizes.longer


def is_token_wise(op: RawOp, other: RawOp, sizes: Sizes, moves: Callable[[Use], bool], *,
                  is_linear: bool = False) -> bool:
    """Whether an operation outside divided regions gives for a shard the shard of its result.

    other: the same operation of the longer run. moves: whether an operand is an activation; all
    others must have shapes that do not depend on the sequence.
    """
    in_norm = kind_of_op(op) == "normalization"
    if not (is_linear or op.name in ELEMENTWISE or (in_norm and op.name in _OVER_FEATURES)):
        return False
    return all(is_by_token(one, two, sizes, flat=is_linear) if moves(one)
               else one.shape == two.shape for one, two in _uses(op, other))


def is_feature_wise(op: RawOp, other: RawOp, sizes: Sizes, widths: Iterable[int],
                    divided: Callable[[Use], bool]) -> bool:
    """Whether an operation inside a divided region works on each feature of each token alone.

    widths: features of the column matmuls that lead here. divided: whether an operand is.
    """
    known = set(widths)
    if op.name not in ELEMENTWISE:
        return False
    for one, two in _uses(op, other):
        wide = one.shape[-1:] == two.shape[-1:] and bool(one.shape) and one.shape[-1] in known
        if wide != divided(one):  # a constant as wide would not be divided with the rest
            return False
        if wide and len(one.shape) > 1 and not is_by_token(one, two, sizes):
            return False
    return True


def _uses(op: RawOp, other: RawOp) -> list[tuple[Use, Use]]:
    return list(zip(op.reads + op.writes, other.reads + other.writes, strict=True))
