"""Random requests: a small model, a few devices with little memory, and what is asked of the plan.

`make_request(seed)` draws one. Memory is a share of what the model needs on one device, so that the
planner has to cut, divide, shard and recompute; where nothing fits it is raised until something
does.
"""

# ruff: noqa: C408 (keyword arguments read better in tables)
from __future__ import annotations

import random
from dataclasses import dataclass
from math import exp, log
from typing import Any

import torch
from torch import nn

from executor.losses import cross_entropy, mean_squared_error
from executor.models import build_module
from planner import search
from planner.layout import Layout
from planner.request import Request
from profiler.errors import Infeasible, InvalidInput
from profiler.hugging_face import trace_hugging_face
from profiler.layer_graph import LayerGraph
from profiler.trace import trace_function
from tests.executor.plain import PLAIN
from tests.planner.instances import make_topology, whole_bytes

__all__ = ["MODELS", "Question", "batch_of", "make_model", "make_question", "module_of", "plan"]

LENGTH = 24
NO_DROPOUT = dict(attention_dropout=0.0, hidden_dropout=0.0, residual_dropout=0.0,
                  embedding_dropout=0.0, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
                  hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, dropout_rate=0.0)

DECODERS = ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "phi", "starcoder2",
            "granite", "olmo", "cohere", "mixtral")
OTHERS = ("gpt2", "gpt_neox", "bert", "t5", "opt", "vit")
MODELS = (*DECODERS, *OTHERS, *PLAIN)
"""Every family, in the order of the requests' numbers."""


@dataclass(frozen=True, slots=True)
class Question:
    """One request to the planner; `share` of the memory of one device is in each."""

    number: int
    model: str
    config: dict[str, Any]
    hosts: int
    per_host: int
    share: float
    request: dict[str, Any]


def _config(name: str, rng: random.Random) -> dict[str, Any]:
    heads = rng.choice([2, 4, 4, 6])
    width = heads * (head := rng.choice([4, 8]))
    kv = rng.choice([k for k in (1, 2, 3, 4, 6) if heads % k == 0])
    layers, inner = rng.randint(1, 3), heads * rng.choice([4, 10])
    vocabulary = rng.choice([61, 97, 130, 257])
    common = NO_DROPOUT | dict(model_type=name, vocab_size=vocabulary, pad_token_id=0,
                               bos_token_id=1, eos_token_id=2)
    decoder = common | dict(
        hidden_size=width, num_attention_heads=heads, num_hidden_layers=layers,
        intermediate_size=inner, max_position_embeddings=64)
    if name in DECODERS:
        tied = rng.random() < 0.5
        more = dict(num_key_value_heads=kv, head_dim=head, tie_word_embeddings=tied)
        if name == "mixtral":
            more |= dict(num_local_experts=4, num_experts_per_tok=rng.choice([1, 2]),
                         max_position_embeddings=128)
        return decoder | more
    return {
        "gpt2": common | dict(n_layer=layers, n_embd=width, n_head=heads, n_positions=64),
        "gpt_neox": decoder, "bert": decoder,
        "opt": decoder | dict(word_embed_proj_dim=width, ffn_dim=inner, dropout=0.0),
        "t5": common | dict(d_model=width, d_ff=inner, d_kv=head, num_heads=heads,
                            num_layers=min(layers, 3), n_positions=64),
        "vit": NO_DROPOUT | dict(
            model_type="vit", hidden_size=width, num_attention_heads=heads, image_size=16,
            num_hidden_layers=layers, intermediate_size=inner, patch_size=4),
    }[name]


def make_question(number: int) -> Question:
    """The request of a number: families in turn, all else drawn. Those of one family share a model,
    as a trace takes longer than a plan and a run."""
    rng = random.Random(number)
    name = MODELS[number % len(MODELS)]
    config = {} if name in PLAIN else _config(name, rng)
    if number >= len(MODELS):
        config = make_question(number % len(MODELS)).config
    hosts, per_host = rng.choice([(1, 2), (1, 4), (1, 4), (2, 2), (1, 3), (1, 6), (2, 4)])
    devices = hosts * per_host
    request: dict[str, Any] = dict(global_batch=rng.choice([2, 4, 4, 6, 8]), precision="fp32",
                                   seq_len=1 if name in {"vit", *PLAIN} - {"tokens"} else LENGTH)
    for axis, chance in (("tp", 0.4), ("pp", 0.3)):  # on toy devices alone, they seldom pay
        if rng.random() < chance:
            request[axis] = 2
            break
    request["use_all_devices"] = rng.random() < 0.6
    share = exp(rng.uniform(log(0.3), log(1.2))) / min(devices, 4)
    return Question(number, name, config, hosts, per_host, share, request)


def make_model(question: Question) -> LayerGraph:
    """Trace the model of a request."""
    if question.model in PLAIN:
        return trace_function(f"tests.executor.plain:{question.model}", name=question.model)
    return trace_hugging_face(question.config, name=question.model)


def plan(question: Question, graph: LayerGraph) -> Layout:
    """The planner's answer: with more memory if nothing fits, without a demand that is illegal."""
    demands = dict(question.request)
    share = question.share
    while True:
        request = Request(**demands, memory_margin=0.0)
        memory = 2**21 + int(whole_bytes(graph, request) * share)
        topology = make_topology(question.hosts, question.per_host, memory,
                                 rng=random.Random(question.number))
        try:
            return search.search(graph, topology, request)
        except Infeasible:
            share *= 1.3
        except InvalidInput:
            for demand in ("use_all_devices", "tp", "pp"):
                if demands.pop(demand, None):
                    break
            else:
                raise


def module_of(graph: LayerGraph, dtype: torch.dtype) -> nn.Module:
    """The module with weights that hide no fault: none is zero or constant."""
    model = build_module(graph, seed=0).to(dtype)
    if hasattr(model, "config"):
        model.config._experts_implementation = "eager"  # the fused one knows no float64
    torch.manual_seed(1)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.data += 0.02 * torch.randn_like(parameter)
    return model


def batch_of(graph: LayerGraph, layout: Layout, dtype: torch.dtype) -> tuple[Any, Any, Any]:
    """(inputs, targets, loss) of one global batch, with unequal numbers of targets."""
    torch.manual_seed(layout.request.global_batch)
    batch, length = layout.request.global_batch, layout.request.seq_len
    config = graph.source.hugging_face_config
    if config is None:
        inputs, targets = PLAIN[graph.name].batch(batch, length, dtype)
        loss = mean_squared_error() if targets.dtype.is_floating_point else cross_entropy()
        return inputs, targets, loss
    if graph.sample == "images":
        images = torch.randn(batch, 3, 16, 16, dtype=torch.float64).to(dtype)
        return {"pixel_values": images}, torch.randint(0, 2, (batch,)), cross_entropy()
    tokens = torch.randint(0, config["vocab_size"], (batch, length + 1))
    targets = tokens[:, 1:].masked_fill(
        torch.rand(batch, length) < torch.linspace(0, 0.9, batch)[:, None], -100)
    inputs = {"input_ids": tokens[:, :-1].contiguous()}
    if config["model_type"] == "t5":
        inputs["decoder_input_ids"] = tokens.flip(1)[:, :-1].contiguous()
    return inputs, targets, cross_entropy()
