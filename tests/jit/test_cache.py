"""The cache of compiled kernels: what is built again, what is not, and what several processes see."""

import errno
import json
import multiprocessing
import os
import re
import resource
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from torch_mpk.errors import CacheError, CompileForbiddenError, KernelCompileError, TemporaryFolderError
from torch_mpk.jit import Cache, compile_cuda
from torch_mpk.jit.compiler import Compiled, Compiler
from torch_mpk.jit.manifest import Reading
from torch_mpk.jit.nvcc import Nvcc


class FakeCompiler(Compiler):
    """Reads the files of lines ``reads <path>``, writes what it was given, and counts its runs in a file that other
    processes see."""

    name = "fake"

    def __init__(self, counter: Path, version: str = "1") -> None:
        self.counter = counter
        self.version = version
        self.identity = f"fake {version}"

    @property
    def runs(self) -> int:
        return self._count("x")

    @property
    def listings(self) -> int:
        return self._count("l")

    def _count(self, letter: str) -> int:
        return self.counter.read_text().count(letter) if self.counter.exists() else 0

    def _note(self, letter: str) -> None:
        with self.counter.open("a") as counter:
            counter.write(letter)

    def flags(self, arch: str, ptx: bool) -> list[str]:
        return [arch, str(ptx)]

    def read(self, source: Path, flags: list[str], include_dirs: list[Path]) -> Reading:
        self._note("l")
        if "unlisted" in source.read_text():
            return Reading([], [], "error: no list")
        return Reading(list(_files(source)), include_dirs)

    def compile(self, source: Path, output: Path, flags: list[str], include_dirs: list[Path]) -> Compiled:
        self._note("x")
        text = "".join([source.read_text(), *(path.read_text() for path in _files(source))])
        if "broken" in text:
            return Compiled(False, "fake kernel.cu", "note: reading\nkernel.cu(3): error: broken is broken\nmore")
        output.write_text(f"image of {text} for {flags} " * 100)
        return Compiled(True, "fake kernel.cu", "ptxas info    : Used 40 registers, used 1 barriers, 64 bytes smem")


def _files(source: Path) -> Iterator[Path]:
    return (Path(name) for name in re.findall("^reads (.*)$", source.read_text(), re.MULTILINE))


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    root = tmp_path / "cache"
    monkeypatch.setenv("TORCH_MPK_CACHE_DIR", str(root))
    return root


@pytest.fixture
def compiler(tmp_path: Path) -> FakeCompiler:
    return FakeCompiler(tmp_path / "runs")


@pytest.fixture
def header(tmp_path: Path) -> Path:
    header = tmp_path / "headers" / "header.cuh"
    header.parent.mkdir()
    header.write_text("first")
    return header


def test_the_second_call_does_not_compile(root, compiler):
    first = compile_cuda("a", 90, compiler=compiler)
    second = compile_cuda("a", 90, compiler=compiler)
    assert (compiler.runs, compiler.listings) == (1, 2)
    assert first == second
    assert first.image.startswith(b"image of a for ['sm_90a', 'False']")
    assert (first.kind, first.resources.registers, first.resources.shared_bytes) == ("cubin", 40, 64)
    assert sorted(os.listdir(first.path)) == ["kernel.cu", "kernel.cubin", "log.txt", "report.json"]
    assert os.listdir(root / "tmp") == []
    assert root.stat().st_mode & 0o777 == 0o700


def test_everything_that_decides_the_image_is_in_the_key(root, compiler, header, monkeypatch):
    keys = {compile_cuda("a", 90, compiler=compiler).key}
    keys.add(compile_cuda("b", 90, compiler=compiler).key)
    keys.add(compile_cuda("a", 80, compiler=compiler).key)
    keys.add(compile_cuda("a", 80, ptx=True, compiler=compiler).key)
    keys.add(compile_cuda("a", 90, flags=["-DA"], compiler=compiler).key)
    keys.add(compile_cuda("a", 90, compiler=FakeCompiler(compiler.counter, "2")).key)
    monkeypatch.setattr(FakeCompiler, "variables", ("FAKE_FLAGS",))
    monkeypatch.setenv("FAKE_FLAGS", f"-DB -optf {header}")
    keys.add(compile_cuda("a", 90, compiler=compiler).key)
    header.write_text("-DC")
    keys.add(compile_cuda("a", 90, compiler=compiler).key)
    assert len(keys) == compiler.runs == 8


def test_an_edited_file_with_an_old_time_is_seen(root, compiler, header):
    source = f"reads {header}\n"
    images = [compile_cuda(source, 90, compiler=compiler).image]
    for text in ("other", "third"):  # as long as the first
        header.write_text(text)
        os.utime(header, (0, 0))
        images.append(compile_cuda(source, 90, compiler=compiler).image)
    assert [name in image for name, image in zip((b"first", b"other", b"third"), images)] == [True] * 3
    header.write_text("first")
    assert compile_cuda(source, 90, compiler=compiler).image == images[0]
    assert compiler.runs == 3


def test_times_and_paths_are_not_in_the_key(root, compiler, header, monkeypatch):
    before = compile_cuda(f"reads {header}\n", 90, include_dirs=[header.parent], compiler=compiler)
    os.utime(header)
    shutil.move(root, root.with_name("moved"))
    monkeypatch.setenv("TORCH_MPK_CACHE_DIR", str(root.with_name("moved")))
    after = compile_cuda(f"reads {header}\n", 90, include_dirs=[header.parent], compiler=compiler)
    assert (after.key, after.image, compiler.runs, compiler.listings) == (before.key, before.image, 1, 2)
    elsewhere = compile_cuda(f"reads {header}\n", 90, include_dirs=[root], compiler=compiler)
    assert (elsewhere.key, compiler.runs, compiler.listings) == (before.key, 1, 3)


def test_a_file_edited_during_the_build_is_not_taken_for_the_earlier_one(root, compiler, header, monkeypatch):
    compile_it = FakeCompiler.compile

    def edit_and_compile(self, *args):
        header.write_text("later")
        return compile_it(self, *args)

    monkeypatch.setattr(FakeCompiler, "compile", edit_and_compile)
    assert b"later" in compile_cuda(f"reads {header}\n", 90, compiler=compiler).image
    monkeypatch.setattr(FakeCompiler, "compile", compile_it)
    header.write_text("first")
    assert b"first" in compile_cuda(f"reads {header}\n", 90, compiler=compiler).image
    assert compiler.runs == 3


def test_a_file_that_is_included_from_the_middle_of_a_build_on_counts(root, compiler, header, tmp_path, monkeypatch):
    """The list was made before the edit, and what is read behind it shows the edit already."""
    added, read = tmp_path / "added", FakeCompiler.read
    added.write_text("one")

    def read_includes(self, source, *args):
        found = read(self, source, *args)
        files = [*found.files, *([added] if "added" in header.read_text() else [])]
        header.write_text("added")
        return Reading(files, found.folders)

    monkeypatch.setattr(FakeCompiler, "read", read_includes)
    before = compile_cuda(f"reads {header}\n", 90, compiler=compiler)
    added.write_text("two")
    assert compile_cuda(f"reads {header}\n", 90, compiler=compiler).key != before.key


def test_a_file_that_goes_away_is_the_compilers_error(root, compiler, header):
    source = f"reads {header}\n"
    image = compile_cuda(source, 90, compiler=compiler).image
    header.unlink()
    with pytest.raises(FileNotFoundError):  # as the fake one says it
        compile_cuda(source, 90, compiler=compiler)
    header.write_text("first")
    assert compile_cuda(source, 90, compiler=compiler).image == image


def test_a_compiler_that_does_not_say_what_it_reads_is_an_error(root, compiler):
    with pytest.raises(KernelCompileError, match=r"does not say which files it reads:\nerror: no list"):
        compile_cuda("unlisted", 90, compiler=compiler)
    with pytest.raises(KernelCompileError, match="broken is broken"):
        compile_cuda("unlisted broken", 90, compiler=compiler)
    assert Cache(root, 0).entries() == []


@pytest.mark.parametrize("damage", ["gone", "no JSON", "no report", "wrong types", "other files", "no files"])
def test_a_damaged_manifest_is_made_again(root, compiler, header, damage):
    source = f"reads {header}\n"
    good = compile_cuda(source, 90, compiler=compiler)
    (path,) = (root / "manifests").glob("*/report.json")
    content = json.loads(path.read_text())
    fields = content["report"]
    if damage == "gone":
        shutil.rmtree(path.parent)
    elif damage == "no JSON":
        path.write_bytes(path.read_bytes()[:-9])
    else:
        content["report"] = {
            "no report": [],
            "wrong types": fields | {"files": 3, "names": [None]},
            "other files": fields | {"files": ["/nonexistent"]},
            "no files": fields | {"files": []},
        }[damage]
        path.write_text(json.dumps(content))
    for _ in range(2):
        assert compile_cuda(source, 90, compiler=compiler) == good
    assert (compiler.runs, compiler.listings) == (1, 3)


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
if [[ "$*" = *" -E "* ]]; then echo kernel.o: kernel.cu > files.d; exit; fi
while [ $# -gt 0 ]; do [ "$1" = -o ] && output=$2; shift; done
if [ ! -e {tmp_path}/fast ]; then mktemp > /dev/null; sleep 60 & echo $! $$ > {tmp_path}/pids; wait; fi
echo image > $output
"""
    )
    nvcc.chmod(0o755)
    return nvcc


@pytest.mark.parametrize("moment", ["before Popen returns", "while it runs"])
def test_an_interrupted_build_leaves_no_process_and_no_entry(root, slow_nvcc, tmp_path, monkeypatch, moment):
    def interrupt():
        while not pids.exists() or not pids.read_text().endswith("\n"):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    class SlowPopen(subprocess.Popen):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            is_build = " -E " not in " ".join(args[0])
            while is_build and thread.is_alive():
                time.sleep(0.01)

    def is_alive(pid):
        try:
            return Path(f"/proc/{pid}/stat").read_text().rsplit(")")[1].split()[0] not in "ZX"
        except OSError:
            return False

    pids, compiler = tmp_path / "pids", Nvcc.at(str(slow_nvcc))
    thread = threading.Thread(target=interrupt)
    thread.start()
    if moment == "before Popen returns":
        monkeypatch.setattr(subprocess, "Popen", SlowPopen)
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


class DiskFiller(FakeCompiler):
    """The disk is full once it has run."""

    def compile(self, source: Path, output: Path, flags: list[str], include_dirs: list[Path]) -> Compiled:
        compiled = super().compile(source, output, flags, include_dirs)
        resource.setrlimit(resource.RLIMIT_FSIZE, (16, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
        return compiled


def test_a_full_disk_is_said_with_the_folder_and_what_was_to_be_written(root, tmp_path):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        with pytest.raises(CacheError) as raised:
            compile_cuda("a", 90, compiler=DiskFiller(tmp_path / "runs"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    what = rf"cannot write \d\d+ bytes to the kernel cache {re.escape(str(root))}: File too large"
    assert re.match(rf"{what} \(\d+ bytes are free there\)\. Set TORCH_MPK_CACHE_DIR", str(raised.value))
    assert not list((root / "tmp").iterdir())
    assert compile_cuda("a", 90, compiler=FakeCompiler(tmp_path / "runs")).image.startswith(b"image of a")


def test_an_entry_that_cannot_be_moved_into_place_is_an_error_and_no_endless_loop(root, compiler, monkeypatch):
    def rename(*args):
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    monkeypatch.setattr(Path, "rename", rename)
    with pytest.raises(CacheError, match="bytes to the kernel cache .*: Disk quota exceeded"):
        compile_cuda("a", 90, compiler=compiler)


@pytest.mark.timeout(60)
def test_a_damaged_entry_that_stays_is_an_error_and_no_endless_loop(root, compiler, monkeypatch):
    damaged = compile_cuda("a", 90, compiler=compiler).path
    (damaged / "kernel.cubin").write_bytes(b"other")
    (manifest,) = Cache(root, 2**20, "manifests").entries()
    remove = Cache._remove
    for stays in (damaged, manifest.path):  # as what belongs to another user does
        monkeypatch.setattr(
            Cache, "_remove", lambda self, path, stays=stays: None if path == stays else remove(self, path)
        )
        with pytest.raises(CacheError, match=f"cannot remove {re.escape(str(stays))} from the kernel cache"):
            compile_cuda("a", 90, compiler=compiler)


def test_a_full_folder_of_temporary_files_is_named(root, compiler, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1, limits[1]))
    try:
        with pytest.raises(TemporaryFolderError) as raised:
            compile_cuda("four", 90, compiler=compiler)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    what = f"cannot write 4 bytes to a new folder in {tmp_path}: File too large. Set TMPDIR to a directory"
    assert str(raised.value).startswith(what)
    assert not compiler.runs
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    with pytest.raises(TemporaryFolderError, match="missing: No such file or directory. Set TMPDIR"):
        compile_cuda("four", 90, compiler=compiler)


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


def _edit_and_compile(compiler, header, texts, barrier, queue) -> None:
    barrier.wait()
    for text in texts:
        new = header.with_suffix(f".{os.getpid()}")
        new.write_text(text)
        os.replace(new, header)
        queue.put(compile_cuda(f"reads {header}\n", 90, compiler=compiler).image)


def test_a_file_that_processes_edit_is_never_taken_for_another(root, compiler, header):
    context = multiprocessing.get_context("fork")
    barrier, queue, texts = context.Barrier(4), context.Queue(), [f"text {i}" for i in range(12)]
    parts = [texts[i::4] for i in range(4)]
    workers = [context.Process(target=_edit_and_compile, args=(compiler, header, p, barrier, queue)) for p in parts]
    for worker in workers:
        worker.start()
    images = [queue.get(timeout=60) for _ in texts]
    for worker in workers:
        worker.join()
    assert all(any(text.encode() in image for text in texts) for image in images)
    for text in texts:
        header.write_text(text)
        assert compile_cuda(f"reads {header}\n", 90, compiler=compiler).image.count(f"{text} for".encode()) == 100
    assert os.listdir(root / "tmp") == []


def test_clear(root, compiler):
    for name in ("a", "b"):
        compile_cuda(name, 90, compiler=compiler)
    assert Cache(root, 0).clear() == 2
    assert Cache(root, 0).entries() == []
    compile_cuda("a", 90, compiler=compiler)
    assert compiler.runs == 3
