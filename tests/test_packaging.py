"""The wheel built from this tree works away from it: the C++ core, every module, and the headers kernels need."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# Long enough to compile the C++ core from nothing, on a busy machine.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(660)]

USE = """
import torch, torch_mpk, warnings
from pathlib import Path
from torch_mpk import _C, jit
from torch_mpk.errors import MpkWarning

site = Path({site!r})
assert Path(torch_mpk.__file__).is_relative_to(site), torch_mpk.__file__
assert Path(_C.__file__).is_relative_to(site), _C.__file__
include_dir = Path(jit.include_dir())
assert include_dir.is_relative_to(site) and (include_dir / "torch_mpk" / "abi" / "launch.h").is_file(), include_dir

def f(x, weight):
    return torch.nn.functional.silu(torch.nn.functional.linear(x, weight)) + x

x, weight = torch.randn(3, 64), torch.randn(64, 64)
warnings.simplefilter("error", MpkWarning)  # which would say that it ran eagerly
with torch.inference_mode():
    torch.testing.assert_close(torch.compile(f, backend="mpk")(x, weight), f(x, weight))
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        str(out),
        ".",
    ]
    subprocess.run(command, cwd=ROOT, check=True, timeout=600)
    [wheel] = out.glob("torch_mpk-*.whl")
    return wheel


def test_wheel_carries_every_module_and_header(wheel: Path) -> None:
    carried = {name for name in zipfile.ZipFile(wheel).namelist() if name.startswith("torch_mpk/")}
    files = [
        path
        for suffix in ("py", "pyi", "html", "cuh", "h", "cpp")
        for path in (ROOT / "torch_mpk").rglob(f"*.{suffix}")
    ]
    modules = {str(path.relative_to(ROOT)) for path in files}
    headers = {f"torch_mpk/{path.relative_to(ROOT)}" for path in (ROOT / "include").rglob("*") if path.is_file()}
    assert "torch_mpk/include/torch_mpk/abi/launch.h" in headers
    assert {name for name in carried if not name.endswith(".so")} == modules | headers


def test_wheel_works_outside_the_clone(wheel: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(site)]
    subprocess.run([*install, str(wheel)], cwd=tmp_path, check=True, timeout=120)
    environment = {**os.environ, "PYTHONPATH": str(site), "TORCH_MPK_CACHE_DIR": str(tmp_path / "cache")}
    command = [sys.executable, str(site / "bin" / "torch-mpk"), "--version"]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, check=True, timeout=60, capture_output=True, text=True
    )
    assert wheel.name.startswith(done.stdout.strip().replace(" ", "-")), done.stdout
    script = USE.format(site=str(site))
    subprocess.run(
        [sys.executable, "-c", script],
        cwd=tmp_path,
        env=environment,
        check=True,
        timeout=280,
    )
