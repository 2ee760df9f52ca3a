"""Linears with quantised weights in random formats and sizes, beside float64 runs of their definition."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.quantized_formats import Format, exact, operands
from torch_mpk.tasks.quantized_linear import E2M1, E4M3, PACKED, quantise, quantized_linear

NAMES = [operand.name for operand in quantized_linear.inputs]
POINTS = [torch.float32, torch.bfloat16, torch.int8, torch.uint8, torch.int32]
UNIT = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-20}
MARGIN = 4


def draw_format(rng: random.Random, dtype: torch.dtype) -> Format:
    """Half of them as checkpoints have them."""
    of_dtype = rng.choice([dtype, torch.float32])
    if rng.random() < 0.5:
        groups = rng.choice([32, 64, 96, 128, 128, 192, 256, 320, 384, 640])
        return rng.choice(
            [
                Format(E4M3, torch.float32, 128, 128, 128),
                Format(E4M3, of_dtype, 1, 0, rng.choice([0, -1])),
                Format(E4M3, torch.float32, 0, 0, x_scale=0.02),
                Format(torch.int8, of_dtype, 1, 0),
                Format(torch.int8, dtype, 1, groups, zero=rng.choice([None, torch.int8])),
                Format(torch.int8, dtype, 1, groups, packed=2, zero=dtype),
                Format(torch.uint8, dtype, 1, groups, packed=2, zero=rng.choice([None, torch.uint8])),
                Format(torch.int32, dtype, 1, groups, packed=8, zero=torch.int32),
                Format(torch.int32, torch.float16, 1, groups, zero=torch.int32, transposed=True),
                Format(E2M1, torch.float8_e8m0fnu, 1, 32, packed=2),
            ]
        )
    storage, columns = rng.choice(list(PACKED.items()))
    packed = rng.choice(columns)
    are_bytes = packed == 1 and storage != torch.int32
    block_columns = rng.choice([0, 16, 32, 128, 1 if are_bytes else 64])
    grouped = storage == torch.int32 and rng.random() < 0.3
    of_x = [0, -1, *(size for size in (16, 64, 128) if are_bytes and (not block_columns or size % block_columns == 0))]
    return Format(
        storage,
        of_dtype,
        rng.choice([0, 1, 7, 16, 128]),
        block_columns,
        0 if grouped else rng.choice(of_x),
        packed=packed,
        zero=None if storage in (E4M3, E2M1) else rng.choice([None, *POINTS]),
        transposed=storage == torch.int32 and rng.random() < 0.5,
        grouped=grouped,
    )


@dataclass(frozen=True)
class FormatProgram:
    """One weight or several of one input, which the program makes; or a gate and what it lets through."""

    rows: int
    n: int
    k: int
    num_weights: int
    is_gated: bool
    dtype: torch.dtype
    of: Format

    may_divide_by_zero = is_exact = False

    @classmethod
    def draw(cls, rng: random.Random, is_small: bool = False) -> FormatProgram:
        dtype = rng.choice([torch.bfloat16, torch.bfloat16, torch.float16, torch.float32])
        of, unit = draw_format(rng, dtype), rng.choice([1, 8, 128, 256])
        most = 1024 if is_small else 4096
        columns = rng.choice([unit * rng.randint(1, most // unit), 3840 if of.block_columns > 128 else most // 2])
        is_gated = rng.random() < 0.4
        return cls(
            rows=rng.choice([1, 2, 5, 8, 9, 16, 17, 24, 32, rng.choice([33, 64, 65, 130]), rng.randint(1, 64)]),
            # For many rows of weights an x is put in their order.
            n=rng.choice([rng.randint(1, 90), 8 * rng.randint(1, 24 if is_small else 60), 128 if is_small else 512]),
            k=columns + -columns % max(of.packed, 2),
            num_weights=2 if is_gated else rng.choice([1, 1, 3]),
            is_gated=is_gated,
            dtype=dtype,
            of=of,
        )

    def shortened(self, is_still_wrong: Callable[[FormatProgram], bool]) -> FormatProgram:
        program = self
        smaller = {"rows": [1, 2, 9, 17], "n": [8, 16, 64], "num_weights": [1], "k": [128, 256, 512, 768]}
        for changes in ({"is_gated": False}, *({name: value} for name, each in smaller.items() for value in each)):
            simpler = dataclasses.replace(program, **changes)
            is_smaller = all(getattr(simpler, name) <= getattr(program, name) for name in ("rows", "n", "k"))
            if simpler != program and is_smaller and (simpler.num_weights == 2 or not simpler.is_gated):
                program = simpler if is_still_wrong(simpler) else program
        return program

    @property
    def input_names(self) -> list[str]:
        given = self._operands(0)
        return ["x", *(f"{name}{i}" for i in range(self.num_weights) for name, _ in self._of_weight(given[i]))]

    def _operands(self, seed: int) -> list[list[Tensor | None]]:
        """Each weight's own, behind an x that is the first one's."""
        torch.manual_seed(seed)
        return [operands((self.rows, self.n, self.k), self.of, self.dtype) for _ in range(self.num_weights)]

    @staticmethod
    def _of_weight(given: list[Tensor | None]) -> list[tuple[str, Tensor]]:
        return [(name, t) for name, t in zip(NAMES[1:], given[1:], strict=True) if t is not None]

    def inputs(self, device: torch.device | str, seed: int) -> list[Tensor]:
        given = self._operands(seed)
        x = given[0][0]
        assert x is not None
        weights = [t for each in given for _, t in self._of_weight(each)]
        return [t.to(device) for t in (x, *weights)]

    def run(self, x: Tensor, *weights: Tensor, noise: torch.Generator | None = None) -> tuple[Tensor, ...]:
        each = len(weights) // self.num_weights
        names = self.input_names[1 : 1 + each]
        x, results = x * 2, []
        for i in range(self.num_weights):
            given = {name[:-1]: t for name, t in zip(names, weights[i * each : (i + 1) * each], strict=True)}
            arguments = [given.get(name) for name in NAMES[1:]]
            results.append(torch.ops.mpk.quantized_linear(x, *arguments, **self.of.attrs))
        return (F.silu(results[0]) * results[1],) if self.is_gated else tuple(results)

    def difference(self, inputs: list[Tensor], results: list[Tensor]) -> str:
        """Says what is wrong with the results for these inputs; empty: nothing."""
        x, *weights = [t.cpu() for t in inputs]
        each = len(weights) // self.num_weights
        names = [name[:-1] for name in self.input_names[1 : 1 + each]]
        wants, sizes = [], []
        for i in range(self.num_weights):
            given = dict(zip(names, weights[i * each : (i + 1) * each], strict=True))
            want, size = self._exact(x * 2, given)
            wants.append(want)
            sizes.append(size)
        unit = MARGIN * UNIT[self.dtype]
        allowed = [unit * (want.abs() + 0.1 * size) for want, size in zip(wants, sizes, strict=True)]
        largest = [want.abs() for want in wants]
        if self.is_gated:
            gate, up = F.silu(wants[0]), wants[1]
            error = 1.1 * allowed[0] * (up.abs() + allowed[1]) + gate.abs() * allowed[1]
            largest = [torch.stack([*largest, (gate * up).abs()]).amax(0)]
            wants, allowed = [gate * up], [error + unit * ((gate * up).abs() + up.abs())]
        for number, result in enumerate(results):
            found, want = result.double().cpu(), wants[number]
            if found.shape != want.shape:
                return f"result {number} is {list(found.shape)}, expected {list(want.shape)}"
            may_overflow = largest[number] + allowed[number] > torch.finfo(self.dtype).max / 2
            is_right = ((found - want).abs() <= allowed[number]) | may_overflow
            if not is_right.all():
                at = tuple((~is_right).nonzero()[0].tolist())
                count = int((~is_right).sum())
                return f"{count} of result {number} are wrong, at {at} {found[at]}, expected {want[at]}"
        return ""

    def _exact(self, x: Tensor, given: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """A result in float64, and how large terms are that may cancel: numbers and zero points apart. x is rounded in
        float32, where others may be half way between two numbers of e4m3."""
        of = dataclasses.replace(self.of, x_columns=0)
        arguments: list[Tensor | None] = [given.get(name) for name in NAMES[1:]]
        scale = given.get("x_scale")
        if self.of.x_columns:
            x = quantise(x.float(), self.of.x_columns)
        elif scale is not None:
            limit = torch.finfo(E4M3).max
            x = (x.float() / scale).clamp(-limit, limit).to(E4M3).float() * scale
        arguments[NAMES.index("x_scale") - 1] = None
        wide = x.double()
        want = exact([wide, *arguments], of)
        one = torch.eye(x.shape[1]).double()
        plain = [None if name in ("bias", "zero") else t for name, t in zip(NAMES[1:], arguments, strict=True)]
        numbers = exact([one, *plain], of).T
        size = numbers.abs()
        if given.get("zero") is not None:
            plain[NAMES.index("zero") - 1] = given["zero"]
            size = size + (exact([one, *plain], of).T - numbers).abs()
        bias = given.get("bias")
        return want, wide.abs() @ size.T + (bias.double().abs() if bias is not None else 0)
