"""Task graphs as JSON, and back: what is kept of a program of the CPU, and graphs that tests record."""

from __future__ import annotations

from typing import Any

from torch_mpk import _C


def pack_graph(graph: _C.TBGraph) -> dict[str, Any]:
    """All of a graph, as what JSON takes."""
    buffers = [[b.name, b.kind, b.index, b.bytes] for b in graph.buffers]
    return {"buffers": buffers, "nodes": [_pack_node(node) for node in graph.nodes]}


def _pack_node(node: _C.Node) -> list[Any]:
    operands = []
    for o in node.operands:
        t = o.tensor
        operands.append([o.name, t.buffer, t.dtype, t.shape, t.strides, t.offset, o.is_read, o.is_write])
    program = None
    if node.program is not None:
        instrs = [[i.op, i.dtype, i.args, i.operand, i.strides, i.imm] for i in node.program.instrs]
        program = [node.program.domain, instrs]
    return [node.task, operands, node.attrs, program, node.label]


def unpack_graph(packed: dict[str, Any]) -> _C.TBGraph:
    """The graph that ``pack_graph`` was given. Raises KeyError, TypeError or ValueError where it was given none."""
    graph = _C.TBGraph()
    for buffer in packed["buffers"]:
        graph.add_buffer(*buffer)
    for task, operands, attrs, program, label in packed["nodes"]:
        rows = [(name, _C.Tensor(*tensor), is_read, is_write) for name, *tensor, is_read, is_write in operands]
        graph.add_node(task, rows, attrs, None if program is None else _unpack_program(*program), label)
    return graph


def _unpack_program(domain: list[int], instrs: list[list[Any]]) -> _C.Program:
    program = _C.Program(domain)
    for op, dtype, args, operand, strides, imm in instrs:
        program.emit(op, dtype, args, operand=operand, strides=strides, imm=imm)
    return program
