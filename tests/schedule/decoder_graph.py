"""A hand-made TBGraph of a small decoder: what lowering produces for a Qwen3 decode step, without torch."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from math import prod

from torch_mpk import _C

SIZES = {
    "bool": 1,
    "float8_e4m3fn": 1,
    "int8": 1,
    "uint8": 1,
    "int32": 4,
    "int64": 8,
    "bfloat16": 2,
    "float16": 2,
    "float32": 4,
}


# The operands that are a layer's, by what stands before their names.
Caches = Callable[[str], list[tuple[str, _C.Tensor]]]


def contiguous(shape: list[int]) -> list[int]:
    return [prod(shape[d + 1 :]) for d in range(len(shape))]


@dataclass
class Builder:
    graph: _C.TBGraph = field(default_factory=_C.TBGraph)
    num_inputs: int = 0
    num_outputs: int = 0

    def buffer(self, kind: str, name: str, dtype: str, shape: list[int]) -> _C.Tensor:
        index = -1
        if kind == "input":
            index, self.num_inputs = self.num_inputs, self.num_inputs + 1
        if kind == "output":
            index, self.num_outputs = self.num_outputs, self.num_outputs + 1
        buffer = self.graph.add_buffer(name, kind, index, prod(shape) * SIZES[dtype])
        return _C.Tensor(buffer, dtype, shape, contiguous(shape))

    def view(self, t: _C.Tensor, shape: list[int]) -> _C.Tensor:
        return _C.Tensor(t.buffer, t.dtype, shape, contiguous(shape), t.offset)

    def node(self, task: str, operands: list, out: _C.Tensor, attrs: dict | None = None, label: str = "") -> _C.Tensor:
        rows = [(name, t, True, name.endswith(("cache", "pages"))) for name, t in operands]
        self.graph.add_node(task, [*rows, ("y", out, False, True)], attrs or {}, None, label)
        return out

    def pointwise(self, op: str, inputs: list[_C.Tensor], out: _C.Tensor, label: str = "") -> _C.Tensor:
        """``out = op(*inputs)`` element by element; operands are contiguous and of one size."""
        program = _C.Program(out.shape)
        strides = contiguous(out.shape)
        loads = [program.emit("load", t.dtype, operand=i, strides=strides) for i, t in enumerate(inputs)]
        value = program.emit(op, out.dtype, loads)
        program.emit("store", out.dtype, [value], operand=len(inputs), strides=strides)
        operands = [(f"in{i}", self.view(t, out.shape), True, False) for i, t in enumerate(inputs)]
        self.graph.add_node("pointwise", [*operands, ("out0", out, False, True)], {}, program, label)
        return out

    def increment(self, counters: list[_C.Tensor]) -> None:
        """Add one to each counter in place: one node for all."""
        program = _C.Program([])
        one = program.emit("const", "int64", imm=1)
        for i in range(len(counters)):
            value = program.emit("add", "int64", [program.emit("load", "int64", operand=i), one])
            program.emit("store", "int64", [value], operand=i)
        operands = [(f"in{i}", self.view(c, []), True, True) for i, c in enumerate(counters)]
        self.graph.add_node("pointwise", operands, {}, program, "counters")


def static_caches(b: Builder, dtype: str, shape: list[int]) -> Caches:
    limit = b.buffer("input", "limit", "int64", shape[:1])
    return lambda at: [
        *((c, b.buffer("input", at + c, dtype, shape)) for c in ("k_cache", "v_cache")),
        ("limit", limit),
    ]


def paged_caches(b: Builder, dtype: str, shape: list[int], page_size: int, layers: int) -> Caches:
    """Pages of one buffer, keys and values of all layers in turns, as Hugging Face's engine has them."""
    batch, groups, length, size = shape
    table = b.buffer("input", "block_table", "int32", [batch, -(-length // page_size)])
    lengths = b.buffer("input", "length", "int32", [batch])
    page = page_size * groups * size
    strides = [2 * layers * page, *contiguous([page_size, groups, size])]
    every = b.buffer("input", "pages", dtype, [prod(table.shape) * strides[0]])
    shape = [prod(table.shape), page_size, groups, size]
    turns = itertools.count()

    def of_layer(_: str) -> list[tuple[str, _C.Tensor]]:
        pages = [
            (name, _C.Tensor(every.buffer, dtype, shape, strides, next(turns) * page))
            for name in ("k_pages", "v_pages")
        ]
        return [*pages, ("block_table", table), ("length", lengths)]

    return of_layer


def linear_of(b: Builder, weights: str, name: str, x: _C.Tensor, y: _C.Tensor) -> _C.Tensor:
    (_, n), k = y.shape, x.shape[1]
    if not weights:
        weight = b.buffer("input", f"{name}.weight", x.dtype, [n, k])
        return b.node("linear", [("x", x), ("weight", weight)], y, {}, name)
    of_byte = 2 if weights == "int4" else 1
    stored = b.buffer("input", f"{name}.weight", "float8_e4m3fn" if weights == "fp8" else "int8", [n, k // of_byte])
    (rows, columns), x_columns = {"fp8": ((128, 128), 128), "int8": ((1, 0), 0), "int4": ((1, 128), 0)}[weights]
    blocks = [-(-n // rows), -(-k // (columns or k))]
    dtype = "bfloat16" if weights == "int4" else "float32"
    operands = [("x", x), ("weight", stored), ("weight_scale", b.buffer("input", f"{name}.scale", dtype, blocks))]
    if weights == "int4":
        operands.append(("zero", b.buffer("input", f"{name}.zero", dtype, blocks)))
    attrs = {"block_rows": rows, "block_columns": columns, "x_columns": x_columns}
    return b.node("quantized_linear", operands, y, attrs, name)


def decoder(
    *, batch: int = 1, hidden: int = 64, heads: int = 4, groups: int = 2, head_dim: int = 16, ffn: int = 96,
    length: int = 40, vocab: int = 100, layers: int = 2, dtype: str = "bfloat16", computed_tables: bool = False,
    page_size: int = 0, weights: str = "",
) -> _C.TBGraph:  # fmt: skip
    """A decode step: hidden state in, logits out; KV caches and counters updated in place.

    With ``computed_tables`` rope's tables are made of the inputs of those names, as in a model, not given. With
    ``page_size`` caches are in pages, as many as all rows' ``length`` takes. ``weights``: "fp8", in blocks of 128 x
    128, with x quantised, "int8", by row, or "int4", in groups of 128 with zero points; the head's are not.
    """
    b = Builder()
    x = b.buffer("input", "x", dtype, [batch, hidden])
    cos, sin = (b.buffer("input", name, dtype, [batch, head_dim]) for name in ("cos", "sin"))
    make = functools.partial(paged_caches, page_size=page_size, layers=layers) if page_size else static_caches
    caches, counters = make(b, dtype, [batch, groups, length, head_dim]), []

    def weight(name: str, *shape: int) -> _C.Tensor:
        return b.buffer("input", name, dtype, list(shape))

    def value(name: str, *shape: int) -> _C.Tensor:
        return b.buffer("workspace", name, dtype, list(shape))

    def norm(name: str, t: _C.Tensor) -> _C.Tensor:
        operands = [("x", t), ("weight", weight(f"{name}.weight", t.shape[1]))]
        return b.node("rms_norm", operands, value(name, *t.shape), {"eps": 1e-6, "style": "llama"}, name)

    def linear(name: str, t: _C.Tensor, n: int) -> _C.Tensor:
        return linear_of(b, weights, name, t, value(name, batch, n))

    if computed_tables:
        cos, sin = (b.pointwise(op, [cos, sin], value(op, batch, head_dim)) for op in ("add", "mul"))

    def rope(name: str, t: _C.Tensor, num_heads: int) -> _C.Tensor:
        operands = [("x", b.view(t, [batch, num_heads, head_dim])), ("cos", cos), ("sin", sin)]
        return b.node("rope", operands, value(name, batch, num_heads, head_dim), {}, name)

    for i in range(layers):
        at = f"layers.{i}."
        counters.append(b.buffer("input", f"{at}counter", "int64", [1]))
        normed = norm(f"{at}input_norm", x)
        q, k, v = (linear(at + n, normed, h * head_dim) for n, h in (("q", heads), ("k", groups), ("v", groups)))
        q = norm(f"{at}q_norm", b.view(q, [batch * heads, head_dim]))
        k = norm(f"{at}k_norm", b.view(k, [batch * groups, head_dim]))
        q, k = rope(f"{at}q_rope", q, heads), rope(f"{at}k_rope", k, groups)
        operands = [("q", q), ("k_new", k), ("v_new", b.view(v, [batch, groups, head_dim]))]
        operands += [("slot", counters[-1])] if not page_size else []
        operands += caches(at)
        attended = value(f"{at}attended", batch, heads, head_dim)
        task, attrs = ("paged_attention", {}) if page_size else ("attention", {"style": "sdpa"})
        b.node(task, operands, attended, {"scale": head_dim**-0.5, **attrs}, f"{at}attention")
        o = linear(f"{at}o", b.view(attended, [batch, heads * head_dim]), hidden)
        x = b.pointwise("add", [x, o], value(f"{at}residual", batch, hidden), f"{at}residual")
        normed = norm(f"{at}post_norm", x)
        gate, up = linear(f"{at}gate", normed, ffn), linear(f"{at}up", normed, ffn)
        act = b.pointwise("mul", [gate, up], value(f"{at}act", batch, ffn), f"{at}act")
        down = linear(f"{at}down", act, hidden)
        x = b.pointwise("add", [x, down], value(f"{at}output", batch, hidden), f"{at}output")
    final = norm("norm", x)
    logits = b.buffer("output", "logits", dtype, [batch, vocab])
    b.node("linear", [("x", final), ("weight", weight("head.weight", vocab, hidden))], logits, {}, "head")
    b.increment(counters)
    return b.graph
