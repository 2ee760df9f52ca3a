"""What capture makes of the decode steps of Hugging Face models, and of graphs written for the purpose."""

from collections import Counter

import expecttest
import pytest
import torch
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing

from tests.thinned import thinned
from torch_mpk.capture.graph import Captured, capture, source_line
from torch_mpk.errors import UnsupportedError
from torch_mpk.testing.tiny import Decoding, random_ids, tiny_model


def capture_call(function, *args, specialize=False, **kwargs) -> list[Captured]:
    """The graphs that calling ``torch.compile(function)`` captures."""
    torch.compiler.reset()
    captured = []

    def backend(gm, example_inputs):
        captured.append(capture(gm, example_inputs, specialize=specialize))
        return gm.forward

    torch.compile(function, backend=backend)(*args, **kwargs)
    return captured


def capture_decode(arch: str, attention: str, mask: str, num_steps: int = 1, **kwargs) -> Captured:
    """The graph of the last of some decode steps of a one-layer model."""
    torch.compiler.reset()
    model = tiny_model(arch, attention=attention, num_layers=1)
    captured = []

    def backend(gm, example_inputs):
        captured.append(capture(gm, example_inputs, **kwargs))
        return gm.forward

    decoding = Decoding(model, random_ids(2, 5), mask=mask)
    step = torch.compile(model, backend=backend)
    with torch.inference_mode():
        for _ in range(num_steps):
            decoding.step(step, random_ids(2, 1))
    return captured[-1]


def histogram(captured: Captured) -> Counter:
    calls = (node for node in captured.graph_module.graph.nodes if node.op == "call_function")
    return Counter(str(node.target).removeprefix("aten.") for node in calls)


class TestOperations(expecttest.TestCase):
    @pytest.mark.slow
    def test_of_decode_steps(self):
        variants = [
            (arch, attention, mask)
            for arch in ("qwen3", "llama")
            for attention in ("sdpa", "eager")
            for mask in ("none", "2d")
        ]
        counts = [histogram(capture_decode(*variant)) for variant in variants]
        table = [" ".join(f"{'/'.join(v)[:3] + v[1][:1] + v[2][:1]:>5}" for v in variants)]
        for name in sorted(set().union(*counts)):
            table.append(" ".join(f"{count[name] or '':>5}" for count in counts) + f"  {name}")
        self.assertExpectedInline(
            "\n".join(table),
            """\
qwesn qwes2 qween qwee2 llasn llas2 llaen llae2
          2           2           2           2  __and__.Tensor
   13    12    14    13    11    10    12    11  add.Tensor
    1     1     1     1     1     1     1     1  add_.Tensor
    4     4     4     4     4     4     4     4  arange.default
    3     3     3     3     3     3     3     3  cat.default
    1     1     1     1     1     1     1     1  cos.default
                1     1                 1     1  dropout.default
    1     1     1     1     1     1     1     1  embedding.default
    3     3     3     3     3     3     3     3  expand.default
          1           1           1           1  index.Tensor
    2     2     2     2     2     2     2     2  index_copy_.default
    1     1     1     1     1     1     1     1  le.Tensor
    8     8     8     8     8     8     8     8  linear.default
                2     2                 2     2  matmul.default
    5     5     5     5     3     3     3     3  mean.dim
   18    18    19    19    14    14    15    15  mul.Tensor
    2     2     2     2     2     2     2     2  neg.default
          1           1           1           1  new_ones.default
          1           1           1           1  pad.default
    5     5     5     5     3     3     3     3  pow.Tensor_Scalar
    4     4     3     3     4     4     3     3  reshape.default
    5     5     5     5     3     3     3     3  rsqrt.default
    1     1                 1     1              scaled_dot_product_attention.default
    1     1     1     1     1     1     1     1  silu.default
    1     1     1     1     1     1     1     1  sin.default
    4     4     4     4     4     4     4     4  slice.Tensor
                1     1                 1     1  softmax.int
    1     2     1     2     1     2     1     2  to.device
   13    13    14    14     9     9    10    10  to.dtype
    1     3     1     3     1     3     1     3  to.dtype_layout
    4     4     5     5     4     4     5     5  transpose.int
   12    14    12    14    12    14    12    14  unsqueeze.default
    3     3     3     3     3     3     3     3  view.default
                1     1                 1     1  where.ScalarOther
                1     1                 1     1  zeros.default""",
        )


@pytest.fixture(scope="module")
def decode() -> Captured:
    return capture_decode("qwen3", "sdpa", "2d", num_steps=2)


def test_every_call_knows_its_value_and_where_it_comes_from(decode):
    calls = [node for node in decode.graph_module.graph.nodes if node.op == "call_function"]
    assert all({"val", "stack_trace", "nn_module_stack"} <= node.meta.keys() for node in calls)
    linear = next(node for node in calls if node.target is torch.ops.aten.linear.default)
    assert "modeling_qwen3.py:" in source_line(linear)
    assert source_line(linear).endswith(" in forward")
    assert "self_attn.q_proj" in list(linear.meta["nn_module_stack"].values())[-1][0]


def test_inputs_are_described(decode):
    placeholders = [node for node in decode.graph_module.graph.nodes if node.op == "placeholder"]
    assert len(placeholders) == len(decode.inputs)
    sources = {graph_input.source.split(".")[-1]: graph_input for graph_input in decode.inputs}
    assert {name for name, graph_input in sources.items() if graph_input.is_mutated} == {
        "keys", "values", "cumulative_length",
    }  # fmt: skip
    parameters = [graph_input for graph_input in decode.inputs if graph_input.is_parameter]
    assert len(parameters) == len(list(tiny_model(num_layers=1).parameters()))
    assert all("_parameters['weight']" in graph_input.source for graph_input in parameters)
    assert "mutated torch.bfloat16[2, 2, 32, 16]" in str(decode)


def test_a_growing_mask_is_one_symbol(decode):
    (symbol,) = [graph_input.value for graph_input in decode.inputs if not graph_input.is_tensor]
    (mask,) = [
        graph_input.value
        for graph_input in decode.inputs
        if "attention_mask" in graph_input.source and graph_input.is_tensor
    ]
    assert decode.is_symbolic
    assert mask.size(1).node.expr == symbol.node.expr


def test_capturing_a_symbol_does_not_make_dynamo_recompile():
    captured = capture_call(lambda x: x * x.shape[0], torch.ones(3))
    assert len(captured) == 1
    captured = []
    compiled = torch.compile(
        lambda x: x * 2 + x.shape[0], backend=lambda gm, ex: captured.append(capture(gm, ex)) or gm.forward
    )
    for size in range(3, 9):
        compiled(torch.ones(size))
    assert [graph.is_symbolic for graph in captured] == [False, True]


def test_specialising_replaces_symbols_by_their_values():
    decode = capture_decode("llama", "sdpa", "2d", num_steps=2, specialize=True)
    assert not decode.is_symbolic
    assert [g.value for g in decode.inputs if not g.is_tensor] == [7]


def test_a_size_condition_that_dynamo_does_not_check_is_refused():
    gm = torch.fx.symbolic_trace(lambda size, x: x.view(-1, 2))
    sizes = []
    torch.compile(lambda x: x + 1, dynamic=True, backend=lambda g, ex: sizes.extend(ex) or g.forward)(torch.ones(6))
    size, x = sizes
    for node, value in zip(gm.graph.nodes, (size, x), strict=False):
        node.meta["example_value"] = value if node.name == "size" else torch.empty(6).expand(6)
    placeholder = list(gm.graph.nodes)[1]
    placeholder.meta["example_value"] = _Symbolic(size)
    with pytest.raises(UnsupportedError, match="sizes must satisfy"):
        capture(gm, [size, x])
    assert capture(gm, [size, x], specialize=True).inputs[1].value.shape == (6,)


class _Symbolic:
    """Stands for Dynamo's fake tensor of one symbolic size."""

    def __init__(self, size: torch.SymInt) -> None:
        self._size = size

    def size(self) -> list[torch.SymInt]:
        return [self._size]

    def stride(self) -> list[int]:
        return [1]


@pytest.mark.parametrize("attention", thinned(["sdpa", "eager"], 0))
def test_the_captured_graph_does_what_eager_does(attention):
    model = tiny_model("llama", attention=attention)
    prompt = random_ids(2, 5)
    ours, eager = Decoding(model, prompt, mask="2d"), Decoding(model, prompt, mask="2d")
    step = torch.compile(model, backend=lambda gm, example_inputs: capture(gm, example_inputs).graph_module.forward)
    with torch.inference_mode():
        for _ in range(3):
            token = random_ids(2, 1)
            assert torch.equal(ours.step(step, token), eager.step(model, token))
    assert all(map(torch.equal, ours.state(), eager.state()))


def test_grad_and_autocast_switches_without_effect_are_dropped():
    def function(x):
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            y = x.detach() * 2
        return y + torch.tensor(3.0)

    (captured,) = capture_call(function, torch.ones(4))
    assert histogram(captured) == {"mul.Tensor": 1, "add.Tensor": 1, "full.default": 1}
    assert torch.equal(captured.graph_module(torch.ones(4))[0], torch.full((4,), 5.0))


def test_autocast_inside_the_graph_is_refused():
    def function(x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return x @ x

    with pytest.raises(Exception, match="autocast is entered inside the graph"):
        capture_call(function, torch.ones(4, 4))


def test_a_node_that_cannot_be_traced_is_named():
    gm = torch.fx.symbolic_trace(lambda x: torch.relu(x) @ x)
    with pytest.raises(UnsupportedError, match="matmul: it cannot be traced on fake tensors"):
        capture(gm, [torch.ones(2, 3)])


def test_tensors_that_tracing_does_not_see_are_refused():
    def unseen(x):
        with disable_proxy_modes_tracing():
            return torch.relu(x)

    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    graph.output(graph.call_function(torch.add, (graph.call_function(unseen, (x,)), x)))
    with pytest.raises(UnsupportedError, match="an operation computes tensors that tracing does not see"):
        capture(torch.fx.GraphModule({}, graph), [torch.ones(4, 4)])


def test_an_input_that_is_no_tensor_has_a_stand_in():
    captured = capture(torch.fx.symbolic_trace(lambda x, y: x), [torch.ones(2), object()])
    assert [graph_input.is_foreign for graph_input in captured.inputs] == [False, True]


def test_equal_keys_mean_equal_graphs():
    def key(function, *args):
        return capture_call(function, *args)[0].key()

    x = torch.ones(4, 4)
    base = key(lambda x: x * 2, x)
    assert base == key(lambda x: x * 2, torch.zeros(4, 4))
    others = [
        key(lambda x: x * 3, x),
        key(lambda x: x + 2, x),
        key(lambda x: x * 2, x.double()),
        key(lambda x: x * 2, x[:2]),
    ]
    others.append(key(lambda x: x * 2, x.t()[:3].t()))
    constants = [
        key(lambda x: x * torch.tensor([1.0, 2.0]), x[:, :2]),
        key(lambda x: x * torch.tensor([1.0, 5.0]), x[:, :2]),
    ]
    assert len({base, *others, *constants}) == 8


def test_a_python_float_that_changes_is_specialised():
    def function(x, scale):
        return x * scale

    captured, refused = [], []

    def backend(gm, example_inputs):
        try:
            captured.append(capture(gm, example_inputs))
        except UnsupportedError as error:
            refused.append(str(error))
            captured.append(capture(gm, example_inputs, specialize=True))
        return gm.forward

    compiled = torch.compile(function, backend=backend)
    for scale in (0.5, 0.25, 0.125):
        compiled(torch.ones(3), scale)
    assert refused == ["L['scale'] is a Python number that differs from call to call"]
    assert captured[-1].graph_module(torch.full((3,), 8.0), 7.0)[0].tolist() == [2.0] * 3


def test_data_of_a_tensor_is_the_tensor():
    linear = torch.nn.Linear(8, 8)

    def function(x):
        linear.bias.data.add_(1)
        return torch.nn.functional.linear(x.data, linear.weight.data, linear.bias).data + 1

    x, before = torch.randn(2, 8), linear.bias.detach().clone()
    with torch.inference_mode():
        actual = torch.compile(function, backend="mpk", options={"fallback": "error"})(x)
        torch.testing.assert_close(actual, torch.nn.functional.linear(x, linear.weight, before + 1) + 1)
    torch.testing.assert_close(linear.bias.detach(), before + 1)


class LoadedParameter(torch.nn.Parameter):
    """As engines have them: with attributes, and operations that are a tensor's."""

    def __new__(cls, data, **kwargs):
        return super().__new__(cls, data, requires_grad=False)

    @property
    def is_loaded(self):
        return True


def test_a_parameter_s_own_class_is_a_plain_tensor_where_it_changes_no_operation():
    model, x = torch.nn.Linear(8, 8), torch.randn(2, 8)
    model.weight = LoadedParameter(torch.randn(8, 8))
    with torch.inference_mode():
        actual = torch.compile(model, backend="mpk", options={"fallback": "error"})(x)
        torch.testing.assert_close(actual, torch.nn.functional.linear(x, model.weight, model.bias))
