"""Options and environment variables are read as their types, and refused with what was expected."""

import re
from pathlib import Path

import pytest
import torch
from torch._dynamo.exc import BackendCompilerFailed

from torch_mpk.config import MAX_THREADS, Options, env
from torch_mpk.errors import MpkWarning, OptionError


def test_options_have_their_defaults_and_are_checked():
    assert Options.parse(None, None) == Options()
    assert Options.parse("reduce-overhead", {"fuse": False, "watchdog_seconds": 2}).watchdog_seconds == 2
    for name, value in (("fuse", 1), ("watchdog_seconds", -1), ("num_threads", True), ("arch", "90")):
        with pytest.raises(OptionError, match=f"option '{name}': expected .*, got {value!r}"):
            Options.parse(None, {name: value})


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"num_threads": 10**9}, "option 'num_threads': expected an int from 1 to 4095, got 1000000000"),
        ({"num_threads": 2.0}, "option 'num_threads': expected an int from 1 to 4095, got 2.0"),
        ({"watchdog_seconds": float("inf")}, "expected a number of seconds from 0, .* to 1e[+]09, got inf"),
        ({"watchdog_seconds": float("nan")}, "expected a number of seconds from 0, .* to 1e[+]09, got nan"),
        ({"arch": 90.0}, "option 'arch': expected 80, 90, 100, 120 or None, got 90.0"),
        ({5: 1}, "unknown option 5: the options are"),
        (5, "options: expected a dict of options by their names, got 5"),
        ([("fuse", True)], "options: expected a dict of options by their names"),
    ],
)
def test_a_wrong_option_is_named(options, match):
    with pytest.raises(OptionError, match=match):
        Options.parse(None, options)


def test_the_most_threads_are_those_of_the_runtime():
    source = (Path(__file__).parents[1] / "csrc" / "cpu" / "thread_pool.cpp").read_text()
    assert re.findall(r"kMaxThreads = (\d+);", source) == [str(MAX_THREADS)]


def test_variables_are_read_when_they_are_used(monkeypatch):
    monkeypatch.delenv("TORCH_MPK_NUM_THREADS", raising=False)
    assert env.num_threads is None
    monkeypatch.setenv("TORCH_MPK_NUM_THREADS", "3")
    monkeypatch.setenv("TORCH_MPK_WATCHDOG_SECONDS", "0.5")
    monkeypatch.setenv("TORCH_MPK_DUMP", "~/dump")
    monkeypatch.setenv("TORCH_MPK_DISABLE", "off")
    monkeypatch.setenv("TORCH_MPK_ARCH", "80")
    assert (env.num_threads, env.watchdog_seconds, env.disable, env.arch) == (3, 0.5, False, 80)
    assert env.dump == Path.home() / "dump"


@pytest.mark.parametrize(
    ("name", "attribute", "value"),
    [
        ("TORCH_MPK_NUM_THREADS", "num_threads", "many"),
        ("TORCH_MPK_NUM_THREADS", "num_threads", "0"),
        ("TORCH_MPK_WATCHDOG_SECONDS", "watchdog_seconds", "nan"),
        ("TORCH_MPK_DISABLE", "disable", "maybe"),
        ("TORCH_MPK_ARCH", "arch", "75"),
        ("TORCH_MPK_NUM_THREADS", "num_threads", "4096"),
        ("TORCH_MPK_WATCHDOG_SECONDS", "watchdog_seconds", "inf"),
        ("TORCH_MPK_CACHE_GB", "cache_bytes", "much"),
        ("TORCH_MPK_COMPILER", "compiler", "gcc"),
        ("TORCH_MPK_CPU_ISA", "cpu_isa", "sse"),
        ("TORCH_MPK_CACHE_DIR", "cache_dir", __file__),
    ],
)
def test_a_wrong_variable_is_named_and_raises_where_a_graph_is_compiled(monkeypatch, name, attribute, value):
    monkeypatch.setenv(name, value)
    with pytest.raises(OptionError, match=f"{name}: expected .*, got '{value}'"):
        getattr(env, attribute)
    with torch.inference_mode(), pytest.raises(BackendCompilerFailed, match=f"OptionError: {name}: .*, got '{value}'"):
        torch.compile(torch.nn.Linear(8, 8), backend="mpk")(torch.ones(1, 8))


def test_a_misspelt_variable_is_announced(monkeypatch):
    monkeypatch.setenv("TORCH_MPK_FORBID_COMPLE", "1")
    text = r"TORCH_MPK_FORBID_COMPLE is not known and has no effect \(did you mean 'TORCH_MPK_FORBID_COMPILE'\?\)"
    with torch.inference_mode(), pytest.warns(MpkWarning, match=text):
        torch.compile(torch.nn.Linear(8, 8), backend="mpk")(torch.ones(1, 8))


def test_every_variable_that_is_read_is_known():
    """Of those that C++ and tests read as well."""
    root = Path(__file__).parents[1]
    files = [file for folder in ("torch_mpk", "csrc", ".ci") for file in (root / folder).rglob("*") if file.is_file()]
    text = "".join(file.read_text() for file in files if file.suffix in ("", ".py", ".cpp", ".h"))
    read = set(re.findall(r"[\"' ](TORCH_MPK_[A-Z_]+[A-Z])[\"'=]", text))
    assert len(read) > 9
    for name in read:
        with pytest.MonkeyPatch.context() as context:
            context.setenv(name, "")
            assert name not in env.unknown()
