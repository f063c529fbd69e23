"""Several hosts on one machine: network namespaces joined by rate-limited links.

    bridge --- veth --- namespace of host 0    each direction of each link through a token bucket
           --- veth --- namespace of host 1    (`tc ... tbf`) at the link's rate
           ...

    with TestBed(hosts=(Host(), Host()), link_bits_per_s=1e9) as bed:
        bed.torchrun(["-m", "executor", "train", "layout.json"], timeout_s=300)

Every process that torchrun starts is a device of a fixed speed: it is pinned to a core, and its
control group has its share of that core while the others on it are busy. That they are, also while
they wait, is what a `benchmarks.companion.Companion` in each of them is for; what no process has of
a core is used up. (A quota would stop a process that has used it for the rest of its period, with
the threads that serve its peers.) Its memory can be capped: a process above it is killed.

Needs root, `ip`, `tc`, `nsenter` and `taskset`; `TestBed` says what is missing. Names carry the id
of their owner. A janitor waits for that process to end, however it ends, and takes down what it
left; what both leave, the next test bed takes down.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

__all__ = ["Host", "Result", "TestBed", "Unavailable", "why_unavailable"]

PREFIX = "mwbed"
CGROUPS = Path("/sys/fs/cgroup")
CORE = {"cpu.shares": 2**13, "cpu.weight": 800}
"""The weight of a whole core in control groups of version 1 and 2. Other tasks of the machine have
1024 and 100: enough for torchrun's agents to start beside a core that is used up."""
LEAST_REST = 0.02
"""Of a core, to be used up."""

BURST_S = 0.001
"""Seconds of the rate that a token bucket lets through at once."""

MTU = "9000"
"""Jumbo frames, as clusters use: headers then take less than 1 % of a link."""

LEAST_BURST_BYTES = 2**17
"""More than one segment (64 KiB) that the kernel hands to the link whole."""


class Unavailable(Exception):
    """This machine cannot be a test bed; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """One host: its processes, and the share (at most 1) of a core that each of them gets."""

    num_processes: int = 1
    core_share: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """How the processes of a command ended, host by host."""

    returncodes: tuple[int, ...]
    outputs: tuple[str, ...]
    timed_out: bool
    wall_s: float

    @property
    def ok(self) -> bool:
        return not self.timed_out and not any(self.returncodes)


def why_unavailable() -> str | None:
    """What this machine lacks, or None."""
    if sys.platform != "linux":
        return f"network namespaces are of Linux; this is {sys.platform}"
    if os.geteuid() != 0:
        return "making network namespaces needs root"
    missing = [tool for tool in ("ip", "tc", "nsenter", "taskset") if shutil.which(tool) is None]
    if missing:
        return f"{' and '.join(missing)} (of iproute2 and util-linux) not found"
    return None


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Unavailable(f"{' '.join(command)}: {done.stderr.strip() or done.returncode}")


def _alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


@dataclass(slots=True)
class TestBed:
    """Hosts joined by links of one rate; a context manager that takes everything down again.

    link_bits_per_s: of every host's link, each direction. memory_bytes: cap of each process.
    Raises (on entering):
        Unavailable: no root, no tools, or a kernel without what is needed.
    """

    __test__ = False  # not a test class, whatever its name

    hosts: tuple[Host, ...]
    link_bits_per_s: float = 1e9
    memory_bytes: int | None = None
    _processes: list[subprocess.Popen[str]] = field(default_factory=list)
    _groups: list[Path] = field(default_factory=list)
    _cores: list[list[int]] = field(default_factory=list)
    _rest: dict[int, float] = field(default_factory=dict)
    _fillers: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    _janitor: subprocess.Popen[bytes] | None = None

    @property
    def name(self) -> str:
        return f"{PREFIX}{os.getpid()}"

    def namespace(self, host: int) -> str:
        return f"{self.name}-{host}"

    def address(self, host: int) -> str:
        return f"10.77.0.{host + 1}"

    # --- up and down

    def __enter__(self) -> TestBed:
        problem = why_unavailable()
        if problem is not None:
            raise Unavailable(problem)
        self._deal_cores()
        sweep()
        self._janitor = subprocess.Popen(  # its standard input ends when this process does
            [sys.executable, __file__, self.name], stdin=subprocess.PIPE, start_new_session=True)
        try:
            self._build()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self.close()

    def _deal_cores(self) -> None:
        """A core for every process, the largest shares first, each where most is left."""
        left = dict.fromkeys(sorted(os.sched_getaffinity(0)), 1.0)
        self._cores = [[0] * host.num_processes for host in self.hosts]
        places = [(i, r) for i, host in enumerate(self.hosts) for r in range(host.num_processes)]
        for i, r in sorted(places, key=lambda place: -self.hosts[place[0]].core_share):
            core = max(left, key=lambda c: left[c])
            left[core] -= self.hosts[i].core_share
            self._cores[i][r] = core
            if left[core] < -1e-6:
                shares = sum(h.num_processes * h.core_share for h in self.hosts)
                raise Unavailable(f"the processes need {shares:g} cores in shares of at most 1; "
                                  f"{len(left)} are there")
        self._rest = left

    def _build(self) -> None:
        bridge = self.name
        _run("ip", "link", "add", bridge, "type", "bridge")
        _run("ip", "link", "set", bridge, "mtu", MTU, "up")
        for index in range(len(self.hosts)):
            space, outside = self.namespace(index), f"{bridge}.{index}"
            _run("ip", "netns", "add", space)
            _run("ip", "link", "add", outside, "type", "veth", "peer", "name", "eth0", "netns",
                 space)
            _run("ip", "link", "set", outside, "master", bridge, "mtu", MTU, "up")
            inside = ("ip", "netns", "exec", space)
            _run(*inside, "ip", "address", "add", f"{self.address(index)}/24", "dev", "eth0")
            _run(*inside, "ip", "link", "set", "eth0", "mtu", MTU, "up")
            _run(*inside, "ip", "link", "set", "lo", "up")
            _run("tc", *self._bucket(outside))
            _run(*inside, "tc", *self._bucket("eth0"))

    def _bucket(self, device: str) -> list[str]:
        burst = max(LEAST_BURST_BYTES, int(self.link_bits_per_s / 8 * BURST_S))
        return ["qdisc", "replace", "dev", device, "root", "tbf",
                "rate", f"{int(self.link_bits_per_s)}bit", "burst", str(burst),
                "latency", "100ms"]

    def close(self) -> None:
        """End the processes and take the network down; safe to call twice."""
        self.stop()
        for group in self._groups:
            with contextlib.suppress(OSError):
                group.rmdir()
        self._groups.clear()
        _take_down(self.name)
        if self._janitor is not None:
            self._janitor.kill()
            self._janitor.wait()
            self._janitor = None

    # --- processes

    def stop(self) -> None:
        """End whatever still runs."""
        self._fillers.close()
        self._kill()
        for process in self._processes:
            process.wait()
        self._processes.clear()

    def torchrun(self, arguments: Sequence[str], *, timeout_s: float,
                 environment: Mapping[str, str] | None = None, cwd: Path | None = None) -> Result:
        """Run one torchrun job over all hosts and wait for it.

        arguments: of Python, for every process: a script, or -m and a module. The limits are of
        each process; the agents that start them have none.
        """
        port = str(_free_port())
        commands = [[*self._launcher(index, ["--nnodes", str(len(self.hosts)), "--node-rank",
                                             str(index), "--master-addr", self.address(0),
                                             "--master-port", port]), *arguments]
                    for index in range(len(self.hosts))]
        return self._run(commands, timeout_s, environment, cwd)

    def _launcher(self, index: int, places: list[str]) -> list[str]:
        """torchrun of one host, up to the arguments of Python."""
        host = self.hosts[index]
        for rank in range(host.num_processes):
            self._limit(f"{index}.{rank}", host.core_share, self.memory_bytes)
        join = _joining(self._group_paths(f"{index}.$LOCAL_RANK"))
        cores = " ".join(f"{rank}) core={core};;" for rank, core in enumerate(self._cores[index]))
        pin = f"case $LOCAL_RANK in {cores} esac; "  # no $$: torchrun substitutes in arguments
        return [sys.executable, "-m", "torch.distributed.run", *places, "--nproc-per-node",
                str(host.num_processes), "--no-python", "sh", "-c",
                join + pin + 'exec taskset -c $core "$@"', "sh", sys.executable]

    def run(self, commands: Sequence[Sequence[str]], *, timeout_s: float,
            environment: Mapping[str, str] | None = None, cwd: Path | None = None) -> Result:
        """Run a command on each host at once; all are ended when one fails or time is up.

        The processes of a host share its limits.
        """
        limited = [[*self._limited(index), *command] for index, command in enumerate(commands)]
        return self._run(limited, timeout_s, environment, cwd)

    def _run(self, commands: Sequence[Sequence[str]], timeout_s: float,
             environment: Mapping[str, str] | None, cwd: Path | None) -> Result:
        started = time.monotonic()
        values = dict(os.environ) | {"GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1",
                                     **(environment or {})}
        outputs = []
        try:
            self._use_up_rest()
            for index, command in enumerate(commands):
                output = open(os.memfd_create(f"host{index}"), "w+")  # noqa: SIM115, PTH123
                outputs.append(output)
                self._processes.append(subprocess.Popen(
                    ["nsenter", f"--net=/run/netns/{self.namespace(index)}", *command],
                    env=values, cwd=cwd, stdout=output, stderr=subprocess.STDOUT, text=True,
                    start_new_session=True))
            codes, timed_out = self._wait(started + timeout_s)
            texts = []
            for output in outputs:
                output.seek(0)
                texts.append(output.read())
        finally:
            self.stop()
            for output in outputs:
                output.close()
        return Result(returncodes=codes, outputs=tuple(texts), timed_out=timed_out,
                      wall_s=time.monotonic() - started)

    def _wait(self, deadline: float) -> tuple[tuple[int, ...], bool]:
        grace = None
        while True:
            codes = [process.poll() for process in self._processes]
            if all(code is not None for code in codes):
                return tuple(code or 0 for code in codes), False
            now = time.monotonic()
            if grace is None and any(codes):  # one host failed: the others have a moment to notice
                grace = now + 10
            if now > deadline or (grace is not None and now > grace):
                self._kill()
                codes = [process.wait() for process in self._processes]
                return tuple(code or 0 for code in codes), grace is None
            time.sleep(0.05)

    def _kill(self) -> None:
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        _end_members(self._groups)  # torchrun starts its processes in sessions of their own

    # --- shares of cores and memory

    def _limited(self, host: int) -> list[str]:
        """A command prefix that puts a host's processes under their limits together."""
        count = self.hosts[host].num_processes
        total = None if self.memory_bytes is None else self.memory_bytes * count
        self._limit(str(host), self.hosts[host].core_share * count, total)
        join = _joining(self._group_paths(str(host)))
        cores = ",".join(map(str, sorted(set(self._cores[host]))))
        return ["taskset", "-c", cores, "sh", "-c", join + 'exec "$@"', "sh"]

    def _use_up_rest(self) -> None:
        """Keep busy, at its share, what no process has of a core, and take turns on it; ends with
        the processes."""
        # the janitor runs this file as a script
        from benchmarks.companion import Companion, Ticker

        for core, share in self._rest.items():
            if share < 1:  # in none of the control groups, which have no real-time policy
                self._fillers.enter_context(Ticker(["taskset", "-c", str(core)]))
            if LEAST_REST < share < 1:
                name = f"rest{core}"
                self._limit(name, share, None)
                join = _joining(self._group_paths(name)[:1])  # it has no memory cap
                self._fillers.enter_context(Companion(
                    ["taskset", "-c", str(core), "sh", "-c", join + 'exec "$@"', "sh"]))

    def _group_paths(self, suffix: str) -> list[Path]:
        """Of the control groups of a host or process, without those that are not needed."""
        kinds = ["cpu"] + ([] if self.memory_bytes is None else ["memory"])
        parents = [CGROUPS / kind if (CGROUPS / kind).is_dir() else CGROUPS for kind in kinds]
        return [parent / f"{self.name}-{suffix}" for parent in dict.fromkeys(parents)]

    def _limit(self, suffix: str, share: float, memory_bytes: int | None) -> None:
        """Make the control groups of a host or a process."""
        try:
            for group in self._group_paths(suffix):
                group.mkdir(exist_ok=True)
                if group not in self._groups:
                    self._groups.append(group)
                if group.parent == CGROUPS:
                    _set_share(group / "cpu.weight", share)
                    if memory_bytes is not None:
                        (group / "memory.max").write_text(str(memory_bytes))
                elif group.parent.name == "cpu":
                    _set_share(group / "cpu.shares", share)
                elif memory_bytes is not None:
                    (group / "memory.limit_in_bytes").write_text(str(memory_bytes))
        except OSError as error:
            raise Unavailable(f"no control over processor time or memory: {error}") from None


def _joining(groups: Sequence[Path]) -> str:
    """Shell commands that put the shell into control groups."""
    return "".join(f"echo 0 > {group}/cgroup.procs; " for group in groups)


def _set_share(file: Path, share: float) -> None:
    file.write_text(str(max(2, round(share * CORE[file.name]))))


def _free_port() -> int:
    """A port that is free here, as it is in a namespace where nothing else listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _names(*command: str) -> list[str]:
    """The first word of each line that `ip` lists, without the peer behind an @."""
    listed = subprocess.run(["ip", *command], capture_output=True, text=True, check=False)
    return [line.split()[0].split("@")[0] for line in listed.stdout.splitlines() if line.strip()]


def _end_members(groups: Sequence[Path]) -> None:
    """Kill every process of some control groups, and wait until they are gone."""
    for _ in range(50):
        members = []
        for group in groups:
            with contextlib.suppress(OSError):
                members += (group / "cgroup.procs").read_text().split()
        for member in members:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(member), signal.SIGKILL)
        if not members:
            return
        time.sleep(0.02)


def _take_down(name: str) -> None:
    """Remove the processes, links, namespaces and groups of an owner, whatever there is."""
    groups = [group for parent in (CGROUPS, CGROUPS / "cpu", CGROUPS / "memory")
              for group in parent.glob(f"{name}-*")]
    _end_members(groups)
    for link in _names("-brief", "link"):
        if link.startswith(f"{name}."):
            subprocess.run(["ip", "link", "delete", link], capture_output=True, check=False)
    for space in _names("netns", "list"):
        if space.startswith(f"{name}-"):
            subprocess.run(["ip", "netns", "delete", space], capture_output=True, check=False)
    subprocess.run(["ip", "link", "delete", name], capture_output=True, check=False)
    for group in groups:
        with contextlib.suppress(OSError):
            group.rmdir()


def sweep() -> list[str]:
    """Take down what owners that are gone have left; their names."""
    words = [*_names("-brief", "link"), *_names("netns", "list")]
    owners = {word.removeprefix(PREFIX).replace("-", ".").split(".")[0]
              for word in words if word.startswith(PREFIX)}
    gone = [f"{PREFIX}{owner}" for owner in sorted(owners)
            if owner.isdecimal() and not _alive(int(owner))]
    for name in gone:
        _take_down(name)
    return gone


if __name__ == "__main__":  # the janitor
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.stdin.buffer.read()
    _take_down(sys.argv[1])
