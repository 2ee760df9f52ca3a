"""Grids of task instances: what a task may be split by, and whether a grid that a user gives fits.

The scheduler chooses the tiles itself, so a grid decides nothing but what it says about the layout of its operands. One
that does not fit is still a mistake: in Mirage, whose programs give it, it reads and writes out of bounds.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

from torch_mpk.config import is_int
from torch_mpk.errors import GridError
from torch_mpk.persistent_kernel.tensor import is_list_of
from torch_mpk.registry import Operand, Task

Sizes = Mapping[str, int]  # of named dimensions; those of "..." are "...0", "...1" and so on
MAX_GRID = 2**31 - 1
LEFT_OUT = "leave grid_dim out, and it is inferred"
BLOCKS = ((128, 1, 1), (256, 1, 1))  # of Mirage's tasks, up to compute capability 8.9 and from 9.0 on


def named_dims(operand: Operand, num_dims: int) -> list[str]:
    """The name of each dimension of a tensor with that many, as the signature has it."""
    if operand.dims[:1] != ("...",):
        return list(operand.dims)
    rest = operand.dims[1:]
    return [f"...{i}" for i in range(num_dims - len(rest))] + list(rest)


def sizes_of(bound: Mapping[str, tuple]) -> dict[str, int]:
    """The sizes of a task's dimensions from what ``Task.check`` returns."""
    leading = bound.get("...", ((), ""))[0]
    sizes = {f"...{i}": size for i, size in enumerate(leading)}
    return sizes | {name: size for name, (size, _) in bound.items() if name != "..."}


def split_dims(task: Task, sizes: Sizes) -> list[str]:
    """The dimensions along which instances of a task are independent of each other.

    Its results have such a dimension, and unless the task computes each element by itself, it is not the last one of
    the first operand: that is what rows are normalised, reduced or multiplied along.
    """
    written = task.outputs or [operand for operand in task.inputs if operand.is_write]
    last = task.inputs[0].dims[-1] if task.inputs and task.inputs[0].dims else None
    names = [name for name in sizes if all(name in operand.dims or name[:3] in operand.dims for operand in written)]
    if task.role == "tile":
        return [name for name in names if name in task.tile or name[:3] in task.tile]
    if task.role == "pointwise":
        return names
    if last == "...":
        last = max((name for name in sizes if name.startswith("...")), default=None)
    return [name for name in names if name != last]


def check_block(layer: str, block_dim: Sequence[int] | None) -> None:
    """Raises GridError unless ``block_dim`` is absent or one that Mirage's programs give, whatever their device."""
    if block_dim is not None and (not is_list_of(block_dim, is_int) or tuple(block_dim) not in BLOCKS):
        expected, advice = " or ".join(map(str, BLOCKS)), "tasks are written for any, so leave block_dim out"
        raise GridError(layer=layer, what=f"block_dim={block_dim!r}", expected=expected, advice=advice)


def check_grid(layer: str, grid_dim: Sequence[int] | None, sizes: Sizes, splittable: Sequence[str]) -> None:
    """Raises GridError unless each axis of ``grid_dim`` divides a dimension of its own among the splittable ones."""
    if grid_dim is None:
        return
    grid = as_grid(layer, grid_dim, LEFT_OUT)
    axes = [n for n in grid if n > 1]
    if len(axes) <= len(splittable):
        for chosen in itertools.permutations(splittable, len(axes)):
            if all(sizes[name] % n == 0 for name, n in zip(chosen, axes)):
                return
    dims = ", ".join(f"{name}={sizes[name]}" for name in splittable) or "nothing"
    expected = f"axes that divide dimensions it may split: {dims}"
    raise GridError(layer=layer, what=f"grid_dim={grid}", expected=expected, advice=LEFT_OUT)


def as_grid(layer: str, grid_dim: Sequence[int], advice: str) -> tuple[int, ...]:
    """Raises GridError, with advice what to do, unless ``grid_dim`` is three sizes from 1."""
    if not is_list_of(grid_dim, lambda n: is_int(n) and n >= 1) or len(grid_dim) != 3:
        expected = "three whole numbers from 1"
        raise GridError(layer=layer, what=f"grid_dim={grid_dim!r}", expected=expected, advice=advice)
    if math.prod(grid_dim) > MAX_GRID:
        raise GridError(layer=layer, what=f"grid_dim={grid_dim}", expected=f"at most {MAX_GRID} in all", advice=advice)
    return tuple(grid_dim)
