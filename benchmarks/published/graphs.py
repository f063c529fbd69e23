"""LayerGraphs of decoder-only transformers from their dimensions, without torch.

What the tracer finds in the two families of the catalogue (GPT2LMHeadModel, LlamaForCausalLM),
written as formulas, so that a model that is known only by its dimensions can be priced.
`tests/benchmarks/test_published.py` compares them with the catalogue's traced files: they are
equal, number for number. Beyond the catalogue they allow fewer key-value heads and any feed-forward
width in GPT blocks, no learned positions (ALiBi, rotary), and untied embeddings.

Symbols: h = hidden, q = heads * head_dim, k = kv_heads * head_dim, f = feed-forward width, V =
vocabulary, P = learned positions. All extents are per token of a sample unless named otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from profiler.layer_graph import (
    AttentionShape,
    Edge,
    Extent,
    Layer,
    LayerGraph,
    LayerKind,
    MatmulShape,
    Op,
    OpKind,
    Parameter,
    Split,
    TensorGroup,
    TensorParallel,
    Tie,
)

__all__ = ["Dimensions", "make_graph"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Dimensions:
    """What the costs of a decoder-only transformer depend on.

    gated: the Llama family (RMSNorm, rotary positions, SwiGLU, no biases, no dropout), else the GPT
        family (LayerNorm, GELU, biases, and dropout unless left out). positions: learned ones; 0
        for none.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocabulary: int
    gated: bool
    positions: int = 0
    tied: bool = False
    dropout: bool = True


def _tokens(count: int) -> Extent:
    return Extent(per_sample=(0, count, 0))


def _fixed(count: int) -> Extent:
    return Extent(fixed=(count, 0, 0))


def _mixed(count: int, per_token: int) -> Extent:
    return Extent(fixed=(count, 0, 0), per_sample=(0, per_token, 0))


def _by_length(fixed: int, per_length: int = 0, per_token: int = 0) -> Extent:
    return Extent(fixed=(fixed, per_length, 0), per_sample=(0, per_token, 0))


def _matmul(name: str, split: Split, inner: int, columns: int, *, bias: bool,
            backward_extra: int = 0, kernels: int = 2) -> Op:
    """One linear layer: forward, and both gradients (and the bias's) backward."""
    weight, biases = inner * columns, columns if bias else 0
    return Op(
        name=f"{name}.matmul" if name else "matmul", kind="matmul", split=split,
        flops=_tokens(2 * weight), backward_flops=_tokens(4 * weight),
        elements_moved=_mixed(weight + biases, inner + columns),
        backward_elements_moved=_mixed(2 * weight + biases, 2 * inner + (3 if bias else 2) * columns
                                       + backward_extra),
        backward_kernels=kernels + bias,
        matmul=MatmulShape(rows=_tokens(1), columns=_fixed(columns), inner=_fixed(inner)))


def _attention(name: str, d: Dimensions, *, packed: bool) -> Op:
    """Fused attention; `packed`: the gradients of query, key and value are put together."""
    q, k = d.heads * d.head_dim, d.kv_heads * d.head_dim
    backward = 4 * (q + k) + (2 * (q + 2 * k) if packed else 0)
    length = Extent(fixed=(0, 1, 0))
    return Op(
        name=name, kind="attention", split="heads",
        flops=Extent(per_sample=(0, 0, 4 * q)), backward_flops=Extent(per_sample=(0, 0, 10 * q)),
        elements_moved=_tokens(2 * (q + k)), bytes_moved=_tokens(4 * d.heads),
        backward_elements_moved=_tokens(backward), backward_bytes_moved=_tokens(4 * d.heads),
        backward_kernels=2 if packed else 1,
        attention=AttentionShape(heads=d.heads, kv_heads=d.kv_heads, head_dim=d.head_dim,
                                 queries=length, keys=length, causal=True))


def _pointwise(name: str, split: Split, forward: int, backward: int, *, kind: OpKind = "pointwise",
               num_bytes: int = 0, backward_bytes: int = 0, kernels: int = 1,
               backward_kernels: int = 1, parameters: int = 0) -> Op:
    """Memory-bound work, in elements and bytes per token; `parameters` are read once."""
    return Op(name=name, kind=kind, split=split, kernels=kernels, backward_kernels=backward_kernels,
              elements_moved=_mixed(parameters, forward), bytes_moved=_tokens(num_bytes),
              backward_elements_moved=_mixed(2 * parameters, backward),
              backward_bytes_moved=_tokens(backward_bytes))


def _group(name: str, elements: Extent, split: Split, num_bytes: int | None = None, *,
           kept: bool = False, is_input: bool = False, is_outside: bool = False) -> TensorGroup:
    return TensorGroup(name=name, elements=elements, split=split, bytes_per_element=num_bytes,
                       kept_by_selective=kept, is_input=is_input, is_outside=is_outside)


def _copy(name: str, width: int) -> TensorGroup:
    """What a norm is given, in float32."""
    return TensorGroup(name=name, elements=_tokens(width), split="sequence", bytes_per_element=4,
                       is_copy_of_input=True)


def _weight(name: str, *shape: int, split: Split = "replicated", dim: int | None = None
            ) -> Parameter:
    return Parameter(name=name, shape=shape, split=split, split_dim=dim)


_IDS = _group("input", _tokens(1), "sequence", 8, is_input=True)


def _embedding(d: Dimensions) -> LayerKind:
    h, v = d.hidden, d.vocabulary
    hd = d.head_dim
    lookup = Op(name="embedding", kind="embedding", split="vocabulary",
                elements_moved=_tokens(2 * h), bytes_moved=_tokens(8),
                backward_elements_moved=_mixed((4 if d.tied else 1) * h * v, h),
                backward_bytes_moved=_tokens(8), backward_kernels=2 if d.tied else 1)
    if d.gated:
        more = [
            Op(name="model.pointwise", kind="pointwise", split="replicated",
               bytes_moved=_by_length(0, 24), kernels=2, backward_kernels=0),
            Op(name="rotary_emb.pointwise", kind="pointwise", split="replicated",
               elements_moved=_by_length(0, 2 * hd), bytes_moved=_by_length(2 * hd, 42 * hd + 16),
               kernels=8, backward_kernels=0),
            Op(name="rotary_emb.other", kind="other", split="replicated",
               bytes_moved=_by_length(0, 8 * hd), backward_kernels=0)]
        outside = _group("outside", _by_length(0, 2 * hd), "replicated", is_outside=True)
        held = (_group("activations", _by_length(0, 1), "replicated", 8),
                _group("activations", _by_length(0, 9 * hd // 2), "replicated", 4))
    else:
        more = [Op(name="transformer.pointwise", kind="pointwise", split="replicated",
                   bytes_moved=_by_length(0, 24), kernels=2, backward_kernels=0)]
        outside = _group("outside", _by_length(0, 1), "replicated", 8, is_outside=True)
        held = (_group("activations", _by_length(0, 1), "replicated", 8),)
    return LayerKind(
        parameters=(_weight("weight", v, h, split="vocabulary", dim=0),),
        buffer_bytes=4 * hd if d.gated else 0,
        ops=(lookup, *more),
        saved=(_IDS, outside), inputs=(_IDS,),
        forward_working_set=(_group("activations", _tokens(h), "sequence"), *held),
        backward_working_set=(_group("gradients", _tokens(h), "sequence"),),
        tensor_parallel=TensorParallel(divides={"vocabulary": v}, exits=(_tokens(h),)))


def _positions(d: Dimensions) -> LayerKind:
    h = d.hidden
    return LayerKind(
        parameters=(_weight("weight", d.positions, h),),
        ops=(Op(name="embedding", kind="embedding", split="replicated",
                elements_moved=_by_length(0, 2 * h), bytes_moved=_by_length(0, 8),
                backward_elements_moved=_by_length(d.positions * h, h),
                backward_bytes_moved=_by_length(0, 8)),
             Op(name="transformer.pointwise", kind="pointwise", split="sequence",
                elements_moved=_by_length(0, h, 2 * h),
                backward_elements_moved=_by_length(0, h, h)),
             _pointwise("drop.pointwise", "sequence", 2 * h, 2 * h, num_bytes=h,
                        backward_bytes=h)),
        saved=(_group("outside", _tokens(h), "sequence", 1, is_outside=True),),
        forward_working_set=(_group("activations", _tokens(3 * h), "sequence"),
                             _group("activations", _by_length(0, h), "replicated")),
        backward_working_set=(_group("gradients", _tokens(2 * h), "sequence"),))


def _gpt_block(d: Dimensions) -> LayerKind:
    h, f = d.hidden, d.ffn
    q, k = d.heads * d.head_dim, d.kv_heads * d.head_dim
    qkv = q + 2 * k
    norm = [_pointwise(f"{name}.normalization", "sequence", 2 * h + 2, 6 * h + 2,
                       kind="normalization", parameters=2 * h, backward_kernels=2)
            for name in ("ln_1", "ln_2")]
    dropout = [_pointwise(f"{name}.pointwise", "sequence", 2 * h, 2 * h, num_bytes=h,
                          backward_bytes=h) for name in ("attn.resid_dropout", "mlp.dropout")]
    kind = LayerKind(
        parameters=(
            _weight("ln_1.weight", h), _weight("ln_1.bias", h),
            _weight("attn.c_attn.weight", h, qkv, split="column", dim=1),
            _weight("attn.c_attn.bias", qkv, split="column", dim=0),
            _weight("attn.c_proj.weight", q, h, split="row", dim=0),
            _weight("attn.c_proj.bias", h), _weight("ln_2.weight", h), _weight("ln_2.bias", h),
            _weight("mlp.c_fc.weight", h, f, split="column", dim=1),
            _weight("mlp.c_fc.bias", f, split="column", dim=0),
            _weight("mlp.c_proj.weight", f, h, split="row", dim=0), _weight("mlp.c_proj.bias", h)),
        ops=(norm[0], _matmul("attn.c_attn", "column", h, qkv, bias=True),
             _attention("attn.attention", d, packed=True),
             _matmul("attn.c_proj", "row", q, h, bias=True), dropout[0],
             _pointwise("pointwise", "sequence", 6 * h, 0, kernels=2, backward_kernels=0),
             norm[1], _matmul("mlp.c_fc", "column", h, f, bias=True),
             _pointwise("mlp.act.pointwise", "feature", 2 * f, 3 * f),
             _matmul("mlp.c_proj", "row", f, h, bias=True), dropout[1]),
        saved=(_group("input", _tokens(h), "sequence", is_input=True),
               _group("ln_1", _tokens(2), "sequence"), _group("ln_1", _tokens(h), "gathered"),
               _group("attn.c_attn", _tokens(qkv), "feature", kept=True),
               _group("attn.attention", _tokens(q), "feature", kept=True),
               _group("attn.attention", _tokens(d.heads), "feature", 4, kept=True),
               _group("attn.resid_dropout", _tokens(h), "sequence", 1),
               _group("outside", _tokens(h), "sequence"),
               _group("ln_2", _tokens(2), "sequence"), _group("ln_2", _tokens(h), "gathered"),
               _group("mlp.c_fc", _tokens(f), "feature", kept=True),
               _group("mlp.act", _tokens(f), "feature"),
               _group("mlp.dropout", _tokens(h), "sequence", 1)),
        inputs=(_group("input", _tokens(h), "sequence", is_input=True),),
        kept_only_by_selective=tuple(_group(name, _tokens(h), "sequence", kept=True)
                                     for name in ("attn.c_proj", "mlp.c_proj")),
        forward_working_set=(_group("activations", _tokens(3 * h), "sequence"),),
        backward_working_set=(_group("gradients", _tokens(2 * h), "sequence"),
                              _group("gradients", _tokens(f), "feature")),
        tensor_parallel=_divides(d))
    if d.dropout:
        return kind
    return replace(kind, ops=tuple(op for op in kind.ops if op not in dropout),
                   saved=tuple(g for g in kind.saved if g.bytes_per_element != 1))


def _divides(d: Dimensions) -> TensorParallel:
    once = _tokens(d.hidden)
    keys = ("self_attn.k_proj.weight", "self_attn.v_proj.weight") if d.gated else ()
    return TensorParallel(divides={"ffn": d.ffn, "heads": d.heads, "kv_heads": d.kv_heads},
                          entries=(once, once), exits=(once, once), kv_parameters=keys,
                          callers=("LlamaAttention" if d.gated else "GPT2Attention",))


def _rms_norm(name: str, h: int) -> Op:
    return _pointwise(f"{name}.normalization", "sequence", 4 * h, 11 * h, kind="normalization",
                      num_bytes=28 * h + 24, backward_bytes=76 * h + 40, kernels=8,
                      backward_kernels=17, parameters=h)


def _llama_ops(d: Dimensions) -> tuple[Op, ...]:
    h, f = d.hidden, d.ffn
    q, k = d.heads * d.head_dim, d.kv_heads * d.head_dim
    hd = d.head_dim
    rotary = Op(name="self_attn.pointwise", kind="pointwise", split="feature",
                elements_moved=_by_length(0, 4 * hd, 8 * (q + k)),
                backward_elements_moved=_by_length(0, 4 * hd, 14 * (q + k)),
                kernels=8, backward_kernels=14)
    return (
        _rms_norm("input_layernorm", h),
        _matmul("self_attn.q_proj", "column", h, q, bias=False, backward_extra=3 * h, kernels=3),
        _matmul("self_attn.k_proj", "column", h, k, bias=False, backward_extra=5 * h, kernels=4),
        _matmul("self_attn.v_proj", "column", h, k, bias=False, backward_extra=2 * k, kernels=3),
        rotary,
        _pointwise("self_attn.other", "feature", 2 * (q + k), 0, kind="other", kernels=2,
                   backward_kernels=0),
        _attention("self_attn.attention", d, packed=False),
        _matmul("self_attn.o_proj", "row", q, h, bias=False),
        _pointwise("pointwise", "sequence", 6 * h, 0, kernels=2, backward_kernels=0),
        _rms_norm("post_attention_layernorm", h),
        _matmul("mlp.gate_proj", "column", h, f, bias=False, backward_extra=3 * h, kernels=3),
        _pointwise("mlp.act_fn.pointwise", "feature", 2 * f, 3 * f),
        _matmul("mlp.up_proj", "column", h, f, bias=False),
        _pointwise("mlp.pointwise", "feature", 3 * f, 6 * f, backward_kernels=2),
        _matmul("mlp.down_proj", "row", f, h, bias=False))


def _llama_block(d: Dimensions) -> LayerKind:
    h, f = d.hidden, d.ffn
    q, k = d.heads * d.head_dim, d.kv_heads * d.head_dim
    columns = {"self_attn.q_proj": (q, h), "self_attn.k_proj": (k, h), "self_attn.v_proj": (k, h)}
    mlp = {"mlp.gate_proj": (f, h), "mlp.up_proj": (f, h)}
    parameters = [
        *(_weight(f"{n}.weight", *s, split="column", dim=0) for n, s in columns.items()),
        _weight("self_attn.o_proj.weight", h, q, split="row", dim=1),
        *(_weight(f"{n}.weight", *s, split="column", dim=0) for n, s in mlp.items()),
        _weight("mlp.down_proj.weight", h, f, split="row", dim=1),
        _weight("input_layernorm.weight", h), _weight("post_attention_layernorm.weight", h)]

    def norm(name: str) -> list[TensorGroup]:
        given = [_copy(name, h), _group(name, _tokens(1), "sequence", 4)]
        made = [_group(name, _tokens(h + 1), "sequence", 4)]
        return [*(given if name == "input_layernorm" else made),
                _group(name, _tokens(h), "sequence"),
                _group(name, _tokens(h), "gathered")]

    return LayerKind(
        parameters=tuple(parameters), ops=_llama_ops(d),
        saved=(*norm("input_layernorm"), _group("self_attn", _tokens(q + k), "feature"),
               _group("self_attn.v_proj", _tokens(k), "feature", kept=True),
               _group("self_attn.attention", _tokens(q), "feature", kept=True),
               _group("self_attn.attention", _tokens(d.heads), "feature", 4, kept=True),
               *norm("post_attention_layernorm"),
               _group("mlp.gate_proj", _tokens(f), "feature", kept=True),
               _group("mlp.up_proj", _tokens(f), "feature", kept=True),
               _group("mlp.act_fn", _tokens(f), "feature"), _group("mlp", _tokens(f), "feature")),
        inputs=(_group("input", _tokens(h), "sequence", is_input=True),),
        kept_only_by_selective=(
            _group("self_attn.q_proj", _tokens(q), "feature", kept=True),
            _group("self_attn.k_proj", _tokens(k), "feature", kept=True),
            _group("self_attn.o_proj", _tokens(h), "sequence", kept=True),
            _group("mlp.down_proj", _tokens(h), "sequence", kept=True)),
        forward_working_set=(_group("activations", _tokens(h), "sequence"),
                             _group("activations", _tokens(4 * q + k), "feature")),
        backward_working_set=(_group("gradients", _tokens(h), "sequence"),
                              _group("gradients", _tokens(3 * f), "feature")),
        tensor_parallel=_divides(d))


def _final_norm(d: Dimensions) -> LayerKind:
    h = d.hidden
    entering = _group("input", _tokens(h), "sequence", is_input=True)
    if d.gated:
        return LayerKind(
            parameters=(_weight("weight", h),),
            ops=(_pointwise("pointwise", "sequence", 4 * h, 8 * h, num_bytes=28 * h + 24,
                            backward_bytes=76 * h + 40, kernels=8, backward_kernels=16,
                            parameters=h),),
            saved=(_copy("outside", h), _group("outside", _tokens(1), "sequence", 4),
                   _group("outside", _tokens(h), "sequence")),
            inputs=(entering,),
            forward_working_set=(_group("activations", _tokens(2 * h), "sequence"),
                                 _group("activations", _tokens(h + 1), "sequence", 4)),
            backward_working_set=(_group("gradients", _tokens(5 * h), "sequence", 4),))
    return LayerKind(
        parameters=(_weight("weight", h), _weight("bias", h)),
        ops=(_pointwise("normalization", "sequence", 2 * h + 2, 3 * h + 2, kind="normalization",
                        parameters=2 * h),),
        saved=(entering, _group("outside", _tokens(2), "sequence")), inputs=(entering,),
        forward_working_set=(_group("activations", _tokens(h), "sequence"),),
        backward_working_set=(_group("gradients", _tokens(2 * h), "sequence"),))


def _head(d: Dimensions) -> LayerKind:
    """The output layer, with the loss in float32."""
    h, v = d.hidden, d.vocabulary
    entering = _group("input", _tokens(h), "gathered", is_input=True)
    return LayerKind(
        parameters=(_weight("weight", v, h, split="vocabulary", dim=0),),
        ops=(_matmul("", "vocabulary", h, v, bias=False),
             _pointwise("outside.pointwise", "vocabulary", v, v, num_bytes=4 * v,
                        backward_bytes=4 * v),
             Op(name="outside.pointwise#2", kind="pointwise", split="sequence",
                bytes_moved=Extent(per_sample=(8, 32, 0)), kernels=2, backward_kernels=0),
             Op(name="outside.loss", kind="loss", split="vocabulary",
                bytes_moved=_mixed(8, 12 * v + 8), backward_bytes_moved=_mixed(16, 20 * v + 8),
                kernels=2, backward_kernels=3)),
        saved=(entering, _group("outside", _tokens(v), "vocabulary", 4, is_outside=True),
               _group("outside", _tokens(1), "sequence", 8, is_outside=True)),
        inputs=(entering,),
        kept_only_by_selective=(_group("outside", _tokens(v), "vocabulary", kept=True),),
        forward_working_set=(
            _group("activations", Extent(per_sample=(1, 2, 0)), "sequence", 8),
            _group("activations", _tokens(v), "vocabulary"),
            _group("activations", _mixed(2, v), "vocabulary", 4)),
        backward_working_set=(_group("gradients", _fixed(1), "sequence", 4),
                              _group("gradients", _mixed(1, 2 * v), "vocabulary", 4)),
        tensor_parallel=TensorParallel(divides={"vocabulary": v}, entries=(_tokens(h),)))


def make_graph(name: str, d: Dimensions) -> LayerGraph:
    """The LayerGraph of a model."""
    block = "LlamaDecoderLayer" if d.gated else "GPT2Block"
    norm = "LlamaRMSNorm" if d.gated else "LayerNorm"
    kinds = {"Embedding": _embedding(d)}
    order = [("embedding", "Embedding")]
    if d.positions:
        kinds["Embedding.2"] = _positions(d)
        order.append(("positions", "Embedding.2"))
    kinds |= {block: _llama_block(d) if d.gated else _gpt_block(d), norm: _final_norm(d),
              "Linear": _head(d)}
    order += [(f"layers.{i}", block) for i in range(d.layers)] + [("norm", norm),
                                                                 ("head", "Linear")]
    once = _tokens(d.hidden)
    return LayerGraph(
        name=name, kinds=kinds,
        layers=tuple(Layer(name=layer, kind=kind) for layer, kind in order),
        edges=tuple(Edge(source=i, target=i + 1, tensor="output", elements=once)
                    for i in range(len(order) - 1)),
        ties=(Tie(places=((0, "weight"), (len(order) - 1, "weight"))),) if d.tied else ())
