"""Lower a LayerGraph to what a stack runs: the same layers, with its kernels and its memory.

X = elements of the layer's input, F = of the feed-forward activations, Q, K = of queries and of
keys, A = heads * s * s. Elements are read or written once each unless named otherwise.

    attention, not fused   scores and context as batched matmuls, the whole square; between them
                           a softmax kernel of 2A forward and 3A backward (or eager: scale, mask,
                           cast and softmax apart, as the fused one does with shapes that its
                           kernel does not take), dropout of 2A and a mask. Keeps 5 bytes for
                           each of A, 2 without dropout (Korthikanti et al. 2022, section 4.1)
    normalization          2X forward; 3X backward and 3X to add the residual's gradient; keeps its
                           input and output instead of a float32 copy
    rotary                 2 (Q + K) forward and backward
    activation             gated 3F forward and 5F backward, else 2F and 3F; keeps one result
    residual               one kernel of 3X for dropout and addition together, 2X where there is
                           no dropout and the normalization adds
    loss, fused            logits read and written once, forward and backward, in the compute dtype;
                           keeps them, and makes their gradient
"""

from __future__ import annotations

import dataclasses
from dataclasses import replace

from planner.cost.compute import FusedOp, SeparateEntries
from planner.stacks.record import Stack
from profiler.layer_graph import (
    NOTHING,
    Extent,
    LayerGraph,
    LayerKind,
    MatmulShape,
    Op,
    TensorGroup,
)

__all__ = ["lower"]

FUSED_BATCHES, FUSED_LENGTH = 4, 2048
"""What the fused softmax of Megatron-LM takes: samples x heads of a rank in multiples of 4, up to
2,048 keys (megatron/model/fused_softmax.py, is_kernel_available, until 2022)."""


def lower(graph: LayerGraph, stack: Stack) -> LayerGraph:
    """The graph as the stack runs it, without what was measured of other kernels; the same object
    where the stack changes nothing."""
    if (stack.attention == "fused" and stack.selective == "matmul-outputs" and not stack.fused
            and not stack.gathers_saved_inputs and stack.loss == "eager"
            and not stack.whole_logits and not _keeps_more(stack)):
        return graph
    return replace(graph, profiles=(),
                   kinds={name: _kind(kind, stack) for name, kind in graph.kinds.items()})


def _keeps_more(stack: Stack) -> bool:
    """Whether the stack keeps what the trace does not."""
    return (stack.float32_normalization or stack.keeps_packed_attention
            or stack.logit_bytes is not None)


def _kind(kind: LayerKind, stack: Stack) -> LayerKind:
    if stack.float32_normalization:
        kind = _float32_normalization(kind)
    if "normalization" in stack.fused:
        kind = _normalization(kind)
    if any(op.kind == "attention" for op in kind.ops):
        if "rotary" in stack.fused:
            kind = _rotary(kind)
        if "activation" in stack.fused:
            kind = _activation(kind)
        if "residual" in stack.fused:
            kind = _residual(kind)
        if stack.keeps_packed_attention:
            kind = _packed_attention(kind)
        if stack.attention != "fused":
            kind = _attention(kind, stack.attention == "eager", stack.float32_softmax)
        if stack.selective != "matmul-outputs":
            kind = _selective(kind, stack.selective == "core-attention")
        if stack.reduces_each_column:
            kind = _separate_entries(kind)
    if "loss" in stack.fused:
        kind = _loss(kind)
    if stack.whole_logits and any(op.kind == "loss" for op in kind.ops):
        kind = _whole_logits(kind)
    if stack.logit_bytes is not None and any(op.kind == "loss" for op in kind.ops):
        kind = _logit_bytes(kind, stack.logit_bytes)
    if stack.loss == "vocabulary-parallel" and "loss" not in stack.fused:
        kind = replace(kind, ops=tuple(_vocabulary_parallel_loss(op, kind) if op.kind == "loss"
                                       else op for op in kind.ops))
    if stack.gathers_saved_inputs:
        kind = replace(kind, saved=tuple(
            replace(group, split="sequence") if group.split == "gathered" and not group.is_input
            else group for group in kind.saved))
    return kind


def _times(extent: Extent, factor: int) -> Extent:
    (a, b, c), (p, q, r) = extent.fixed, extent.per_sample
    return Extent(fixed=(factor * a, factor * b, factor * c),
                  per_sample=(factor * p, factor * q, factor * r))


def _input(kind: LayerKind) -> Extent:
    return next((g.elements for g in kind.inputs if g.bytes_per_element is None), NOTHING)


def _is_final_norm(kind: LayerKind) -> bool:
    return len(kind.ops) == 1 and kind.ops[0].kind in ("pointwise", "normalization") and (
        all(len(p.shape) == 1 for p in kind.parameters) and bool(kind.parameters))


def _normalization(kind: LayerKind) -> LayerKind:
    x = _input(kind)
    final = _is_final_norm(kind)

    def fuse(op: Op) -> Op:
        if op.kind != "normalization" and not final:
            return op
        return replace(op, kind="normalization", kernels=1, backward_kernels=1 if final else 2,
                       elements_moved=_times(x, 2), bytes_moved=NOTHING,
                       backward_elements_moved=_times(x, 3 if final else 6),
                       backward_bytes_moved=NOTHING)

    if not final and not any(op.kind == "normalization" for op in kind.ops):
        return kind
    copies = {g.name for g in kind.saved if g.split == "sequence" and g.bytes_per_element == 4}
    return replace(kind, ops=tuple(fuse(op) for op in kind.ops),
                   saved=tuple(g for g in kind.saved if not (
                       g.name in copies and g.split == "sequence" and g.bytes_per_element == 4)))


def _float32_normalization(kind: LayerKind) -> LayerKind:
    """What a norm normalised stays in float32, as the copy of its input beside it does."""
    copies = {g.name for g in kind.saved if g.split == "sequence" and g.bytes_per_element == 4}
    return replace(kind, saved=tuple(
        replace(g, bytes_per_element=4) if g.name in copies and g.split == "sequence"
        and g.bytes_per_element is None and not g.is_input else g for g in kind.saved))


def _split_at_attention(kind: LayerKind) -> tuple[tuple[Op, ...], Op, tuple[Op, ...]]:
    index = next(i for i, op in enumerate(kind.ops) if op.kind == "attention")
    return kind.ops[:index], kind.ops[index], kind.ops[index + 1:]


def _is_local(op: Op) -> bool:
    """Memory-bound work inside a tensor-parallel region."""
    return op.kind in ("pointwise", "other") and op.split == "feature"


def _merge(ops: tuple[Op, ...], merged: Op) -> tuple[Op, ...]:
    """One kernel at the place of the last of the ops that it replaces."""
    last = max((i for i, op in enumerate(ops) if _is_local(op)), default=None)
    if last is None:
        return ops
    return tuple(merged if i == last else op for i, op in enumerate(ops)
                 if i == last or not _is_local(op))


def _rotary(kind: LayerKind) -> LayerKind:
    before, attention, after = _split_at_attention(kind)
    shape = attention.attention
    if shape is None:
        return kind
    twice = 2 * (shape.heads + shape.kv_heads) * shape.head_dim
    moved = Extent(per_sample=(0, twice, 0))
    fused = Op(name="rotary", kind="pointwise", split="feature", elements_moved=moved,
               backward_elements_moved=moved)
    return replace(kind, ops=(*_merge(before, fused), attention, *after))


def _activation(kind: LayerKind) -> LayerKind:
    before, attention, after = _split_at_attention(kind)
    ffn = kind.tensor_parallel.divides.get("ffn") if kind.tensor_parallel else None
    if ffn is None:
        return kind
    gated = sum(op.kind == "matmul" and op.split == "column" for op in after) > 1
    fused = Op(name="activation", kind="pointwise", split="feature",
               elements_moved=Extent(per_sample=(0, (3 if gated else 2) * ffn, 0)),
               backward_elements_moved=Extent(per_sample=(0, (5 if gated else 3) * ffn, 0)))
    results = [i for i, g in enumerate(kind.saved) if not g.kept_by_selective
               and g.split == "feature" and g.elements == Extent(per_sample=(0, ffn, 0))]
    dropped = set(results[:-1])
    return replace(kind, ops=(*before, attention, *_merge(after, fused)),
                   saved=tuple(g for i, g in enumerate(kind.saved) if i not in dropped))


def _residual(kind: LayerKind) -> LayerKind:
    x = _input(kind)
    dropouts = [op for op in kind.ops if op.kind == "pointwise" and op.split == "sequence"
                and op.bytes_moved != NOTHING]
    ops = []
    for op in kind.ops:
        if op.kind == "pointwise" and op.split == "sequence":
            if op in dropouts:
                op = replace(op, elements_moved=_times(x, 3))
            elif dropouts:
                continue  # the additions
            else:
                op = replace(op, elements_moved=_times(x, 4))
        ops.append(op)
    return replace(kind, ops=tuple(ops))


def _packed_attention(kind: LayerKind) -> LayerKind:
    """The queries and keys before rotation stay in the product that the value is a view of."""
    shape = next((op.attention for op in kind.ops if op.attention is not None), None)
    if shape is None:
        return kind
    first = Extent(per_sample=(0, (shape.heads + shape.kv_heads) * shape.head_dim, 0))
    return replace(kind, saved=(*kind.saved, TensorGroup(
        name="packed", elements=first, split="feature", kept_by_selective=True)))


def _separate_entries(kind: LayerKind) -> LayerKind:
    """Each column matmul of a gated MLP has an all-reduce of its own backward."""
    _, _, after = _split_at_attention(kind)
    columns = sum(op.kind == "matmul" and op.split == "column" for op in after)
    parallel = kind.tensor_parallel
    if parallel is None or columns < 2:
        return kind
    fields = {f.name: getattr(parallel, f.name) for f in dataclasses.fields(parallel)}
    return replace(kind, tensor_parallel=SeparateEntries(
        **fields, again=parallel.entries[-1:] * (columns - 1)))


def _square(heads: int, factor: int) -> Extent:
    return Extent(per_sample=(0, 0, factor * heads))


def _softmax(heads: int, eager: bool) -> Op:
    """In steps: cast, scale 2A, mask 2A, softmax and cast back in float32 (6 + 8 + 6 bytes). The
    fused kernel takes multiples of FUSED_BATCHES and sequences of FUSED_LENGTH at most."""
    steps = Op(name="softmax", kind="attention", split="heads", kernels=5, backward_kernels=5,
               elements_moved=_square(heads, 4), bytes_moved=_square(heads, 20),
               backward_elements_moved=_square(heads, 4), backward_bytes_moved=_square(heads, 24))
    if eager:
        return steps
    return FusedOp(name="softmax", kind="attention", split="heads",
                   elements_moved=_square(heads, 2), backward_elements_moved=_square(heads, 3),
                   heads=heads, multiple=FUSED_BATCHES, longest=FUSED_LENGTH, otherwise=steps)


def _attention(kind: LayerKind, eager: bool, float32_softmax: bool) -> LayerKind:
    before, op, after = _split_at_attention(kind)
    shape = op.attention
    if shape is None:
        return kind
    a, width = shape.heads, shape.head_dim
    dropout = any(g.bytes_per_element == 1 for g in kind.saved)
    length = Extent(fixed=(0, 1, 0))
    batch = Extent(per_sample=(a, 0, 0))
    inner = Extent(fixed=(width, 0, 0))
    qkv = (a + 2 * shape.kv_heads) * width

    def product(name: str, columns: Extent, depth: Extent) -> Op:
        return Op(name=name, kind="attention", split="heads",
                  flops=_square(a, 2 * width), backward_flops=_square(a, 4 * width),
                  elements_moved=Extent(per_sample=(0, qkv, a)),
                  backward_elements_moved=Extent(per_sample=(0, 2 * qkv, 2 * a)),
                  backward_kernels=2,
                  matmul=MatmulShape(rows=length, columns=columns, inner=depth, batch=batch))

    softmax = _softmax(a, eager)
    drop = Op(name="dropout", kind="attention", split="heads",
              elements_moved=_square(a, 2), bytes_moved=_square(a, 1),
              backward_elements_moved=_square(a, 2), backward_bytes_moved=_square(a, 1))
    kept = [TensorGroup(name="softmax", elements=_square(a, 1), split="feature")]
    if float32_softmax:
        kept.append(TensorGroup(name="softmax", elements=_square(a, 1), split="feature",
                                bytes_per_element=4))
    if dropout:
        kept += [TensorGroup(name="dropout", elements=_square(a, 1), split="feature"),
                 TensorGroup(name="dropout", elements=_square(a, 1), split="feature",
                             bytes_per_element=1)]
    statistics = Extent(per_sample=(0, a, 0))
    saved = [g for g in kind.saved if not (g.elements == statistics and g.bytes_per_element == 4)]
    working = TensorGroup(name="scores", elements=_square(a, 1), split="feature",
                          bytes_per_element=6 if eager else 2)
    return replace(
        kind, ops=(*before, product("scores", length, inner), softmax,
                   *((drop,) if dropout else ()), product("context", inner, length), *after),
        saved=(*saved, *kept), backward_working_set=(*kind.backward_working_set, working),
        forward_working_set=(*kind.forward_working_set, working))


def _selective(kind: LayerKind, core_attention: bool) -> LayerKind:
    """Mark what selective recompute keeps, and which operations it runs again."""
    inside = {"softmax", "dropout"}
    if core_attention:
        ops = tuple(replace(op, kept_by_selective=op.kind != "attention") for op in kind.ops)
        return replace(kind, ops=ops, kept_only_by_selective=(), saved=tuple(
            replace(g, kept_by_selective=g.name not in inside) for g in kind.saved))
    matmuls = [op.name.removesuffix(".matmul") for op in kind.ops if op.kind == "matmul"]
    again = set(matmuls[1::2])
    ops = tuple(replace(op, kept_by_selective=False)
                if op.name.removesuffix(".matmul") in again else op for op in kind.ops)
    return replace(
        kind, ops=ops,
        saved=tuple(replace(g, kept_by_selective=False) if g.name in again else g
                    for g in kind.saved),
        kept_only_by_selective=tuple(g for g in kind.kept_only_by_selective
                                     if g.name not in again))


def _whole_logits(kind: LayerKind) -> LayerKind:
    def whole(groups: tuple[TensorGroup, ...]) -> tuple[TensorGroup, ...]:
        return tuple(replace(g, split="replicated") if g.split == "vocabulary" else g
                     for g in groups)

    return replace(
        kind, ops=tuple(replace(op, split="replicated") if op.split == "vocabulary"
                        and op.kind != "matmul" else op for op in kind.ops),
        saved=whole(kind.saved), forward_working_set=whole(kind.forward_working_set),
        backward_working_set=whole(kind.backward_working_set))


def _vocabulary_parallel_loss(op: Op, kind: LayerKind) -> Op:
    """Megatron-LM's (megatron/mpu/cross_entropy.py), on logits in float32, in place.

    Bytes a logit forward: maximum 4, difference 8, exponential 8, sum 4, quotient 8; backward: the
    product with the incoming gradient 8. Kernels forward: 5 for those; 12 small ones for the mask
    of targets (3), the shifted targets (2 and 1), the logit of the target (index, gather, copy, 1)
    and the logarithm and difference (2); 3 all-reduces where the vocabulary is divided; the masked
    average over tokens (4), over micro-batches and replicas (4), and the scale of the loss (1);
    before it the batch: sent and cast (3), tokens and labels (2), masks and positions (6).
    Backward: 7 of the loss itself, 5 of averages and scale."""
    if kind.tensor_parallel is None:
        return op
    v = kind.tensor_parallel.divides.get("vocabulary", 0)
    return replace(op, kernels=40, backward_kernels=12,
                   bytes_moved=Extent(per_sample=(0, 32 * v, 0)),
                   backward_bytes_moved=Extent(per_sample=(0, 8 * v, 0)))


def _logit_bytes(kind: LayerKind, num_bytes: int) -> LayerKind:
    """The given bytes of each logit: what is saved of it, and the rest at the loss's peak."""
    kept = next((g for g in kind.saved if g.is_outside and g.bytes_per_element == 4
                 and g.elements.per_sample[1] > 1), None)
    if kept is None:
        return kind
    rest = replace(kept, name="gradients", elements=_times(kept.elements, num_bytes - 4),
                   bytes_per_element=1, is_outside=False)

    def without(groups: tuple[TensorGroup, ...]) -> tuple[TensorGroup, ...]:
        return tuple(g for g in groups if g.split != kept.split)

    return replace(kind, forward_working_set=without(kind.forward_working_set),
                   backward_working_set=(*without(kind.backward_working_set), rest))


def _loss(kind: LayerKind) -> LayerKind:
    loss = next((op for op in kind.ops if op.kind == "loss"), None)
    if loss is None or kind.tensor_parallel is None:
        return kind
    vocabulary = kind.tensor_parallel.divides.get("vocabulary")
    if vocabulary is None:
        return kind
    twice = Extent(per_sample=(0, 2 * vocabulary, 0))
    fused = replace(loss, elements_moved=twice, bytes_moved=NOTHING,
                    backward_elements_moved=twice, backward_bytes_moved=NOTHING, kernels=1,
                    backward_kernels=1)
    ops = [fused if op is loss else op for op in kind.ops
           if op is loss or op.kind != "pointwise" or op.split != "vocabulary"]
    logits = Extent(per_sample=(0, vocabulary, 0))

    def in_compute_dtype(groups: tuple[TensorGroup, ...]) -> tuple[TensorGroup, ...]:
        return tuple(replace(g, bytes_per_element=None, elements=logits)
                     if g.split == "vocabulary" and g.bytes_per_element == 4 else g
                     for g in groups)

    return replace(kind, ops=tuple(ops), saved=in_compute_dtype(kind.saved),
                   backward_working_set=in_compute_dtype(kind.backward_working_set),
                   forward_working_set=tuple(g for g in kind.forward_working_set
                                             if g.split != "vocabulary"))
