"""PyTorch's operator database through the backend: each call beside a linear, so that a megakernel is built."""

from __future__ import annotations

import contextlib
import functools
import math
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.common_utils import set_rng_seed
from torch.testing._internal.opinfo.core import BinaryUfuncInfo, OpInfo, SampleInput, UnaryUfuncInfo
from torch.utils import _pytree as pytree

from torch_mpk.backend.calls import compile_call
from torch_mpk.config import Options
from torch_mpk.errors import MpkError

DTYPES = (
    *(torch.float32, torch.bfloat16, torch.float16, torch.float64),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
)
OPTIONS = Options(fallback="eager", min_segment_nodes=1, max_positions=1)
MAX_ELEMENTS = 1 << 14  # of a call's tensors: more show nothing that fewer do not
SEED = 42  # the one that the database sets in each call of a random operator
# Their results are whatever the memory held.
UNTESTABLE = {"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"}
# PyTorch 2.13 reads past an expanded tensor's memory for these, so that eager's results are no reference.
WRONG_IF_EXPANDED = {"median", "nanmedian", "masked.median"}
_SPECIAL = {
    True: (0.0, -0.0, math.inf, -math.inf, math.nan, 1.0, -1.0, 0.5, 2.5, -3.5),
    False: (0, 1, 2, 3, 7, 100),
}


@dataclass(frozen=True)
class Call:
    """One call of an operator. ``args`` and ``kwargs`` hold its tensors."""

    op: OpInfo
    dtype: torch.dtype
    form: str  # "functional", "in place" or "out"
    kind: str  # of operands: "sample", "non-contiguous", "expanded" or "extremal"
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def __str__(self) -> str:
        name = ".".join(filter(None, (self.op.name, self.op.variant_test_name)))
        described = pytree.tree_map(
            lambda x: f"{x.dtype}{list(x.shape)}" if isinstance(x, torch.Tensor) else x, (self.args, self.kwargs)
        )
        return f"{name} {self.dtype} {self.form} {self.kind} {described[0]} {described[1]}"

    def tensors(self) -> list[torch.Tensor]:
        return [x for x in pytree.tree_leaves((self.args, self.kwargs)) if isinstance(x, torch.Tensor)]


def calls(op: OpInfo, dtype: torch.dtype) -> Iterator[Call]:
    """Of an operator's samples one or two, in every form, with other layouts, and extremal values."""
    for sample in _chosen(op, dtype):
        yield from _forms(op, dtype, "sample", sample.input, sample.args, sample.kwargs)
        other = sample.noncontiguous()
        yield Call(op, dtype, "functional", "non-contiguous", op.op, (other.input, *other.args), other.kwargs)
        if _has_dimensions(sample) and sample.input.shape[-1] > 1 and op.name not in WRONG_IF_EXPANDED:
            expanded = sample.input[..., :1].expand(sample.input.shape)
            yield Call(op, dtype, "functional", "expanded", op.op, (expanded, *sample.args), sample.kwargs)
    if isinstance(op, (UnaryUfuncInfo, BinaryUfuncInfo)):
        values = extremal(dtype)
        others = (values.flip(0),) if isinstance(op, BinaryUfuncInfo) else ()
        yield from _forms(op, dtype, "extremal", values, others, {})


def samples(op: OpInfo, dtype: torch.dtype) -> Iterator[SampleInput]:
    """As ``op.sample_inputs``, which besides looks on the stack for a test of unittest: for nearly half a second."""
    each = iter(op.sample_inputs_func(op, "cpu", dtype, False))
    while True:
        set_rng_seed()
        try:
            yield next(each)
        except StopIteration:
            return


def _chosen(op: OpInfo, dtype: torch.dtype) -> list[SampleInput]:
    """The first, and if that is of a tensor without dimensions, the first that is not."""
    chosen: list[SampleInput] = []
    # Closed now: at its end one changes the grad mode, and a trace would see that.
    with contextlib.closing(samples(op, dtype)) as all_of_it:
        for sample in all_of_it:
            if _is_usable(sample) and (not chosen or _has_dimensions(sample)):
                chosen.append(sample)
            if chosen and (_has_dimensions(chosen[-1]) or not isinstance(sample.input, torch.Tensor)):
                break
    return chosen


def _is_usable(sample: SampleInput) -> bool:
    leaves = pytree.tree_leaves((sample.input, sample.args, sample.kwargs))
    tensors = [x for x in leaves if isinstance(x, torch.Tensor)]
    return sum(t.numel() for t in tensors) <= MAX_ELEMENTS and all(t.layout == torch.strided for t in tensors)


def _has_dimensions(sample: SampleInput) -> bool:
    return isinstance(sample.input, torch.Tensor) and sample.input.dim() > 0


def _forms(
    op: OpInfo, dtype: torch.dtype, kind: str, first: Any, args: Sequence[Any], kwargs: dict[str, Any]
) -> Iterator[Call]:
    yield Call(op, dtype, "functional", kind, op.op, (first, *args), kwargs)
    in_place = op.inplace_variant
    if in_place is not None and isinstance(first, torch.Tensor):
        function, fixed = in_place, {}
        if isinstance(in_place, functools.partial):
            function, fixed = in_place.func, in_place.keywords
        yield Call(op, dtype, "in place", kind, function, (first, *args), kwargs | fixed)
    if op.supports_out:
        try:
            result = op.op(*_copies((first, *args)), **kwargs)
        except Exception:  # a sample of what raises
            return
        if isinstance(result, torch.Tensor):
            out = {"out": torch.empty_like(result)}
            yield Call(op, dtype, "out", kind, op.op, (first, *args), kwargs | out)


def extremal(dtype: torch.dtype) -> torch.Tensor:
    """Infinities, NaN, zeros of both signs, the largest and smallest numbers, and some between."""
    if dtype == torch.bool:
        return torch.tensor([True, False, True, True, False])
    info = torch.finfo(dtype) if dtype.is_floating_point else torch.iinfo(dtype)
    values = [*_SPECIAL[dtype.is_floating_point], info.max, info.min]
    if dtype.is_floating_point:
        values += [info.tiny, -info.tiny, info.tiny / 4, info.eps]
    return torch.tensor(values, dtype=torch.float64 if dtype.is_floating_point else dtype).to(dtype)


def outcome(call: Call) -> str:
    """What becomes of a call: "taken"; or "raises" or is "random", in eager; or "left" to PyTorch, at least in part.

    Raises AssertionError where a result, or what an argument holds afterwards, differs from eager's.
    """
    wide, weight = torch.randn(2, 8), torch.randn(8, 8)
    values, spec = pytree.tree_flatten((call.args, call.kwargs))
    places = [i for i, value in enumerate(values) if isinstance(value, torch.Tensor)]

    def run(function: Callable[..., Any], tensors: Sequence[torch.Tensor]) -> Any:
        given = list(values)
        for place, tensor in zip(places, tensors, strict=True):
            given[place] = tensor
        args, kwargs = pytree.tree_unflatten(given, spec)
        return function(*args, **kwargs)

    tensors = [values[place] for place in places]
    eager, ours = _copies(tensors), _copies(tensors)
    torch.manual_seed(SEED)
    unused = torch.get_rng_state()
    try:
        result = run(call.function, eager)
    except Exception:
        return "raises"
    if not torch.equal(torch.get_rng_state(), unused):
        return "random"
    expected = _results(result)
    if not expected or any(_is_foreign(t) for t in (*tensors, *expected)):
        return "left"
    graph = fx.Graph()
    nodes = [graph.placeholder(f"t{i}") for i in range(len(tensors) + 2)]
    args, kwargs = pytree.tree_unflatten(
        [nodes[places.index(i)] if i in places else value for i, value in enumerate(values)], spec
    )
    try:
        called = graph.call_function(call.function, args, kwargs)
        parts = [called]
        if not isinstance(result, torch.Tensor):  # a graph of Dynamo's returns nothing that holds others
            parts = [graph.call_function(operator.getitem, (called, i)) for i in range(len(expected))]
        graph.output((*parts, graph.call_function(F.linear, (nodes[-2], nodes[-1]))))
        compiled = compile_call(fx.GraphModule({}, graph), [*ours, wide, weight], OPTIONS)
    except (MpkError, TypeError, NotImplementedError, RuntimeError):  # fx takes no such argument; or a graph not ours
        return "left"
    built = compiled.compiled_graph
    actual = compiled(*ours, wide, weight)
    compare(call, list(actual[:-1]), expected, run, tensors)
    for mine, theirs in zip(ours, eager, strict=True):
        compare(call, [mine], [theirs], None, tensors)
    return "left" if built.partitioned is None or built.partitioned.fallbacks else "taken"


def compare(call: Call, actual: list[Any], expected: list[Any], run: Any, tensors: Sequence[torch.Tensor]) -> None:
    """Within rounding of eager's, or no further from a float64 run than eager several times over."""
    assert len(actual) == len(expected), f"{call}: {len(actual)} results, expected {len(expected)}"
    for i, (mine, theirs) in enumerate(zip(actual, expected, strict=True)):
        assert (mine.shape, mine.dtype) == (theirs.shape, theirs.dtype), f"{call}: {mine.shape} {mine.dtype}"
        try:
            torch.testing.assert_close(mine, theirs, equal_nan=True)
        except AssertionError as error:
            if run is None or not mine.is_floating_point() or not _is_near(call, i, mine, theirs, run, tensors):
                raise AssertionError(f"{call}: {error}\n{mine}\n{theirs}") from error


def _is_near(call: Call, i: int, mine: Any, theirs: Any, run: Any, tensors: Sequence[torch.Tensor]) -> bool:
    if call.form != "functional":
        return False
    try:
        exact = _results(run(call.op.op, [t.double() if t.is_floating_point() else t for t in tensors]))[i]
    except Exception:
        return False
    if exact.shape != mine.shape:
        return False
    exact = exact.double()
    ours, eagers = mine.isfinite(), theirs.isfinite()
    if bool((ours != eagers).logical_and(ours != exact.to(mine.dtype).isfinite()).any()):
        return False  # but in half types a step of eager's may overflow that is none of ours
    error, eagers_error = (_largest((t.double() - exact)[t.isfinite() & exact.isfinite()]) for t in (mine, theirs))
    return error <= 8 * eagers_error + 2 * torch.finfo(mine.dtype).eps * _largest(exact[exact.isfinite()])


def _largest(t: torch.Tensor) -> float:
    return t.abs().amax().item() if t.numel() else 0


def _copies(values: Any) -> Any:
    """Tensors of their own with the same strides; an expanded one stays expanded."""
    return pytree.tree_map(lambda x: _copy(x) if isinstance(x, torch.Tensor) else x, values)


def _copy(t: torch.Tensor) -> torch.Tensor:
    if t.layout != torch.strided or t.is_conj() or t.is_neg():
        return t.clone()
    extent = 1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True)) if t.numel() else 0
    storage = torch.zeros(extent, dtype=t.dtype)
    copied = storage.as_strided(t.shape, t.stride())
    base = t.as_strided((extent,), (1,), t.storage_offset()) if extent else t.reshape(0)
    storage.copy_(base)
    return copied


def _is_foreign(t: torch.Tensor) -> bool:
    return t.layout != torch.strided or t.dtype not in DTYPES or t.is_conj() or t.is_neg() or t.is_nested


def _results(value: Any) -> list[torch.Tensor]:
    return [x for x in pytree.tree_leaves(value) if isinstance(x, torch.Tensor)]


def operators() -> list[OpInfo]:
    return [op for op in op_db if op.name not in UNTESTABLE]
