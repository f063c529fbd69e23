"""Which modules may be divided over a tensor-parallel group, as data.

A column matmul leaves each rank some of the heads or features, and the code around it must not
count on all of them. That is known of the classes listed here (each has a parity test); a layer
that would divide another class's matmuls is refused, for `view(batch, length, num_heads, -1)` would
train on, wrongly. Nothing here imports torch.
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
    gathers_input: the module's first argument is a shard of the sequence, and is gathered.
    reduces_output: its result is a term of a sum over ranks, reduced and scattered (a mixture of
        experts: every expert sees all tokens).
    """

    fused: dict[str, int] = field(default_factory=dict)
    divided_attributes: tuple[str, ...] = ()
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
    "GPT2Attention": Family(fused={"c_attn.weight": 3, "c_attn.bias": 3},
                            divided_attributes=("split_size",)),
    "GPT2MLP": _PLAIN,
    "BertSelfAttention": _PLAIN, "BertSelfOutput": _INSIDE,
    "BertIntermediate": _PLAIN, "BertOutput": _INSIDE,
}
"""By class name of the module that calls the divided matmuls."""

NORMS = ("LayerNorm", "RMSNorm")
"""Suffixes of classes that work on each token alone, so that a shard of the sequence is enough."""
