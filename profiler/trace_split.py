"""How tensor parallelism would divide a layer, inferred from its operations.

Megatron's pattern: a matmul that reads what lies outside (the residual stream) is *column*, all
that depends on it is inside, and the matmul that reads the inside is *row* and leads out again.
Every matmul by a parameter starts as a candidate. One is taken back (left whole) when what it makes

    - meets something whole in a pointwise operation (a residual sum inside),
    - is reduced or normalized over its whole width,
    - or leaves the layer without passing a row matmul.

Where a low-rank pair (LoRA) meets a column matmul, the first of the pair is taken back, which makes
the second a column matmul. Vocabulary tables and heads are divided by vocabulary. Between the
picking of tokens for the experts of a mixture and the sum of their outputs, tensors are whole.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from profiler.layer_graph import Split
from profiler.trace_events import RawOp, Storage, Use
from profiler.trace_local import Sizes, is_by_token, is_feature_wise, is_token_wise
from profiler.trace_view import LayerView, kind_of_op

__all__ = ["Splits", "infer_splits", "vocabulary_of"]

State = Literal["outside", "vocabulary", "whole"] | frozenset[int]
"""Of a tensor: outside, of the vocabulary, whole on every rank, or inside and made by columns."""

_REDUCING = frozenset({"mean", "sum", "var", "var_mean", "_softmax", "_log_softmax", "amax", "max",
                       "native_layer_norm", "_fused_rms_norm", "linalg_vector_norm", "topk",
                       "sort", "argmax", "cumsum", "logsumexp", "native_group_norm", "norm"})


@dataclass(slots=True)
class Splits:
    """The division of one layer. Places are (operation index, "reads"|"writes", position).

    unproven: parameters whose callers' code may count on whole features. by_token: whether all else
    of the layer works on each token alone. kv: parameters that make keys and values, not queries.
    """

    ops: dict[int, Split] = field(default_factory=dict)
    storages: dict[int, Split] = field(default_factory=dict)
    parameters: dict[int, tuple[Split, int]] = field(default_factory=dict)
    divides: dict[str, int] = field(default_factory=dict)
    entries: list[tuple[int, str, int]] = field(default_factory=list)
    exits: list[tuple[int, str, int]] = field(default_factory=list)
    unproven: set[int] = field(default_factory=set)
    kv: set[int] = field(default_factory=set)
    by_token: bool = True


@dataclass(frozen=True, slots=True)
class _Linear:
    """A matmul of an activation by a parameter: `weight` and `operand` are positions in reads."""

    weight: int
    operand: int
    transposed: bool

    def dim(self, op: RawOp, side: Literal["in", "out"]) -> int:
        """The dim of the parameter itself that holds its input or output features."""
        last = len(op.reads[self.weight].shape) - 1
        return last - 1 if (side == "in") != self.transposed else last

    def width(self, op: RawOp, side: Literal["in", "out"]) -> int:
        return op.reads[self.weight].shape[-2 if side == "in" else -1]


class _Conflict(Exception):
    """These matmuls cannot be column matmuls."""

    def __init__(self, columns: frozenset[int]) -> None:
        self.columns = columns


def _linear(op: RawOp, storages: list[Storage], parameters: set[int]) -> _Linear | None:
    if kind_of_op(op) != "matmul":
        return None
    first = len(op.reads) - 2
    if first < 0:
        return None
    operand, weight = op.reads[first], op.reads[first + 1]
    if weight.storage not in parameters or operand.storage in parameters \
            or not storages[operand.storage].derived or len(weight.shape) < 2:
        return None
    return _Linear(first + 1, first, weight.transposed)


def vocabulary_of(views: list[LayerView], storages: list[Storage],
                  parameters: set[int]) -> tuple[int | None, set[int]]:
    """(vocabulary size, storages of its tables): the largest table read by sample data."""
    tables = [op.reads[0] for view in views for _, op in view.forward
              if op.name == "embedding" and op.reads[0].storage in parameters
              and storages[op.reads[1].storage].derived]
    if not tables:
        return None, set()
    size = max(table.shape[0] for table in tables)
    return size, {table.storage for table in tables if table.shape[0] == size}


class _Inference:
    def __init__(self, view: LayerView, storages: list[Storage], parameters: set[int],
                 vocabulary: int | None, tables: set[int], longer: list[RawOp],
                 sizes: Sizes) -> None:
        self.view, self.storages, self.parameters = view, storages, parameters
        self.vocabulary, self.tables = vocabulary, tables
        self.longer, self.sizes, self.micro_batch = longer, sizes, sizes.short[0]
        self.whole: set[int] = set()
        self.routed = {op.grouped_from for _, op in view.forward}
        self.linears = {index: linear for index, op in view.forward
                        if (linear := _linear(op, storages, parameters))}

    def run(self) -> Splits:
        for _ in range(2 * len(self.linears) + 2):
            try:
                return self._attempt()
            except _Conflict as conflict:
                self.whole |= conflict.columns
        self.whole = set(self.linears)
        return self._attempt()

    # ---- one attempt with `self.whole` taken back ----

    def _attempt(self) -> Splits:
        self.states: dict[int, State | None] = {}
        self.rows: dict[int, frozenset[int]] = {}
        self.row_of: dict[int, int] = {}
        self.splits = Splits()
        self.through_attention: set[int] = set()
        self.of_queries: set[int] = set()
        self.of_keys: set[int] = set()
        for index, op in self.view.forward:
            self._visit(index, op)
        used = frozenset[int]().union(*self.rows.values()) if self.rows else frozenset[int]()
        for storage in self.view.outputs:
            state = self.states.get(storage)
            if isinstance(state, frozenset):
                raise _Conflict(state)
        idle = {index for index in self.linears
                if self.splits.ops.get(index) == "column" and index not in used}
        if idle:
            raise _Conflict(frozenset(idle))
        self._finish()
        return self.splits

    def _state(self, use: Use) -> State | None:
        """None for what every shard has anyway: parameters, tables, constants."""
        if use.storage in self.states:
            return self.states[use.storage]
        storage = self.storages[use.storage]
        if use.storage in self.parameters or not storage.derived:
            return None
        return "outside"

    def _visit(self, index: int, op: RawOp) -> None:
        kind = kind_of_op(op)
        split: Split
        state: State | None
        if index in self.linears:
            split, state = self._visit_linear(index, op, self.linears[index])
        elif kind == "embedding" and op.reads[0].storage in self.tables:
            split, state = "vocabulary", "outside"
            self.splits.parameters[op.reads[0].storage] = ("vocabulary", 0)
            self.splits.exits.append((index, "writes", 0))
        else:
            split, state = self._visit_other(index, op, kind)
        self.splits.ops[index] = split
        for use in op.writes:
            self.states[use.storage] = state

    def _visit_linear(self, index: int, op: RawOp, linear: _Linear) -> tuple[Split, State]:
        weight, operand = op.reads[linear.weight], op.reads[linear.operand]
        state = self._state(operand)
        bias = op.reads[0].storage if linear.operand == 1 else None
        if isinstance(state, frozenset):
            self.rows[index] = state
            for use in op.writes:
                self.row_of[use.storage] = index
            self.splits.parameters[weight.storage] = ("row", linear.dim(op, "in"))
            return "row", "outside" if op.grouped_from is None else "whole"
        is_head = weight.storage in self.tables or (
            self.vocabulary is not None and linear.width(op, "out") == self.vocabulary)
        if is_head or index not in self.whole:
            split: Split = "vocabulary" if is_head else "column"
            self.splits.parameters[weight.storage] = (split, linear.dim(op, "out"))
            if bias is not None:
                self.splits.parameters[bias] = (split, 0)
            if is_head:
                self.splits.entries.append((index, "reads", linear.operand))
            return split, "vocabulary" if is_head else frozenset({index})
        return "sequence", "outside"

    def _widths(self, columns: frozenset[int]) -> set[int]:
        ops = dict(self.view.forward)
        return {self.linears[c].width(ops[c], "out") for c in columns}

    def _visit_other(self, index: int, op: RawOp, kind: str) -> tuple[Split, State | None]:
        reads = op.reads[:3] if kind == "attention" else op.reads
        states = [(use, self._state(use)) for use in reads]
        inside = frozenset[int]().union(*(s for _, s in states if isinstance(s, frozenset)))
        if inside:
            widths = self._widths(inside)
            if op.name in _REDUCING and all(
                    o.reads[0].shape and o.reads[0].shape[-1] in widths
                    for o in (op, self.longer[index])):
                raise _Conflict(inside)
            for use, state in states:
                if state == "outside" and (kind == "attention" or (use.shape
                                                                   and use.shape[-1] != 1)):
                    raise self._blame(use.storage, inside)
            for use in op.reads:
                if use.storage in self.parameters and use.shape[-1:] and use.shape[-1] in widths:
                    dims = sum(size != 1 for size in use.shape)  # a bias, unsqueezed or not
                    self.splits.parameters[use.storage] = ("column", dims - 1)
            if kind in {"attention", "matmul"}:
                self.through_attention |= inside
                self._divide_heads(op, [state for _, state in states[-2:]])
                if op.attention:
                    self._tell_keys([state for _, state in states])
            return "heads" if kind in {"attention", "matmul"} else "feature", inside
        if any(state == "vocabulary" for _, state in states):
            return "vocabulary", "vocabulary"
        if op.name == "index_select" and op.reads[0].storage in self.routed:
            return "replicated", "whole"
        if any(state == "whole" for _, state in states):
            return "replicated", "outside" if op.name == "sum" else "whole"
        if all(state is None for _, state in states):
            return "replicated", None
        if kind in {"attention", "convolution"}:
            return "replicated", "outside"
        return "sequence", "outside"

    def _tell_keys(self, states: list[State | None]) -> None:
        """Which column matmuls make queries, and which keys and values."""
        queries, *others = (s if isinstance(s, frozenset) else frozenset() for s in states)
        self.of_queries |= queries
        self.of_keys |= frozenset[int]().union(*others)

    def _divide_heads(self, op: RawOp, sides: list[State | None]) -> None:
        """Heads of a fused attention, or of a batched product of queries by keys."""
        if op.attention:
            heads, kv_heads = op.attention[:2]
        else:
            left, right = op.reads[-2:]
            if len(left.shape) != 3 or left.shape[0] % self.micro_batch:
                return
            heads = kv_heads = left.shape[0] // self.micro_batch
            if isinstance(sides[1], frozenset) and sides[0] != sides[1] and left.shape[-1]:
                if len(sides[1]) > 1 or left.shape[-1] != right.shape[-2] or (
                        isinstance(sides[0], frozenset) and len(sides[0]) > 1):
                    return  # scores by values: the heads are known from the scores
                kv_heads = min(heads, max(self._widths(sides[1])) // left.shape[-1])
        self._divide("heads", heads)
        self._divide("kv_heads", kv_heads)

    def _blame(self, whole: int, inside: frozenset[int]) -> _Conflict:
        row = self.row_of.get(whole)
        if row is not None:
            return _Conflict(self.rows[row])
        return _Conflict(inside)

    def _divide(self, name: str, size: int) -> None:
        known = self.splits.divides
        if known.get(name, size) == size:
            known[name] = size
            return
        number = 2
        while known.get(f"{name}.{number}", size) != size:
            number += 1
        known[f"{name}.{number}"] = size

    # ---- what the attempt means ----

    def _finish(self) -> None:
        ops = dict(self.view.forward)
        gathered: dict[int, None] = {}
        for index, split in self.splits.ops.items():
            op = ops[index]
            if split == "column":
                source = op.grouped_from
                linear = self.linears[index]
                storage = op.reads[linear.operand].storage
                if source is None and storage not in gathered:
                    self.splits.entries.append((index, "reads", linear.operand))
                gathered[storage] = None
                if source is not None:
                    self._divide("experts", op.reads[linear.weight].shape[0])
                    self._experts_ports(source)
            elif split == "row":
                if op.grouped_from is None:
                    self.splits.exits.append((index, "writes", 0))
                if not self.rows[index] & self.through_attention:
                    self._divide("ffn", self.linears[index].width(op, "in"))
            elif split == "vocabulary" and index in self.linears:
                gathered[op.reads[self.linears[index].operand].storage] = None
        if self.vocabulary and "vocabulary" in {s for s, _ in self.splits.parameters.values()}:
            self._divide("vocabulary", self.vocabulary)
        for storage, state in self.states.items():
            made: Split = ("feature" if isinstance(state, frozenset) else "vocabulary"
                           if state == "vocabulary" else
                           "replicated" if state in {"whole", None} else "sequence")
            self.splits.storages[storage] = made
        for storage in gathered:
            self.splits.storages[storage] = "gathered"
        self.splits.kv = {use for index in self.of_keys - self.of_queries
                          for use in self._parameters(index)}
        self._prove()

    def _parameters(self, index: int) -> set[int]:
        """The weight of a matmul, and its bias."""
        return {use.storage for use in dict(self.view.forward)[index].reads
                if use.storage in self.parameters}

    def _prove(self) -> None:
        """Note what is not proven to work on shards; see `trace_local`."""
        unproven = set[int]()
        for index, op in self.view.forward:
            inside = frozenset[int]().union(*(s for use in op.reads if isinstance(
                s := self._state(use), frozenset)))
            if not op.inside:  # the model's own code, which is given whole tensors
                unproven |= inside
            elif index in self.linears or self.splits.ops[index] == "vocabulary":
                if op.grouped_from is not None:
                    unproven |= inside | {index}
                elif not self._is_plain(index, op):
                    self.splits.by_token = False
            elif inside:
                if not is_feature_wise(op, self.longer[index], self.sizes, self._widths(inside),
                                       self._is_divided):
                    unproven |= inside
            elif any(self._state(use) is not None for use in op.reads + op.writes):
                self.splits.by_token &= is_token_wise(op, self.longer[index], self.sizes,
                                                      self._moves)
        rows = {row for row, columns in self.rows.items() if columns & unproven}
        self.splits.unproven = {p for i in unproven | rows for p in self._parameters(i)}

    def _is_divided(self, use: Use) -> bool:
        if use.storage in self.parameters:
            return use.storage in self.splits.parameters
        return isinstance(self._state(use), frozenset)

    def _moves(self, use: Use) -> bool:
        return self._state(use) is not None

    def _is_plain(self, index: int, op: RawOp) -> bool:
        """Whether a matmul by a parameter, or a lookup in a table, works on each token alone."""
        other, linear = self.longer[index], self.linears.get(index)
        if linear is not None:
            places = [(op.reads[linear.operand], other.reads[linear.operand])]
        elif op.name == "embedding":
            places = [(op.reads[1], other.reads[1])]
        else:
            return False
        return all(is_by_token(one, two, self.sizes, flat=linear is not None)
                   for one, two in places)

    def _experts_ports(self, hidden: int) -> None:
        """Experts are entered where tokens are picked, and left where they are summed again."""
        for index, op in self.view.forward:
            if op.name == "index_select" and op.reads[0].storage == hidden:
                made = {use.storage for use in op.writes}
                last = [i for i, o in self.view.forward if o.name == "sum" and i > index]
                if made and last:
                    self.splits.entries.append((last[0], "writes", 0))
                    self.splits.exits.append((last[0], "writes", 0))
                return


def infer_splits(view: LayerView, storages: list[Storage], parameters: set[int],
                 vocabulary: int | None, tables: set[int], longer: list[RawOp],
                 sizes: Sizes) -> Splits:
    """The division of one layer; without `divides` it cannot be divided.

    longer: the operations of a run with longer sequences, which tell widths from lengths.
    sizes: those of the run that the view was taken from, and of the longer one.
    """
    return _Inference(view, storages, parameters, vocabulary, tables, longer, sizes).run()
