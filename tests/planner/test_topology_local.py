"""The topology of this machine."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from planner import topology_local
from planner.topology_files import resolve
from planner.topology_local import cuda_group
from profiler.device import CUDA_NAMES, device_names
from profiler.errors import InvalidInput


@pytest.fixture(autouse=True)
def no_cuda(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(topology_local, "_cuda_group", lambda count: None)
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:       8388608 kB\nMemFree: 5 kB\n")
    monkeypatch.setattr(topology_local, "MEMINFO", meminfo)


def test_a_process_for_each_core() -> None:
    topology = resolve("local")
    assert topology.name == "local"
    assert topology.num_devices == len(os.sched_getaffinity(0))
    assert topology.hosts[0].device.backend == "gloo"


def test_processes_share_memory_and_cores() -> None:
    two, four = (resolve(f"local:{count}").hosts[0].device for count in (2, 4))
    assert two.memory_bytes == 2**33 // 2
    assert four.memory_bytes == 2**33 // 4
    assert two.sources["memory_bytes"].startswith("measured")
    assert two.peak("float32") == pytest.approx(2 * four.peak("float32"))
    assert two.memory_bandwidth_bytes_per_s == pytest.approx(2 * four.memory_bandwidth_bytes_per_s)


def test_what_was_not_measured_says_so() -> None:
    group = resolve("local:2").hosts[0]
    guesses = {field for field, text in group.device.sources.items() if "not measured" in text}
    assert guesses == set(group.device.sources) - {"memory_bytes"}
    assert group.device_link.source.startswith("not measured")


def test_no_proc(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(topology_local, "MEMINFO", tmp_path / "missing")
    device = resolve("local:1").hosts[0].device
    assert device.memory_bytes == resolve("cpu-host").hosts[0].device.memory_bytes
    assert device.sources["memory_bytes"].startswith("not measured")


@pytest.mark.parametrize(("name", "device", "preset"), [
    ("NVIDIA H100 80GB HBM3", "h100-sxm-80g", "dgx-h100"),
    ("NVIDIA H100 PCIe", "h100-pcie-80g", "rtx4090x8"),
    ("NVIDIA A100-SXM4-80GB", "a100-80g", "dgx-a100-80g"),
    ("NVIDIA GB200", "gb200", "gb200-nvl72"), ("NVIDIA B200", "b200", "dgx-b200"),
    ("Tesla V100-SXM2-32GB", "v100-32g", "dgx1-v100"), ("NVIDIA L4", "l4", "l4x8"),
    ("NVIDIA A10", "a10", "rtx4090x8"), ("NVIDIA A10G", "a10g", "rtx4090x8"),
    ("NVIDIA GeForce RTX 4090", "rtx-4090", "rtx4090x8"),
])
def test_gpus_by_the_name_that_cuda_reports(name: str, device: str, preset: str) -> None:
    group = cuda_group(name, 12_345_678_912, 4)
    assert (group.device.name, group.devices_per_host, group.count) == (device, 4, 1)
    assert group.device.memory_bytes == 12_345_678_912
    assert group.device.sources["memory_bytes"].startswith("measured")
    links = resolve(preset).hosts[0]
    assert group.device_link.bandwidth_bytes_per_s == links.device_link.bandwidth_bytes_per_s
    assert group.device_link.source.startswith("not measured")


@pytest.mark.parametrize("name", ["NVIDIA L40S", "NVIDIA A100-PCIE-40GB", "Tesla T4", "AMD MI300X"])
def test_a_gpu_of_which_no_file_tells(name: str) -> None:
    with pytest.raises(InvalidInput, match="no device file"):
        cuda_group(name, 2**34, 1)


def test_every_gpu_file_has_a_name_in_cuda() -> None:
    # The 96 GB H100 of the torchtitan benchmarks was not sold: its name in CUDA is not published.
    assert {device for _, device in CUDA_NAMES} == set(device_names()) - {"cpu", "h100-96g"}
