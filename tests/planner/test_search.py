"""From a request to a Layout: proof, price, determinism, the diagnosis of what does not fit."""

from __future__ import annotations

from dataclasses import replace

import pytest

import planner.best_first as best_first
from planner.explain import Diagnosis
from planner.layout import Layout, Mesh
from planner.models import resolve as graph_of
from planner.pricing import price
from planner.request import Request
from planner.search import search
from planner.topology_files import resolve
from profiler.documents import dump, parse, to_data
from profiler.errors import Infeasible, InvalidInput, UnsupportedLayout

GPT2 = graph_of("gpt2")
LLAMA = graph_of("llama3-8b")
HOST = resolve("dgx-h100")
TWO_HOSTS = resolve("dgx-h100:2")
LONG = Request(global_batch=256, seq_len=8192)


@pytest.fixture(scope="module")
def llama_layout() -> Layout:
    return search(LLAMA, TWO_HOSTS, LONG, model_name="llama3-8b", topology_name="dgx-h100:2")


def test_layout_is_proven_and_its_terms_add_up(llama_layout: Layout) -> None:
    prediction, proof = llama_layout.prediction, llama_layout.proof
    assert prediction is not None and proof is not None
    assert proof.status == "OPTIMAL" and proof.gap == 0 and proof.bound_s == prediction.step_s
    assert sum(prediction.step_terms_s.values()) == pytest.approx(prediction.step_s, rel=1e-12)
    for stage in prediction.stages:
        assert stage.total_memory_bytes <= stage.capacity_bytes
        assert stage.capacity_bytes <= HOST.hosts[0].device.memory_bytes * 0.92
    mesh = llama_layout.mesh
    assert (mesh.dp * llama_layout.micro_batch * llama_layout.num_micro_batches
            == LONG.global_batch)
    held = [layer for stage in llama_layout.stages for layer, _ in stage.iter_layers()]
    assert held == list(range(len(LLAMA.layers)))


def test_document_round_trips_and_prices_the_same(llama_layout: Layout) -> None:
    again = parse(Layout, to_data(llama_layout), "layout")
    assert again == llama_layout
    bare = replace(again, prediction=None, proof=None, alternatives=())
    assert price(LLAMA, TWO_HOSTS, bare).prediction == llama_layout.prediction


def test_same_request_same_bytes(llama_layout: Layout) -> None:
    again = search(LLAMA, TWO_HOSTS, LONG, model_name="llama3-8b", topology_name="dgx-h100:2")
    assert dump(again) == dump(llama_layout)


def test_alternatives_are_slower_and_say_why(llama_layout: Layout) -> None:
    assert llama_layout.prediction is not None
    best = llama_layout.prediction.step_s
    assert len(llama_layout.alternatives) >= 3
    for alternative in llama_layout.alternatives:
        assert alternative.step_s >= best and "->" in alternative.why
        assert alternative.slower_by == pytest.approx(alternative.step_s / best - 1)


def test_more_freedom_is_never_slower() -> None:
    """Any demanded choice leaves a smaller space, so its best step is no shorter."""
    free = search(LLAMA, HOST, replace(LONG, global_batch=64))
    assert free.prediction is not None
    for demand in ({"tp": 2}, {"pp": 2}, {"recompute": "full"}, {"micro_batch": 1},
                   {"use_all_devices": True}, {"memory_margin": 0.2}):
        bound = search(LLAMA, HOST, replace(LONG, global_batch=64, **demand))
        assert bound.prediction is not None
        assert bound.prediction.step_s >= free.prediction.step_s * (1 - best_first.TOLERANCE)


def test_demanded_choices_are_kept() -> None:
    layout = search(LLAMA, HOST, replace(LONG, global_batch=64, tp=2, pp=2, micro_batch=2,
                                         schedule="1f1b", recompute="full"))
    assert (layout.mesh.tp, layout.mesh.pp, layout.micro_batch) == (2, 2, 2)
    assert layout.schedule.name == "1f1b"
    assert {run.choice.recompute for stage in layout.stages for run in stage.runs} == {"full"}


def test_unused_devices_are_said() -> None:
    layout = search(GPT2, HOST, Request(global_batch=3, seq_len=128))
    unused = 8 - layout.mesh.num_devices
    assert unused and any(f"{unused} of 8 devices are left unused" in n for n in layout.notes)


def test_padded_vocabulary_is_said() -> None:
    layout = search(GPT2, HOST, Request(global_batch=8, seq_len=128, tp=2))
    assert any("50257 is padded to 50258" in note for note in layout.notes)


def test_mixed_devices_get_unequal_shares_of_layers() -> None:
    mixed = resolve("dgx-a100-80g:1+dgx-h100:1")
    layout = search(LLAMA, mixed, replace(LONG, global_batch=64, pp=2))
    assert layout.prediction is not None
    blocks = {s.device: stage.num_layers for s, stage in
              zip(layout.prediction.stages, layout.stages, strict=True)}
    assert blocks["h100-sxm-80g"] > blocks["a100-80g"] + 5


def test_time_limit_gives_the_best_so_far_with_its_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time runs out once something was found: the answer says how far it is proven."""
    def stop_when_found(self: object, *_: object) -> None:
        if self.outcome.found:  # type: ignore[attr-defined]
            self.deadline = 0.0  # type: ignore[attr-defined]
    monkeypatch.setattr(best_first._Search, "report", stop_when_found)
    layout = search(LLAMA, TWO_HOSTS, LONG)
    assert layout.proof is not None and layout.prediction is not None
    assert layout.proof.status == "FEASIBLE"
    assert layout.proof.gap == pytest.approx(
        1 - layout.proof.bound_s / layout.prediction.step_s)
    assert 0 <= layout.proof.gap < 1


def test_interrupt_keeps_the_best_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt_when_found(self: object, *_: object) -> None:
        if self.outcome.found:  # type: ignore[attr-defined]
            raise KeyboardInterrupt
    monkeypatch.setattr(best_first._Search, "report", interrupt_when_found)
    layout = search(LLAMA, TWO_HOSTS, LONG)
    assert layout.proof is not None and layout.proof.status == "FEASIBLE"


def test_what_does_not_fit_is_diagnosed_and_the_cure_works() -> None:
    request = Request(global_batch=64, seq_len=8192)
    with pytest.raises(Infeasible) as caught:
        search(graph_of("llama3-70b"), HOST, request)
    diagnosis = caught.value.diagnosis
    assert isinstance(diagnosis, Diagnosis)
    assert diagnosis.needed_bytes > diagnosis.available_bytes
    assert sum(diagnosis.terms.values()) == diagnosis.needed_bytes
    assert any("16 devices instead of 8" in text for text in diagnosis.suggestions)
    cured = search(graph_of("llama3-70b"), TWO_HOSTS, request)
    assert cured.prediction is not None


@pytest.mark.parametrize(("change", "words"), [
    ({"tp": 3}, ["tp 3", "heads 32", "Legal: 1, 2, 4, 8"]),
    ({"dp_replicate": 3}, ["global batch 256", "3", "divisors"]),
    ({"pp": 64}, ["pp 64"]),
    ({"tp": 8, "pp": 4}, ["tp 8", "pp 4", "32 devices", "8"]),
    ({"seq_len": 10_000}, ["10000", "8192"]),
])
def test_illegal_requests_say_what_would_be_legal(change: dict[str, int], words: list[str]) -> None:
    with pytest.raises(InvalidInput) as caught:
        search(LLAMA, HOST, replace(LONG, **change))
    for word in words:
        assert word in str(caught.value)


def test_every_violation_of_a_layout_is_listed(llama_layout: Layout) -> None:
    broken = replace(
        llama_layout, prediction=None, micro_batch=3,
        mesh=Mesh(pp=1, dp_shard=7, tp=16, order=("dp_shard", "tp")),
        schedule=replace(llama_layout.schedule, name="interleaved"),
        stages=(replace(llama_layout.stages[0], runs=llama_layout.stages[0].runs[:-1]),))
    with pytest.raises(UnsupportedLayout) as caught:
        price(LLAMA, TWO_HOSTS, broken)
    message = str(caught.value)
    for words in ("112 devices", "global batch 256", "'interleaved' with 1 chunks",
                  "would be dropped"):
        assert words in message
    assert len(caught.value.problems) >= 4
