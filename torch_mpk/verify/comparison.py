"""``options={"verify": ...}``: a call is compared with eager, and the first task that differs is found.

Before that, users' tasks run in guarded memory, one by one: what writes outside of its outputs could end the process.

The yardstick is eager itself: the graph also runs in float64, and a result's error against that run may be ``_SLACK``
times eager's largest, or as many units of rounding where eager happens to be exact. Both round at the same places, and
in half precision that is nearly all of their error; in float32 the order of sums counts, which is ours to choose. What
depth and conditioning of a model do to errors is in the measure, so that nothing has to be assumed about them.
"""

from __future__ import annotations

import itertools
import logging
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from torch_mpk.builds.dump import Dump
from torch_mpk.capture.aliasing import storages, value, written_storages
from torch_mpk.capture.provenance import where
from torch_mpk.config import Options
from torch_mpk.dispatch.compiled_graph import CompiledGraph, build_segment
from torch_mpk.errors import InductorVerificationError, TaskVerificationError, UnsupportedError, VerificationError
from torch_mpk.partition.segments import Partitioned, operations, split
from torch_mpk.registry import Task
from torch_mpk.registry.calls import Call
from torch_mpk.runtime.segment import is_compiling_ahead
from torch_mpk.verify.guarded_memory import GuardedCall, is_guarded, way_of

logger = logging.getLogger(__name__)

_SLACK = {torch.bfloat16: 4, torch.float16: 4, torch.float32: 16, torch.float64: 16}
_SLACK_WITHOUT_YARDSTICK = 4  # times more, where the graph does not run in float64

Run = Callable[..., Sequence[Any]]


def verified(
    call: Run, compiled: CompiledGraph, eager: Run, written: Sequence[int], device: torch.device, options: Options
) -> Run:
    """``call``, compared with eager on its first call, or on every n-th too, as ``options.verify`` says.

    A verified call takes copies of the inputs at ``written``, which the graph updates: two, and one in float64. While a
    CUDA graph is being captured nothing is verified.

    Raises VerificationError; the inputs are then as they were before the call.
    """
    calls = 0
    users_tasks = _UsersTasks(compiled, device, options)

    def verify(*args: Any) -> Any:
        nonlocal calls
        if is_compiling_ahead():  # what the call gives is no result
            return call(*args)
        is_due = calls == 0 if options.verify is True else calls % options.verify == 0
        if not is_due or (device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
            calls += 1
            return call(*args)
        before = copied(args, written)
        users_tasks.check(copied(before, written))
        results = call(*args)
        difference = _difference(results, args, eager, before, written)
        if difference is not None:
            culprit = _Search(device, options).in_graph(compiled, copied(before, written))
            if culprit is not None:
                for position in written:
                    args[position].copy_(before[position])
                raise culprit.error(difference=difference, culprit=culprit.text)
            logger.info("verified, but for a choice between near equals: %s", difference)
        calls += 1
        return results

    return verify


class _UsersTasks:
    """Runs the users' tasks of a graph in guarded memory, on what they are given in eager."""

    def __init__(self, compiled: CompiledGraph, device: torch.device, options: Options) -> None:
        assert compiled.partitioned is not None  # a verified build is of this process
        self.parts, self.device, self.options = compiled.partitioned, device, options
        self.calls: dict[fx.Node, GuardedCall | None] = {}  # None: it has no build of its own
        nodes = (node for segment in self.parts.segments for node in segment.gm.graph.nodes)
        self.is_needed = any(is_guarded(node.target, device) for node in nodes)

    def check(self, args: Sequence[Any]) -> None:
        """Raises StrayWriteError. ``args`` may change."""
        if self.is_needed:
            for _ in _walk(self.parts, args, build=lambda gm: _Guarding(gm, self).run):
                pass

    def call(self, node: fx.Node, operands: Sequence[Any], attrs: dict[str, Any]) -> None:
        if node not in self.calls:
            try:
                self.calls[node] = GuardedCall(Call(node.target, operands, attrs), self.device, self.options)
            except UnsupportedError as error:
                logger.warning("%s does not run in guarded memory: %s", node.target, error)
                self.calls[node] = None
        guarded = self.calls[node]
        if guarded is not None:
            guarded.check(operands)


class _Guarding(fx.Interpreter):
    def __init__(self, gm: fx.GraphModule, users_tasks: _UsersTasks) -> None:
        super().__init__(gm)
        self.users_tasks = users_tasks

    def run_node(self, n: fx.Node) -> Any:
        if is_guarded(n.target, self.users_tasks.device):
            operands, attrs = self.fetch_args_kwargs_from_env(n)
            self.users_tasks.call(n, operands, attrs)
        return super().run_node(n)


class _Culprit(NamedTuple):
    """What differs first, in words, and what to raise for it."""

    text: str
    error: type[VerificationError] = VerificationError


class _Search:
    """Finds the first task that differs, by building parts of a graph whose intermediate values are results."""

    def __init__(self, device: torch.device, options: Options) -> None:
        self.device, self.options = device, options

    def in_graph(self, compiled: CompiledGraph, args: Sequence[Any]) -> _Culprit | None:
        """Where the graph first differs from eager on these arguments, which it may change; None: see ``_judge``."""
        assert compiled.partitioned is not None
        for segment, inputs in _walk(compiled.partitioned, args):
            if segment.name in compiled.segments:
                if _differs(compiled.segments[segment.name].callable(segment.gm), segment.gm, inputs):
                    return self.in_segment(segment.gm, inputs)
            elif segment.name in compiled.others and _differs(compiled.others[segment.name], segment.gm, inputs):
                return _Culprit(f"{segment.name}, which inductor compiled", InductorVerificationError)
        nodes = [node for segment in compiled.partitioned.segments for node in segment.gm.graph.nodes]
        text = "none, when its parts run again from the same inputs: the result is not the same every time"
        users = [f"{task.name} ({task.place})" for task in _users_tasks(nodes)]
        if not users:
            return _Culprit(text)
        return _Culprit(f"{text}, perhaps for the code of {' or '.join(users)}", TaskVerificationError)

    def in_segment(self, gm: fx.GraphModule, args: Sequence[Any]) -> _Culprit | None:
        names = operations(gm)
        first, last = 0, len(names)  # the state before `first` agrees, that before `last` does not
        while True:
            middle = (first + last) // 2
            for cut in sorted(range(first + 1, last), key=lambda cut: abs(cut - middle)):
                agrees = self._agrees_before(gm, cut, args)
                if agrees is not None:
                    first, last = (cut, last) if agrees else (first, cut)
                    break
            else:
                return self._judge(gm, names, first, last, args)

    def _agrees_before(self, gm: fx.GraphModule, cut: int, args: Sequence[Any]) -> bool | None:
        """Whether all that later operations may read is right before operation ``cut``; None: the part has no build."""
        segment, inputs = next(_walk(split(gm, [cut]), args))
        built = self._build(segment.gm)
        return None if built is None else not _differs(built, segment.gm, inputs)

    def _judge(
        self, gm: fx.GraphModule, names: list[str], first: int, last: int, args: Sequence[Any]
    ) -> _Culprit | None:
        """The operations from ``first`` to ``last`` in words.

        None where they choose between floating values, and eager, given ours, chooses otherwise than given its own: the
        values were equal within rounding, and whatever follows from the choice is as good as eager's.
        """
        suspects = [node for node in gm.graph.nodes if node.name in names[first:last]]
        parts = split(gm, [cut for cut in (first, last) if 0 < cut < len(names)])
        index = 1 if first else 0
        segment, inputs = next(itertools.islice(_walk(parts, copied(args, _written(gm)), self._build), index, None))
        _, eagers = next(itertools.islice(_walk(parts, copied(args, _written(gm))), index, None))
        alone = self._build(segment.gm)
        wrong = None if alone is None else list(_differing(alone, segment.gm, inputs))
        if wrong == [] and not all(map(_same_choice, segment.gm(*inputs), segment.gm(*eagers))):
            return None
        described = "; ".join(self._describe(node) for node in suspects)
        if wrong:
            described += ": " + "; ".join(f"{_name_of(segment.gm, index)} {how}" for index, how in wrong)
        elif wrong == []:
            described += ", which agrees where it runs alone on the same inputs"
        return _Culprit(described, TaskVerificationError if _users_tasks(suspects) else VerificationError)

    def _describe(self, node: fx.Node) -> str:
        text = f"{node.name} ({node.target}) from {where(node) or 'the graph'}"
        if not _users_tasks([node]):
            return text
        way = way_of(node.target, (value(arg).dtype for arg in node.all_input_nodes), self.device, self.options)
        return f"{text}, the task declared at {node.target.place}, by its {way}"

    def _build(self, gm: fx.GraphModule) -> Run | None:
        try:
            return build_segment(gm, self.device, self.options, Dump(None)).callable(gm)
        except Exception as error:  # a part that is cut out of the graph may hand over what the whole keeps to itself
            logger.debug("a part of the graph has no build: %s", error)
            return None


def _walk(
    parts: Partitioned, args: Sequence[Any], build: Callable[[fx.GraphModule], Run | None] = lambda gm: gm
) -> Iterator[tuple[Any, list[Any]]]:
    """Each segment with its inputs, from ``args``; what ``build`` makes of it then runs, and may change them."""
    values: dict[fx.Node, Any] = dict(zip(parts.gm.graph.find_nodes(op="placeholder"), args, strict=True))
    segments = {segment.name: segment for segment in parts.segments}
    for node in parts.gm.graph.nodes:
        if node.op == "call_module":
            segment, inputs = segments[node.target], [values[arg] for arg in node.args]
            yield segment, inputs
            with torch.no_grad():
                values[node] = (build(segment.gm) or segment.gm)(*inputs)
        elif node.op == "call_function":
            values[node] = values[node.args[0]][node.args[1]]


def _differs(run: Run, gm: fx.GraphModule, args: Sequence[Any]) -> bool:
    """Whether ``run`` and the graph's nodes give different results or writes; ``args`` are not changed."""
    return any(True for _ in _differing(run, gm, args))


def _differing(run: Run, gm: fx.GraphModule, args: Sequence[Any]) -> Iterator[tuple[int, str]]:
    """Which results, and then inputs that are written, differ, and how."""
    written = _written(gm)
    own = copied(args, written)
    yield from _differences(run(*own), own, gm, args, written)


def _name_of(gm: fx.GraphModule, index: int) -> str:
    """Result, or after the results written input, number ``index`` by the name it has in its task's signature."""
    [output] = gm.graph.find_nodes(op="output")
    placeholders = gm.graph.find_nodes(op="placeholder")
    node = [*output.args[0], *(placeholders[i] for i in _written(gm))][index]
    source, item = node.args if node.target is operator.getitem else (node, 0)
    if isinstance(source.target, Task):
        return f"{source.target.outputs[item].name} ({_kind(node)})"
    for user in node.users:
        if isinstance(user.target, Task) and node in user.args:
            return f"{user.target.inputs[user.args.index(node)].name} ({_kind(node)}), which is updated,"
    return f"{node.name} ({_kind(node)})"


def _kind(node: fx.Node) -> str:
    val = value(node)
    return f"{val.dtype}{list(val.shape)}" if isinstance(val, torch.Tensor) else type(val).__name__


def _users_tasks(nodes: Sequence[fx.Node]) -> list[Task]:
    called = (node.target for node in nodes if isinstance(node.target, Task))
    return list(dict.fromkeys(task for task in called if not task.is_ours))


def _written(gm: fx.GraphModule) -> list[int]:
    touched = frozenset().union(*map(written_storages, gm.graph.nodes))
    placeholders = gm.graph.find_nodes(op="placeholder")
    return [i for i, node in enumerate(placeholders) if storages(node) & touched]


def _same_choice(a: Any, b: Any) -> bool:
    return not isinstance(a, torch.Tensor) or a.is_floating_point() or torch.equal(a, b)


# ---- comparing ----


def copied(args: Sequence[Any], positions: Sequence[int]) -> list[Any]:
    """The arguments with copies of the tensors at these positions, strides and all."""
    copied = list(args)
    for i in positions:
        if isinstance(args[i], torch.Tensor):
            like = args[i].detach()
            copied[i] = torch.empty_strided(like.size(), like.stride(), dtype=like.dtype, device=like.device)
            copied[i].copy_(like)
    return copied


def _difference(
    results: Sequence[Any], args: Sequence[Any], eager: Run, before: Sequence[Any], written: Sequence[int]
) -> str | None:
    """How results and inputs differ from what ``eager`` makes of ``before``, which stays; None where they do not."""
    names = [f"result {i}" for i in range(len(results))] + [f"input {i}, which is written," for i in written]
    index, how = next(_differences(results, args, eager, before, written), (0, None))
    return f"{names[index]} {how}" if how else None


def _differences(
    results: Sequence[Any], args: Sequence[Any], eager: Run, before: Sequence[Any], written: Sequence[int]
) -> Iterator[tuple[int, str]]:
    """Each that differs, of the results and then of the inputs that are written, by its number."""
    with torch.no_grad():
        expected_args = copied(before, written)
        expected = [*eager(*expected_args), *(expected_args[i] for i in written)]
        try:
            exact_args = [arg if isinstance(arg, torch.nn.Parameter) else _widened(arg) for arg in before]
            exact_args = copied(exact_args, [i for i in written if exact_args[i] is before[i]])
            with _Float64():
                exact = [*eager(*exact_args), *(exact_args[i] for i in written)]
        except Exception as error:
            logger.debug("the graph does not run in float64: %s", error)
            exact = [None] * len(expected)
        actual = [*results, *(args[i] for i in written)]
        different = [
            (i, _tensor_difference(ours, theirs, truth))
            for i, (ours, theirs, truth) in enumerate(zip(actual, expected, exact, strict=True))
            if isinstance(theirs, torch.Tensor)
        ]
    yield from ((i, how) for i, how in different if how)


def _tensor_difference(ours: torch.Tensor, eager: torch.Tensor, exact: torch.Tensor | None) -> str | None:
    kinds = [f"{t.dtype}{list(t.shape)}" for t in (ours, eager)]
    if kinds[0] != kinds[1]:
        return f"is {kinds[0]}, in eager {kinds[1]}"
    if not eager.is_floating_point():
        wrong = ours != eager
        if not wrong.any():
            return None
        at = _first(wrong)
        return f"is {ours[at].item()} at {list(at)}, in eager {eager[at].item()} ({wrong.sum()} elements differ)"
    eps, slack = torch.finfo(eager.dtype).eps, _SLACK[eager.dtype]
    ours, eager = ours.double(), eager.double()
    truth = eager if exact is None else exact.double()
    odd = ~(ours == eager) & ~(ours.isnan() & eager.isnan()) & ~(ours.isfinite() & eager.isfinite())
    if odd.any():
        at = _first(odd)
        return f"is {ours[at].item()} at {list(at)}, in eager {eager[at].item()}"
    error, noise = ((t - truth).abs().nan_to_num(0, 0, 0) for t in (ours, eager))
    scale = truth.abs().nan_to_num(0, 0, 0).max().item() if truth.numel() else 0.0
    slack *= 1 if exact is not None else _SLACK_WITHOUT_YARDSTICK
    allowed = slack * ((noise.max().item() if truth.numel() else 0.0) + eps * scale)
    wrong = error > allowed
    if not wrong.any():
        return None
    at = _first(wrong)
    return (
        f"is {ours[at].item():.6g} at {list(at)}, in eager {eager[at].item():.6g}: off by {error[at].item():.3g}, "
        f"where eager's own error would allow {allowed:.3g} ({wrong.sum()} elements differ)"
    )


def _first(mask: torch.Tensor) -> tuple[int, ...]:
    return tuple(mask.nonzero()[0].tolist())


def _widened(value: Any) -> Any:
    return value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value


class _Float64(TorchDispatchMode):
    """Computes in float64 what would be computed in another floating dtype. Weights are widened where they are used."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.view.dtype:
            raise NotImplementedError("bits of one dtype read as another")

        def wide(value: Any) -> Any:
            if isinstance(value, torch.dtype) and value.is_floating_point:
                return torch.float64
            return value if func.is_view else _widened(value)

        return func(*tree_map(wide, args), **tree_map(wide, kwargs or {}))
