"""What the code of some classes needs when their matmuls are divided, as data.

A column matmul leaves each rank some of the heads or features, and the code around it must not
count on all of them. Where the trace proves that (elementwise code: most feed-forward parts),
nothing is needed. Attention by heads is a matter of the class: `view(batch, length, num_heads, -1)`
would train on, wrongly. Those known to stand it are in `capabilities.json`, each with a parity
test; a layer with another one is held whole. Nothing here imports torch.
"""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["FAMILIES", "NORMS", "Family"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """How to divide one class.

    fused: parameters that hold several matrices side by side in their divided dim, and how many:
        each of them is divided, not the whole.
    divided_attributes: integers of the module that count divided features.
    group_attributes: those that count the heads of queries which share a KV head.
    gathers_input: the module's first argument is a shard of the sequence, and is gathered.
    reduces_output: its result is a term of a sum over ranks, reduced and scattered (a mixture of
        experts: every expert sees all tokens).
    """

    fused: dict[str, int] = field(default_factory=dict)
    divided_attributes: tuple[str, ...] = ()
    group_attributes: tuple[str, ...] = ("num_key_value_groups",)
    gathers_input: bool = True
    reduces_output: bool = False


_PLAIN = Family()
_INSIDE = Family(gathers_input=False)

FAMILIES: dict[str, Family] = {
    "LlamaAttention": _PLAIN, "LlamaMLP": _PLAIN,
    "MistralAttention": _PLAIN, "MistralMLP": _PLAIN,
    "Qwen2Attention": _PLAIN, "Qwen2MLP": _PLAIN,
    "MixtralAttention": _PLAIN,
    "MixtralSparseMoeBlock": Family(reduces_output=True),
    "MixtralExperts": Family(fused={"gate_up_proj": 2}, gathers_input=False),
    "Qwen3Attention": _PLAIN, "Qwen3MLP": _PLAIN,
    "GemmaAttention": _PLAIN, "GemmaMLP": _PLAIN,
    "Gemma2Attention": _PLAIN, "Gemma2MLP": _PLAIN,
    "GPTNeoXAttention": _PLAIN, "GPTNeoXMLP": _PLAIN,
    "PhiAttention": _PLAIN, "PhiMLP": _PLAIN,
    "Starcoder2Attention": _PLAIN, "Starcoder2MLP": _PLAIN,
    "GraniteAttention": _PLAIN, "GraniteMLP": _PLAIN,
    "OlmoAttention": _PLAIN, "OlmoMLP": _PLAIN,
    "CohereAttention": _PLAIN, "CohereMLP": _PLAIN,
    "GPT2Attention": Family(fused={"c_attn.weight": 3, "c_attn.bias": 3},
                            divided_attributes=("split_size",)),
    "GPT2MLP": _PLAIN,
    "BertSelfAttention": _PLAIN, "BertSelfOutput": _INSIDE,
    "BertIntermediate": _PLAIN, "BertOutput": _INSIDE,
}
"""By class name of the module that calls the divided matmuls."""

NORMS = ("LayerNorm", "RMSNorm")
"""Suffixes of classes that work on each token alone, so that a shard of the sequence is enough."""
