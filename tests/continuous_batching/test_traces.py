"""Steps of all sizes are one trace of Dynamo's, which serves other engines, model objects and processes while it is
theirs, and is traced again where it is not."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch._dynamo.utils import counters
from transformers.models.qwen3 import modeling_qwen3

from tests.continuous_batching.engine import alone, batched, managed, prompt_of, results, serving_model
from tests.thinned import thinned
from torch_mpk import task_kernel
from torch_mpk.backend.build import compile_graph
from torch_mpk.batching import compiled_step, sizes
from torch_mpk.batching.step_builder import StepBuilder
from torch_mpk.builds import background
from torch_mpk.capture.graph import Captured, capture
from torch_mpk.errors import CacheError
from torch_mpk.jit import Cache
from torch_mpk.traces import known
from torch_mpk.traces.trace import Recorder, guarding_hooks

KINDS = 3  # of steps: with prompts, of one row, and of more
SIZED = {"num_blocks": 32, "max_batch_tokens": 48, "max_requests_per_batch": 4}


pytestmark = pytest.mark.usefixtures("empty_cache")


@contextmanager
def traces() -> Iterator[Callable[[], int]]:
    """How many graphs Dynamo has made in the block."""
    before = counters["stats"]["unique_graphs"]
    yield lambda: counters["stats"]["unique_graphs"] - before


def check(model: Any, **settings: Any) -> None:
    """Prompts of several sizes of steps, and tokens as each would get alone."""
    prompts = [prompt_of(5), prompt_of(20), prompt_of(9)]
    answers = batched(model, prompts, warmup=True, **SIZED | settings)
    assert answers == [alone(model, prompt, len(answer)) for prompt, answer in zip(prompts, answers, strict=True)]


@pytest.mark.slow
def test_sizes_share_a_trace_and_so_do_other_engines_and_models() -> None:
    model = serving_model()
    with traces() as count:
        check(model)
        assert count() == KINDS
        check(model, num_blocks=24, max_batch_tokens=64, max_requests_per_batch=8)
        check(serving_model())
        assert count() == KINDS
        check(serving_model(intermediate_size=96))  # another configuration
        assert count() == 2 * KINDS
    torch.compiler.reset()
    with traces() as count:
        check(model)
        assert count() == 0  # from the disk


@pytest.mark.parametrize(
    "device", [pytest.param("cpu", marks=pytest.mark.slow), pytest.param("cuda", marks=pytest.mark.gpu)]
)
def test_an_engine_finds_the_traces_of_another_process(device: str, empty_cache: Path) -> None:
    """On a GPU, too, whose machine may have another PyTorch, and so other guards."""
    program = (
        "import torch, torch_mpk\n"
        "from tests.continuous_batching.test_traces import SIZED, traces\n"
        "from tests.continuous_batching.engine import batched, serving_model\n"
        "torch.manual_seed(7)\n"
        f"model = serving_model(device={device!r}, dtype=torch.{'bfloat16' if device == 'cuda' else 'float32'})\n"
        "with traces() as count:\n"
        "    print(batched(model, [[5, 6, 7], [8, 9]], **SIZED), count())\n"
    )
    environment = os.environ | {"TORCH_MPK_CACHE_DIR": str(empty_cache)}
    outputs = []
    for seed in "12":  # the order of sets
        command = [sys.executable, "-c", program]
        environment["PYTHONHASHSEED"] = seed
        outputs.append(subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout)
    first, second = (output.rsplit(maxsplit=1) for output in outputs)
    assert first[0] == second[0]
    assert (int(first[1]), int(second[1])) == (2, 0)  # one row there is in no step


def one_answer(model: Any, prompt: list[int]) -> list[int]:
    [answer] = batched(model, [prompt], **SIZED)
    return answer


@pytest.mark.parametrize("change", thinned(["hook", "method", "function", "attribute", "layer", "mode", "dtype"]))
def test_what_was_traced_before_a_change_is_not_used_behind_it(change: str) -> None:
    model, prompt = serving_model(), prompt_of(6)
    one_answer(model, prompt)
    layer = model.model.layers[0]
    with traces() as count, pytest.MonkeyPatch.context() as patch:
        match change:
            case "hook":
                layer.mlp.register_forward_hook(lambda module, args, output: output * 3)
            case "method":
                patch.setattr(modeling_qwen3.Qwen3MLP, "forward", lambda self, x: self.down_proj(self.up_proj(x)))
            case "function":
                patch.setattr(modeling_qwen3, "rotate_half", lambda x: x * 0.5)
            case "attribute":
                layer.self_attn.scaling *= 3
            case "layer":
                layer.mlp.act_fn = torch.nn.Tanh()
            case "mode":
                model.train()
            case "dtype":
                model.double()
        answer = one_answer(model, prompt)
        assert count() > 0 or change == "mode"  # which this model never asks for
        assert answer == alone(model, prompt, len(answer))
    prompt = prompt_of(6)
    answer = one_answer(model, prompt)
    assert answer == alone(model, prompt, len(answer))


@pytest.mark.slow
def test_a_change_while_an_engine_runs_is_seen_by_its_next_step() -> None:
    model, prompt = serving_model(), prompt_of(6)
    with managed(model, **SIZED) as manager:

        def answer() -> list[int]:
            name = manager.add_request(prompt, max_new_tokens=6)
            return results(manager, 1)[name].generated_tokens

        before = answer()
        with torch.no_grad():
            model.lm_head.weight.copy_(model.lm_head.weight.roll(1, 0))  # no other trace
        assert answer() != before
        hook = model.lm_head.register_forward_hook(lambda module, args, output: output.roll(1, -1))
        changed = answer()
        assert changed == alone(model, prompt, 6) != before
        hook.remove()
        assert answer() == alone(model, prompt, 6)


@pytest.mark.slow
def test_traces_that_cannot_be_read_or_kept_are_made_again(empty_cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    model, prompt = serving_model(), prompt_of(6)
    full = mock.patch.object(Cache, "write", side_effect=CacheError("no space left on device"))
    with full, caplog.at_level("INFO", "torch_mpk"):
        expected = one_answer(model, prompt)
    assert "no space left on device" in caplog.text
    known.forget()
    torch.compiler.reset()
    one_answer(model, prompt)  # keeps them
    files = sorted(empty_cache.glob("traces/*/trace.pickle"))
    assert files
    for file in files:
        file.write_bytes(file.read_bytes()[:-9])
    known.forget()
    torch.compiler.reset()
    with traces() as count:
        assert one_answer(model, prompt) == expected
        assert count() > 0


def listed(captured: Captured) -> list[Any]:
    """A graph in words, without the names of its nodes."""
    numbers = {node: number for number, node in enumerate(captured.graph_module.graph.nodes)}

    def say(value: Any) -> Any:
        return f"%{numbers[value]}" if isinstance(value, torch.fx.Node) else value

    lines = []
    for node in numbers:
        args, kwargs = torch.utils._pytree.tree_map(say, (node.args, node.kwargs))
        value = node.meta.get("val")
        tensor = (value.dtype, value.shape, value.stride()) if isinstance(value, torch.Tensor) else None
        lines.append((node.op, str(node.target) if node.op != "placeholder" else "", args, kwargs, tensor))
    return lines


@pytest.mark.slow
def test_a_size_is_what_its_own_capture_would_be() -> None:
    def compare(gm: Any, inputs: Any, device: Any, options: Any, make: Callable[[], Captured]) -> Callable[..., Any]:
        made, own = make(), capture(gm, inputs)
        assert listed(made) == listed(own)
        assert [vars(a) | {"value": None} for a in made.inputs] == [vars(b) | {"value": None} for b in own.inputs]
        return compile_graph(gm, inputs, device, options, made)

    model = serving_model()
    with (
        mock.patch.object(sizes, "specialised", side_effect=sizes.specialised) as specialised,
        mock.patch.object(sizes, "compile_graph", compare),
    ):
        check(model, max_batch_tokens=64, max_requests_per_batch=8)
    assert specialised.call_count >= 4


def test_an_engine_answers_while_its_steps_are_built(caplog: pytest.LogCaptureFixture) -> None:
    model, may_build, may_build_one = serving_model(), threading.Event(), threading.Event()
    prompts = [prompt_of(5), prompt_of(20), prompt_of(9)]
    expected = [alone(model, prompt, 6) for prompt in prompts]
    build, options = compiled_step.Step.build_ahead, {"fallback": "error", "while_building": None}

    def build_later(self: compiled_step.Step, args: Any, runner: Any) -> None:
        assert may_build.wait(60)
        if args[1]["input_ids"].shape[-1] == 1:
            assert may_build_one.wait(60)
        build(self, args, runner)

    with (
        mock.patch.object(compiled_step.Step, "build_ahead", build_later),
        mock.patch.object(task_kernel, "build_segment", side_effect=AssertionError("an own step waits for a build")),
        caplog.at_level("INFO", "torch_mpk.batching.step_builder"),
        managed(model, options=options, compile_prompts=False, **SIZED) as manager,
    ):

        def check_answers(count: int) -> None:
            names = [manager.add_request(prompt, max_new_tokens=6) for prompt in prompts[:count]]
            found = results(manager, len(names))
            assert [found[name].generated_tokens for name in names] == expected[:count]

        check_answers(3)
        runner = manager.batch_processor.model_runner
        [decode] = runner.steps
        assert decode.is_own
        assert "building a step of" in caplog.text
        may_build.set()
        while not decode.is_by_trace:  # in the sizes that the engine happens to make
            check_answers(3)
        check_answers(1)
        while decode.is_own:  # until the builder has noted the size that was used above as built
            check_answers(1)
        assert runner.builder.is_asked((True, 1))
        may_build_one.set()
        assert background.wait(60)
        check_answers(1)
        assert decode.is_by_trace and runner.builder.is_built((True, 1))


def test_an_eager_step_leaves_the_configuration_as_a_trace_beside_it_sees_it() -> None:
    model, seen = serving_model(), []
    model.model.layers[0].register_forward_pre_hook(lambda *_: seen.append(hasattr(model.config, "is_causal")))
    with managed(model, compile_prompts=False, **SIZED) as manager:
        manager.add_request(prompt_of(5), max_new_tokens=1)
        results(manager, 1)
    assert seen and not any(seen)


def test_an_engine_that_stops_waits_for_no_more_than_the_build_that_runs() -> None:
    built: list[int] = []
    builder, begun, may_end = StepBuilder(), threading.Event(), threading.Event()

    def build(number: int) -> None:
        begun.set()
        assert may_end.wait(60)
        built.append(number)

    for number in range(3):
        builder.ask(number, f"step {number}", functools.partial(build, number))
    assert begun.wait(60)
    closer = threading.Thread(target=builder.close)
    closer.start()
    while builder.num_waiting > 1:
        time.sleep(0.001)
    may_end.set()
    closer.join(60)
    assert built == [0]
    assert background.wait(60)
    builder.ask(2, "step 2", functools.partial(build, 2))  # one that had been forgotten
    assert background.wait(60)
    assert built == [0, 2]


def test_what_failed_to_build_is_raised_by_the_next_step_that_wants_it() -> None:
    builder = StepBuilder()

    def fail() -> None:
        raise ValueError("no such step")

    builder.ask("a", "step a", fail)
    assert background.wait(60)
    with pytest.raises(ValueError, match="no such step"):
        builder.ask("a", "step a", fail)


def test_where_this_pytorch_lacks_what_a_recorder_reads_it_says_so() -> None:
    recorder = Recorder()
    recorder.note_graph(
        torch.fx.symbolic_trace(lambda x: x), lambda x: x
    )  # outside of Dynamo, so it has no graph of its
    with guarding_hooks():
        assert recorder.note_guards([]) == []
    assert recorder.trace is None and "AttributeError" in recorder.why
    assert recorder.note_guards([]) == []
    assert recorder.why.endswith("does not say that hooks are guarded")
