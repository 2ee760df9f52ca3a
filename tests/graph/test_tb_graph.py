"""TBGraph refuses what does not fit, and orders in-place effects by program order."""

from __future__ import annotations

import pytest

from torch_mpk import _C

_C.register_task(
    "graph_test_matvec",
    "stream",
    [("x", ["R", "K"], False, True, False), ("w", ["N", "K"], False, True, False)]
    + [("bias", ["N"], True, True, False), ("y", ["R", "N"], False, False, True)],
    ["scale"],
    "x.cuh",
)


def tensor(graph: _C.TBGraph, name: str, *shape: int, kind: str = "input") -> _C.Tensor:
    strides = [1] * len(shape)
    for d in range(len(shape) - 1, 0, -1):
        strides[d - 1] = strides[d] * shape[d]
    numel = strides[0] * shape[0] if shape else 1
    return _C.Tensor(graph.add_buffer(name, kind, 0, numel * 4), "float32", shape, strides)


def copy_program(n: int) -> _C.Program:
    program = _C.Program([n])
    program.emit("store", "float32", [program.emit("load", "float32", operand=0, strides=[1])], operand=1, strides=[1])
    return program


def test_named_dimensions_must_agree() -> None:
    g = _C.TBGraph()
    operands = [("x", tensor(g, "x", 1, 8), True, False), ("w", tensor(g, "w", 4, 16), True, False)]
    with pytest.raises(ValueError, match="graph_test_matvec: w has K=16, but K=8 was bound by x"):
        g.add_node("graph_test_matvec", [*operands, ("y", tensor(g, "y", 1, 4), False, True)], {"scale": 1.0})


def test_optional_operands_and_required_attributes() -> None:
    g = _C.TBGraph()
    x, w, y = tensor(g, "x", 1, 8), tensor(g, "w", 4, 8), tensor(g, "y", 1, 4)
    operands = [("x", x, True, False), ("w", w, True, False), ("y", y, False, True)]
    assert g.add_node("graph_test_matvec", operands, {"scale": 1.0}) == 0
    assert g.nodes[0].attrs == {"scale": 1.0}
    with pytest.raises(ValueError, match="attribute 'scale' is missing"):
        g.add_node("graph_test_matvec", operands)
    with pytest.raises(ValueError, match="operand 'w' is missing, found 'y' in its place"):
        g.add_node("graph_test_matvec", [operands[0], operands[2]], {"scale": 1.0})
    with pytest.raises(ValueError, match="y must be written"):
        g.add_node("graph_test_matvec", [*operands[:2], ("y", y, True, False)], {"scale": 1.0})


def test_views_stay_inside_their_buffer() -> None:
    g = _C.TBGraph()
    x = tensor(g, "x", 8)
    outside = _C.Tensor(x.buffer, "float32", [8], [1], 1)
    with pytest.raises(ValueError, match="reaches byte 36 of buffer 'x', which has 32"):
        g.add_node("pointwise", [("in0", outside, True, False), ("out0", x, False, True)], {}, copy_program(8))


def test_unknown_task_lists_the_known() -> None:
    with pytest.raises(ValueError, match="no task is named 'matmull'; registered are: .*pointwise"):
        _C.TBGraph().add_node("matmull", [])


def test_a_name_has_one_signature() -> None:
    with pytest.raises(ValueError, match="already registered with another signature"):
        _C.register_task("graph_test_matvec", "row", [], [], "")


def test_dependencies_follow_program_order_and_bytes() -> None:
    g = _C.TBGraph()
    x, y = tensor(g, "x", 8), tensor(g, "y", 8, kind="workspace")
    halves = [_C.Tensor(x.buffer, "float32", [4], [1], 4 * i) for i in range(2)]
    first = g.add_node("pointwise", [("in0", x, True, False), ("out0", y, False, True)], {}, copy_program(8))
    low = g.add_node("pointwise", [("in0", y, True, False), ("out0", halves[0], False, True)], {}, copy_program(4))
    high = g.add_node(
        "pointwise", [("in0", halves[0], True, False), ("out0", halves[1], False, True)], {}, copy_program(4)
    )
    edges = {(d.source, d.target, d.hazard) for d in g.dependencies()}
    assert edges == {(first, low, "RAW"), (first, low, "WAR"), (low, high, "RAW"), (first, high, "WAR")}


@pytest.mark.parametrize(
    ("offset", "columns", "is_apart"), [(0, 3, False), (2, 2, False), (3, 2, True), (3, 3, True), (4, 4, False)]
)
def test_views_that_take_turns_do_not_meet(offset: int, columns: int, is_apart: bool) -> None:
    """Blocks of three elements out of every six, and others, which the last case has reach into the next turn."""
    g = _C.TBGraph()
    x = tensor(g, "x", 24)
    program = _C.Program([3])
    one = _C.Tensor(x.buffer, "float32", [3, 3], [6, 1])
    other = _C.Tensor(x.buffer, "float32", [3, columns], [6, 1], offset)
    for view in (one, other):
        program = _C.Program(view.shape)
        value = program.emit("const", "float32", imm=1)
        program.emit("store", "float32", [value], operand=0, strides=view.strides)
        g.add_node("pointwise", [("out0", view, False, True)], {}, program)
    assert (g.dependencies() == []) == is_apart


@pytest.mark.parametrize(
    ("emit", "message"),
    [
        (lambda p: p.emit("add", "float32", [0]), "expected 2 to 2 arguments, got 1"),
        (lambda p: p.emit("neg", "float32", [7]), "argument 7 does not precede it"),
        (lambda p: p.emit("load", "float32", operand=5, strides=[1]), "operand 5 of 2"),
        (lambda p: p.emit("load", "float32", operand=0, strides=[]), "expected 1 strides, got 0"),
        (lambda p: p.emit("exp", "int64", [0]), "needs a floating dtype, got int64"),
        (lambda p: p.emit("bit_and", "float32", [0, 0]), "needs an integer dtype, got float32"),
        (lambda p: p.emit("lt", "float32", [0, 0]), "its dtype is bool"),
        (lambda p: p.emit("index", "int64", operand=1), "dimension 1 of 1"),
        (lambda p: p.emit("where", "float32", [0, 0, 0]), "condition must be bool"),
        (lambda p: p.emit("load", "float32", [0], operand=0, strides=[1]), "offset must be int64"),
    ],
)
def test_malformed_programs_are_refused(emit, message) -> None:
    program = _C.Program([8])
    program.emit("load", "float32", operand=0, strides=[1])
    emit(program)
    with pytest.raises(ValueError, match=message):
        program.check(2)


def test_unknown_operation() -> None:
    with pytest.raises(ValueError, match="'fma' is not an operation"):
        _C.Program([1]).emit("fma", "float32")
