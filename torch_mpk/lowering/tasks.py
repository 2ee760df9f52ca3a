"""Calls of tasks: named programs are lowered from their reference; row and stream tasks become nodes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import fx

from torch_mpk.errors import UnsupportedError
from torch_mpk.lowering import expr as E
from torch_mpk.lowering.inline import inline
from torch_mpk.lowering.values import Buffer, Value, View, is_injective, is_static
from torch_mpk.registry import Operand, Task

if TYPE_CHECKING:
    from torch_mpk.lowering.lowerer import Lowerer

PROGRAM_ROLES = ("pointwise", "reduce")


def lower_task(
    lx: Lowerer, node: fx.Node, args: Sequence[object], kwargs: dict[str, object]
) -> Value | list[Value] | None:
    """``args`` are the operands' values, in the signature's order; ``kwargs`` the attributes, and ``out``."""
    task: Task = node.target
    if task.role in PROGRAM_ROLES:
        return _program(lx, node, task)
    out = kwargs.pop("out", None)
    present = [(spec, value) for spec, value in zip(task.inputs, args, strict=False) if value is not None]
    given = [(spec, out) for spec in task.outputs if isinstance(out, Value)]
    _check_stored(task, present)
    operands = _operands(lx, task, present + given)
    results: list[Value] = [view for _, view, *_ in operands[len(present) :]]
    made = [] if given or not task.outputs else zip(task.outputs, task.results(node.meta["val"]), strict=True)
    for spec, val in made:
        meta = lx.meta(val)
        if not is_static(meta.shape):
            raise UnsupportedError(f"{task.name}: the size of {spec.name} is known only at run time")
        result = lx.new_buffer(meta.dtype, meta.shape)
        operands.append((spec.name, result, False, True))
        results.append(result)
    if task.role == "tile":
        _check_tiles(lx, node, task, [(name, view) for name, view, _, is_write in operands if is_write])
    lx.task(
        task.name, operands, {name: task.attrs[name].type(value) for name, value in task.bind_attrs(kwargs).items()}
    )
    if task.name == "topk":
        _, (_, values, *_), _ = operands
        values.buffer.falling = values.buffer.issued
    return results if len(results) > 1 else next(iter(results), None)


def _check_stored(task: Task, present: Sequence[tuple[Operand, object]]) -> None:
    """Users' code knows no types for what only stores."""
    for spec, value in present:
        if task.role != "stream" and isinstance(value, Value) and value.dtype in E.STORED:
            raise UnsupportedError(
                f"{task.name}: {spec.name} is {E.dtype_name(value.dtype)}, which its code cannot read"
            )


def _check_tiles(lx: Lowerer, node: fx.Node, task: Task, written: Sequence[tuple[str, View]]) -> None:
    """What the scheduler takes for granted: there are tiles, they have code, and no two write the same memory."""
    buffers = [view.buffer for _, view in written]
    for name, view in written:
        if view.numel == 0:
            raise UnsupportedError(f"{task.name}: {name} has no elements")
        if is_static(view.shape) and is_static(view.strides) and not is_injective(view.shape, view.strides):
            raise UnsupportedError(f"{task.name}: {name} is written in place and has elements that share memory")
        if buffers.count(view.buffer) > 1:
            raise UnsupportedError(f"{task.name}: {name} and another operand written in place may share memory")
    devices = {arg.meta["val"].device.type for arg in node.all_input_nodes}
    if "cuda" not in devices:
        return
    if not (task.header or task.headers):
        raise UnsupportedError(f"{task.name} has no device code: write {task.name}.cuh beside its Python file")
    if not task.runs_code(arg.meta["val"].dtype for arg in node.all_input_nodes):
        raise UnsupportedError(
            f"{task.name}: operands are float64, and its device code computes in float: declare it with float64=True "
            "where it computes in double"
        )


def _operands(lx: Lowerer, task: Task, present: Sequence[tuple]) -> list[tuple[str, View, bool, bool]]:
    written = [_in_place(lx, task, spec, value).buffer for spec, value in present if spec.is_write]
    for spec, value in present:
        if not spec.is_write:
            lx.operand(value)
    # Giving one operand memory may emit a write that overwrites another's: that one is found in its copy now.
    return [
        (
            spec.name,
            _in_place(lx, task, spec, value)
            if spec.is_write
            else _read(lx, value, written, spec.name in task.traits.any_strides),
            spec.is_read,
            spec.is_write,
        )
        for spec, value in present
    ]


def _read(lx: Lowerer, value: Value, written: Sequence[Buffer], any_strides: bool) -> View:
    view = lx.operand(value)
    if not is_static((*view.shape, *view.strides)):
        raise UnsupportedError("an operand whose size is known only at run time")
    are_apart = view.shape and view.shape[-1] != 1 and view.strides[-1] != 1
    if (are_apart and not any_strides) or view.buffer in written:
        return lx.copy(view, version=view.buffer.committed)  # writes that are only issued come after this operation
    return view


def _in_place(lx: Lowerer, task: Task, spec: Operand, value: Value) -> View:
    view = lx.owned_view(value)
    if not is_static((*view.shape, *view.strides)):
        raise UnsupportedError(f"{task.name}: the size of {spec.name} is known only at run time")
    if view.shape[-1] != 1 and view.strides[-1] != 1:
        raise UnsupportedError(
            f"{task.name}: {spec.name} is written in place and has inner stride {view.strides[-1]}, expected 1"
        )
    return view


def _program(lx: Lowerer, node: fx.Node, task: Task) -> Value | None:
    """Lower the ATen operations of the task's reference in the node's place."""

    def call(*operands: torch.Tensor | None, out: torch.Tensor | None = None, **attrs: object) -> object:
        missing = len(task.inputs) - len(operands)
        result = task.reference(*operands, *[None] * missing, **task.bind_attrs(attrs))
        return result if out is None else out.copy_(result)

    results = inline(lx, node, call)
    return results[0] if task.outputs else None
