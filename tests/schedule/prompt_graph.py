"""A hand-made TBGraph of what a layer does with a prompt before attention: queries, and keys and values to caches."""

from __future__ import annotations

from dataclasses import dataclass

from tests.schedule.decoder_graph import Builder, contiguous
from torch_mpk import _C

NORM = {"eps": 1e-6, "style": "llama"}


def write(b: Builder, made: _C.Tensor, cache: _C.Tensor, slot: _C.Tensor, label: str) -> None:
    """cache[b, g, slot + t] = made[b, t, g], where that is a row of the cache: what ``index_copy_`` becomes."""
    (batch, groups, length, size), tokens = cache.shape, made.shape[1]
    program = _C.Program([batch, groups, tokens, size])
    value = program.emit("load", made.dtype, operand=0, strides=[tokens * groups * size, size, groups * size, 1])
    first = program.emit("load", "int64", operand=1, strides=[0] * 4)
    row = program.emit("add", "int64", [program.emit("index", "int64", operand=2), first])
    is_below = program.emit("lt", "bool", [row, program.emit("const", "int64", imm=length)])
    is_there = program.emit("ge", "bool", [row, program.emit("const", "int64", imm=0)])
    offset = program.emit("mul", "int64", [first, program.emit("const", "int64", imm=size)])
    inside = program.emit("logical_and", "bool", [is_below, is_there])
    program.emit("store", made.dtype, [value, offset, inside], operand=2, strides=contiguous(cache.shape))
    operands = [("in0", made, True, False), ("in1", slot, True, False), ("out0", cache, False, True)]
    b.graph.add_node("pointwise", operands, {}, program, label)


@dataclass(frozen=True)
class Prompt:
    """The queries of some positions to an output, and their keys and values to the caches."""

    batch: int
    tokens: int
    heads: int
    groups: int
    size: int
    length: int
    dtype: str = "bfloat16"
    hidden: int = 64
    is_normed: bool = True
    bias: bool = False

    def graph(self) -> _C.TBGraph:
        b, rows = Builder(), self.batch * self.tokens

        def given(name: str, *shape: int) -> _C.Tensor:
            return b.buffer("input", name, self.dtype, list(shape))

        x, tables = given("x", rows, self.hidden), [(n, given(n, rows, self.size)) for n in ("cos", "sin")]
        slot = b.buffer("input", "slot", "int64", [1])
        made = {}
        for name, heads in (("q", self.heads), ("k", self.groups), ("v", self.groups)):
            y = b.buffer("workspace", name, self.dtype, [rows, heads * self.size])
            bias = [("bias", given(f"{name}.bias", y.shape[1]))] if self.bias else []
            b.node("linear", [("x", x), ("weight", given(name, y.shape[1], self.hidden)), *bias], y, {}, name)
            made[name] = b.view(y, [rows, heads, self.size])
        for name in ("q", "k"):
            row = made[name]
            if self.is_normed:
                flat = b.view(row, [rows * row.shape[1], self.size])
                normed = b.buffer("workspace", f"{name}.norm", self.dtype, flat.shape)
                weight = given(f"{name}.weight", self.size)
                b.node("rms_norm", [("x", flat), ("weight", weight)], normed, NORM, f"{name}.norm")
                row = b.view(normed, row.shape)
            kind = "output" if name == "q" else "workspace"
            turned = b.buffer(kind, f"{name}.rope", self.dtype, row.shape)
            made[name] = b.node("rope", [("x", row), *tables], turned, {}, f"{name}.rope")
        for name in ("k", "v"):
            cache = given(f"{name}.cache", self.batch, self.groups, self.length, self.size)
            rows_of = b.view(made[name], [self.batch, self.tokens, self.groups, self.size])
            write(b, rows_of, cache, slot, f"{name}.write")
        return b.graph


QWEN3_06B = Prompt(batch=1, tokens=512, heads=16, groups=8, size=128, length=2560, hidden=1024)
