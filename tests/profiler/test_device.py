"""The device files: that they load, say where their figures are from, and are plausible."""

from __future__ import annotations

from math import sqrt

import pytest
from hypothesis import given
from hypothesis import strategies as st

from profiler.device import Curve, Device, device_names, load_device
from profiler.documents import parse, to_data
from profiler.errors import InvalidInput, UnknownName

FIGURES = {"memory_bytes", "memory_bandwidth_bytes_per_s", "peak_flops_per_s", "matmul_efficiency",
           "attention_efficiency", "memory_efficiency", "kernel_launch_s", "context_bytes",
           "communicator_bytes", "overlap_slowdown"}
ORIGINS = ("measured", "cited", "interpolated", "assumed")


@pytest.mark.parametrize("name", device_names())
def test_every_figure_has_a_source(name: str) -> None:
    device = load_device(name)
    assert device.name == name
    assert set(device.sources) == FIGURES
    assert all(source.startswith(ORIGINS) for source in device.sources.values())


@pytest.mark.parametrize("name", device_names())
def test_round_trip(name: str) -> None:
    device = load_device(name)
    assert parse(Device, to_data(device), name) == device


@pytest.mark.parametrize("name", device_names())
def test_figures_are_plausible(name: str) -> None:
    device = load_device(name)
    assert "float32" in device.peak_flops_per_s
    assert 2**30 < device.memory_bytes < 2**38
    assert device.context_bytes + device.communicator_bytes < device.memory_bytes / 4
    for curve in (device.matmul_efficiency, device.attention_efficiency):
        assert list(curve.fraction) == sorted(curve.fraction)  # larger work is not less efficient
        assert curve.at(1e9) <= 1
    if name != "cpu":
        assert device.peak("float16") >= 1.9 * device.peak("float32")


def test_published_figures() -> None:
    a100, h100 = load_device("a100-80g"), load_device("h100-sxm-80g")
    assert a100.memory_bytes / 2**30 == pytest.approx(79.2, abs=0.1)
    assert a100.peak("bfloat16") == 312e12
    at_best = {device.name: device.peak("bfloat16") * device.matmul_efficiency.at(8192)
               for device in (a100, h100)}
    assert at_best["a100-80g"] == pytest.approx(264e12, rel=0.02)
    assert 700e12 < at_best["h100-sxm-80g"] < 800e12
    assert 544 <= a100.communicator_bytes / 2**20 <= 688


def test_unknown_dtype_and_device() -> None:
    with pytest.raises(UnknownName, match="dtype of device v100-32g 'bfloat16'"):
        load_device("v100-32g").peak("bfloat16")
    with pytest.raises(UnknownName, match="did you mean a100-80g or a100-40g"):
        load_device("a100")
    with pytest.raises(UnknownName, match="known: a10, a100-40g"):
        load_device("abacus")


CURVE = Curve(size=(1, 100), fraction=(0.2, 0.8))


def test_a_curve_is_linear_in_the_logarithm() -> None:
    assert CURVE.at(0.5) == CURVE.at(1) == 0.2
    assert CURVE.at(10) == pytest.approx(0.5)
    assert CURVE.at(sqrt(10)) == pytest.approx(0.35)
    assert CURVE.at(100) == CURVE.at(1e6) == 0.8


@given(st.floats(1e-3, 1e6), st.floats(1e-3, 1e6))
def test_a_rising_curve_rises(a: float, b: float) -> None:
    low, high = sorted((a, b))
    assert CURVE.at(low) <= CURVE.at(high) + 1e-12


@pytest.mark.parametrize("data", [
    {"size": [], "fraction": []}, {"size": [1, 2], "fraction": [0.5]},
    {"size": [2, 1], "fraction": [0.1, 0.2]}, {"size": [1, 1], "fraction": [0.1, 0.2]},
    {"size": [0], "fraction": [0.5]}, {"size": [1], "fraction": [0]},
    {"size": [1], "fraction": [1.5]}, {"size": [1], "fraction": [float("nan")]},
])
def test_curves_that_are_refused(data: dict[str, list[float]]) -> None:
    with pytest.raises(InvalidInput):
        parse(Curve, data, "curve")
