"""Linears with the parameters, attributes and bytes of bitsandbytes' (0.50), for where that is not installed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from torch_mpk.capture.bitsandbytes_linears import take_linears


class Params4bit(torch.nn.Parameter):
    """Its class decides what operations do, as the package's does."""

    __module__ = "bitsandbytes.nn.modules"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_function__(func, types, args, kwargs or {})


class Linear4bit(torch.nn.Module):
    def __init__(self, sizes: tuple[int, int], nested: bool = False, block: int = 64) -> None:
        super().__init__()
        self.in_features, self.out_features = sizes
        blocks = sizes[0] * sizes[1] // block
        self.weight = Params4bit(torch.randint(256, (blocks * block // 2, 1), dtype=torch.uint8), requires_grad=False)
        state = SimpleNamespace(shape=torch.Size(sizes[::-1]), blocksize=block, nested=nested, code=torch.randn(16))
        state.absmax, state.state2, state.offset = torch.rand(blocks) * 0.1, None, None
        if nested:
            state.absmax = torch.randint(256, (blocks,), dtype=torch.uint8)
            state.state2 = SimpleNamespace(code=torch.rand(256), absmax=torch.rand(-(-blocks // 256)), blocksize=256)
            state.offset = torch.tensor(0.05)
        self.weight.quant_state = state
        self.compute_dtype, self.compute_type_is_set = None, False
        self.bias = torch.nn.Parameter(torch.randn(sizes[1]), requires_grad=False)

    def matrix(self) -> torch.Tensor:
        state, data = self.weight.quant_state, self.weight.data.flatten().int()
        scale = state.absmax.double()
        if state.nested:
            own = state.state2.absmax.double()[torch.arange(len(scale)) // state.state2.blocksize]
            scale = state.state2.code.double()[state.absmax.int()] * own + state.offset.double()
        numbers = state.code.double()[torch.stack([data >> 4, data & 15], 1)].view(len(scale), -1)
        return (numbers * scale[:, None]).view(state.shape)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x.double(), self.matrix(), self.bias.double()).to(x.dtype)


take_linears(SimpleNamespace(Linear4bit=Linear4bit))
