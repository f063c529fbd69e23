"""Small models of every family, for the tests of the tracer."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn

from profiler.hugging_face import trace_hugging_face
from profiler.layer_graph import LayerGraph
from profiler.trace import trace

_DECODER = {"vocab_size": 384, "hidden_size": 64, "intermediate_size": 160,
            "num_hidden_layers": 3, "num_attention_heads": 4, "max_position_embeddings": 256}
_GROUPED = {**_DECODER, "num_key_value_heads": 2}

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", **_GROUPED},
    "mistral": {"model_type": "mistral", **_GROUPED},
    "qwen2": {"model_type": "qwen2", **_GROUPED},
    "qwen3": {"model_type": "qwen3", "head_dim": 16, **_GROUPED},
    "gemma": {"model_type": "gemma", "head_dim": 16, **_GROUPED},
    "gpt2": {"model_type": "gpt2", "n_layer": 3, "n_embd": 64, "n_head": 4, "vocab_size": 384,
             "n_positions": 256, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "gpt-neox": {"model_type": "gpt_neox", **_DECODER},
    "opt": {"model_type": "opt", "vocab_size": 384, "hidden_size": 64, "ffn_dim": 256,
            "num_hidden_layers": 3, "num_attention_heads": 4, "max_position_embeddings": 256,
            "word_embed_proj_dim": 64, "dropout": 0.0},
    "mixtral": {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2,
                **_GROUPED},
    "bert": {"model_type": "bert", "hidden_dropout_prob": 0.0,
             "attention_probs_dropout_prob": 0.0, **_DECODER},
    "vit": {"model_type": "vit", "hidden_size": 64, "intermediate_size": 256,
            "num_hidden_layers": 3, "num_attention_heads": 4, "image_size": 32, "patch_size": 8,
            "num_labels": 10},
    "t5": {"model_type": "t5", "vocab_size": 384, "d_model": 64, "d_kv": 16, "d_ff": 256,
           "num_layers": 3, "num_heads": 4, "dropout_rate": 0.0, "decoder_start_token_id": 0,
           "pad_token_id": 0},
    "resnet": {"model_type": "resnet", "embedding_size": 8, "hidden_sizes": [16, 32],
               "depths": [2, 3], "image_size": 32, "num_labels": 10},
}


class UNet(nn.Module):
    """Two levels with a skip connection that is concatenated outside every module."""

    def __init__(self) -> None:
        super().__init__()
        self.down = self._block(3, 8)
        self.pool = nn.MaxPool2d(2)
        self.bottom = self._block(8, 16)
        self.up = nn.ConvTranspose2d(16, 8, 2, stride=2)
        self.merge = self._block(16, 8)
        self.out = nn.Conv2d(8, 2, 1)

    @staticmethod
    def _block(inputs: int, outputs: int) -> nn.Module:
        class Block(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.body = nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1),
                                          nn.BatchNorm2d(outputs), nn.ReLU())

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return self.body(x)
        return Block()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skip = self.down(x)
        up = self.up(self.bottom(self.pool(skip)))
        return self.out(self.merge(torch.cat((skip, up), dim=1)))


class Residual(nn.Module):
    """Functional glue of every sort: a parameter at the root, residual sums, a loss in forward."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))
        self.first = nn.Linear(width, 2 * width)
        self.second = nn.Linear(2 * width, width)
        self.third = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = x + self.second(torch.relu(self.first(x * self.scale)))
        return (hidden + self.third(hidden)).pow(2).mean()


class LoRALinear(nn.Module):
    """A frozen linear with a trainable low-rank pair beside it."""

    def __init__(self, inputs: int, outputs: int, rank: int = 4) -> None:
        super().__init__()
        self.base = nn.Linear(inputs, outputs, bias=False)
        self.base.weight.requires_grad_(False)
        self.a = nn.Linear(inputs, rank, bias=False)
        self.b = nn.Linear(rank, outputs, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.b(self.a(x))


class LoRABlock(nn.Module):
    """A gated MLP whose linears carry low-rank pairs."""

    def __init__(self, width: int = 32, inner: int = 96) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.gate, self.up = LoRALinear(width, inner), LoRALinear(width, inner)
        self.down = nn.Linear(inner, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        return x + self.down(nn.functional.silu(self.gate(y)) * self.up(y))


def mlp() -> tuple[nn.Module, torch.Tensor]:
    return nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(),
                         nn.Linear(64, 4)), torch.zeros(8, 16)


def convnet() -> tuple[nn.Module, torch.Tensor]:
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
                         nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 5 * 5, 10),
                         ), torch.zeros(4, 3, 16, 16)


def unet() -> tuple[nn.Module, torch.Tensor]:
    return UNet(), torch.zeros(2, 3, 16, 16)


def residual() -> tuple[nn.Module, torch.Tensor]:
    return Residual(), torch.zeros(4, 32)


def lora() -> tuple[nn.Module, torch.Tensor]:
    return nn.Sequential(*(LoRABlock() for _ in range(3))), torch.zeros(4, 32)


def module_alone() -> nn.Module:
    return nn.Linear(4, 4)


def frozen_front() -> tuple[nn.Module, torch.Tensor]:
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16))
    model[0].requires_grad_(False)
    model[1].requires_grad_(False)
    return model, torch.zeros(4, 16)


def frozen_middle() -> tuple[nn.Module, torch.Tensor]:
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16))
    model[1].requires_grad_(False)
    return model, torch.zeros(4, 16)


def token_model() -> tuple[nn.Module, torch.Tensor, str]:
    return nn.Sequential(nn.Embedding(256, 32), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 256),
                         ), torch.zeros(2, 8, dtype=torch.long), "cross-entropy"


def regression() -> tuple[nn.Module, torch.Tensor, str]:
    return (*mlp(), "mean-squared-error")


class Sum:
    """A loss of one's own."""

    def total(self, predictions: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return (predictions - targets).square().sum()


def own_loss() -> tuple[nn.Module, torch.Tensor, Sum, torch.Tensor]:
    return (*mlp(), Sum(), torch.zeros(8, 4))


def wrong_loss() -> tuple[nn.Module, torch.Tensor, str]:
    return (*mlp(), "hinge")


def no_total() -> tuple[nn.Module, torch.Tensor, Any]:
    return (*mlp(), torch.nn.functional.mse_loss)


def no_targets() -> tuple[nn.Module, torch.Tensor, Sum]:
    return (*mlp(), Sum())


def layer_with_loss() -> tuple[nn.Module, torch.Tensor, str]:
    return nn.Linear(4, 4), torch.zeros(2, 4), "mean-squared-error"


WITH_LOSS = {"token model": token_model, "regression": regression, "own loss": own_loss}

PLAIN = {"mlp": mlp, "convnet": convnet, "unet": unet, "residual": residual, "lora": lora,
         "frozen front": frozen_front, "frozen middle": frozen_middle}


@functools.cache
def traced(name: str) -> LayerGraph:
    """The LayerGraph of a model above, traced once for all tests."""
    if name in FAMILIES:
        return trace_hugging_face(FAMILIES[name], name=name)
    return trace((PLAIN | WITH_LOSS)[name], name=name)
