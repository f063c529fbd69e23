"""The models that ship: sizes against the published ones, files against fresh traces."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from profiler.catalogue import ALIASES, CATALOGUE, MODELS_DIR, file_text, trace_named
from profiler.documents import load
from profiler.errors import UnknownName
from profiler.layer_graph import LayerGraph

PUBLISHED = {  # sum(p.numel()) of the published checkpoints
    "gpt2": 124_439_808, "gpt2-medium": 354_823_168, "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200, "llama2-7b": 6_738_415_616, "llama2-13b": 13_015_864_320,
    "llama2-70b": 68_976_648_192, "llama3-8b": 8_030_261_248, "llama3-70b": 70_553_706_496,
    "llama3.1-8b": 8_030_261_248, "llama3.1-70b": 70_553_706_496,
    "llama3.1-405b": 405_853_388_800, "llama3.2-1b": 1_235_814_400,
    "llama3.2-3b": 3_212_749_824, "mistral-7b": 7_241_732_096, "mixtral-8x7b": 46_702_792_704,
    "qwen2.5-0.5b": 494_032_768, "qwen2.5-1.5b": 1_543_714_304, "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512, "qwen2.5-14b": 14_770_033_664, "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648, "t5-3b": 2_851_598_336, "vit-huge": 632_045_800,
    "resnet-50": 25_557_032,
}


def shipped(name: str) -> LayerGraph:
    return load(LayerGraph, MODELS_DIR / f"{name}.json")


def transformer_flops(graph: LayerGraph, layers: int, hidden: int, tied: bool, vocabulary: int,
                      positions: int, seq_len: int) -> float:
    """2 per matmul parameter and token, and attention in full: (2 + 2) * s^2 * h a layer."""
    matmuls = graph.num_parameters - (0 if tied else vocabulary * hidden) - positions * hidden
    return 2 * matmuls * seq_len + layers * 4 * seq_len**2 * hidden


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_the_published_ones(name: str) -> None:
    assert shipped(name).num_parameters == PUBLISHED[name]


@pytest.mark.parametrize("name", [name for name in CATALOGUE if name.startswith("megatron")])
def test_parameters_follow_the_formula_of_the_paper(name: str) -> None:
    """P = 12 l h^2 (1 + 13/(12h) + (V + s)/(12 l h)), eq. 2; 2h more for the final norm."""
    config = CATALOGUE[name].config
    layers, h = config["n_layer"], config["n_embd"]
    formula = 12 * layers * h * h + 13 * layers * h + (51200 + 2048) * h
    assert shipped(name).num_parameters == formula + 2 * h


@pytest.mark.parametrize(("name", "layers", "hidden", "tied", "vocabulary", "positions"), [
    ("llama3-8b", 32, 4096, False, 128256, 0), ("llama3-70b", 80, 8192, False, 128256, 0),
    ("gpt2-xl", 48, 1600, True, 50257, 1024), ("gpt3-175b", 96, 12288, True, 51200, 2048),
    ("qwen2.5-7b", 28, 3584, False, 152064, 0),
])
def test_flops_are_6n_and_attention(name: str, layers: int, hidden: int, tied: bool,
                                    vocabulary: int, positions: int) -> None:
    graph, seq_len = shipped(name), 1024
    forward = transformer_flops(graph, layers, hidden, tied, vocabulary, positions, seq_len)
    attention = layers * 4 * seq_len**2 * hidden
    # Biases and norms are parameters without a matmul: a part in a thousand or less.
    assert graph.forward_flops(3, seq_len) == pytest.approx(3 * forward, rel=1e-3)
    assert graph.backward_flops(3, seq_len) == pytest.approx(
        3 * (2 * (forward - attention) + 2.5 * attention), rel=1e-3)


def test_a_mixture_computes_with_its_active_experts() -> None:
    graph = shipped("mixtral-8x7b")
    block = graph.kind_of(1)
    expert = 3 * 4096 * 14336
    experts = [op for op in block.ops if op.matmul and op.matmul.groups == 8]
    assert sum(op.flops.at(1, 4096) for op in experts) == 2 * 4096 * 2 * expert
    assert all(op.matmul and op.matmul.rows.at(1, 4096) == 2 * 4096 for op in experts)
    assert sum(p.numel for p in block.parameters if len(p.shape) == 3) == 8 * expert


@pytest.mark.parametrize("name", ["gpt3-175b", "megatron-1.7b", "megatron-1t"])
def test_a_block_keeps_what_the_formula_for_gpt_says(name: str) -> None:
    """34 s b h bytes, Korthikanti et al. 2022, eq. 1: attention is fused, so no 5 a s^2 b term."""
    block, hidden = shipped(name).kind_of(2), CATALOGUE[name].config["n_embd"]
    saved = sum(group.bytes_at(3, 2048, 2) for group in block.saved)
    assert saved == pytest.approx(34 * 2048 * 3 * hidden, rel=5e-3)


@pytest.mark.parametrize("name", CATALOGUE)
def test_files_are_small_and_say_how_to_rebuild_the_model(name: str) -> None:
    path = MODELS_DIR / f"{name}.json"
    graph = shipped(name)
    assert path.stat().st_size < 150_000
    assert graph.name == name
    assert graph.source.hugging_face_config == CATALOGUE[name].config
    assert graph.source.hugging_face_class == CATALOGUE[name].config["architectures"][0]


@pytest.mark.parametrize("name", CATALOGUE)
def test_files_equal_a_fresh_trace(name: str) -> None:
    assert (MODELS_DIR / f"{name}.json").read_text() == file_text(trace_named(name))


def test_every_file_is_in_the_catalogue_and_aliases_lead_to_it() -> None:
    assert {path.stem for path in MODELS_DIR.glob("*.json")} == set(CATALOGUE)
    assert set(ALIASES.values()) <= set(CATALOGUE) and not set(ALIASES) & set(CATALOGUE)


def test_unknown_names_are_refused_with_near_ones() -> None:
    with pytest.raises(UnknownName, match="llama3-8b"):
        trace_named("llama3-8bb")


def test_reading_the_catalogue_needs_no_torch() -> None:
    code = ("import sys; from profiler.catalogue import CATALOGUE, MODELS_DIR; "
            "from profiler.documents import load; from profiler.layer_graph import LayerGraph; "
            "load(LayerGraph, MODELS_DIR / 'llama3-8b.json'); "
            "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)")
    environment = {**os.environ, "PYTHONPATH": str(MODELS_DIR.parent.parent)}
    assert subprocess.run([sys.executable, "-c", code], env=environment, check=False,
                          timeout=60).returncode == 0
