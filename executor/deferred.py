"""Models that are built without memory for their weights; each rank makes only its own shards.

The model's own code builds it on the meta device, and every operation on a meta tensor is written
down. When the layout has been applied, the operations are repeated in their order on real tensors,
one parameter at a time: a parameter that is complete is copied into this rank's shard and freed.
Random numbers are drawn as in an ordinary construction, those of other ranks' parameters too (and
thrown away), so the weights are those that an ordinary construction with the same seed gives,
bit by bit, whatever the layout. It takes as long, and the memory of the largest parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from profiler.errors import InvalidInput

__all__ = ["Deferred", "allocate"]

_OVERWRITES = frozenset({"normal_", "uniform_", "zero_", "fill_", "copy_", "random_", "bernoulli_",
                         "exponential_", "log_normal_", "cauchy_", "geometric_"})
"""In-place operations whose result does not depend on what was there before."""


_WHOLE_CALLS = ("_no_grad_trunc_normal_", "orthogonal_", "sparse_", "dirac_")
"""Of torch.nn.init: they leave meta tensors alone; some draw until the values are as wished."""

_FACTORIES = frozenset({torch.empty, torch.zeros, torch.ones, torch.full, torch.rand, torch.randn,
                        torch.eye, torch.empty_strided})


@dataclass(frozen=True, slots=True)
class _Ref:
    """A tensor: where in which storage."""

    storage: int
    num_bytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _Ref:
        storage = tensor.untyped_storage()
        return cls(storage._cdata, storage.nbytes(), tensor.dtype, tuple(tensor.shape),
                   tensor.stride(), tensor.storage_offset())

    @property
    def is_all(self) -> bool:
        """Whether it is all of its storage."""
        return prod(self.shape) * int(self.dtype.itemsize) == self.num_bytes

    def real(self, storages: dict[int, torch.UntypedStorage]) -> torch.Tensor:
        if self.storage not in storages:
            storages[self.storage] = torch.UntypedStorage(self.num_bytes)
        made = torch.empty(0, dtype=self.dtype)
        return made.set_(storages[self.storage], self.offset, self.shape, self.stride)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Node:
    """One operation: args and kwargs with a _Ref for each meta tensor.

    makes: what it writes is new. overwrites: what was there before does not matter.
    """

    function: Any
    args: Any
    kwargs: Any
    written: tuple[_Ref, ...]
    read: frozenset[int]
    is_random: bool
    makes: bool
    overwrites: bool

    def run(self, storages: dict[int, torch.UntypedStorage]) -> None:
        """Do it on real tensors; what it makes anew is kept under its storage's number."""
        args, kwargs = pytree.tree_map_only(_Ref, lambda r: r.real(storages),
                                            (self.args, self.kwargs))
        if kwargs.get("device") is not None:
            kwargs = {**kwargs, "device": torch.device("cpu")}
        made = self.function(*args, **kwargs)
        if not self.makes:
            return
        tensors = [t for t in pytree.tree_leaves(made) if isinstance(t, torch.Tensor)]
        for ref, tensor in zip(self.written, tensors, strict=True):
            storages[ref.storage] = tensor.untyped_storage()


class _OnMeta(TorchFunctionMode):  # type: ignore[misc]
    """What may be large is made on the meta device; constants keep their values.

    Not `torch.device("meta")`: transformers asks for that, and leaves weights as they are then.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _FACTORIES and kwargs.get("device") is None:
            kwargs = {**kwargs, "device": "meta"}
        return func(*args, **kwargs)


class _Tape(TorchDispatchMode):  # type: ignore[misc]
    """Writes down what happens to meta tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.nodes: list[_Node] = []
        self.kept: list[torch.UntypedStorage] = []  # a freed storage's number might be used again

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(_is_meta(t) for t in pytree.tree_leaves((args, kwargs))):
            made = func(*pytree.tree_map_only(torch.Tensor, _shape_only, args),
                        **pytree.tree_map_only(torch.Tensor, _shape_only, kwargs))
        else:
            made = func(*args, **kwargs)
        inputs = [t for t in pytree.tree_leaves((args, kwargs)) if _is_meta(t)]
        outputs = [t for t in pytree.tree_leaves(made) if _is_meta(t)]
        if not inputs and not outputs:
            return made
        known = {t.untyped_storage()._cdata for t in inputs}
        if func._schema.is_mutable:
            written = [a for a, info in zip(args, func._schema.arguments, strict=False)
                       if _is_meta(a) and info.alias_info is not None and info.alias_info.is_write]
        elif all(t.untyped_storage()._cdata in known for t in outputs):
            return made  # a view: a _Ref says where in its storage
        else:
            written = outputs
        self._note(func, args, kwargs, written,
                   is_random=torch.Tag.nondeterministic_seeded in func.tags,
                   makes=not func._schema.is_mutable,
                   overwrites=func._schema.name.split("::")[-1] in _OVERWRITES)
        return made

    def _note(self, function: Any, args: Any, kwargs: Any, written: list[torch.Tensor],
              **properties: bool) -> None:
        self.kept += [t.untyped_storage() for t in written]
        read = frozenset(t.untyped_storage()._cdata
                         for t in pytree.tree_leaves((args, kwargs)) if _is_meta(t))
        args, kwargs = pytree.tree_map_only(
            torch.Tensor, lambda t: _Ref.of(t) if _is_meta(t) else t.detach().clone(),
            (args, kwargs))
        self.nodes.append(_Node(function=function, args=args, kwargs=kwargs, read=read,
                                written=tuple(_Ref.of(t) for t in written), **properties))

    @contextmanager
    def whole_calls(self) -> Iterator[None]:
        """Within it, functions that leave meta tensors alone are written down as one operation."""
        before = {name: getattr(nn.init, name) for name in _WHOLE_CALLS}

        def noting(function: Any) -> Any:
            def call(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
                if not tensor.is_meta:
                    return function(tensor, *args, **kwargs)
                with torch.no_grad():
                    self._note(function, (tensor, *args), kwargs, [tensor], is_random=True,
                               makes=False, overwrites=True)
                return tensor
            return call
        try:
            for name, function in before.items():
                setattr(nn.init, name, noting(function))
            yield
        finally:
            for name, function in before.items():
                setattr(nn.init, name, function)

    def needed(self, wanted: set[int]) -> list[bool]:
        """Which operations the contents of the wanted storages depend on."""
        wanted, marks = set(wanted), []
        for node in reversed(self.nodes):
            marks.append(any(ref.storage in wanted for ref in node.written))
            if not marks[-1]:
                continue
            for ref in node.written:
                if node.makes or (node.overwrites and ref.is_all):
                    wanted.discard(ref.storage)
            own = {ref.storage for ref in node.written} if node.overwrites else set()
            wanted |= node.read - own
        return marks[::-1]

    def replay(self, wanted: set[int], seed: int) -> Iterator[tuple[int, torch.UntypedStorage]]:
        """(storage, its contents) of each wanted storage, as soon as it is complete."""
        marks = self.needed(wanted)
        last: dict[int, int] = {}
        for place, (node, mark) in enumerate(zip(self.nodes, marks, strict=True)):
            if mark:
                last |= dict.fromkeys([*node.read, *(r.storage for r in node.written)], place)
        draws = any(m and n.is_random for n, m in zip(self.nodes, marks, strict=True))
        storages: dict[int, torch.UntypedStorage] = {}
        torch.manual_seed(seed)
        for place, (node, mark) in enumerate(zip(self.nodes, marks, strict=True)):
            if mark:
                node.run(storages)
            elif draws and node.is_random:
                node.run({})  # the same numbers must be drawn, and are not needed here
                continue
            else:
                continue
            for key in [k for k in storages if last[k] == place]:
                contents = storages.pop(key)
                if key in wanted:
                    yield key, contents


def _shape_only(tensor: torch.Tensor) -> torch.Tensor:
    """Meta tensors and constants meet on the meta device."""
    return tensor if tensor.is_meta else torch.empty_strided(
        tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _is_meta(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.is_meta


@dataclass(frozen=True, slots=True)
class Deferred:
    """A model on the meta device (its buffers are real) and how its parameters come to be.

    refs: by first name.
    """

    model: nn.Module
    seed: int
    _tape: _Tape
    _refs: dict[str, _Ref]

    @classmethod
    def build(cls, build: Callable[[], nn.Module], seed: int) -> Deferred:
        """Build a model by its own code, without its weights.

        Raises:
            InvalidInput: its code needs to see values while it builds.
        """
        tape, random = _Tape(), torch.get_rng_state()
        torch.manual_seed(seed)
        try:
            with tape.whole_calls(), _OnMeta(), tape:
                model = build()
        except (NotImplementedError, RuntimeError) as error:
            raise InvalidInput(f"the model cannot be built without its weights: "
                               f"{' '.join(str(error).split())[:200]}") from error
        finally:
            torch.set_rng_state(random)
        refs = {name: _Ref.of(p.data) for name, p in model.named_parameters() if p.is_meta}
        made = cls(model, seed, tape, refs)
        made._fill_buffers()
        return made

    @classmethod
    def of(cls, model: nn.Module, seed: int) -> Deferred:
        """A Hugging Face model on the meta device, built again from its config.

        Raises:
            InvalidInput: a model that has no config to build it from.
        """
        config: Any = getattr(model, "config", None)
        if config is None or not hasattr(config, "to_dict"):
            raise InvalidInput(
                f"{type(model).__name__} is on the meta device, and nothing says how its weights "
                f"come to be: give executor.Deferred.build(function that builds it, seed)")
        maker: Any = type(model)
        made = cls.build(lambda: maker(config), seed)
        made.model.train(model.training)
        frozen = {name for name, p in model.named_parameters() if not p.requires_grad}
        for name, parameter in made.model.named_parameters():
            parameter.requires_grad_(name not in frozen)
        return made

    def _fill_buffers(self) -> None:
        """Give buffers, and tensors held beside them, their values: they are small."""
        places: list[tuple[dict[str, Any], str]] = []
        for module in self.model.modules():
            for store in (module._buffers, vars(module)):
                places += [(store, key) for key, value in store.items() if _is_meta(value)]
        refs = {id(store[key]): _Ref.of(store[key]) for store, key in places}
        contents = dict(self._tape.replay({ref.storage for ref in refs.values()}, self.seed))
        real = {number: ref.real(contents) for number, ref in refs.items()}
        for store, key in places:
            store[key] = real[id(store[key])]

    def parameters(self, names: set[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, whole value) of the parameters of these first names, one at a time."""
        by_storage: dict[int, list[str]] = {}
        for name in sorted(names & self._refs.keys()):
            by_storage.setdefault(self._refs[name].storage, []).append(name)
        random = torch.get_rng_state()
        for storage, contents in self._tape.replay(set(by_storage), self.seed):
            for name in by_storage[storage]:
                yield name, self._refs[name].real({storage: contents})
        torch.set_rng_state(random)


def allocate(stage: nn.Module, device: torch.device) -> None:
    """Give every meta parameter of a stage memory for its shard, without values."""
    made: dict[int, nn.Parameter] = {}
    for module in stage.modules():
        for key, parameter in module._parameters.items():
            if parameter is None or not parameter.is_meta:
                continue
            if id(parameter) not in made:
                data = torch.empty_like(parameter.detach(), device=device)
                made[id(parameter)] = nn.Parameter(data, requires_grad=parameter.requires_grad)
            module._parameters[key] = made[id(parameter)]
