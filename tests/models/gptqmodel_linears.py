"""Linears with the buffers, attributes and words of gptqmodel's (7.7), for where that cannot be installed."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from torch_mpk.capture.gptqmodel_linears import take_linears


class BaseQuantLinear(torch.nn.Module):
    """``words``: the shape of the weight's, of ``in_features`` x ``out_features`` numbers."""

    def __init__(self, sizes: tuple[int, int], group: int, words: list[int], desc_act: bool = False) -> None:
        super().__init__()
        self.in_features, self.out_features = sizes
        self.bits, self.group_size, self.pack_dtype, self.desc_act = 4, group, torch.int32, desc_act
        self.adapter, self.bias, self.online_full_had, self.online_partial_had = None, None, False, False
        groups = self.in_features // group
        self.register_buffer("qweight", torch.randint(-(2**31), 2**31, words, dtype=torch.int32))
        self.register_buffer(
            "qzeros", torch.randint(-(2**31), 2**31, (groups, self.out_features // 8), dtype=torch.int32)
        )
        self.register_buffer("scales", (torch.rand(groups, self.out_features) + 1).mul(0.01).half())

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        bias = 0 if self.bias is None else self.bias.double()
        return (x.double() @ self.matrix() + bias).to(x.dtype)


def codes(words: torch.Tensor, order: range | list[int] = range(8)) -> torch.Tensor:
    """[..., words, 8]: the numbers at these places of each word."""
    return words.unsqueeze(-1) >> 4 * torch.tensor(order) & 15


class TorchLinear(BaseQuantLinear):
    """Of GPTQ: a word has eight neighbouring columns of a row, which with ``desc_act`` are of groups in any order."""

    forward = BaseQuantLinear.multiply

    def __init__(self, sizes: tuple[int, int], group: int, desc_act: bool = False) -> None:
        super().__init__(sizes, group, [sizes[0] // 8, sizes[1]], desc_act)
        order = torch.randperm(sizes[0]) if desc_act else torch.arange(sizes[0])
        self.register_buffer("g_idx", order.int() // group)
        self.post_init()

    def post_init(self) -> None:
        pass

    def matrix(self) -> torch.Tensor:
        numbers = codes(self.qweight.t()).flatten(1).t()
        zeros, groups = codes(self.qzeros).flatten(1), self.g_idx.long()
        return (numbers - zeros[groups]) * self.scales.double()[groups]


class AwqTorchLinear(BaseQuantLinear):
    """Of AWQ: a word has eight neighbouring rows of a column, the even ones first."""

    forward = BaseQuantLinear.multiply

    def __init__(self, sizes: tuple[int, int], group: int) -> None:
        super().__init__(sizes, group, [sizes[0], sizes[1] // 8])

    def matrix(self) -> torch.Tensor:
        places = [0, 4, 1, 5, 2, 6, 3, 7]
        numbers, zeros = codes(self.qweight, places).flatten(1), codes(self.qzeros, places).flatten(1)
        groups = torch.arange(self.in_features) // self.group_size
        return (numbers - zeros[groups]) * self.scales.double()[groups]


class MarlinLinear(AwqTorchLinear):
    """One whose words a kernel has put into another order."""

    forward = BaseQuantLinear.multiply


take_linears(SimpleNamespace(BaseQuantLinear=BaseQuantLinear))
