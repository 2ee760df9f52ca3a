"""A graph of one small node for each thing a program or a reduction may do."""

from __future__ import annotations

from tests.schedule.decoder_graph import Builder
from torch_mpk import _C


def programs_and_reductions() -> _C.TBGraph:
    """Views, broadcasts, gathers, predicates, casts, in-place stores, sizes, and every reduction."""
    b = Builder()
    x = b.buffer("input", "x", "float32", [4, 6])
    ids = b.buffer("input", "ids", "int64", [5])
    half = b.buffer("input", "half", "bfloat16", [4, 1500])

    def pointwise(p: _C.Program, operands: list[tuple[_C.Tensor, bool, bool]]) -> None:
        named = [(f"{'out0' if write else 'in'}{i}", t, read, write) for i, (t, read, write) in enumerate(operands)]
        b.graph.add_node("pointwise", named, {}, p)

    # y[i, j] = where(j < size, silu(x.T) + 0.3, -inf) as bf16, gathered by ids where an id is below 4, else 0
    y = b.buffer("output", "y", "bfloat16", [5, 6])
    p = _C.Program([5, 6])
    index = p.emit("load", "int64", operand=1, strides=[1, 0])
    row = p.emit("mul", "int64", [index, p.emit("const", "int64", imm=6)])
    in_range = p.emit("lt", "bool", [index, p.emit("const", "int64", imm=4)])
    value = p.emit("silu", "float32", [p.emit("load", "float32", [row, in_range], operand=0, strides=[0, 1])])
    value = p.emit("add", "bfloat16", [p.emit("cast", "bfloat16", [value]), p.emit("const", "float32", imm=0.3)])
    below = p.emit("lt", "bool", [p.emit("index", "int64", operand=1), p.emit("size", "int64", operand=0)])
    value = p.emit("where", "bfloat16", [below, value, p.emit("const", "bfloat16", imm=float("-inf"))])
    p.emit("store", "bfloat16", [value], operand=2, strides=[6, 1])
    pointwise(p, [(x, True, False), (ids, True, False), (y, False, True)])

    # z = floor(x * 4).to(int64) // -3, of x transposed
    z = b.buffer("output", "z", "int64", [6, 4])
    p = _C.Program([6, 4])
    scaled = p.emit(
        "mul", "float32", [p.emit("load", "float32", operand=0, strides=[1, 6]), p.emit("const", "float32", imm=4)]
    )
    whole = p.emit("cast", "int64", [p.emit("floor", "float32", [scaled])])
    p.emit(
        "store",
        "int64",
        [p.emit("floordiv", "int64", [whole, p.emit("const", "int64", imm=-3)])],
        operand=1,
        strides=[4, 1],
    )
    pointwise(p, [(x, True, False), (z, False, True)])

    # bits of x as int32, and what they are of without the lowest four, as float32
    bits, cut = (b.buffer("output", f"bits{i}", dtype, [4, 6]) for i, dtype in enumerate(("int32", "float32")))
    p = _C.Program([4, 6])
    word = p.emit("bit_cast", "int32", [p.emit("load", "float32", operand=0, strides=[6, 1])])
    p.emit("store", "int32", [word], operand=1, strides=[6, 1])
    word = p.emit("bit_and", "int32", [word, p.emit("const", "int32", imm=-16)])
    p.emit("store", "float32", [p.emit("bit_cast", "float32", [word])], operand=2, strides=[6, 1])
    pointwise(p, [(x, True, False), (bits, False, True), (cut, False, True)])

    b.increment([b.buffer("input", "counter", "int64", [1])])

    for op in ("sum", "mean"):
        reduction(b, op, half, "bfloat16")
    for op in ("amax", "amin", "prod"):
        reduction(b, op, x, "float32")
    for op in ("argmax", "argmin"):
        reduction(b, op, half, "int64")
    for op in ("any", "all"):
        reduction(b, op, x, "bool")
    return b.graph


def reduction(b: Builder, op: str, source: _C.Tensor, dtype: str) -> None:
    """Over the last dimension, to an output; ``any`` and ``all`` of what is larger than 2.5."""
    out = b.buffer("output", op, dtype, source.shape[:-1])
    program = _C.Program(source.shape)
    program.emit("load", source.dtype, operand=0, strides=source.strides)
    if op in ("any", "all"):
        program.emit("gt", "bool", [0, program.emit("const", "float32", imm=2.5)])
    b.graph.add_node("reduce", [("in0", source, True, False), ("out0", out, False, True)], {"op": op}, program)


def long_reductions(rows: int, size: int) -> _C.TBGraph:
    """Every kind of state of a reduction: one word or two, with an index or without."""
    b = Builder()
    x = b.buffer("input", "x", "bfloat16", [rows, size])
    counts = b.buffer("input", "counts", "int64", [rows, size])
    for op, source, dtype in (
        ("mean", x, "float32"), ("amin", x, "bfloat16"), ("argmax", x, "int64"), ("any", x, "bool"),
        ("sum", counts, "int64"), ("argmin", counts, "int64"),
    ):  # fmt: skip
        reduction(b, op, source, dtype)
    return b.graph
