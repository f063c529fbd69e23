"""Software stacks: what the engine that runs a layout fuses, overlaps and stores, as data.

The same layout of the same model takes another time under Megatron-LM of 2021 (attention in three
kernels, a fused softmax, nothing overlapped) than under FSDP2 with a compiled model. A Stack is a
small file of named properties (`planner/stacks/*.json`), each with its source. What changes the
layers themselves (fused attention or not, fused pointwise kernels) is done by lowering the
LayerGraph before it is priced (`planner/stacks/lowering.py`); the cost functions see the result and
nothing of the stack. What no datasheet tells, how fast its kernels are on a kind of device, lies in
`planner/stacks/fitted.json`, written by `benchmarks/published/fit.py`.
"""

from planner.stacks.record import (
    DEFAULT_STACKS,
    FITTED,
    Fit,
    FittedConstants,
    Kernels,
    Stack,
    default_stack,
    kernels_for,
    load_stack,
    stack_names,
)

__all__ = ["DEFAULT_STACKS", "FITTED", "Fit", "FittedConstants", "Kernels", "Stack",
           "default_stack", "kernels_for", "load_stack", "stack_names"]
