"""The level below layers: operands and their partition over a grid, checked against the signature."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torch_mpk import PersistentKernel, TBGraph
from torch_mpk.errors import GridError, LayerError, TaskAttributeError, UnknownTaskError
from torch_mpk.persistent_kernel.grid import check_grid, split_dims
from torch_mpk.registry import get

WHOLE = (-1, -1, -1)


@pytest.fixture
def kernel():
    return PersistentKernel(test_mode=True)


@pytest.fixture
def tensors(kernel):
    made = {"x": torch.randn(4, 8), "w": torch.randn(6, 8), "y": torch.full((4, 6), torch.nan), "n": torch.randn(8)}
    return {name: kernel.attach_input(t, name) for name, t in made.items()}


def test_a_task_as_mirage_registers_one(kernel, tensors):
    out = torch.full((4, 8), torch.nan)
    graph = TBGraph((4, 1, 1), kernel.block_dim, 1, 64)
    graph.new_input(tensors["x"], (0, -1, -1), 1, True)
    graph.new_input(tensors["n"], WHOLE, 0, True)
    graph.new_input(kernel.attach_input(out, "out"), (0, -1, -1), 1, True)
    kernel.register_task(graph, "rms_norm", [1e-5, "torch"])
    kernel.compile()
    kernel.run_test_mode()
    x, weight = tensors["x"].attached, tensors["n"].attached
    torch.testing.assert_close(out, torch.nn.functional.rms_norm(x, (8,), weight, 1e-5))


def test_absent_operands_and_several_axes(kernel, tensors):
    graph = TBGraph((3, 2, 1))
    graph.new_input(tensors["x"], (-1, 0, -1))
    graph.new_input(tensors["w"], (0, -1, -1), 1)
    graph.new_input(None)
    graph.new_input(tensors["y"], (1, 0, -1), is_write=True)
    kernel.register_task(graph, "linear")
    kernel.compile()
    kernel.run_test_mode()
    x, w, y = (tensors[name].attached for name in "xwy")
    torch.testing.assert_close(y, x @ w.T)


def linear(kernel, tensors, x=WHOLE, w=(0, -1, -1), y=(1, -1, -1), grid=(3, 1, 1), writes=True, forloop=1, steps=1):
    graph = TBGraph(grid, None, steps)
    graph.new_input(tensors["x"], x, forloop)
    graph.new_input(tensors["w"], w, forloop)
    graph.new_input(tensors["y"], y, -1, writes)
    return kernel.register_task(graph, "linear")


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"grid": (4, 1, 1)}, r"TBGraph: w: x=4 splits dimension 0 of \[6, 8\], expected a divisor of 6"),
        ({"w": (2, -1, -1)}, "w: dimension 2 for x, expected -1 to 1"),
        ({"w": (0, -1)}, r"w: partition=\(0, -1\), expected three dimensions"),
        ({"w": WHOLE}, r"linear: axis x of grid_dim=\(3, 1, 1\) splits N, expected weight split along it too"),
        ({"y": WHOLE}, r"splits N, expected y split along it too: give y partition\[0\]=1"),
        ({"w": WHOLE, "y": WHOLE}, "splits nothing, expected one of the dimensions it may split: R, N"),
        ({"x": (1, -1, -1), "w": (1, -1, -1), "grid": (2, 1, 1)}, "splits K, N, expected one of"),
        ({"x": (1, -1, -1), "w": (1, -1, -1), "y": WHOLE, "grid": (2, 1, 1)}, "splits K, expected one of"),
        ({"steps": 3}, r"x: forloop=3 splits dimension 1 of \[4, 8\]"),
        ({"grid": (3, 1)}, "TBGraph: grid_dim=.*expected three whole numbers"),
    ],
)
def test_partitions_that_do_not_fit(kernel, tensors, arguments, match):
    with pytest.raises(GridError, match=match):
        linear(kernel, tensors, **arguments)


def test_operands_that_do_not_fit(kernel, tensors):
    with pytest.raises(LayerError, match=r"y is written: pass new_input\(..., is_write=True\)"):
        linear(kernel, tensors, writes=False)
    with pytest.raises(GridError, match="forloop_range=0, expected an int > 0"):
        TBGraph((1, 1, 1), None, 0)
    graph = TBGraph((1, 1, 1))
    graph.new_input(tensors["x"])
    with pytest.raises(
        LayerError, match=r"the graph has 1 operands, expected 3 or 4 \(signature.*pass new_input\(None\)"
    ):
        kernel.register_task(graph, "linear")
    with pytest.raises(UnknownTaskError, match="no task is named 'lineer'"):
        kernel.register_task(graph, "lineer")
    graph = TBGraph((1, 1, 1))
    for name in "xnx":
        graph.new_input(tensors[name], is_write=True)
    with pytest.raises(LayerError, match="3 params, expected at most 2: eps, style"):
        kernel.register_task(graph, "rms_norm", [1e-5, "torch", 3])
    with pytest.raises(TaskAttributeError, match="attribute .'style'. is missing"):
        kernel.register_task(graph, "rms_norm", [1e-5])


def test_what_instances_of_a_task_may_split():
    def of(name):
        dims = {d: 4 for o in (*get(name).inputs, *get(name).outputs) for d in o.dims if not d.isdigit() and d != "..."}
        leading = {"...0": 4} if any("..." in o.dims for o in get(name).inputs) else {}
        return split_dims(get(name), leading | dims)

    assert of("linear") == ["R", "N"]
    assert of("rms_norm") == ["R"]
    assert of("rope") == ["B", "H"]
    assert of("attention") == ["B", "H", "V"]
    assert of("silu_mul") == ["...0"]
    assert of("embedding") == ["...0", "H"]
    assert of("softmax") == of("argmax") == ["...0"]
    assert of("kv_write") == ["B", "G", "L", "D"]


@given(st.tuples(*[st.integers(1, 6)] * 3), st.lists(st.integers(1, 12), max_size=3))
def test_a_grid_fits_when_its_axes_divide_dimensions_of_their_own(grid, sizes):
    dims = {f"d{i}": size for i, size in enumerate(sizes)}
    padded = [*sizes, 1, 1, 1]
    fits = any(all(size % n == 0 for n, size in zip(grid, chosen)) for chosen in itertools.permutations(padded, 3))
    if fits:
        check_grid("layer", grid, dims, list(dims))
    else:
        with pytest.raises(GridError):
            check_grid("layer", grid, dims, list(dims))
