"""Code asks for what it needs of a chip by name: the folders of chips alone compare numbers of architectures."""

from __future__ import annotations

import io
import re
import tokenize
from pathlib import Path

import pytest

from torch_mpk import _C
from torch_mpk.jit import compile_host

ROOT = Path(__file__).parents[2]
NUMBER = r"\b(?:\w*_)?(?:arch|capability)_?\b"
OPERATOR = r"(?:[<>=!]=|(?<!<)<(?!<)|(?<![->])>(?!>)|//?|%)"
COMPARED = re.compile(
    rf"{NUMBER}(?:\s*\(\s*\))?\s*{OPERATOR}(?!\s*nullptr)"  # arch >= 90, arch / 10, get_device_capability() < (9, 0)
    rf"|(?:\d|{NUMBER})\s*{OPERATOR}\s*(?:\w+(?:\.|->))*{NUMBER}"  # 90 <= target.arch
)
CONDITION = re.compile(r"^\s*#\s*(?:el)?ifn?(?:def)?\b.*\bMPK_ARCH\b", re.MULTILINE)
USED = re.compile(rf"\b(?:MPK_ARCH|__CUDA_ARCH__)\s*{OPERATOR}")

HOST_FOLDERS = ("csrc/schedule", "csrc/kernels", "csrc/codegen", "csrc/jit", "csrc/runtime", "csrc/graph")
DEVICE_FOLDERS = ("include/torch_mpk", "torch_mpk/tasks")
DEVICE_ARCHS = ROOT / "include" / "torch_mpk" / "device" / "arch"
SUFFIXES = {".h", ".hpp", ".cpp", ".cuh", ".cu"}


def cpp_without_comments(text: str) -> str:
    """Nor strings. Lines stay where they are."""
    pattern = r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])\''
    return re.sub(pattern, lambda found: "\n" * found[0].count("\n") or " ", text, flags=re.DOTALL)


def python_without_comments(text: str) -> str:
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    left_out = {tokenize.COMMENT, tokenize.STRING}
    return " ".join(token.string for token in tokens if token.type not in left_out)


def sources() -> list[Path]:
    found = [path for folder in (*HOST_FOLDERS, *DEVICE_FOLDERS) for path in (ROOT / folder).rglob("*")]
    cpp = [path for path in found if path.suffix in SUFFIXES and DEVICE_ARCHS not in path.parents]
    python = [path for path in (ROOT / "torch_mpk").rglob("*.py") if path.relative_to(ROOT) not in MIRAGES]
    return sorted([*cpp, *python])


# What Mirage's programs ask of a device, which its own examples compare.
MIRAGES = {Path("torch_mpk/persistent_kernel/kernel.py")}


def comparisons(path: Path) -> list[str]:
    text = path.read_text()
    code = python_without_comments(text) if path.suffix == ".py" else cpp_without_comments(text)
    return [found[0] for pattern in (COMPARED, CONDITION, USED) for found in pattern.finditer(code)]


def test_no_number_of_an_architecture_is_compared_outside_of_the_chips() -> None:
    paths = sources()
    assert {"rows.cpp", "ring.cuh", "admission.py", "ranks.cuh", "cuda.cuh", "launch.cpp"} <= {p.name for p in paths}
    found = {str(path.relative_to(ROOT)): each for path in paths if (each := comparisons(path))}
    assert not found, "ask for what is needed by name: csrc/arch/arch.h, include/torch_mpk/device/arch"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.cpp", "if (schedule.target.arch >= 90) f();"),
        ("a.cpp", "x == kIn && arch / 10 == 9"),
        ("a.cpp", "const bool old = 90 > device_.arch;"),
        ("a.cpp", "target.device_arch % 10"),
        ("a.cuh", "#if MPK_ARCH >= 900\n"),
        ("a.cuh", "#elif defined(X) && __CUDA_ARCH__ < 900\n"),
        ("a.cuh", "constexpr bool kNew = MPK_ARCH >= 900;"),
        ("a.py", "ok = target.arch >= 90"),
        ("a.py", "generation = info.arch // 10"),
        ("a.py", "if torch.cuda.get_device_capability() != (9, 0): pass"),
    ],
)
def test_a_comparison_is_found(name: str, text: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text(text)
    assert comparisons(path)
    path.write_text(f'"""{text}"""' if name.endswith("py") else f'/* {text} */ const char* s = "{text.strip()}";')
    assert not comparisons(path)


@pytest.mark.parametrize("arch", [None, *(device for arch in _C.archs() for device in arch.devices)])
def test_device_code_has_what_the_host_plans_with(arch: int | None) -> None:
    """None: the host's pass of a device compiler, which knows no architecture."""
    chip = _C.arch_of_device(arch or 80)
    assert chip is not None
    said = {
        "kHasBulkCopies": chip.has_bulk_copies,
        "kHasWarpgroupProducts": chip.has_warpgroup_products,
        "kOverlapsLaunches": chip.overlaps_launches,
    }
    define = "" if arch is None else f"#define __CUDA_ARCH__ {arch}0\n"
    checks = "".join(f"static_assert(mpk::arch::{name} == {str(value).lower()});\n" for name, value in said.items())
    compile_host(define + '#include "torch_mpk/device/arch/arch.cuh"\n' + checks)
