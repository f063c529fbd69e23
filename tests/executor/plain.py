"""Small models that are not of Hugging Face: how each is built, and its batches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

__all__ = ["PLAIN", "Block", "Plain"]

VOCABULARY = 101


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.fc1, self.fc2 = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.fc2(torch.nn.functional.gelu(self.fc1(self.norm(x))))


class FrozenMLP(nn.Module):
    """A plain MLP whose first layers are frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.inlet = nn.Linear(12, 24)
        self.blocks = nn.ModuleList([Block(24) for _ in range(4)])
        self.outlet = nn.Linear(24, 5)
        for module in (self.inlet, self.blocks[0], self.blocks[2].fc1):
            module.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inlet(x)
        for block in self.blocks:
            x = block(x)
        return self.outlet(x)


class TokenMLP(nn.Module):
    """Blocks of a class that nobody knows: the trace proves that they can be divided."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, 24)
        self.blocks = nn.ModuleList([Block(24) for _ in range(3)])
        self.head = nn.Linear(24, VOCABULARY, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.table(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class SkipNet(nn.Module):
    """A small U-shaped convolutional net: tensors skip over layers, and stages."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.down1 = nn.Sequential(nn.Conv2d(8, 12, 3, stride=2, padding=1), nn.GroupNorm(3, 12))
        self.down2 = nn.Sequential(nn.Conv2d(12, 16, 3, stride=2, padding=1), nn.GroupNorm(4, 16))
        self.up1 = nn.ConvTranspose2d(16, 12, 2, stride=2)
        self.up2 = nn.ConvTranspose2d(24, 8, 2, stride=2)
        self.head = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skip0 = torch.relu(self.stem(x))
        skip1 = torch.relu(self.down1(skip0))
        x = torch.relu(self.up1(torch.relu(self.down2(skip1))))
        x = torch.relu(self.up2(torch.cat([x, skip1], dim=1)))
        return self.head(torch.cat([x, skip0], dim=1).mean((2, 3)))


class BatchNet(nn.Module):
    """Batch normalization: its statistics are those of the global batch."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1, bias=False),
                                  nn.BatchNorm2d(8))
        self.body = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1, bias=False),
                                  nn.BatchNorm2d(8))
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.stem(x))
        return self.head(torch.relu(x + self.body(x)).mean((2, 3)))


def _features(batch: int, length: int, dtype: torch.dtype) -> tuple[Any, torch.Tensor]:
    return (torch.randn(batch, 12, dtype=torch.float64).to(dtype),
            torch.randn(batch, 5, dtype=torch.float64).to(dtype))


def _images(batch: int, length: int, dtype: torch.dtype) -> tuple[Any, torch.Tensor]:
    return (torch.randn(batch, 3, 16, 16, dtype=torch.float64).to(dtype),
            torch.randint(0, 4, (batch,)))


def _tokens(batch: int, length: int, dtype: torch.dtype) -> tuple[Any, torch.Tensor]:
    tokens = torch.randint(0, VOCABULARY, (batch, length + 1))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


@dataclass(frozen=True, slots=True)
class Plain:
    """batch: (samples, sequence length, dtype) -> (inputs, targets)."""

    model: Callable[[], nn.Module]
    batch: Callable[[int, int, torch.dtype], tuple[Any, torch.Tensor]]


PLAIN = {"mlp": Plain(FrozenMLP, _features), "skipnet": Plain(SkipNet, _images),
         "batchnet": Plain(BatchNet, _images), "tokens": Plain(TokenMLP, _tokens)}


def mlp() -> tuple[nn.Module, Any]:
    return FrozenMLP(), torch.zeros(2, 12)


def skipnet() -> tuple[nn.Module, Any]:
    return SkipNet(), torch.zeros(2, 3, 16, 16)


def batchnet() -> tuple[nn.Module, Any]:
    return BatchNet(), torch.zeros(2, 3, 16, 16)


def tokens() -> tuple[nn.Module, Any]:
    return TokenMLP(), torch.zeros(2, 16, dtype=torch.int64)
