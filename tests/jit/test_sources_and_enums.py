"""Kernels of several source files, and parameters that are members of an enum."""

import enum
from pathlib import Path

import pytest
import torch

from torch_mpk import jit
from torch_mpk.errors import KernelSignatureError


class Mode(enum.IntEnum):
    ADD = 1
    SUBTRACT = 2


HELPERS = "inline float changed(float x, int mode) { return mode == 1 ? x + 1 : x - 1; }\n"
SOURCE = """
template <int kMode>
void change(const float* x, float* y, int64_t n, int mode) {
  for (int64_t i = 0; i < n; i++) y[i] = changed(changed(x[i], kMode), mode);
}
"""


@pytest.fixture
def change(tmp_path: Path) -> jit.Kernel:
    (tmp_path / "more").mkdir()
    (tmp_path / "helpers.h").write_text(HELPERS)
    (tmp_path / "more" / "change.cpp").write_text(SOURCE)
    sources = [tmp_path / "helpers.h", tmp_path / "more" / "change.cpp"]

    @jit.kernel(sources, "x[N]: float32 -> y[N]: float32", "change<FIRST>(x, y, N, second)")
    def change(x, *, FIRST: Mode = Mode.ADD, second: Mode = Mode.ADD):  # noqa: N803
        """Plus or minus one, twice."""

    return change


def test_several_files_are_one_source_and_members_are_their_numbers(change: jit.Kernel, tmp_path: Path) -> None:
    x = torch.randn(5)
    torch.testing.assert_close(change(x), x + 2)
    torch.testing.assert_close(change(x, FIRST=Mode.SUBTRACT, second=Mode.SUBTRACT), x - 2)
    torch.testing.assert_close(change(x, second=2), x)  # a member's number
    (tmp_path / "helpers.h").write_text(HELPERS.replace("x + 1", "x + 3"))
    change.reload()
    torch.testing.assert_close(change(x), x + 6)
    assert change.compile(FIRST=Mode.ADD).key != change.compile(FIRST=Mode.SUBTRACT).key


@pytest.mark.parametrize("given", [{"FIRST": 3}, {"second": 0}])
def test_what_is_no_member_is_refused_before_anything_is_compiled(change: jit.Kernel, given: dict[str, int]) -> None:
    expected = r"expected a member of Mode: ADD \(1\), SUBTRACT \(2\)"
    with pytest.raises(KernelSignatureError, match=expected):
        change(torch.ones(1), **given)


def test_sources_that_are_no_files(tmp_path: Path) -> None:
    def f(x):
        """Nothing."""

    with pytest.raises(KernelSignatureError, match="there is no file .*gone.cpp"):
        jit.kernel([tmp_path / "gone.cpp"], "x[N]!: float32", "f(x)")(f)
    for source in ([], [""], 3):
        with pytest.raises(KernelSignatureError, match="expected code, the path of a file, or a list of paths"):
            jit.kernel(source, "x[N]!: float32", "f(x)")
