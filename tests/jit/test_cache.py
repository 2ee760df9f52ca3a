"""The cache of compiled kernels: what is built again, what is not, and what several processes see."""

import json
import multiprocessing
import os
import shutil
import signal
import threading
import time
from pathlib import Path

import pytest

from torch_mpk.errors import CacheError, CompileForbiddenError, KernelCompileError
from torch_mpk.jit import Cache, compile_cuda
from torch_mpk.jit import headers as headers_module
from torch_mpk.jit.compiler import Compiled, Compiler
from torch_mpk.jit.nvcc import Nvcc


class FakeCompiler(Compiler):
    """Writes what it was given, and counts its runs in a file that other processes see."""

    name = "fake"

    def __init__(self, counter: Path, version: str = "1") -> None:
        self.counter = counter
        self.version = version
        self.identity = f"fake {version}"

    @property
    def runs(self) -> int:
        return len(self.counter.read_text()) if self.counter.exists() else 0

    def flags(self, arch: str, ptx: bool) -> list[str]:
        return [arch, str(ptx)]

    def compile(self, source: Path, output: Path, flags: list[str], include_dirs: list[Path]) -> Compiled:
        with self.counter.open("a") as counter:
            counter.write("x")
        text = source.read_text()
        if "broken" in text:
            return Compiled(False, "fake kernel.cu", "note: reading\nkernel.cu(3): error: broken is broken\nmore")
        output.write_text(f"image of {text} for {flags} " * 100)
        return Compiled(True, "fake kernel.cu", "ptxas info    : Used 40 registers, used 1 barriers, 64 bytes smem")


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    root = tmp_path / "cache"
    monkeypatch.setenv("TORCH_MPK_CACHE_DIR", str(root))
    return root


@pytest.fixture
def compiler(tmp_path: Path) -> FakeCompiler:
    return FakeCompiler(tmp_path / "runs")


@pytest.fixture
def own_headers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of our headers that a test may edit."""
    copy = tmp_path / "include"
    shutil.copytree(headers_module.include_dir(), copy)
    monkeypatch.setattr(headers_module, "include_dir", lambda: copy)
    return copy / "torch_mpk"


def test_the_second_call_does_not_compile(root, compiler):
    first = compile_cuda("a", 90, compiler=compiler)
    second = compile_cuda("a", 90, compiler=compiler)
    assert compiler.runs == 1
    assert first == second
    assert first.image.startswith(b"image of a for ['sm_90a', 'False']")
    assert (first.kind, first.resources.registers, first.resources.shared_bytes) == ("cubin", 40, 64)
    assert sorted(os.listdir(first.path)) == ["kernel.cu", "kernel.cubin", "log.txt", "report.json"]
    assert os.listdir(root / "tmp") == []
    assert root.stat().st_mode & 0o777 == 0o700


def test_everything_that_decides_the_image_is_in_the_key(root, compiler, own_headers):
    keys = {compile_cuda("a", 90, compiler=compiler).key}
    keys.add(compile_cuda("b", 90, compiler=compiler).key)
    keys.add(compile_cuda("a", 80, compiler=compiler).key)
    keys.add(compile_cuda("a", 80, ptx=True, compiler=compiler).key)
    keys.add(compile_cuda("a", 90, compiler=FakeCompiler(compiler.counter, "2")).key)
    (own_headers / "new.cuh").write_text("")
    keys.add(compile_cuda("a", 90, compiler=compiler).key)
    (own_headers / "new.cuh").rename(own_headers / "renamed.cuh")
    keys.add(compile_cuda("a", 90, compiler=compiler).key)
    assert len(keys) == compiler.runs == 7


def test_an_edited_header_with_an_old_time_is_seen(root, compiler, own_headers):
    header = own_headers / "abi.h"
    before = compile_cuda("a", 90, compiler=compiler)
    header.write_text(header.read_text().replace("kMaxScalars = 16", "kMaxScalars = 17"))
    os.utime(header, (0, 0))
    assert compile_cuda("a", 90, compiler=compiler).key != before.key
    assert compiler.runs == 2


def test_an_edited_header_of_a_user_is_seen(root, compiler, tmp_path):
    for name, text in {
        "task.cuh": '#pragma once\n#include "part.cuh"\n',
        "part.cuh": '#pragma once\n#include "task.cuh"\n',
    }.items():
        (tmp_path / name).write_text(text)
    source = f'#include "{tmp_path}/task.cuh"\n#include "torch_mpk/abi.h"\n'
    keys = {compile_cuda(source, 90, compiler=compiler).key}
    for name in ("task.cuh", "part.cuh"):
        (tmp_path / name).write_text((tmp_path / name).read_text() + "\n")
        keys.add(compile_cuda(source, 90, compiler=compiler).key)
    assert len(keys) == compiler.runs == 3


def test_times_and_paths_are_not_in_the_key(root, compiler, own_headers, monkeypatch):
    before = compile_cuda("a", 90, compiler=compiler)
    for path in own_headers.rglob("*"):
        os.utime(path)
    shutil.move(root, root.with_name("moved"))
    monkeypatch.setenv("TORCH_MPK_CACHE_DIR", str(root.with_name("moved")))
    after = compile_cuda("a", 90, compiler=compiler)
    assert (after.key, after.image, compiler.runs) == (before.key, before.image, 1)


@pytest.mark.parametrize("damage", ["truncate", "flip", "remove", "no report", "bad report", "empty"])
def test_a_damaged_entry_is_built_again(root, compiler, damage):
    good = compile_cuda("a", 90, compiler=compiler)
    image, report = good.path / "kernel.cubin", good.path / "report.json"
    if damage == "truncate":
        image.write_bytes(good.image[:-1])
    elif damage == "flip":
        image.write_bytes(good.image[:-1] + b"!")
    elif damage == "remove":
        image.unlink()
    elif damage == "no report":
        report.unlink()
    elif damage == "bad report":
        report.write_text('{"files": 3')
    else:
        report.write_text(json.dumps([]))
    assert compile_cuda("a", 90, compiler=compiler).image == good.image
    assert compile_cuda("a", 90, compiler=compiler).image == good.image
    assert compiler.runs == 2


def test_a_compiler_error_shows_command_errors_and_source(root, compiler):
    with pytest.raises(KernelCompileError) as info:
        compile_cuda("broken", 90, compiler=compiler)
    message = str(info.value)
    assert message.splitlines()[1] == "kernel.cu(3): error: broken is broken"
    assert "command: fake kernel.cu" in message
    source = Path(message.split("source: ")[1].splitlines()[0])
    assert source.read_text() == "broken"
    assert "note: reading" in source.with_name("log.txt").read_text()
    with pytest.raises(KernelCompileError, match="broken is broken"):  # a failure is kept, but not taken for a result
        compile_cuda("broken", 90, compiler=compiler)
    assert compiler.runs == 2


@pytest.fixture
def slow_nvcc(tmp_path):
    """An nvcc whose compiler, a process of its own, runs until ``fast`` is there."""
    nvcc = tmp_path / "nvcc"
    nvcc.write_text(
        f"""#!/bin/bash
if [ "$1" = --version ]; then echo V13.0.1; exit; fi
while [ $# -gt 0 ]; do [ "$1" = -o ] && output=$2; shift; done
if [ ! -e {tmp_path}/fast ]; then mktemp > /dev/null; sleep 60 & echo $! $$ > {tmp_path}/pids; wait; fi
echo image > $output
"""
    )
    nvcc.chmod(0o755)
    return nvcc


def test_an_interrupted_build_leaves_no_process_and_no_entry(root, slow_nvcc, tmp_path):
    def interrupt():
        while not pids.exists() or not pids.read_text().endswith("\n"):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    def is_alive(pid):
        try:
            return Path(f"/proc/{pid}/stat").read_text().rsplit(")")[1].split()[0] not in "ZX"
        except OSError:
            return False

    pids, compiler = tmp_path / "pids", Nvcc.at(str(slow_nvcc))
    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        compile_cuda("a", 90, compiler=compiler)
    thread.join()
    started = pids.read_text().split()
    assert len(started) == 2
    deadline = time.monotonic() + 10
    while any(map(is_alive, started)) and time.monotonic() < deadline:  # a signal takes a moment
        time.sleep(0.01)
    assert not any(map(is_alive, started))
    assert os.listdir(root / "tmp") == os.listdir(root / "kernels") == os.listdir(root / "failed") == []
    (tmp_path / "fast").touch()
    assert compile_cuda("a", 90, compiler=compiler).image == b"image\n"


def test_compiling_can_be_forbidden(root, compiler, monkeypatch):
    known = compile_cuda("a", 90, compiler=compiler)
    monkeypatch.setenv("TORCH_MPK_FORBID_COMPILE", "1")
    assert compile_cuda("a", 90, compiler=compiler) == known
    message = r"kernel [0-9a-f]{64} is not in .*cache and TORCH_MPK_FORBID_COMPILE is set: call torch_mpk.precompile"
    with pytest.raises(CompileForbiddenError, match=message):
        compile_cuda("b", 90, compiler=compiler)
    assert compiler.runs == 1


def test_the_least_recently_used_entry_is_evicted(root, compiler, monkeypatch):
    entries = {name: compile_cuda(name, 90, compiler=compiler) for name in "abc"}
    for age, name in enumerate("acb"):  # b was used last, a longest ago
        os.utime(entries[name].path, (1000 + age, 1000 + age))
    size = sum(file.stat().st_size for file in entries["a"].path.iterdir())
    compile_cuda("a", 90, compiler=compiler)  # a use: now c is the oldest
    monkeypatch.setenv("TORCH_MPK_CACHE_GB", str(3.5 * size / 2**30))
    compile_cuda("d", 90, compiler=compiler)
    left = {entry.files["kernel.cu"].decode() for entry in Cache(root, 0).entries()}
    assert left == {"a", "b", "d"}


def test_an_entry_larger_than_the_limit_still_works(root, compiler, monkeypatch):
    monkeypatch.setenv("TORCH_MPK_CACHE_GB", "0")
    for name in "aab":
        assert compile_cuda(name, 90, compiler=compiler).image.startswith(f"image of {name}".encode())
    assert [entry.files["kernel.cu"] for entry in Cache(root, 0).entries()] == [b"b"]


def test_a_cache_that_anyone_can_write_is_refused(root, compiler):
    root.mkdir()
    root.chmod(0o777)
    with pytest.raises(CacheError, match="writable for everyone: run chmod o-w"):
        compile_cuda("a", 90, compiler=compiler)
    assert compiler.runs == 0


def test_a_cache_that_cannot_be_made_says_so(tmp_path, compiler, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TORCH_MPK_CACHE_DIR", str(tmp_path / "file" / "cache"))
    with pytest.raises(CacheError, match="Set TORCH_MPK_CACHE_DIR"):
        compile_cuda("a", 90, compiler=compiler)


def _compile_all(compiler, barrier, queue) -> None:
    barrier.wait()
    queue.put([compile_cuda(f"source {i}", 90, compiler=compiler).image for i in range(20)])


def test_eight_processes_at_once(root, compiler):
    context = multiprocessing.get_context("fork")
    barrier, queue = context.Barrier(8), context.Queue()
    workers = [context.Process(target=_compile_all, args=(compiler, barrier, queue)) for _ in range(8)]
    for worker in workers:
        worker.start()
    results = [queue.get(timeout=60) for _ in workers]
    for worker in workers:
        worker.join()
    assert all(result == results[0] for result in results)
    entries = Cache(root, 0).entries()
    assert {entry.files["kernel.cu"] for entry in entries} == {f"source {i}".encode() for i in range(20)}
    assert os.listdir(root / "tmp") == []


def test_clear(root, compiler):
    for name in ("a", "b"):
        compile_cuda(name, 90, compiler=compiler)
    assert Cache(root, 0).clear() == 2
    assert Cache(root, 0).entries() == []
    compile_cuda("a", 90, compiler=compiler)
    assert compiler.runs == 3
