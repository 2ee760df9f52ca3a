"""The level below layers: the operands of a task one by one, each with its partition over the grid."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch_mpk.config import is_int
from torch_mpk.errors import GridError, LayerError
from torch_mpk.persistent_kernel.grid import Sizes, as_grid, check_block, named_dims, split_dims
from torch_mpk.persistent_kernel.tensor import GlobalTensor, is_list_of, kind_of
from torch_mpk.registry import Operand, Task

_NO_SPLIT = "-1 splits nothing"


@dataclass(frozen=True)
class Input:
    """One operand: ``partition[axis]`` is the dimension that the grid's axis splits, -1 for none."""

    tensor: GlobalTensor | None
    partition: tuple[int, int, int]
    forloop_dim: int
    is_write: bool


class TBGraph:
    """The operands of one task, for ``PersistentKernel.register_task``.

    Args:
        grid_dim: instances of the task along three axes.
        block_dim: threads of an instance; None is inferred.
        forloop_range: iterations of an instance over the dimensions that ``forloop_dim`` names.
        reduction_dimx: for programs that state it; of no effect.

    Raises:
        GridError: a size is not a whole number from 1, or ``block_dim`` not one that Mirage's programs give.
    """

    def __init__(
        self,
        grid_dim: Sequence[int],
        block_dim: Sequence[int] | None = None,
        forloop_range: int = 1,
        reduction_dimx: int = 64,
    ) -> None:
        self.grid_dim = as_grid("TBGraph", grid_dim, "(1, 1, 1) splits nothing")
        check_block("TBGraph", block_dim)
        self.block_dim = None if block_dim is None else tuple(block_dim)
        if not is_int(forloop_range) or forloop_range < 1:
            what = f"forloop_range={forloop_range!r}"
            raise GridError(layer="TBGraph", what=what, expected="an int > 0", advice="1 is no loop")
        self.forloop_range = forloop_range
        self.inputs: list[Input] = []

    def new_input(
        self,
        tensor: GlobalTensor | None,
        partition: Sequence[int] = (-1, -1, -1),
        forloop_dim: int = -1,
        is_write: bool = False,
    ) -> None:
        """Append an operand: the task's inputs as its signature has them, then its outputs.

        Args:
            tensor: None where an optional operand is absent.
            partition: the dimension that each axis of the grid splits; -1: each instance has all of it.
            forloop_dim: the dimension that an instance's loop goes along, -1 for none.
            is_write: the task writes it. Needed for what it writes, and of no effect elsewhere, as in Mirage.

        Raises:
            LayerError: ``tensor`` is none of a ``PersistentKernel``.
            GridError: a dimension is not there, or the grid or loop does not divide it.
        """
        if not isinstance(tensor, GlobalTensor | None):
            what = f"tensor is {kind_of(tensor)}: attach_input it first, and pass what that returns"
            raise LayerError(layer="TBGraph", what=what)
        what = tensor.name if tensor is not None else "None"
        if not is_list_of(partition, is_int) or len(partition) != 3:
            what = f"{what}: partition={partition!r}"
            raise GridError(layer="TBGraph", what=what, expected="three dimensions", advice=_NO_SPLIT)
        x, y, z = partition
        operand = Input(tensor, (x, y, z), forloop_dim, is_write)
        if tensor is not None:
            self._check_divides(tensor, operand)
        self.inputs.append(operand)

    def _check_divides(self, tensor: GlobalTensor, operand: Input) -> None:
        left = list(tensor.shape)
        steps = [*zip("xyz", operand.partition, self.grid_dim), ("forloop", operand.forloop_dim, self.forloop_range)]
        for axis, dim, count in steps:
            if not is_int(dim) or not -1 <= dim < len(left):
                what, expected = f"{tensor.name}: dimension {dim!r} for {axis}", f"-1 to {len(left) - 1}"
                raise GridError(layer="TBGraph", what=what, expected=expected, advice=_NO_SPLIT)
            if dim >= 0:
                if left[dim] % count:
                    what = f"{tensor.name}: {axis}={count} splits dimension {dim} of {list(tensor.shape)}"
                    advice = f"make {'forloop_range' if axis == 'forloop' else 'grid_dim'} one"
                    raise GridError(layer="TBGraph", what=what, expected=f"a divisor of {left[dim]}", advice=advice)
                left[dim] //= count

    def bind(self, task: Task) -> dict[str, GlobalTensor | None]:
        """The tensors by the names of the task's operands. Raises LayerError where their number does not fit."""
        specs = [*task.inputs, *task.outputs]
        required = [spec for spec in specs if not spec.optional]
        counts = sorted({len(required), len(specs)})
        if len(self.inputs) not in counts:
            what = f"the graph has {len(self.inputs)} operands, expected {' or '.join(map(str, counts))}"
            remedy = "pass new_input(None) for an optional one that is absent"
            raise LayerError(layer=task.name, what=f"{what} (signature: {task.signature}): {remedy}")
        if len(self.inputs) == len(required):
            specs = required
        for spec, operand in zip(specs, self.inputs):
            if spec.is_write and not operand.is_write:
                raise LayerError(layer=task.name, what=f"{spec.name} is written: pass new_input(..., is_write=True)")
        return {spec.name: operand.tensor for spec, operand in zip(specs, self.inputs)}

    def check_partition(self, task: Task, tensors: dict[str, GlobalTensor | None], sizes: Sizes) -> None:
        """Raises GridError where the partition does not fit the task's signature.

        An axis must split one named dimension, one along which instances are independent, in every operand that has it.
        """
        specs: dict[str, Operand] = {spec.name: spec for spec in (*task.inputs, *task.outputs)}
        by_tensor = {name: operand for name, operand in zip(tensors, self.inputs) if operand.tensor is not None}
        dims = {name: named_dims(specs[name], len(o.tensor.shape)) for name, o in by_tensor.items() if o.tensor}
        splittable = split_dims(task, sizes)
        for axis, (label, count) in enumerate(zip("xyz", self.grid_dim)):
            if count == 1:
                continue
            split = {name: o.partition[axis] for name, o in by_tensor.items()}
            found = {dims[name][dim]: name for name, dim in split.items() if dim >= 0}
            what = f"axis {label} of grid_dim={self.grid_dim} splits {', '.join(found) or 'nothing'}"
            if len(found) != 1 or not set(found) <= set(splittable):
                expected = f"one of the dimensions it may split: {', '.join(splittable) or 'none'}"
                advice = f"split one in all operands that have it, or make axis {label} of grid_dim 1"
                raise GridError(layer=task.name, what=what, expected=expected, advice=advice)
            (dim,) = found
            for name, names in dims.items():
                if dim in names and split[name] != names.index(dim):
                    expected = f"{name} split along it too"
                    advice = f"give {name} partition[{axis}]={names.index(dim)}"
                    raise GridError(layer=task.name, what=what, expected=expected, advice=advice)
