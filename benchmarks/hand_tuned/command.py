"""The whole contest: every scenario in turn, kept as it comes, tables and pictures at the end."""

from __future__ import annotations

import datetime
import json
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.hand_tuned.beds import without_limits
from benchmarks.hand_tuned.contest import FULL, QUICK, run_scenario
from benchmarks.hand_tuned.scenarios import Scenario, find, load_scenarios
from benchmarks.hand_tuned.table import markdown, print_scenario, print_summary
from benchmarks.testbed import Unavailable, why_unavailable
from profiler.documents import read_data, write_atomically
from profiler.errors import InvalidInput, MeshwrightError

__all__ = ["Options", "contest", "kept"]

QUICK_SCENARIO = "gpt, two processes"


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """names: of scenarios, or parts of names; none: all. again: measure even what is kept."""

    output: Path
    names: tuple[str, ...] = ()
    quick: bool = False
    again: bool = False
    seed: int = 0


def kept(path: Path) -> dict[str, Any]:
    """The results that a file holds, by scenario; an absent file holds none.

    Raises:
        InvalidInput: it is not a result file.
    """
    if not path.exists():
        return {}
    data = read_data(path)
    if not isinstance(data, dict) or not isinstance(data.get("scenarios"), dict):
        raise InvalidInput(f"{path}: not the results of a contest; give another folder")
    found: dict[str, Any] = data["scenarios"]
    return found


def contest(options: Options) -> int:
    """Run what is asked for and not there yet; 0 if every scenario has a result."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that test beds are taken down
    console = Console(width=None if sys.stdout.isatty() else 150)
    chosen = find(load_scenarios(), list(options.names) or (
        [QUICK_SCENARIO] if options.quick else []))
    problem = why_unavailable()
    if problem is not None:
        console.print(f"no test bed here ({problem}): processes of this machine instead, without "
                      "limits on links, cores or memory")
    options.output.mkdir(parents=True, exist_ok=True)
    path = options.output / "contest.json"
    results = {} if options.again and not options.names else kept(path)
    failed = 0
    for scenario in chosen:
        if scenario.name in results and not options.again:
            console.print(f"{scenario.name}: kept from {path}")
            continue
        try:
            results[scenario.name] = _one(scenario, options, problem is None)
        except (MeshwrightError, Unavailable) as error:
            console.print(f"{scenario.name}: {error}", style="red", markup=False)
            failed += 1
            continue
        _write(path, results)
        print_scenario(results[scenario.name], console)
    shown = [results[s.name] for s in load_scenarios() if s.name in results]
    if shown:
        from benchmarks.hand_tuned.pictures import draw_contest

        print_summary(shown, console)
        write_atomically(options.output / "contest.md", markdown(shown))
        draw_contest(shown, options.output / "contest.png")
    return 1 if failed else 0


def _one(scenario: Scenario, options: Options, limited: bool) -> dict[str, Any]:
    if not limited:
        scenario = without_limits(scenario)
    result = run_scenario(scenario, options.output, QUICK if options.quick else FULL,
                          limited=limited, seed=options.seed)
    return result | {"date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
                     "quick": options.quick}


def _write(path: Path, results: dict[str, Any]) -> None:
    from profiler.hardware import hardware_name, pick_device

    write_atomically(path, json.dumps({"hardware": hardware_name(pick_device("cpu")),
                                       "scenarios": results}, indent=1) + "\n")
