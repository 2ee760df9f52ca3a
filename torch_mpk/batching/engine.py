"""Hugging Face's engine as steps of one launch need it: see docs/serving.md.

The engine ends with the first error that a step raises, and fails every request. Here a request that cannot be served
is refused as it arrives, and a step whose launch fails takes its own requests with it; the others, and new ones, go on.
Steps are of few sizes, each of which is a build. And tokens are drawn with random numbers from outside of the step,
whose graph has then nothing random.
"""

from __future__ import annotations

import contextvars
import dataclasses
import functools
import inspect
import itertools
import logging
import operator
import threading
import time
import types
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable
from typing import Any

import torch
from torch._dynamo.exc import TorchDynamoException
from transformers import CompileConfig
from transformers.generation.continuous_batching import continuous_api
from transformers.generation.continuous_batching.input_outputs import ContinuousBatchingAsyncIOs
from transformers.generation.continuous_batching.model_runner import infer_max_single_request_tokens
from transformers.generation.continuous_batching.requests import RequestState, RequestStatus
from transformers.generation.continuous_batching.utils import stream_context

from torch_mpk.batching import request_draws
from torch_mpk.batching.cache import Cache
from torch_mpk.batching.compiled_step import Step, without_marks
from torch_mpk.batching.request_draws import RequestDraws
from torch_mpk.batching.step_builder import StepBuilder
from torch_mpk.batching.step_inputs import prepare_faster
from torch_mpk.builds.garbage import few_collections, garbage_stays
from torch_mpk.capture.substitutes import keep_weights
from torch_mpk.errors import EngineError, MpkError, RequestError
from torch_mpk.generation.sampling import first_to_ring
from torch_mpk.runtime.segment import CompiledSegment, compiling_ahead, is_compiling_ahead, launched_segments

logger = logging.getLogger(__name__)

# What these leave unfinished is in pages of the requests that fail; after others nobody knows, and the engine ends.
RECOVERABLE = MpkError, torch.OutOfMemoryError

MAX_KINDS = 4  # of engines, whose compiled steps are kept for a model
MAX_BUILDS = 32  # of an engine, where Dynamo has a limit of 8; sizes of steps are fewer
COMPILE_TAKES_LIMITS = "recompile_limit" in inspect.signature(torch.compile).parameters  # from PyTorch 2.13 on
# Tokens that a step with prompts is padded to at least: what tensor cores multiply at once, and rows of a CPU's pass.
MIN_TOKENS = {"cuda": 128, "cpu": 16}
DOUBLED_UP_TO = 2048  # tokens; larger sizes are four times the one before
COMPILED = {"cuda"}  # kinds of devices whose kernels take a compiler some seconds


@dataclasses.dataclass
class StepCompileConfig(CompileConfig):
    """How the engine compiles a step: what ``torch.compile`` takes, by its names.

    Each number of rows is a graph of its own. A model's engines of one kind share them (``own_step``).
    """

    fullgraph: bool = True
    dynamic: bool | None = False
    backend: str | Callable[..., Any] = "mpk"
    mode: str | None = None  # options go without one
    options: dict[str, Any] | None = dataclasses.field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        return super().to_dict() | ({"recompile_limit": MAX_BUILDS} if COMPILE_TAKES_LIMITS else {})


def raise_recompile_limit() -> None:
    """Of this thread, where ``torch.compile`` takes none: steps of all sizes are builds of one function, and the one
    beyond Dynamo's limit would fail its requests."""
    settings: Any = torch._dynamo.config
    if settings.recompile_limit < MAX_BUILDS:
        settings.recompile_limit = MAX_BUILDS


def _reason(error: TorchDynamoException) -> Exception:
    """What was raised while Dynamo compiled, where requests can fail of that alone; else what Dynamo says."""
    raised: BaseException | None = getattr(error, "inner_exception", error)
    while raised is not None and not isinstance(raised, RECOVERABLE):
        raised = raised.__cause__ or raised.__context__
    if raised is None:
        return error
    raised.args = (str(raised).partition("\n\nfrom user code:\n")[0],)  # which Dynamo adds, a page of it
    return raised


# The class of the model whose step this thread runs, or ran last.
_stepping: contextvars.ContextVar[type | None] = contextvars.ContextVar("torch_mpk step", default=None)
# Classes of models that call our attention. Not each engine sees that: a step that was traced for one may serve others.
_attending: weakref.WeakSet[type] = weakref.WeakSet()


@torch.compiler.assume_constant_result
def note_attention() -> None:
    """Says, from within an attention, that a model calls it. Dynamo calls this as it traces a step, whose graph has
    nothing of it."""
    model = _stepping.get()
    if model is not None:
        _attending.add(model)


_own_steps: weakref.WeakKeyDictionary[torch.nn.Module, OrderedDict[Hashable, types.FunctionType]]
_own_steps = weakref.WeakKeyDictionary()
_one_step = threading.Lock()


def own_step(model: torch.nn.Module, kind: Hashable) -> types.FunctionType:
    """The engine's step as a function for engines of one kind and one model alone.

    Dynamo keeps what it compiles by code object, and counts it. With one for all engines it would keep the steps of
    those that have ended until the process does, and compile none any more after so many; and an engine that follows
    another of its kind takes over its steps. The function that is used by none, and not among the latest, frees them.
    """
    with _one_step:
        kinds = _own_steps.setdefault(model, OrderedDict())
        if kind not in kinds:
            shared = continuous_api.ModelRunner._forward_process_and_sample
            own = types.FunctionType(shared.__code__.replace(), shared.__globals__, shared.__name__)
            weakref.finalize(own, torch._dynamo.eval_frame.reset_code, own.__code__)
            kinds[kind] = own
            if len(kinds) > 2 * MAX_KINDS:  # a kind has steps with prompts and without
                kinds.popitem(last=False)
        kinds.move_to_end(kind)
        return kinds[kind]


class Runner(continuous_api.ModelRunner):
    """Pads steps with prompts to few sizes, draws the random numbers of steps, and knows whose launches steps are,
    those of CUDA graphs too."""

    segments: set[CompiledSegment]
    times: torch.Tensor | None  # of the step that is being made, where tokens are drawn: see _sample
    draws: RequestDraws | None  # whose times they are
    is_ready: bool  # it: see _is_ready
    builder: StepBuilder  # of steps that are the engine's own meanwhile
    asking_rank: float | None  # of builds, in a warm-up that waits for none

    @classmethod
    def of(cls, runner: continuous_api.ModelRunner, model: Any) -> Runner:
        """The same, which nobody has used yet."""
        runner.__class__ = cls
        result: Runner = runner
        result.segments, result.times, result.draws = set(), None, None
        result.is_ready, result.builder, result.asking_rank = True, StepBuilder(), None
        if result.do_sample:
            vocab_size = model.config.get_text_config().vocab_size
            result.draws = RequestDraws(result.cb_config.max_requests_per_batch, vocab_size, result.cache.device)
            if result.cb_config.per_request_processors:
                result.logit_processor.supported_keys |= request_draws.FIELDS
        result._compiled_varlen = result._compiled(model, result.cb_config.varlen_compile_config)
        result._compiled_decode = result._compiled(model, result.cb_config.decode_compile_config)
        if result.steps:  # others run eagerly, or do until theirs are built
            keep_weights(model)
        return result

    def _compiled(self, model: torch.nn.Module, settings: CompileConfig | None) -> Callable[..., None] | None:
        if settings is None:
            return None
        shapes = tuple(allocator.cache_tensor.shape for allocator in self.cache.cache_allocators.values())
        is_decode = settings is self.cb_config.decode_compile_config
        kind = is_decode, str(self.cb_config), shapes, self.do_sample, self.return_logprobs
        function = own_step(model, kind)
        if settings.backend == "mpk" and settings.mode is None and settings.dynamic is False:
            cls = type(model)
            return Step(function, self, is_decode, settings.to_dict(), self.builder, lambda: cls in _attending)
        return torch.compile(types.MethodType(function, self), **settings.to_dict())

    def compute_batch(self, model: Any, batch_data: dict[str, Any]) -> None:
        if not COMPILE_TAKES_LIMITS:
            raise_recompile_limit()
        _stepping.set(type(model))
        steps = self.inputs_and_outputs
        if steps.compute_stream is not None and not isinstance(steps, ContinuousBatchingAsyncIOs):
            # On which the engine writes the step's inputs.
            steps.compute_stream.wait_stream(torch.cuda.current_stream(steps.compute_stream.device))
        self._renew_times(batch_data["logits_indices"].size(0))
        self.is_ready = self._is_ready(model, batch_data)
        if self.asking_rank is not None and not (self.is_ready and self._has_graphs):
            return
        with launched_segments() as segments:
            try:
                super().compute_batch(model, batch_data)
            except TorchDynamoException as error:  # nothing of the step has run
                raise _reason(error) from None
            finally:
                self.segments |= segments
        if any(step.is_by_trace for step in self.steps):
            _attending.add(type(model))
        if type(model) not in _attending:  # its tokens have seen nothing of the cache
            raise EngineError(f"{type(model).__name__} does not call it")
        for step in self.steps:
            if not step.is_meanwhile:  # else it has done so as it was built
                step.publish()

    def _forward_process_and_sample(self, model: Any, batch_data: dict[str, Any], *ids: torch.Tensor) -> None:
        """An eager step, beside which a thread may trace others."""
        super()._forward_process_and_sample(model, without_marks(batch_data), *ids)

    @property
    def steps(self) -> list[Step]:
        """Those that are compiled for our backend."""
        return [step for step in (self._compiled_varlen, self._compiled_decode) if isinstance(step, Step)]

    @property
    def _step(self) -> Any:
        """What computes the step that is prepared."""
        return self._compiled_decode if self.inputs_and_outputs.use_block_table else self._compiled_varlen

    @property
    def _has_graphs(self) -> bool:
        """Whether such steps are captured in CUDA graphs."""
        is_decode = self.inputs_and_outputs.use_block_table
        return bool(self.use_cuda_graph_decode if is_decode else self.use_cuda_graph_varlen)

    def _is_ready(self, model: Any, batch_data: dict[str, Any]) -> bool:
        """Whether the step is not the engine's own meanwhile, which no CUDA graph may keep; a warm-up asks for it."""
        step = self._step
        if not isinstance(step, Step) or not step.is_meanwhile:
            return True
        if self.supports_logits_to_keep(model):
            batch_data["logits_to_keep"] = batch_data["logits_indices"]
        args = model, batch_data, *self.inputs_and_outputs.get_cb_kwargs()
        is_ready = step.is_ready(*args)
        if not is_ready and self.asking_rank is not None:
            step.ask(*args, rank=self.asking_rank)
        return is_ready

    def close(self) -> None:
        """Ends what builds in the background, but for compilers."""
        self.builder.close()

    def _renew_times(self, rows: int) -> None:
        """Draws the next step's times, outside of its CUDA graph, which reads them where they are."""
        if self.draws is None:
            return
        steps = self.inputs_and_outputs
        host = steps.io_pairs[steps.current_pair].host_io if isinstance(steps, ContinuousBatchingAsyncIOs) else steps
        states = [future.state for future in host.requests_in_batch if future.has_new_token]
        with stream_context(steps.compute_stream):
            self.times = self.draws.renew(states, rows)

    def steps_of_prompts(self) -> list[int] | None:
        """To which numbers of tokens steps with prompts are padded, up to the engine's most. None where they are not
        ours."""
        if not isinstance(self.cb_config.varlen_compile_config, StepCompileConfig):
            return None
        most = self.cache.max_batch_tokens
        sizes = [min(MIN_TOKENS[torch.device(self.cache.device).type], most)]
        while sizes[-1] < most:
            sizes.append(min(sizes[-1] * (2 if sizes[-1] < DOUBLED_UP_TO else 4), most))
        return sizes

    def maybe_pad_inputs(self, num_q_tokens: int, max_kv_read: int, use_decode_fast_path: bool) -> tuple[int, int]:
        """Else to multiples of an interval, each of which would be a build."""
        sizes = self.steps_of_rows() if use_decode_fast_path else self.steps_of_prompts()
        if sizes is None:
            padded: tuple[int, int] = super().maybe_pad_inputs(num_q_tokens, max_kv_read, use_decode_fast_path)
            return padded
        size = next(size for size in sizes if size >= num_q_tokens)
        step = self._compiled_decode if use_decode_fast_path else self._compiled_varlen
        if isinstance(step, Step) and self.asking_rank is None:
            size = step.size_for(size, sizes)
        return size, 0 if use_decode_fast_path else self.cache.max_tokens_read

    def steps_of_rows(self) -> list[int] | None:
        """To which numbers of rows decode steps are padded, as the engine does. None where they are not ours."""
        if not isinstance(self._compiled_decode, Step):
            return None
        most = self.cb_config.max_requests_per_batch
        return [*itertools.takewhile(lambda size: size < most, (1 << i for i in itertools.count())), most]

    def warmup(self, model: Any) -> None:
        """Where steps wait for their builds, twice on devices that have kernels: first all sizes are planned, while
        these are compiled beside each other. Else all sizes are asked for, small ones of each kind first, and those
        run that are built and are to be captured in CUDA graphs."""
        if any(step.is_meanwhile for step in self.steps):
            self._ask_for_all(model)
            return
        with few_collections():
            if torch.device(self.cache.device).type in COMPILED:
                with compiling_ahead():
                    self._warm_up(model)
            self._warm_up(model)

    def _warm_up(self, model: Any) -> None:
        """Of steps with prompts the engine itself builds the largest alone."""
        room = infer_max_single_request_tokens(self.cache)
        for size in self.steps_of_prompts() or ():
            self.run_one_warmup(model=model, num_q_tokens=min(size, room), max_kv_read=0)
        super().warmup(model)

    @torch.no_grad()
    def _ask_for_all(self, model: Any) -> None:
        steps, room = self.inputs_and_outputs, infer_max_single_request_tokens(self.cache)
        every = itertools.zip_longest(self.steps_of_prompts() or (), self.steps_of_rows() or ())
        sizes = [(rank, *pair) for rank, pair in enumerate(every, 1)]
        is_asynchronous = isinstance(steps, ContinuousBatchingAsyncIOs)
        try:
            for _ in range(2 if is_asynchronous else 1):  # each has CUDA graphs of its own
                for self.asking_rank, tokens, rows in sizes:
                    if tokens is not None:
                        self.run_one_warmup(model=model, num_q_tokens=min(tokens, room), max_kv_read=0)
                    if rows is not None and self.cache.max_decode_fast_path_length > 0:
                        self.run_one_warmup(model=model, num_q_tokens=rows, max_kv_read=None)
                if is_asynchronous:
                    steps.swap_io_pairs()
        finally:
            self.asking_rank = None
            self.cache.reset()

    def run_one_warmup(self, *args: Any, **kwargs: Any) -> float:
        """Waits for its step: the next one's inputs, which may be a request's, would be copied to where it reads its
        own."""
        seconds: float = super().run_one_warmup(*args, **kwargs)
        if self.inputs_and_outputs.compute_stream is not None:
            self.inputs_and_outputs.compute_stream.synchronize()
        return seconds

    def _capture_graph(self, *args: Any, **kwargs: Any) -> None:
        """It runs the step, and so may build it, with the engine's memory pool in use."""
        with garbage_stays():
            super()._capture_graph(*args, **kwargs)

    def _get_forward_fn(self, use_block_table: bool) -> tuple[Callable[..., None], bool]:
        forward, is_captured = super()._get_forward_fn(use_block_table)
        return forward, is_captured and self.is_ready and not is_compiling_ahead()

    def _sample(self, scores: torch.Tensor, output_ids: torch.Tensor) -> None:
        """As the engine does, in a launch. ``torch.multinomial``'s tokens come of the same random numbers, but from
        outside, since a launch has none. A token's log probability needs no others' probabilities, just their sum."""
        logits = scores[0]
        if self.times is None:
            tokens = logits.argmax(-1, keepdim=True)
        else:
            tokens = first_to_ring(logits, self.times)
        count = tokens.size(0)
        output_ids[0, :count].copy_(tokens.squeeze(-1))
        if self.return_logprobs:
            logprobs = logits.gather(-1, tokens).squeeze(-1) - logits.logsumexp(-1)
            output_ids[1, :count].copy_(logprobs.view(torch.int32))  # which the engine keeps as its bits

    def check(self) -> None:
        """Raises MegakernelTimeout where a launch was aborted, as far as the device has come, and waits for nothing."""
        errors = []
        for segment in self.segments:
            try:
                segment.check()
            except MpkError as error:
                errors.append(error)
        if errors:
            raise errors[0]


class Processor(continuous_api.ContinuousBatchProcessor):
    """Refuses, and fails, single requests."""

    model_runner: Runner
    most_tokens: int  # that an empty cache holds
    on_step: Callable[[float], None] | None = None  # is told how many seconds a step took, unless it fails
    _step_begin: float | None = None

    @classmethod
    def of(cls, processor: continuous_api.ContinuousBatchProcessor, model: torch.nn.Module) -> Processor:
        """The same, which nobody has used yet."""
        processor.__class__ = cls
        processor.cache.__class__ = Cache
        prepare_faster(processor.inputs_and_outputs)
        processor.model_runner = Runner.of(processor.model_runner, model)
        processor.most_tokens = infer_max_single_request_tokens(processor.cache)
        result: Processor = processor
        return result

    def _update_tp_group_state(self) -> bool:
        """What brings new requests in."""
        order = self.scheduler.waiting_requests_order
        num_known = len(order)
        is_stopping: bool = super()._update_tp_group_state()
        for name in list(itertools.islice(order, num_known, None)):
            try:
                self.check_request(self.scheduler.waiting_requests[name])
            except RequestError as error:
                order.remove(name)
                self._fail([self.scheduler.waiting_requests.pop(name)], error)
        return is_stopping

    def check_request(self, state: RequestState) -> None:
        """Raises RequestError where it could not be served, or would end the engine."""
        name, tokens, vocab_size = state.request_id, state.initial_tokens, self.config.vocab_size
        if not tokens:
            raise RequestError(name=name, what="it has no tokens")
        try:
            outside = next((token for token in map(operator.index, tokens) if not 0 <= token < vocab_size), None)
        except TypeError as error:
            raise RequestError(name=name, what=f"its token ids must be integers: {error}") from None
        if outside is not None:
            raise RequestError(name=name, what=f"token id {outside} is not in [0, {vocab_size})")
        if len(tokens) > self.most_tokens:
            what = f"its {len(tokens)} tokens are more than the {self.most_tokens} that the cache holds"
            raise RequestError(name=name, what=what)

    def prepare_next_batch(self) -> bool:
        scheduler = self.scheduler
        if not scheduler.active_requests:
            # Set when requests leave a full cache, and unset when another finishes: here all have been cancelled.
            scheduler.block_new_requests = False
        while True:
            try:
                is_ready: bool = super().prepare_next_batch()
                if not is_ready:
                    self._step_begin = None
                return is_ready
            except RuntimeError:
                active = list(scheduler.active_requests.values())
                if len(active) != 1 or not scheduler.starved_requests:
                    raise
                # It has outgrown the cache, which it has for itself.
                what = f"it has come to {active[0].current_len()} tokens, and the cache holds {self.most_tokens}"
                self._fail(active, RequestError(name=active[0].request_id, what=what))

    def _generation_step(self, model: Any) -> None:
        self._step_begin = self._step_begin or time.perf_counter()  # unless it has begun behind the one before
        try:
            super()._generation_step(model)
        except RECOVERABLE as error:
            self._fail_steps(error)

    def update_batch(self) -> None:
        try:
            # Waits for the step: what an aborted one leaves is no token.
            futures, *_ = self.inputs_and_outputs.prepare_batch_update()
            self.model_runner.check()
            self._end_step()  # first: who has its tokens finds it counted
            for future in futures:
                self._end_if_cancelled(future.state)
            super().update_batch()
        except RECOVERABLE as error:
            self._fail_steps(error)
            self._step_begin = None

    def _end_step(self) -> None:
        now = time.perf_counter()
        if self.on_step is not None and self._step_begin is not None:
            self.on_step(now - self._step_begin)
        self._step_begin = now

    def _end_if_cancelled(self, state: RequestState) -> None:
        """With asynchronous steps a request may be cancelled while its step runs: it has no pages any more that the
        step's token could be counted for."""
        is_there = self.scheduler.active_requests.get(state.request_id) is state
        if not is_there and state.status not in (RequestStatus.FINISHED, RequestStatus.PENDING):
            state.status = RequestStatus.FINISHED

    def _fail_steps(self, error: Exception) -> None:
        """Fails the requests of every step in flight: of the latest, and of the one before if that is asynchronous."""
        logger.error("a step failed, and its requests with it: %s", error)
        steps = self.inputs_and_outputs
        hosts = [pair.host_io for pair in steps.io_pairs] if isinstance(steps, ContinuousBatchingAsyncIOs) else [steps]
        states = {future.state.request_id: future.state for host in hosts for future in host.requests_in_batch}
        steps.reset()  # waits for the device
        try:
            self.model_runner.check()
        except MpkError as another:  # of the same steps
            logger.error("%s", another)
        active = self.scheduler.active_requests  # those that have been evicted since begin again anyway
        self._fail([state for name, state in states.items() if active.get(name) is state], error)

    def _fail(self, states: Iterable[RequestState], error: Exception) -> None:
        scheduler = self.scheduler
        for state in states:
            scheduler._requests_to_fork = [other for other in scheduler._requests_to_fork if other is not state]
            for number in range(state.num_children):  # which nobody makes any more, and somebody waits for
                self._handle_request_error(error, state.fork(f"{state.request_id}__child#{number}"))
            self._handle_request_error(error, state)
            scheduler.finish_request(state.request_id)
        scheduler.block_new_requests = False  # as when one finishes


def install(attention: str) -> None:
    """Has engines of models with this attention use the classes above; others stay as they are."""
    request_draws.install()
    create = continuous_api.ContinuousBatchingManager._create_batch_processor

    @functools.wraps(create)
    def create_ours(self: continuous_api.ContinuousBatchingManager) -> continuous_api.ContinuousBatchProcessor:
        processor = create(self)  # which names its classes itself
        is_ours = processor.config._attn_implementation == attention
        return Processor.of(processor, self.model) if is_ours and not isinstance(processor, Processor) else processor

    stop = continuous_api.ContinuousBatchingManager.stop

    @functools.wraps(stop)
    def stop_ours(self: continuous_api.ContinuousBatchingManager, *args: Any, **kwargs: Any) -> None:
        processor = self.batch_processor
        try:
            stop(self, *args, **kwargs)
        finally:
            if isinstance(processor, Processor):
                processor.model_runner.close()

    continuous_api.ContinuousBatchingManager._create_batch_processor = create_ours
    continuous_api.ContinuousBatchingManager.stop = stop_ours
