"""``torch-mpk``, also ``python -m torch_mpk``."""

import pkgutil
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import transformers

import torch_mpk
from torch_mpk.__main__ import main
from torch_mpk.jit import Cache


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_MPK_CACHE_DIR", str(tmp_path / "cache"))
    cache = Cache(tmp_path / "cache", 2**20)
    for key in ("a" * 64, "b" * 64):
        with cache.workspace() as folder:
            (folder / "kernel.cu").write_text("source")
            names = {"names": [f"kernel_{key[0]}", "common"]}
            cache.put(key, folder, {"target": "sm_90a", "compiler": "nvcc 13.0.88", "seconds": 1.5} | names)
    return cache


def test_cache_show_and_clear(cache, capsys):
    main(["cache", "show"])
    lines = capsys.readouterr().out.splitlines()
    assert [line[:16] for line in lines[:2]] == ["a" * 16, "b" * 16]
    assert lines[0].endswith("kernel_a, common  sm_90a, nvcc 13.0.88, 1.5 s")
    assert lines[2].startswith("2 kernels")
    main(["cache", "clear"])
    assert capsys.readouterr().out.startswith("deleted 2 kernels")
    assert cache.entries() == []


def test_cache_clear_of_a_kernel(cache, capsys):
    main(["cache", "clear", "kernel_a"])
    assert capsys.readouterr().out.startswith("deleted 1 kernels kernel_a")
    assert [entry.key[0] for entry in cache.entries()] == ["b"]
    with pytest.raises(SystemExit, match="NAME: expected one of common, kernel_b, got kernel_a"):
        main(["cache", "clear", "kernel_a"])


def test_environment_runs_without_a_gpu_and_shows_settings():
    command = [sys.executable, "-m", "torch_mpk", "env"]
    environment = {"TORCH_MPK_COMPILER": "nvrtc", "TORCH_MPK_LIBCUDA": "/nonexistent", "PATH": ""}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    names = [line.split(": ")[0] for line in done.stdout.splitlines()]
    assert {"torch_mpk", "torch", "python", "headers", "nvcc", "nvrtc", "host compiler", "SIMD tier", "cache"} <= set(
        names
    )
    assert "TORCH_MPK_COMPILER: nvrtc" in done.stdout
    assert f"transformers: {transformers.__version__}" in done.stdout
    assert not any(name.startswith("cuda:") for name in names)


def test_the_script_is_main_and_has_the_packages_version(capsys):
    project = (Path(__file__).parents[1] / "pyproject.toml").read_text()
    [target] = re.findall(r'^torch-mpk = "(.*)"$', project, re.MULTILINE)
    assert pkgutil.resolve_name(target) is main
    with pytest.raises(SystemExit, match="^0$"):
        main(["--version"])
    assert capsys.readouterr().out == f"torch_mpk {torch_mpk.__version__}\n"
    assert re.fullmatch(r"\d+\.\d+\.\d+", torch_mpk.__version__)


@pytest.mark.parametrize("arguments", [[], ["cache"]])
def test_without_a_command_there_is_help(capsys, arguments):
    main(arguments)
    printed = capsys.readouterr().out
    assert printed.startswith("usage: ")
    assert "show " in printed if arguments else "check-task" in printed


def test_an_error_ends_a_command_without_a_traceback(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["torch_mpk", "check-task", str(tmp_path / "none.py")])
    with pytest.raises(SystemExit, match="^ArgumentError: FILE: expected a Python file that declares tasks"):
        runpy.run_module("torch_mpk", run_name="__main__")
