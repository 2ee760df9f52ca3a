"""What the real compilers say they read: each way in which a file gets into a kernel, edited, makes another kernel."""

import os
import shutil
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.schedule.decoder_graph import decoder
from torch_mpk import _C
from torch_mpk.errors import CompileError, CompileForbiddenError
from torch_mpk.jit import compile_cuda, compile_host, find_compiler, include_dir
from torch_mpk.jit import headers as headers_of_ours
from torch_mpk.jit.compiler import Compiled
from torch_mpk.jit.host import HostCompiler
from torch_mpk.jit.manifest import Manifest, Reading, named_files, parse_rule, parse_search
from torch_mpk.jit.nvcc import Nvcc
from torch_mpk.jit.nvrtc import Nvrtc

INCLUDE = '#include "part.h"\n'


@dataclass
class Case:
    """A source, what it is compiled with, and the file that is edited."""

    edited: Path
    source: str = INCLUDE
    include_dirs: list[Path] = field(default_factory=list)
    flags: list[str] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)


def headers(folder: Path) -> dict[str, Case]:
    """The ways into any compiler."""
    part, deep = folder / "part.h", folder / "deep.h"
    return {
        "include_dirs": Case(part, include_dirs=[folder]),
        "nested": Case(deep, include_dirs=[folder]),
        "an absolute path": Case(deep, f'#include "{part}"\n'),
        "a computed name": Case(part, "#define STR(x) #x\n#define NAME(x) STR(x.h)\n#include NAME(part)\n", [folder]),
        "-I": Case(part, flags=[f"-I{folder}"]),
        "-I, nested": Case(deep, flags=["-I", str(folder)]),
        "-include": Case(deep, "", flags=["-include", str(part)]),
    }


def of_gcc(folder: Path) -> dict[str, Case]:
    """What goes through GCC's preprocessor, or another one of its kind."""
    part = folder / "part.h"
    return headers(folder) | {
        "-isystem": Case(part, flags=["-isystem", str(folder)]),
        "CPATH": Case(part, environment={"CPATH": f"/nonexistent:{folder}"}),
        "CPLUS_INCLUDE_PATH": Case(part, environment={"CPLUS_INCLUDE_PATH": str(folder)}),
    }


def of_nvcc(folder: Path) -> dict[str, Case]:
    part, options, more = folder / "part.h", folder / "options", folder / "more"
    options.write_text(f"-I{folder}\n-optf {more}\n")
    more.write_text("-DA=1\n")
    host_options = folder / "host"
    host_options.write_text(f"-I{folder}\n")
    for_device = f"#ifdef __CUDA_ARCH_FEAT_SM90_ALL\n{INCLUDE}#endif\n#ifndef __CUDA_ARCH__\n#error host\n#endif\n"
    return of_gcc(folder) | {
        "device code": Case(part, for_device, [folder]),
        "-Xcompiler": Case(part, flags=["-Xcompiler", f"-isystem,{folder}"]),
        "-optf": Case(part, flags=["-optf", str(options)]),
        "the options file": Case(options, "", flags=[f"--options-file={options}"]),
        "an options file of it": Case(more, flags=["-optf", str(options)]),
        "the host's response file": Case(host_options, flags=["-Xcompiler", f"@{host_options}"]),
        "NVCC_PREPEND_FLAGS": Case(part, environment={"NVCC_PREPEND_FLAGS": f"-I{folder}"}),
        "NVCC_APPEND_FLAGS": Case(part, environment={"NVCC_APPEND_FLAGS": f"-DB -optf {options}"}),
        "an options file of NVCC_APPEND_FLAGS": Case(more, environment={"NVCC_APPEND_FLAGS": f"-optf {options}"}),
    }


def of_nvrtc(folder: Path) -> dict[str, Case]:
    part = folder / "part.h"
    return headers(folder) | {
        "--include-path": Case(part, flags=[f"--include-path={folder}"]),
        "--pre-include": Case(part, "", flags=[f"--pre-include={part}"]),
        "a relative path": Case(part, flags=[f"-I{os.path.relpath(folder)}"]),
    }


def of_host(folder: Path) -> dict[str, Case]:
    options, script = folder / "options", folder / "script"
    options.write_text(f"-I{folder}\n")
    script.write_text("{ local: hidden; };")
    for name in ("one", "other"):
        (folder / f"{name}.cpp").write_text(f"int {name}() {{ return 1; }}\n")
        subprocess.run(["g++", "-c", "-fPIC", f"{name}.cpp"], cwd=folder, check=True)
        subprocess.run(["ar", "rcs", f"lib{name}.a", f"{name}.o"], cwd=folder, check=True)
    archive = Case(folder / "libone.a", "", flags=[f"-L{folder}", "-Wl,--whole-archive,-lone,--no-whole-archive"])
    return of_gcc(folder) | {
        "a response file": Case(folder / "part.h", flags=[f"@{options}"]),
        "the response file": Case(options, "", flags=[f"@{options}"]),
        "CXX": Case(folder / "part.h", environment={"CXX": f"g++ -I{folder}"}),
        "an object": Case(folder / "one.o", "", flags=[str(folder / "one.o")]),
        "an archive": archive,
        "LIBRARY_PATH": Case(archive.edited, "", flags=archive.flags[1:], environment={"LIBRARY_PATH": str(folder)}),
        "a version script": Case(script, "", flags=[f"-Wl,--version-script={script}"]),
    }


def usable(name: str) -> bool:
    try:
        find_compiler(name)
    except CompileError:
        return False
    return True


COMPILERS = [name for name in ("nvcc", "nvrtc") if usable(name)]


class Compilations:
    """Compiles for real, or, where only what is read matters, not at all; counts either."""

    def __init__(self, name: str, monkeypatch: pytest.MonkeyPatch, root: Path) -> None:
        self.name, self.root = name, root
        self.runs = self.readings = 0
        compiler = {"nvcc": Nvcc, "nvrtc": Nvrtc, "host": HostCompiler}[name]
        read = compiler.read

        def compile_nothing(_, source, output, flags, include_dirs):
            self.runs += 1
            output.write_text(str(self.runs))
            return Compiled(True, "", "")

        def read_and_count(*args):
            self.readings += 1
            return read(*args)

        monkeypatch.setenv("TORCH_MPK_CACHE_DIR", str(root / "cache"))
        monkeypatch.setattr(compiler, "compile", compile_nothing)
        monkeypatch.setattr(compiler, "read", read_and_count)

    def compile(self, source: str, include_dirs: Sequence[Path] = (), flags: Sequence[str] = ()) -> str:
        """What was compiled last if nothing that counts has changed since, and else something new."""
        if self.name == "host":
            return compile_host(source, include_dirs=include_dirs, flags=flags).read_text()
        compiler = find_compiler(self.name)
        return compile_cuda(source, 90, compiler=compiler, include_dirs=include_dirs, flags=flags).image.decode()


@pytest.fixture(params=[*COMPILERS, "host"])
def compilations(request, monkeypatch, tmp_path):
    return Compilations(request.param, monkeypatch, tmp_path)


@pytest.mark.slow
def test_whatever_a_compiler_reads_is_looked_at(compilations, monkeypatch, tmp_path):
    ways = {"nvcc": of_nvcc, "nvrtc": of_nvrtc, "host": of_host}[compilations.name]
    folder = tmp_path / "headers"
    folder.mkdir()
    (folder / "part.h").write_text('#pragma once\n#include "deep.h"\n')
    (folder / "deep.h").write_text("#pragma once\n")
    stale, missed = [], []
    for name, case in ways(folder).items():
        with monkeypatch.context() as patch:
            for variable, value in case.environment.items():
                patch.setenv(variable, value)
            results, readings = [], []
            for edit in (b"", b"", b"\n", b""):
                with case.edited.open("ab") as file:
                    file.write(edit)
                os.utime(case.edited, (0, 0))
                results.append(compilations.compile(case.source, case.include_dirs, case.flags))
                readings.append(compilations.readings)
        if results[1] == results[2]:
            stale.append(name)
        if results[0] != results[1] or results[2] != results[3] or readings[0] != readings[1] != readings[2]:
            missed.append(name)
    assert (stale, missed) == ([], [])


@pytest.mark.slow
def test_a_new_file_that_would_be_found_first_is_seen(compilations, tmp_path):
    first, missing, last = tmp_path / "first", tmp_path / "missing" / "below", tmp_path / "last"
    for folder in (first / "sub", last / "sub"):
        folder.mkdir(parents=True)
    (last / "sub" / "part.h").write_text('#include "near.h"\n')
    (last / "near.h").write_text("")
    source = '#include <sub/part.h>\n#if __has_include("optional.h")\n#include "optional.h"\n#endif\n'
    flags = [f"-I{first}", f"-I{missing}", f"-I{last}"]
    results = [compilations.compile(source, flags=flags)]
    for path in (
        last / "sub" / "near.h",  # beside the file that includes it
        missing / "sub" / "part.h",  # in a folder that was not there
        first / "sub" / "part.h",
        first / "optional.h",  # which nobody has read
    ):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("// new\n")
        results.append(compilations.compile(source, flags=flags))
        (path.parent / "unrelated.h").write_text("")
        readings = compilations.readings
        assert compilations.compile(source, flags=flags) == results[-1]
        assert compilations.readings == readings
    assert len(set(results)) == 4  # near.h is no more, when sub/part.h is another
    assert results[1] != results[0]


def test_the_current_directory_is_not_searched(compilations, monkeypatch, tmp_path):
    (tmp_path / "optional.h").write_text("")
    source = '#if __has_include("optional.h")\n#error found\n#endif\n'
    monkeypatch.chdir(tmp_path)
    compilations.compile(source)
    assert compilations.runs == 1


def test_headers_that_moved_are_not_compiled_again(compilations, tmp_path):
    for name in ("old", "new"):
        shutil.rmtree(tmp_path / "old", ignore_errors=True)
        folder = tmp_path / name
        folder.mkdir()
        (folder / "part.h").write_text("")
        compilations.compile(INCLUDE, [folder])
    assert (compilations.runs, compilations.readings) == (1, 3)


@pytest.mark.parametrize("name", COMPILERS)
def test_a_kernel_is_compiled_from_its_edited_header(name, monkeypatch, tmp_path):
    monkeypatch.setenv("TORCH_MPK_CACHE_DIR", str(tmp_path / "cache"))
    header, source = tmp_path / "part.h", INCLUDE + 'extern "C" __global__ void kernel(int* x) { *x = PART; }'
    options = {"ptx": True, "flags": [f"-I{tmp_path}"], "compiler": find_compiler(name)}
    for value in (12345, 54321, 12345):
        header.write_text(f"#define PART {value}\n")
        os.utime(header, (0, 0))
        if value in (12345, 54321) and not (tmp_path / f"{value}").exists():
            (tmp_path / f"{value}").touch()
            with monkeypatch.context() as patch:
                patch.setenv("TORCH_MPK_FORBID_COMPILE", "1")
                with pytest.raises(CompileForbiddenError):
                    compile_cuda(source, 80, **options)
        assert f"{value};".encode() in compile_cuda(source, 80, **options).image


@pytest.mark.slow
@pytest.mark.parametrize("name", COMPILERS)
def test_a_generated_kernel_follows_the_headers_of_the_device_alone(name, monkeypatch, tmp_path):
    root = tmp_path / "include" / "torch_mpk"
    shutil.copytree(include_dir() / "torch_mpk", root)
    monkeypatch.setattr(headers_of_ours, "__file__", str(tmp_path / "torch_mpk" / "jit" / "headers.py"))
    compilations = Compilations(name, monkeypatch, tmp_path)
    schedule = _C.make_schedule(decoder(layers=1), _C.Target("cuda", 90, 4, 232448, True))
    source = _C.generate_cuda(schedule).source

    def compiled_after_edits_of(*paths: Path) -> str:
        for path in paths:
            path.write_text(path.read_text() + "\n")
        return compilations.compile(source)

    first = compilations.compile(source)
    folders = [root / name for name in ("codegen", "cpu", "graph", "jit", "runtime", "schedule")]
    of_the_host = [path for folder in folders for path in folder.rglob("*") if path.is_file()]
    assert len(of_the_host) > 10
    assert compiled_after_edits_of(*of_the_host) == first
    assert (compilations.runs, compilations.readings) == (1, 2)  # before and after the first one was compiled
    for path in ("abi/launch.h", "abi/table.h", "device/ring.cuh", "device/tasks/linear.cuh"):
        runs = compilations.runs
        compiled_after_edits_of(root / path)
        assert compilations.runs == runs + 1, path


def test_a_file_is_read_again_when_its_inode_changes(monkeypatch, tmp_path):
    def digests(count: int) -> set[str]:
        """Of the file, looked at twice; it was read so often."""
        reads.clear()
        found = {*manifest.digests(), *manifest.digests()}
        assert len(reads) == count
        return found

    reads, read = [], Path.read_bytes
    header = tmp_path / "part.h"
    header.write_text("first")
    manifest = Manifest.of("", Reading([header], []), [])
    monkeypatch.setattr(Path, "read_bytes", lambda path: (reads.append(path), read(path))[1])
    before, first = header.stat(), digests(2)  # it may change again within one tick of the clock
    monkeypatch.setattr("torch_mpk.jit.manifest._SETTLED_NS", 0)
    time.sleep(0.05)
    assert digests(1) == first
    header.write_text("other")
    os.utime(header, ns=(before.st_atime_ns, before.st_mtime_ns))
    time.sleep(0.05)
    other = digests(1)
    assert len(first | other) == 2
    header.unlink()
    assert len(first | other | digests(0)) == 3


def test_words_that_name_files(tmp_path):
    one, two, loop = (tmp_path / name for name in ("one", "two words", "loop"))
    one.write_text("x")
    two.write_text(f"-DX '@{loop}'")
    loop.write_text(f'@{loop} "{one} -unbalanced')
    assert set(named_files([f"-Wl,-T,{one}", "one", str(tmp_path), "-DX=/nonexistent"])) == {one}
    assert set(named_files([f"@{two}"])) == {two, loop}
    loop.write_text(f"@{loop} -specs={one}")
    assert set(named_files([f"@{two}"])) == {two, loop, one}
    assert set(named_files(["-optf", str(two)])) == {two, loop, one}
    assert set(named_files([str(two)])) == {two}


def test_what_compilers_print_is_read():
    rule = "kernel.o: kernel.cu /a\\ b/c.h \\\n /d$$/\\#e.h\n"
    assert parse_rule(rule) == [Path("kernel.cu"), Path("/a b/c.h"), Path("/d$/#e.h")]
    log = """ignoring nonexistent directory "/none"
#include "..." search starts here:
 /quoted
#include <...> search starts here:
 /usr/include
 /System/Library/Frameworks (framework directory)
End of search list.
 /other
"""
    assert parse_search(log) == list(map(Path, ("/quoted", "/usr/include", "/System/Library/Frameworks", "/none")))
    assert parse_search("") == []
