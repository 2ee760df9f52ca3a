"""Every operator of PyTorch's database is eager's to the rounding, whether we take it or leave it."""

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx
from torch.testing._internal.opinfo.core import BinaryUfuncInfo, OpInfo, UnaryUfuncInfo
from torch.utils import _pytree as pytree

from tests.operators import database
from tests.operators.database import DTYPES, Call, operators
from tests.thinned import thinned
from torch_mpk.backend.calls import compile_call

# Calls that are ours, at least, with the PyTorch that CI installs: fewer say that operators have gone.
COUNTED_WITH = "2.13."
TAKEN = {
    torch.float32: 267,
    torch.bfloat16: 259,
    torch.float16: 261,
    torch.float64: 259,
    torch.int64: 211,
    torch.int32: 168,
    torch.int16: 210,
    torch.int8: 183,
    torch.uint8: 206,
    torch.bool: 124,
}
TAKEN_OF_SAMPLE = 29


def check(calls: Iterable[Call], num_taken: int) -> None:
    """Fails with all calls that are wrong, not with the first."""
    ends, wrong = Counter(), []
    for call in calls:
        try:
            ends[database.outcome(call)] += 1
        except Exception as error:
            wrong.append(f"{call}: {type(error).__name__}: {error}")
    assert not wrong, f"{len(wrong)} wrong:\n" + "\n".join(wrong)
    if torch.__version__.startswith(COUNTED_WITH):
        assert ends["taken"] >= num_taken, ends


def supported(op: OpInfo) -> list[torch.dtype]:
    return [dtype for dtype in DTYPES if op.supports_dtype(dtype, "cpu")]


def test_a_call_of_every_tenth_operator() -> None:
    """Of each another dtype, form and kind of operands."""
    chosen = []
    for i, op in enumerate(database.operators()[::10]):
        dtypes = supported(op)
        calls = list(database.calls(op, dtypes[i % len(dtypes)])) if dtypes else []
        chosen += calls[i % len(calls) :][:1] if calls else []
    check(chosen, TAKEN_OF_SAMPLE)


def _in_turn(dtypes: list[torch.dtype], i: int) -> list[torch.dtype]:
    return dtypes[i % min(len(dtypes), 6) :: 6] if dtypes else []


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_all_calls(dtype: torch.dtype) -> None:
    """Of every operator, in one of its dtypes or two: others of the next one's."""
    operators = (op for i, op in enumerate(database.operators()) if dtype in _in_turn(supported(op), i))
    check((call for op in operators for call in database.calls(op, dtype)), TAKEN[dtype])


SCATTERS = ("diagonal_scatter", "index_copy", "index_fill", "masked_fill", "scatter", "select_scatter", "slice_scatter")
# PyTorch's fake tensors have other strides than eager's results where operands' differ, and a graph is built on those.
WITH_OTHER_FAKES = {"copysign", "logaddexp", "logical_and", "logical_or", "logical_xor", "special.xlog1py", "xlogy"}
TERNARY = (torch.addcmul, torch.addcdiv, torch.clamp, torch.lerp, lambda a, b, c: torch.where(a > 1, b, c))


def layouts(x: torch.Tensor) -> Iterator[torch.Tensor]:
    """The same shape transposed, with gaps, both, and expanded."""
    yield x.mT.contiguous().mT
    yield x.repeat_interleave(2, -1)[..., ::2]
    yield x.mT.repeat_interleave(2, -1)[..., ::2].mT
    yield x[..., :1].expand(x.shape)


def operands() -> list[torch.Tensor]:
    """Of a shape and of what broadcasts to it, in every order of strides that there is a reason for."""
    x = torch.rand(2, 1, 4, 5) + 0.5
    orders = [x.contiguous(memory_format=torch.channels_last), x.permute(3, 0, 1, 2).contiguous().permute(1, 2, 3, 0)]
    narrow = [x[..., :1], x[:, :, :1], x.mT.contiguous().mT[:1]]
    return [x, *layouts(x), *orders, *narrow]


def unary() -> Iterator[tuple]:
    """Each in two of the layouts."""
    for i, op in enumerate(operators()):
        if torch.float32 in op.dtypes and (isinstance(op, UnaryUfuncInfo) or op.name.endswith("sigmoid")):
            yield from itertools.islice(of_layouts(op), i % 2, None, 2)


def scatters() -> Iterator[tuple]:
    return (call for op in operators() if op.name in SCATTERS for call in of_layouts(op))


def of_layouts(op: OpInfo) -> Iterator[tuple]:
    samples = (s for s in database.samples(op, torch.float32) if isinstance(s.input, torch.Tensor))
    sample = next((s for s in samples if s.input.dim() == 2 and min(s.input.shape) > 1), None)
    for x in layouts(sample.input.detach()) if sample is not None else ():
        yield op.name, op.op, (x, *sample.args), sample.kwargs


def binary() -> Iterator[tuple]:
    """Addition of every two operands, and of each other operation some."""
    pairs = list(itertools.product(operands(), repeat=2))
    yield from (("add", torch.add, pair, {}) for pair in pairs)
    for i, op in enumerate(operators()):
        if isinstance(op, BinaryUfuncInfo) and op.name not in WITH_OTHER_FAKES:
            yield from ((op.name, op.op, pair, {}) for pair in pairs[i % 60 :: 60])


def ternary() -> Iterator[tuple]:
    triples = list(itertools.product(operands(), repeat=3))
    for i, function in enumerate(TERNARY):
        yield from ((function.__name__, function, triple, {}) for triple in triples[i::97])


@pytest.mark.parametrize(("calls", "least"), thinned([(unary, 75), (scatters, 12), (binary, 150), (ternary, 50)], 1, 3))
def test_results_have_the_strides_of_eagers(calls: Callable[[], Iterator[tuple]], least: int) -> None:
    """All in one graph, each beside a linear."""
    graph, inputs, results, expected, described = fx.Graph(), [], [], [], []

    def argument(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        inputs.append(value.detach())
        return graph.placeholder(f"t{len(inputs)}")

    wide = argument(torch.randn(1, 8)), argument(torch.randn(8, 8))
    for name, function, args, kwargs in calls():
        try:
            expected.append(function(*args, **kwargs))
        except Exception:  # such operands it does not take
            continue
        described.append((name, *(x.stride() for x in args if isinstance(x, torch.Tensor))))
        results.append(graph.call_function(function, *pytree.tree_map(argument, (tuple(args), kwargs))))
        results.append(graph.call_function(F.linear, wide))
    graph.output(tuple(results))
    with torch.inference_mode():
        compiled = compile_call(fx.GraphModule({}, graph), inputs, database.OPTIONS)
        actual = compiled(*inputs)[::2]
    together = zip(described, actual, expected, strict=True)
    assert [(call, a.stride(), e.stride()) for call, a, e in together if a.stride() != e.stride()] == []
    num_left = len(compiled.compiled_graph.partitioned.fallbacks)
    assert len(expected) - num_left >= least
