"""The tensors of a ``PersistentKernel``."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import fx

from torch_mpk.errors import LayerError

if TYPE_CHECKING:
    from torch_mpk.persistent_kernel.kernel import PersistentKernel

Dim3 = Sequence[int] | None  # the x, y and z of a grid or block; None: inferred


def check_name(layer: str, name: object) -> None:
    """Raises LayerError unless a tensor may be called so."""
    if not isinstance(name, str) or not name:
        raise LayerError(layer=layer, what=f"name={name!r}, expected a string that is not empty")


def kind_of(value: object) -> str:
    """What was given instead, for an error."""
    return "None" if value is None else f"a {type(value).__module__}.{type(value).__name__}".replace("builtins.", "")


def is_list_of(values: object, is_one: Callable[[Any], bool]) -> TypeGuard[Sequence[Any]]:
    """Whether it is a list, a tuple or a torch.Size whose elements are such."""
    return isinstance(values, (list, tuple)) and all(map(is_one, values))


@dataclass(frozen=True)
class Interleaved:
    """A dimension made of several tensors: group g of it is group g of each tensor in turn.

    With one group that is a concatenation. ``sizes`` are the tensors' own along ``dim``, each a multiple of
    ``num_groups``.
    """

    dim: int
    num_groups: int
    sizes: tuple[int, ...]

    @property
    def extents(self) -> list[tuple[int, int]]:
        """Where each tensor's elements lie in a group, as (start, size)."""
        widths = [size // self.num_groups for size in self.sizes]
        return [(sum(widths[:i]), width) for i, width in enumerate(widths)]


@dataclass(eq=False)
class GlobalTensor:
    """A tensor that layers read and write: the caller's, an intermediate one, or one made of others.

    ``attach_input``, ``new_tensor``, ``fuse_tensors`` and ``shuffle_tensors`` make them.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    kernel: PersistentKernel = dataclasses.field(repr=False)
    attached: torch.Tensor | None = dataclasses.field(default=None, repr=False)
    parts: tuple[GlobalTensor, ...] = ()
    # Of ``parts``, or of what a layer wrote here.
    layout: Interleaved | None = dataclasses.field(default=None, repr=False)
    node: fx.Node | None = dataclasses.field(default=None, repr=False)  # its present value; None before it has one

    @property
    def num_dims(self) -> int:
        return len(self.shape)

    def dim(self, d: int) -> int:
        """The size of dimension ``d``, as Mirage's programs ask for it."""
        return self.shape[d]
