"""Steps that are built in the background: side by side, for engines in threads, and what ends or spoils them."""

from __future__ import annotations

import functools
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from transformers import GenerationConfig

from tests.builds.test_background import has_ended, written
from tests.continuous_batching.engine import alone, asynchronous_on_the_cpu, managed, prompt_of, results, serving_model
from tests.runtime.test_segment import build as build_segment
from tests.runtime.test_segment import step
from torch_mpk.batching import compiled_step, step_builder
from torch_mpk.batching.step_builder import StepBuilder
from torch_mpk.builds import background, timing
from torch_mpk.jit.compiler import run
from torch_mpk.runtime import cpu

DEFAULT = {"fallback": "error", "while_building": None}


def test_a_step_is_traced_while_the_one_before_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    together, load, calls = threading.Barrier(2, timeout=60), cpu.load, []

    def load_beside(*args: Any) -> Any:
        together.wait()  # neither compiler ends before both have begun
        return load(*args)

    def make() -> None:
        calls.append(build_segment(step, *inputs).callable(eager=None))
        assert not builder.is_built(len(calls) - 1)

    inputs = torch.randn(2, 8), torch.randn(4, 8), torch.zeros(2, dtype=torch.int64)
    monkeypatch.setattr(background, "num_compilers", lambda: 2)
    monkeypatch.setattr(cpu, "load", load_beside)
    builder = StepBuilder()
    for number in range(2):
        builder.ask(number, f"step {number}", make)
    assert background.wait(60)
    assert builder.is_built(0) and builder.is_built(1) and builder.num_waiting == 0
    for call in calls:
        torch.testing.assert_close(call(*inputs)[0], inputs[0] @ inputs[1].T)


def test_an_engine_s_first_eager_steps_have_short_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_builder, "SHORT_TURNS", 0.1)
    builder, turns, usual = StepBuilder(), list[float](), sys.getswitchinterval()
    for seconds in (0.0, 0.2, 0.0):
        with builder.eager_step():
            turns.append(sys.getswitchinterval())
            time.sleep(seconds)
    first, second, third = turns
    assert first == second < third < usual == sys.getswitchinterval()


def test_what_a_request_asks_for_comes_before_what_a_warm_up_does() -> None:
    builder, may_begin, built = StepBuilder(), threading.Event(), list[str]()
    builder.ask("first", "the first", lambda: built.append(str(may_begin.wait(60))))
    for rank, key in ((3, "large"), (1, "small"), (2, "middle")):
        builder.ask(key, key, functools.partial(built.append, key), rank)
    builder.ask("large", "large", functools.partial(built.append, "large"))  # a request comes
    may_begin.set()
    assert background.wait(60)
    assert built == ["True", "large", "small", "middle"]


def test_a_build_that_a_reset_drops_is_made_again() -> None:
    builder, has_begun, may_end, made = StepBuilder(), threading.Event(), threading.Event(), list[int]()

    def make() -> None:
        has_begun.set()
        assert may_end.wait(60)
        with timing.stage("next"):
            made.append(1)

    builder.ask("a", "step a", make)
    assert has_begun.wait(60)
    background.drop()
    may_end.set()
    assert background.wait(60)
    assert (made, builder.is_asked("a"), builder.is_built("a")) == ([], False, False)
    builder.ask("a", "step a", make)
    assert background.wait(60)
    assert (made, builder.is_built("a")) == ([1], True)


def test_a_compiler_that_is_killed_has_failed(tmp_path: Path) -> None:
    assert not run(["sh", "-c", "kill -KILL $$"], tmp_path).ok


def serve(manager: Any, prompts: list[list[int]], expected: list[list[int]]) -> None:
    names = [manager.add_request(prompt, max_new_tokens=len(expected[0])) for prompt in prompts]
    found = results(manager, len(names))
    assert [found[name].generated_tokens for name in names] == expected


def until_by_trace(manager: Any, ask: Callable[[], None]) -> None:
    ask()
    steps = manager.batch_processor.model_runner.steps
    while not all(step.is_by_trace for step in steps):
        ask()


@pytest.mark.slow
def test_engines_of_two_models_in_threads() -> None:
    models = [serving_model(), serving_model(intermediate_size=96)]
    prompts = [prompt_of(5), prompt_of(20)]
    expected = [[alone(model, prompt, 5) for prompt in prompts] for model in models]
    errors = []

    def run_engine(number: int) -> None:
        try:
            with managed(models[number], options=DEFAULT, use_async_batching=True) as manager:
                until_by_trace(manager, lambda: serve(manager, prompts, expected[number]))
        except BaseException as error:
            errors.append(error)

    with asynchronous_on_the_cpu():
        threads = [threading.Thread(target=run_engine, args=(number,)) for number in (0, 1, 0)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert errors == []
    assert background.wait(60)
    assert not any("mpk" in thread.name for thread in threading.enumerate())


@pytest.mark.slow
def test_a_warm_up_waits_for_nothing_and_has_all_sizes_built() -> None:
    model, prompts = serving_model(), [prompt_of(5)]
    expected = [alone(model, prompt, 5) for prompt in prompts]
    with managed(model, warmup=True, options=DEFAULT, num_blocks=16, max_batch_tokens=32) as manager:
        builder = manager.batch_processor.model_runner.builder
        assert builder.num_waiting > 2
        serve(manager, prompts, expected)
        while builder.num_waiting:
            time.sleep(0.05)
        assert all(builder.is_built((False, size)) for size in (16, 32))
        assert all(builder.is_built((True, size)) for size in (1, 2, 4, 8))
        until_by_trace(manager, lambda: serve(manager, prompts, expected))


@pytest.mark.slow
def test_a_model_that_changes_while_its_step_is_built() -> None:
    model, prompt, has_begun, may_go_on = serving_model(), prompt_of(5), threading.Event(), threading.Event()
    build = compiled_step.Step.build_ahead

    def build_later(self: compiled_step.Step, *args: Any) -> None:
        has_begun.set()
        assert may_go_on.wait(60)
        build(self, *args)

    expected = alone(model, prompt, 5)
    with (
        mock.patch.object(compiled_step.Step, "build_ahead", build_later),
        managed(model, options=DEFAULT) as manager,
    ):
        serve(manager, [prompt], [expected])
        assert has_begun.wait(60)
        hook = model.lm_head.register_forward_hook(lambda module, args, output: output.roll(1, -1))
        may_go_on.set()
        assert background.wait(60)
        names = [manager.add_request(prompt, max_new_tokens=5)]
        changed = results(manager, 1)[names[0]].generated_tokens
        until_by_trace(manager, lambda: serve(manager, [prompt], [changed]))
        hook.remove()
        until_by_trace(manager, lambda: serve(manager, [prompt], [expected]))
    assert changed != expected


@pytest.mark.slow
def test_a_seed_draws_the_same_tokens_while_steps_are_built() -> None:
    model, prompt = serving_model(), prompt_of(5)
    sampling = GenerationConfig(max_new_tokens=12, do_sample=True, temperature=0.9, eos_token_id=-1, pad_token_id=0)
    answers = []
    for options in (DEFAULT, DEFAULT | {"while_building": "wait"}):
        with managed(model, generation_config=sampling, options=options, seed=7) as manager:
            found = []
            for _ in range(3):
                name = manager.add_request(prompt)
                found.append(results(manager, 1)[name].generated_tokens)
                assert background.wait(60)
            assert not any(step.is_own for step in manager.batch_processor.model_runner.steps)
        answers.append(found)
    assert answers[0] == answers[1]
    assert answers[0][0] != answers[0][1]


ENDING = """
import sys, threading, time
from pathlib import Path
from tests.continuous_batching.engine import managed, prompt_of, results, serving_model
from torch_mpk.errors import CompileError
from torch_mpk.jit.compiler import run
from torch_mpk.runtime import cpu

folder = Path(sys.argv[1])

def load(*args):
    run(["sh", "-c", "sleep 600 & echo $! > pid; wait"], folder)
    raise CompileError("it was ended")

cpu.load = load
with managed(serving_model(), options={"fallback": "error", "while_building": None}) as manager:
    name = manager.add_request(prompt_of(5), max_new_tokens=3)
    print(len(results(manager, 1)[name].generated_tokens))
    while not (folder / "pid").exists():
        time.sleep(0.01)
"""


@pytest.mark.slow
def test_a_process_that_ends_while_steps_are_compiled_leaves_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-c", ENDING, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout) == (0, "3\n"), done.stderr
    assert "Traceback" not in done.stderr
    assert has_ended(written(tmp_path / "pid"))
