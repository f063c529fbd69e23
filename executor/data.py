"""Batches for training from the command line, the same whatever the layout.

A sample is a function of its number alone, so a run that is resumed elsewhere goes on where it
stopped.

    synthetic     tokens that step through the vocabulary with a stride of their own (a model learns
                  that within some dozens of steps); random images with random classes
    a file        tokens one after the other as uint16 or uint32, as nanoGPT writes them
    a function    package.module:function, called as function(first, count): inputs (a tensor, a
                  tuple or a dict of tensors) and targets of samples first .. first + count - 1
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from profiler.errors import InvalidInput
from profiler.layer_graph import LayerGraph
from profiler.models import FUNCTION
from profiler.trace import find_function

__all__ = ["Batch", "Source", "make_source"]

MASKED = 0.15
"""Share of tokens hidden from a masked model (BERT, arXiv:1810.04805)."""

Batch = tuple[Any, torch.Tensor]
"""Inputs (by keyword, mostly) and targets."""


class Source(Protocol):
    """Where samples come from."""

    def batch(self, first: int, count: int) -> Batch:
        """Samples first .. first + count - 1."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionSource:
    """Samples that a function of the user's makes."""

    function: Callable[[int, int], Any]
    name: str

    def batch(self, first: int, count: int) -> Batch:
        made = self.function(first, count)
        if not (isinstance(made, tuple) and len(made) == 2 and isinstance(made[1], torch.Tensor)):
            raise InvalidInput(f"--data {self.name}: must return (inputs, targets), targets a "
                               f"tensor; it returns {type(made).__name__}")
        return made


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSource:
    """Samples of a Hugging Face model of tokens or images.

    rows(first, count) -> (count, seq_len + 1) token ids, or None for images.
    """

    rows: Callable[[int, int], torch.Tensor] | None
    kind: str
    shape: tuple[int, ...] = ()
    num_classes: int = 0
    vocabulary: int = 0

    def batch(self, first: int, count: int) -> Batch:
        """Samples first .. first + count - 1."""
        if self.rows is None:
            generator = torch.Generator().manual_seed(first)
            images = torch.randn(count, *self.shape, generator=generator)
            return ({"pixel_values": images},
                    torch.randint(self.num_classes, (count,), generator=generator))
        tokens = self.rows(first, count)
        now, following = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        if self.kind == "masked":
            generator = torch.Generator().manual_seed(first)
            hidden = torch.rand(now.shape, generator=generator) < MASKED
            hidden[:, 0] = True
            return ({"input_ids": now.masked_fill(hidden, self.vocabulary - 1)},
                    now.masked_fill(~hidden, -100))
        if self.kind == "sequence to sequence":
            return {"input_ids": now, "decoder_input_ids": now}, following
        return {"input_ids": now}, following


def _kind(graph: LayerGraph) -> str:
    name = graph.source.hugging_face_class or ""
    if name.endswith("ForMaskedLM"):
        return "masked"
    if name.endswith("ForConditionalGeneration"):
        return "sequence to sequence"
    return "causal"


def make_source(graph: LayerGraph, seq_len: int, data: str | None, dtype: str | None,
                config: Any) -> Source:
    """The samples to train `graph` on. config: the Hugging Face config, or None.

    Raises:
        InvalidInput: a model of other inputs, a file too short, or with tokens outside the
            vocabulary.
    """
    if data is not None and FUNCTION.fullmatch(data) and not Path(data).exists():
        return FunctionSource(function=find_function(data), name=data)
    if graph.sample == "images" and config is not None:
        if data is not None:
            raise InvalidInput(f"--data {data}: images come from a function "
                               f"(package.module:function); a file holds tokens")
        size = config.image_size
        height, width = (size, size) if isinstance(size, int) else size
        return ModelSource(rows=None, kind="images", shape=(config.num_channels, height, width),
                           num_classes=config.num_labels)
    vocabulary = getattr(config, "vocab_size", None)
    if graph.sample != "tokens" or vocabulary is None:
        raise InvalidInput(f"{graph.name!r} takes {graph.sample}: there are no synthetic samples "
                           f"and no files of it; give --data package.module:function, which "
                           f"returns (inputs, targets) for (first, count)")
    rows = (_synthetic(vocabulary, seq_len) if data is None
            else _file(Path(data), dtype, vocabulary, seq_len))
    return ModelSource(rows=rows, kind=_kind(graph), vocabulary=vocabulary)


def _synthetic(vocabulary: int, seq_len: int) -> Callable[[int, int], torch.Tensor]:
    place = torch.arange(seq_len + 1, dtype=torch.int64)

    def rows(first: int, count: int) -> torch.Tensor:
        number = torch.arange(first, first + count, dtype=torch.int64)[:, None]
        start, stride = number * 7919, 1 + number * 104_729 % 3
        return (start + stride * place) % min(vocabulary, 257)
    return rows


def _file(path: Path, dtype: str | None, vocabulary: int, seq_len: int
          ) -> Callable[[int, int], torch.Tensor]:
    kind = np.dtype(dtype or ("uint16" if vocabulary <= 2**16 else "uint32"))
    try:
        tokens = np.memmap(path, dtype=kind, mode="r")
    except (OSError, ValueError) as error:
        raise InvalidInput(f"{path}: cannot be read as {kind}: {error}") from None
    samples = (len(tokens) - 1) // seq_len
    if samples < 1:
        raise InvalidInput(f"{path}: holds {len(tokens)} tokens, one sample needs {seq_len + 1}")

    def rows(first: int, count: int) -> torch.Tensor:
        starts = [(number % samples) * seq_len for number in range(first, first + count)]
        made = np.stack([tokens[s:s + seq_len + 1] for s in starts]).astype(np.int64)
        if int(made.max()) >= vocabulary:
            raise InvalidInput(f"{path}: holds token {int(made.max())}, the model's vocabulary "
                               f"ends at "
                               f"{vocabulary - 1} (is it {kind}?)")
        return torch.from_numpy(made)
    return rows
