"""Models built without memory for their weights get the weights that they would have had."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from executor.deferred import Deferred
from profiler.errors import InvalidInput
from tests.executor import tiny
from tests.executor.launch import torchrun
from tests.executor.plain import PLAIN

SEED = 5


class Odd(nn.Module):
    """Weights that are made in every way: scaled, copied, cut, orthogonal, shared."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.randn(6, 4) * 0.02 + 1)
        self.second = nn.Parameter(torch.zeros(4, 6))
        self.second.data[1:3].normal_()
        self.linear = nn.Linear(4, 4)
        nn.init.orthogonal_(self.linear.weight)
        nn.init.trunc_normal_(self.linear.bias, std=0.1)
        self.table = nn.Embedding(7, 4, padding_idx=2)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.table.weight
        self.register_buffer("angles", torch.arange(5) / torch.tensor([2.0, 4, 8, 16, 32]))
        self.mask = torch.ones(3, 3).tril()


def hugging_face(name: str) -> nn.Module:
    import transformers

    class_name, config = tiny.CONFIGS[name]
    values = {k: v for k, v in config.items() if k != "model_type"}
    built = transformers.AutoConfig.for_model(config["model_type"], **values)
    return getattr(transformers, class_name)(built)


@pytest.mark.parametrize("name", [*tiny.CONFIGS, "odd", *PLAIN])
def test_weights_are_those_of_an_ordinary_construction(name):
    build = {"odd": Odd}.get(name) or (
        PLAIN[name].model if name in PLAIN else lambda: hugging_face(name))
    deferred = Deferred.build(build, SEED)
    torch.manual_seed(SEED)
    plain = build()
    wanted = dict(plain.named_parameters())
    assert all(p.is_meta for p in deferred.model.parameters())
    assert [n for n, _ in deferred.model.named_parameters()] == list(wanted)
    got = dict(deferred.parameters(set(wanted)))
    assert got.keys() == wanted.keys()
    assert [n for n, value in got.items() if not torch.equal(value, wanted[n])] == []
    some = set(list(wanted)[1::2])  # another rank's share: the same numbers
    for key, value in deferred.parameters(some):
        assert torch.equal(value, wanted[key]), key
        some.remove(key)
    assert not some
    buffers = dict(deferred.model.named_buffers())
    assert buffers.keys() == dict(plain.named_buffers()).keys()
    for key, value in plain.named_buffers():
        assert torch.equal(buffers[key], value), key
    if name == "odd":
        assert torch.equal(deferred.model.mask, plain.mask)
        assert deferred.model.head.weight is deferred.model.table.weight


def test_only_what_is_asked_for_is_held():
    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(10))

    deferred = Deferred.build(Wide, SEED)
    alive: set[int] = set()
    for _, value in deferred.parameters({f"layers.{k}.weight" for k in range(10)}):
        alive.add(value.data_ptr())
        del value
    assert len(alive) < 10  # memory of earlier ones is used again


def test_a_model_that_looks_at_its_values_is_refused():
    class Looks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(3))
            self.scale = float(self.weight.sum())

    with pytest.raises(InvalidInput, match="cannot be built without its weights"):
        Deferred.build(Looks, SEED)
    with torch.device("meta"):
        model = nn.Linear(2, 2)
    with pytest.raises(InvalidInput, match="nothing says how its weights"):
        Deferred.of(model, SEED)


@pytest.mark.processes
def test_each_rank_makes_its_share_under_every_kind_of_layout(all_graphs):
    status, output = torchrun(4, "tests.executor.deferred_worker", str(all_graphs), limit_s=400)
    assert status == 0, output[-4000:]
