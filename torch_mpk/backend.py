"""The backend: ``torch.compile(model, backend="mpk")``, from Dynamo's graph to a launch, top to bottom."""

from __future__ import annotations

import dataclasses
import functools
import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch._guards import tracing
from torch._subclasses.fake_tensor import FakeTensor

from torch_mpk import background, buckets, build_cache, known_traces, registry, timing
from torch_mpk.admission import check_call, check_graph, is_prompt, longest
from torch_mpk.agreement import agreed, group_of
from torch_mpk.buckets import Numbers, Prompt, bucket_of
from torch_mpk.build_cache import Stored, build_key
from torch_mpk.capture import (
    Captured,
    Conditions,
    capture,
    input_sources,
    number_positions,
    size_positions,
    without_numbers,
    written_inputs,
)
from torch_mpk.compiled_graph import CompiledGraph
from torch_mpk.config import Options, env
from torch_mpk.dry_run import is_dry_run, will_write
from torch_mpk.dump import Dump
from torch_mpk.errors import DeclinedError, PrefillDeclined, UnsupportedError
from torch_mpk.fallback import (
    announce_break,
    announce_fallbacks,
    check_coverage,
    choice_for_parts,
    compile_others,
    decline_call,
    fall_back,
)
from torch_mpk.packing import without_packing
from torch_mpk.partition import partition
from torch_mpk.patterns import apply
from torch_mpk.quantized_inputs import unpack
from torch_mpk.runtime.backend import backend_of
from torch_mpk.runtime.overlaps import Memory, check_apart, guarded, memory_of
from torch_mpk.sharding import localise
from torch_mpk.specialize import per_call, per_call_numbers, warn_at_recompile_limit
from torch_mpk.verify import verified

logger = logging.getLogger(__name__)


class Built(NamedTuple):
    """A graph that is built, the positions of the inputs that it writes, and its inputs' memory."""

    compiled: CompiledGraph
    mutated: Sequence[int]
    memory: Sequence[Memory]


_compiled_graphs: weakref.WeakValueDictionary[tuple[Any, ...], CompiledGraph] = weakref.WeakValueDictionary()


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
    settings = Options.parse(mode, options)
    announce_break(gm)
    run = gm.forward if env.disable else _run_localised(gm, example_inputs, settings)
    if getattr(torch._functorch.config, "bypass_autograd_cache_key", False):  # set ahead of time alone
        from torch_mpk.serializable import Saveable  # which needs Dynamo, and importing torch_mpk should not

        return Saveable(run, gm, mode, options)
    return run


def _run_localised(gm: torch.fx.GraphModule, example_inputs: Sequence[Any], settings: Options) -> Callable[..., Any]:
    """The callable for a graph; for a sharded model's, this rank computes its part."""
    try:
        local = localise(gm, example_inputs)
    except UnsupportedError as error:
        return fall_back(gm, example_inputs, settings, error)
    if local is None:
        return _run(gm, example_inputs, settings)
    # All ranks take the same way at the same call, whenever which of them has built what.
    settings = dataclasses.replace(settings, while_building="wait")
    return local.callable(_run(local.gm, local.pick(example_inputs), settings))


def _run(gm: torch.fx.GraphModule, example_inputs: Sequence[Any], settings: Options) -> Callable[..., Any]:
    if is_dry_run():
        will_write(example_inputs[i] for i in written_inputs(gm, example_inputs))
    with timing.build():
        return run_of(gm, example_inputs, settings, compile_call)


def run_of(
    gm: torch.fx.GraphModule,
    inputs: Sequence[Any],
    settings: Options,
    make: Callable[[torch.fx.GraphModule, Sequence[Any], Options], Callable[..., Any]],
) -> Callable[..., Any]:
    """The callable that ``make`` gives for a graph of Dynamo's; where it raises, the one that the options name."""
    if env.disable:
        return gm.forward
    warn_at_recompile_limit(gm)
    try:
        return make(gm, inputs, settings)
    except Exception as error:
        return fall_back(gm, inputs, settings, error)


def reset() -> None:
    """Forgets what was built, and drops what is being built in the background, as ``torch.compiler.reset()`` asks for;
    what is in use stays so, and asks for its builds again."""
    background.drop()
    _compiled_graphs.clear()
    known_traces.forget()


mpk.reset = reset  # type: ignore[attr-defined]  # as Dynamo asks backends for it


def compile_call(
    gm: torch.fx.GraphModule, inputs: Sequence[Any], options: Options, needs_graph: bool = False
) -> Callable[..., Any]:
    """What runs a graph of Dynamo's. ``needs_graph``: see ``compile_graph``.

    Raises whatever makes it a graph that we do not run.
    """
    unpacked = unpack(gm, inputs)
    if unpacked is not None:
        run = compile_call(unpacked.gm, unpacked.args(inputs), options, needs_graph)
        return unpacked.callable(run)
    numbers = number_positions(gm, inputs)
    known = [i for i in range(len(inputs)) if i not in numbers]
    sources = input_sources(gm)
    device = check_call([inputs[i] for i in known], [sources[i] for i in known])
    each_shape = functools.partial(_for_each_shape, gm, numbers, device, options)
    meanwhile = _meanwhile(gm, options, for_prompt=False)
    if not numbers:
        if needs_graph or is_dry_run():
            return compile_graph(gm, inputs, device, options, needs_graph=needs_graph)
        if meanwhile is not None:
            return each_shape(meanwhile)
        return compile_graph(gm, inputs, device, options, later=functools.partial(each_shape, gm.forward))
    try:
        with timing.stage("capture"):
            concrete = capture(gm, inputs, specialize=True)
        meanwhile = _meanwhile(gm, options, is_prompt(concrete))
        fixed = size_positions(gm, concrete.mutated)
        if set(fixed) == set(numbers):
            check_graph(concrete, options.max_positions, backend_of(device).target(device, options))
            logger.info("building for each shape, because all that differ are sizes of what it writes")
            return each_shape(meanwhile)
        with timing.stage("capture"):
            captured = capture(gm, inputs, specialize=fixed, conditional=True)
            prompt = Numbers.of(captured) if options.max_positions > 1 else None
            if prompt is not None and prompt.batch is not None:
                fixed.append(prompt.batch)
                captured = capture(gm, inputs, specialize=fixed, conditional=True)
        if prompt is None:
            check_graph(captured, options.max_positions, backend_of(device).target(device, options))
        make = functools.partial(_for_numbers, gm, prompt, each_shape(meanwhile), device, options, needs_graph)
        is_deferred = prompt is None and meanwhile is not None and not (needs_graph or is_dry_run())
        first = None if is_deferred else make(inputs, captured)
    except UnsupportedError as error:
        logger.info("building for each shape, because one build cannot hold for all: %s", error)
        return each_shape(meanwhile)
    if first is not None and not fixed:
        return first

    def build(args: Sequence[Any]) -> Callable[..., Any]:
        with timing.build():
            with timing.stage("capture"):
                own = capture(gm, args, specialize=fixed, conditional=True)
            return make(args, own)

    return per_call_numbers(
        fixed,
        build,
        give_up=lambda args, error: each_shape(meanwhile),
        meanwhile=meanwhile if prompt is None else None,
        first=None if first is None else ([inputs[i] for i in fixed], first),
    )


def _meanwhile(gm: torch.fx.GraphModule, options: Options, for_prompt: bool) -> Callable[..., Any] | None:
    """What runs calls whose build is made in the background; None where they wait for it."""
    is_eager = for_prompt if options.while_building is None else options.while_building == "eager"
    return gm.forward if is_eager else None


def _for_numbers(
    gm: torch.fx.GraphModule,
    prompt: Numbers | None,
    each_shape: Callable[..., Any],
    device: torch.device,
    options: Options,
    needs_graph: bool,
    inputs: Sequence[Any],
    captured: Captured,
) -> Callable[..., Any]:
    """What runs ``captured``, which has numbers of ``inputs``: in buckets if it is a prompt, else by one build; by
    ``each_shape`` where that holds for some values of them alone."""
    run = None if prompt is None else _in_buckets(gm, prompt.length, each_shape, device, options, captured)
    if run is not None:
        return run
    if prompt is not None and is_prompt(captured):
        return each_shape
    conditions = Conditions(captured)
    run = compile_graph(gm, inputs, device, options, captured, needs_graph=needs_graph)
    return _where(conditions.hold if conditions else None, run, each_shape)


def _in_buckets(
    gm: torch.fx.GraphModule,
    number: int,
    each_shape: Callable[..., Any],
    device: torch.device,
    options: Options,
    captured: Captured,
) -> Callable[..., Any] | None:
    """What runs prompts, of which input ``number`` is the length, in buckets; by ``each_shape`` what no bucket runs.
    None where no bucket runs any."""
    try:
        prompt = Prompt(without_packing(captured), number)
    except UnsupportedError as error:
        logger.info("building for each length, because prompts cannot be padded: %s", error)
        return None
    most, why = longest(captured, options.max_positions, backend_of(device).target(device, options))

    def bucket(args: Sequence[Any]) -> int:
        return bucket_of(args[number], most, device.type)

    def build(args: Sequence[Any]) -> Callable[..., Any]:
        with timing.build():
            return compile_graph(gm, args, device, options, prompt.graph(bucket(args)), prompt=prompt)

    def give_up(args: Sequence[Any], error: Exception) -> Callable[..., Any]:
        if isinstance(error, DeclinedError):
            return left_to_others(gm, args, options, error)
        logger.info("building for each length, because the bucket of %s has no build: %s", bucket(args), error)
        return each_shape

    def decline(args: Sequence[Any]) -> Callable[..., Any]:
        raise PrefillDeclined(length=args[number], why=why)

    declined = per_call(lambda args: None, decline, give_up)
    in_buckets = per_call(bucket, build, give_up, buckets.MOST, _meanwhile(gm, options, for_prompt=True))
    run = _where(lambda args: args[number] <= most, in_buckets, declined)
    return _where(prompt.conditions.hold if prompt.conditions else None, run, each_shape)


def _where(
    holds: Callable[[Sequence[Any]], bool] | None, run: Callable[..., Any], others: Callable[..., Any]
) -> Callable[..., Any]:
    """What runs calls for which it holds, and hands others on; None: it holds for all."""
    if holds is None:
        return run
    return lambda *args: run(*args) if holds(args) else others(*args)


def _for_each_shape(
    gm: torch.fx.GraphModule,
    numbers: Sequence[int],
    device: torch.device,
    options: Options,
    meanwhile: Callable[..., Any] | None,
    captured: Captured | None = None,
) -> Callable[..., Any]:
    """What runs a graph by a build for the values of its numbers, of which there may be none; then what there is to
    build may be known."""

    def build(inputs: Sequence[Any]) -> Callable[..., Any]:
        own, others = without_numbers(gm, inputs, numbers)
        with timing.build():
            run = compile_graph(own, [inputs[i] for i in others], device, options, captured)
        return lambda *args: run(*[args[i] for i in others])

    def give_up(inputs: Sequence[Any], error: Exception) -> Callable[..., Any]:
        return left_to_others(gm, inputs, options, error)

    return per_call_numbers(numbers, build, give_up, meanwhile=meanwhile)


def left_to_others(
    gm: torch.fx.GraphModule, inputs: Sequence[Any], options: Options, error: Exception
) -> Callable[..., Any]:
    """What runs a graph for numbers for which it is not ours.

    What Inductor assumes of overlaps becomes a guard of Dynamo's while that compiles; at a call it is too late for one.
    """
    run = fall_back(gm, inputs, options, error)
    if run == gm.forward:
        return run
    try:
        written = capture(gm, inputs, specialize=True).mutated
    except UnsupportedError:  # so any may be
        written = tuple(range(len(inputs)))
    # As Dynamo knows them: what is made for these numbers may run for others.
    known = [node.meta.get("example_value") for node in gm.graph.find_nodes(op="placeholder")]
    memory = memory_of(input_sources(gm), known, written)
    return guarded(run, gm.forward, memory, functools.partial(decline_call, options))


def compile_graph(
    gm: torch.fx.GraphModule,
    inputs: Sequence[Any],
    device: torch.device,
    options: Options,
    captured: Captured | Callable[[], Captured] | None = None,
    *,
    needs_graph: bool = False,
    prompt: Prompt | None = None,
    later: Callable[[Captured], Callable[..., Any]] | None = None,
) -> Callable[..., Any]:
    """What runs a graph of Dynamo's on inputs like these, whose memory is not looked at where they are fake.

    Args:
        captured: what there is to build, where that is known, or what captures it.
        needs_graph: the result must have the graph it was made from, which an earlier process's build has not.
        prompt: what ``captured`` is a bucket's graph of.
        later: what runs a prompt that is still to be built, if the options have it built in the background.
    """
    needs_graph = needs_graph or bool(options.verify)
    built_with = dataclasses.replace(options, freeze=False, while_building=None)  # which are matters of calls
    make = functools.partial(_made, gm, inputs, device, options, built_with, captured, needs_graph, later)
    group = group_of(gm)
    built = make() if group is None else agreed(group, make)
    if callable(built):
        return built
    compiled, mutated, memory = built
    will_write(inputs[i] for i in mutated)
    call = compiled.callable(gm.forward, options.freeze, memory, functools.partial(decline_call, options))
    call = prompt.callable(call) if prompt is not None else call
    return verified(call, compiled, gm.forward, mutated, device, options) if options.verify else call


def _made(
    gm: torch.fx.GraphModule,
    inputs: Sequence[Any],
    device: torch.device,
    options: Options,
    built_with: Options,
    captured: Captured | Callable[[], Captured] | None,
    needs_graph: bool,
    later: Callable[[Captured], Callable[..., Any]] | None,
) -> Built | Callable[..., Any]:
    """See ``compile_graph``: what is built, or what runs a prompt that is still to be."""
    is_fake = any(isinstance(each, FakeTensor) for each in inputs)
    with timing.stage("look-up"):
        key = None if needs_graph else build_key(gm, inputs, device, built_with)
        stored = build_cache.get(key) if key else None
    if stored is not None:
        memory = memory_of(input_sources(gm), inputs, stored.mutated)
        if not is_fake:
            check_apart(inputs, memory)
        make = functools.partial(CompiledGraph.of_plan, stored.plan, device, built_with)
        return Built(_shared((stored.graph, device, built_with), make), stored.mutated, memory)
    if not isinstance(captured, Captured):
        with timing.stage("capture"):
            captured = capture(gm, inputs) if captured is None else captured()
    check_graph(captured, options.max_positions, backend_of(device).target(device, options))
    sources = [graph_input.source for graph_input in captured.inputs]
    values = [0 if graph_input.is_foreign else graph_input.value for graph_input in captured.inputs]
    memory = memory_of(sources, values, captured.mutated)
    if not is_fake:
        check_apart(inputs, memory)
    graph = captured.key()
    is_built = _key((graph, device, built_with)) in _compiled_graphs
    if later is not None and not is_built and _meanwhile(gm, options, is_prompt(captured)) is not None:
        return later(captured)
    make = functools.partial(build, captured, device, built_with)
    compiled = _shared((graph, device, built_with), make, needs_graph)
    if key and compiled.plan is not None:
        build_cache.put(key, Stored(compiled.plan, graph, captured.mutated))
    return Built(compiled, captured.mutated, memory)


def _shared(key: tuple[Any, ...], make: Callable[[], CompiledGraph], needs_graph: bool = False) -> CompiledGraph:
    """A graph that was built before and is still in use is not built again, unless there are other patterns now."""
    key = _key(key)
    compiled = _compiled_graphs.get(key)
    if compiled is None or needs_graph and compiled.partitioned is None:
        compiled = _compiled_graphs[key] = make()
        compiled.seconds = timing.stages()
    return compiled


def _key(key: tuple[Any, ...]) -> tuple[Any, ...]:
    return key + tuple(task.name for task in registry.tasks() if task.pattern)


def build(captured: Captured, device: torch.device, options: Options) -> CompiledGraph:
    """Stages 2 to 8."""
    dump = Dump.next()
    dump.write("1.capture.txt", captured.__str__)
    with tracing(None):  # Dynamo's context, whose fake mode is not the captured graph's
        with timing.stage("patterns"):
            tasks = apply(captured.graph_module)
        dump.write("2.tasks.txt", lambda: tasks.print_readable(print_output=False))
        with timing.stage("partition"):
            target, how = backend_of(device).target(device, options), choice_for_parts(captured, options)
            partitioned = partition(tasks, options.min_segment_nodes, target, how)
        dump.write("3.segments.txt", partitioned.__str__)
        partitioned.estimate = check_coverage(partitioned, captured, options, device)
        compiled = CompiledGraph.build(partitioned, device, options, dump)
        announce_fallbacks(partitioned, captured, options)
        if partitioned.fallbacks:
            with timing.stage("fallback"):
                compiled.others = compile_others(partitioned, captured, options)
    parts = [(segment.num_operations, segment.ours) for segment in partitioned.segments]
    total, num_ours = sum(count for count, _ in parts), sum(is_ours for _, is_ours in parts)
    rest = sum(count for count, is_ours in parts if not is_ours)
    logger.info("a graph of %d operations is %d megakernel(s); %d operations fall back", total, num_ours, rest)
    return compiled
