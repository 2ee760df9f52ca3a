"""An engine under load, with a cache too small for it: nothing is lost or mixed up, and nothing is kept."""

from __future__ import annotations

import gc
import random
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch._dynamo.utils import counters
from transformers.generation.continuous_batching.model_runner import ModelRunner
from transformers.generation.continuous_batching.offloading_manager import OffloadingManager
from transformers.generation.continuous_batching.requests import RequestState

from tests.continuous_batching.engine import PAGE, Load, asynchronous_on_the_cpu, managed, pages_in_use, serving_model
from torch_mpk.errors import MegakernelTimeout

MOST_GROWTH = 4 << 20  # bytes

PLAIN = {"use_cuda_graph": False, "use_async_batching": False}
GRAPHS = {"use_cuda_graph": (False, True), "use_async_batching": False}
ASYNCHRONOUS = GRAPHS | {"use_async_batching": True}
NO_SHARING = {"allow_block_sharing": False}
PLAIN_ON_THE_CPU = pytest.param("cpu", {}, id="cpu")
ASYNCHRONOUS_ON_THE_CPU = pytest.param("cpu", {"use_async_batching": True}, id="cpu, asynchronous")
ON_A_GPU = [
    pytest.param("cuda", mode, id=f"gpu, {name}", marks=pytest.mark.gpu)
    for name, mode in {
        "plain": PLAIN,
        "graphs": GRAPHS,
        "graphs and asynchronous": ASYNCHRONOUS,
        "pages are not shared": ASYNCHRONOUS | NO_SHARING,
    }.items()
]


@pytest.fixture
def evictions(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of each time that an engine found its cache full, whether a request had to leave it."""
    found, evict = [], OffloadingManager.offload_requests

    def offload_requests(self: OffloadingManager) -> bool:
        found.append(evict(self))
        return found[-1]

    monkeypatch.setattr(OffloadingManager, "offload_requests", offload_requests)
    return found


@pytest.fixture(autouse=True)
def _asynchronous_on_the_cpu(device: str) -> Iterator[None]:
    with asynchronous_on_the_cpu() if device == "cpu" else nullcontext():
        yield


@contextmanager
def failing_steps(share: float) -> Iterator[None]:
    """So many steps fail, prompts' too: half of them before they are launched, and half behind that."""
    compute_batch, chance = ModelRunner.compute_batch, random.Random(random.random())

    def compute(self: ModelRunner, *args: Any) -> None:
        at = chance.random()
        if at < share / 2:
            raise MegakernelTimeout("stalled")
        compute_batch(self, *args)
        if at < share:
            raise MegakernelTimeout("stalled")

    with mock.patch.object(ModelRunner, "compute_batch", compute):
        yield


def memory_in_use(device: str) -> int:
    """Bytes of this process, of the host or of the device."""
    gc.collect()
    if device == "cuda":
        return torch.cuda.memory_reserved()  # what the device says counts other processes', too
    resident_pages = int(Path("/proc/self/statm").read_text().split()[1])
    return resident_pages * 4096


def num_requests_kept() -> int:
    return sum(type(each) is RequestState for each in gc.get_objects())


@pytest.mark.slow
@pytest.mark.parametrize(("device", "settings"), [PLAIN_ON_THE_CPU, *ON_A_GPU])
def test_requests_come_and_go_while_the_cache_is_too_small(
    device: str, settings: dict[str, Any], evictions: list[bool]
) -> None:
    model = serving_model(device=device)
    load = Load(model, num_prompts=10, longest=40, shared=2 * PAGE)
    with managed(model, num_blocks=12, **settings) as manager:  # of 48 that eight requests of 88 positions would take
        load.run(manager, count=60, bad=0.05, seconds=300)  # in which most sizes of steps are built
        load.run(manager, count=30, seconds=60, are_together=True)  # more than the cache holds, however fast it is
        cache = manager.batch_processor.cache
    load.check()
    assert any(evictions)
    assert pages_in_use(cache) == 0


@pytest.mark.slow
@pytest.mark.parametrize(("device", "settings"), [ASYNCHRONOUS_ON_THE_CPU, *ON_A_GPU])
def test_steps_fail_and_the_others_go_on(device: str, settings: dict[str, Any]) -> None:
    model = serving_model(device=device)
    load = Load(model, num_prompts=10, longest=40, shared=2 * PAGE)
    with managed(model, num_blocks=16, max_requests_per_batch=4, warmup=True, **settings) as manager:
        with failing_steps(0.05):
            load.run(manager, count=60, bad=0.05, seconds=60)
        failed = load.num_failed()
        load.run(manager, count=20, seconds=60)
        assert load.num_failed() == failed, "steps failed by themselves"
        cache = manager.batch_processor.cache
    load.check("stalled")
    assert 0 < failed < 60
    assert pages_in_use(cache) == 0


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("device", "settings"),
    [
        PLAIN_ON_THE_CPU,
        ASYNCHRONOUS_ON_THE_CPU,
        pytest.param("cpu", NO_SHARING, id="cpu, pages are not shared"),
        *ON_A_GPU,
    ],
)
def test_two_thousand_requests_come_and_go(device: str, settings: dict[str, Any], evictions: list[bool]) -> None:
    model = serving_model(device=device)
    load = Load(model, num_prompts=40, longest=80, shared=3 * PAGE)
    with managed(model, num_blocks=24, max_requests_per_batch=16, warmup=True, **settings) as manager:
        compiled = counters["stats"]["unique_graphs"]
        load.run(manager, count=500, cancelled=0.05, bad=0.02, seconds=300)
        before = memory_in_use(device)
        load.run(manager, count=1400, cancelled=0.05, bad=0.02, seconds=600)
        load.run(manager, count=100, seconds=100, are_together=True)  # more than the cache holds, however fast it is
        assert counters["stats"]["unique_graphs"] == compiled
        assert memory_in_use(device) - before < MOST_GROWTH
        assert num_requests_kept() <= 2 * 16, "requests that have ended are kept"
        cache = manager.batch_processor.cache
    load.check()
    assert any(evictions)
    assert pages_in_use(cache) == 0


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu"])
def test_requests_are_cancelled_while_their_steps_run(device: str) -> None:
    """A page that a step fills is counted for its request once the step's results are there."""
    model = serving_model(device=device)
    load = Load(model, num_prompts=6, longest=12, shared=0)
    pages = {"page_size": 4, "num_blocks": 200, "max_blocks_per_request": 12}
    with managed(model, use_async_batching=True, **pages) as manager:
        load.run(manager, count=100, seconds=60, cancelled=0.5)
        cache = manager.batch_processor.cache
    load.check()
    assert pages_in_use(cache) == 0
