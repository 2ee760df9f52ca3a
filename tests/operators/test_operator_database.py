"""Every operator of PyTorch's database is eager's to the rounding, whether we take it or leave it."""

from collections import Counter
from collections.abc import Iterable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch.testing._internal.opinfo.core import UnaryUfuncInfo

from tests.operators import database
from tests.operators.database import DTYPES, Call, operators

# Calls that are ours, at least, with the PyTorch that CI installs: fewer say that operators have gone.
COUNTED_WITH = "2.13."
TAKEN = {
    torch.float32: 1404,
    torch.bfloat16: 1389,
    torch.float16: 1385,
    torch.float64: 1404,
    torch.int64: 1101,
    torch.int32: 1102,
    torch.int16: 1102,
    torch.int8: 1101,
    torch.uint8: 1102,
    torch.bool: 878,
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


def test_a_call_of_every_tenth_operator() -> None:
    """Of each another dtype, form and kind of operands."""
    chosen = []
    for i, op in enumerate(database.operators()[::10]):
        dtypes = [dtype for dtype in DTYPES if op.supports_dtype(dtype, "cpu")]
        calls = list(database.calls(op, dtypes[i % len(dtypes)])) if dtypes else []
        chosen += calls[i % len(calls) :][:1] if calls else []
    check(chosen, TAKEN_OF_SAMPLE)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_all_calls(dtype: torch.dtype) -> None:
    operators = (op for op in database.operators() if op.supports_dtype(dtype, "cpu"))
    check((call for op in operators for call in database.calls(op, dtype)), TAKEN[dtype])


SCATTERS = ("diagonal_scatter", "index_copy", "index_fill", "masked_fill", "scatter", "select_scatter", "slice_scatter")


def layouts(x: torch.Tensor) -> Iterator[torch.Tensor]:
    """The same shape transposed, with gaps, both, and expanded."""
    yield x.mT.contiguous().mT
    yield x.repeat_interleave(2, -1)[..., ::2]
    yield x.mT.repeat_interleave(2, -1)[..., ::2].mT
    yield x[..., :1].expand(x.shape)


@pytest.mark.parametrize("scatters", [True, False])
def test_results_have_the_strides_of_eagers(scatters: bool) -> None:
    wide = torch.randn(1, 8), torch.randn(8, 8)
    differing, num_compared = [], 0
    chosen = [
        op
        for op in operators()
        if torch.float32 in op.dtypes
        and (op.name in SCATTERS if scatters else isinstance(op, UnaryUfuncInfo) or op.name.endswith("sigmoid"))
    ]
    for op in chosen:
        samples = (s for s in op.sample_inputs("cpu", torch.float32) if isinstance(s.input, torch.Tensor))
        sample = next((s for s in samples if s.input.dim() == 2 and min(s.input.shape) > 1), None)
        for x in layouts(sample.input.detach()) if sample is not None else ():

            def function(x: torch.Tensor, *wide: torch.Tensor, op=op, sample=sample) -> tuple[torch.Tensor, ...]:
                return op.op(x, *sample.args, **sample.kwargs), F.linear(*wide)

            with torch.inference_mode():
                expected = function(x, *wide)[0]
                torch.compiler.reset()
                actual = torch.compile(function, backend="mpk", options={"min_segment_nodes": 1})(x, *wide)[0]
            num_compared += 1
            if actual.stride() != expected.stride():
                differing.append((op.name, x.stride(), actual.stride(), expected.stride()))
    assert num_compared >= (20 if scatters else 100)
    assert differing == []
