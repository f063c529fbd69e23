"""From a row of a table to what the planner prices: a model, a topology, a request, a layout.

Whatever the row does not say itself is inferred here and listed in `Case.inferences`. Where a
published run was tuned over something that the row leaves out (micro-batch, recompute, chunks),
every value is a layout of its own and the fastest that fits is taken, as its authors took it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import Any, Literal

from benchmarks.published.graphs import Dimensions, make_graph
from benchmarks.published.hardware import stack_of, topology_of
from benchmarks.published.table import Cells, UnusableRow
from planner.layout import Choice, LayerRun, Layout, Mesh, Reference, Schedule, Stage
from planner.request import Request
from planner.topology import Topology
from profiler.layer_graph import LayerGraph

__all__ = ["Case", "make_case"]

MAX_LAYERS, MAX_WIDTH, MAX_VOCABULARY = 2048, 2**20, 2**24
MIXTURES = re.compile(r"experts|MoE|Mixtral|DeepSeek|Moonlight|-A\d+B|GPT.OSS|Nemotron_3", re.I)
WITHOUT_RECOMPUTE = "vtrain_single"
"""A source that does not state its recompute, and whose tables infer what it cannot have been."""
WITHOUT_PADDING = "vtrain_single"
"""A source whose vocabulary is not padded where it is not divided."""
OTHERS = re.compile(r"bert|t5_|mamba|hybrid|grpo|vision|multimodal|retro|mimo|llava", re.I)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A row as the planner sees it. layouts: the fastest of them that fits is meant."""

    graph: LayerGraph
    topology: Topology
    layouts: tuple[Layout, ...]
    inferences: tuple[str, ...]


def make_case(cells: Cells) -> Case:
    """The case of a row.

    Raises:
        UnusableRow: it cannot be priced; the message is the reason.
    """
    inferences: list[str] = []
    _refuse_what_is_not_modelled(cells)
    dimensions = _dimensions(cells, inferences)
    degrees = _degrees(cells, inferences)
    graph = _graph(cells.text("model")[:100] or "model", dimensions)
    topology = topology_of(cells, degrees["devices"], inferences)
    stack = stack_of(cells, inferences)
    request: dict[str, Any] = {
        "seq_len": _needed(cells, "seq"), "target": "any", "stack": stack,
        "precision": _precision(cells),
        "sequence_parallel": None if cells.text("sp") == "" else cells.text("sp") == "1"}
    layouts = _layouts(cells, graph, dimensions, degrees, request, inferences)
    return Case(graph=graph, topology=topology, layouts=layouts, inferences=tuple(inferences))


def _needed(cells: Cells, column: str, most: int = 10**7) -> int:
    value = cells.count(column, most=most)
    if value is None:
        raise UnusableRow(f"{column} is not given")
    return value


def _refuse_what_is_not_modelled(cells: Cells) -> None:
    model = cells.text("model")
    if cells.number("n_experts") or MIXTURES.search(model):
        raise UnusableRow("a mixture of experts")
    if OTHERS.search(model):
        raise UnusableRow("not the training of a decoder-only language model")
    if "LoRA" in model or "LoRA" in cells.text("notes"):
        raise UnusableRow("adapters (LoRA)")
    if "transgan" in model.lower():
        raise UnusableRow("layers of unlike widths whose dimensions are not given")
    if "offload=True" in cells.text("notes"):
        raise UnusableRow("parameters offloaded to the host")


# --- the model


def _dimensions(cells: Cells, inferences: list[str]) -> Dimensions:
    hidden = _needed(cells, "hidden", MAX_WIDTH)
    gated = cells.text("gated_mlp") == "1" or (
        not cells.text("gated_mlp") and bool(re.search("llama|qwen", cells.text("model"), re.I)))
    vocabulary = _vocabulary(cells, gated, inferences)
    heads = cells.count("heads", most=MAX_WIDTH)
    if heads is None:
        heads = max(1, hidden // 64 if hidden <= 1024 else hidden // 128)
        inferences.append(f"heads: {heads}")
    if hidden % heads:
        stated = heads
        heads = min((n for n in range(1, hidden + 1) if hidden % n == 0 and n % 8 == 0),
                    key=lambda n: (abs(n - stated), n), default=1)
        inferences.append(f"heads: {stated} do not divide {hidden}, taken as {heads}")
    kv_heads = min(heads, cells.count("kv_heads", most=MAX_WIDTH) or heads)
    if heads % kv_heads:
        raise UnusableRow("kv_heads do not divide heads")
    ffn = cells.count("ffn", most=MAX_WIDTH)
    if ffn is None:
        if gated:
            raise UnusableRow("ffn is not given")
        ffn = 4 * hidden
        inferences.append("ffn: 4 x hidden")
    seq = _needed(cells, "seq")
    family = f"{cells.text('source_id')} {cells.text('model')} {cells.text('impl')}"
    alibi = bool(re.search(r"mpt|bloom|tr11|foundry", family, re.I))
    modern = bool(re.search(r"h100|nemo|bridge|megatron_ci|gpt3_", family, re.I))
    positions = 0 if gated or alibi or modern else seq
    if not gated:
        inferences.append("positions: " + ("learned" if positions else "none to learn"))
    layers = cells.count("layers", most=MAX_LAYERS)
    if layers is None:
        layers = _layers(cells, hidden, ffn, gated, vocabulary)
        inferences.append(f"layers: {layers}, from the number of parameters")
    return Dimensions(layers=layers, hidden=hidden, heads=heads, kv_heads=kv_heads,
                      head_dim=hidden // heads, ffn=ffn, vocabulary=vocabulary, gated=gated,
                      positions=positions, tied=not gated and not modern,
                      dropout=not re.search("mpt|foundry", family, re.I))


def _vocabulary(cells: Cells, gated: bool, inferences: list[str]) -> int:
    text = cells.text("vocab")
    if match := re.fullmatch(r"~\s*(\d+)k", text):
        thousands = int(match[1])
        size = 250880 if thousands == 250 else thousands * 1000
        inferences.append(f"vocabulary: {size}")
        return size
    size = cells.count("vocab", most=MAX_VOCABULARY) or 0
    if not size:
        size = 32000 if gated else 51200
        inferences.append(f"vocabulary: {size}")
    tp = cells.count("tp") or 1
    padded = -(-size // (128 * tp)) * 128 * tp
    if gated or padded == size:
        return size
    if tp == 1 and cells.text("source_id") == WITHOUT_PADDING:
        inferences.append(f"vocabulary: {size}, not padded: by the times of the source the output "
                          "layer takes four times as long on one rank as divided over two")
        return size
    inferences.append(f"vocabulary: {size} padded to {padded}, as Megatron-LM does")
    return padded


def _layers(cells: Cells, hidden: int, ffn: int, gated: bool, vocabulary: int) -> int:
    billions = cells.number("params_b")
    if billions is None:
        raise UnusableRow("neither layers nor parameters are given")
    block = 4 * hidden * hidden + (3 if gated else 2) * hidden * ffn
    layers = round((billions * 1e9 - vocabulary * hidden) / block)
    if layers < 1 or layers > MAX_LAYERS:
        raise UnusableRow("the parameters do not fit the dimensions")
    return layers


@lru_cache(maxsize=512)
def _graph(name: str, dimensions: Dimensions) -> LayerGraph:
    return make_graph(name, dimensions)


# --- the layout


def _degrees(cells: Cells, inferences: list[str]) -> dict[str, int]:
    degrees = {name: cells.count(name, most=2**17) for name in ("tp", "pp", "cp", "dp", "gpus")}
    for name in ("tp", "pp", "cp"):
        if degrees[name] is None:
            if name != "cp":
                inferences.append(f"{name}: 1")
            degrees[name] = 1
    model = (degrees["tp"] or 1) * (degrees["pp"] or 1) * (degrees["cp"] or 1)
    dp, gpus = degrees["dp"], degrees["gpus"]
    if dp is None and gpus is None:
        raise UnusableRow("neither gpus nor dp is given")
    if dp is None and gpus is not None:
        dp = gpus // model
        inferences.append(f"dp: {dp}")
    if (cells.count("ep") or 1) > 1:
        inferences.append("ep: 1, the model is dense")
    if not dp or (gpus is not None and dp * model != gpus):
        raise UnusableRow("dp x tp x pp x cp is not gpus")
    return {"tp": degrees["tp"] or 1, "pp": degrees["pp"] or 1, "cp": degrees["cp"] or 1,
            "dp": dp, "devices": dp * model}


def _precision(cells: Cells) -> str:
    text = cells.text("precision").lower()
    if "nvfp4" in text or "fp4" in text:
        raise UnusableRow("precision NVFP4")
    if "rowwise" in text:
        return "fp8-rowwise-mixed"
    if "fp8" in text or "float8" in text:
        return "fp8-mixed"
    if "pure" in text:
        return "bf16"
    if "bf16" in text and "fp16" not in text:
        return "bf16-mixed"
    if not text or "fp16" in text:
        return "fp16-mixed" if text else "bf16-mixed"
    raise UnusableRow(f"precision {text[:20]!r}")


def _sharding(cells: Cells, stack: str, inferences: list[str]) -> Literal["", "1", "2", "3"]:
    """ZeRO stage."""
    text = cells.text("dp_shard").lower()
    if re.search(r"zero-?2|shard_grad_op", text):
        return "2"
    if re.search(r"zero-?3|fsdp", text):
        return "3"
    if re.search(r"zero-?1|distributed optimizer", text) or "recalled: 1" in text:
        return "1"
    if stack == "bigscience" and text == "none":
        inferences.append("sharding: ZeRO-1; its published peaks are below what states of 12 bytes "
                          "a parameter on every rank would take")
        return "1"
    if text.startswith("none") or "zero-0" in text or text == "ddp":
        if "unknown" in text:
            inferences.append("sharding: none")
        return ""
    sharded = stack.startswith("megatron-core")
    inferences.append("sharding: " + ("the optimizer" if sharded else "none"))
    return "1" if sharded else ""


def _layouts(cells: Cells, graph: LayerGraph, d: Dimensions, degrees: dict[str, int],
             request: dict[str, Any], inferences: list[str]) -> tuple[Layout, ...]:
    gbs = _needed(cells, "gbs")
    zero = _sharding(cells, request["stack"], inferences)
    dp, pp = degrees["dp"], degrees["pp"]
    if gbs % dp:
        raise UnusableRow("dp does not divide the global batch")
    micro_batch = cells.count("mbs")
    if micro_batch is None and pp > 1 and request["stack"].startswith("torchtitan"):
        micro_batch = max(1, gbs // dp // pp)
        inferences.append("micro-batches: as many as stages, the default of torchtitan")
    micro_batches = _tuned("micro-batch", micro_batch, [
        m for m in (1, 2, 3, 4, 6, 8, 12, 16, 32) if gbs // dp % m == 0], inferences)
    if (gbs // dp) % micro_batches[0]:
        raise UnusableRow("dp x micro-batch does not divide the global batch")
    most = d.layers // pp
    legal_chunks = [v for v in range(1, most + 1) if d.layers % (pp * v) == 0] or [1]
    if cells.text("vpp").startswith(">"):
        legal_chunks = [2]
        inferences.append("chunks: 2")
    chunks = _tuned("chunks", _chunks(cells, pp, request["stack"]), legal_chunks, inferences)
    modes = _tuned("recompute", _recompute(cells, inferences), ["none", "selective", "full"],
                   inferences)
    mesh = Mesh(pp=pp, tp=degrees["tp"], cp=degrees["cp"],
                dp_shard=dp if zero else 1, dp_replicate=1 if zero else dp,
                order=("pp", "dp_replicate", "dp_shard", "cp", "tp"))
    if zero == "3" and pp > 1:
        inferences.append("parameters kept after forward, as torchtitan does with a pipeline")
    each = zero in ("2", "3") and pp == 1
    counts_all = pp > 1 and request["stack"].startswith("neox")
    if counts_all:
        inferences.append("stages: embedding, norm and output layer count as layers in the cut")
    layouts = []
    for micro_batch, v, mode in product(micro_batches, chunks, modes):
        m = gbs // dp // micro_batch
        name: Any = "interleaved" if v > 1 else "gpipe" if m < pp else "1f1b"
        choice = Choice(recompute=mode, reshard=zero == "3" and pp == 1)
        layouts.append(Layout(
            model=Reference(name=graph.name), topology=Reference(name="row"),
            request=Request(global_batch=gbs, **request), mesh=mesh, micro_batch=micro_batch,
            num_micro_batches=m,
            schedule=Schedule(name=name, chunks=v, gradient_sync=(
                "each_micro_batch" if each else "last_micro_batch")),
            stages=_stages(graph, d.layers, pp * v, choice, counts_all=counts_all)))
    return tuple(layouts)


def _tuned(what: str, given: Any, values: list[Any], inferences: list[str]) -> list[Any]:
    if given is not None:
        return [given]
    if len(values) > 1:
        inferences.append(f"{what}: not given, the fastest that fits of "
                          f"{', '.join(map(str, values))}")
    return values


def _chunks(cells: Cells, pp: int, stack: str) -> int | None:
    if pp == 1:
        return 1
    text = cells.text("vpp")
    if not text or text.startswith(">"):
        return None if text or stack.startswith("megatron") else 1
    return cells.count("vpp", most=1024) or 1


def _recompute(cells: Cells, inferences: list[str]) -> str | None:
    text = cells.text("recompute").lower()
    if not text or "unknown" in text or "not in table" in text:
        return None
    if text.startswith("none") or text == "selective: none":
        return "none"
    if text.startswith("per-stage"):
        raise UnusableRow("recompute differs from stage to stage")
    if text == "selective layer":
        raise UnusableRow("recompute of every other layer")
    if "full" in text:
        if cells.text("source_id") == WITHOUT_RECOMPUTE:
            inferences.append(
                "recompute: none. The source does not state it, and with full recompute 8 samples "
                "of a layer 2,048 wide would leave 11.4 ms for 3.57 TFLOP of matmuls: 313 TFLOP/s, "
                "above the peak of 312")
            return "none"
        if text != "full":
            inferences.append("recompute: full")
        return "full"
    if "selective" in text:
        if "recalled" in text:
            inferences.append("recompute: selective")
        return "selective"
    raise UnusableRow(f"recompute {text[:30]!r}")


def _shares(count: int, parts: int) -> list[int]:
    """Equal shares of `count`, the first ones one more."""
    share, more = divmod(count, parts)
    return [share + (index < more) for index in range(parts)]


def _stages(graph: LayerGraph, blocks: int, count: int, choice: Choice, *, counts_all: bool
            ) -> tuple[Stage, ...]:
    """Blocks in equal shares, and what is around them at both ends; or all layers in equal shares.

    Raises:
        UnusableRow: there are more stages than layers.
    """
    if count > blocks:
        raise UnusableRow("more stages than layers")
    first = len(graph.layers) - blocks - 2  # block
    last = first + blocks
    sizes = _shares(len(graph.layers) if counts_all else blocks, count)
    if not counts_all:
        sizes[0] += first
        sizes[-1] += 2
    outside = Choice(reshard=choice.reshard)
    stages = []
    start = 0
    for size in sizes:
        end = start + size
        pieces = ((start, min(end, first), outside),
                  (max(start, first), min(end, last), choice), (max(start, last), end, outside))
        stages.append(Stage(runs=tuple(
            LayerRun(first_layer=a, num_layers=b - a, choice=of) for a, b, of in pieces if a < b)))
        start = end
    return tuple(stages)
