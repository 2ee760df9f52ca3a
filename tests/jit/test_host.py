"""C++ for the host: the library, its cache key, and what is said where it cannot be made."""

import ctypes
import os
import shutil

import pytest

from torch_mpk.errors import KernelCompileError, NoHostCompilerError
from torch_mpk.jit import Cache, compile_host, precompile_host
from torch_mpk.jit.host import HostCompiler

SOURCE = """
#include <cstdint>
#include "part.h"
extern "C" __attribute__((visibility("default"))) int answer() { return PART + EXTRA; }
int hidden() { return 0; }
"""


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_MPK_CACHE_DIR", str(tmp_path / "cache"))
    return Cache(tmp_path / "cache", 0)


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "a folder: $1"  # make would need each of these quoted
    folder.mkdir()
    (folder / "part.h").write_text('#include "deep.h"\n')
    (folder / "deep.h").write_text("#define PART 1\n")
    return folder


def build(folder, extra=2):
    library = compile_host(SOURCE, include_dirs=[folder], flags=[f"-DEXTRA={extra}"])
    return library, ctypes.CDLL(str(library)).answer()


def test_the_second_call_does_not_compile(cache, folder, monkeypatch):
    first, answer = build(folder)
    assert answer == 3
    assert sorted(os.listdir(first.parent)) == ["kernel.cpp", "kernel.so", "log.txt", "report.json"]
    monkeypatch.setenv("TORCH_MPK_FORBID_COMPILE", "1")
    assert build(folder) == (first, 3)
    for path in folder.iterdir():
        os.utime(path)
    moved = folder.rename(folder.with_name("moved"))
    assert build(moved) == (first, 3)  # neither times nor paths play a part
    assert not hasattr(ctypes.CDLL(str(first)), "_Z6hiddenv")


def test_what_decides_the_library_is_in_its_key(cache, folder):
    assert build(folder)[1] == 3
    assert build(folder, extra=5)[1] == 6
    for name in ("deep.h", "part.h"):
        path = folder / name
        path.write_text(path.read_text() + "#undef PART\n#define PART 10\n")
        os.utime(path, (0, 0))
        assert build(folder)[1] == 12
        path.write_text(path.read_text() + "// another comment\n")
        build(folder)
    assert len(cache.entries()) == 6


def test_a_header_edited_during_the_build_is_not_taken_for_the_earlier_one(cache, folder, monkeypatch):
    compile_it = HostCompiler.compile

    def edit_and_compile(self, *args):
        (folder / "deep.h").write_text("#define PART 7\n")
        return compile_it(self, *args)

    monkeypatch.setattr(HostCompiler, "compile", edit_and_compile)
    assert build(folder)[1] == 9
    (folder / "deep.h").write_text("#define PART 1\n")
    monkeypatch.undo()
    monkeypatch.setenv("TORCH_MPK_CACHE_DIR", str(cache.root))
    assert build(folder)[1] == 3


def test_a_header_is_parsed_once_and_anew_when_it_changes(cache, folder):
    source = 'extern "C" __attribute__((visibility("default"))) int answer() { return PART; }'

    def build():
        header = precompile_host('#include "part.h"\n', include_dirs=[folder], flags=["-O1"])
        flags = ["-O1", "-include", str(header), "-Winvalid-pch", "-Werror"]  # an error where it is not taken
        return header, ctypes.CDLL(str(compile_host(source, include_dirs=[folder], flags=flags))).answer()

    first, answer = build()
    assert answer == 1
    assert sorted(os.listdir(first.parent)) == ["kernel.h", "kernel.h.gch", "log.txt", "report.json"]
    assert build() == (first, 1)
    (folder / "deep.h").write_text("#define PART 4\n")
    second, answer = build()
    assert answer == 4
    assert first != second


def test_an_error_of_the_compiler_is_shown(cache, folder):
    with pytest.raises(KernelCompileError, match=r"(?s)kernel.cpp:1:1: error: .*nonsense.*command: .*source: "):
        compile_host("nonsense;")
    with pytest.raises(KernelCompileError, match="missing.h: No such file"):
        compile_host('#include "missing.h"')
    assert len(os.listdir(cache.root / "failed")) == 2


def test_native_code_is_for_one_processor(monkeypatch):
    compiler = HostCompiler.find()
    assert compiler.identity(["-march=native"]) != compiler.identity(["-march=x86-64"]) == compiler.version


def test_without_a_compiler(monkeypatch, tmp_path):
    with monkeypatch.context() as context:
        context.setenv("CXX", "no-such-compiler -m64")
        with pytest.raises(NoHostCompilerError, match="no-such-compiler -m64 --version does not run. Install g"):
            compile_host("")
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(NoHostCompilerError, match=r"none of c\+\+, g\+\+, clang\+\+ is on PATH"):
        compile_host("")


def test_libraries_among_the_flags_are_linked(tmp_path):
    export = 'extern "C" __attribute__((visibility("default")))'
    shutil.copy(compile_host(f"{export} int part() {{ return 7; }}"), tmp_path / "libpart.so")
    source = f'extern "C" int part(); {export} int answer() {{ return 6 * part(); }}'
    for words in (["-lpart"], [str(tmp_path / "libpart.so")]):
        flags = ["-Wl,-z,defs", f"-L{tmp_path}", f"-Wl,-rpath,{tmp_path}", "-Wl,--as-needed", *words]
        assert ctypes.CDLL(str(compile_host(source, flags=flags))).answer() == 42


def test_a_compiler_with_a_launcher(monkeypatch, folder):
    monkeypatch.setenv("CXX", f"env {shutil.which('g++')} -Wall")
    assert build(folder)[1] == 3
