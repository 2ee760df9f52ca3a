"""Formats of quantised weights, and operands in them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from torch_mpk.tasks.quantized_linear import E2M1, E4M3, quantized_linear


@dataclass(frozen=True)
class Format:
    """Of a weight: ``packed`` columns to an element of ``storage``, or eight rows to an int32 that has one; rows lie
    apart where it is ``transposed``."""

    storage: torch.dtype
    scale: torch.dtype
    block_rows: int
    block_columns: int
    x_columns: int = 0
    x_scale: float = 0
    packed: int = 1
    zero: torch.dtype | None = None
    transposed: bool = False
    grouped: bool = False  # each column says its group
    coded: bool = False  # numbers are looked up
    scale_block: int = 0  # scales that share a scale

    @property
    def word_rows(self) -> int:
        return 8 if self.storage == torch.int32 and self.packed == 1 else 1

    @property
    def attrs(self) -> dict[str, int]:
        names = ["block_rows", "block_columns", "x_columns"] + ["scale_block"] * (self.scale_block > 0)
        return {name: getattr(self, name) for name in names}


FORMATS = {
    "blocks": Format(E4M3, torch.float32, 128, 128, 128),
    "blocks, powers of two": Format(E4M3, torch.float8_e8m0fnu, 16, 32, 64),
    "rows, x by row": Format(E4M3, torch.bfloat16, 1, 0, -1),
    "rows, int8": Format(torch.int8, torch.float32, 1, 0),
    "one, x given": Format(E4M3, torch.float32, 0, 0, x_scale=0.01),
    "groups, zero points added": Format(torch.int8, torch.bfloat16, 1, 128, packed=2, zero=torch.bfloat16),
    "groups of 16": Format(torch.uint8, torch.bfloat16, 1, 16, packed=2, zero=torch.bfloat16),
    "groups in words": Format(torch.int32, torch.float16, 1, 32, packed=8),
    "columns of words": Format(torch.int32, torch.float16, 1, 64, packed=8, zero=torch.int32, transposed=True),
    "words of rows": Format(torch.int32, torch.float16, 1, 64, zero=torch.int32, transposed=True),
    "columns in any order": Format(
        torch.int32, torch.float16, 1, 64, packed=8, zero=torch.int32, transposed=True, grouped=True
    ),
    "columns of bytes in any order": Format(torch.int8, torch.bfloat16, 1, 32, packed=2, zero=torch.int8, grouped=True),
    "words of rows in any order": Format(
        torch.int32, torch.float16, 1, 64, zero=torch.int32, transposed=True, grouped=True
    ),
    "words of rows that lie apart": Format(torch.int32, torch.bfloat16, 1, 32, zero=torch.bfloat16),
    "words, blocks of rows": Format(torch.int32, torch.float32, 5, 40, packed=8, zero=torch.int32, transposed=True),
    "words, blocks that part them": Format(
        torch.int32, torch.float16, 1, 20, packed=8, zero=torch.uint8, transposed=True
    ),
    "words, x by row": Format(torch.int32, torch.float16, 1, 0, -1, packed=8, transposed=True),
    "numbers of a table": Format(torch.uint8, torch.float32, 1, 64, packed=2, coded=True),
    "scales of scales": Format(torch.uint8, torch.uint8, 1, 64, packed=2, coded=True, scale_block=16),
    "e2m1": Format(E2M1, torch.float8_e8m0fnu, 1, 32, packed=2),
    "rows of 4 bits": Format(torch.uint8, torch.float32, 1, 0, packed=2, zero=torch.uint8),
}


def random_bits(shape: list[int], dtype: torch.dtype) -> torch.Tensor:
    if dtype == E2M1:
        return random_bits(shape, torch.uint8).view(E2M1)
    limits = torch.iinfo(dtype)
    return torch.randint(limits.min, limits.max + 1, shape, dtype=dtype)


def operands(shape: tuple[int, int, int], of: Format, dtype: torch.dtype) -> list[torch.Tensor | None]:
    rows, n, k = shape
    n, k = n + -n % of.word_rows, k + -k % max(of.packed, min(of.word_rows, 2))
    stored = [n // of.word_rows, k // of.packed]
    weight = (torch.randn(stored) * 2).to(E4M3) if of.storage == E4M3 else random_bits(stored, of.storage)
    sizes = [-(-size // (block or size)) for size, block in ((n, of.block_rows), (k, of.block_columns))]
    scale = random_bits(sizes, of.scale) if of.scale_block else (torch.rand(sizes) + 0.1).to(of.scale)
    zero = None
    if of.zero is not None and of.zero.is_floating_point:
        zero = torch.randn(sizes).to(of.zero)
    elif of.zero is not None:
        words = random_bits([-(-sizes[0] // 8), sizes[1]], torch.int32)
        zero = words if of.zero == torch.int32 else torch.randint(0, 16, sizes, dtype=of.zero)
    if of.transposed:
        weight, scale = weight.T.contiguous().T, scale.T.contiguous().T
    given = torch.tensor([of.x_scale]) if of.x_scale else None
    x, bias = (torch.randn(rows, k) * 3).to(dtype), torch.randn(n).to(dtype)
    groups = torch.randint(0, sizes[1], [k], dtype=torch.int32) if of.grouped else None
    code = torch.randn(16) if of.coded else None
    of_scales: list[torch.Tensor | None] = [None] * 3
    if of.scale_block:
        of_scales = [torch.rand(256), torch.rand(-(-sizes[0] * sizes[1] // of.scale_block)), torch.rand(1)]
    return [x, weight, scale, bias, given, zero, groups, code, *of_scales]


def exact(given: list[torch.Tensor | None], of: Format) -> torch.Tensor:
    wide = [t.double() if t is not None and i in (0, 3) else t for i, t in enumerate(given)]
    return quantized_linear(*wide, **of.attrs)
