"""Every test runs from a known seed and on few threads; tests marked ``gpu`` run only where there is a CUDA device."""

import gc
import os
import random
import signal
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import settings

from torch_mpk import registry
from torch_mpk.builds.garbage import SELDOM
from torch_mpk.dispatch import build_cache
from torch_mpk.patterns import declare_patterns

settings.register_profile("here", derandomize=True, deadline=None)
settings.load_profile("here")
# Eager's threads spin while they wait for each other: on a busy machine several of them take many times as long as one.
torch.set_num_threads(1)
os.environ["OMP_NUM_THREADS"] = "1"  # of processes that tests start
torch.backends.cudnn.allow_tf32 = False  # eager's convolutions on a GPU are what ours are compared with
os.environ.setdefault("TORCH_MPK_NUM_THREADS", "2")  # the CPU runtime's sleep, and tests are to see several
gc.set_threshold(*SELDOM)  # as builds do, since most of what tests do is to build
build_cache.WORTH_SECONDS = float("inf")  # tests see builds, and not what one before them has left on the disk
# What a shell runs in the background ignores interrupts, and some tests interrupt themselves.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collectstart() -> None:
    torch.manual_seed(0)  # what modules draw as they are imported hangs on no other module


def pytest_collection_finish() -> None:
    """Dynamo collects garbage behind each compile: what there is by now, PyTorch and all tests, it need not look at."""
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves GPU tests out where there is no GPU, rather than skipping each; ``-m gpu`` means one was expected."""
    if torch.cuda.is_available():
        return
    if config.option.markexpr == "gpu" or os.environ.get("EXPECT_GPU") == "1":
        raise pytest.UsageError("a GPU was expected (-m gpu or EXPECT_GPU=1), and torch sees no CUDA device")
    gpu = [item for item in items if item.get_closest_marker("gpu")]
    items[:] = [item for item in items if not item.get_closest_marker("gpu")]
    config.hook.pytest_deselected(items=gpu)


_declared: defaultdict[str, set[registry.Task]] = defaultdict(set)  # while tests of a module ran


@pytest.fixture(autouse=True, scope="module")
def _own_tasks(request: pytest.FixtureRequest) -> Iterator[None]:
    """Tests see no tasks that those of other modules have declared.

    A module may begin more than once in a process: tests that are taken from another worker need not follow each other.
    """
    module = request.module.__name__
    folder = module.rpartition(".")[0]
    before = registry.tasks()

    def is_own(task: registry.Task) -> bool:
        home, _, name = task.__module__.rpartition(".")
        is_shared = home.startswith(folder) and not name.startswith("test_")
        return task.is_ours or task.__module__ == module or is_shared or task in _declared[module]

    with registry.hidden([task.name for task in before if not is_own(task)]):
        declare_patterns()
        yield
    _declared[module] |= {*registry.tasks()} - {*before}


@pytest.fixture(autouse=True)
def _fresh_state() -> None:
    random.seed(0)
    torch.manual_seed(0)
    if "torch._dynamo" in sys.modules:  # else nothing has been compiled
        torch.compiler.reset()
    if "torch_mpk.backend" in sys.modules:  # which Dynamo resets only where it has called it
        sys.modules["torch_mpk.backend"].reset()
        sys.modules["torch_mpk.warn_once"].forget()


@pytest.fixture
def empty_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A cache with nothing in it, and a process that knows no trace of another."""
    from torch_mpk.traces import known

    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("TORCH_MPK_CACHE_DIR", str(folder))
    known.forget()
    yield folder
    known.forget()


@pytest.fixture
def device() -> torch.device:
    """The device a test of the whole pipeline runs on: the GPU where there is one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
