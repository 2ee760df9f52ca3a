"""``python -m torch_mpk new-task``: the two files of a task, working as they are written, to be changed from there."""

from __future__ import annotations

import keyword
from pathlib import Path

from torch_mpk.errors import ArgumentError

PYTHON = '''\
"""TODO: what {name} is."""

import torch

from torch_mpk import task


@task(
    "x[R, H], weight[H]? -> y[R, H]",  # R and H are bound by the operands, "?" may be None
    tile="R",  # one call of the device code for each r: everything with R in its dimensions is cut
    samples=[{{"R": 1, "H": 96}}, {{"R": 5, "H": 1030, "weight": None, "eps": 0.01}}],  # what checks run
)
def {name}(x: torch.Tensor, weight: torch.Tensor | None = None, *, eps: float = 1e-6) -> torch.Tensor:
    """``x`` divided by the largest magnitude of its row, times the weight: computed in fp32, rounded once."""
    wide = x.float()
    y = wide / (wide.abs().amax(-1, keepdim=True) + eps)
    return (y if weight is None else y * weight).to(x.dtype)
'''

CUDA = """\
#pragma once

#include "torch_mpk/device/tile.cuh"  // says what V, threads and tile are

namespace mpk::tasks::{name} {{

// Shared memory of a tile, in bytes.
template <class V>
inline constexpr int kSharedBytes = 0;

// One tile, by all threads of a group: pointers to its slices, in the order of the signature.
template <class V, class Threads, class T, class W>
MPK_DEVICE void compute(Threads& threads, const typename V::Tile& tile, uint8_t* shared, const T* x, const W* weight,
                        T* y) {{
  float most = 0;
  for (int i = threads.rank; i < V::kH; i += Threads::kSize) most = fmaxf(most, fabsf(to_float(x[i])));
  const float divisor = threads.max(most) + float(V::kEps);
  for (int i = threads.rank; i < V::kH; i += Threads::kSize) {{
    float value = to_float(x[i]) / divisor;
    if constexpr (V::Weight::kPresent) value *= to_float(weight[i]);
    y[i] = cast<T>(value);
  }}
}}

}}  // namespace mpk::tasks::{name}
"""


def write(name: str, folder: Path) -> list[Path]:
    """Write ``<name>.py`` and ``<name>.cuh``; returns their paths.

    Raises ArgumentError where the name is none, the folder is not there, or one of the files is.
    """
    if not name.isidentifier() or keyword.iskeyword(name):
        raise ArgumentError(name="NAME", expected="a name such as a Python function has", value=name)
    if not folder.is_dir():
        raise ArgumentError(name="--dir", expected="a folder that exists", value=folder)
    contents = {folder / f"{name}.py": PYTHON, folder / f"{name}.cuh": CUDA}
    for path in contents:
        if path.exists():
            raise ArgumentError(name="NAME", expected="one that is not taken", value=path)
    for path, content in contents.items():
        path.write_text(content.format(name=name))
    return list(contents)
