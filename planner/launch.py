"""How to start a layout: a Slurm script, and the torchrun command of each host.

What comes from the layout or the user is a number, a checked word, or quoted for the shell.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from planner.layout import Layout
from planner.topology import Topology
from profiler.documents import digest
from profiler.errors import InvalidInput

__all__ = ["Host", "Launch", "script"]

PORT = 29500
"""torchrun's own default."""

_JOB_NAME = re.compile(r"[\w.+-]{1,64}")
_PARTITION = re.compile(r"[\w.,+-]{1,256}")
_TIME = re.compile(r"\d+(-\d+)?(:\d+){0,2}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """One host of the job: which of the topology's (numbered from 0), and its processes."""

    number: int
    device: str
    num_processes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """What the script says beside the layout. train: further arguments of `executor train`.

    Raises:
        InvalidInput: a value that Slurm or the network could not take; all of them at once.
    """

    path: str
    train: tuple[str, ...] = ()
    job_name: str = "meshwright"
    partition: str | None = None
    time: str | None = None
    port: int = PORT

    def __post_init__(self) -> None:
        problems = []
        if not _JOB_NAME.fullmatch(self.job_name):
            problems.append(f"job name {self.job_name[:80]!r}: letters, digits and . _ + - only")
        if self.partition is not None and not _PARTITION.fullmatch(self.partition):
            problems.append(f"partition {self.partition[:80]!r}: names joined by commas")
        if self.time is not None and not _TIME.fullmatch(self.time):
            problems.append(f"time {self.time[:80]!r}: minutes, hours:minutes:seconds or "
                            f"days-hours:minutes:seconds")
        if not 1024 <= self.port <= 65535:
            problems.append(f"port {self.port}: 1024 to 65535")
        if problems:
            raise InvalidInput(problems)


def hosts_of(layout: Layout, topology: Topology) -> list[Host]:
    """The hosts that a layout uses, in the order of its ranks.

    Raises:
        InvalidInput: more devices than there are, another topology than the layout's, or a layout
            that another engine is to run.
    """
    problems = []
    if layout.topology.digest not in (None, digest(topology)):
        problems.append(f"topology {layout.topology.name!r} is not what it was when the layout was "
                        f"made: to launch on what it is now, give --topology")
    if layout.request.target != "executor":
        problems.append(f"the layout is planned for {layout.request.target!r}, which starts its "
                        f"runs itself: only layouts for 'executor' are launched")
    order = layout.mesh.host_groups or tuple(range(len(topology.hosts)))
    if sorted(order) != list(range(len(topology.hosts))):
        problems.append(f"host_groups {list(order)} is not an order of the "
                        f"{len(topology.hosts)} host groups of {topology.name}")
    if layout.mesh.num_devices > topology.num_devices:
        problems.append(f"the layout needs {layout.mesh.num_devices} devices, {topology.name} has "
                        f"{topology.num_devices}")
    if problems:
        raise InvalidInput(problems)
    first = [0]
    for group in topology.hosts:
        first.append(first[-1] + group.count)
    found, left = [], layout.mesh.num_devices
    for index in order:
        group = topology.hosts[index]
        for place in range(group.count):
            if left == 0:
                break
            used = min(left, group.devices_per_host)
            found.append(Host(number=first[index] + place, device=group.device.name,
                              num_processes=used))
            left -= used
    return found


def script(layout: Layout, topology: Topology, launch: Launch) -> str:
    """A script for sbatch; its last comment has the commands for hosts without Slurm.

    Raises:
        InvalidInput: see `hosts_of`.
    """
    hosts = hosts_of(layout, topology)
    backends = {group.device.name: group.device.backend for group in topology.hosts}
    on_cpu = all(backends[host.device] == "gloo" for host in hosts)
    train = _train(launch, on_cpu)
    counts = [str(host.num_processes) for host in hosts]
    alike = len(set(counts)) == 1
    inner = " ".join([
        "exec", _torchrun(len(hosts), '"$SLURM_NODEID"',
                          counts[0] if alike else "${PROCESSES[$SLURM_NODEID]}",
                          '"$MASTER_ADDR"', launch.port), train])
    if not alike:
        inner = f"PROCESSES=({' '.join(counts)}); {inner}"
    lines = [
        "#!/bin/bash", *_directives(hosts, launch, on_cpu), "",
        f"# {layout.mesh.num_devices} processes on {_described(hosts)}; ranks follow the order of "
        f"the hosts.",
        "set -euo pipefail",
        'NODES=$(scontrol show hostnames "$SLURM_JOB_NODELIST")',
        "export MASTER_ADDR=${NODES%%$'\\n'*}",
        "export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}", "",
        f"srun --kill-on-bad-exit=1 bash -c {shlex.quote(inner)}",
        "", *_by_hand(hosts, train, launch.port)]
    return "\n".join(lines) + "\n"


def _directives(hosts: Sequence[Host], launch: Launch, on_cpu: bool) -> list[str]:
    most = max(host.num_processes for host in hosts)
    lines = [f"#SBATCH --job-name={launch.job_name}", f"#SBATCH --nodes={len(hosts)}",
             "#SBATCH --ntasks-per-node=1", "#SBATCH --exclusive",
             f"#SBATCH --cpus-per-task={most}" if on_cpu else f"#SBATCH --gpus-per-node={most}"]
    if launch.partition is not None:
        lines.append(f"#SBATCH --partition={launch.partition}")
    if launch.time is not None:
        lines.append(f"#SBATCH --time={launch.time}")
    if len({host.device for host in hosts}) > 1:
        lines += ["# The hosts are of several kinds: name them, in this order, with --nodelist.",
                  f"#   {_described(hosts)}"]
    return lines


def _torchrun(num_hosts: int, number: str, processes: str, address: str, port: int) -> str:
    return (f"torchrun --nnodes={num_hosts} --node-rank={number} --nproc-per-node={processes} "
            f"--master-addr={address} --master-port={port} -m executor train")


def _train(launch: Launch, on_cpu: bool) -> str:
    device = ["--device", "cpu" if on_cpu else "cuda"] if "--device" not in launch.train else []
    return shlex.join([launch.path, *device, *launch.train])


def _described(hosts: Sequence[Host]) -> str:
    """2 hosts of 8 x h100-sxm-80g, 1 host of 4 x a100-80g."""
    parts = []
    for (processes, device), group in groupby(hosts, lambda h: (h.num_processes, h.device)):
        count = len(list(group))
        parts.append(f"{count} {'host' if count == 1 else 'hosts'} of {processes} x {device}")
    return ", ".join(parts)


def _by_hand(hosts: Sequence[Host], train: str, port: int) -> list[str]:
    """One command for each host, as comments; equal neighbours share theirs."""
    if len(hosts) == 1:
        return ["# Without Slurm:",
                f"#   torchrun --standalone --nproc-per-node={hosts[0].num_processes} "
                f"-m executor train {train}"]
    lines = ["# Without Slurm, on each host, with HOST0 the address of host 0:"]
    place = 0
    for processes, group in groupby(hosts, lambda host: host.num_processes):
        count = len(list(group))
        number = str(place) if count == 1 else "N"
        where = f"host {place}" if count == 1 else f"host N = {place} to {place + count - 1}"
        lines += [f"# {where}:",
                  f"#   {_torchrun(len(hosts), number, str(processes), 'HOST0', port)} {train}"]
        place += count
    return lines
