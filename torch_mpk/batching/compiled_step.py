"""A step of an engine as a function of its own: by a trace that there is, else by Dynamo, which then leaves one.

All sizes of step share a trace, since what differs is marked as dynamic; one row is a trace of its own, because to
Dynamo the size 1 is no symbol. A trace serves other engines, too, those of other model objects among them, and, from
the disk, those of other processes.
"""

from __future__ import annotations

import contextvars
import copy
import functools
import logging
import types
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from torch_mpk.backend import reset, run_of
from torch_mpk.batching.sizes import for_each_size
from torch_mpk.batching.step_builder import NOW, StepBuilder
from torch_mpk.config import Options, env
from torch_mpk.traces import known
from torch_mpk.traces.trace import Trace, Watch, note_graph, note_guards, recording

logger = logging.getLogger(__name__)

MOST_PADDING = 16  # times its rows that a step may have while its own size is built: fewer than eager steps pay for

_is_own: contextvars.ContextVar[bool] = contextvars.ContextVar("torch_mpk own", default=False)
_is_ahead: contextvars.ContextVar[bool] = contextvars.ContextVar("torch_mpk ahead", default=False)


@torch.compiler.assume_constant_result
def is_own() -> bool:
    """Whether this thread runs an engine's own step, which is to wait for no build. ``torch.compiler.is_compiling`` may
    say what another thread is at. Dynamo calls this as it is."""
    return _is_own.get()


def _compile(
    gm: torch.fx.GraphModule,
    inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """The backend of steps."""
    run = _Run(run_of(gm, inputs, Options.parse(mode, options), for_each_size))
    note_graph(gm, run)
    return run


_compile.reset = reset  # type: ignore[attr-defined]  # as Dynamo asks backends for it


class _Run:
    """What runs a trace's graph, and within ``_is_ahead`` builds what it needs in place of that."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call

    def __call__(self, *args: Any) -> Any:
        if not _is_ahead.get():
            return self._call(*args)
        prepare = getattr(self._call, "prepare", None)
        if prepare is not None:
            prepare(*args)
        return ()

    def is_built(self, *args: Any) -> bool:
        found: Callable[..., bool] | None = getattr(self._call, "is_built", None)
        return found is None or found(*args)


class Step:
    """A step of one engine. Called with its arguments, but for the engine's runner.

    Args:
        function: the engine's, of the runner and the arguments.
        is_decode: whether it is of one token of each request.
        settings: what ``torch.compile`` takes, with options of backend mpk.
        builder: builds in the background, unless ``options={"while_building": "wait"}``: a call that has no build yet
            runs as the engine's own, eagerly.
        is_right: whether what was traced may be given to others: see ``publish``.

    Attributes:
        is_by_trace: whether the last call was a trace's, without Dynamo.
        is_own: whether it was the engine's own.
    """

    is_by_trace = is_own = False

    def __init__(
        self,
        function: types.FunctionType,
        runner: Any,
        is_decode: bool,
        settings: Mapping[str, Any],
        builder: StepBuilder,
        is_right: Callable[[], bool],
    ) -> None:
        self._is_decode = is_decode
        self._runner = runner
        self._own = types.MethodType(function, runner)
        self._options = dict(settings["options"] or {})
        self._is_right = is_right
        self._builder = None if self._options.get("while_building") == "wait" else builder
        self._names = function.__code__.co_varnames[: function.__code__.co_argcount]
        options = {"guard_filter_fn": note_guards} | self._options  # with another there is no trace
        chosen = {**settings, "backend": _compile, "dynamic": None, "options": options}
        self._compiled = torch.compile(function, **chosen)
        # By whether they are of one row: the last trace, None where Dynamo leaves none, and the model as it was then.
        self._used: dict[bool, tuple[Trace | None, Watch]] = {}
        self._looked_up: set[Hashable] = set()  # kinds of traces, on the disk
        self._new: list[tuple[Hashable, Trace]] = []

    def __call__(self, *args: Any) -> None:
        if self._builder is None or self.is_ready(*args):
            self._run(self._local(args))
        else:
            self._ask(args, NOW)
            self.is_own, self.is_by_trace = True, False
            token = _is_own.set(True)
            try:
                with self._builder.eager_step():
                    self._own(*(without_marks(value) for value in args))
            finally:
                _is_own.reset(token)

    def _local(self, args: Sequence[Any], runner: Any = None) -> dict[str, Any]:
        """By the names of the function's variables."""
        return dict(zip(self._names, (runner or self._runner, *args), strict=True))

    @property
    def is_meanwhile(self) -> bool:
        """Whether calls run as the engine's own while they are built."""
        return self._builder is not None

    def is_ready(self, *args: Any) -> bool:
        """Whether a call would build nothing, or waits for what it builds."""
        if self._builder is None:
            return True
        local = self._local(args)
        trace = self._trace(local)
        if trace is None:
            return self._is_untold(self._kind(local)[1])
        run = trace.call
        return not isinstance(run, _Run) or run.is_built(*trace.arguments(local))

    def size_for(self, size: int, sizes: Iterable[int]) -> int:
        """The one of ``sizes``, of rows or tokens from the smallest up, in which so many are to run: a larger one while
        ``size`` is being built."""
        if self._builder is None or not self._builder.is_asked((self._is_decode, size)):
            return size
        larger = (each for each in sizes if size < each <= size * MOST_PADDING)
        return next((each for each in larger if self._builder.is_built((self._is_decode, each))), size)

    def ask(self, *args: Any, rank: float) -> None:
        """Has a call that is not ready built in the background. Those of lower ranks come first."""
        if not self.is_ready(*args):
            self._ask(args, rank)

    def _ask(self, args: Sequence[Any], rank: float) -> None:
        assert self._builder is not None
        rows = _rows(self._local(args))
        kept = [_copied(value) for value in args]
        runner = copy.copy(self._runner)  # with the numbers that this call is drawn with
        name = f"a step of {rows} {'rows' if self._is_decode else 'tokens, with prompts'}"
        self._builder.ask((self._is_decode, rows), name, functools.partial(self.build_ahead, kept, runner), rank)

    def build_ahead(self, args: Sequence[Any], runner: Any) -> None:
        """All that a call of a runner's needs, without running it. Less, if the model changes meanwhile."""
        local = self._local(args, runner)
        watch, token = Watch(local["model"]), _is_ahead.set(True)
        try:
            self._run(local)
            self.publish()
        except Exception as error:
            if watch.is_same():
                raise
            logger.info("a step is to be built again, because the model has changed meanwhile: %s", error)
        finally:
            _is_ahead.reset(token)

    def _run(self, local: Mapping[str, Any]) -> None:
        trace = self._trace(local)
        if not _is_ahead.get():
            self.is_own, self.is_by_trace = False, trace is not None
        if trace is not None:
            trace.call(*trace.arguments(local))
            return
        if known.are_kept(self._kind(local)[0]):
            # To what makes them others Dynamo's guards may be blind, as to a method that was replaced.
            torch._dynamo.eval_frame.reset_code(self._own.__func__.__code__)
        watch = Watch(local["model"])  # from before, so that it sees what changes meanwhile
        with recording() as recorder, _dynamic(_tensors(local)):
            self._compiled(*local.values())
        kind, is_one = self._kind(local)
        if recorder.trace is not None:
            self._used[is_one] = recorder.trace, watch
            self._new.append((kind, recorder.trace))
        else:
            if recorder.is_used:
                logger.info("a step's trace is not kept, so another engine's steps are traced again: %s", recorder.why)
            self._used[is_one] = None, watch

    def publish(self) -> None:
        """Gives others the traces that this step has left, if what it does has turned out to be right."""
        if not self._is_right():
            return
        new, self._new = self._new, []
        for kind, trace in new:
            known.publish(kind, trace)

    def _kind(self, local: Mapping[str, Any]) -> tuple[Hashable, bool]:
        """Of all traces that may serve a call, and whether it is of one row."""
        is_one = _rows(local) == 1
        options = repr(sorted(self._options.items()))
        return (type(local["model"]), self._is_decode, is_one, options, env.disable), is_one

    def _is_untold(self, is_one: bool) -> bool:
        """Whether steps are Dynamo's, which leaves no trace of this model as it is."""
        trace, watch = self._used.get(is_one, (None, None))
        return trace is None and watch is not None and watch.is_same()

    def _trace(self, local: Mapping[str, Any]) -> Trace | None:
        kind, is_one = self._kind(local)
        if self._is_untold(is_one):
            return None
        trace, watch = self._used.get(is_one, (None, None))
        if trace is not None and watch is not None:
            if watch.is_same():
                different = trace.difference_of_call(local)
            else:
                watch = Watch(local["model"])
                different = trace.difference(local)
            if different is None:
                self._used[is_one] = trace, watch
                return trace
        return self._find(kind, local)

    def _find(self, kind: Hashable, local: Mapping[str, Any]) -> Trace | None:
        watch = Watch(local["model"])  # from before, as above
        waits = self._builder is None or _is_ahead.get()
        trace = known.find(kind, local, self._looked_up if waits else None, self._made)
        if trace is not None:
            self._used[self._kind(local)[1]] = trace, watch
        return trace

    def _made(self, trace: Trace, local: Mapping[str, Any]) -> Callable[..., Any]:
        return _Run(run_of(trace.gm, trace.arguments(local), Options.parse(None, self._options), for_each_size))


def _rows(local: Mapping[str, Any]) -> int:
    """Or tokens, of a call."""
    count: int = local["batch_data"]["input_ids"].shape[-1]
    return count


def without_marks(value: Any) -> Any:
    """A step's inputs without what says the usual: transformers writes it into the model's configuration for as long as
    a call takes, where a thread that traces would see it."""
    is_usual = isinstance(value, dict) and value.get("is_causal") is True
    return {key: each for key, each in value.items() if key != "is_causal"} if is_usual else value


def _copied(value: Any) -> Any:
    """Containers of a step's tensors: the engine fills its own anew for the next step."""
    if isinstance(value, dict):
        return {key: _copied(each) for key, each in value.items()}
    return [_copied(each) for each in value] if isinstance(value, list) else value


@contextmanager
def _dynamic(tensors: Iterable[torch.Tensor]) -> Iterator[None]:
    """Marks every dimension as one that differs from call to call. Afterwards others compile the tensors as before."""
    marked = [tensor for tensor in tensors if not hasattr(tensor, "_dynamo_weak_dynamic_indices")]
    for tensor in marked:
        torch._dynamo.maybe_mark_dynamic(tensor, [dim for dim, size in enumerate(tensor.shape) if size > 1])
    try:
        yield
    finally:
        for tensor in marked:
            for mark in ("_dynamo_weak_dynamic_indices", "_has_dynamo_dim_marking"):
                vars(tensor).pop(mark, None)


def _tensors(local: Mapping[str, Any]) -> Iterator[torch.Tensor]:
    """Those of a step whose sizes differ from call to call and from engine to engine."""
    yield from _within(local["batch_data"])
    yield from _within([value for value in local.values() if isinstance(value, torch.Tensor)])
    for allocator in local["batch_data"]["cache"].cache_allocators.values():
        yield allocator.cache_tensor


def _within(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for each in value.values():
            yield from _within(each)
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _within(each)
