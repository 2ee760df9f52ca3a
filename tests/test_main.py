"""``torch-mpk``, also ``python -m torch_mpk``."""

import importlib
import pkgutil
import re
import runpy
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
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
    with pytest.raises(SystemExit, match="NAME: expected a key .*, or one of common, kernel_b, got kernel_a"):
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


def test_code_of_a_task_has_its_name_in_the_cache(cache, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    main(["new-task", "main_test_scaled"])
    file = tmp_path / "main_test_scaled.py"
    file.write_text(file.read_text().replace("@task(", '@task(cpu="main_test_scaled.cuh", signature=', 1))
    monkeypatch.syspath_prepend(tmp_path)
    declared = importlib.import_module("main_test_scaled").main_test_scaled
    x = torch.randn(3, 96)
    torch.testing.assert_close(torch_mpk.kernel_of(declared)(x), declared(x))
    main(["cache", "show"])
    [line] = [line for line in capsys.readouterr().out.splitlines() if "main_test_scaled  " in line]
    main(["cache", "clear", "main_test_scaled"])
    assert "deleted 1 kernels main_test_scaled" in capsys.readouterr().out
    assert line[:16] not in [entry.key[:16] for entry in cache.entries()]


def test_cache_clear_by_key(cache, capsys):
    main(["cache", "clear", "b" * 16])
    assert [entry.key[0] for entry in cache.entries()] == ["a"]
    with pytest.raises(SystemExit, match="NAME: expected a key of `cache show`, or one of common, kernel_a, got b"):
        main(["cache", "clear", "b" * 15])


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


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (["bench-task", "x.py", "--rounds", "0"], "--rounds: expected an int of at least 1, got '0'"),
        (["bench-task", "x.py", "--rounds", "many"], "--rounds: expected an int of at least 1, got 'many'"),
        (["bench-task", "x.py", "--device", "gpu"], "--device: expected cpu, cuda or cuda:N, got 'gpu'"),
        (["check-task", "x.py", "--time-limit", "0"], "--time-limit: expected a number of seconds above 0, got '0'"),
        (
            ["check-task", "x.py", "--time-limit", "nan"],
            "--time-limit: expected a number of seconds above 0, got 'nan'",
        ),
        (["explain", "llama-1b", "--batch", "0"], "--batch: expected an int of at least 1, got '0'"),
        (["explain", "llama-1b", "--length", "1"], "--length: expected an int of at least 2, got '1'"),
        (["explain", "llama-1b", "--device", "gpu"], "--device: expected cpu, cuda or cuda:N, got 'gpu'"),
        (["explain", "llama-1b", "--device", "meta"], "--device: expected cpu, cuda or cuda:N, got 'meta'"),
        (["explain", "llama-1b", "--device", "cuda:99"], r"--device: torch sees \d+ CUDA devices here, got 'cuda:99'"),
        (["profile", "llama-1b", "--steps", "0"], "--steps: expected an int of at least 1, got '0'"),
        (["profile", "llama-1b", "--position", "-1"], "--position: expected an int of at least 1, got '-1'"),
        (["graph", "x", "--event", "one"], "--event: invalid int value: 'one'"),
    ],
)
def test_a_wrong_option_is_a_line_of_usage(capsys, arguments, match):
    with pytest.raises(SystemExit, match="^2$"):
        main(arguments)
    assert re.search(f"error: argument {match}$", capsys.readouterr().err.rstrip())


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (["explain", "llama-1"], r"MODEL: expected .*, or the path .* \(did you mean 'llama-1b'\?\), got 'llama-1': "),
        (["explain", "empty"], "MODEL: expected .* config, got 'empty': ValueError: Unrecognized model"),
        (["explain", "broken"], "MODEL: expected .* config, got 'broken': OSError: .* not a valid JSON file"),
        (["explain", "vision"], "MODEL: expected .* config, got 'vision': ValueError: Unrecognized configuration"),
        (["profile", "llama-1b", "--length", "516"], "--length: expected at least 518, for --position 512 and .* 516$"),
        (["new-task", "x", "--dir", "nowhere"], "--dir: expected a folder that exists, got nowhere"),
    ],
)
def test_a_wrong_argument_is_a_line(tmp_path, monkeypatch, arguments, match):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    for name in ("empty", "broken"):
        (tmp_path / name).mkdir()
    (tmp_path / "broken" / "config.json").write_text("{")
    transformers.ViTConfig(hidden_size=8, num_hidden_layers=1).save_pretrained("vision")
    with pytest.raises(SystemExit, match=f"^ArgumentError: {match}"):
        main(arguments)


def test_a_reader_that_has_seen_enough_ends_a_command():
    """As ``| head -1`` does."""
    command = [sys.executable, "-m", "torch_mpk", "env"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 128 + signal.SIGPIPE


def test_an_error_ends_a_command_without_a_traceback(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["torch_mpk", "check-task", str(tmp_path / "none.py")])
    with pytest.raises(SystemExit, match="^ArgumentError: FILE: expected a Python file that declares tasks"):
        runpy.run_module("torch_mpk", run_name="__main__")
