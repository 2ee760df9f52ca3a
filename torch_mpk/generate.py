"""A decode loop for Hugging Face causal language models: the prompt, then one compiled step for each token.

It does what ``model.generate`` does for greedy search and sampling, without its cost per token. The step's inputs stay
the same tensors and are updated by the step itself, so what Dynamo does before and after the graph, guards and 400
attribute look-ups, is the same every time: the first steps go through it, the others call the graph. Sampling runs on
the device, and the host reads tokens and checks for the end some steps behind it, so it never waits for the newest.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import operator
import sys
import time
import types
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

import torch

from torch_mpk.builds import timing
from torch_mpk.builds.dry_run import is_dry_run
from torch_mpk.capture.substitutes import keep_weights
from torch_mpk.config import Options, env
from torch_mpk.dispatch.admission import takes_prompts
from torch_mpk.dispatch.buckets import chunks_of
from torch_mpk.errors import UnsupportedError
from torch_mpk.generation.arguments import (
    cache_length,
    check_chunks,
    check_drafts,
    check_model,
    check_streamer,
    check_tensors,
    checking_draws,
    is_autocast,
    is_of_transformers,
    padding_of,
    plain_model,
    sharing_draws,
)
from torch_mpk.generation.model_inputs import TIMED, ModelInputs
from torch_mpk.generation.prompt_lookup import PromptLookup
from torch_mpk.generation.sampling import Choice, Draws, are_drawn_in_steps, drawn, processors_of, stopping
from torch_mpk.generation.settings import GenerationSettings, expect, settle
from torch_mpk.generation.static_cache import allocate, expect_right, expect_written, make_cache, rewind
from torch_mpk.runtime import synchronize
from torch_mpk.runtime.backend import backend_of

if TYPE_CHECKING:
    from torch_mpk.traces.trace import Trace, Watch

logger = logging.getLogger(__name__)

_CHUNK = 2048  # positions of a prompt's chunk, unless the call says
_MAX_STEPS = 16  # compiled steps kept for one model
_STEPS_BEHIND = 3  # that the host reads tokens: as many may be computed in vain when all rows have ended

_steps: WeakKeyDictionary[torch.nn.Module, OrderedDict[tuple[Any, ...], _Step]] = WeakKeyDictionary()


@torch.no_grad()  # not in inference mode, whose tensors, also those that a model keeps, could never be trained on
def generate(
    model: torch.nn.Module,
    input_ids: torch.Tensor,
    max_new_tokens: int | None = None,
    *,
    attention_mask: torch.Tensor | None = None,
    generation_config: Any = None,
    do_sample: bool | None = None,
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    repetition_penalty: float | None = None,
    eos_token_id: int | Sequence[int] | torch.Tensor | None = None,
    pad_token_id: int | torch.Tensor | None = None,
    stop_strings: str | Sequence[str] | None = None,
    tokenizer: Any = None,
    streamer: Any = None,
    progress_bar: bool | None = None,
    generator: torch.Generator | None = None,
    max_cache_len: int | None = None,
    prompt_lookup_num_tokens: int | None = None,
    prefill_chunk_size: int | None = None,
    options: dict[str, Any] | None = None,
    stats: dict[str, float] | None = None,
) -> torch.Tensor:
    """Generates tokens with a Hugging Face causal language model.

    The model is called as its own ``generate`` calls it, so greedy tokens are the same. What a keyword does not say,
    ``generation_config`` does, and then ``model.generation_config``, as in Hugging Face's ``generate``. Their fields
    mean what they mean there; those that ask for another search, such as ``num_beams``, or another result, are refused.
    Under autocast everything runs eagerly, with a warning.

    Args:
        model: of Hugging Face, a decoder alone that keeps all it has seen in a ``StaticCache``. The adapters of PEFT
            that change layers may be in it; prompt and prefix tuning may not.
        input_ids: int64[batch, prompt], on the model's device. ``**tokenizer(texts, padding=True,
            return_tensors="pt").to(model.device)`` gives both tensors, where the tokenizer has ``padding_side="left"``.
        max_new_tokens: tokens to generate, at least 1. A configuration may say ``max_length`` instead.
        attention_mask: [batch, prompt], 0 where a prompt is padded, on the left. Default: where ``pad_token_id`` is, if
            that is given and ends no sequence; else nothing is padded.
        generation_config: a ``transformers.GenerationConfig``.
        do_sample: draw from the distribution that the next four leave, applied in this order; otherwise greedy.
        temperature: divides the logits, > 0. Default: 1.
        top_k: keep only so many most likely tokens; 0 keeps all. Default: 50, which is Hugging Face's.
        top_p: keep only the most likely tokens whose probabilities add up to this, in [0, 1].
        min_p: keep only tokens at least this times as likely as the most likely one, in [0, 1].
        repetition_penalty: divides the positive logits of tokens that were there before, prompt included, and
            multiplies negative ones, > 0. Before everything else; in greedy search, too.
        eos_token_id: a row ends behind any of these; all rows ended ends the call. []: rows never end early.
        pad_token_id: fills a row behind its end. Default: the first of ``eos_token_id``.
        stop_strings: a row ends behind the token that completes one of these; ``tokenizer`` must be given.
        tokenizer: of Hugging Face, for ``stop_strings``.
        streamer: of Hugging Face, such as ``TextStreamer`` and ``TextIteratorStreamer``, or anything that has their
            methods: ``put`` gets the prompt, int64[batch, prompt], and then each new batch of tokens, int64[batch], all
            on the CPU, and ``end`` is called behind the last. One that is no class of transformers may change the model
            while it generates; each step takes the host 0.1 to 0.3 ms more to see that.
        progress_bar: show on stderr how many tokens have come, until the call ends. Default: where stderr is a terminal
            and there is no ``streamer``.
        generator: of the model's device, for sampling. Default: PyTorch's, which ``torch.manual_seed`` seeds. Ranks
            that share a model draw as the first of them does.
        max_cache_len: length of the key/value cache. Default: what is needed, rounded up to a multiple of 128.
        prompt_lookup_num_tokens: where the last tokens were there before, take so many that followed them for a draft,
            at most 15, and check it in one step. Greedy, one sequence without padding; the tokens are the same.
        prefill_chunk_size: compile the prompt, too, and run it in chunks of at most so many tokens, from 16 to 8192:
            one launch each, built once for a bucket (docs/options.md), model, batch and cache length; the call waits
            for builds. Models of full attention alone. None: 2048 where that is fast and the builds are few, which is
            on a GPU that takes prompts, if ``max_cache_len`` is given, and chunks run eagerly while their kernels are
            built in the background; elsewhere the prompt runs eagerly.
        options: of the backend, as ``torch.compile(options=...)`` takes them.
        stats: gets "first_token_seconds" (the prompt), "seconds" (all later tokens, with the first call's compilation)
            and "tokens_per_second" (later tokens of all rows in that time, those behind a row's end included). The log
            has the same.

    Returns:
        int64[batch, prompt + generated], an ordinary tensor, which may be trained on.

    Raises:
        ArgumentError: an argument, or a field of a configuration, has a wrong shape, type or range, or the model cannot
            be decoded so; the message says why.
        AutocastError: autocast is on, and ``options`` say ``fallback="error"``.
        OptionError: so has an option, or there is none of that name.
        MegakernelTimeout: a launch was aborted by its watchdog.
    """
    model = plain_model(model)
    check_tensors(model, input_ids, attention_mask)
    check_streamer(streamer)
    given = {
        "max_new_tokens": max_new_tokens,
        "do_sample": do_sample,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "repetition_penalty": repetition_penalty,
        "eos_token_id": eos_token_id,
        "pad_token_id": pad_token_id,
        "stop_strings": stop_strings,
        "max_cache_len": max_cache_len,
        "prompt_lookup_num_tokens": prompt_lookup_num_tokens,
    }
    settings = settle(model, input_ids.shape[1], generation_config, given)
    check_drafts(settings, input_ids)
    check_chunks(prefill_chunk_size)
    is_stopped = stopping(settings.stop_strings, tokenizer, input_ids)
    length = cache_length(settings, input_ids, max_cache_len)
    padding = padding_of(input_ids, attention_mask, settings)
    decode = _Decode(model, input_ids, padding, length, options)
    keep_weights(model)
    sharing_draws(model, settings, generator, input_ids.device)
    decode.may_change = not is_of_transformers(streamer)
    decode.compile_prompt_where_fast(prefill_chunk_size, is_chosen=settings.max_cache_len is not None)
    decode.choose_by(settings, processors_of(settings, model, input_ids, padding), generator)
    with _watched(streamer, progress_bar, input_ids, settings.max_new_tokens) as watchers:
        start = time.perf_counter()
        tokens = checking_draws(decode.new_tokens(settings), model, settings, generator, input_ids.device)
        first = next(tokens)
        first.tolist()  # waits
        prompt_done = time.perf_counter()
        expect_written(decode.cache, model)
        end = None if settings.max_time is None else start + settings.max_time
        collected = _collect(itertools.chain([first], tokens), settings, is_stopped, end, watchers)
        synchronize()
        seconds = time.perf_counter() - prompt_done
    _report(prompt_done - start, seconds, collected.numel() - len(collected), stats)
    return torch.cat([input_ids, collected.to(input_ids.device)], dim=1)


def _report(first: float, later: float, count: int, stats: dict[str, float] | None) -> None:
    speed = count / later
    logger.info("%d tokens behind the first in %.3f s: %.1f tokens/s", count, later, speed)
    if stats is not None:
        stats.update(first_token_seconds=first, seconds=later, tokens_per_second=speed)


def _is_fast_with_prompts(model: Any, device: torch.device, options: dict[str, Any] | None) -> bool:
    """Whether its compiled prompts are far faster than eager."""
    if device.type != "cuda":
        return False
    try:
        return takes_prompts(backend_of(device).target(device, Options.parse(None, options)), model.dtype)
    except UnsupportedError:
        return False


@contextlib.contextmanager
def _watched(
    streamer: Any, progress_bar: bool | None, prompt: torch.Tensor, count: int
) -> Iterator[list[Callable[[torch.Tensor], Any]]]:
    """What is to be called with each new batch of tokens, while the block runs."""
    with contextlib.ExitStack() as stack:
        watchers = []
        if streamer is not None:
            streamer.put(prompt.cpu())
            watchers.append(streamer.put)
        if progress_bar if progress_bar is not None else streamer is None and sys.stderr.isatty():
            from tqdm.auto import tqdm  # which transformers needs

            bar = stack.enter_context(tqdm(total=count, unit="token", leave=False))
            watchers.append(lambda tokens: bar.update())
        yield watchers
    if streamer is not None:
        streamer.end()


class _Decode:
    """One call's model, cache and step inputs, which stay at their addresses."""

    choose: Callable[[torch.Tensor], torch.Tensor] | None = None  # None: greedy
    draws: Callable[..., Draws] | None = None  # what lets a step choose by itself, where it can
    prefill_chunk_size: int | None = None  # None: the prompt runs eagerly
    may_change = False  # the model, between steps: each goes through Dynamo, which sees it

    def __init__(
        self,
        model: torch.nn.Module,
        input_ids: torch.Tensor,
        padding: torch.Tensor | None,
        length: int,
        options: dict[str, Any] | None,
    ) -> None:
        from transformers import DynamicCache
        from transformers.cache_utils import StaticLayer

        self.is_eager = is_autocast(input_ids.device, Options.parse(None, options))
        check_model(model)
        self.model, self.prompt, self.options = model, input_ids, options
        self.cache = DynamicCache(config=model.config) if self.is_eager else make_cache(model, length)
        # Layers of sliding windows, and recurrent ones, count in Python.
        self.is_replayable = all(type(layer) is StaticLayer for layer in self.cache.layers)
        if not self.is_eager:
            expect_right(model, input_ids.device)
        self.inputs = ModelInputs(model, input_ids, padding, self.cache, None if self.is_eager else length)

    def compile_prompt_where_fast(self, chunk_size: int | None, is_chosen: bool) -> None:
        """In chunks of ``chunk_size``; where that is None, and the cache's length ``is_chosen``, in chunks if those are
        fast."""
        if self.is_eager:
            return
        if chunk_size is not None:
            self.compile_prompt(chunk_size, while_building="wait")
        elif is_chosen and self.is_replayable and _is_fast_with_prompts(self.model, self.prompt.device, self.options):
            # The rest of a model that is not all ours is left to PyTorch, as the whole prompt would be.
            self.compile_prompt(_CHUNK, fallback="eager")

    def compile_prompt(self, chunk_size: int, **options: Any) -> None:
        """Lets the prompt run in chunks of at most so many positions; ``options`` are for where the call has none."""
        self._expect_full_attention("prefill_chunk_size")
        self.prefill_chunk_size = chunk_size
        self.prompt_options = self._unless_chosen(**options)
        # The cache's tensors are made now: made by a compiled chunk, they would be other inputs for the next one.
        allocate(self.cache, self.model, self.prompt)

    def _unless_chosen(self, **options: Any) -> dict[str, Any]:
        """Those that the call does not have."""
        return {name: option for name, option in options.items() if name not in (self.options or {})}

    def choose_by(self, settings: GenerationSettings, processors: Any, generator: torch.Generator | None) -> None:
        if not settings.do_sample and not processors:
            return
        name, is_drafted = "prompt_lookup_num_tokens", settings.prompt_lookup_num_tokens is not None
        expect(not is_drafted, name, "greedy search without a penalty", "do_sample or processors of logits")
        self.choose = Choice(self.prompt, processors, settings.do_sample, generator)
        if settings.do_sample and are_drawn_in_steps(processors):
            self.draws = functools.partial(Draws, settings, generator=generator)

    def new_tokens(self, settings: GenerationSettings) -> Iterator[torch.Tensor]:
        """int64[batch, 1] each; the work for one is enqueued when it is asked for."""
        count, num_drafts = settings.max_new_tokens, settings.prompt_lookup_num_tokens
        if self.is_eager:
            return self.eager_tokens(count)
        return self.tokens(count) if num_drafts is None else self.checked_tokens(count, num_drafts)

    def _expect_full_attention(self, argument: str) -> None:
        expect(self.is_replayable, argument, "a model of full attention alone", "one with windows or recurrent layers")

    def tokens(self, count: int) -> Iterator[torch.Tensor]:
        """By the prompt, and then by a compiled step for each."""
        inputs, logits = self._run_prompt()
        token = self._chosen(logits)
        yield token
        inputs["input_ids"].copy_(token)
        if self.draws is not None:
            yield from self._drawn_tokens(inputs, self.draws(*logits.shape, logits.device), count - 1)
            return
        function = _greedy_step if self.choose is None else _logits_step
        step = self._step(function).prepare((self.model, inputs), self._is_replayed)
        for _ in range(1, count):
            token = step()
            if self.choose:
                token = self.choose(token)
                inputs["input_ids"].copy_(token)
            yield token

    def eager_tokens(self, count: int) -> Iterator[torch.Tensor]:
        """The same tokens, with nothing compiled, on a cache that grows."""
        inputs = self.inputs.of_prompt()
        for _ in range(count):
            outputs = self.model(**inputs)
            token = self._chosen(outputs.logits[:, -1])
            yield token
            inputs = self.inputs.of_next(outputs, token)

    def _drawn_tokens(self, inputs: dict[str, Any], draws: Draws, count: int) -> Iterator[torch.Tensor]:
        step = self._step(_drawing_step, kind=tuple(draws.limits))
        run = step.prepare((self.model, inputs, draws.limits, draws.times), self._is_replayed)
        for _ in range(count):
            draws.renew()
            yield run()

    def checked_tokens(self, count: int, num_drafts: int) -> Iterator[torch.Tensor]:
        """The same tokens, int64[1, 1] each on the CPU, of which a step gives as many as its draft has right, and one.

        A step takes the last token and its draft, and says what follows each. What follows a token that was right is
        right; what the step has written to the cache behind that is forgotten.
        """
        name = "prompt_lookup_num_tokens"
        self._expect_full_attention(name)
        expect(self.inputs.mask is None, name, "a prompt without padding", "an attention_mask with zeros")
        first, logits = self._run_prompt()
        new = [int(logits.argmax())]
        lookup, position = PromptLookup(self.prompt[0].tolist()), self.prompt.shape[1]
        steps: dict[int, tuple[dict[str, Any], Callable[[], torch.Tensor]]] = {}
        while True:
            for token in new[:count]:
                yield torch.tensor([[token]])
            count -= len(new)
            if count <= 0:
                return
            lookup.extend(new)
            draft = lookup.draft(num_drafts)
            size = 1 + num_drafts if draft else 1  # two builds, whatever drafts there are
            if size not in steps:
                inputs = first | {name: _widened(first[name], size) for name in TIMED if name in first}
                compiled = self._step(_next_tokens, **self._unless_chosen(while_building="wait"))
                steps[size] = inputs, compiled.prepare((self.model, inputs), self._is_replayed)
            inputs, step = steps[size]
            given = [new[-1], *draft]
            inputs["input_ids"].copy_(torch.tensor([given + given[-1:] * (size - len(given))]))
            if "position_ids" in inputs:
                inputs["position_ids"].copy_(first["position_ids"] + torch.arange(size, device=self.prompt.device))
            found = step()[0].tolist()
            num_right = next((i for i, token in enumerate(draft) if token != found[i]), len(draft))
            new = found[: num_right + 1]
            position += len(new)
            if "position_ids" in first:
                first["position_ids"] += len(new)
            rewind(self.cache, position)

    def _run_prompt(self) -> tuple[dict[str, Any], torch.Tensor]:
        """The inputs of the first step, and what follows the prompt, [batch, vocabulary]."""
        inputs = self.inputs.of_prompt()
        of_steps = self.inputs.of_steps()
        size, length = self.prefill_chunk_size, self.prompt.shape[1]
        if size is None:
            return of_steps, _last_logits(self.model, inputs)
        begin = 0
        for count in chunks_of(length, size, self.prompt.device.type):
            part = {name: _columns(inputs[name], begin, begin + count) for name in TIMED if name in inputs}
            step = self._step(_last_logits, dynamic=True, max_positions=size, **self.prompt_options)
            logits = step.prepare((self.model, inputs | part), False)()
            begin += count
        return of_steps, logits

    def _chosen(self, logits: torch.Tensor) -> torch.Tensor:
        return self.choose(logits) if self.choose else logits.argmax(-1, keepdim=True)

    @property
    def _is_replayed(self) -> bool:
        return self.is_replayable and not self.may_change

    def _step(
        self, function: Callable[..., torch.Tensor], dynamic: bool = False, kind: tuple[str, ...] = (), **options: Any
    ) -> _Step:
        """The compiled step, made once for a model and a kind of call; ``options`` beside those of the call.
        ``dynamic``: it takes inputs of more than one length. ``kind``: whatever else makes it another graph."""
        steps = _steps.setdefault(self.model, OrderedDict())
        options = (self.options or {}) | options
        chosen = tuple(sorted(options.items()))
        call = len(self.prompt), self.cache.get_max_length(), self.inputs.mask is None
        key = (function, kind, dynamic, *call, chosen)
        if key not in steps:
            # Where layers count in Python, each count would be a build.
            which = function.__name__, kind, dynamic, *call
            steps[key] = _Step(function, options, dynamic or not self.is_replayable, (type(self.model), *which))
            if len(steps) > _MAX_STEPS:
                steps.popitem(last=False)
        steps.move_to_end(key)
        return steps[key]


def _columns(t: torch.Tensor, begin: int, end: int) -> torch.Tensor:
    """A copy of ``t[..., begin:end]``, to Dynamo of any length, in which a single row, too, has the stride of its
    shape: Dynamo looks at it."""
    part = t[..., begin:end].clone(memory_format=torch.contiguous_format)
    torch._dynamo.maybe_mark_dynamic(part, t.ndim - 1)
    return part


def _widened(t: torch.Tensor, size: int) -> torch.Tensor:
    """Of the next step's shape, with so many tokens."""
    return t.new_zeros(*t.shape[:-1], size)


class _Step:
    """A step function, compiled, that can be called again with the same arguments without Dynamo. Until Dynamo has
    compiled it, calls are a trace's that an earlier process, or another model object, has left, where one holds."""

    def __init__(
        self, function: Callable[..., torch.Tensor], options: dict[str, Any], dynamic: bool, which: tuple[Any, ...]
    ) -> None:
        """``which``: what it is, in words that are equal in every process."""
        from torch_mpk.traces.trace import note_guards  # which needs Dynamo, and importing torch_mpk should not

        # A code object of its own, because Dynamo counts recompilations, and looks up graphs, by code object.
        own = types.FunctionType(function.__code__.replace(), function.__globals__)
        self._names = function.__code__.co_varnames[: function.__code__.co_argcount]
        self._options = options
        self._kind = (*which, repr(sorted(options.items())))
        self._recorder = _Recorder()
        self._is_compiled = False
        self._used: tuple[Trace, Watch] | None = None  # and the model as it was then
        self._looked_up: set[Hashable] = set()
        chosen = {"guard_filter_fn": note_guards} | options  # with another there is no trace
        self._compiled = torch.compile(own, backend=self._recorder, dynamic=None if dynamic else False, options=chosen)

    def _by_trace(self, args: Sequence[Any]) -> Callable[[], torch.Tensor] | None:
        """What runs the step by a trace that holds; None where there is none, or Dynamo has compiled it."""
        from torch_mpk.backend import run_of
        from torch_mpk.backend.calls import compile_call
        from torch_mpk.traces import known
        from torch_mpk.traces.trace import Watch

        def make(trace: Trace, local: Mapping[str, Any]) -> Callable[..., Any]:
            with timing.build():
                return run_of(trace.gm, trace.arguments(local), Options.parse(None, self._options), compile_call)

        if self._is_compiled or is_dry_run():
            return None
        local = dict(zip(self._names, args, strict=True))
        trace, watch = self._used or (None, None)
        if watch is None or not watch.is_same() or trace is None or trace.difference_of_call(local) is not None:
            watch = Watch(local["model"])
            trace = known.find((*self._kind, env.disable), local, self._looked_up, make)
        if trace is None:
            return None
        self._used, given = (trace, watch), trace.arguments(local)
        return lambda: trace.call(*given)[0]

    def _by_dynamo(self, args: Sequence[Any], is_kept: bool) -> torch.Tensor:
        """``is_kept``: its trace, where it leaves one, for calls that ``_by_trace`` runs."""
        from torch_mpk.traces import known
        from torch_mpk.traces.trace import recording

        self._is_compiled = True
        with recording(num_results=1) as recorder:
            result: torch.Tensor = self._compiled(*args)
        if recorder.is_used and is_kept and not is_dry_run():
            returned = [call.results for call in self._recorder.calls]
            if recorder.trace is not None and len(returned) == 1 and returned[0][0] is result:
                known.publish((*self._kind, env.disable), recorder.trace)
            else:
                logger.info("a step's trace is not kept for other processes: %s", recorder.why)
        return result

    def prepare(self, args: Sequence[Any], is_replayable: bool) -> Callable[[], torch.Tensor]:
        """A function that runs the step on these arguments.

        ``is_replayable``: the step changes nothing but tensors, in place. The first two calls then go through Dynamo,
        and if they were one call each, of the same graph with the same objects, the others call the graph directly.
        """
        by_trace = self._by_trace(args) if is_replayable else None
        if by_trace is not None:
            return by_trace
        previous: _GraphCall | None = None
        result_index: int | None = None

        def step() -> torch.Tensor:
            nonlocal previous, result_index
            if previous is not None and result_index is not None:
                return previous.graph(*previous.args)[result_index]
            self._recorder.calls.clear()
            result = self._by_dynamo(args, is_kept=is_replayable)
            calls = list(self._recorder.calls)
            self._recorder.calls.clear()
            current = calls[0] if is_replayable and len(calls) == 1 else None
            if current is not None:
                if previous is not None and previous.is_same(current):
                    result_index = next((i for i, tensor in enumerate(current.results) if tensor is result), None)
                previous = current._replace(results=())
            return result

        return step


class _Recorder:
    """The backend, noting calls of its graphs. Dynamo keeps it for good, so it holds nothing else of a step."""

    def __init__(self) -> None:
        self.calls: list[_GraphCall] = []

    def __call__(self, gm: torch.fx.GraphModule, inputs: Sequence[Any], **kwargs: Any) -> Callable[..., Any]:
        from torch_mpk.backend import mpk  # which needs Dynamo, and importing torch_mpk should not
        from torch_mpk.traces.trace import note_graph

        graph = mpk(gm, inputs, **kwargs)
        note_graph(gm, graph)

        def call(*args: Any) -> Any:
            results = graph(*args)
            self.calls.append(_GraphCall(graph, args, results))
            return results

        return call

    def reset(self) -> None:
        """As Dynamo asks backends for it."""
        from torch_mpk.backend import reset

        reset()


class _GraphCall(NamedTuple):
    graph: Callable[..., Any]
    args: tuple[Any, ...]
    results: Sequence[Any]

    def is_same(self, other: _GraphCall) -> bool:
        same_args = len(self.args) == len(other.args) and all(map(operator.is_, self.args, other.args))
        return self.graph is other.graph and same_args


def _last_logits(model: torch.nn.Module, inputs: dict[str, Any]) -> torch.Tensor:
    return model(**inputs).logits[:, -1]


def _logits_step(model: torch.nn.Module, inputs: dict[str, Any]) -> torch.Tensor:
    logits = model(**inputs).logits[:, -1]
    if "position_ids" in inputs:
        inputs["position_ids"].add_(1)
    return logits


def _greedy_step(model: torch.nn.Module, inputs: dict[str, Any]) -> torch.Tensor:
    token = _logits_step(model, inputs).argmax(-1, keepdim=True)
    inputs["input_ids"].copy_(token)
    return token


def _drawing_step(
    model: torch.nn.Module, inputs: dict[str, Any], limits: dict[str, torch.Tensor], times: torch.Tensor
) -> torch.Tensor:
    token = drawn(_logits_step(model, inputs), limits, times)
    inputs["input_ids"].copy_(token)
    return token


def _next_tokens(model: torch.nn.Module, inputs: dict[str, Any]) -> torch.Tensor:
    return model(**inputs).logits.argmax(-1)


def _collect(
    tokens: Iterator[torch.Tensor],
    settings: GenerationSettings,
    is_stopped: Callable[[list[list[int]]], list[bool]] | None,
    end: float | None,
    watchers: Sequence[Callable[[torch.Tensor], Any]],
) -> torch.Tensor:
    """Reads new tokens, some steps behind the device, until all rows have ended, or the time ``end`` has come.
    Returns int64[batch, generated]."""
    eos, pad = settings.eos_token_id, settings.pad_token_id
    if not eos and is_stopped is None and end is None and not watchers:
        return torch.cat(list(tokens), dim=1)
    columns: list[list[int]] = []
    ended: list[bool] = []
    pending: deque[Callable[[], list[int]]] = deque()

    def read_one() -> bool:
        """Whether all rows have ended."""
        nonlocal ended
        column = pending.popleft()()
        ended = ended or [False] * len(column)
        column = [pad if end else token for token, end in zip(column, ended, strict=True)]
        ended = [end or token in eos for token, end in zip(column, ended, strict=True)]
        columns.append(column)
        if is_stopped is not None:
            ended = [end or stopped for end, stopped in zip(ended, is_stopped(columns), strict=True)]
        for watch in watchers:
            watch(torch.tensor(column))
        return all(ended) or end is not None and time.perf_counter() > end

    is_over = False
    for token in tokens:
        pending.append(_read(token))
        if len(pending) > (0 if token.device.type == "cpu" else _STEPS_BEHIND) and (is_over := read_one()):
            break
    while pending and not is_over:
        is_over = read_one()
    return torch.tensor(columns).t()


@functools.cache
def _copies(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def _read(token: torch.Tensor) -> Callable[[], list[int]]:
    """Begins to copy int64[batch, 1] to the CPU; the result waits and gives the elements.

    The copy has a stream of its own: between two steps it would keep the device from the next.
    """
    if token.device.type == "cpu":
        return token[:, 0].tolist
    host = torch.empty(token.shape, dtype=token.dtype, pin_memory=True)
    stream = _copies(token.device)
    stream.wait_stream(torch.cuda.current_stream(token.device))
    with torch.cuda.stream(stream):
        host.copy_(token, non_blocking=True)
        copied = torch.cuda.Event()
        copied.record()
    token.record_stream(stream)

    def wait() -> list[int]:
        copied.synchronize()
        return host[:, 0].tolist()

    return wait
