"""Hugging Face configs: from a config.json, which is untrusted data, to a model and its inputs.

Only classes that ship with transformers are used; a config that asks for remote code gets none.
The class is the one named in `architectures` if it trains with a loss, else the first that
the model type has of: sequence to sequence, masked, causal, image classification.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from profiler.documents import read_data
from profiler.errors import InvalidInput, UnknownName
from profiler.layer_graph import LayerGraph, ModelSource
from profiler.trace import InputMaker, trace_module
from profiler.trace_fake import COMPUTE_DTYPE, is_experts

__all__ = ["build_model", "input_maker", "quiet", "trace_hugging_face"]

Task = Literal["sequence to sequence", "masked", "causal", "images"]

_IGNORED = frozenset({"auto_map", "transformers_version", "torch_dtype", "dtype", "_name_or_path",
                      "use_cache", "_attn_implementation", "attn_implementation",
                      "quantization_config"})
"""Keys that change nothing about the model's training cost, or that point outside the file."""

_LAYER_COUNTS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_decoder_layers")
_LONGEST = ("max_position_embeddings", "n_positions", "max_sequence_length", "seq_length")
MAX_LAYERS = 10_000


def trace_hugging_face(config: Mapping[str, Any] | str | Path, *, name: str | None = None,
                       note: str = "") -> LayerGraph:
    """Trace the model that a Hugging Face config describes.

    config: a config as a dict, or the path of a config.json (or of the folder that holds it).

    Raises:
        UnknownName: transformers has no model of that type.
        InvalidInput: the config is unusable.
    """
    if not isinstance(config, Mapping):
        path = Path(config)
        path = path / "config.json" if path.is_dir() else path
        name = name or (path.parent.name if path.name == "config.json" else path.stem)
        config = read_data(path)
        if not isinstance(config, Mapping):
            raise InvalidInput(f"{path}: a config is a JSON object")
    with quiet():
        model, task, built = build_model(config)
    max_seq_len = _first_int(built, _LONGEST) if task != "images" else None
    experts = {module.gate_up_proj.shape[0] for module in model.modules() if is_experts(module)}
    top_k = _first_int(built, ("num_experts_per_tok", "num_experts_per_token", "moe_topk")) or 1
    shares = [count // math.gcd(count, top_k) for count in experts]  # rows must come out whole
    window = _first_int(built, ("sliding_window",)) if getattr(
        built, "use_sliding_window", True) else None
    kept = {key: value for key, value in config.items() if key not in _IGNORED}
    source = ModelSource(hugging_face_class=type(model).__name__, hugging_face_config=kept,
                         note=note)
    with quiet(), _whole_samples():
        return trace_module(
            model, input_maker(task, built), name=name or str(config.get("model_type")),
            sample="images" if task == "images" else "tokens", max_seq_len=max_seq_len,
            source=source, window=window, rows_multiple=math.lcm(*shares))


@contextmanager
def quiet() -> Iterator[None]:
    """Without the advice that transformers prints about training and generation."""
    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)


@contextmanager
def _whole_samples() -> Iterator[None]:
    """Samples are neither padded nor packed, so that a causal mask is never written out.

    transformers looks at the data to find that out, which fake tensors do not have.
    """
    from transformers import masking_utils

    names = ("_ignore_causal_mask_sdpa", "_ignore_bidirectional_mask_sdpa")
    originals = {name: getattr(masking_utils, name) for name in
                 (*names, "find_packed_sequence_indices")}

    def without_padding(original: Any) -> Any:
        def ignore(*args: Any, **kwargs: Any) -> Any:
            if "padding_mask" in kwargs:
                return original(*args, **kwargs | {"padding_mask": None})
            return original(None, *args[1:], **kwargs)
        return ignore

    try:
        for name in names:
            setattr(masking_utils, name, without_padding(originals[name]))
        masking_utils.find_packed_sequence_indices = lambda position_ids: None
        yield
    finally:
        for name, original in originals.items():
            setattr(masking_utils, name, original)


def build_model(config: Mapping[str, Any], place: Callable[[], Any] = lambda: torch.device("meta")
                ) -> tuple[nn.Module, Task, Any]:
    """(model, what it is trained for, its config object).

    place: the context in which modules are made; by default the meta device.
    """
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    model_type = config.get("model_type")
    if not isinstance(model_type, str):
        raise InvalidInput("the config has no model_type; it is needed to pick the model's class")
    if model_type not in CONFIG_MAPPING:
        raise UnknownName("model type", model_type, list(CONFIG_MAPPING),
                          "Models with code of their own are not run; trace them with a function.")
    for key in _LAYER_COUNTS:
        count = config.get(key)
        if isinstance(count, int) and not 0 < count <= MAX_LAYERS:
            raise InvalidInput(f"config: {key} is {count}; it must lie in 1..{MAX_LAYERS}")
    task, class_name = _pick_class(model_type, config.get("architectures"))
    values = copy.deepcopy({key: value for key, value in config.items()  # transformers edits it
                            if key not in _IGNORED | {"model_type"}})
    try:
        built = CONFIG_MAPPING[model_type](**values)
        built.use_cache = False
        if task == "sequence to sequence":  # older configs leave both out: no cost hangs on them
            for key in ("pad_token_id", "decoder_start_token_id"):
                if getattr(built, key, None) is None:
                    setattr(built, key, 0)
        model = _instantiate(getattr(transformers, class_name), built, place)
    except Exception as error:  # transformers raises whatever a bad value leads to
        reason = " ".join(str(error).split())[:300]
        raise InvalidInput(f"config of {model_type}: {class_name} cannot be built from it: "
                           f"{type(error).__name__}: {reason}") from error
    return model, task, built


def _instantiate(model_class: Any, config: Any, place: Callable[[], Any]) -> nn.Module:
    for attention in ("sdpa", "eager"):
        config._attn_implementation = attention
        try:
            with place():
                model: nn.Module = model_class(config)
            return model
        except ValueError:
            if attention == "eager":
                raise
    raise AssertionError("unreachable")


def _pick_class(model_type: str, architectures: Any) -> tuple[Task, str]:
    from transformers.models.auto import modeling_auto as auto

    tables: tuple[tuple[Task, Mapping[str, Any]], ...] = (
        ("sequence to sequence", auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES),
        ("masked", auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES),
        ("causal", auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES),
        ("images", auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES))
    found: list[tuple[Task, str]] = []
    for task, table in tables:
        names = table.get(model_type, ())
        found.extend((task, name) for name in ((names,) if isinstance(names, str) else names))
    if not found:
        raise InvalidInput(f"model type {model_type!r} has no class that trains a language model "
                           f"or an image classifier; trace it with a function")
    wanted = architectures if isinstance(architectures, (list, tuple)) else ()
    return next(((task, name) for task, name in found if name in wanted), found[0])


def _first_int(config: Any, names: tuple[str, ...]) -> int | None:
    for name in names:
        value = getattr(config, name, None)
        if isinstance(value, int) and value > 0:
            return value
    return None


def input_maker(task: Task, config: Any) -> InputMaker:
    def make(micro_batch: int, seq_len: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if task == "images":
            size = getattr(config, "image_size", None) or 224
            height, width = (size, size) if isinstance(size, int) else size
            shape = (micro_batch, getattr(config, "num_channels", 3), height, width)
            return (), {"pixel_values": torch.empty(shape, dtype=COMPUTE_DTYPE),
                        "labels": torch.empty(micro_batch, dtype=torch.int64)}
        tokens = (micro_batch, seq_len)
        return (), {"input_ids": torch.empty(tokens, dtype=torch.int64),
                    "labels": torch.empty(tokens, dtype=torch.int64)}
    return make
