"""Which builds serve a graph's calls: one for all, one for each bucket of a prompt's length, or one for each shape."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch

from torch_mpk.backend.build import compile_graph, meanwhile
from torch_mpk.builds import timing
from torch_mpk.builds.dry_run import is_dry_run
from torch_mpk.capture.graph import (
    Captured,
    Conditions,
    capture,
    input_sources,
    number_positions,
    size_positions,
    without_numbers,
)
from torch_mpk.capture.quantized_inputs import unpack
from torch_mpk.config import Options
from torch_mpk.dispatch import buckets
from torch_mpk.dispatch.admission import check_call, check_graph, is_prompt, longest
from torch_mpk.dispatch.buckets import Numbers, Prompt, bucket_of
from torch_mpk.dispatch.fallback import leave_to_others
from torch_mpk.dispatch.specialize import per_call, per_call_numbers
from torch_mpk.errors import DeclinedError, PrefillDeclined, UnsupportedError
from torch_mpk.patterns.packing import without_packing
from torch_mpk.ranks.agreement import telling
from torch_mpk.runtime.backend import backend_of

logger = logging.getLogger(__name__)


def compile_call(
    gm: torch.fx.GraphModule, inputs: Sequence[Any], options: Options, needs_graph: bool = False
) -> Callable[..., Any]:
    """What runs a graph of Dynamo's. ``needs_graph``: see ``compile_graph``.

    Raises whatever makes it a graph that we do not run.
    """
    with telling(gm, inputs, options.fallback):
        unpacked = unpack(gm, inputs)
        if unpacked is None:
            return _Graph(gm, inputs, options, needs_graph).callable(inputs)
        return unpacked.callable(compile_call(unpacked.gm, unpacked.args(inputs), options, needs_graph))


class _Graph:
    """A graph of Dynamo's and what its builds are made for. ``inputs``: of its first call; only their kinds count."""

    def __init__(self, gm: torch.fx.GraphModule, inputs: Sequence[Any], options: Options, needs_graph: bool) -> None:
        self.gm, self.options, self.needs_graph = gm, options, needs_graph
        self.is_needed_now = needs_graph or is_dry_run()
        self.numbers = number_positions(gm, inputs)
        sources = input_sources(gm)
        others = [i for i in range(len(inputs)) if i not in self.numbers]
        self.device = check_call([inputs[i] for i in others], [sources[i] for i in others])

    def callable(self, inputs: Sequence[Any]) -> Callable[..., Any]:
        if self.numbers:
            return self._by_numbers(inputs)
        if self.is_needed_now:
            return self._compiled(inputs)
        eager = self._meanwhile(for_prompt=False)
        if eager is not None:
            return self._for_each_shape(eager)
        return self._compiled(inputs, later=functools.partial(self._for_each_shape, self.gm.forward))

    def _by_numbers(self, inputs: Sequence[Any]) -> Callable[..., Any]:
        """What runs a graph some of whose inputs are numbers, which differ from call to call."""
        eager = self._meanwhile(for_prompt=False)
        try:
            concrete = self._captured(inputs, True)
            eager = self._meanwhile(is_prompt(concrete))
            fixed = size_positions(self.gm, concrete.mutated)
            if set(fixed) == set(self.numbers):
                self._check(concrete)
                logger.info("building for each shape, because all that differ are sizes of what it writes")
                return self._for_each_shape(eager)
            return self._symbolic(inputs, fixed, eager)
        except UnsupportedError as error:
            logger.info("building for each shape, because one build cannot hold for all: %s", error)
            return self._for_each_shape(eager)

    def _symbolic(
        self, inputs: Sequence[Any], fixed: list[int], eager: Callable[..., Any] | None
    ) -> Callable[..., Any]:
        """By builds that hold for other numbers as well. The numbers at the positions ``fixed`` are a build's own."""
        captured = self._captured(inputs, fixed)
        prompt = Numbers.of(captured) if self.options.max_positions > 1 else None
        if prompt is None:
            self._check(captured)
        elif prompt.batch is not None:
            fixed = [*fixed, prompt.batch]
            captured = self._captured(inputs, fixed)
        make = functools.partial(self._of_captured, prompt, self._for_each_shape(eager))
        is_deferred = prompt is None and eager is not None and not self.is_needed_now
        first = None if is_deferred else make(inputs, captured)
        if first is not None and not fixed:
            return first

        def build(args: Sequence[Any]) -> Callable[..., Any]:
            with timing.build():
                return make(args, self._captured(args, fixed))

        return per_call_numbers(
            fixed,
            build,
            on_failure=lambda args, error: self._for_each_shape(eager),
            meanwhile=eager if prompt is None else None,
            first=None if first is None else ([inputs[i] for i in fixed], first),
        )

    def _of_captured(
        self, prompt: Numbers | None, each_shape: Callable[..., Any], inputs: Sequence[Any], captured: Captured
    ) -> Callable[..., Any]:
        """What runs ``captured``, which has numbers of ``inputs``: in buckets if it is a prompt, else by one build; by
        ``each_shape`` where that holds for some values of them alone."""
        run = None if prompt is None else self._in_buckets(prompt.length, each_shape, captured)
        if run is not None:
            return run
        if prompt is not None and is_prompt(captured):
            return each_shape
        conditions = Conditions(captured)
        return _where(conditions.hold if conditions else None, self._compiled(inputs, captured), each_shape)

    def _in_buckets(self, number: int, each_shape: Callable[..., Any], captured: Captured) -> Callable[..., Any] | None:
        """What runs prompts, of which input ``number`` is the length, in buckets; by ``each_shape`` what no bucket
        runs. None where no bucket runs any."""
        try:
            prompt = Prompt(without_packing(captured), number)
        except UnsupportedError as error:
            logger.info("building for each length, because prompts cannot be padded: %s", error)
            return None
        most, why = longest(captured, self.options.max_positions, self._target())

        def bucket(args: Sequence[Any]) -> int:
            return bucket_of(args[number], most, self.device.type)

        def build(args: Sequence[Any]) -> Callable[..., Any]:
            with timing.build():
                return compile_graph(
                    self.gm, args, self.device, self.options, prompt.graph(bucket(args)), prompt=prompt
                )

        def on_failure(args: Sequence[Any], error: Exception) -> Callable[..., Any]:
            if isinstance(error, DeclinedError):
                return leave_to_others(self.gm, args, self.options, error)
            logger.info("building for each length, because the bucket of %s has no build: %s", bucket(args), error)
            return each_shape

        def decline(args: Sequence[Any]) -> Callable[..., Any]:
            raise PrefillDeclined(length=args[number], why=why)

        declined = per_call(lambda args: None, decline, on_failure)
        in_buckets = per_call(bucket, build, on_failure, buckets.MOST, self._meanwhile(for_prompt=True))
        run = _where(lambda args: args[number] <= most, in_buckets, declined)
        return _where(prompt.conditions.hold if prompt.conditions else None, run, each_shape)

    def _for_each_shape(self, eager: Callable[..., Any] | None, captured: Captured | None = None) -> Callable[..., Any]:
        """By a build for the values of the numbers, of which there may be none; then what there is to build may be
        known. ``eager``: what runs calls meanwhile."""

        def build(inputs: Sequence[Any]) -> Callable[..., Any]:
            own, others = without_numbers(self.gm, inputs, self.numbers)
            with timing.build():
                run = compile_graph(own, [inputs[i] for i in others], self.device, self.options, captured)
            return _with_some(others, run)

        def on_failure(inputs: Sequence[Any], error: Exception) -> Callable[..., Any]:
            return leave_to_others(self.gm, inputs, self.options, error)

        return per_call_numbers(self.numbers, build, on_failure, meanwhile=eager)

    def _compiled(
        self,
        inputs: Sequence[Any],
        captured: Captured | None = None,
        later: Callable[[Captured], Callable[..., Any]] | None = None,
    ) -> Callable[..., Any]:
        return compile_graph(
            self.gm, inputs, self.device, self.options, captured, needs_graph=self.needs_graph, later=later
        )

    def _captured(self, inputs: Sequence[Any], specialize: bool | Sequence[int]) -> Captured:
        with timing.stage("capture"):
            return capture(self.gm, inputs, specialize=specialize, conditional=specialize is not True)

    def _meanwhile(self, for_prompt: bool) -> Callable[..., Any] | None:
        return meanwhile(self.gm, self.options, for_prompt)

    def _check(self, captured: Captured) -> None:
        check_graph(captured, self.options.max_positions, self._target())

    def _target(self) -> Any:
        return backend_of(self.device).target(self.device, self.options)


def _with_some(positions: Sequence[int], run: Callable[..., Any]) -> Callable[..., Any]:
    """What runs calls with the arguments at these positions."""
    return lambda *args: run(*[args[i] for i in positions])


def _where(
    holds: Callable[[Sequence[Any]], bool] | None, run: Callable[..., Any], others: Callable[..., Any]
) -> Callable[..., Any]:
    """What runs calls for which it holds, and hands others on; None: it holds for all."""
    if holds is None:
        return run
    return lambda *args: run(*args) if holds(args) else others(*args)
