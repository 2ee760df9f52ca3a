"""Compiled models in a process that does to them what processes do."""

import copy
import multiprocessing
import pickle
import random
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F

from tests.models.stepping import assert_close, compiled, run_both
from torch_mpk import lowering, planning
from torch_mpk.errors import MpkWarning
from torch_mpk.runtime.segment import live_segments
from torch_mpk.testing.tiny import Decoding, random_ids, tiny_model


class Mlp(torch.nn.Module):
    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.up, self.down = torch.nn.Linear(16, 32, dtype=dtype), torch.nn.Linear(32, 16, dtype=dtype)

    def forward(self, x):
        return x + self.down(F.silu(self.up(x)))


def check(step, model, x):
    with torch.inference_mode():
        actual, expected = step(x), model(x)
    assert (actual.dtype, actual.device) == (expected.dtype, expected.device)
    assert_close(actual, expected)


# ---- threads and processes ----


def test_threads_compile_at_once():
    """Two models, two threads each; all begin with the first call."""
    models = [Mlp(), Mlp(torch.bfloat16)]
    jobs = [(compiled(model), model) for model in models for _ in range(2)]
    start = threading.Barrier(len(jobs))

    def first_calls(job):
        step, model = job
        x = torch.randn(2, 16).to(model.up.weight.dtype)
        start.wait(60)
        for _ in range(3):
            check(step, model, x)

    with ThreadPoolExecutor(len(jobs)) as pool:
        list(pool.map(first_calls, jobs))


def test_calls_go_on_while_another_thread_compiles():
    """PyTorch's own tracer would have them taken for a part of what that thread traces."""
    model, x = Mlp(), torch.randn(2, 16)
    step = compiled(model)
    check(step, model, x)

    def compile_others():
        for rows in range(3, 7):
            other = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.SiLU(), torch.nn.Linear(32, 16))
            check(compiled(other), other, torch.randn(rows, 16))

    with ThreadPoolExecutor(1) as pool:
        compiling = pool.submit(compile_others)
        while not compiling.done():
            check(step, model, x)
        compiling.result()


def test_threads_build_for_new_sizes_while_others_trace():
    """A build for a size is made at the first call with it, outside of what Dynamo compiles."""

    def sized_calls(order):
        step = compiled(model)
        start.wait(60)
        for rows in order:
            check(step, model, torch.randn(rows, 16))

    for seed in range(3):
        model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.SiLU(), torch.nn.LayerNorm(32))
        orders = [random.Random(seed + thread).sample(range(1, 10), 9) for thread in range(2)]
        start = threading.Barrier(len(orders))
        torch._dynamo.reset()
        with ThreadPoolExecutor(len(orders)) as pool:
            list(pool.map(sized_calls, orders))


@pytest.mark.slow
def test_threads_decode_different_batches_at_once():
    model = tiny_model("llama", num_layers=1)
    step = compiled(model)
    start = threading.Barrier(8)

    def decode(thread):
        start.wait(60)
        run_both(model, step, batch=1 + thread % 3, num_steps=1)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(decode, range(8)))


def test_a_forked_child_calls_and_compiles():
    model, x = Mlp(), torch.randn(2, 16)
    step = compiled(model)
    check(step, model, x)
    receive, send = multiprocessing.Pipe(duplex=False)

    def child():
        check(step, model, x)
        check(step, model, torch.randn(3, 16))  # another build
        send.send("right")

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    assert receive.poll(60), "the child hangs"
    assert receive.recv() == "right"
    process.join(30)
    check(step, model, x)


# ---- copies ----


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda step: pickle.loads(pickle.dumps(step))])
def test_a_copy_of_a_compiled_model_has_weights_of_its_own(copied):
    model, x = Mlp(), torch.randn(2, 16)
    step = compiled(model)
    check(step, model, x)
    other = copied(step)
    with torch.no_grad():
        other.up.weight.add_(1)
    check(other, other._orig_mod, x)
    check(step, model, x)
    with torch.inference_mode():
        assert not torch.allclose(step(x), other(x))


# ---- other weights ----


def test_to_another_dtype():
    model = tiny_model(num_layers=1)
    step = compiled(model)
    run_both(model, step, num_steps=1)
    model.to(torch.float32)
    run_both(model, step, num_steps=2)


@pytest.mark.gpu
def test_to_another_device_and_back():
    model = tiny_model(num_layers=1, device="cuda")
    step = compiled(model)
    for device in ("cuda", "cpu", "cuda"):
        model.to(device)
        run_both(model, step, num_steps=2)


def test_on_a_device_that_is_not_ours_it_runs_as_without_us():
    model = Mlp()
    step = torch.compile(model, backend="mpk")
    check(step, model, torch.randn(2, 16))
    model.to("meta")
    with torch.inference_mode(), pytest.warns(MpkWarning, match="the inputs are on meta, and torch_mpk runs on cpu"):
        assert step(torch.randn(2, 16, device="meta")).device.type == "meta"


class LoraLinear(torch.nn.Module):
    """A low-rank update beside a linear layer, which can be merged into its weight, as libraries of adapters have it:
    in float32, switched by attributes."""

    def __init__(self, base, rank=4, scale=2.0):
        super().__init__()
        self.base, self.scale, self.merged, self.enabled = base, scale, False, True
        self.a = torch.nn.Parameter(torch.randn(rank, base.in_features, device=base.weight.device) * 0.1)
        self.b = torch.nn.Parameter(torch.randn(base.out_features, rank, device=base.weight.device) * 0.1)

    @torch.no_grad()
    def merge(self, sign=1):
        self.base.weight += sign * self.scale * (self.b @ self.a).to(self.base.weight.dtype)
        self.merged = sign > 0

    def forward(self, x):
        y = self.base(x)
        if self.enabled and not self.merged:
            y = y + (F.linear(F.linear(x.to(self.a.dtype), self.a), self.b) * self.scale).to(y.dtype)
        return y


@pytest.mark.slow
def test_adapters_beside_and_merged_into_the_weights(device):
    model = tiny_model(device=device, num_layers=1)
    step = compiled(model)
    run_both(model, step, num_steps=1)
    attention = model.model.layers[0].self_attn
    adapters = [LoraLinear(attention.q_proj), LoraLinear(attention.v_proj)]
    attention.q_proj, attention.v_proj = adapters
    prompt, token = random_ids(1, 5, device), random_ids(1, 1, device)

    def logits():
        run_both(model, step, num_steps=2)
        with torch.inference_mode():
            return Decoding(model, prompt).step(step, token).float()

    beside = logits()
    for adapter in adapters:
        adapter.merge()
    merged = logits()
    for adapter in adapters:
        adapter.merge(-1)
        adapter.enabled = False
    without = logits()
    assert (beside - merged).abs().max() < 0.1 * (beside - without).abs().max()


# ---- failures while compiling ----


def failing_once(monkeypatch, error):
    """Lowering fails the first time."""

    def fail(gm):
        monkeypatch.setattr(planning, "lower", lowering.lower)
        raise error

    monkeypatch.setattr(planning, "lower", fail)


def test_an_interrupt_while_compiling_comes_through_and_the_next_call_compiles(monkeypatch):
    model, x = Mlp(), torch.randn(2, 16)
    step = compiled(model)
    before = set(live_segments())
    failing_once(monkeypatch, KeyboardInterrupt())
    with torch.inference_mode(), pytest.raises(KeyboardInterrupt):
        step(x)
    assert not set(live_segments()) - before
    check(step, model, x)
    assert len(set(live_segments()) - before) == 1


def test_an_interrupt_while_building_for_a_number_leaves_no_lock(monkeypatch):
    def function(x, weight, scale):
        return F.linear(x, weight) * scale

    x, weight = torch.randn(2, 8), torch.randn(8, 8)
    step = compiled(function)
    with torch.inference_mode():
        step(x, weight, 0.5)
        failing_once(monkeypatch, KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            step(x, weight, 0.25)
        for scale in (0.25, 0.125):
            assert_close(step(x, weight, scale), function(x, weight, scale))


def test_no_memory_while_compiling_is_said_and_survived(monkeypatch):
    model, x = Mlp(), torch.randn(2, 16)
    failing_once(monkeypatch, MemoryError("std::bad_alloc"))
    with torch.inference_mode(), pytest.raises(Exception, match="bad_alloc") as info:
        compiled(model)(x)
    assert isinstance(getattr(info.value, "inner_exception", info.value), MemoryError)
    check(compiled(model), model, x)
    torch.compiler.reset()
    failing_once(monkeypatch, MemoryError("std::bad_alloc"))
    step = torch.compile(model, backend="mpk")
    with torch.inference_mode(), pytest.warns(MpkWarning, match="runs this graph eagerly: MemoryError: std::bad_alloc"):
        assert torch.equal(step(x), model(x))
    check(step, model, torch.randn(3, 16))
