"""``python -m torch_mpk new-task``: the two files of a task, working as they are written, to be changed from there."""

from __future__ import annotations

import importlib.util
import keyword
from collections.abc import Mapping
from pathlib import Path

import torch

from torch_mpk import registry
from torch_mpk.errors import ArgumentError
from torch_mpk.registry.checks import CPP_KEYWORDS

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

    Raises ArgumentError where the name is none or is taken, the folder is not there, or one of the files is.
    """
    check_name(name)
    if name in (task.name for task in registry.tasks()) or name.endswith("_") or hasattr(torch.ops.mpk, name):
        expected = "one that no task has, nor another's in-place form, which ends in an underscore"
        raise ArgumentError(name="NAME", expected=expected, value=name)
    return write_files(name, folder, {f"{name}.py": PYTHON, f"{name}.cuh": CUDA})


def check_name(name: str) -> None:
    """Raises ArgumentError for what no function of Python and of C++ can be called."""
    if not name.isidentifier() or not name.isascii() or keyword.iskeyword(name):
        raise ArgumentError(name="NAME", expected="a name such as a Python function has", value=name)
    if name in CPP_KEYWORDS:
        raise ArgumentError(name="NAME", expected="a name that C++ has for nothing else", value=name)


def write_files(name: str, folder: Path, templates: Mapping[str, str]) -> list[Path]:
    """Write files, by their names, with ``name`` in their text; returns their paths.

    Raises ArgumentError where a module has the name, the folder is not there, or one of the files is.
    """
    if _is_module(name) and not (folder / f"{name}.py").exists():
        raise ArgumentError(name="NAME", expected="one that no module of Python has, as the file is one", value=name)
    if not folder.is_dir():
        raise ArgumentError(name="--dir", expected="a folder that exists", value=folder)
    contents = {folder / file: text.format(name=name) for file, text in templates.items()}
    for path in contents:
        if path.exists():
            raise ArgumentError(name="NAME", expected="one that is not taken", value=path)
    for path, content in contents.items():
        try:
            path.write_text(content)
        except OSError as error:
            expected = f"a folder that can be written to ({error.strerror})"
            raise ArgumentError(name="--dir", expected=expected, value=folder) from None
    return list(contents)


def _is_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return True
