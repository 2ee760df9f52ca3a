"""setup.py on a tree of two sources and a header: what is compiled after a change, with ninja and without."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

FILES = {
    "include/answer.h": "inline int answer() { return 42; }\n",
    "csrc/reads.cpp": '#include "answer.h"\nint reads() { return answer(); }\n',
    "csrc/alone.cpp": "int alone() { return 1; }\n",
    "torch_mpk/__init__.py": "__version__ = '0'\n",
    "README.md": "",
}


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name in ("setup.py", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    return tmp_path


def build(tree: Path, **environment: str) -> str:
    """What ``setup.py build_ext`` printed."""
    command = [sys.executable, "setup.py", "build_ext", "--inplace"]
    env = {**os.environ, "MAX_JOBS": "1", **environment}
    done = subprocess.run(command, cwd=tree, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert done.returncode == 0, done.stdout
    assert list((tree / "torch_mpk").glob("_C.*.so"))
    return done.stdout


def compiled(output: str) -> set[str]:
    """The sources that ninja names before it compiles them."""
    return {line.split("] ")[1] for line in output.splitlines() if line.startswith("[")}


def test_what_a_change_reaches_is_compiled_again(tree: Path) -> None:
    assert compiled(build(tree)) == {"csrc/alone.cpp", "csrc/reads.cpp"}
    assert compiled(build(tree)) == set()
    (tree / "include" / "answer.h").write_text("inline int answer() { return 43; }\n")
    assert compiled(build(tree)) == {"csrc/reads.cpp"}
    assert compiled(build(tree, CXXFLAGS="-DFLAG")) == {"csrc/alone.cpp", "csrc/reads.cpp"}


def test_without_ninja_everything_is_compiled(tree: Path) -> None:
    # A Python that finds setuptools, and nothing of this environment that ninja might be in.
    hidden = tree / "hidden"
    hidden.mkdir()
    (hidden / "sitecustomize.py").write_text(
        "import importlib.util, shutil\n"
        "find_spec, which = importlib.util.find_spec, shutil.which\n"
        "importlib.util.find_spec = lambda name, *args: None if name == 'ninja' else find_spec(name, *args)\n"
        "shutil.which = lambda name, *args, **kwargs: None if name == 'ninja' else which(name, *args, **kwargs)\n"
    )
    output = build(tree, PYTHONPATH=str(hidden))
    assert "pip install ninja" in output
    assert len(list((tree / "build").rglob("csrc/*.o"))) == 2


def test_an_error_of_the_compiler_ends_the_build(tree: Path) -> None:
    (tree / "csrc" / "alone.cpp").write_text("int alone() { return }\n")
    with pytest.raises(AssertionError, match=r"alone\.cpp:1"):
        build(tree)
