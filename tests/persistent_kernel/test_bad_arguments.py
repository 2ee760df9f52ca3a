"""What a PersistentKernel is given that it cannot take: an error that names the layer and the argument, at the call."""

import numpy as np
import pytest
import torch

from tests.persistent_kernel.test_paged_attention import GROUPS, HEADS, D, batch
from torch_mpk import PersistentKernel, TBGraph
from torch_mpk.errors import GridError, IndexRangeError, LayerError, OptionError, TaskAttributeError, TaskError


@pytest.fixture
def kernel():
    return PersistentKernel(test_mode=True)


@pytest.fixture
def tensors(kernel):
    made = {"x": torch.randn(4, 8), "n": torch.randn(8), "w": torch.randn(6, 8), "y": torch.zeros(4, 8)}
    return {name: kernel.attach_input(tensor, name) for name, tensor in made.items()}


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({"num_workers": "4"}, LayerError, "num_workers='4', expected an int > 0 or None"),
        ({"num_workers": 2.5}, LayerError, "num_workers=2.5, expected an int > 0 or None"),
        ({"page_size": True}, LayerError, "page_size=True, expected an int > 0 or None"),
        ({"max_num_pages": [1]}, LayerError, r"max_num_pages=\[1\], expected an int > 0 or None"),
        ({"options": 5}, OptionError, "options: expected a dict of options by their names, got 5"),
        ({"meta_tensors": 5}, LayerError, "meta_tensors=5, expected a dict of tensors by their names"),
        (
            {"meta_tensors": {"a": np.zeros(1)}},
            LayerError,
            "has 'a': a numpy.ndarray, expected a name and a torch.Tensor",
        ),
        ({"meta_tensors": {5: torch.ones(1)}}, LayerError, "has 5: a torch.Tensor, expected a name and a torch.Tensor"),
    ],
)
def test_the_constructor(arguments, error, match):
    with pytest.raises(error, match=match):
        PersistentKernel(**arguments)


@pytest.mark.parametrize(
    ("tensor", "match"),
    [
        (np.zeros(3), "t: expected a torch.Tensor, got a numpy.ndarray: torch.as_tensor makes one of an array"),
        ([1.0], "t: expected a torch.Tensor, got a list"),
        (None, "t: expected a torch.Tensor, got None"),
        (torch.empty(3, device="meta"), "t: expected a tensor on cpu or cuda, got one on meta"),
    ],
    ids=["numpy", "list", "None", "meta"],
)
def test_what_is_attached(kernel, tensor, match):
    with pytest.raises(LayerError, match=f"^attach_input: {match}"):
        kernel.attach_input(tensor, "t")


@pytest.mark.filterwarnings("ignore::UserWarning")  # PyTorch's, of both kinds
def test_tensors_that_are_no_plain_ones(kernel):
    quantized = torch.quantize_per_tensor(torch.zeros(3), 0.1, 0, torch.qint8)
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    for kind, tensor in (("quantized", quantized), ("nested", nested)):
        with pytest.raises(LayerError, match=f"^attach_input: t: expected a plain tensor, got a {kind} one"):
            kernel.attach_input(tensor, "t")


@pytest.mark.parametrize("name", [5, None, "", b"a"])
def test_names(kernel, tensors, name):
    match = f"name={name!r}, expected a string that is not empty"
    with pytest.raises(LayerError, match=f"^attach_input: {match}"):
        kernel.attach_input(torch.ones(2), name)
    if name is not None:  # which is a number
        with pytest.raises(LayerError, match=f"^new_tensor: {match}"):
            kernel.new_tensor((2,), name=name)
        with pytest.raises(LayerError, match=f"^fuse_tensors: {match}"):
            kernel.fuse_tensors([tensors["w"]] * 2, 0, 1, name)


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"dims": (-1, 4)}, r"dims=\(-1, 4\), expected a list of ints >= 0"),
        ({"dims": 5}, "dims=5, expected a list of ints >= 0"),
        ({"dims": "ab"}, "dims='ab', expected a list of ints >= 0"),
        ({"dims": (2.0, 3)}, r"dims=\(2.0, 3\), expected a list of ints >= 0"),
        ({"dims": (2, 3), "dtype": "bfloat16"}, "dtype='bfloat16', expected a torch.dtype"),
        ({"dims": (2, 3), "dtype": float}, "dtype=<class 'float'>, expected a torch.dtype"),
        ({"dims": (2, 3), "strides": 5}, r"strides=5, expected those of a contiguous tensor, \[3, 1\]"),
        ({"dims": (2, 3), "strides": (1, 2)}, r"strides=\(1, 2\), expected those of a contiguous tensor, \[3, 1\]"),
        ({"dims": (2, 3), "io_category": 3}, "io_category=3, expected 'cuda_tensor'"),
    ],
)
def test_new_tensors(kernel, arguments, match):
    with pytest.raises(LayerError, match=f"^new_tensor: tensor_0: {match}"):
        kernel.new_tensor(**arguments)
    kernel.new_tensor((2, 3), name="tensor_0")  # what was refused has taken no name


@pytest.mark.parametrize("method", ["fuse_tensors", "shuffle_tensors"])
@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"dim": "0"}, "dimension '0', expected 0 to 1"),
        ({"num_groups": "2"}, "num_groups='2', expected a divisor of w's 6"),
        ({"num_groups": True}, "num_groups=True, expected a divisor of w's 6"),
        ({"num_groups": 2.0}, "num_groups=2.0, expected a divisor of w's 6"),
        ({"inputs": None}, "inputs is None, expected a list of attached tensors"),
        ({"inputs": torch.ones(2)}, "inputs is a torch.Tensor, expected a list of attached tensors"),
        ({"inputs": []}, "inputs is empty, expected at least one tensor"),
        ({"inputs": [1]}, r"inputs\[0\] is a int: attach_input the tensor first"),
    ],
)
def test_fused_tensors(kernel, tensors, method, arguments, match):
    given = {"inputs": [tensors["w"]] * 2, "dim": 0, "num_groups": 1} | arguments
    with pytest.raises(LayerError, match=f"^{method}: (tensor_4: )?{match}"):
        getattr(kernel, method)(*given.values())


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({"eps": "small"}, TaskAttributeError, "rmsnorm_layer: rms_norm: eps='small', expected a value of type float"),
        ({"eps": None}, TaskAttributeError, "rmsnorm_layer: rms_norm: eps=None, expected a value of type float"),
        ({"style": 5}, TaskAttributeError, "rmsnorm_layer: rms_norm: style=5, expected a value of type str"),
        ({"weight": "w"}, TaskError, r"rmsnorm_layer: rms_norm: weight has shape \(6, 8\), expected 1 dimension"),
        ({"input": torch.ones(4, 8)}, LayerError, "rmsnorm_layer: input is a torch.Tensor: attach_input the tensor"),
        ({"input": None}, LayerError, "rmsnorm_layer: input is None: attach_input the tensor"),
        ({"block_dim": (64, 1, 1)}, GridError, r"rmsnorm_layer: block_dim=\(64, 1, 1\), .*, so leave block_dim out$"),
        ({"grid_dim": "abc"}, GridError, r"rmsnorm_layer: grid_dim='abc', expected three .*leave grid_dim out, and"),
        ({"grid_dim": (True, 1, 1)}, GridError, r"rmsnorm_layer: grid_dim=\(True, 1, 1\), expected three whole"),
        ({"grid_dim": (3, 1, 1)}, GridError, r"axes that divide dimensions it may split: R=4: leave grid_dim out"),
    ],
)
def test_layers_have_the_names_that_they_were_called_by(kernel, tensors, arguments, error, match):
    given = {"input": "x", "weight": "n", "output": "y"} | arguments
    given = {name: tensors.get(value, value) if isinstance(value, str) else value for name, value in given.items()}
    with pytest.raises(error, match=match):
        kernel.rmsnorm_layer(**given)


def test_a_layer_of_a_task_calls_operands_as_it_was_called(kernel, tensors):
    with pytest.raises(LayerError, match="linear_layer: input is a torch.Tensor: attach_input"):
        kernel.linear_layer(input=torch.ones(4, 8), weight=tensors["w"])
    with pytest.raises(LayerError, match="linear_layer: x is a torch.Tensor: attach_input"):
        kernel.linear_layer(x=torch.ones(4, 8), weight=tensors["w"])


def test_sums_of_shapes_that_do_not_broadcast(kernel, tensors):
    match = r"elementwise_add_layer: input_a=x has shape \[4, 8\] and input_b=w \[6, 8\], expected one shape"
    with pytest.raises(LayerError, match=match):
        kernel.elementwise_add_layer(tensors["x"], tensors["w"])


def test_graphs_of_thread_blocks(kernel, tensors):
    with pytest.raises(GridError, match=r"TBGraph: grid_dim=None, .*: \(1, 1, 1\) splits nothing$"):
        TBGraph(None)
    with pytest.raises(GridError, match="TBGraph: forloop_range='1', expected an int > 0: 1 is no loop$"):
        TBGraph((1, 1, 1), forloop_range="1")
    with pytest.raises(GridError, match="TBGraph: block_dim=5, expected"):
        TBGraph((1, 1, 1), 5)
    graph = TBGraph((1, 1, 1))
    for tensor in (torch.ones(2), 5):
        with pytest.raises(LayerError, match="TBGraph: tensor is a .*: attach_input it first"):
            graph.new_input(tensor)
    for partition in ("abc", 5, (1.0, -1, -1), (0, -1)):
        with pytest.raises(GridError, match="x: partition=.*, expected three dimensions: -1 splits nothing$"):
            graph.new_input(tensors["x"], partition)
    with pytest.raises(GridError, match="x: dimension 'x' for forloop, expected -1 to 1: -1 splits nothing$"):
        graph.new_input(tensors["x"], forloop_dim="x")
    with pytest.raises(GridError, match="x: x=3 splits dimension 0 of .*, expected a divisor of 4: make grid_dim one$"):
        TBGraph((3, 1, 1)).new_input(tensors["x"], (0, -1, -1))
    with pytest.raises(LayerError, match=r"rms_norm: expected a TBGraph, got a int: TBGraph\(grid_dim\) makes one"):
        kernel.register_task(5, "rms_norm")
    with pytest.raises(LayerError, match="rms_norm: params=5, expected a list or a dict of eps, style"):
        kernel.register_task(graph, "rms_norm", 5)


def test_folders_that_cannot_be_written_to(kernel, tensors, tmp_path):
    (tmp_path / "file").touch()
    kernel.identity_layer(tensors["x"], tensors["y"])
    for folder, why in ((tmp_path / "file", "File exists"), (tmp_path / "file" / "x", "Not a directory"), (5, "a int")):
        with pytest.raises(LayerError, match=rf"compile: output_dir=.*, expected a folder that .* \(.*{why}\)"):
            kernel.compile(output_dir=folder)
    kernel.compile(output_dir=tmp_path / "new")  # and so none of these has broken it
    kernel.run_test_mode()
    assert torch.equal(tensors["y"].attached, tensors["x"].attached)


@pytest.mark.parametrize(
    ("name", "index", "value", "match"),
    [
        ("paged_kv_indices_buffer", 0, 6, r"paged_kv_indices_buffer\[0\] is 6, expected 0 to 5, the pages"),
        ("paged_kv_indices_buffer", 1, -1, r"paged_kv_indices_buffer\[1\] is -1, expected 0 to 5, the pages"),
        (
            "paged_kv_last_page_len_buffer",
            0,
            17,
            r"last_page_len_buffer\[0\] is 17, expected 1 to 16, the positions of",
        ),
        ("paged_kv_last_page_len_buffer", 1, 0, r"last_page_len_buffer\[1\] is 0, expected 1 to 16, the positions of"),
        ("paged_kv_last_page_len_buffer", 1, 1, "the length of request 1 is 1, expected 2, its new tokens, to 40, the"),
        ("paged_kv_indptr_buffer", 1, 4, r"paged_kv_indptr_buffer is \[0, 4, 3\], expected numbers in ascending order"),
        ("paged_kv_indptr_buffer", 2, 7, r"paged_kv_indptr_buffer is \[0, 2, 7\], expected .* from 0 to 6, the pages"),
        ("qo_indptr_buffer", 2, 9, r"qo_indptr_buffer is \[0, 1, 9\], expected .* from 0 to 4, the tokens there are"),
        ("qo_indptr_buffer", 0, -1, r"qo_indptr_buffer is \[-1, 1, 3\], expected .* from 0 to 4, the tokens there are"),
    ],
)
def test_requests_that_caches_cannot_hold(name, index, value, match):
    tokens, page_size, num_pages = 4, 16, 6
    meta, _ = batch([(1, 20), (2, 5)], page_size, num_pages)
    packed = torch.randn(tokens, (HEADS + 2 * GROUPS) * D)
    caches = [torch.randn(num_pages, page_size, GROUPS, D) for _ in range(2)]
    tables, out = [torch.randn(40, D) for _ in range(2)], torch.full((tokens, HEADS * D), torch.nan)
    with PersistentKernel(test_mode=True, meta_tensors=meta) as kernel:
        inputs = [kernel.attach_input(t, f"t{i}") for i, t in enumerate((packed, *caches, *tables, out))]
        kernel.paged_attention_layer(*inputs[:3], None, None, *inputs[3:])
        kernel.compile()
        kernel.run_test_mode()
        assert out[:3].abs().sum(1).gt(0).all()
        before, expected = [cache.clone() for cache in caches], out.clone()
        right = int(meta[name][index])
        meta[name][index] = value
        for run in (kernel, kernel.run_test_mode):
            with pytest.raises(IndexRangeError, match=f"^paged_attention_layer: .*{match}"):
                run()
        assert torch.equal(out, expected)
        assert all(map(torch.equal, caches, before))
        meta[name][index] = right
        kernel.run_test_mode()
        torch.testing.assert_close(out, expected)


def test_requests_without_new_tokens_may_have_anything():
    meta, _ = batch([(1, 20), (0, 5)], 16, 6)
    meta["paged_kv_last_page_len_buffer"][1] = 99
    caches = [torch.randn(6, 16, GROUPS, D) for _ in range(2)]
    with PersistentKernel(test_mode=True, meta_tensors=meta) as kernel:
        tensors = torch.randn(1, (HEADS + 2 * GROUPS) * D), *caches, torch.randn(40, D), torch.randn(40, D)
        x, k, v, cos, sin = (kernel.attach_input(t, f"t{i}") for i, t in enumerate(tensors))
        kernel.paged_attention_layer(x, k, v, None, None, cos, sin)
        kernel.compile()
        kernel.run_test_mode()
