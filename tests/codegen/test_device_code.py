"""Device code keeps clear of what compilers get wrong."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import torch_mpk

DEVICE_CODE = sorted(Path(torch_mpk.__file__).parents[1].glob("include/torch_mpk/**/*.cuh"))

# nvcc 13.0 leaves out a loop with a pragma where a discarded branch stands before it that is a loop with braces and has
# none of its own:
#   if constexpr (false)
#     for (...) { ... }
#   #pragma unroll
#   for (...) ...  // is not there
# Host compilers, and so the emulator, do not.
PARENTHESES = r"\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)"
PRAGMAS = r"\s*(?:#pragma[^\n]*\n\s*)*"
BARE_LOOP = re.compile(rf"(?:if constexpr {PARENTHESES}|\belse){PRAGMAS}(?:for|while) {PARENTHESES}{PRAGMAS}\{{")


def bare_loops(source: str) -> list[str]:
    return BARE_LOOP.findall(re.sub("//[^\n]*", "", source))


@pytest.mark.parametrize("path", DEVICE_CODE, ids=lambda path: path.stem)
def test_a_branch_at_compile_time_has_braces_around_its_loop(path: Path) -> None:
    assert not bare_loops(path.read_text())


@pytest.mark.parametrize("pragma", ["", "#pragma unroll\n"])
@pytest.mark.parametrize("branch", ["if constexpr (S::kMany && f(1))", "if constexpr (a) x++;\nelse"])
def test_such_loops_are_found(branch: str, pragma: str) -> None:
    loop = "for (int i = 0; i < f(n); i++) {\n  x += i;\n}\n"
    assert bare_loops(f"{branch}\n{pragma}{loop}")
    assert not bare_loops(f"{branch} {{\n{pragma}{loop}}}\n")
    assert not bare_loops(f"{branch}\n{pragma}for (int i = 0; i < n; i++) x += i;\n")
