"""The models that ship with the planner: their Hugging Face configs, and the files made from them.

    python -m profiler.catalogue [name ...]     rewrites planner/models/<name>.json

Configs are those that the models were published with. GPT-style models are GPT2LMHeadModel:
learned positions, tied embeddings, dropout of 0.1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from profiler import documents
from profiler.errors import UnknownName
from profiler.layer_graph import LayerGraph

__all__ = ["ALIASES", "CATALOGUE", "MODELS_DIR", "ModelSpec", "file_text", "trace_named"]

MODELS_DIR = Path(__file__).parent.parent / "planner" / "models"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A Hugging Face config, and where its numbers come from."""

    config: Mapping[str, Any]
    note: str = ""


def _gpt(layers: int, hidden: int, heads: int, *, vocabulary: int = 51200, seq_len: int = 2048,
         activation: str = "gelu_pytorch_tanh", note: str = "") -> ModelSpec:
    """The default activation is the fused kernel of GPT-2's "gelu_new", which is written out."""
    return ModelSpec(note=note, config={
        "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_layer": layers,
        "n_embd": hidden, "n_head": heads, "vocab_size": vocabulary, "n_positions": seq_len,
        "activation_function": activation})


def _gpt2(layers: int, hidden: int, heads: int) -> ModelSpec:
    return _gpt(layers, hidden, heads, vocabulary=50257, seq_len=1024,
                activation="gelu_new", note="Radford et al. 2019, Table 2")


def _megatron(layers: int, hidden: int, heads: int) -> ModelSpec:
    return _gpt(layers, hidden, heads, note="Narayanan et al. 2021 (SC21), Table 1: sequences of "
                "2048, vocabulary 51200 (50257 padded)")


def _decoder(model_type: str, layers: int, hidden: int, heads: int, kv_heads: int, ffn: int,
             vocabulary: int, seq_len: int, *, eps: float = 1e-5, theta: float = 10000.0,
             tied: bool = False, note: str = "", **more: Any) -> ModelSpec:
    names = {"llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM",
             "qwen2": "Qwen2ForCausalLM", "mixtral": "MixtralForCausalLM"}
    return ModelSpec(note=note, config={
        "model_type": model_type, "architectures": [names[model_type]],
        "num_hidden_layers": layers, "hidden_size": hidden, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "intermediate_size": ffn, "vocab_size": vocabulary,
        "max_position_embeddings": seq_len, "rms_norm_eps": eps, "rope_theta": theta,
        "tie_word_embeddings": tied, **more})


def _llama2(layers: int, hidden: int, heads: int, kv_heads: int, ffn: int) -> ModelSpec:
    return _decoder("llama", layers, hidden, heads, kv_heads, ffn, 32000, 4096)


def _llama3(layers: int, hidden: int, heads: int, ffn: int, *, seq_len: int = 131072,
            factor: float = 8.0, **more: Any) -> ModelSpec:
    """Llama 3 (sequences of 8192, plain rotary positions), 3.1 and 3.2 (131072, scaled)."""
    if seq_len > 8192:
        more["rope_scaling"] = {
            "rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    return _decoder("llama", layers, hidden, heads, 8, ffn, 128256, seq_len, theta=500000.0, **more)


def _qwen25(layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, *, tied: bool,
            vocabulary: int = 152064, seq_len: int = 131072) -> ModelSpec:
    return _decoder("qwen2", layers, hidden, heads, kv_heads, ffn, vocabulary, seq_len, eps=1e-6,
                    theta=1000000.0, tied=tied, use_sliding_window=False)


CATALOGUE: dict[str, ModelSpec] = {
    "gpt2": _gpt2(12, 768, 12),
    "gpt2-medium": _gpt2(24, 1024, 16),
    "gpt2-large": _gpt2(36, 1280, 20),
    "gpt2-xl": _gpt2(48, 1600, 25),
    "gpt3-175b": _gpt(96, 12288, 96, note=(
        "Brown et al. 2020, Table 2.1: sequences of 2048; vocabulary 51200, which is 50257 padded "
        "as Megatron-LM does; all attention dense")),
    "megatron-1.7b": _megatron(24, 2304, 24),
    "megatron-3.6b": _megatron(30, 3072, 32),
    "megatron-7.5b": _megatron(36, 4096, 32),
    "megatron-18b": _megatron(40, 6144, 48),
    "megatron-39b": _megatron(48, 8192, 64),
    "megatron-76b": _megatron(60, 10240, 80),
    "megatron-145b": _megatron(80, 12288, 96),
    "megatron-310b": _megatron(96, 16384, 128),
    "megatron-530b": _megatron(105, 20480, 128),
    "megatron-1t": _megatron(128, 25600, 160),
    "llama2-7b": _llama2(32, 4096, 32, 32, 11008),
    "llama2-13b": _llama2(40, 5120, 40, 40, 13824),
    "llama2-70b": _llama2(80, 8192, 64, 8, 28672),
    "llama3-8b": _llama3(32, 4096, 32, 14336, seq_len=8192),
    "llama3-70b": _llama3(80, 8192, 64, 28672, seq_len=8192),
    "llama3.1-8b": _llama3(32, 4096, 32, 14336),
    "llama3.1-70b": _llama3(80, 8192, 64, 28672),
    "llama3.1-405b": _llama3(126, 16384, 128, 53248),
    "llama3.2-1b": _llama3(16, 2048, 32, 8192, factor=32.0, tied=True, head_dim=64),
    "llama3.2-3b": _llama3(28, 3072, 24, 8192, factor=32.0, tied=True, head_dim=128),
    "mistral-7b": _decoder(
        "mistral", 32, 4096, 32, 8, 14336, 32000, 32768, sliding_window=4096,
        note="v0.1. Attention is within a window of 4096 tokens and counted in full: "
             "exact for sequences up to 4096"),
    "mixtral-8x7b": _decoder(
        "mixtral", 32, 4096, 32, 8, 14336, 32000, 32768, theta=1000000.0, sliding_window=None,
        num_local_experts=8, num_experts_per_tok=2,
        note="Routing depends on data: every expert is taken to get an equal share of the tokens"),
    "qwen2.5-0.5b": _qwen25(24, 896, 14, 2, 4864, tied=True, vocabulary=151936, seq_len=32768),
    "qwen2.5-1.5b": _qwen25(28, 1536, 12, 2, 8960, tied=True, vocabulary=151936),
    "qwen2.5-3b": _qwen25(36, 2048, 16, 2, 11008, tied=True, vocabulary=151936, seq_len=32768),
    "qwen2.5-7b": _qwen25(28, 3584, 28, 4, 18944, tied=False),
    "qwen2.5-14b": _qwen25(48, 5120, 40, 8, 13824, tied=False),
    "qwen2.5-32b": _qwen25(64, 5120, 40, 8, 27648, tied=False),
    "qwen2.5-72b": _qwen25(80, 8192, 64, 8, 29568, tied=False),
    "bert-large": ModelSpec(note="uncased, trained on masked tokens", config={
        "model_type": "bert", "architectures": ["BertForMaskedLM"], "num_hidden_layers": 24,
        "hidden_size": 1024, "num_attention_heads": 16, "intermediate_size": 4096,
        "vocab_size": 30522, "max_position_embeddings": 512}),
    "t5-3b": ModelSpec(note="encoder and decoder sequences of equal length", config={
        "model_type": "t5", "architectures": ["T5ForConditionalGeneration"], "d_model": 1024,
        "d_kv": 128, "d_ff": 16384, "num_layers": 24, "num_decoder_layers": 24, "num_heads": 32,
        "vocab_size": 32128, "decoder_start_token_id": 0, "pad_token_id": 0}),
    "vit-huge": ModelSpec(note="patches of 14, images of 224, 1000 classes", config={
        "model_type": "vit", "architectures": ["ViTForImageClassification"],
        "num_hidden_layers": 32, "hidden_size": 1280, "num_attention_heads": 16,
        "intermediate_size": 5120, "image_size": 224, "patch_size": 14, "num_labels": 1000}),
    "resnet-50": ModelSpec(note="images of 224, 1000 classes", config={
        "model_type": "resnet", "architectures": ["ResNetForImageClassification"],
        "embedding_size": 64, "hidden_sizes": [256, 512, 1024, 2048], "depths": [3, 4, 6, 3],
        "layer_type": "bottleneck", "num_labels": 1000}),
}

ALIASES: dict[str, str] = {
    "gpt2-small": "gpt2", "gpt3": "gpt3-175b", "gpt-3": "gpt3-175b", "gpt-3-175b": "gpt3-175b",
    "megatron-1.0t": "megatron-1t", "llama-2-7b": "llama2-7b", "llama-2-13b": "llama2-13b",
    "llama-2-70b": "llama2-70b", "llama-3-8b": "llama3-8b", "llama-3-70b": "llama3-70b",
    "llama-3.1-8b": "llama3.1-8b", "llama-3.1-70b": "llama3.1-70b",
    "llama-3.1-405b": "llama3.1-405b", "llama3-405b": "llama3.1-405b",
    "llama-3.2-1b": "llama3.2-1b", "llama-3.2-3b": "llama3.2-3b", "mistral-7b-v0.1": "mistral-7b",
    "mixtral": "mixtral-8x7b", "bert-large-uncased": "bert-large", "vit-h": "vit-huge",
    "vit-huge-14": "vit-huge", "resnet50": "resnet-50",
}


def trace_named(name: str) -> LayerGraph:
    """Trace a model of the catalogue afresh."""
    from profiler.hugging_face import trace_hugging_face

    name = ALIASES.get(name, name)
    if name not in CATALOGUE:
        raise UnknownName("model", name, CATALOGUE)
    spec = CATALOGUE[name]
    return trace_hugging_face(spec.config, name=name, note=spec.note)


def file_text(graph: LayerGraph) -> str:
    """The text of a catalogue file."""
    return documents.dump(graph, indent=None)


@click.command()
@click.argument("names", nargs=-1)
def main(names: tuple[str, ...]) -> None:
    """Trace the models named (or all) and write their files."""
    unknown = [name for name in names if name not in CATALOGUE]
    if unknown:
        raise click.UsageError(str(UnknownName("model", unknown[0], CATALOGUE)))
    MODELS_DIR.mkdir(exist_ok=True)
    for name in names or CATALOGUE:
        graph = trace_named(name)
        documents.write_atomically(MODELS_DIR / f"{name}.json", file_text(graph))
        click.echo(f"{name}: {len(graph.layers)} layers, {graph.num_parameters:,} parameters")


if __name__ == "__main__":
    main()
