"""Are measured links right? Over links of known rate between network namespaces, and on loopback.

    python -m benchmarks.links [--gbits 0 1 10] [--json FILE]        as root

`python -m profiler links` runs on two hosts of a test bed, its sizes and others taking turns. The
fit sees its own sizes alone. What it predicts for the others, all of 1 MiB and more, is compared
with what they took (goal: 15 %), and its bandwidth with the rate that was set (goal: 5 %). On
loopback (--gbits 0) there is no rate to compare with.

A rate is judged by the collectives that keep the link busy: gloo sends and all-reduces. Its
reduce-scatter is an all-reduce of a copy, and in its all-gather and all-to-all of long messages
the two directions often take turns: the announcement "ready to receive" waits behind the data.
Nor is it judged where loopback itself is not twice as fast: then the processors are what limits.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.testbed import Host, TestBed
from profiler.documents import load, write_atomically
from profiler.hardware import hardware_name, today
from profiler.links import LinkFit, Links, fit_line

MIB = 2**20
OWN = (*(2**k for k in range(10, 20, 2)), *(2**k for k in range(20, 26)))
UNSEEN = (3 * MIB, 6 * MIB, 12 * MIB, 24 * MIB)
RATE, SIZES = 0.05, 0.15

ON_WIRE = {"all_reduce": lambda n: 2 * (n - 1) / n, "all_gather": lambda n: (n - 1) / n,
           "reduce_scatter": lambda n: 2 * (n - 1) / n, "all_to_all": lambda n: (n - 1) / n,
           "send": lambda n: 1.0}
"""Bytes that each rank sends for a byte of the whole tensor (torch's ProcessGroupGloo:
`reduce_scatter_tensor_coalesced` is an all-reduce)."""
FILLS_THE_LINK = ("all_reduce", "send")
HEADROOM = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    gbits: float
    collective: str
    fitted_gbits: float
    is_judged: bool
    worst_error: float
    middle_error: float

    @property
    def rate_error(self) -> float | None:
        return self.fitted_gbits / self.gbits - 1 if self.gbits else None

    @property
    def missed(self) -> bool:
        rate = self.rate_error
        return self.worst_error > SIZES or (
            self.is_judged and rate is not None and abs(rate) > RATE)


def measure(gbits: float, arguments: list[str], timeout_s: float) -> Links:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "links.json"
        command = ["-m", "profiler", "links", "-q", "-o", str(path), *arguments]
        hosts = (Host(), Host()) if gbits else (Host(num_processes=2),)
        with TestBed(hosts=hosts, link_bits_per_s=(gbits or 100) * 1e9) as bed:
            result = bed.torchrun(command, timeout_s=timeout_s)
        if not result.ok:
            sys.exit(f"profiler links failed:\n{''.join(result.outputs)[-2000:]}")
        return load(Links, path)


def without(fit: LinkFit, sizes: tuple[int, ...]) -> LinkFit:
    """The fit had these sizes not been measured."""
    points = tuple(point for point in fit.points if point.num_bytes not in sizes)
    latency, slope, error = fit_line(points)
    return replace(fit, points=points, latency_s=latency, s_per_byte=slope, error=error)


def compare(gbits: float, options: argparse.Namespace, loopback: dict[str, float]) -> list[Row]:
    sizes = ",".join(map(str, sorted({*OWN, *UNSEEN})))
    links = measure(gbits, ["--most-seconds", str(options.seconds), "--sizes", sizes],
                    options.timeout)
    rows = []
    for whole in links.fits:
        fit, name = without(whole, UNSEEN), whole.collective
        errors = [abs(fit.seconds(point.num_bytes) / point.seconds - 1)
                  for point in whole.points if point.num_bytes in UNSEEN]
        judged = name in FILLS_THE_LINK and loopback.get(name, 0.0) > HEADROOM * gbits
        rows.append(Row(gbits=gbits, collective=name, fitted_gbits=wire_gbits(fit),
                        is_judged=judged, worst_error=max(errors), middle_error=median(errors)))
    return rows


def wire_gbits(fit: LinkFit) -> float:
    """What the fitted line says each rank sends in a second."""
    sent: Any = ON_WIRE[fit.collective]
    return float(fit.bytes_per_s * sent(fit.group_size) * 8 / 1e9)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gbits", type=float, nargs="*", default=[0, 1, 10])
    parser.add_argument("--seconds", type=float, default=1.0, help="for one size")
    parser.add_argument("--timeout", type=float, default=600.0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows: list[Row] = []
    print(f"{'set (Gb/s)':>10}  {'collective':<16}{'fitted':>8}{'of set':>8}{'unseen sizes':>14}"
          f"{'worst':>8}")
    for gbits in sorted(options.gbits):
        loopback = {row.collective: row.fitted_gbits for row in rows if not row.gbits}
        for row in compare(gbits, options, loopback):
            rows.append(row)
            rate = f"{'-':>8}" if row.rate_error is None else f"{row.rate_error:>+8.1%}"
            print(f"{gbits or 'loopback':>10}  {row.collective:<16}{row.fitted_gbits:>8.2f}{rate}"
                  f"{row.middle_error:>14.1%}{row.worst_error:>8.1%}"
                  f"{'' if row.is_judged else '  rate not judged' if gbits else ''}"
                  f"{'  missed' if row.missed else ''}", flush=True)
    if options.json:
        write_atomically(options.json, json.dumps(
            {"hardware": hardware_name(torch.device("cpu")), "date": today(),
             "rows": [asdict(row) for row in rows]}, indent=1) + "\n")


if __name__ == "__main__":
    main()
