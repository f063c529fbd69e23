"""The scenarios of the contest: a model, hosts, links and a batch, as data in `scenarios.json`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, ClassVar

from annotated_types import Ge, Gt, Le, Len
from pydantic import ConfigDict

from planner.topology import HostGroup, Link, Topology
from planner.topology_files import resolve
from profiler.documents import STRICT, parse, read_data
from profiler.errors import InvalidInput

__all__ = ["MODELS", "Processes", "Scenario", "device_name", "find", "load_scenarios",
           "topology_of"]

MODELS = ("gpt", "deep_narrow", "wide_embedding", "llama", "encoder_decoder", "convnet",
          "frozen_trunk", "mlp")
"""Functions of `models.py`; said here so that a scenario can be read without torch."""

LENGTH = 64
"""Tokens per sample of the models of tokens."""

TOKENS = frozenset({"gpt", "deep_narrow", "wide_embedding", "llama", "encoder_decoder"})
AMPLE_BYTES = 4 * 2**30
"""Of a process where the scenario sets no cap."""

Text = Annotated[str, Len(1, 200)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Processes:
    """The processes of one host, each with its share of a core."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    count: Annotated[int, Ge(1), Le(16)]
    core_share: Annotated[float, Gt(0), Le(1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One scenario. memory_mib: of each process, beyond what it holds before it has a model."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    name: Text
    why: Text
    model: Text
    hosts: Annotated[tuple[Processes, ...], Len(1, 4)]
    link_gbit_per_s: Annotated[float, Ge(0.01), Le(100)]
    global_batch: Annotated[int, Ge(1), Le(2**20)]
    memory_mib: Annotated[int, Ge(1)] | None = None

    def __post_init__(self) -> None:
        if self.model not in MODELS:
            raise ValueError(f"model {self.model!r}: there are {', '.join(MODELS)}")

    @property
    def num_processes(self) -> int:
        return sum(host.count for host in self.hosts)

    @property
    def seq_len(self) -> int:
        return LENGTH if self.model in TOKENS else 1

    @property
    def slug(self) -> str:
        """Its name as that of a folder."""
        return "".join(c if c.isalnum() else "-" for c in self.name)

    @property
    def is_uniform(self) -> bool:
        return len({(host.count, host.core_share) for host in self.hosts}) == 1

    def micro_batches(self) -> list[int]:
        """Sizes to profile: one sample, and half of the batch; the planner interpolates."""
        return sorted({1, max(1, self.global_batch // 2)})

    def degrees(self) -> list[int]:
        """Tensor-parallel degrees to profile."""
        if self.model not in TOKENS:
            return [1]
        return [d for d in range(1, self.num_processes + 1)
                if self.num_processes % d == 0 and self.seq_len % d == 0]


def load_scenarios(path: Path | None = None) -> list[Scenario]:
    """The scenarios of a file, by default those of the module.

    Raises:
        InvalidInput: not a list of scenarios, or two of one name.
    """
    path = path or Path(__file__).with_name("scenarios.json")
    rows = read_data(path)
    if not isinstance(rows, list) or not rows:
        raise InvalidInput(f"{path}: a list of scenarios is needed")
    found = [parse(Scenario, row, f"{path}: scenario {i}") for i, row in enumerate(rows)]
    names = [scenario.slug for scenario in found]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise InvalidInput(f"{path}: these names occur twice: {', '.join(twice)}")
    return found


def find(scenarios: list[Scenario], names: list[str]) -> list[Scenario]:
    """The scenarios whose names contain one of the words; all of them without any."""
    if not names:
        return scenarios
    wrong = [name for name in names if not any(name.lower() in s.name.lower() for s in scenarios)]
    if wrong:
        raise InvalidInput([f"scenario {name!r}: there are "
                            f"{'; '.join(s.name for s in scenarios)}" for name in wrong])
    return [s for s in scenarios if any(name.lower() in s.name.lower() for name in names)]


def device_name(scenario: Scenario, index: int) -> str:
    """Of the devices of a host: hosts of one share of a core are of one kind."""
    return "cpu" if scenario.is_uniform else f"cpu-{scenario.hosts[index].core_share:g}"


def topology_of(scenario: Scenario) -> Topology:
    """What a scenario says of its cluster; measured links are laid over it later."""
    base = resolve("cpu-host").hosts[0]
    rate = scenario.link_gbit_per_s * 1e9 / 8
    card = Link(bandwidth_bytes_per_s=rate, latency_s=3e-4, efficiency=0.95,
                source="given: the rate of the token bucket; efficiency of TCP with jumbo frames")
    cap = AMPLE_BYTES if scenario.memory_mib is None else scenario.memory_mib * 2**20
    groups: list[HostGroup] = []
    for index, host in enumerate(scenario.hosts):
        core = base.device
        device = replace(
            core, name=device_name(scenario, index), memory_bytes=cap, context_bytes=0,
            description=f"{host.core_share:g} of a core",
            memory_bandwidth_bytes_per_s=core.memory_bandwidth_bytes_per_s * host.core_share,
            peak_flops_per_s={dtype: peak * host.core_share
                              for dtype, peak in core.peak_flops_per_s.items()},
            sources=core.sources | {"context_bytes": "not counted: the cap is beyond it",
                                    "memory_bytes": "given: the scenario's cap"})
        group = replace(base, count=1, devices_per_host=host.count, device=device,
                        network_card=card, cards_per_host=1)
        if groups and replace(groups[-1], count=1) == group:
            groups[-1] = replace(groups[-1], count=groups[-1].count + 1)
        else:
            groups.append(group)
    return Topology(name=scenario.name, hosts=tuple(groups))
