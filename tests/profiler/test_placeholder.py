"""Placeholders: shapes without values, whose sources are never lost."""

from __future__ import annotations

import pytest
import torch

from profiler.errors import UnsupportedLayout
from profiler.placeholder import Placeholder


def stand_in(layer: int, *shape: int, dtype: torch.dtype = torch.float32) -> Placeholder:
    return Placeholder(torch.empty(shape, dtype=dtype, device="meta"), torch.device("cpu"),
                       frozenset({(layer, 0)}), True)


def test_a_known_operation_has_the_shapes_and_sources_of_its_own_operands() -> None:
    for layer, rows in ((0, 2), (1, 2), (2, 3)):  # the second finds the first one's shapes
        made = stand_in(layer, rows, 4) + torch.ones(4)
        assert isinstance(made, Placeholder)
        assert (tuple(made.shape), made.dtype, made.device.type) == ((rows, 4), torch.float32,
                                                                    "cpu")
        assert made.sources == {(layer, 0)} and made.differentiable
    assert (stand_in(0, 2, 4) + 1).dtype == torch.float32
    assert (stand_in(0, 2, 4, dtype=torch.int64) + 1).dtype == torch.int64
    assert (stand_in(0, 2, 4, dtype=torch.int64) + 1.0).dtype == torch.float32
    assert (stand_in(0, 2, 4) + stand_in(1, 2, 4).double()).sources == {(0, 0), (1, 0)}


def test_shapes_follow_arguments() -> None:
    for dim, shape in ((0, (4,)), (1, (2,))):
        for _ in range(2):
            assert stand_in(0, 2, 4).sum(dim).shape == shape
    for _ in range(2):
        parts = torch.stack([stand_in(0, 2), stand_in(1, 2)]).split(1)
        assert [tuple(part.shape) for part in parts] == [(1, 2), (1, 2)]
        assert parts[0].sources == {(0, 0), (1, 0)}


def test_what_is_written_in_place_has_the_sources_of_both() -> None:
    for _ in range(2):
        mine, other = stand_in(0, 2), stand_in(1, 2) * 2
        mine += other
        assert mine.sources == {(0, 0), (1, 0)} and other.sources == {(1, 0)}


def test_values_are_refused() -> None:
    with pytest.raises(UnsupportedLayout, match="looks at the values"):
        bool(stand_in(0, 1) > 0)
    with pytest.raises(UnsupportedLayout, match="writes an activation into another tensor"):
        torch.zeros(2).add_(stand_in(0, 2))
