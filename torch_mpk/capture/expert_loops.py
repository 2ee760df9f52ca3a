"""Transformers' ``experts_implementation="eager"``, traced without its loop over the experts that were chosen.

How many those are only a call's values say, so Dynamo ends a graph in the loop, eleven times a layer. The grouped
products that are Transformers' own default give the same sums, and are one graph. They take the loop's place where
Dynamo traces for this backend, and nowhere else: eager calls and other backends have the loop.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def replace_loops(moe: Any) -> None:
    """Takes the loops' place in what is traced from now on. ``moe``: Transformers' module of experts."""
    if not hasattr(moe, "ExpertsInterface"):
        return
    known = moe.ExpertsInterface.get_interface
    is_ours = torch.compiler.assume_constant_result(lambda: is_traced_for_us())

    def get_interface(self: Any, experts_implementation: str, default: Callable[..., Tensor]) -> Callable[..., Tensor]:
        is_loop = experts_implementation == "eager" and type(self) is moe.ExpertsInterface
        if is_loop and torch.compiler.is_compiling() and is_ours():
            return products
        return known(self, experts_implementation, default)

    def products(experts: Any, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """As the loop, by products that take the sizes of these weights."""
        down = experts.down_proj
        sizes = down.shape[1:] if x.dtype == torch.bfloat16 else ()
        is_whole = all(size * x.itemsize % 16 == 0 for size in sizes)  # rows of what grouped products take
        forward = moe.grouped_mm_experts_forward if is_whole else moe.batched_mm_experts_forward
        return forward(experts, x, ids, weights)

    moe.ExpertsInterface.get_interface = get_interface


def is_traced_for_us() -> bool:
    """Whether the graph that is being traced goes to this package. Another backend's code is traced anew."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    backend: Any = InstructionTranslator.current_tx().output.compiler_fn
    while True:
        inner = getattr(backend, "_torchdynamo_orig_backend", None) or getattr(backend, "compiler_fn", None)
        if inner is None or inner is backend:
            break
        backend = inner
    owner = getattr(backend, "__module__", None) or type(backend).__module__
    return owner.partition(".")[0] == "torch_mpk"
