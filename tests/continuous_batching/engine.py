"""Requests of an engine beside what each would get alone."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch._guards import tracing
from transformers import ContinuousBatchingConfig, GenerationConfig
from transformers.generation.continuous_batching import input_outputs
from transformers.generation.continuous_batching.model_runner import ModelRunner
from transformers.generation.continuous_batching.requests import GenerationOutput

from torch_mpk import _C
from torch_mpk.batching.engine import Runner
from torch_mpk.capture.graph import capture
from torch_mpk.continuous_batching import ATTENTION, StepCompileConfig, config
from torch_mpk.lowering import lower
from torch_mpk.partition.segments import partition
from torch_mpk.patterns import apply
from torch_mpk.testing.tiny import VOCAB_SIZE, tiny_model

STRICT = {"fallback": "error"}
PAGE = 16
SIZES = {"page_size": PAGE, "num_blocks": 64, "max_batch_tokens": 64, "max_requests_per_batch": 8}
GREEDY = GenerationConfig(max_new_tokens=24, do_sample=False, eos_token_id=-1, pad_token_id=0)


def sized(options: dict[str, Any] = STRICT, **settings: Any) -> ContinuousBatchingConfig:
    """A configuration of the engine for tiny models; by default what falls back is an error, and steps wait for their
    builds."""
    return config({"while_building": "wait"} | options, **SIZES | {"max_blocks_per_request": 8} | settings)


def serving_model(*args: Any, **kwargs: Any) -> Any:
    """In float32: greedy choices must not hang on the order of a sum."""
    return tiny_model(*args, **{"attention": ATTENTION, "dtype": torch.float32, "num_layers": 1} | kwargs)


def planned_for_a_gpu(gm: torch.fx.GraphModule, inputs: Sequence[torch.Tensor]) -> _C.Schedule:
    """What would be one launch there; an AssertionError where it is not, or a part falls back."""
    target = _C.Target("cuda", 90, 132, 232448, True, True)
    captured = capture(gm, inputs).graph_module
    with tracing(None):
        parts = partition(apply(captured), None, target)
        assert parts.fallbacks == []
        [segment] = parts.segments
        schedule = _C.make_schedule(lower(segment.gm).graph, target)
    _C.validate(schedule)
    return schedule


def planning_for_a_gpu() -> tuple[StepCompileConfig, list[_C.Schedule]]:
    """How the engine compiles steps that run eagerly, and what these would be on a GPU, as they are compiled."""
    schedules: list[_C.Schedule] = []

    def plan(gm: torch.fx.GraphModule, inputs: Sequence[torch.Tensor]) -> Callable[..., Any]:
        schedules.append(planned_for_a_gpu(gm, inputs))
        return gm.forward

    return StepCompileConfig(backend=plan, options=None), schedules


@contextmanager
def managed(
    model: Any, warmup: bool = False, generation_config: GenerationConfig = GREEDY, **settings: Any
) -> Iterator[Any]:
    """An engine that runs until the end of the block."""
    with model.continuous_batching_context_manager(
        generation_config=generation_config, continuous_batching_config=sized(**settings), warmup=warmup
    ) as manager:
        yield manager


def prompt_of(length: int) -> list[int]:
    return [random.randrange(VOCAB_SIZE) for _ in range(length)]


def alone(model: Any, prompt: Sequence[int], count: int) -> list[int]:
    """What eager ``generate`` says of a prompt."""
    model.set_attn_implementation("sdpa" if model._supports_sdpa else "eager")
    ids = torch.tensor([prompt], device=model.device)
    every = torch.ones_like(ids)  # else generate masks what it takes for padding
    out = model.generate(
        ids, attention_mask=every, max_new_tokens=count, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    model.set_attn_implementation(ATTENTION)
    return out[0, len(prompt) :].tolist()


def batched(model: Any, prompts: list[list[int]], warmup: bool = False, **settings: Any) -> list[list[int]]:
    """What the engine says of all of them."""
    outputs = model.generate_batch(
        prompts,
        generation_config=GREEDY,
        continuous_batching_config=sized(**settings),
        progress_bar=False,
        warmup=warmup,
    )
    assert [output.error for output in outputs.values()] == [None] * len(prompts)
    by_prompt = {tuple(output.prompt_ids): output.generated_tokens for output in outputs.values()}
    return [by_prompt[tuple(prompt)] for prompt in prompts]


def results(manager: Any, count: int) -> dict[str, GenerationOutput]:
    """Of so many requests, as they end."""
    found: dict[str, GenerationOutput] = {}
    while len(found) < count:
        output = manager.get_result(timeout=60)
        assert output is not None, "the engine does not go on"
        if output.is_finished():
            found[output.request_id] = output
    return found


def check_that_it_serves(manager: Any, model: Any) -> None:
    """After whatever has come to pass."""
    prompts = [prompt_of(3), prompt_of(PAGE)]
    names = [manager.add_request(prompt, max_new_tokens=6) for prompt in prompts]
    found = results(manager, len(names))
    for name, prompt in zip(names, prompts):
        assert found[name].error is None
        assert found[name].generated_tokens == alone(model, prompt, 6)
    assert pages_in_use(manager.batch_processor.cache) == 0


Fault = Callable[[ModelRunner], None]


def raising(error: Exception) -> Fault:
    def fault(runner: ModelRunner) -> None:
        raise error

    return fault


Capture = Callable[..., None]  # of a runner, a function and its arguments
capture_by_transformers: Capture = ModelRunner._capture_graph


@contextmanager
def captured_by(capture: Capture) -> Iterator[None]:
    """Has engines capture CUDA graphs so, in place of transformers' way."""
    with mock.patch.object(ModelRunner, "_capture_graph", capture):
        yield


def capture_as_an_engine(function: Callable[..., None], *args: Any) -> None:
    """As an engine of ours does, which runs the function with its memory pool in use."""
    Runner._capture_graph(Runner.__new__(Runner), function, *args)


@contextmanager
def faulty_steps(planned: dict[tuple[str, int], Fault]) -> Iterator[None]:
    """Has what stands at ``("before", n)`` or ``("behind", n)`` happen there, of decode step n of an engine."""
    compute_batch, number = ModelRunner.compute_batch, 0

    def compute(self: ModelRunner, *args: Any) -> None:
        nonlocal number
        if not self.inputs_and_outputs.use_block_table:
            return compute_batch(self, *args)
        number += 1
        planned.pop(("before", number), lambda runner: None)(self)
        compute_batch(self, *args)
        return planned.pop(("behind", number), lambda runner: None)(self)

    with mock.patch.object(ModelRunner, "compute_batch", compute):
        yield
    assert not planned, "an engine ran less steps"


class _Stream(torch.cpu.Stream):
    """All of it is done when it has been asked for."""

    def synchronize(self) -> None: ...

    def record_event(self, event: Any) -> None: ...

    def wait_event(self, event: Any) -> None: ...


@contextmanager
def asynchronous_on_the_cpu() -> Iterator[None]:
    """Has engines make steps before they know the tokens of the step before, as on a GPU."""
    with (
        mock.patch.object(input_outputs, "create_device_stream", _Stream),
        mock.patch.object(input_outputs.ContinuousBatchingAsyncIOs, "_supported_device_types", ("cpu",)),
    ):
        yield


@dataclass
class Request:
    expected: list[int]
    is_bad: bool = False
    is_cancelled: bool = False
    got: list[int] = field(default_factory=list)
    is_finished: bool = False
    error: str | None = None


class Load:
    """Requests for one engine, at random: lengths, stop tokens, times, and which are cancelled or not to be served."""

    def __init__(self, model: Any, num_prompts: int, longest: int, shared: int) -> None:
        self.random = random.Random(random.random())
        prefix = [self.random.randrange(VOCAB_SIZE) for _ in range(shared)]
        lengths = [self.random.randint(1, longest) for _ in range(num_prompts)]
        own = [[self.random.randrange(VOCAB_SIZE) for _ in range(length)] for length in lengths]
        prompts = [prefix * self.random.randrange(2) + prompt for prompt in own]
        self.answers = [(prompt, alone(model, prompt, GREEDY.max_new_tokens)) for prompt in prompts]
        self.requests: dict[str, Request] = {}

    def send(self, manager: Any, bad: float) -> None:
        prompt, answer = self.random.choice(self.answers)
        count = self.random.randint(1, len(answer))
        stop = self.random.choice(answer) if self.random.random() < 0.3 else -1
        expected = answer[:count]
        if stop in expected:
            expected = expected[: expected.index(stop) + 1]
        streaming = self.random.random() < 0.2
        is_bad = self.random.random() < bad
        tokens = [*prompt, VOCAB_SIZE] if is_bad else prompt
        name = manager.add_request(tokens, max_new_tokens=count, eos_token_id=stop, streaming=streaming)
        self.requests[name] = Request([] if is_bad else expected, is_bad)

    def cancel_one(self, manager: Any) -> None:
        running = [name for name, request in self.requests.items() if not request.is_finished]
        if running:
            name = self.random.choice(running)
            self.requests[name].is_cancelled = True
            manager.cancel_request(name)

    def receive(self, manager: Any, timeout: float) -> bool:
        output = manager.get_result(timeout=timeout)
        if output is None:
            return False
        request = self.requests[output.request_id]
        assert not request.is_finished
        assert output.generated_tokens[: len(request.got)] == request.got  # of a stream: what came before, and more
        request.got, request.is_finished, request.error = output.generated_tokens, output.is_finished(), output.error
        return True

    def run(
        self,
        manager: Any,
        count: int,
        seconds: float,
        cancelled: float = 0.1,
        bad: float = 0.0,
        are_together: bool = False,
    ) -> None:
        """Sends ``count`` requests, at times of their own or together, and waits for what they get for at most
        ``seconds``."""
        for _ in range(count):
            self.send(manager, bad)
            if are_together:
                continue
            if self.random.random() < cancelled:
                self.cancel_one(manager)
            if self.random.random() < 0.5:
                time.sleep(self.random.random() * 0.01)
            while self.receive(manager, timeout=0.001):
                pass
        deadline = time.monotonic() + seconds
        while any(not (r.is_finished or r.is_cancelled) for r in self.requests.values()):
            assert time.monotonic() < deadline, "the engine does not go on"
            self.receive(manager, timeout=0.1)

    def check(self, failed: str | None = None) -> None:
        """``failed``: the error of those that may have failed."""
        for name, request in self.requests.items():
            if request.is_bad:
                assert "is not in" in str(request.error) or request.is_cancelled, name
            else:
                assert request.error in (None, failed), name
            if request.is_finished and request.error is None:
                assert request.got == request.expected, name
            else:
                assert request.got == request.expected[: len(request.got)], name

    def num_failed(self) -> int:
        return sum(request.error is not None and not request.is_bad for request in self.requests.values())


def pages_in_use(cache: Any) -> float:
    """Of a cache: what is neither free nor kept for requests to come, in sectors, of which allocators make blocks."""
    used = cache.num_sectors - cache.pool.num_free_sectors
    for allocator in cache.cache_allocators.values():
        unused = cache.pool.count_free_blocks(allocator.index) + len(allocator.ledger.cached_blocks)
        used -= unused / allocator.blocks_per_sector
    return used
