"""Shapes and numbers that change from call to call.

Graphs whose number inputs cannot stay symbolic get one build for each combination of values, at its first call, or for
each bucket of them (``buckets.py``).
"""

from __future__ import annotations

import functools
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from torch_mpk.builds import background
from torch_mpk.builds.background import Job
from torch_mpk.builds.dry_run import is_dry_run
from torch_mpk.capture.foreign import is_plain
from torch_mpk.errors import RankLostError
from torch_mpk.runtime.team import LeftError
from torch_mpk.warn_once import warn

MAX_BUILDS = 16
_MAX_DROPPED = 1024  # keys that are remembered
MAX_FAILURES = 4  # after as many, a graph is taken to be none of ours whatever its numbers are


Args = tuple[Any, ...]


def per_call_numbers(
    positions: Sequence[int],
    build: Callable[[Args], Callable[..., Any]],
    on_failure: Callable[[Args, Exception], Callable[..., Any]],
    limit: int = MAX_BUILDS,
    meanwhile: Callable[..., Any] | None = None,
    first: tuple[Sequence[int | torch.SymInt], Callable[..., Any]] | None = None,
) -> Callable[..., Any]:
    """``per_call`` with a build for the values of a call's numbers.

    Args:
        positions: of the numbers among the arguments: sizes, or tensors of one element that hold a Python float.
        first: a build that there is, and the numbers that it is for.
    """

    def numbers(args: Args) -> Hashable:
        values = (args[position] for position in positions)
        return tuple(value if isinstance(value, int) else value.item() for value in values)

    known: dict[Hashable, Callable[..., Any]] = {}
    if first is not None:
        known[tuple(n if isinstance(n, int) else n.node.hint for n in first[0])] = first[1]
    return per_call(numbers, build, on_failure, limit, meanwhile, known)


def per_call(
    key_of: Callable[[Args], Hashable],
    build: Callable[[Args], Callable[..., Any]],
    on_failure: Callable[[Args, Exception], Callable[..., Any]],
    limit: int = MAX_BUILDS,
    meanwhile: Callable[..., Any] | None = None,
    known: Mapping[Hashable, Callable[..., Any]] | None = None,
) -> Callable[..., Any]:
    """A callable that hands each call to a build of its own.

    Threads may call it at once: they build one after the other, as Dynamo compiles, and calls with a build go on.

    Args:
        key_of: calls with equal keys share a build.
        build: makes the callable for a first call's arguments and all that share its key.
        on_failure: makes the callable where there is no build, once ``build`` has raised the error it is given. It is
            called by the thread of a call, whose error is what it raises.
        limit: builds that are kept; the one not used for the longest time is dropped.
        meanwhile: what runs calls whose build is made in the background. None: they wait.
        known: builds that there are, by their keys.

    The callable has ``prepare``, which builds ahead of a call with such arguments, and ``is_built``, which says whether
    one would wait.
    """
    built = _Builds(limit, known)
    given_up: list[Callable[..., Any]] = []
    pending: dict[Hashable, Job[Callable[..., Any]]] = {}  # in the background
    lock = threading.Lock()  # of the first and the last; held for moments only, and never by the thread that builds

    def find(key: Hashable) -> Callable[..., Any] | None:
        with lock:
            if key in built:
                built.move_to_end(key)
                return built[key]
            return given_up[-1] if len(given_up) >= MAX_FAILURES else None

    def make(key: Hashable, args: Args, build: Callable[[], Callable[..., Any]]) -> Callable[..., Any]:
        try:
            run = build()
        except Exception as error:
            run = _without_build(on_failure, args, error, given_up)
        with lock:
            is_again = built.add(key, run)
        if is_again:
            warn(
                f"torch_mpk builds again for sizes that it built for before: a graph keeps {limit} builds, and its "
                "calls come with more sizes in turns. Pad inputs to fewer sizes; prompts share builds where they can, "
                "and the log of torch_mpk.backend says why they cannot"
            )
        return run

    def wait_for(key: Hashable, args: Args) -> Callable[..., Any]:
        with torch._dynamo.convert_frame.compile_lock:
            # Another thread may have made it meanwhile.
            return find(key) or make(key, args, functools.partial(build, args))

    def begin(key: Hashable, args: Args, eager: Callable[..., Any]) -> Callable[..., Any]:
        with lock:
            if key in built:  # meanwhile
                return built[key]
            job = pending.get(key)
            if job is None or job.is_lost:
                job = background.submit(functools.partial(build, _stand_ins(args)), owner=call)
                if job is None:  # the next call asks again
                    return eager
                pending[key] = job
            is_done = job.is_done
            if is_done:
                del pending[key]
        if is_done:
            return make(key, args, job.result)
        warn(
            "torch_mpk builds kernels in the background, and runs calls that need them eagerly meanwhile. When a "
            "kernel is there its calls may give other bits, by rounding; options={'while_building': 'wait'} has them "
            "wait for it"
        )
        return eager

    def call(*args: Any) -> Any:
        key = key_of(args)
        run = find(key)
        if run is None:
            run = wait_for(key, args) if meanwhile is None or is_dry_run() else begin(key, args, meanwhile)
        return run(*args)

    return _that_prepares(
        call,
        prepare=lambda *args: find(key_of(args)) or wait_for(key_of(args), args),
        is_built=lambda *args: _is_compiled(find(key_of(args))),
    )


def _without_build(
    on_failure: Callable[[Args, Exception], Callable[..., Any]],
    args: Args,
    error: Exception,
    given_up: list[Callable[..., Any]],
) -> Callable[..., Any]:
    """Returns what runs calls with such arguments. ``given_up`` gets it where others like them would fail, too."""
    if isinstance(error, RankLostError):  # what this rank ran instead would not serve the others
        raise error
    if isinstance(error, LeftError):
        return functools.partial(_leave, error)
    given_up.append(on_failure(args, error))
    return given_up[-1]


def _leave(error: LeftError, *args: Any) -> Any:
    """Has the caller run Dynamo's graph, whose exchanges are those of the other ranks then."""
    raise error


def _is_compiled(run: Any) -> bool:
    graph = getattr(run, "compiled_graph", None)
    return run is not None and (graph is None or graph.is_compiled)


def _that_prepares(call: Any, **questions: Callable[..., Any]) -> Callable[..., Any]:
    vars(call).update(questions)
    result: Callable[..., Any] = call
    return result


def _stand_ins(args: Args) -> Args:
    """What a build needs to know of arguments, without their memory: a cache may go while a build for it waits.
    Parameters are themselves, and so is what holds a number."""

    def stand_in(arg: Any) -> Any:
        is_itself = not isinstance(arg, torch.Tensor) or isinstance(arg, torch.nn.Parameter) or arg.dim() == 0
        if is_itself or not is_plain(arg):
            return arg
        return torch.empty_strided(arg.size(), arg.stride(), dtype=arg.dtype, device=arg.device)

    with FakeTensorMode():
        return tuple(map(stand_in, args))


class _Builds(OrderedDict[Hashable, Callable[..., Any]]):
    """The last ``limit`` builds, and the keys of those that were dropped for others."""

    def __init__(self, limit: int, known: Mapping[Hashable, Callable[..., Any]] | None = None) -> None:
        super().__init__(known or {})
        self._limit = limit
        self._dropped: OrderedDict[Hashable, None] = OrderedDict()

    def add(self, key: Hashable, run: Callable[..., Any]) -> bool:
        """Whether there was one before, which has been dropped."""
        self[key] = run
        if len(self) > self._limit:
            self._dropped[self.popitem(last=False)[0]] = None
        if len(self._dropped) > _MAX_DROPPED:
            self._dropped.popitem(last=False)
        is_again = key in self._dropped
        self._dropped.pop(key, None)
        return is_again
