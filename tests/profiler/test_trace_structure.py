"""What the tracer makes of a model's structure: layers, edges, ties, frozen parts, splits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from profiler.documents import dump, parse, to_data
from profiler.errors import InternalError, InvalidInput, UnknownName
from profiler.hugging_face import trace_hugging_face
from profiler.layer_graph import Extent, LayerGraph
from profiler.trace import trace, trace_function
from profiler.trace_fit import Fit, image_points, token_points
from tests.profiler.trace_models import FAMILIES, PLAIN, LoRABlock, lora, residual


def names(graph: LayerGraph) -> list[str]:
    return [layer.name for layer in graph.layers]


def sources(graph: LayerGraph, target: str) -> list[str]:
    index = names(graph).index(target)
    return [graph.layers[edge.source].name for edge in graph.edges if edge.target == index]


@pytest.fixture(scope="module")
def llama() -> LayerGraph:
    return trace_hugging_face(FAMILIES["llama"], name="llama")


@pytest.fixture(scope="module")
def t5() -> LayerGraph:
    return trace_hugging_face(FAMILIES["t5"], name="t5")


def test_a_decoder_is_a_chain_of_embedding_blocks_norm_and_head(llama: LayerGraph) -> None:
    assert names(llama) == ["model.embed_tokens", "model.layers.0", "model.layers.1",
                            "model.layers.2", "model.norm", "lm_head"]
    assert [(e.source, e.target) for e in llama.edges] == [(i, i + 1) for i in range(5)]
    assert len({layer.kind for layer in llama.layers[1:4]}) == 1
    assert all(edge.elements == Extent(per_sample=(0, 64, 0)) and edge.bytes_per_element is None
               for edge in llama.edges)


def test_the_loss_belongs_to_the_head(llama: LayerGraph) -> None:
    assert [op.kind for op in llama.kind_of(5).ops if op.kind == "loss"] == ["loss"]
    assert not any(op.kind == "loss" for i in range(5) for op in llama.kind_of(i).ops)


def test_the_encoder_feeds_every_decoder_block(t5: LayerGraph) -> None:
    for block in range(3):
        assert "encoder.final_layer_norm" in sources(t5, f"decoder.block.{block}")
    assert sources(t5, "decoder.embed_tokens") == []  # its tokens come with the sample
    assert sources(t5, "encoder.block.2").count("encoder.block.0") == 1  # the position bias


def test_a_tied_table_is_one_parameter_at_every_place(t5: LayerGraph) -> None:
    (tie,) = t5.ties
    assert [(names(t5)[index], name) for index, name in tie.places] == [
        ("encoder.embed_tokens", "weight"), ("decoder.embed_tokens", "weight"),
        ("lm_head", "weight")]


def test_residual_networks_are_cut_at_their_blocks() -> None:
    graph = trace_hugging_face(FAMILIES["resnet"], name="resnet")
    assert names(graph)[1:3] == ["resnet.encoder.stages.0.layers.0",
                                 "resnet.encoder.stages.0.layers.1"]
    assert graph.sample == "images"


def test_a_skip_connection_is_an_edge() -> None:
    graph = trace(*PLAIN["unet"](), name="unet")
    assert names(graph) == ["down", "bottom", "up", "merge", "out"]
    assert sources(graph, "up") == ["down", "bottom"]  # the concatenation follows `up`
    skip = next(e for e in graph.edges if (e.source, e.target) == (0, 2))
    assert skip.elements == Extent(per_sample=(8 * 16 * 16, 0, 0)) and skip.has_gradient


def test_parameters_outside_every_layer_are_kept() -> None:
    graph = trace(*residual(), name="residual")
    assert [p.name for p in graph.kind_of(0).parameters] == ["weight", "bias", "/scale"]


def test_frozen_layers_have_no_weight_gradient() -> None:
    front = trace(*PLAIN["frozen front"](), name="front")
    flops = 2 * 16 * 16
    backward = [sum(op.backward_flops.at(1, 1) for op in front.kind_of(i).ops) for i in range(3)]
    assert backward == [0, 0, flops]
    assert [edge.has_gradient for edge in front.edges] == [False, False]
    middle = trace(*PLAIN["frozen middle"](), name="middle")
    backward = [sum(op.backward_flops.at(1, 1) for op in middle.kind_of(i).ops) for i in range(3)]
    assert backward == [flops, flops, 2 * flops]


@pytest.mark.parametrize(("name", "divides", "ports"), [
    ("llama", {"ffn": 160, "heads": 4, "kv_heads": 2}, (2, 2)),
    ("gpt2", {"ffn": 256, "heads": 4, "kv_heads": 4}, (2, 2)),
    ("gpt-neox", {"ffn": 160, "heads": 4, "kv_heads": 4}, (2, 2)),
    ("mixtral", {"experts": 4, "ffn": 160, "heads": 4, "kv_heads": 2}, (2, 2)),
    ("bert", {"ffn": 160, "heads": 4, "kv_heads": 4}, (2, 2)),
    ("vit", {"ffn": 256, "heads": 4, "kv_heads": 4}, (2, 2)),
])
def test_blocks_divide_by_heads_and_ffn(name: str, divides: Any, ports: Any) -> None:
    graph = trace_hugging_face(FAMILIES[name], name=name)
    index = next(i for i in range(len(graph.layers)) if any(
        op.attention for op in graph.kind_of(i).ops))
    parallel = graph.kind_of(index).tensor_parallel
    assert parallel is not None and parallel.divides == divides
    assert (len(parallel.entries), len(parallel.exits)) == ports


def test_column_row_and_vocabulary_dims() -> None:
    def splits(name: str, index: int) -> dict[str, Any]:
        graph = trace_hugging_face(FAMILIES[name], name=name)
        return {p.name: (p.split, p.split_dim) for p in graph.kind_of(index).parameters}

    llama = splits("llama", 1)
    assert llama["self_attn.k_proj.weight"] == ("column", 0)
    assert llama["self_attn.o_proj.weight"] == ("row", 1)
    assert llama["input_layernorm.weight"] == ("replicated", None)
    gpt2 = splits("gpt2", 2)  # Conv1D holds its weight as (in, out)
    assert gpt2["attn.c_attn.weight"] == ("column", 1)
    assert gpt2["attn.c_attn.bias"] == ("column", 0)
    assert gpt2["attn.c_proj.weight"] == ("row", 0)
    assert gpt2["attn.c_proj.bias"] == ("replicated", None)
    assert splits("gpt2", 0)["weight"] == ("vocabulary", 0)
    assert splits("gpt2", 1)["weight"] == ("replicated", None)  # positions


def test_low_rank_pairs_follow_their_column_matmul() -> None:
    graph = trace(*lora(), name="lora")
    splits = {p.name: p.split for p in graph.kind_of(0).parameters}
    assert (splits["gate.base.weight"], splits["gate.a.weight"], splits["gate.b.weight"],
            splits["down.weight"]) == ("column", "replicated", "column", "row")


def test_a_norm_over_the_divided_width_forbids_the_division() -> None:
    class Normed(LoRABlock):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            inner = torch.nn.functional.layer_norm(self.gate.base(self.norm(x)), (96,))
            return x + self.down(inner)

    graph = trace(nn.Sequential(Normed(), Normed()), torch.zeros(4, 32), name="normed")
    assert graph.kind_of(0).tensor_parallel is None


def test_a_traced_module_is_left_as_it_was() -> None:
    model, inputs = PLAIN["convnet"]()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    trace(model, inputs, name="convnet")
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    assert all(p.grad is None and p.dtype == torch.float32 for p in model.parameters())
    assert not any("forward" in vars(module) for module in model.modules())


def test_tracing_twice_gives_the_same_bytes_and_parses_back(t5: LayerGraph) -> None:
    again = trace_hugging_face(FAMILIES["t5"], name="t5")
    assert dump(again) == dump(t5)
    assert parse(LayerGraph, to_data(t5), "t5") == t5


def test_a_function_is_traced_by_its_name() -> None:
    graph = trace_function("tests.profiler.trace_models:mlp")
    assert names(graph) == ["0", "2", "4"]  # activations belong to the linear before them
    assert graph.source.python_function == "tests.profiler.trace_models:mlp"
    assert graph.source.loss == "none"
    assert graph.sample == "features"


@pytest.mark.parametrize(("function", "name"), [
    ("token_model", "cross-entropy"), ("regression", "mean-squared-error"), ("own_loss", "own")])
def test_the_loss_of_a_function_is_traced(function: str, name: str) -> None:
    graph = trace_function(f"tests.profiler.trace_models:{function}")
    assert graph.source.loss == name
    last = graph.kind_of(len(graph.layers) - 1)
    outside = [op for op in last.ops if op.name.startswith("outside")]
    assert outside, "the loss belongs to the last layer"
    if function == "token_model":  # float32, whatever the model computes in
        kept = sum(t.bytes_at(2, 8, 2) for t in last.saved if t.is_outside)
        assert kept >= 2 * 8 * 256 * 4


@pytest.mark.parametrize(("path", "message"), [
    ("tests.profiler.trace_models:module_alone", "example inputs are needed"),
    ("tests.profiler.trace_models:PLAIN", "is dict, not a function"),
    ("tests.profiler.trace_models:nothing", "cannot be imported"),
    ("nonsense", "package.module:function"),
    ("tests.profiler.trace_models:wrong_loss", "'hinge': there are cross-entropy, mean-squared"),
    ("tests.profiler.trace_models:no_total", r"has no total\(predictions, targets\)"),
    ("tests.profiler.trace_models:no_targets", "needs example targets"),
    ("tests.profiler.trace_models:layer_with_loss", "put it into a torch.nn.Sequential"),
])
def test_functions_that_cannot_be_used(path: str, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        trace_function(path)


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.shared(self.shared(x))


class TwoNames(Twice):
    def __init__(self) -> None:
        super().__init__()
        self.again = self.shared


class Branching(Twice):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.shared(x)
        return y if y.sum().item() > 0 else -y


def test_a_layer_called_twice_needs_two_names() -> None:
    with pytest.raises(InvalidInput, match="'shared' is called more than once"):
        trace(Twice(), torch.zeros(2, 8), name="twice")
    graph = trace(TwoNames(), torch.zeros(2, 8), name="two names")
    assert names(graph) == ["shared", "again"]
    assert len(graph.ties) == 2 and graph.num_parameters == 8 * 8 + 8


def test_models_that_cannot_be_traced() -> None:
    with pytest.raises(InvalidInput, match="control flow must not depend on data"):
        trace(Branching(), torch.zeros(2, 8), name="branching")
    with pytest.raises(InvalidInput, match="no parameters"):
        trace(nn.ReLU(), torch.zeros(2, 8), name="relu")
    with pytest.raises(InvalidInput, match="cannot be run"):
        trace(nn.Linear(8, 8), torch.zeros(2, 9), name="misfit")


@pytest.mark.parametrize(("config", "error", "message"), [
    ({"model_type": "llamma"}, UnknownName, "did you mean"),
    ({"architectures": ["LlamaForCausalLM"]}, InvalidInput, "no model_type"),
    ({"model_type": "llama", "num_hidden_layers": 10**9}, InvalidInput, "num_hidden_layers"),
    ({"model_type": "llama", "num_hidden_layers": 0}, InvalidInput, "num_hidden_layers"),
    ({"model_type": "gpt2", "n_embd": 10, "n_head": 3}, InvalidInput, "cannot be built"),
    ({"model_type": "wav2vec2"}, InvalidInput, "no class"),
])
def test_configs_that_cannot_be_used(config: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        trace_hugging_face(config, name="bad")


def test_remote_code_in_a_config_is_ignored() -> None:
    config = {**FAMILIES["llama"], "auto_map": {"AutoModelForCausalLM": "evil.Evil"}}
    graph = trace_hugging_face(config, name="llama")
    assert "auto_map" not in (graph.source.hugging_face_config or {})


def test_polynomials_are_exact_or_refused() -> None:
    points = token_points(16)
    fit = Fit.over(points)
    extent = fit.of(lambda i: 7 + 3 * points[i][1] + points[i][0] * (5 + 2 * points[i][1] ** 2))
    assert extent == Extent(fixed=(7, 3, 0), per_sample=(5, 0, 2))
    with pytest.raises(InternalError):
        fit.of(lambda i: points[i][1] ** 3)
    with pytest.raises(InternalError):
        fit.of(lambda i: points[i][0] ** 2)
    images = image_points()
    assert Fit.over(images).of(lambda i: 4 + 9 * images[i][0]) == Extent(
        fixed=(4, 0, 0), per_sample=(9, 0, 0))


class TokenMixer(nn.Module):
    """A feed-forward part that can be divided, and work on neighbouring tokens beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(24, 48), nn.Linear(48, 24)
        self.scale = nn.Parameter(torch.ones(24))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shifted = torch.cat([x[:, :1], x[:, :-1]], dim=1)
        return shifted * self.scale + self.down(torch.relu(self.up(x)))


class Flat(nn.Module):
    """Works on (batch x sequence, features), whose shard is not a shard of the sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(24), nn.Linear(24, 48), nn.Linear(48, 24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = self.norm(x.reshape(-1, 24))
        return x + self.down(torch.relu(self.up(inner))).view(x.shape)


class FeatureMLP(Flat):
    """Elementwise between its matmuls, token by token outside."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


@pytest.mark.parametrize("block, callers", [
    (FeatureMLP, ()), (TokenMixer, ("TokenMixer",)), (Flat, ("Flat",))])
def test_what_is_not_proven_to_work_on_shards_is_named(block: Any, callers: Any) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.head = nn.Embedding(301, 24), nn.Linear(24, 301)
            self.blocks = nn.ModuleList([block(), block()])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.table(x)
            for layer in self.blocks:
                x = layer(x)
            return self.head(x)
    graph = trace(Model(), torch.zeros(2, 16, dtype=torch.int64), name="model")
    split = graph.kind_of(1).tensor_parallel
    assert split is not None and split.divides == {"ffn": 48}
    assert split.callers == callers


def test_attention_is_a_matter_of_its_class(llama: LayerGraph) -> None:
    split = llama.kind_of(1).tensor_parallel
    assert split is not None and split.callers == ("LlamaAttention",)
    assert split.kv_parameters == ("self_attn.k_proj.weight", "self_attn.v_proj.weight")
