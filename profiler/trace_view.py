"""The operations of one layer, taken out of a run.

A layer that stands for itself has the operations recorded while it was current; one that was not
run (it equals an earlier layer) has the inner operations of that one and the outer ones of its
own, with its arguments and results renamed to the earlier layer's.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from profiler.trace_events import RawOp, Run, Storage, Use

__all__ = ["LayerView", "OpKind", "kind_of_op", "layer_views"]

OpKind = str

_KINDS: dict[str, OpKind] = {
    **dict.fromkeys(("mm", "addmm", "bmm", "baddbmm", "addbmm", "mv", "addmv", "dot"), "matmul"),
    "attention": "attention",
    **dict.fromkeys(("convolution", "_convolution", "convolution_overrideable"), "convolution"),
    **dict.fromkeys(("native_layer_norm", "native_batch_norm", "native_group_norm",
                     "_native_batch_norm_legit", "_fused_rms_norm", "cudnn_batch_norm",
                     "_batch_norm_with_update"), "normalization"),
    **dict.fromkeys(("embedding", "_embedding_bag"), "embedding"),
    **dict.fromkeys(("nll_loss_forward", "nll_loss2d_forward", "mse_loss", "_log_softmax",
                     "binary_cross_entropy", "binary_cross_entropy_with_logits", "smooth_l1_loss",
                     "huber_loss", "soft_margin_loss", "_ctc_loss"), "loss"),
    **dict.fromkeys(("topk", "sort", "argsort", "index", "index_put", "index_select", "index_add",
                     "index_put_", "index_add_", "scatter", "scatter_add", "gather", "cumsum",
                     "max_pool2d_with_indices", "avg_pool2d", "_adaptive_avg_pool2d",
                     "upsample_bilinear2d", "upsample_nearest2d", "nonzero", "cat", "stack"),
                    "other"),
}


def kind_of_op(op: RawOp) -> OpKind:
    """The kind under which an operation is counted."""
    kind = _KINDS.get(op.name, "pointwise")
    return "normalization" if op.in_norm and kind in {"pointwise", "other"} else kind


@dataclass(slots=True)
class LayerView:
    """One layer: (index in the run, operation) of its forward and backward, and its storages.

    saved: storages kept by autograd, named as in this view; `actual` gives the storage (or, for one
    inside a layer that was not run, a stand-in unique to this layer) behind each name.
    saved_outside: those of `saved` that work outside of the layer's module keeps.
    outputs: what other layers are given or read. names and back translate the arguments and
    results of this layer to those of the one it equals, and back.
    """

    index: int
    path: str
    like: int
    forward: list[tuple[int, RawOp]]
    backward: list[tuple[int, RawOp]]
    saved: list[int]
    saved_outside: set[int]
    actual: dict[int, int | tuple[int, int]]
    outputs: set[int]
    layers: set[int]
    names: dict[int, int]
    back: dict[int, int]

    def is_own(self, storage: Storage) -> bool:
        """Whether this layer (or the one it stands for) made the storage."""
        return not storage.external and storage.layer in self.layers


def _renamed(op: RawOp, names: dict[int, int]) -> RawOp:
    def rename(uses: tuple[Use, ...]) -> tuple[Use, ...]:
        return tuple(replace(use, storage=names.get(use.storage, use.storage)) for use in uses)
    return replace(op, reads=rename(op.reads), writes=rename(op.writes))


def layer_views(run: Run) -> list[LayerView]:
    """The view of every layer, in the order of their calls."""
    inside: dict[int, list[int]] = {}
    outside: dict[int, list[int]] = {}
    for index, op in enumerate(run.ops):
        (inside if op.inside else outside).setdefault(op.layer, []).append(index)
    ignored = set(run.parameters) | run.buffers
    saved_inside: dict[int, dict[int, None]] = {}
    saved_outside: dict[int, dict[int, None]] = {}
    for storage, layer, is_inside in run.saved:
        if storage in ignored:
            continue
        group = saved_inside if is_inside else saved_outside
        group.setdefault(layer, {})[storage] = None
    crossing = _crossing(run)
    views = []
    for index, call in enumerate(run.calls):
        like = run.calls[call.like]
        names = {} if call.like == index else {
            mine.storage: its.storage
            for mine, its in zip(call.inputs + call.outputs, like.inputs + like.outputs,
                                 strict=True)}
        back = {its: mine for mine, its in names.items()}
        own = [(k, _renamed(run.ops[k], names) if names else run.ops[k])
               for k in outside.get(index, ())]
        ops = sorted([(k, run.ops[k]) for k in inside.get(call.like, ())] + own,
                     key=lambda item: item[0])
        saved = dict.fromkeys([*saved_inside.get(call.like, {}),
                               *(names.get(s, s) for s in saved_outside.get(index, {}))])
        actual: dict[int, int | tuple[int, int]] = {}
        for name in saved:
            private = (call.like != index and name not in back and run.storages[name].layer
                       == call.like and not run.storages[name].external)
            actual[name] = (index, name) if private else back.get(name, name)
        views.append(LayerView(
            index, call.path, call.like,
            [item for item in ops if item[1].forward], [i for i in ops if not i[1].forward],
            list(saved), {names.get(s, s) for s in saved_outside.get(index, {})}, actual,
            {names.get(s, s) for s in crossing.get(index, ())}, {index, call.like}, names, back))
    return views


def _crossing(run: Run) -> dict[int, set[int]]:
    """The storages of each layer that another layer is given or reads."""
    crossing: dict[int, set[int]] = {}
    for index, call in enumerate(run.calls):
        for use in call.inputs:
            storage = run.storages[use.storage]
            if not storage.external and storage.layer != index:
                crossing.setdefault(storage.layer, set()).add(use.storage)
    for op in run.ops:
        if op.forward:
            for use in op.reads:
                storage = run.storages[use.storage]
                if not storage.external and storage.layer != op.layer:
                    crossing.setdefault(storage.layer, set()).add(use.storage)
    return crossing
