"""``options={"verify": ...}``: a call is compared with eager, and the first task that differs is found.

The yardstick is eager itself: the graph also runs in float64, and a result's error against that run may be ``_SLACK``
times eager's largest, or as many units of rounding where eager happens to be exact. Both round at the same places, and
in half precision that is nearly all of their error; in float32 the order of sums counts, which is ours to choose. What
depth and conditioning of a model do to errors is in the measure, so that nothing has to be assumed about them.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from torch_mpk.aliasing import storages, written_storages
from torch_mpk.config import Options
from torch_mpk.dump import Dump
from torch_mpk.errors import VerificationError
from torch_mpk.partition import Partitioned, operations, split
from torch_mpk.provenance import where
from torch_mpk.runtime import Program
from torch_mpk.runtime.plan import make_plan
from torch_mpk.runtime.segment import Segment

logger = logging.getLogger(__name__)

_SLACK = {torch.bfloat16: 4, torch.float16: 4, torch.float32: 16, torch.float64: 16}
_SLACK_WITHOUT_YARDSTICK = 4  # times more, where the graph does not run in float64

Run = Callable[..., Sequence[Any]]


def verified(
    call: Run, program: Program, eager: Run, written: Sequence[int], device: torch.device, options: Options
) -> Run:
    """``call``, compared with eager on its first call, or on every n-th too, as ``options.verify`` says.

    A verified call takes copies of the inputs at ``written``, which the graph updates: two, and one in float64. While a
    CUDA graph is being captured nothing is verified.

    Raises VerificationError; the inputs are then as they were before the call.
    """
    calls = 0

    def verify(*args: Any) -> Any:
        nonlocal calls
        is_due = calls == 0 if options.verify is True else calls % options.verify == 0
        if not is_due or (device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
            calls += 1
            return call(*args)
        before = copied(args, written)
        results = call(*args)
        difference = _difference(results, args, eager, before, written)
        if difference is not None:
            culprit = _Search(device, options).in_program(program, copied(before, written))
            if culprit is not None:
                for position in written:
                    args[position].copy_(before[position])
                raise VerificationError(difference=difference, culprit=culprit)
            logger.info("verified, but for a choice between near equals: %s", difference)
        calls += 1
        return results

    return verify


class _Search:
    """Finds the first task that differs, by building parts of a graph whose intermediate values are results."""

    def __init__(self, device: torch.device, options: Options) -> None:
        self.device, self.options = device, options

    def in_program(self, program: Program, args: Sequence[Any]) -> str | None:
        """Where the program first differs from eager on these arguments, which it may change; None: see ``_judge``."""
        assert program.partitioned is not None  # a verified build is of this process
        for segment, inputs in _walk(program.partitioned, args):
            if segment.name in program.segments:
                if _differs(program.segments[segment.name].callable(segment.gm), segment.gm, inputs):
                    return self.in_segment(segment.gm, inputs)
            elif segment.name in program.others and _differs(program.others[segment.name], segment.gm, inputs):
                return f"{segment.name}, which inductor compiled"
        return "none, when its parts run again from the same inputs: the result is not the same every time"

    def in_segment(self, gm: fx.GraphModule, args: Sequence[Any]) -> str | None:
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

    def _judge(self, gm: fx.GraphModule, names: list[str], first: int, last: int, args: Sequence[Any]) -> str | None:
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
        agrees_alone = alone is not None and not _differs(alone, segment.gm, inputs)
        if agrees_alone and not all(map(_same_choice, segment.gm(*inputs), segment.gm(*eagers))):
            return None
        described = "; ".join(f"{node.name} ({node.target}) from {where(node) or 'the graph'}" for node in suspects)
        return described + (", which agrees where it runs alone on the same inputs" if agrees_alone else "")

    def _build(self, gm: fx.GraphModule) -> Run | None:
        try:
            plan = make_plan(gm, self.device, self.options, Dump(None))
            return Segment(plan, self.device, self.options, Dump(None)).callable(gm)
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
    written = _written(gm)
    own = copied(args, written)
    return _difference(run(*own), own, gm, args, written) is not None


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


@torch.no_grad()
def _difference(
    results: Sequence[Any], args: Sequence[Any], eager: Run, before: Sequence[Any], written: Sequence[int]
) -> str | None:
    """How results and inputs differ from what ``eager`` makes of ``before``, which stays; None where they do not."""
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
    names = [f"result {i}" for i in range(len(results))] + [f"input {i}, which is written," for i in written]
    actual = [*results, *(args[i] for i in written)]
    for name, ours, theirs, truth in zip(names, actual, expected, exact, strict=True):
        if isinstance(theirs, torch.Tensor) and (how := _tensor_difference(ours, theirs, truth)):
            return f"{name} {how}"
    return None


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
