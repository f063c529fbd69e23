"""Tiny models of every family that the executor runs, with a batch and a loss for each."""

# ruff: noqa: C408 (keyword arguments read better in tables)
from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from executor.losses import Loss, cross_entropy, mean_squared_error
from profiler.documents import dump, load, write_atomically
from profiler.hugging_face import trace_hugging_face
from profiler.layer_graph import LayerGraph
from profiler.trace import trace_function
from tests.executor.plain import PLAIN

# The tracer wants the table's gradient to be the larger part of a working set at every length it
# tries: a vocabulary much larger than the longest sequence. It is odd, so that its shards are
# uneven.
VOCABULARY, LENGTH = 1021, 16
_TEXT = {"vocab_size": VOCABULARY, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None}
_LLAMA = dict(hidden_size=32, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
              intermediate_size=48, max_position_embeddings=64, attention_dropout=0.0, **_TEXT)
_SHORT = dict(hidden_size=32, num_hidden_layers=2, intermediate_size=48,
              max_position_embeddings=64, **_TEXT)
_ONE = dict(num_hidden_layers=1)
_PADDED = dict(pad_token_id=7)  # among the tokens drawn

CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2LMHeadModel", dict(
        model_type="gpt2", n_layer=3, n_embd=32, n_head=4, n_positions=64, attn_pdrop=0.0,
        resid_pdrop=0.0, embd_pdrop=0.0, **_TEXT)),
    "llama": ("LlamaForCausalLM", dict(model_type="llama", **_LLAMA)),
    "qwen2": ("Qwen2ForCausalLM", dict(model_type="qwen2", **_LLAMA)),
    "mixtral": ("MixtralForCausalLM", dict(
        model_type="mixtral", num_local_experts=4, num_experts_per_tok=2,
        **_LLAMA | {"num_hidden_layers": 2, "max_position_embeddings": 128})),
    "bert": ("BertForMaskedLM", dict(
        model_type="bert", hidden_size=32, num_hidden_layers=3, num_attention_heads=4,
        intermediate_size=64, max_position_embeddings=64, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0, vocab_size=VOCABULARY)),
    "qwen3": ("Qwen3ForCausalLM", dict(model_type="qwen3", head_dim=16, **_LLAMA)),
    "gemma": ("GemmaForCausalLM", dict(model_type="gemma", head_dim=16, **_LLAMA | _PADDED)),
    "neox": ("GPTNeoXForCausalLM", dict(
        model_type="gpt_neox", num_attention_heads=4, attention_dropout=0.0, hidden_dropout=0.0,
        **_SHORT)),
    "phi": ("PhiForCausalLM", dict(model_type="phi", **_LLAMA | _ONE)),
    "starcoder2": ("Starcoder2ForCausalLM", dict(
        model_type="starcoder2", residual_dropout=0.0, embedding_dropout=0.0, **_LLAMA | _ONE)),
    "granite": ("GraniteForCausalLM", dict(model_type="granite", **_LLAMA | _ONE)),
    "olmo": ("OlmoForCausalLM", dict(model_type="olmo", **_LLAMA | _ONE)),
    "vit": ("ViTForImageClassification", dict(
        model_type="vit", hidden_size=32, num_hidden_layers=3, num_attention_heads=4,
        intermediate_size=64, image_size=16, patch_size=4, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0)),
    "t5": ("T5ForConditionalGeneration", dict(
        model_type="t5", d_model=32, d_ff=64, d_kv=8, num_heads=4, num_layers=2,
        num_decoder_layers=2, vocab_size=VOCABULARY, dropout_rate=0.0, n_positions=64,
        decoder_start_token_id=0, tie_word_embeddings=True)),
}


FAMILIES = (*CONFIGS, *PLAIN)


@dataclass(frozen=True, slots=True)
class Tiny:
    """A model with data: inputs and targets of `batch` samples."""

    model: nn.Module
    inputs: Any
    targets: torch.Tensor
    loss: Loss


def build(name: str, batch: int, dtype: torch.dtype, seed: int = 0) -> Tiny:
    torch.manual_seed(seed)
    if name in PLAIN:
        model = PLAIN[name].model()
        inputs, targets = PLAIN[name].batch(batch, LENGTH, dtype)
        loss = mean_squared_error() if targets.dtype.is_floating_point else cross_entropy()
        return Tiny(model.to(dtype), inputs, targets, loss)
    import transformers

    class_name, config = CONFIGS[name]
    config = dict(config)
    built = transformers.AutoConfig.for_model(config.pop("model_type"), **config)
    model = getattr(transformers, class_name)(built).to(dtype).train()
    if name == "mixtral":
        model.config._experts_implementation = "eager"  # the fused one knows no float64
    for module in model.modules():  # a zero or constant start hides faults
        for key, parameter in module._parameters.items():
            if parameter is not None and (key == "bias" or parameter.dim() == 1):
                parameter.data += 0.02 * torch.randn_like(parameter)
    if name == "vit":
        images = torch.randn(batch, 3, 16, 16, dtype=torch.float64).to(dtype)
        return Tiny(model, {"pixel_values": images}, torch.randint(0, 2, (batch,)),
                    cross_entropy())
    tokens = torch.randint(3, VOCABULARY, (batch, LENGTH + 1))
    targets = tokens[:, 1:].clone()
    targets[torch.rand(batch, LENGTH) < torch.linspace(0, 0.9, batch)[:, None]] = -100  # unequal
    inputs = {"input_ids": tokens[:, :-1].contiguous()}
    if name == "t5":
        inputs["decoder_input_ids"] = torch.randint(3, VOCABULARY, (batch, LENGTH))
    return Tiny(model, inputs, targets, cross_entropy())


def graph(name: str, folder: Path) -> LayerGraph:
    """The LayerGraph of a tiny model, traced once and kept in `folder`."""
    path = folder / f"{name}.json"
    if not path.exists():
        if name in PLAIN:
            made = trace_function(f"tests.executor.plain:{name}", name=name)
        else:
            made = trace_hugging_face(CONFIGS[name][1], name=name)
        write_atomically(path, dump(made))
    return load(LayerGraph, path)
