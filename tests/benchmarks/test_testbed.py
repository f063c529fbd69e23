"""The test bed is whole while it is used and gone afterwards, whatever happens inside.

Where a machine cannot be one (no root, no iproute2), what is tested is that it says so.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks import testbed
from benchmarks.testbed import Host, TestBed, Unavailable


def _why_not() -> str | None:
    try:
        with TestBed(hosts=(Host(),), memory_bytes=2**30) as bed:
            bed.run([["true"]], timeout_s=30)
    except Unavailable as reason:
        return str(reason)
    return None


WHY_NOT = _why_not()


def left_behind(name: str) -> list[str]:
    spaces = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True)
    links = subprocess.run(["ip", "-brief", "link"], capture_output=True, text=True, check=True)
    groups = [str(place) for parent in (Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/cpu"))
              for place in parent.glob(f"{name}*")]
    return re.findall(rf"{name}\S*", spaces.stdout + links.stdout) + groups


def test_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(testbed.os, "geteuid", lambda: 1000)
    with pytest.raises(Unavailable, match="needs root"):
        TestBed(hosts=(Host(),)).__enter__()
    monkeypatch.setattr(testbed.os, "geteuid", lambda: 0)
    monkeypatch.setattr(testbed.shutil, "which", lambda tool: None)
    with pytest.raises(Unavailable, match="ip and tc"):
        TestBed(hosts=(Host(),)).__enter__()


if WHY_NOT is not None:

    def test_refuses_politely() -> None:
        assert WHY_NOT, "a refusal has a reason"

else:

    def test_hosts_reach_each_other_and_are_limited() -> None:
        hosts = (Host(core_share=0.5), Host(num_processes=2, core_share=0.25))
        with TestBed(hosts=hosts, link_bits_per_s=2e8) as bed:
            name = bed.name
            result = bed.run(
                [["sh", "-c", "tc qdisc show dev eth0; cat /proc/self/cgroup"],
                 ["sh", "-c", "ip -brief address show eth0"]], timeout_s=30)
            assert result.ok, result
            assert "tbf" in result.outputs[0] and "200Mbit" in result.outputs[0]
            assert f"/{name}-0" in result.outputs[0]
            assert "10.77.0.2/24" in result.outputs[1]
            shares = [int((group / name).read_text()) / whole for group in bed._groups
                      for name, whole in testbed.CORE.items() if (group / name).exists()]
            assert shares[:2] == [0.5, 0.5]
            assert left_behind(name)
        assert not left_behind(name)

    def test_a_host_that_fails_or_hangs_ends_all() -> None:
        with TestBed(hosts=(Host(), Host())) as bed:
            failed = bed.run([["sh", "-c", "echo no >&2; exit 3"], ["true"]], timeout_s=30)
            assert failed.returncodes[0] == 3 and not failed.ok and "no" in failed.outputs[0]
            hung = bed.run([["sleep", "600"], ["true"]], timeout_s=1)
            assert hung.timed_out and not hung.ok

    def test_memory_above_the_cap_is_killed() -> None:
        greedy = [sys.executable, "-c", "x = bytearray(200 * 2**20); print(len(x))"]
        with TestBed(hosts=(Host(),), memory_bytes=50 * 2**20) as bed:
            assert not bed.run([greedy], timeout_s=60).ok
        for host in (Host(), Host(core_share=0.5)):  # what uses up the rest of a core has no cap
            with TestBed(hosts=(host,), memory_bytes=400 * 2**20) as bed:
                assert bed.run([greedy], timeout_s=60).ok

    def test_an_error_inside_takes_everything_down() -> None:
        with pytest.raises(RuntimeError), TestBed(hosts=(Host(),)) as bed:
            raise RuntimeError
        assert not left_behind(bed.name)

    def test_a_crash_leaves_nothing() -> None:
        crash = ("import os; from benchmarks.testbed import *\n"
                 "bed = TestBed(hosts=(Host(),)); bed.__enter__(); print(bed.name, flush=True)\n"
                 "janitor = bed._janitor.pid if {spared} else os.kill(bed._janitor.pid, 9)\n"
                 "os._exit(9)")
        for spared in (True, False):  # the janitor; without it, the next test bed
            done = subprocess.run(
                [sys.executable, "-c", crash.format(spared=spared)], capture_output=True,
                text=True, check=False, cwd=Path(__file__).parents[2], env=dict(os.environ))
            name = done.stdout.strip()
            assert done.returncode == 9 and name.startswith(testbed.PREFIX)
            if not spared:
                assert left_behind(name) and name in testbed.sweep()
            for _ in range(200):
                if not left_behind(name):
                    break
                time.sleep(0.05)
            assert not left_behind(name)

    def test_every_process_of_torchrun_is_limited_alone() -> None:
        hosts = (Host(core_share=0.5), Host(num_processes=2, core_share=0.25))
        script = ("import os; print('GROUP', [x for x in open('/proc/self/cgroup') "
                  "if 'mwbed' in x], os.environ['RANK'], 'cores', *os.sched_getaffinity(0))")
        with TestBed(hosts=hosts) as bed:
            result = bed.torchrun(["-c", script], timeout_s=120)
            assert result.ok, result.outputs
            said = "".join(result.outputs)
            assert all(f"/{bed.name}-{suffix}" in said for suffix in ("0.0", "1.0", "1.1"))
            cores = sorted(os.sched_getaffinity(0))[:2]
            # the largest share first, each where most is left
            assert [re.search(rf"{bed.name}-{suffix}.*cores (.*)", said).group(1)
                    for suffix in ("0.0", "1.0", "1.1")] == [str(cores[i]) for i in (
                        (0, 1, 1) if len(cores) > 1 else (0, 0, 0))]

    def test_more_than_the_cores_can_give_is_refused() -> None:
        with pytest.raises(Unavailable, match=r"need .* cores"):
            TestBed(hosts=(Host(num_processes=1 + len(os.sched_getaffinity(0))),)).__enter__()
