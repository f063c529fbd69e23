"""The last part of gpu_smoke.sh: does the loss fall, and how far is measured from predicted?"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from profiler.documents import write_atomically

MODES = ("none", "selective", "full")


def _read(folder: Path, mode: str) -> dict[str, Any]:
    lines = (folder / f"{mode}.metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line) for line in lines]
    report = json.loads((folder / f"{mode}.report.json").read_text())
    return {"recompute": mode, "losses": [step["loss"] for step in steps],
            "tokens_per_s": sorted(step["tokens_per_s"] for step in steps)[len(steps) // 2],
            "rows": report["rows"]}


def main() -> None:
    folder, results = map(Path, sys.argv[1:3])
    runs = [_read(folder, mode) for mode in MODES]
    device = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "cpu"
    print(f"{device}, torch {torch.__version__}")
    print(f"{'recompute':<12}{'quantity':<34}{'predicted':>14}{'measured':>14}{'ratio':>8}")
    for run in runs:
        for row in run["rows"]:
            scale, unit = (2**30, "GiB") if row["unit"] == "bytes" else (1e-3, "ms")
            print(f"{run['recompute']:<12}{row['name']:<34}"
                  f"{row['predicted'] / scale:>10.2f} {unit:>3}"
                  f"{row['measured'] / scale:>10.2f} {unit:>3}"
                  f"{row['measured'] / row['predicted']:>8.2f}")
    results.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"device": device, "torch": torch.__version__, "runs": runs}, indent=1)
    write_atomically(results / "gpu_smoke.json", text + "\n")
    print(f"kept in {results / 'gpu_smoke.json'}")
    rising = [run["recompute"] for run in runs if not run["losses"][-1] < run["losses"][0]]
    if rising:
        raise SystemExit(f"the loss does not fall with recompute {', '.join(rising)}")


if __name__ == "__main__":
    main()
