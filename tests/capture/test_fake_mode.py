"""Fake tensors of calls that are like one before are those that PyTorch's own mode gives."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils import _pytree as pytree

from tests.operators import database
from tests.operators.database import Call
from torch_mpk.capture.fake_mode import repeated_fakes

aten = torch.ops.aten


def described(given: Any, inputs: Sequence[FakeTensor]) -> list[Any]:
    """Results' metadata, which inputs they are, and which inputs' memory they are in."""
    storages = [tensor.untyped_storage()._cdata for tensor in inputs]

    def describe(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or value._has_symbolic_sizes_strides:
            return type(value)
        layout = value.shape, value.stride(), value.storage_offset()
        kind = value.dtype, value.device, value.is_conj(), value.is_neg(), value.is_inference(), value._is_view()
        own = value.untyped_storage()._cdata
        return layout, kind, [value is each for each in inputs], [own == storage for storage in storages]

    return list(map(describe, pytree.tree_leaves(given)))


def results(mode: FakeTensorMode, call: Call, times: int) -> list[list[Any]]:
    """Calls so many times in the mode, and describes the results, or gives the type of an error."""
    fake, every = functools.partial(mode.from_tensor, static_shapes=True), []
    for _ in range(times):
        args, kwargs = pytree.tree_map_only(torch.Tensor, fake, (call.args, call.kwargs))
        inputs = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        try:
            with mode, torch.no_grad():
                every.append(described(call.function(*args, **kwargs), inputs))
        except Exception as error:
            every.append([type(error)])
    return every


def new_modes() -> tuple[FakeTensorMode, FakeTensorMode]:
    """Ours and PyTorch's, without what that keeps of calls by itself: some of it has another offset."""
    ours, theirs = (mode(shape_env=ShapeEnv(), allow_non_fake_inputs=True) for mode in (repeated_fakes, FakeTensorMode))
    ours.cache_enabled = theirs.cache_enabled = False
    return ours, theirs


def check(calls: Iterable[Call]) -> None:
    ours, theirs = new_modes()
    functional = [call for call in calls if call.form == "functional"]  # others write, and are not kept
    wrong = [str(call) for call in functional if results(ours, call, 2) != results(theirs, call, 1) * 2]
    assert wrong == []


def test_calls_of_every_tenth_operator() -> None:
    check(call for op in database.operators()[::10] for call in database.calls(op, torch.float32))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_calls_of_every_operator(dtype: torch.dtype) -> None:
    operators = [op for op in database.operators() if op.supports_dtype(dtype, "cpu")]
    check(call for op in operators for call in database.calls(op, dtype))


def test_arguments_that_are_equal_and_of_other_types() -> None:
    ours, theirs = new_modes()
    made = []
    for mode in (ours, theirs):
        with mode, torch.no_grad():
            x = torch.empty(3, dtype=torch.int64)
            made.append([aten.mul.Scalar(x, factor).dtype for factor in (1, True, 1.0, 1, 1.0)])
    assert made[0] == made[1] == [torch.int64, torch.int64, torch.float32, torch.int64, torch.float32]


@pytest.mark.parametrize("inside", [True, False])
def test_views_in_inference_mode_of_tensors_from_elsewhere(inside: bool) -> None:
    made = []
    for mode in new_modes():
        with mode, torch.inference_mode(inside):
            x = torch.empty(4, 6)[1:]
        with mode, torch.inference_mode(not inside), torch.no_grad():
            for _ in range(2):
                made.append(
                    [described(call(x), [x]) for call in (lambda x: x.t(), lambda x: x[1:, 2], lambda x: x + 1)]
                )
    assert made[:2] == made[2:]


def test_results_have_memory_of_their_own() -> None:
    mode, _ = new_modes()
    with mode, torch.no_grad():
        x = torch.empty(4, 6)
        sums = [x + 1 for _ in range(3)]
        views = [aten.view.default(each, [24]) for each in sums]
    assert len({tensor.untyped_storage()._cdata for tensor in (x, *sums)}) == 4
    assert [a.untyped_storage()._cdata for a in sums] == [b.untyped_storage()._cdata for b in views]


def test_equal_calls_are_computed_once() -> None:
    mode, _ = new_modes()
    with mode, torch.no_grad(), mock.patch.object(mode, "_dispatch_impl", wraps=mode._dispatch_impl) as computed:
        x, y = torch.empty(3, 4), torch.empty(3, 4)
        before = computed.call_count
        assert (x * 2).shape == (y * 2).shape and (x.t() @ y).shape == (y.t() @ x).shape
        assert computed.call_count - before == 3  # times two, transposed, multiplied


def test_calls_with_symbols_are_computed_anew() -> None:
    mode, _ = new_modes()
    x = mode.from_tensor(torch.empty(3, 4))
    assert isinstance(x.shape[0], torch.SymInt)
    with mode, torch.no_grad(), mock.patch.object(mode, "_dispatch_impl", wraps=mode._dispatch_impl) as computed:
        assert (x * 2).shape == (x * 2).shape
        assert computed.call_count == 2
