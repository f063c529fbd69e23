"""The plan against hand-tuned layouts: measured here, on a cluster of yours, or on paper.

    python -m benchmarks.hand_tuned [--scenario NAME] [--quick] [-o DIR]
    torchrun ... -m benchmarks.hand_tuned --topology my-cluster.yaml --model llama3-8b \\
        --global-batch 64 --seq-len 4096 [-o DIR]
    python -m benchmarks.hand_tuned --predict [MODEL --topology NAME --global-batch N ...]

The first runs every scenario of scenarios.json on CPU processes in network-namespace hosts (root)
and keeps what is measured: run again, it goes on where it was. The second runs on the processes
that torchrun started. The third prices: without MODEL, the published recipes.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

from profiler.documents import write_atomically
from profiler.errors import InvalidInput, MeshwrightError

PUBLISHED = "the published recipes"


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="python -m benchmarks.hand_tuned", description=__doc__,
                                   formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--scenario", action="append", default=[], metavar="NAME",
                      help="only scenarios whose name has this in it; may be repeated")
    made.add_argument("--quick", action="store_true", help="one scenario, few turns: a smoke test")
    made.add_argument("--again", action="store_true", help="measure even what is kept")
    made.add_argument("--scaling", action="store_true", help="1, 2, 4, 8 processes instead")
    made.add_argument("--seed", type=int, default=0, help="of the random layouts [0]")
    made.add_argument("--predict", metavar="MODEL", nargs="?", const=PUBLISHED)
    made.add_argument("--model", help="on the processes that torchrun started")
    made.add_argument("--topology")
    made.add_argument("--links", help="a file of measured collectives")
    made.add_argument("--global-batch", type=int)
    made.add_argument("--seq-len", type=int)
    made.add_argument("--precision", default="bf16-mixed")
    made.add_argument("-o", "--output", type=Path,
                      help="folder of the results [hand-tuned-results]")
    return made


def _needed(arguments: argparse.Namespace, *names: str) -> None:
    missing = [f"--{name.replace('_', '-')} is needed" for name in names
               if getattr(arguments, name) is None]
    if missing:
        raise InvalidInput(missing)


def run(arguments: argparse.Namespace) -> int:
    """What was asked for; the exit status."""
    folder = arguments.output or Path("hand-tuned-results")
    if arguments.predict == PUBLISHED:
        from benchmarks.hand_tuned.published import published

        return published(arguments.output)
    if arguments.predict is not None:
        _needed(arguments, "topology", "global_batch")
        return _on_paper(arguments)
    if arguments.model is not None or "RANK" in os.environ:
        _needed(arguments, "model", "topology", "global_batch")
        from benchmarks.hand_tuned.cluster import compete_here

        return compete_here(arguments.model, arguments.topology, arguments.links, folder, {
            "global_batch": arguments.global_batch, "seq_len": arguments.seq_len,
            "precision": arguments.precision}, seed=arguments.seed)
    if arguments.scaling:
        from benchmarks.hand_tuned.scaling import scaling

        return scaling(folder, again=arguments.again)
    from benchmarks.hand_tuned.command import Options, contest

    return contest(Options(output=folder, names=tuple(arguments.scenario), quick=arguments.quick,
                           again=arguments.again, seed=arguments.seed))


def _on_paper(arguments: argparse.Namespace) -> int:
    from benchmarks.hand_tuned.paper import as_data, compare, print_comparison

    comparison = compare(arguments.predict, arguments.topology,
                         global_batch=arguments.global_batch, seq_len=arguments.seq_len,
                         precision=arguments.precision)
    print_comparison(comparison)
    if arguments.output is not None:
        write_atomically(arguments.output, json.dumps(as_data(comparison), indent=1) + "\n")
    return 0


def main() -> int:
    try:
        return run(parser().parse_args())
    except MeshwrightError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_status
    except KeyboardInterrupt:
        print("interrupted: what was measured is kept, and the same command goes on from there",
              file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
