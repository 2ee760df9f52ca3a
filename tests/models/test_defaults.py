"""Without options: decode steps and encoders wait for their builds, prompts run eagerly until theirs are there."""

from __future__ import annotations

import copy
import multiprocessing
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from transformers import BertConfig, BertModel, ViTConfig, ViTModel

from tests.models.stepping import assert_close
from tests.models.test_prompts import new_cache
from torch_mpk.backend import pipeline
from torch_mpk.builds import background
from torch_mpk.errors import MpkWarning, UnsupportedError
from torch_mpk.runtime.segment import launched_segments
from torch_mpk.testing.tiny import random_ids, tiny_model

pytestmark = pytest.mark.filterwarnings("ignore:torch_mpk builds kernels in the background")


class Prompts:
    """Ours and eager, each with a cache of its own."""

    def __init__(self, model: torch.nn.Module, max_cache_len: int = 64) -> None:
        self.model, self.ours = model, torch.compile(model, backend="mpk")
        self.caches = [new_cache(model, 2, max_cache_len) for _ in range(2)]

    @torch.inference_mode()
    def take(self, length: int) -> int:
        """So many more tokens; returns how many launches that took."""
        ids = random_ids(2, length)
        torch._dynamo.maybe_mark_dynamic(ids, 1)
        with launched_segments() as segments:
            actual = self.ours(input_ids=ids, past_key_values=self.caches[0]).logits
        assert_close(actual, self.model(input_ids=ids, past_key_values=self.caches[1]).logits)
        for mine, theirs in zip(*(cache.layers for cache in self.caches), strict=True):
            assert torch.equal(mine.cumulative_length, theirs.cumulative_length)
            assert_close(mine.keys, theirs.keys)
        return len(segments)


class Gate:
    """Builds wait until it is open."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_open, self.is_reached, self.num_builds = threading.Event(), threading.Event(), 0
        self._build = pipeline.build
        monkeypatch.setattr(pipeline, "build", self.build)

    def build(self, *args: Any) -> Any:
        self.num_builds += 1
        self.is_reached.set()
        assert self.is_open.wait(60)
        return self._build(*args)

    def finish(self) -> None:
        self.is_open.set()
        assert background.wait(60)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate = Gate(monkeypatch)
    yield gate
    gate.finish()


@pytest.fixture
def model() -> torch.nn.Module:
    return tiny_model(dtype=torch.float32, num_layers=1)


def test_prompts_continued_ones_and_steps_are_launches(model: torch.nn.Module) -> None:
    prompts = Prompts(model)
    assert prompts.take(20) == 0
    assert background.wait(60)
    assert [prompts.take(length) for length in (18, 1, 17)] == [1, 1, 1]  # continued, in the same bucket; a step waits


def test_a_prompt_of_one_length_is_a_launch_when_its_kernel_is_there(model: torch.nn.Module, gate: Gate) -> None:
    ours, ids = torch.compile(model, backend="mpk", dynamic=False), random_ids(2, 20)
    with torch.inference_mode():
        expected = model(input_ids=ids, use_cache=False).logits
        with pytest.warns(MpkWarning, match="may give other bits, by rounding; .*'while_building': 'wait'"):
            assert torch.equal(ours(input_ids=ids, use_cache=False).logits, expected)
        assert torch.equal(ours(input_ids=ids, use_cache=False).logits, expected)
        gate.finish()
        with launched_segments() as segments:
            assert_close(ours(input_ids=ids, use_cache=False).logits, expected)
    assert len(segments) == gate.num_builds == 1


def test_prompts_that_begin_a_cache_of_their_own_share_builds(model: torch.nn.Module, gate: Gate) -> None:
    ours, counts = torch.compile(model, backend="mpk"), []
    gate.is_open.set()
    with torch.inference_mode():
        for length in (20, 33, 35):
            ids = random_ids(2, length)
            with launched_segments() as segments:
                actual, expected = ours(input_ids=ids), model(input_ids=ids)
            counts.append(len(segments))
            assert_close(actual.logits, expected.logits)
            for mine, theirs in zip(actual.past_key_values.layers, expected.past_key_values.layers, strict=True):
                assert_close(mine.keys, theirs.keys)
                assert_close(mine.values, theirs.values)
            assert background.wait(60)
        after = [
            model(input_ids=ids[:, :1], past_key_values=each.past_key_values).logits for each in (actual, expected)
        ]
        assert_close(*after)
    assert counts == [0, 0, 1]
    assert gate.num_builds == 2


def bert() -> tuple[torch.nn.Module, Callable[[int], dict[str, Any]]]:
    sizes = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 96}
    config = BertConfig(**sizes, vocab_size=96)
    return BertModel(config).eval(), lambda n: {"input_ids": random_ids(2, n)}


def vit() -> tuple[torch.nn.Module, Callable[[int], dict[str, Any]]]:
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96}
    config = ViTConfig(**sizes, image_size=32, patch_size=8)
    return ViTModel(config).eval(), lambda n: {"pixel_values": torch.randn(2, 3, 32, 32)}


@pytest.mark.filterwarnings("ignore:torch_mpk runs a part of this graph eagerly. conv2d")
@pytest.mark.parametrize("make", [bert, vit])
def test_encoders_are_launches(make: Callable[[], Any], gate: Gate) -> None:
    encoder, inputs_of = make()
    ours, counts = torch.compile(encoder, backend="mpk"), []
    gate.is_open.set()
    with torch.inference_mode():
        for length in (20, 33, 35):  # the first, a bucket, the bucket again
            given = inputs_of(length)
            with launched_segments() as segments:
                results = [run(**given) for run in (ours, encoder)]
            for name in ("last_hidden_state", "pooler_output"):
                assert_close(*(each[name] for each in results))
            counts.append(len(segments))
            assert background.wait(60)
    assert counts == ([1, 0, 1] if make is bert else [1, 1, 1])
    assert gate.num_builds == (2 if make is bert else 1)


# ---- builds that fail ----


def test_a_build_that_fails_is_announced_once(model: torch.nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> Any:
        raise UnsupportedError("it is too odd")

    monkeypatch.setattr(pipeline, "build", fail)
    ours, ids = torch.compile(model, backend="mpk", dynamic=False), random_ids(2, 20)
    with torch.inference_mode(), warnings.catch_warnings(record=True) as record:
        warnings.simplefilter("always")
        for _ in range(4):
            assert torch.equal(*(run(input_ids=ids, use_cache=False).logits for run in (ours, model)))
            assert background.wait(60)
    assert [str(each.message).partition(":")[2] for each in record if "eagerly: " in str(each.message)] == [
        " it is too odd"
    ]


# ---- models that learn ----


def test_a_prompt_with_gradients_is_pytorchs(model: torch.nn.Module) -> None:
    ours, ids, grads = torch.compile(model, backend="mpk"), random_ids(2, 20), []
    with pytest.warns(MpkWarning, match="inference_mode"):
        for run in (ours, model):
            model.zero_grad()
            run(input_ids=ids, use_cache=False).logits.sum().backward()
            grads.append([weight.grad.clone() for weight in model.parameters()])
    assert all(map(torch.equal, *grads))
    assert not background.is_building() and background.wait(0)


@pytest.mark.slow
def test_a_model_that_learns_between_prompts(model: torch.nn.Module) -> None:
    """Evaluated now and then, as trainers do: in training mode with gradients, in eval mode without."""
    ours, ids = torch.compile(model, backend="mpk"), random_ids(2, 20)
    for _ in range(3):
        model.train()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", MpkWarning)
            ours(input_ids=ids, use_cache=False).logits.square().mean().backward()
        with torch.no_grad():
            for weight in model.parameters():
                weight -= 0.1 * weight.grad
            model.eval()
            assert_close(*(run(input_ids=ids, use_cache=False).logits for run in (ours, model)))
        assert background.wait(60)


def test_dropout_in_training_mode_is_drawn_at_each_call(gate: Gate) -> None:
    table, weight = torch.randn(96, 16), torch.randn(16, 16)

    def function(ids: torch.Tensor) -> torch.Tensor:
        x = F.linear(F.embedding(ids, table), weight).unflatten(-1, (2, 8)).transpose(1, 2)
        return F.dropout(F.scaled_dot_product_attention(x, x, x, is_causal=True), 0.5, training=True)

    ours, ids = torch.compile(function, backend="mpk"), random_ids(2, 20)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", MpkWarning)
        for is_built in (False, True):
            first, second = ours(ids), ours(ids)
            assert 0.3 < (first == 0).float().mean() < 0.7
            assert not torch.equal(first, second)
            if not is_built:
                gate.finish()


# ---- while a kernel is built ----


def test_threads_share_a_build(model: torch.nn.Module, gate: Gate) -> None:
    ours = torch.compile(model, backend="mpk")
    start = threading.Barrier(3)

    def call(_: int) -> None:
        start.wait(60)
        for _ in range(3):
            ids = random_ids(2, 20)
            with torch.inference_mode():
                assert_close(*(run(input_ids=ids, use_cache=False).logits for run in (ours, model)))

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(call, range(3)))
        gate.finish()
        list(pool.map(call, range(3)))
    assert gate.num_builds == 1


def test_a_step_does_not_wait_for_a_prompts_kernel(model: torch.nn.Module, gate: Gate) -> None:
    prompts = Prompts(model)
    assert prompts.take(20) == 0
    assert gate.is_reached.wait(60)
    before, gate.is_open = gate.is_open, threading.Event()
    gate.is_open.set()  # to the step's, which the caller builds
    assert prompts.take(1) == 1
    gate.is_open = before


def test_weights_that_change_meanwhile_are_those_of_the_next_launch(model: torch.nn.Module, gate: Gate) -> None:
    prompts = Prompts(model)
    assert prompts.take(20) == 0
    attention = model.model.layers[0].self_attn
    with torch.inference_mode():
        attention.v_proj.weight.mul_(-3)
    model.load_state_dict({name: 2 * t for name, t in model.state_dict().items() if "mlp" in name}, False, assign=True)
    gate.finish()
    assert prompts.take(21) in (0, 1)  # another object for a weight may be another graph to Dynamo
    assert background.wait(60)
    assert prompts.take(22) == 1


@pytest.mark.slow
def test_a_model_that_becomes_another_meanwhile(model: torch.nn.Module, gate: Gate) -> None:
    ours, ids = torch.compile(model, backend="mpk"), random_ids(2, 20)
    with torch.inference_mode():
        ours(input_ids=ids, use_cache=False)
        model.to(torch.bfloat16).model.layers[0].mlp.act_fn = torch.nn.GELU()
        for _ in range(2):
            assert_close(*(run(input_ids=ids, use_cache=False).logits for run in (ours, model)))
            gate.finish()
        with launched_segments() as segments:
            assert_close(*(run(input_ids=ids, use_cache=False).logits for run in (ours, model)))
    assert len(segments) == 1


def test_a_model_that_goes_meanwhile_takes_its_build_along(model: torch.nn.Module, gate: Gate) -> None:
    other = copy.deepcopy(model)
    steps = [torch.compile(each, backend="mpk") for each in (model, other)]
    ids = random_ids(2, 20)
    with torch.inference_mode():
        for step, length in zip(steps, (20, 17), strict=True):
            step(input_ids=ids[:, :length].clone(), use_cache=False)
    del step, steps, other
    torch.compiler.reset()
    gate.finish()
    assert gate.num_builds == 1  # the one that had begun


def test_resetting_the_compiler_meanwhile(model: torch.nn.Module, gate: Gate) -> None:
    prompts = Prompts(model)
    assert prompts.take(20) == 0
    assert gate.is_reached.wait(60)
    torch.compiler.reset()
    assert prompts.take(20) == 0
    gate.finish()
    assert prompts.take(20) == 1


def test_a_forked_child_meanwhile(model: torch.nn.Module, gate: Gate) -> None:
    prompts = Prompts(model)
    assert prompts.take(20) == 0
    assert gate.is_reached.wait(60)
    receive, send = multiprocessing.Pipe(duplex=False)

    def child() -> None:
        gate.is_open = threading.Event()  # whose lock the parent's thread may have held
        gate.is_open.set()
        counts = [prompts.take(5)]
        assert background.wait(60)
        send.send([*counts, prompts.take(6)])

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    assert receive.poll(60), "the child hangs"
    assert receive.recv() == [0, 1]
    process.join(30)
    gate.finish()
    assert prompts.take(21) == 1


ENDING = """
import sys, threading, time, torch
from torch_mpk.backend import pipeline
from torch_mpk.testing.tiny import random_ids, tiny_model

has_begun, build = threading.Event(), pipeline.build

def slow(*args):
    has_begun.set()
    time.sleep(1)
    return build(*args)

pipeline.build = slow
model = tiny_model(num_layers=1)
with torch.inference_mode():
    torch.compile(model, backend="mpk")(input_ids=random_ids(2, 20), use_cache=False)
assert has_begun.wait(60)
print("last line", flush=True)
print("last line", file=sys.stderr)  # packages that transformers imports may have written before
"""


@pytest.mark.slow
def test_a_process_that_ends_meanwhile_ends_as_ever() -> None:
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", ENDING], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout) == (0, "last line\n"), done.stderr
    assert done.stderr.endswith("last line\n"), done.stderr
