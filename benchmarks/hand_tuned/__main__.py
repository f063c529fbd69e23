"""Hand-tuned layouts of a model and a cluster, priced beside the plan.

    python -m benchmarks.hand_tuned --predict gpt3-175b --topology dgx-a100-80g:8 \\
        --global-batch 64 --seq-len 2048 [-o results.json]
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from benchmarks.hand_tuned.paper import as_data, compare, print_comparison
from profiler.documents import write_atomically
from profiler.errors import MeshwrightError


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.hand_tuned",
                                     description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--predict", metavar="MODEL", required=True)
    parser.add_argument("--topology", required=True)
    parser.add_argument("--global-batch", type=int, required=True)
    parser.add_argument("--seq-len", type=int)
    parser.add_argument("--precision", default="bf16-mixed")
    parser.add_argument("-o", "--output", type=Path, help="write the layouts as JSON")
    arguments = parser.parse_args()
    try:
        comparison = compare(arguments.predict, arguments.topology,
                             global_batch=arguments.global_batch, seq_len=arguments.seq_len,
                             precision=arguments.precision)
        print_comparison(comparison)
        if arguments.output is not None:
            write_atomically(arguments.output, json.dumps(as_data(comparison), indent=1) + "\n")
    except MeshwrightError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_status
    return 0


if __name__ == "__main__":
    sys.exit(main())
