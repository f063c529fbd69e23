"""Models of the cases that the catalogue has not: small builders of LayerGraphs, without torch.

`decoder` writes down a transformer by its published shape, with the parameters, FLOPs and saved
activations that a trace of the same shape has (`test_builder_agrees_with_the_catalogue`).
"""

from __future__ import annotations

from dataclasses import replace

from profiler.layer_graph import (
    AttentionShape,
    Edge,
    Extent,
    Layer,
    LayerGraph,
    LayerKind,
    MatmulShape,
    Op,
    Parameter,
    Split,
    TensorGroup,
    TensorParallel,
    Tie,
)

__all__ = ["chain", "decoder", "gpt_13b", "join", "mlp_chain", "tower", "with_lora",
           "with_num_blocks"]


def per_token(count: int) -> Extent:
    return Extent(per_sample=(0, count, 0))


def fixed(count: int) -> Extent:
    return Extent(fixed=(count, 0, 0))


def _saved(name: str, count: int, split: Split, *, bytes_per_element: int | None = None,
           made_by_matmul: bool = False, is_input: bool = False) -> TensorGroup:
    return TensorGroup(name=name, elements=per_token(count), split=split, is_input=is_input,
                       bytes_per_element=bytes_per_element, kept_by_selective=made_by_matmul)


def _matmul(name: str, split: Split, columns: int, inner: int, *, rows: int = 1,
            groups: int = 1) -> Op:
    """`rows` rows a token by (inner x columns)."""
    flops, moved = 2 * rows * columns * inner, rows * (columns + inner)
    return Op(name=name, kind="matmul", split=split, flops=per_token(flops),
              backward_flops=per_token(2 * flops), elements_moved=per_token(moved),
              backward_elements_moved=per_token(2 * moved), backward_kernels=2,
              matmul=MatmulShape(rows=per_token(rows), columns=fixed(columns),
                                 inner=fixed(inner), groups=groups))


def _pointwise(name: str, split: Split, moved: int) -> Op:
    return Op(name=name, kind="pointwise", split=split, elements_moved=per_token(moved),
              backward_elements_moved=per_token(2 * moved))


def _attention(heads: int, kv_heads: int, head_dim: int) -> Op:
    flops, moved = 4 * heads * head_dim, 2 * (heads + kv_heads) * head_dim
    return Op(name="attention", kind="attention", split="heads",
              flops=Extent(per_sample=(0, 0, flops)),
              backward_flops=Extent(per_sample=(0, 0, 5 * flops // 2)),
              elements_moved=per_token(moved), backward_elements_moved=per_token(2 * moved),
              attention=AttentionShape(heads=heads, kv_heads=kv_heads, head_dim=head_dim,
                                       queries=per_token(1), keys=per_token(1), causal=True))


def _norm_saves(name: str, hidden: int, gated: bool) -> tuple[TensorGroup, ...]:
    """A LLaMA norm computes in float32 and keeps that too; a LayerNorm kernel keeps its input."""
    whole = (_saved(name, hidden + 1, "sequence", bytes_per_element=4),) if gated else ()
    return (*whole, _saved(name, hidden, "sequence"), _saved(name, hidden, "gathered"))


def _block(hidden: int, ffn: int, heads: int, kv_heads: int, head_dim: int, *, gated: bool,
           experts: int, experts_per_token: int) -> LayerKind:
    q, kv, k = heads * head_dim, kv_heads * head_dim, experts_per_token
    up = 2 * ffn if gated else ffn
    each = (experts,) if experts > 1 else ()
    divides = {"ffn": ffn, "heads": heads, "kv_heads": kv_heads}
    router = () if experts == 1 else (Parameter(name="router", shape=(experts, hidden)),)
    between = [("up", up, True), ("act", ffn, False)]
    if gated:
        between.append(("product", ffn, False))
    return LayerKind(
        parameters=(
            Parameter(name="q", shape=(q, hidden), split="column", split_dim=0),
            Parameter(name="k", shape=(kv, hidden), split="column", split_dim=0),
            Parameter(name="v", shape=(kv, hidden), split="column", split_dim=0),
            Parameter(name="o", shape=(hidden, q), split="row", split_dim=1),
            Parameter(name="up", shape=(*each, up, hidden), split="column", split_dim=len(each)),
            Parameter(name="down", shape=(*each, hidden, ffn), split="row",
                      split_dim=len(each) + 1),
            Parameter(name="norm1", shape=(hidden,)), Parameter(name="norm2", shape=(hidden,)),
            *router),
        ops=(
            _pointwise("norm1", "sequence", 4 * hidden), _matmul("q", "column", q, hidden),
            _matmul("k", "column", kv, hidden), _matmul("v", "column", kv, hidden),
            _attention(heads, kv_heads, head_dim), _matmul("o", "row", hidden, q),
            _pointwise("norm2", "sequence", 4 * hidden),
            _matmul("up", "column", up, hidden, rows=k, groups=experts),
            _pointwise("act", "feature", 3 * k * up),
            _matmul("down", "row", hidden, ffn, rows=k, groups=experts)),
        saved=(
            *_norm_saves("norm1", hidden, gated),
            _saved("rotary", q + kv, "feature"), _saved("v", kv, "feature", made_by_matmul=True),
            _saved("attention", q, "feature", made_by_matmul=True),
            *_norm_saves("norm2", hidden, gated),
            *(_saved(name, k * width, "feature", made_by_matmul=matmul)
              for name, width, matmul in between)),
        inputs=(_saved("input", hidden, "sequence", is_input=True),),
        backward_working_set=(_saved("gradients", hidden, "sequence"),
                              _saved("gradients", k * (up + ffn), "feature")),
        tensor_parallel=TensorParallel(divides=divides, entries=(per_token(hidden),) * 2,
                                       exits=(per_token(hidden),) * 2))


def _embedding(vocabulary: int, hidden: int) -> LayerKind:
    return LayerKind(
        parameters=(Parameter(name="weight", shape=(vocabulary, hidden), split="vocabulary",
                              split_dim=0),),
        ops=(Op(name="embedding", kind="embedding", split="vocabulary",
                elements_moved=per_token(2 * hidden), backward_elements_moved=per_token(hidden)),),
        saved=(_saved("input", 1, "sequence", bytes_per_element=8, is_input=True),),
        tensor_parallel=TensorParallel(divides={"vocabulary": vocabulary},
                                       exits=(per_token(hidden),)))


def _head(vocabulary: int, hidden: int) -> LayerKind:
    """The output matrix and the loss: logits in float32 are kept, their gradient is made."""
    return LayerKind(
        parameters=(Parameter(name="weight", shape=(vocabulary, hidden), split="vocabulary",
                              split_dim=0),),
        ops=(_matmul("logits", "vocabulary", vocabulary, hidden),
             _pointwise("loss", "vocabulary", 4 * vocabulary)),
        saved=(_saved("input", hidden, "gathered", is_input=True),
               _saved("logits", vocabulary, "vocabulary", bytes_per_element=4)),
        backward_working_set=(_saved("gradients", 2 * vocabulary, "vocabulary",
                                     bytes_per_element=4),),
        tensor_parallel=TensorParallel(divides={"vocabulary": vocabulary},
                                       entries=(per_token(hidden),)))


def chain(name: str, kinds: dict[str, LayerKind], layers: list[tuple[str, int]], width: int,
          ties: tuple[Tie, ...] = ()) -> LayerGraph:
    """Layers in a row, (kind, how many) in order, with `width` elements a token between them."""
    listed = tuple(Layer(name=f"{kind}.{i}", kind=kind)
                   for kind, count in layers for i in range(count))
    edges = tuple(Edge(source=i, target=i + 1, tensor="output", elements=per_token(width))
                  for i in range(len(listed) - 1))
    return LayerGraph(name=name, kinds=kinds, layers=listed, edges=edges, ties=ties)


def decoder(name: str, *, num_layers: int, hidden: int, ffn: int, heads: int, vocabulary: int,
            kv_heads: int | None = None, head_dim: int | None = None, gated: bool = True,
            tied: bool = False, experts: int = 1, experts_per_token: int = 1) -> LayerGraph:
    """A decoder-only transformer: embedding, blocks, output. `ffn` is of one expert."""
    block = _block(hidden, ffn, heads, kv_heads or heads, head_dim or hidden // heads,
                   gated=gated, experts=experts, experts_per_token=experts_per_token)
    kinds = {"embedding": _embedding(vocabulary, hidden), "block": block,
             "head": _head(vocabulary, hidden)}
    ties = (Tie(places=((0, "weight"), (num_layers + 1, "weight"))),) if tied else ()
    return chain(name, kinds, [("embedding", 1), ("block", num_layers), ("head", 1)], hidden, ties)


def gpt_13b() -> LayerGraph:
    """GPT-3 13B: L40 h5120."""
    return decoder("gpt-13b", num_layers=40, hidden=5120, ffn=20480, heads=40, vocabulary=51200,
                   gated=False, tied=True)


def tower(name: str, *, num_layers: int, hidden: int, heads: int) -> LayerGraph:
    """Blocks alone, as a vision tower before a language model."""
    block = _block(hidden, 4 * hidden, heads, heads, hidden // heads, gated=False, experts=1,
                   experts_per_token=1)
    return chain(name, {"block": block}, [("block", num_layers)], hidden)


def with_num_blocks(graph: LayerGraph, num_blocks: int, name: str) -> LayerGraph:
    """A catalogue model with another number of its blocks."""
    first = next(i for i, layer in enumerate(graph.layers)
                 if layer.kind == graph.layers[i + 1].kind)
    block = graph.layers[first].kind
    old = sum(layer.kind == block for layer in graph.layers)
    names = [layer.kind for layer in graph.layers]
    kinds = names[:first] + [block] * num_blocks + names[first + old:]
    moved = {i: i + (num_blocks - old if i >= first + old - 1 else 0) for i in range(len(names))}
    inside = next(e for e in graph.edges if (e.source, e.target) == (first, first + 1))
    edges = [replace(e, source=moved[e.source], target=moved[e.target]) for e in graph.edges
             if not first <= e.source < first + old - 1]
    edges += [replace(inside, source=first + i, target=first + i + 1)
              for i in range(num_blocks - 1)]
    return replace(
        graph, name=name, layers=tuple(Layer(name=f"{kind}.{i}", kind=kind)
                                       for i, kind in enumerate(kinds)),
        edges=tuple(sorted((e for e in edges), key=lambda e: (e.source, e.target))),
        ties=tuple(replace(tie, places=tuple((moved[i], p) for i, p in tie.places))
                   for tie in graph.ties))


def with_lora(graph: LayerGraph, rank: int) -> LayerGraph:
    """Everything frozen but two matrices of `rank` beside each matrix of the repeated blocks."""
    count = {kind: sum(layer.kind == kind for layer in graph.layers) for kind in graph.kinds}
    kinds = {}
    for name, kind in graph.kinds.items():
        adapters = [Parameter(name=f"{p.name}.lora_{side}", shape=(rank, size))
                    for p in kind.parameters if len(p.shape) == 2 and count[name] > 1
                    for side, size in zip("ba", p.shape, strict=True)]
        frozen = tuple(replace(p, trainable=False) for p in kind.parameters)
        kinds[name] = replace(kind, parameters=(*frozen, *adapters))
    return replace(graph, name=f"{graph.name}-lora", kinds=kinds)


def join(name: str, first: LayerGraph, second: LayerGraph) -> LayerGraph:
    """One model after another: the last layer of `first` feeds the first of `second`."""
    shift = len(first.layers)
    kinds = ({f"first.{k}": v for k, v in first.kinds.items()}
             | {f"second.{k}": v for k, v in second.kinds.items()})
    layers = ([replace(x, name=f"first.{x.name}", kind=f"first.{x.kind}") for x in first.layers]
              + [replace(x, name=f"second.{x.name}", kind=f"second.{x.kind}")
                 for x in second.layers])
    bridge = replace(first.edges[-1], source=shift - 1, target=shift)
    moved = [replace(e, source=e.source + shift, target=e.target + shift) for e in second.edges]
    return LayerGraph(name=name, kinds=kinds, layers=tuple(layers),
                      edges=(*first.edges, bridge, *moved))


def mlp_chain(name: str, num_layers: int, parameters: int, width: int) -> LayerGraph:
    """Equal layers, each one matmul of `parameters` elements on `width` features."""
    kind = LayerKind(
        parameters=(Parameter(name="weight", shape=(parameters,)),),
        ops=(_matmul("linear", "replicated", parameters // width, width),),
        saved=(_saved("input", width, "replicated", is_input=True),))
    return chain(name, {"linear": kind}, [("linear", num_layers)], width)
