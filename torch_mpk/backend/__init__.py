"""The backend: ``torch.compile(model, backend="mpk")``, from Dynamo's graph to a launch.

``calls.py`` decides which builds serve a graph's calls, ``build.py`` looks a build up or makes it, and
``pipeline.py`` takes it through the stages.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from torch_mpk.backend.build import forget
from torch_mpk.backend.calls import compile_call
from torch_mpk.builds import background, timing
from torch_mpk.builds.dry_run import is_dry_run, will_write
from torch_mpk.capture.graph import written_inputs
from torch_mpk.config import Options, env
from torch_mpk.dispatch.fallback import announce_break, announce_eager_call, fall_back
from torch_mpk.dispatch.recompile_limit import is_last_compile, warn_of_last_compile
from torch_mpk.errors import RankLostError, UnsupportedError
from torch_mpk.ranks.agreement import leave, tell_of_last_compile, telling
from torch_mpk.ranks.sharding import localise
from torch_mpk.runtime.team import LeftError, forget_limits
from torch_mpk.traces import known

Make = Callable[[torch.fx.GraphModule, Sequence[Any], Options], Callable[..., Any]]


def mpk(
    gm: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """Compiles one graph of Dynamo's.

    What cannot be compiled runs as ``options["fallback"]`` says, and one warning names node, source line and reason.

    Raises:
        OptionError: ``mode`` or ``options`` has a name or value that is not known.
        MpkError: with ``options={"fallback": "error"}``, what would have been a fallback.
    """
    with telling(gm, example_inputs, fallback="error"):
        settings = Options.parse(mode, options)
    announce_break(gm)
    run = _disabled(gm, example_inputs) if env.disable else _run_localised(gm, example_inputs, settings)
    if getattr(torch._functorch.config, "bypass_autograd_cache_key", False):  # set ahead of time alone
        from torch_mpk.dispatch.serializable import Saveable  # which needs Dynamo, and importing torch_mpk should not

        return Saveable(run, gm, mode, options)
    return run


def _disabled(gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    leave(gm, inputs, "TORCH_MPK_DISABLE is set there")
    return gm.forward


def _run_localised(gm: torch.fx.GraphModule, example_inputs: Sequence[Any], settings: Options) -> Callable[..., Any]:
    """The callable for a graph; for a sharded model's, this rank computes its part."""
    try:
        local = localise(gm, example_inputs)
    except UnsupportedError as error:
        return fall_back(gm, example_inputs, settings, error)
    if local is None:
        return _timed(gm, example_inputs, settings, _compiled)
    # All ranks take the same way at the same call, whenever which of them has built what.
    settings = dataclasses.replace(settings, while_building="wait")

    def make(gm: torch.fx.GraphModule, inputs: Sequence[Any], settings: Options) -> Callable[..., Any]:
        run = local.callable(_compiled(local.gm, local.pick(inputs), settings))

        def call(*args: Any) -> Any:
            try:
                return run(*args)
            except LeftError as error:
                announce_eager_call(error)
                return gm.forward(*args)

        return call

    return _timed(gm, example_inputs, settings, make)


def _timed(gm: torch.fx.GraphModule, inputs: Sequence[Any], settings: Options, make: Make) -> Callable[..., Any]:
    with timing.build():
        return run_of(gm, inputs, settings, make)


def _compiled(gm: torch.fx.GraphModule, inputs: Sequence[Any], settings: Options) -> Callable[..., Any]:
    if is_dry_run():
        will_write(inputs[i] for i in written_inputs(gm, inputs))
    return compile_call(gm, inputs, settings)


def run_of(gm: torch.fx.GraphModule, inputs: Sequence[Any], settings: Options, make: Make) -> Callable[..., Any]:
    """The callable that ``make`` gives for a graph of Dynamo's; where it raises, the one that the options name."""
    if env.disable:
        return _disabled(gm, inputs)
    is_last = is_last_compile()
    if is_last:
        warn_of_last_compile(gm)
    try:
        run = make(gm, inputs, settings)
    except RankLostError:  # others wait in vain, or for what eager's exchanges are not
        raise
    except Exception as error:
        run = fall_back(gm, inputs, settings, error)
    if is_last:
        tell_of_last_compile()
    return run


def reset() -> None:
    """Forgets what was built, and drops what is being built in the background, as ``torch.compiler.reset()`` asks for;
    what is in use stays so, and asks for its builds again."""
    background.drop()
    forget()
    forget_limits()
    known.forget()


mpk.reset = reset  # type: ignore[attr-defined]  # as Dynamo asks backends for it
