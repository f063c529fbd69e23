"""The models of the contest: small, but each under another pressure.

Every function takes nothing and returns (module, example inputs, loss), as `plan` and the executor
take them; `SAMPLES` makes batches of each.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from benchmarks.hand_tuned.scenarios import LENGTH

__all__ = ["SAMPLES", "batch_of", "convnet", "deep_narrow", "encoder_decoder", "frozen_trunk",
           "gpt", "llama", "mlp", "wide_embedding"]

CROSS_ENTROPY, SQUARED_ERROR = "cross-entropy", "mean-squared-error"
CLASSES = 10
ROWS = 64
"""Vectors per sample of the models of vectors."""
IMAGE = 64


def _language_model(**config: Any) -> tuple[nn.Module, Any, str]:
    import transformers

    built = transformers.AutoConfig.for_model("gpt2", n_positions=LENGTH, attn_pdrop=0.0,
                                              resid_pdrop=0.0, embd_pdrop=0.0, use_cache=False,
                                              bos_token_id=1, eos_token_id=2,
                                              **config)
    return transformers.GPT2LMHeadModel(built), _tokens(), CROSS_ENTROPY


def _tokens() -> dict[str, torch.Tensor]:
    return {"input_ids": torch.zeros(2, LENGTH, dtype=torch.long)}


def gpt() -> tuple[nn.Module, Any, str]:
    """An ordinary GPT: 6 blocks of width 256, tied table."""
    return _language_model(vocab_size=2048, n_layer=6, n_embd=256, n_head=8)


def deep_narrow() -> tuple[nn.Module, Any, str]:
    """Many thin blocks: little to divide in each, much to cut between them."""
    return _language_model(vocab_size=1024, n_layer=16, n_embd=128, n_head=4)


def wide_embedding() -> tuple[nn.Module, Any, str]:
    """A large vocabulary over few blocks: the table and the logits are most of the model."""
    return _language_model(vocab_size=16384, n_layer=2, n_embd=192, n_head=6)


def llama() -> tuple[nn.Module, Any, str]:
    """A Llama with grouped key and value heads, head and table apart."""
    import transformers

    config = transformers.AutoConfig.for_model(
        "llama", vocab_size=4096, hidden_size=256, intermediate_size=704, num_hidden_layers=6,
        num_attention_heads=8, num_key_value_heads=4, max_position_embeddings=LENGTH,
        use_cache=False)
    return transformers.LlamaForCausalLM(config), _tokens(), CROSS_ENTROPY


def encoder_decoder() -> tuple[nn.Module, Any, str]:
    """A T5: a cut in the decoder carries the encoder's output along."""
    import transformers

    config = transformers.AutoConfig.for_model(
        "t5", vocab_size=2048, d_model=192, d_ff=512, d_kv=32, num_heads=6, num_layers=2,
        num_decoder_layers=2, dropout_rate=0.0, decoder_start_token_id=0, use_cache=False)
    tokens = _tokens()["input_ids"]
    return (transformers.T5ForConditionalGeneration(config),
            {"input_ids": tokens, "decoder_input_ids": tokens.clone()}, CROSS_ENTROPY)


class Convnet(nn.Module):
    """Convolutions with skip connections: much compute and many activations, few parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 24, 3, padding=1)
        self.blocks = nn.ModuleList([nn.Sequential(
            nn.Conv2d(24, 24, 3, padding=1), nn.GroupNorm(4, 24), nn.ReLU(),
            nn.Conv2d(24, 24, 3, padding=1)) for _ in range(6)])
        self.head = nn.Linear(24, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.stem(x))
        for block in self.blocks:
            x = torch.relu(x + block(x))
        return self.head(x.mean((2, 3)))


def convnet() -> tuple[nn.Module, Any, str]:
    """See `Convnet`."""
    return Convnet(), torch.zeros(2, 3, IMAGE, IMAGE), CROSS_ENTROPY


class Trunk(nn.Module):
    """A frozen trunk with a trained head, as in transfer learning: few gradients to exchange."""

    def __init__(self, width: int, depth: int, frozen: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(width, width), nn.GELU())
                                     for _ in range(depth)])
        self.head = nn.Linear(width, 32)
        self.blocks[:frozen].requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def frozen_trunk() -> tuple[nn.Module, Any, str]:
    """Ten layers of which eight are frozen."""
    return Trunk(768, 10, 8), torch.zeros(2, ROWS, 768), SQUARED_ERROR


def mlp() -> tuple[nn.Module, Any, str]:
    """Wide layers, all trained: many parameters for little compute, so that links bind."""
    return Trunk(576, 8, 0), torch.zeros(2, ROWS, 576), SQUARED_ERROR


def _token_batch(vocabulary: int, both: bool = False) -> Callable[[int, torch.Generator], Any]:
    def make(count: int, generator: torch.Generator) -> tuple[Any, torch.Tensor]:
        tokens = torch.randint(vocabulary, (count, LENGTH + 1), generator=generator)
        inputs = {"input_ids": tokens[:, :-1].contiguous()}
        if both:
            inputs["decoder_input_ids"] = inputs["input_ids"]
        return inputs, tokens[:, 1:].contiguous()
    return make


def _vectors(width: int) -> Callable[[int, torch.Generator], Any]:
    def make(count: int, generator: torch.Generator) -> tuple[Any, torch.Tensor]:
        return (torch.randn(count, ROWS, width, generator=generator),
                torch.randn(count, ROWS, 32, generator=generator))
    return make


def _images(count: int, generator: torch.Generator) -> tuple[Any, torch.Tensor]:
    return (torch.randn(count, 3, IMAGE, IMAGE, generator=generator),
            torch.randint(CLASSES, (count,), generator=generator))


SAMPLES: dict[str, Callable[[int, torch.Generator], Any]] = {
    "gpt": _token_batch(2048),
    "deep_narrow": _token_batch(1024),
    "wide_embedding": _token_batch(16384),
    "llama": _token_batch(4096),
    "encoder_decoder": _token_batch(2048, both=True),
    "convnet": _images,
    "frozen_trunk": _vectors(768),
    "mlp": _vectors(576),
}
"""How a batch of each is made."""


def batch_of(name: str, count: int, seed: int = 0) -> tuple[Any, torch.Tensor]:
    """(inputs, targets) of `count` samples, the same on every rank."""
    return SAMPLES[name](count, torch.Generator().manual_seed(seed))
