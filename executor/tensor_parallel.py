"""Tensor parallelism with sequence parallelism over one mesh axis of degree t.

Parameters are DTensors over the axis (so sharded data parallelism, checkpoints and norms know what
they are); between layers an activation x_BSH is a DTensor sharded by sequence, so the model's own
glue code sees the whole sequence's shape. Inside a layer everything is local, by the layer's role:

    divided    runs on its shard of the sequence. Modules with column matmuls gather their input
    first,
               a row matmul's output is reduced and scattered; what is not divided (norms, biases of
               row matmuls) works on the shard, and its gradient is a sum over ranks.
    sequence   a norm: works on the shard, its gradient is a sum over ranks.
    whole      gathered, computed alike by every rank, sharded again; its gradients are alike.

How each parameter is divided is the LayerGraph's word (`Parameter.split`), or a plan's; which
modules' code stands it, `planner.division`; what they need besides, `profiler.families.FAMILIES`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.utils import _pytree as pytree
from torch.utils.weak import WeakIdKeyDictionary

from executor.collectives import gather_sequence, reduce_scatter_sequence
from executor.fused import interleaved
from executor.random_state import RandomStreams
from planner.division import kv_copies, kv_parameters
from planner.layout import Choice
from profiler.errors import InternalError, UnsupportedLayout
from profiler.families import FAMILIES, NORMS, Family
from profiler.layer_graph import LayerKind
from profiler.local_parameters import use_local_parameters

__all__ = ["TensorParallel"]

Role = Literal["divided", "sequence", "whole"]


@contextmanager
def _no_implicit_replication() -> Iterator[None]:
    """Inside a layer, mixing a DTensor with a local tensor is our mistake and must not pass."""
    dispatcher = DTensor._op_dispatcher
    before = dispatcher._allow_implicit_replication
    dispatcher._allow_implicit_replication = False
    try:
        yield
    finally:
        dispatcher._allow_implicit_replication = before


@dataclass(slots=True)
class TensorParallel:
    """Divides the layers of one model and runs them.

    vouched: classes beyond FAMILIES whose code stands the division.
    fused: by parameter, the (dim, number) of matrices held side by side: its shards are
        interleaved.
    """

    mesh: DeviceMesh
    random: RandomStreams
    vouched: frozenset[str] = frozenset()
    fused: dict[nn.Parameter, tuple[int, int]] = field(default_factory=dict)
    _roles: dict[int, Role] = field(default_factory=dict)
    _made: WeakIdKeyDictionary = field(default_factory=WeakIdKeyDictionary)
    _seq_len: int = 0
    _num_logits: int = 0

    @property
    def degree(self) -> int:
        return int(self.mesh.size())

    @property
    def group(self) -> Any:
        return self.mesh.get_group()

    def begin(self, seq_len: int) -> None:
        """A forward over sequences of `seq_len` tokens starts."""
        self._seq_len = seq_len

    # ---- dividing a layer's parameters and changing its modules ----

    def divide(self, index: int, name: str, module: nn.Module, kind: LayerKind,
               choice: Choice) -> None:
        """Make the parameters of a layer DTensors and its modules compute with their shards.

        Raises:
            UnsupportedLayout: a module whose code is not known to stand it.
        """
        splits = {p.name: p for p in kind.parameters if p.split != "replicated"}
        role: Role = "whole"
        if choice.tensor_parallel and splits:
            role = "divided"
        elif choice.tensor_parallel and type(module).__name__.endswith(NORMS):
            role = "sequence"
        self._roles[index] = role
        parents = dict(module.named_modules())
        # a parameter with two names inside the layer is in the graph by the first
        own = dict(module.named_parameters(remove_duplicate=False))
        by_id = {id(own[p]): split for p, split in splits.items() if p in own}
        copies = kv_copies(kind, self.degree) if role == "divided" else 1
        shared_kv = kv_parameters(kind) if copies > 1 else ()
        for path, inner in list(module.named_modules()):
            split_of: dict[str, str] = {}
            slices: dict[str, tuple[int, int, int]] = {}
            for key, parameter in list(inner._parameters.items()):
                if parameter is None:
                    continue
                full = f"{path}.{key}" if path else key
                split = by_id.get(id(parameter)) if role == "divided" else None
                if split is not None:
                    split_of[key] = split.split
                factor = _fused_factor(parents, full) if split is not None else 1
                dim = split.split_dim if split is not None else None
                if split is not None and split.name in shared_kv:
                    count = self.degree // copies
                    slices[key] = (split.split_dim or 0, count,
                                   self.mesh.get_local_rank() * count // self.degree)
                    dim = None
                inner._parameters[key] = self._distributed(f"{name}.{full}", parameter, dim, factor)
            if role == "divided":
                self._change(inner, split_of, copies)
            use_local_parameters(inner, Replicate() if role == "whole" else Partial(), slices)

    def _distributed(self, name: str, parameter: nn.Parameter, dim: int | None,
                     factor: int) -> nn.Parameter:
        placement = Replicate() if dim is None else Shard(dim)
        done = self._made.get(parameter)
        if done is not None:
            if done.placements != (placement,):
                raise UnsupportedLayout(f"{name} is shared by layers that would divide it "
                                        f"differently: {done.placements} and {(placement,)}")
            return done
        data = parameter.data
        if factor > 1 and dim is not None:
            data = interleaved(data, dim, factor, self.degree)
        local = torch.distributed.tensor.distribute_tensor(data, self.mesh, [placement],
                                                           src_data_rank=None)
        made = nn.Parameter(local, requires_grad=parameter.requires_grad)
        if factor > 1 and dim is not None:
            self.fused[made] = (dim, factor)
        self._made[parameter] = self._made[made] = made
        return made

    def _change(self, module: nn.Module, split_of: dict[str, str], copies: int) -> None:
        family = FAMILIES.get(type(module).__name__)
        if family is None and type(module).__name__ in self.vouched:
            family = Family()
        if family is not None:
            for attribute in family.group_attributes:
                if hasattr(module, attribute):
                    setattr(module, attribute, getattr(module, attribute) // copies)
            for attribute in family.divided_attributes:
                setattr(module, attribute, getattr(module, attribute) // self.degree)
            if family.gathers_input:
                self._wrap(module, self._gather_input)
            if family.reduces_output:
                self._wrap(module, self._reduce_output)
            return
        split = split_of.get("weight")
        if split is None:
            if isinstance(module, nn.Embedding):
                self._wrap(module, self._sharded_lookup)
            return
        if isinstance(module, nn.Embedding):
            self._move_padding(module)
            self._wrap(module, self._vocabulary_lookup)
        elif split == "row":
            self._wrap(module, self._row)
        else:
            if hasattr(module, "nf"):  # transformers' Conv1D reads its width off this
                module.nf //= self.degree
            if split == "vocabulary":
                self._num_logits = module.out_features
            self._wrap(module, self._column)

    def _wrap(self, module: nn.Module, around: Callable[..., Any]) -> None:
        forward = module.forward
        vars(module)["forward"] = lambda *a, **k: around(module, forward, *a, **k)

    # ---- what changed modules do, on local tensors ----

    def _gather(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[1] == self._seq_len:
            return x
        if x.shape[1] * self.degree != self._seq_len:
            raise InternalError(f"a shard of {self._seq_len} tokens over {self.degree} was "
                                f"expected, "
                                f"got {tuple(x.shape)}")
        return gather_sequence(x, self.group)

    def _column(self, module: Any, forward: Any, x: torch.Tensor) -> torch.Tensor:
        return forward(self._gather(x))

    def _row(self, module: Any, forward: Any, x: torch.Tensor) -> torch.Tensor:
        bias = module.bias
        if isinstance(module, nn.Linear):
            partial = F.linear(x, module.weight)
        else:  # transformers' Conv1D: its weight is (in, out)
            partial = x @ module.weight
        out = reduce_scatter_sequence(partial, self.group)
        return out if bias is None else out + bias

    def _gather_input(self, module: Any, forward: Any, *args: Any, **kwargs: Any) -> Any:
        """Gather the module's first tensor: its code reads the sequence's length off it."""
        if args:
            return forward(self._gather(args[0]), *args[1:], **kwargs)
        return forward(**{**kwargs, "hidden_states": self._gather(kwargs["hidden_states"])})

    def _reduce_output(self, module: Any, forward: Any, *args: Any, **kwargs: Any) -> Any:
        return reduce_scatter_sequence(forward(*args, **kwargs), self.group)

    def _sharded_lookup(self, module: Any, forward: Any, ids: torch.Tensor) -> torch.Tensor:
        width = self._seq_len // self.degree
        return forward(ids.narrow(1, self.mesh.get_local_rank() * width, width))

    def _vocabulary_lookup(self, module: Any, forward: Any, ids: torch.Tensor) -> torch.Tensor:
        """Each rank looks up the tokens of its part of the table; the sum has them all."""
        first = self.mesh.get_local_rank() * -(-module.num_embeddings // self.degree)
        mine = (ids >= first) & (ids < first + module.weight.shape[0])
        found = forward((ids - first) * mine)  # a subclass may do more than look up: a scale
        return reduce_scatter_sequence(found * mine.unsqueeze(-1), self.group)

    def _move_padding(self, module: nn.Embedding) -> None:
        """The padding token by its place in this rank's part of the table, if it is there."""
        rows = -(-module.num_embeddings // self.degree)
        if module.padding_idx is not None:
            local = module.padding_idx - self.mesh.get_local_rank() * rows
            last = min(rows, module.num_embeddings - self.mesh.get_local_rank() * rows)
            module.padding_idx = local if 0 <= local < last else None  # type: ignore[assignment]

    # ---- running a layer ----

    def run(self, index: int, inner: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call `inner` (the layer, with its recompute) on local tensors."""
        role = self._roles[index]
        with _no_implicit_replication():
            args, kwargs = pytree.tree_map_only(
                DTensor, lambda t: self._enter(t, role), (args, kwargs))
            if role == "whole":
                with self.random.common():
                    out = inner(*args, **kwargs)
            else:
                out = inner(*args, **kwargs)
            return pytree.tree_map_only(torch.Tensor, lambda t: self._leave(t, index), out)

    def _enter(self, tensor: DTensor, role: Role) -> torch.Tensor:
        if role == "whole":
            return tensor.redistribute(placements=[Replicate()]).to_local()
        if tensor.placements != (Shard(1),):
            raise UnsupportedLayout(f"an activation {tuple(tensor.shape)} reaches a divided layer "
                                    f"as "
                                    f"{tensor.placements}: only sequence shards are handled")
        return tensor.to_local()

    def _leave(self, tensor: torch.Tensor, index: int) -> Any:
        role = self._roles[index]
        length = tensor.shape[1] if tensor.dim() > 1 else 0
        if role == "whole":
            if length != self._seq_len:
                raise UnsupportedLayout(f"layer {index} returns a tensor {tuple(tensor.shape)} "
                                        f"without "
                                        f"the sequence of {self._seq_len} as its dim 1")
            made = DTensor.from_local(tensor, self.mesh, [Replicate()], run_check=False)
            return made.redistribute(placements=[Shard(1)])
        if length * self.degree == self._seq_len:
            return DTensor.from_local(tensor, self.mesh, [Shard(1)], run_check=False)
        if length == self._seq_len:
            return self._divided_vocabulary(tensor)
        raise UnsupportedLayout(f"layer {index} returns a tensor {tuple(tensor.shape)}, which is "
                                f"neither a shard of the sequence nor logits")

    def _divided_vocabulary(self, logits: torch.Tensor) -> DTensor:
        """Logits of this rank's part of the vocabulary; the last parts may be shorter."""
        shape = torch.Size((*logits.shape[:-1], self._num_logits))
        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(logits, self.mesh, [Shard(logits.dim() - 1)], run_check=False,
                                  shape=shape, stride=stride)


def _fused_factor(parents: dict[str, nn.Module], full: str) -> int:
    """How many matrices a parameter holds side by side, by its owner's or caller's family."""
    parts = full.split(".")
    for depth in (1, 2):
        if len(parts) >= depth:
            caller = parents.get(".".join(parts[:-depth]))
            family = FAMILIES.get(type(caller).__name__)
            if family is not None:
                return family.fused.get(".".join(parts[-depth:]), 1)
    return 1
