"""The tensors of a ``PersistentKernel``."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import fx

if TYPE_CHECKING:
    from torch_mpk.persistent_kernel.kernel import PersistentKernel

Dim3 = Sequence[int] | None  # the x, y and z of a grid or block; None: inferred


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
    layout: Interleaved | None = None  # of ``parts``, or of what a layer wrote here
    node: fx.Node | None = dataclasses.field(default=None, repr=False)  # its present value; None before it has one

    @property
    def num_dims(self) -> int:
        return len(self.shape)

    def dim(self, d: int) -> int:
        """The size of dimension ``d``, as Mirage's programs ask for it."""
        return self.shape[d]
