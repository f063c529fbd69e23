"""The contest: its scenarios, its sample, its scores and tables; and one small one whole."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.hand_tuned import children, command, scaling, scenarios, table, worker
from benchmarks.hand_tuned.entrants import PLAN, make_field
from benchmarks.hand_tuned.sampling import key_of, reference, sample
from benchmarks.hand_tuned.score import geometric_mean, rank_correlation, score, speed_ups
from planner import inputs, topology_files
from planner.costing import Coster
from planner.legality import violations
from profiler.errors import InvalidInput

ROOT = Path(__file__).parents[2]


def row(name: str, turns: list[float] | None, final: list[float] | None = None,
        predicted: float = 1.0) -> dict[str, Any]:
    both = sorted((turns or []) + (final or []))
    return {"names": [name], "kind": "hand", "degrees": "dp 2", "turns_s": turns or [],
            "final_s": final or [], "predicted_s": predicted, "problem": "" if turns else "broke",
            "measured_s": both[len(both) // 2] if both else None}


def result(rows: list[dict[str, Any]]) -> dict[str, Any]:
    found = score(rows)
    return {"name": "a", "why": "b", "rows": rows, "refused": [["x", "y"]],
            "scenario": {"global_batch": 8},
            "score": {"rank": found.rank, "num_ran": found.num_ran, "best": found.best,
                      "regret": found.regret, "noise": found.noise}}


# --- scenarios


def test_scenarios_are_unlike_and_within_what_is_promised() -> None:
    found = scenarios.load_scenarios()
    assert len(found) >= 12
    assert {s.model for s in found} == set(scenarios.MODELS)
    assert all(2 <= s.num_processes <= 8 and 0.5 <= s.link_gbit_per_s <= 10 for s in found)
    assert sum(s.memory_mib is not None for s in found) >= 2
    assert sum(not s.is_uniform for s in found) >= 1
    for scenario in found:  # the machine has two cores
        assert sum(h.count * h.core_share for h in scenario.hosts) <= 2
        topology = scenarios.topology_of(scenario)
        assert topology.num_devices == scenario.num_processes
        assert topology.num_hosts == len(scenario.hosts)


@pytest.mark.parametrize("change", [
    {"model": "resnet"}, {"hosts": []}, {"link_gbit_per_s": 0}, {"global_batch": 0},
    {"hosts": [{"count": 1, "core_share": 2}]}, {"surprise": 1}])
def test_a_bad_scenario_is_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    good = {"name": "n", "why": "w", "model": "gpt", "hosts": [{"count": 1, "core_share": 1}],
            "link_gbit_per_s": 1, "global_batch": 8}
    path = tmp_path / "scenarios.json"
    path.write_text(json.dumps([good]))
    assert scenarios.load_scenarios(path)[0].name == "n"
    path.write_text(json.dumps([good | change]))
    with pytest.raises(InvalidInput):
        scenarios.load_scenarios(path)
    path.write_text(json.dumps([good, good]))
    with pytest.raises(InvalidInput, match="twice"):
        scenarios.load_scenarios(path)


def test_unlike_hosts_are_of_two_kinds_and_names_are_found_by_their_parts() -> None:
    found = scenarios.load_scenarios()
    unequal = next(s for s in found if not s.is_uniform)
    devices = [group.device for group in scenarios.topology_of(unequal).hosts]
    assert len({device.name for device in devices}) == 2
    assert devices[0].peak("float32") != devices[1].peak("float32")
    assert scenarios.find(found, ["LLAMA"]) == [s for s in found if "llama" in s.name]
    with pytest.raises(InvalidInput, match="nothing like it"):
        scenarios.find(found, ["nothing like it"])


# --- who runs


def test_a_sample_is_legal_fits_and_repeats() -> None:
    graph, _ = inputs.resolve_model("gpt2-medium")
    topology = topology_files.resolve("l4x8")
    request = inputs.make_request(graph, {"global_batch": 16, "seq_len": 1024})
    coster = Coster(graph, topology, request)
    names = reference("gpt2-medium", graph), reference("l4x8", topology)

    def drawn(seed: int) -> list[Any]:
        return sample(coster, *names, count=6, seed=seed, slowest_s=1e3, taken=set())

    first = drawn(1)
    assert len(first) == 6 and len({key_of(layout) for layout in first}) == 6
    for layout in first:
        assert not violations(coster, layout) and layout.mesh.num_devices == 8
        assert all(stage.total_memory_bytes <= stage.capacity_bytes
                   for stage in layout.prediction.stages)
    assert list(map(key_of, drawn(1))) == list(map(key_of, first))
    assert list(map(key_of, drawn(2))) != list(map(key_of, first))
    assert sample(coster, *names, count=6, seed=1, slowest_s=0.0, taken=set()) == []


def test_equal_layouts_run_once_and_the_plan_is_first() -> None:
    field = make_field("gpt2-medium", "l4x8", None, {"global_batch": 16, "seq_len": 1024},
                       num_random=2)
    keys = [key_of(entrant.layout) for entrant in field.entrants]
    names = [name for entrant in field.entrants for name in entrant.names]
    assert len(set(keys)) == len(keys)
    assert field.entrants[0].names[0] == PLAN and len(set(names)) == len(names)
    assert any("FSDP" in entrant.names and "HSDP" in entrant.names for entrant in field.entrants)
    assert sum(entrant.kind == "random" for entrant in field.entrants) == 2


# --- scores and tables


def test_regret_is_of_the_final_turns_and_pairs_them() -> None:
    rows = [row(PLAN, [1.0, 1.0], [1.0, 2.0, 1.0]),
            row("lucky", [0.5, 0.5], [1.25, 2.5, 1.25]), row("slow", [3.0]), row("failed", None)]
    found = score(rows)
    assert found.regret == 0.0 and found.best == PLAN and found.num_ran == 3
    rows[1] = row("better", [0.9, 0.9], [0.8, 1.6, 0.8])
    found = score(rows)
    assert found.regret == pytest.approx(0.25) and found.best == "better" and not found.is_near
    assert found.noise == pytest.approx(0.0) and found.rank == 2
    lost = score([row(PLAN, None), row("other", [1.0], [1.0])])
    assert lost.regret is None and lost.rank is None and lost.best == "other"


def test_means_and_correlations_by_hand() -> None:
    assert geometric_mean([2.0, 8.0]) == pytest.approx(4.0) and geometric_mean([]) is None
    assert rank_correlation([1, 2, 3], [10, 30, 20]) == pytest.approx(0.5)
    assert rank_correlation([1, 2], [1, 2]) is None
    results = [result([row(PLAN, [1.0]), row("FSDP", [2.0])]), result([row(PLAN, [1.0])]),
               result([row(PLAN, [1.0]), row("FSDP", None)])]
    assert speed_ups(results, "FSDP") == [2.0]


def test_tables_say_who_failed_and_what_it_comes_to() -> None:
    results = [result([row(PLAN, [1.0], [1.0]), row("FSDP", [2.0], [2.0])]),
               result([row(PLAN, [1.1], [1.1]), row("DDP", [1.0], [1.0])]),
               result([row(PLAN, None), row("DDP", [1.0], [1.0])])]
    assert table.verdict(results[0]) == "the plan is the fastest of 2"
    assert "10.0% slower than DDP" in table.verdict(results[1])
    assert "did not run: broke" in table.verdict(results[2])
    lines = "\n".join(table.summary_lines(results))
    assert "1 of 3 scenarios" in lines and "largest loss is 10.0%" in lines
    assert "in 1 it did not run" in lines and "against FSDP: 2.00 times" in lines
    assert table.markdown(results).count("\n| a |") == 3


def test_scaling_names_what_takes_the_rest() -> None:
    def point(number: int, step_s: float, cpu_s: float, reduction_s: float) -> dict[str, Any]:
        plan = row(PLAN, [step_s], predicted=1.0 + reduction_s) | {
            "cpu_s": [cpu_s], "predicted_terms_s": {"forward_compute": 1.0,
                                                    "gradient_reduction": reduction_s}}
        return {"rows": [plan], "scenario": {
            "global_batch": number, "hosts": [{"count": number, "core_share": 0.5}]}}

    rows = scaling.points_of([point(1, 1.0, 0.5, 0.0), point(4, 1.25, 0.5, 0.1)])
    assert rows[1]["linear"] == pytest.approx(0.8)
    assert rows[1]["predicted_rest"] == "gradient reduction +0.10 s"
    assert rows[1]["measured_rest"] == "waiting for links or others +0.25 s"
    assert rows[0]["measured_rest"] == ""


# --- processes


def test_a_child_answers_or_says_why_not() -> None:
    assert children.in_child(lambda: 7, 10) == (7, "")

    def fail() -> None:
        raise MemoryError("too much")

    assert children.in_child(fail, 10) == (None, "MemoryError: too much")
    assert children.in_child(lambda: os._exit(1), 10)[1] == "it was killed"

    def grown() -> int:
        before = children.resident_bytes("VmRSS")
        held = b"1" * 2**26
        return children.resident_bytes("VmHWM") - before - len(held)

    assert children.in_child(grown, 10)[0] > -2**22


def test_all_ranks_decide_by_the_slowest_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that time a step a little differently would disagree on who is hopeless, and hang."""
    monkeypatch.setattr(worker.dist, "barrier", lambda: None)
    monkeypatch.setattr(worker, "_gathered", lambda seconds: [seconds, 7.0, 0.5])
    stable = SimpleNamespace(batch=(), device="cpu")
    run = SimpleNamespace(step=lambda: None, clock=SimpleNamespace(settle=lambda: None))
    assert worker._Stable._timed(stable, run) == 7.0


def test_a_file_of_something_else_is_not_taken_for_results(tmp_path: Path) -> None:
    path = tmp_path / "contest.json"
    assert command.kept(path) == {}
    path.write_text("[]")
    with pytest.raises(InvalidInput, match="not the results"):
        command.kept(path)
    path.write_text('{"scenarios": {"a": 1}}')
    assert command.kept(path) == {"a": 1}


@pytest.mark.processes
def test_the_quick_contest_runs_whole_and_is_kept(tmp_path: Path) -> None:
    arguments = [sys.executable, "-m", "benchmarks.hand_tuned", "--quick", "-o", str(tmp_path)]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=1500, check=False,
                          cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    data = json.loads((tmp_path / "contest.json").read_text())["scenarios"]
    (only,) = data.values()
    assert only["rows"][0]["names"][0] == PLAN and only["rows"][0]["measured_s"] > 0
    assert sum(entrant["measured_s"] is not None for entrant in only["rows"]) >= 5
    assert (tmp_path / "contest.png").stat().st_size > 1000
    again = subprocess.run(arguments, capture_output=True, text=True, timeout=300, check=False,
                           cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)})
    assert again.returncode == 0 and "kept from" in again.stdout
