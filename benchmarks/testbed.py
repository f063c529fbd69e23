"""Several hosts on one machine: network namespaces joined by rate-limited links.

    bridge --- veth --- namespace of host 0    each direction of each link through a token bucket
           --- veth --- namespace of host 1    (`tc ... tbf`) at the link's rate
           ...

    with TestBed(hosts=(Host(), Host()), link_bits_per_s=1e9) as bed:
        bed.torchrun(["-m", "executor", "train", "layout.json"], timeout_s=300)

Every process is a device of a fixed speed: it may use its host's share of one core and no more
(CFS bandwidth control), whoever else is idle, so that a process that waits does not make another
faster, as it would not on a real cluster. Its memory can be capped: a process above it is killed.

Needs root, `ip` and `tc`; `TestBed` says what is missing. Names carry the id of the owner's
process: whatever a crash leaves behind is taken down by the next one.
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
PERIOD_US = 10_000
"""Of CFS bandwidth control: short beside a step, long beside a switch between processes."""

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
    """One host: its processes, and the share of a core that each of them gets."""

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
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        return f"{' and '.join(missing)} (of iproute2) not found"
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
        sweep()
        try:
            self._build()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self.close()

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

    # --- processes

    def stop(self) -> None:
        """End whatever still runs."""
        self._kill()
        for process in self._processes:
            process.wait()
        self._processes.clear()

    def torchrun(self, arguments: Sequence[str], *, timeout_s: float,
                 environment: Mapping[str, str] | None = None, cwd: Path | None = None) -> Result:
        """Run one torchrun job over all hosts and wait for it.

        arguments: of torchrun behind its own: a script, or -m and a module.
        """
        port = _free_port()
        commands = [[
            sys.executable, "-m", "torch.distributed.run", "--nnodes", str(len(self.hosts)),
            "--node-rank", str(index), "--nproc-per-node", str(host.num_processes),
            "--master-addr", self.address(0), "--master-port", str(port), *arguments]
            for index, host in enumerate(self.hosts)]
        return self.run(commands, timeout_s=timeout_s, environment=environment, cwd=cwd)

    def run(self, commands: Sequence[Sequence[str]], *, timeout_s: float,
            environment: Mapping[str, str] | None = None, cwd: Path | None = None) -> Result:
        """Run a command on each host at once; all are ended when one fails or time is up."""
        started = time.monotonic()
        values = dict(os.environ) | {"GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1",
                                     **(environment or {})}
        outputs = []
        try:
            for index, command in enumerate(commands):
                output = open(os.memfd_create(f"host{index}"), "w+")  # noqa: SIM115, PTH123
                outputs.append(output)
                self._processes.append(subprocess.Popen(
                    [*self._limited(index), "ip", "netns", "exec", self.namespace(index), *command],
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

    # --- shares of cores and memory

    def _limited(self, host: int) -> list[str]:
        """A command prefix that puts a host's processes under their limits.

        The share is of the host: its processes run alike, so each gets its part.
        """
        share = self.hosts[host].core_share * self.hosts[host].num_processes
        places = [self._cpu_group(host, share)]
        if self.memory_bytes is not None:
            places.append(self._memory_group(host))
        script = "".join(f"echo $$ > {place}/cgroup.procs; " for place in dict.fromkeys(places)
                         if place is not None)
        return ["sh", "-c", script + 'exec "$@"', "sh"]

    def _group(self, parent: Path, host: int) -> Path:
        place = parent / self.namespace(host)
        place.mkdir(exist_ok=True)
        if place not in self._groups:
            self._groups.append(place)
        return place

    def _cpu_group(self, host: int, share: float) -> Path:
        quota = max(1000, int(share * PERIOD_US))
        try:
            if (CGROUPS / "cpu").is_dir():
                place = self._group(CGROUPS / "cpu", host)
                (place / "cpu.cfs_period_us").write_text(str(PERIOD_US))
                (place / "cpu.cfs_quota_us").write_text(str(quota))
            else:
                place = self._group(CGROUPS, host)
                (place / "cpu.max").write_text(f"{quota} {PERIOD_US}")
        except OSError as error:
            raise Unavailable(f"no control over processor time: {error}") from None
        return place

    def _memory_group(self, host: int) -> Path:
        total = str((self.memory_bytes or 0) * self.hosts[host].num_processes)
        try:
            if (CGROUPS / "memory").is_dir():
                place = self._group(CGROUPS / "memory", host)
                (place / "memory.limit_in_bytes").write_text(total)
            else:
                place = self._group(CGROUPS, host)
                (place / "memory.max").write_text(total)
        except OSError as error:
            raise Unavailable(f"no control over memory: {error}") from None
        return place


def _free_port() -> int:
    """A port that is free here, as it is in a namespace where nothing else listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _names(*command: str) -> list[str]:
    """The first word of each line that `ip` lists, without the peer behind an @."""
    listed = subprocess.run(["ip", *command], capture_output=True, text=True, check=False)
    return [line.split()[0].split("@")[0] for line in listed.stdout.splitlines() if line.strip()]


def _take_down(name: str) -> None:
    """Remove the links, namespaces and groups of an owner, whatever there is of them."""
    for link in _names("-brief", "link"):
        if link.startswith(f"{name}."):
            subprocess.run(["ip", "link", "delete", link], capture_output=True, check=False)
    for space in _names("netns", "list"):
        if space.startswith(f"{name}-"):
            subprocess.run(["ip", "netns", "delete", space], capture_output=True, check=False)
    subprocess.run(["ip", "link", "delete", name], capture_output=True, check=False)
    for parent in (CGROUPS, CGROUPS / "cpu", CGROUPS / "memory"):
        for place in parent.glob(f"{name}-*"):
            with contextlib.suppress(OSError):
                place.rmdir()


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
