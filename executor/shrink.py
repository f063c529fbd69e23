"""A layout and its model made small enough for a few CPU processes, and still of their kind.

The model keeps its class, its structure and everything that makes layouts go wrong (ties, grouped
heads, biases, fused matrices), with narrow layers and few blocks. Degrees above 2 become 2, in the
order pp, tp, dp_shard, dp_replicate, as long as the processes suffice. A small block takes the
choices of a block of the large model, spread over all of them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from executor.legality import choices, stage_of_layers
from planner.layout import Axis, Choice, LayerRun, Layout, Reference, Schedule, Stage
from profiler.errors import InvalidInput
from profiler.layer_graph import LayerGraph

__all__ = ["Small", "shrink_config", "shrink_layout"]

WIDTH, HEADS, VOCABULARY, LENGTH = 64, 4, 8209, 16
"""Sizes of a shrunken model. The vocabulary is odd, so that its shards are uneven."""

_SIZES: dict[str, int] = {
    "hidden_size": WIDTH, "n_embd": WIDTH, "d_model": WIDTH, "embedding_size": WIDTH,
    "intermediate_size": 96, "n_inner": 96, "d_ff": 96, "ffn_dim": 96, "moe_intermediate_size": 96,
    "encoder_ffn_dim": 96, "decoder_ffn_dim": 96,
    "num_attention_heads": HEADS, "n_head": HEADS, "num_heads": HEADS,
    "encoder_attention_heads": HEADS, "decoder_attention_heads": HEADS,
    "head_dim": WIDTH // HEADS, "d_kv": WIDTH // HEADS, "vocab_size": VOCABULARY,
    "image_size": 32, "patch_size": 8}
_AT_MOST = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2}
_COUNTS = ("num_hidden_layers", "n_layer", "num_layers", "num_decoder_layers", "encoder_layers",
           "decoder_layers")
_DROPOUT = re.compile(r".*(dropout|drop|pdrop)(_rate|_prob)?$")
_TOKEN = re.compile(r"(bos|eos|pad|decoder_start|sep|mask|unk)_token_id$")
_NUMBERED = re.compile(r"(.*\.)(\d+)((?:\.[^.\d]+)*)$")


def shrink_config(config: Mapping[str, Any], num_blocks: int) -> dict[str, Any]:
    """The Hugging Face config with small sizes, no dropout, and `num_blocks` blocks at most."""
    small = dict(config)
    for key, value in config.items():
        if key in _SIZES and isinstance(value, int):
            small[key] = _SIZES[key]
        elif key in _AT_MOST and isinstance(value, int):
            small[key] = min(value, _AT_MOST[key])
        elif key in _COUNTS and isinstance(value, int):
            small[key] = min(value, num_blocks)
        elif _DROPOUT.match(key) and isinstance(value, float):
            small[key] = 0.0
        elif _TOKEN.match(key) and isinstance(value, int):
            small[key] = min(value, 2)
    heads = next((config[k] for k in ("num_attention_heads", "n_head") if k in config), None)
    grouped = config.get("num_key_value_heads")
    if isinstance(grouped, int):
        small["num_key_value_heads"] = HEADS if grouped == heads else HEADS // 2
    for key in ("attn_pdrop", "resid_pdrop", "embd_pdrop", "hidden_dropout_prob",
                "attention_probs_dropout_prob", "dropout_rate", "attention_dropout", "dropout"):
        small.setdefault(key, 0.0)  # a default of the class may be above 0
    return small


@dataclass(frozen=True, slots=True, kw_only=True)
class Small:
    """The shrunken layout's shape, before its model is traced: `num_blocks` blocks are needed."""

    layout: Layout
    num_blocks: int

    @classmethod
    def of(cls, layout: Layout, max_processes: int) -> Small:
        """Degrees, schedule and batch; the stages follow once the small model is known."""
        degrees: dict[str, int] = {}
        left = max_processes
        order: tuple[Axis, ...] = ("pp", "tp", "dp_shard", "dp_replicate")
        for axis in order:
            degrees[axis] = min(layout.mesh.degree(axis), 2, max(left, 1))
            left //= degrees[axis]
        mesh = replace(layout.mesh, pp=degrees["pp"], tp=degrees["tp"], host_groups=(),
                       dp_shard=degrees["dp_shard"], dp_replicate=degrees["dp_replicate"])
        interleaved = layout.schedule.name == "interleaved" and mesh.pp > 1
        chunks = 2 if interleaved else 1
        name = layout.schedule.name
        if name == "interleaved" and not interleaved:
            name = "1f1b"
        count = 2 * mesh.pp if mesh.pp > 1 else min(layout.num_micro_batches, 2)
        request = replace(
            layout.request, global_batch=mesh.dp * count, precision="fp32", pp=None, tp=None,
            dp_replicate=None, dp_shard=None, micro_batch=None, schedule=None, recompute=None,
            seq_len=min(layout.request.seq_len, LENGTH))
        small = replace(
            layout, mesh=mesh, request=request, micro_batch=1, num_micro_batches=count,
            schedule=Schedule(name=name, chunks=chunks,
                              gradient_sync=layout.schedule.gradient_sync),
            prediction=None, proof=None, alternatives=())
        return cls(layout=small, num_blocks=max(4, 2 * mesh.pp * chunks))


def shrink_layout(small: Layout, large: Layout, small_graph: LayerGraph, graph: LayerGraph
                  ) -> Layout:
    """Give the small layout its stages.

    Raises:
        InvalidInput: the small model has a layer of a name that the large one lacks.
    """
    origin = _origins(small_graph, graph)
    chosen, stage_of = choices(large), stage_of_layers(large)
    count, before = small.mesh.pp * small.schedule.chunks, len(large.stages)
    wanted = [stage_of[o] * count // before for o in origin]
    if sorted(set(wanted)) != list(range(count)) or wanted != sorted(wanted):
        wanted = [i * count // len(origin) for i in range(len(origin))]
    groups: list[list[tuple[int, Choice]]] = [[] for _ in range(count)]
    for index, (stage, source) in enumerate(zip(wanted, origin, strict=True)):
        groups[stage].append((index, chosen[source]))
    stages = tuple(Stage(runs=tuple(LayerRun(first_layer=i, num_layers=1, choice=choice)
                                    for i, choice in group)) for group in groups)
    return replace(small, stages=stages, model=Reference(name=small_graph.name))


def _origins(small: LayerGraph, large: LayerGraph) -> list[int]:
    """For each layer of the small model, the layer of the large one whose choices it takes."""
    by_name = {layer.name: index for index, layer in enumerate(large.layers)}
    blocks_large, blocks_small = _blocks(large), _blocks(small)
    origins = []
    for layer in small.layers:
        found = _NUMBERED.match(layer.name)
        name = layer.name
        if found and (found[1], found[3]) in blocks_large:
            numbers, few = blocks_large[found[1], found[3]], blocks_small[found[1], found[3]]
            place = few.index(int(found[2])) * len(numbers) // len(few)
            name = f"{found[1]}{numbers[place]}{found[3]}"
        if name not in by_name:
            raise InvalidInput(f"the shrunken model has a layer {layer.name!r}, of which the model "
                               f"of "
                               f"the layout has no like: it cannot be verified this way")
        origins.append(by_name[name])
    return origins


def _blocks(graph: LayerGraph) -> dict[Any, list[int]]:
    found: dict[Any, list[int]] = {}
    for layer in graph.layers:
        match = _NUMBERED.match(layer.name)
        if match:
            found.setdefault((match[1], match[3]), []).append(int(match[2]))
    return found
