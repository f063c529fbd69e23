"""The device mesh of a layout: which rank stands where, and the process groups along each axis."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from planner.layout import Axis, Layout
from planner.layout import Mesh as MeshSpec
from profiler.errors import InvalidInput

__all__ = ["AXIS_NAMES", "ParallelMesh", "build_mesh", "coordinates", "memory_bytes", "rank_at"]

AXIS_NAMES: tuple[Axis, ...] = ("pp", "dp_replicate", "dp_shard", "tp")
"""Dims of the DeviceMesh, whatever the order in which ranks are laid over them."""


def coordinates(spec: MeshSpec, rank: int) -> dict[Axis, int]:
    """The coordinate of a rank along each axis: ranks are row-major over `spec.order`."""
    return {axis: rank // spec.stride(axis) % spec.degree(axis)
            for axis in AXIS_NAMES}


def rank_at(spec: MeshSpec, **place: int) -> int:
    """The rank at the given coordinates; the inverse of `coordinates`."""
    return sum(place[axis] * spec.stride(axis) for axis in AXIS_NAMES)


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelMesh:
    """This rank's place in the mesh."""

    spec: MeshSpec
    mesh: DeviceMesh
    rank: int
    device: torch.device

    def coordinate(self, axis: Axis) -> int:
        return coordinates(self.spec, self.rank)[axis]

    @property
    def dp_rank(self) -> int:
        """Which share of the samples is this rank's."""
        return self.coordinate("dp_replicate") * self.spec.dp_shard + self.coordinate("dp_shard")

    @property
    def tp_mesh(self) -> DeviceMesh:
        return self.mesh["tp"]

    def group(self, axis: str) -> dist.ProcessGroup:
        return self.mesh.get_group(axis)

    def data_parallel_mesh(self, needs_compute_copy: bool) -> DeviceMesh | None:
        """The mesh that `fully_shard` or `replicate` works on; None if there is nothing to do."""
        if self.spec.dp_shard > 1:
            return (self.mesh["dp_replicate", "dp_shard"] if self.spec.dp_replicate > 1
                    else self.mesh["dp_shard"])
        if self.spec.dp_replicate > 1:
            return self.mesh["dp_replicate"]
        return self.mesh["dp_shard"] if needs_compute_copy else None

    def all_reduce_dp(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum over the ranks that work on other samples of the same batch, in place."""
        axes: tuple[Axis, ...] = ("dp_shard", "dp_replicate")
        for axis in axes:
            if self.spec.degree(axis) > 1:
                dist.all_reduce(tensor, group=self.group(axis))
        return tensor

    def all_reduce_pp(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum over the pipeline ranks, in place."""
        if self.spec.pp > 1:
            dist.all_reduce(tensor, group=self.group("pp"))
        return tensor


def build_mesh(layout: Layout, device_type: str | None = None) -> ParallelMesh:
    """The mesh of a layout over the running process group (a world of one starts its own).

    Raises:
        InvalidInput: no process group and more than one device asked for; world size other than the
            layout's; CUDA asked for and missing; a device with less memory than the layout was
        predicted to need (said on every rank, not only where it is short).
    """
    spec = layout.mesh
    world = dist.get_world_size() if dist.is_initialized() else 1
    if world != spec.num_devices:
        factors = " x ".join(f"{axis} {spec.degree(axis)}" for axis in AXIS_NAMES)
        raise InvalidInput(
            f"the layout needs {spec.num_devices} processes ({factors}), {world} are running: "
            f"start them with torchrun --nproc-per-node (x --nnodes) = {spec.num_devices}")
    if device_type is None:
        device_type = "cuda" if torch.cuda.is_available() else "cpu"
    if device_type == "cuda" and not torch.cuda.is_available():
        raise InvalidInput("device cuda was asked for, and this torch sees no CUDA device")
    if not dist.is_initialized():
        _start_alone(device_type)
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    device = torch.device("cuda", local_rank) if device_type == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        if local_rank >= torch.cuda.device_count():
            raise InvalidInput(f"local rank {local_rank} has no device: this host has "
                               f"{torch.cuda.device_count()} CUDA devices")
        torch.cuda.set_device(device)
    # pp outside of the data axes outside of tp in the mesh's dims; ranks as `order` lays them
    order = [axis for axis in spec.order if axis in AXIS_NAMES]
    order += [axis for axis in AXIS_NAMES if axis not in order]
    shape = [spec.degree(axis) for axis in order]
    ranks = torch.arange(spec.num_devices, dtype=torch.int).view(shape)
    ranks = ranks.permute([order.index(axis) for axis in AXIS_NAMES])
    _agree(_memory_problem(layout, device))
    mesh = DeviceMesh(device_type, ranks, mesh_dim_names=AXIS_NAMES)
    return ParallelMesh(spec=spec, mesh=mesh, rank=dist.get_rank(), device=device)


def memory_bytes(device: torch.device) -> int:
    """Memory of a device; of a CPU process, its share of the host's."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    host = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return int(host) // int(os.environ.get("LOCAL_WORLD_SIZE", 1))


def _memory_problem(layout: Layout, device: torch.device) -> str:
    """Why this rank's share cannot be held; empty if it can, or if nothing was predicted."""
    if layout.prediction is None:
        return ""
    rank = dist.get_rank()
    place = coordinates(layout.mesh, rank)["pp"]
    needed = max(stage.total_memory_bytes for stage in layout.prediction.stages
                 if stage.pipeline_rank == place)
    there = memory_bytes(device)
    if needed <= there:
        return ""
    return (f"pipeline rank {place} is predicted to need {needed / 2**30:.2f} GiB, and rank {rank} "
            f"has {there / 2**30:.2f} GiB ({device}): plan again for these devices "
            "(plan check says which terms are largest)")


def _agree(problem: str) -> None:
    """Raise on every rank what any of them has to say."""
    said: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(said, problem)
    if problems := list(dict.fromkeys(text for text in said if text)):
        raise InvalidInput(problems[:4])


def _start_alone(device_type: str) -> None:
    store: Any = dist.HashStore()
    dist.init_process_group("nccl" if device_type == "cuda" else "gloo", store=store, rank=0,
                            world_size=1)
