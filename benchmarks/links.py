"""Are measured links right? Over links of known rate between network namespaces, and on loopback.

    python -m benchmarks.links [--gbits 1 10] [--json FILE]        as root

`python -m profiler links` runs on two hosts of a test bed, twice: once at its own sizes, once at
sizes in between and beyond. The bandwidth fitted to the first is compared with the rate that was
set (goal: 5 %), and the seconds that the first predicts for messages of 1 MiB and more with those
of the second (goal: 15 %). On loopback (--gbits 0) there is no rate to compare with.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.testbed import Host, TestBed
from profiler.documents import load
from profiler.links import LinkFit, Links

MIB = 2**20
UNSEEN = (3 * MIB, 6 * MIB, 12 * MIB, 24 * MIB)
RATE, SIZES = 0.05, 0.15

ON_WIRE = {"all_reduce": lambda n: 2 * (n - 1) / n, "all_gather": lambda n: (n - 1) / n,
           "reduce_scatter": lambda n: (n - 1) / n, "all_to_all": lambda n: (n - 1) / n,
           "send": lambda n: 1.0}
"""Bytes that each rank sends for a byte of the whole tensor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    gbits: float
    collective: str
    fitted_gbits: float
    worst_error: float
    middle_error: float


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


def compare(gbits: float, options: argparse.Namespace) -> list[Row]:
    pace = ["--most-seconds", str(options.seconds)]
    first = measure(gbits, [*pace, "--max-bytes", str(32 * MIB)], options.timeout)
    sizes = ",".join(map(str, UNSEEN))
    second = measure(gbits, [*pace, "--sizes", sizes], options.timeout)
    rows = []
    for fit, other in zip(first.fits, second.fits, strict=True):
        errors = [abs(fit.seconds(point.num_bytes) / point.low_s - 1) for point in other.points]
        rows.append(Row(gbits=gbits, collective=fit.collective, fitted_gbits=wire_gbits(fit),
                        worst_error=max(errors), middle_error=median(errors)))
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
    rows = []
    print(f"{'set (Gb/s)':>10}  {'collective':<16}{'fitted':>8}{'of set':>8}{'unseen sizes':>14}"
          f"{'worst':>8}")
    for gbits in options.gbits:
        for row in compare(gbits, options):
            rows.append(row)
            ratio = row.fitted_gbits / gbits - 1 if gbits else None
            missed = (ratio is not None and abs(ratio) > RATE) or row.worst_error > SIZES
            shown = f"{ratio:>+8.1%}" if ratio is not None else f"{'-':>8}"
            print(f"{gbits or 'loopback':>10}  {row.collective:<16}{row.fitted_gbits:>8.2f}{shown}"
                  f"{row.middle_error:>14.1%}{row.worst_error:>8.1%}"
                  f"{'  missed' if missed else ''}", flush=True)
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")


if __name__ == "__main__":
    main()
