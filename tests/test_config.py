"""Options and environment variables are read as their types, and refused with what was expected."""

from pathlib import Path

import pytest

from torch_mpk.config import Options, env
from torch_mpk.errors import OptionError


def test_options_have_their_defaults_and_are_checked():
    assert Options.parse(None, None) == Options()
    assert Options.parse("reduce-overhead", {"fuse": False, "watchdog_seconds": 2}).watchdog_seconds == 2
    for name, value in (("fuse", 1), ("watchdog_seconds", -1), ("num_threads", True), ("arch", "90")):
        with pytest.raises(OptionError, match=f"option '{name}': expected .*, got {value!r}"):
            Options.parse(None, {name: value})


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
    ],
)
def test_a_wrong_variable_is_named(monkeypatch, name, attribute, value):
    monkeypatch.setenv(name, value)
    with pytest.raises(OptionError, match=f"{name}: expected .*, got '{value}'"):
        getattr(env, attribute)
