"""What lowering refuses, and that it says why in words a user can act on."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from tests.lowering.harness import capture
from torch_mpk import lowering
from torch_mpk.errors import UnsupportedError

REFUSED: dict[str, tuple[Callable, str]] = {
    "complex": (lambda x: x.to(torch.complex64), "complex64"),
    "sort": (lambda x: x.sort(-1)[0], "aten.sort"),
    "topk": (lambda x: x.topk(2)[0], "aten.topk"),
    "cumprod": (lambda x: x.cumprod(-1), "aten.cumprod"),
    "boolean index": (lambda x: x.index_put((x > 0,), x[0, 0]), "bool"),
    "accumulate": (lambda x: x.index_put_((torch.arange(2),), x[:2], accumulate=True), "accumulate"),
    "training dropout": (lambda x: F.dropout(x, 0.5, training=True), "dropout"),
    "reflection": (lambda x: F.pad(x, (1, 1), mode="reflect"), "reflect"),
    "floor division": (lambda x: x // 2, "rounding_mode"),
    "large product": (lambda x: x.new_ones(4096, 4096) @ x.new_ones(4096, 64), "matrix product"),
    "large constant": (lambda x: x[0, :1] + torch.tensor(list(range(40))), "constant of 40"),
    "random": (lambda x: x + torch.rand(4), "aten.rand"),
    "convolution across channels": (lambda x: F.conv1d(x[None], x[:, :, None]), "aten.convolution"),
    "convolution with strides": (lambda x: F.conv1d(x[None], x[:, None], stride=2, groups=4), "aten.convolution"),
    "convolution of many taps": (
        lambda x: F.conv1d(x[None], x.repeat(1, 5)[:, None], padding=16, groups=4),
        "aten.conv",
    ),
    "empty": (lambda x: x[:0] * 2, "without elements"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_operations_are_named(name: str) -> None:
    fn, words = REFUSED[name]
    module = capture(fn, torch.randn(4, 4), mode="fake")
    reasons = [r for n in module.graph.nodes if (r := lowering.supports(n)) is not None]
    assert any(words in reason for reason in reasons), reasons
    with pytest.raises(UnsupportedError) as error:
        lowering.lower(module)
    assert error.value.node in {n.name for n in module.graph.nodes}


def test_tensors_on_two_devices_are_refused() -> None:
    module = capture(lambda x, y: x + y, torch.randn(4), torch.randn(4))
    add = next(n for n in module.graph.nodes if n.op == "call_function")
    with torch._subclasses.FakeTensorMode():
        add.args[1].meta["val"] = torch.empty(4, device="meta")
    assert "devices" in lowering.supports(add)


@pytest.mark.parametrize(("rows", "is_taken"), [(16, True), (1024, False)])
def test_matrices_times_vectors_are_taken_while_reading_them_takes_longest(rows: int, is_taken: bool) -> None:
    """The states of Mamba: 64 x 128 for each of 48 heads."""
    with torch._subclasses.FakeTensorMode():
        module = capture(torch.bmm, torch.empty(rows * 48, 64, 128), torch.empty(rows * 48, 128, 1))
    product = next(n for n in module.graph.nodes if n.op == "call_function")
    assert (lowering.supports(product) is None) == is_taken
