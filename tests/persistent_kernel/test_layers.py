"""Every layer against the task it stands for, whatever its tensors are: attached, intermediate, fused or packed."""

import inspect
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import torch_mpk
from tests.tasks.every_task import FIRST_OF_EACH, ON_CUDA, SAMPLES
from tests.thinned import thinned
from torch_mpk import _C, PersistentKernel, registry
from torch_mpk.errors import GridError, LayerError, MpkWarning, TaskAttributeError, TaskError
from torch_mpk.persistent_kernel import task_layers
from torch_mpk.persistent_kernel.task_layers import TaskLayers, has_layer, layer_name
from torch_mpk.testing.emulator import SMEM_BYTES, emulate

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
OWN = [task for task in registry.tasks() if task.is_ours]
STORED_ONLY = {"quantise_rows"}  # whose result no program can copy to an attached tensor
WITH_LAYER = [
    case
    for case in thinned(SAMPLES, *FIRST_OF_EACH)
    if has_layer(case.values[0]) and case.values[0].name not in STORED_ONLY
]
CASES = [
    pytest.param(*case.values, device, marks=[*case.marks, *marks], id=f"{case.id}-{device}")
    for device, marks, tasks in (("cpu", [], None), ("cuda", [pytest.mark.gpu], ON_CUDA))
    for case in WITH_LAYER
    if tasks is None or case.values[0] in tasks
]
ROUNDING = {torch.bfloat16: 2.0**-6, torch.float16: 2.0**-9, torch.float32: 2.0**-16}


def poison(t: torch.Tensor) -> torch.Tensor:
    return t.fill_(torch.nan if t.dtype.is_floating_point else 77)


def comparable(t: torch.Tensor) -> torch.Tensor:
    """PyTorch compares no numbers of 4 bits."""
    return t.view(torch.uint8) if t.dtype == torch.float4_e2m1fn_x2 else t


def assert_near(ours: torch.Tensor, expected: torch.Tensor) -> None:
    bound = ROUNDING.get(expected.dtype, 0)
    torch.testing.assert_close(ours, expected, rtol=bound, atol=bound * max(1.0, expected.abs().max().item()))


def run(kernel: PersistentKernel) -> None:
    kernel.compile()
    kernel.run_test_mode()
    torch_mpk.synchronize()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("task", "sample", "device"), CASES)
def test_a_layer_runs_its_task(task, sample, dtype, device):
    operands, attrs = task.sample(sample, dtype, device)
    expected_operands = [None if t is None else t.clone() for t in operands]
    expected = task.results(task(*expected_operands, **attrs))
    with PersistentKernel(test_mode=True) as kernel:
        tensors = {o.name: t for o, t in zip(task.inputs, operands) if t is not None}
        tensors |= {o.name: poison(torch.empty_like(result)) for o, result in zip(task.outputs, expected)}
        attached = {name: kernel.attach_input(t, name) for name, t in tensors.items()}
        getattr(kernel, layer_name(task))(**attached, **attrs)
        run(kernel)
    for output, result in zip(task.outputs, expected):
        assert_near(tensors[output.name], result)
    for operand, wanted in zip(task.inputs, expected_operands):  # written as the reference does, or untouched
        if wanted is not None:
            assert torch.equal(comparable(tensors[operand.name]), comparable(wanted)), operand.name


def mlp(kernel: PersistentKernel, are_attached: bool, device: str = "cpu") -> dict[str, torch.Tensor]:
    """Norm, gate and up in four groups, activation, down and residual; returns the caller's tensors by name."""
    shapes = {"x": (3, 64), "norm": (64,), "gate": (96, 64), "up": (96, 64), "down": (64, 96), "out": (3, 64)}
    tensors = {name: torch.randn(shape, device=device) / shape[-1] ** 0.5 for name, shape in shapes.items()}
    attached = {name: kernel.attach_input(t, name) for name, t in tensors.items()}

    def made(name, *shape):
        if not are_attached:
            return kernel.new_tensor(shape, dtype=torch.float32, name=name)
        tensors[name] = torch.full(shape, torch.nan, device=device)
        return kernel.attach_input(tensors[name], name)

    normed = kernel.rmsnorm_layer(attached["x"], attached["norm"], made("normed", 3, 64), eps=1e-5)
    both = kernel.shuffle_tensors([attached["gate"], attached["up"]], 0, 4, "both")
    middle = kernel.linear_layer(input=normed, weight=both, output=made("middle", 3, 192), grid_dim=(8, 1, 1))
    activated = kernel.silu_mul_layer(input=middle, output=made("activated", 3, 96))
    kernel.linear_with_residual_layer(activated, attached["down"], attached["x"], attached["out"])
    tensors["out"].fill_(torch.nan)
    return tensors


def eager_mlp(t: dict[str, torch.Tensor]) -> torch.Tensor:
    normed = torch.nn.functional.rms_norm(t["x"], (64,), t["norm"], 1e-5)
    activated = torch.nn.functional.silu(normed @ t["gate"].T) * (normed @ t["up"].T)
    return t["x"] + activated @ t["down"].T


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("are_attached", [True, False])
def test_a_pipeline(are_attached, device):
    with PersistentKernel(test_mode=True) as kernel:
        tensors = mlp(kernel, are_attached, device)
        run(kernel)
        torch.testing.assert_close(tensors["out"], eager_mlp(tensors), rtol=1e-4, atol=1e-5)
        tensors["x"].normal_()  # the same kernel on new values
        kernel()
        torch_mpk.synchronize()
        torch.testing.assert_close(tensors["out"], eager_mlp(tensors), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("are_attached", [True, False])
def test_addresses_that_the_executable_refuses_make_a_run_eager(are_attached, monkeypatch):
    def refuse(*_):
        raise ValueError("input 0 of the megakernel: the address is not a multiple of 16")

    monkeypatch.setattr(_C.CpuExecutable, "call", refuse)
    with PersistentKernel(test_mode=True) as kernel:
        tensors = mlp(kernel, are_attached)
        with pytest.warns(MpkWarning, match="runs a call eagerly: input 0 of the megakernel: the address is not a"):
            run(kernel)
    torch.testing.assert_close(tensors["out"], eager_mlp(tensors), rtol=1e-4, atol=1e-5)


def test_the_generated_kernel_of_a_pipeline():
    with PersistentKernel(test_mode=True) as kernel:
        tensors = mlp(kernel, are_attached=True)
        kernel.compile()
        emulated = emulate(kernel.schedule.graph)
    emulated.launch(list(tensors.values()), [])
    torch.testing.assert_close(tensors["out"], eager_mlp(tensors), rtol=1e-4, atol=1e-5)


def test_a_layer_takes_more_than_16_tokens_on_a_gpu():
    shapes = {"x": (24, 64), "weight": (128, 64), "out": (24, 128)}
    tensors = {name: torch.randn(shape, dtype=torch.bfloat16) for name, shape in shapes.items()}
    with PersistentKernel(test_mode=True) as kernel:
        kernel.linear_layer(*(kernel.attach_input(t, name) for name, t in tensors.items()))
        kernel.compile()
        emulated = emulate(kernel.schedule.graph)
    emulated.launch(list(tensors.values()), [])
    assert_near(tensors["out"], torch.nn.functional.linear(tensors["x"], tensors["weight"]))


def test_intermediate_tensors_are_fused_away():
    with PersistentKernel(test_mode=True) as kernel:
        mlp(kernel, are_attached=False)
        kernel.compile()
        graph = kernel.schedule.graph
    schedule = _C.make_schedule(graph, _C.Target("cuda", 90, 132, SMEM_BYTES))
    bodies = [[graph.nodes[n].task for job in phase.jobs for n in job.body] for phase in schedule.phases]
    assert bodies == [["linear", "linear"], ["linear"]]


@settings(max_examples=25)
@given(data=st.data())
def test_fused_weights_have_the_layout_of_their_groups(data):
    num_groups = data.draw(st.integers(1, 4))
    rows = [num_groups * data.draw(st.integers(1, 5)) for _ in range(data.draw(st.integers(1, 3)))]
    is_attached, has_bias = data.draw(st.booleans()), data.draw(st.booleans())
    weights, x, bias = [torch.randn(n, 16) for n in rows], torch.randn(2, 16), torch.randn(sum(rows))
    out = torch.full((2, sum(rows)), torch.nan)
    with PersistentKernel(test_mode=True, num_workers=1) as kernel:
        fused = kernel.fuse_tensors(
            [kernel.attach_input(w, f"w{i}") for i, w in enumerate(weights)], 0, num_groups, "w"
        )
        assert fused.shape == (sum(rows), 16)
        output = kernel.attach_input(out, "out")
        bias_dt = kernel.attach_input(bias, "bias") if has_bias else None
        made = kernel.linear_layer(
            x=kernel.attach_input(x, "x"), weight=fused, bias=bias_dt, y=output if is_attached else None
        )
        if not is_attached:
            kernel.identity_layer(made, output)
        run(kernel)
    whole = torch.cat([c for group in zip(*(w.chunk(num_groups) for w in weights)) for c in group])
    torch.testing.assert_close(out, torch.nn.functional.linear(x, whole, bias if has_bias else None))


@pytest.mark.parametrize("dim", [0, 1])
def test_other_layers_read_fused_tensors_too(dim):
    parts = [torch.randn(4, 6), torch.randn(4, 6)]
    whole = torch.cat([c for group in zip(*(p.chunk(2, dim) for p in parts)) for c in group], dim)
    out = torch.full_like(whole, torch.nan)
    with PersistentKernel(test_mode=True) as kernel:
        fused = kernel.fuse_tensors([kernel.attach_input(p, f"p{i}") for i, p in enumerate(parts)], dim, 2, "fused")
        kernel.rms_norm_layer(x=fused, y=kernel.attach_input(out, "out"), eps=1e-5, style="torch")
        run(kernel)
    torch.testing.assert_close(out, torch.nn.functional.rms_norm(whole, whole.shape[-1:], eps=1e-5))


def test_aliases_take_what_mirage_hard_codes():
    x, table, ids = torch.randn(4, 32), torch.randn(10, 32), torch.tensor([[3], [0], [9], [3]])
    weight = torch.randn(32)
    outs = [torch.full((4, 32), torch.nan) for _ in range(4)]
    embedded = torch.full((4, 1, 32), torch.nan)
    best = torch.zeros(4, dtype=torch.int64)
    with PersistentKernel(test_mode=True) as kernel:
        x_dt, w_dt = kernel.attach_input(x, "x"), kernel.attach_input(weight, "w")
        out_dts = [kernel.attach_input(t, f"out{i}") for i, t in enumerate(outs)]
        kernel.rmsnorm_layer(x_dt, w_dt, out_dts[0], eps=0.5, style="gemma")
        kernel.elementwise_add_layer(x_dt, w_dt, out_dts[1], grid_dim=(4, 2, 1))
        kernel.identity_layer(x_dt, out_dts[2])
        kernel.embed_layer(
            kernel.attach_input(ids, "ids"), kernel.attach_input(table, "t"), kernel.attach_input(embedded, "e")
        )
        kernel.argmax_layer(input=x_dt, output=kernel.attach_input(best, "best"), grid_dim=(4, 1, 1))
        square = kernel.attach_input(torch.randn(32, 32), "square")
        kernel.rmsnorm_linear_layer(x_dt, w_dt, square, out_dts[3], eps=0.5)
        run(kernel)
    normed = torch.nn.functional.rms_norm(x, (32,), None, 0.5)
    torch.testing.assert_close(outs[0], normed * (1 + weight))
    assert torch.equal(outs[1], x + weight)
    assert torch.equal(outs[2], x)
    assert torch.equal(embedded, table[ids])
    assert torch.equal(best, x.argmax(-1))
    assert not outs[3].isnan().any()


def test_silu_mul_linear_with_residual_takes_packed_columns():
    packed, weight, residual = torch.randn(2, 16), torch.randn(4, 8), torch.randn(2, 4)
    out = torch.full((2, 4), torch.nan)
    with PersistentKernel(test_mode=True) as kernel:
        tensors = [
            kernel.attach_input(t, f"{i} layer[0].weight") for i, t in enumerate((packed, weight, residual, out))
        ]
        kernel.silu_mul_linear_with_residual_layer(*tensors)
        run(kernel)
    gate, up = packed.chunk(2, -1)
    torch.testing.assert_close(out, residual + (torch.nn.functional.silu(gate) * up) @ weight.T)


def test_an_output_may_be_an_input():
    x, weight = torch.randn(3, 8), torch.randn(8, 8)
    expected = x @ weight.T + x @ weight.T @ weight.T
    with PersistentKernel(test_mode=True) as kernel:
        x_dt, w_dt = kernel.attach_input(x, "x"), kernel.attach_input(weight, "w")
        kernel.linear_layer(x=x_dt, weight=w_dt, y=x_dt)
        kernel.linear_with_residual_layer(x_dt, w_dt, x_dt, x_dt)
        run(kernel)
    torch.testing.assert_close(x, expected)


def test_a_task_registered_later_is_a_layer():
    @torch_mpk.task("a[...], b[...] -> y[...]", role="pointwise")
    def layer_test_scaled_sum(a: torch.Tensor, b: torch.Tensor, *, scale: float = 2.0) -> torch.Tensor:
        """``scale * (a + b)``"""
        return scale * (a + b)

    packed, out = torch.randn(3, 8), torch.full((3, 4), torch.nan)
    with PersistentKernel(test_mode=True) as kernel:
        kernel.layer_test_scaled_sum_layer(
            input=kernel.attach_input(packed, "x"), output=kernel.attach_input(out, "y"), scale=3.0, grid_dim=(2, 3, 1)
        )
        run(kernel)
    torch.testing.assert_close(out, 3 * (packed.view(3, 2, 2, 2).sum(2).view(3, 4)))
    signature = inspect.signature(PersistentKernel.layer_test_scaled_sum_layer)
    assert list(signature.parameters) == ["self", "a", "b", "y", "scale", "grid_dim", "block_dim"]
    assert "scale * (a + b)" in (PersistentKernel.layer_test_scaled_sum_layer.__doc__ or "")


def test_every_layer_is_in_the_stub():
    stub = Path(task_layers.__file__).with_suffix(".pyi").read_text()
    for task in filter(has_layer, OWN):
        assert callable(getattr(TaskLayers, layer_name(task)))
        assert f"def {layer_name(task)}(" in stub


def _fails(build, error, match):
    kernel = PersistentKernel(test_mode=True)
    tensors = {"x": torch.randn(4, 8), "w": torch.randn(6, 8), "y": torch.randn(4, 6), "n": torch.randn(8)}
    attached = {name: kernel.attach_input(t, name) for name, t in tensors.items()}
    with pytest.raises(error, match=match):
        build(kernel, **attached)
    kernel.identity_layer(attached["x"], attached["x"])  # what was refused has left nothing behind that writes
    kernel.compile()
    before = [t.clone() for t in tensors.values()]
    kernel()
    assert all(map(torch.equal, tensors.values(), before))


ALIKE = {  # operands that hand-written code takes in one dtype only; the first is what the others are compared with
    "linear": ["x", "weight", "bias"],
    "rope": ["x", "cos", "sin"],
    "attention": ["q", "k_new", "v_new", "k_cache", "v_cache"],
    "paged_kv_write": ["cache", "new"],
    "paged_decode": ["q", "k_cache", "v_cache"],
}


@pytest.mark.parametrize("odd", [f"{task}.{operand}" for task in ALIKE for operand in ALIKE[task][1:]])
def test_operands_of_two_dtypes_are_named_by_the_layer(odd):
    name, odd = odd.split(".")
    task, first = registry.get(name), ALIKE[name][0]
    sample = next(sample for sample in task.samples if sample.get(odd, odd) is not None)
    operands, attrs = task.sample(sample, torch.bfloat16)
    kernel = PersistentKernel(test_mode=True)
    attached = {
        spec.name: kernel.attach_input(t.float() if spec.name == odd else t, f"my_{spec.name}")
        for spec, t in zip(task.inputs, operands)
        if t is not None
    }
    remedy = rf"attach my_{odd}.to\(torch.bfloat16\), or my_{first}.to\(torch.float32\)"
    what = f"{first}=my_{first} is torch.bfloat16 and {odd}=my_{odd} is torch.float32, expected one dtype: {remedy}"
    with pytest.raises(LayerError, match=f"{name}_layer: {what}"):
        getattr(kernel, layer_name(task))(**attached, **attrs)


@pytest.mark.parametrize(
    ("build", "error", "match"),
    [
        (
            lambda k, x, w, y, n: k.linear_layer(x=x, weight=w, y=y, grid_dim=(5, 1, 1)),
            GridError,
            r"linear_layer: grid_dim=\(5, 1, 1\), expected axes that divide dimensions it may split: R=4, N=6: leave",
        ),
        (
            lambda k, x, w, y, n: k.linear_layer(x=x, weight=w, y=y, grid_dim=(3, 2, 2)),
            GridError,
            r"grid_dim=\(3, 2, 2\), .*: leave grid_dim out, and it is inferred$",
        ),
        (
            lambda k, x, w, y, n: k.attach_input(torch.eye(4).to_sparse(), "s"),
            LayerError,
            r"s: expected a dense tensor, got one of layout torch.sparse_coo: attach its to_dense\(\)",
        ),
        (
            lambda k, x, w, y, n: k.linear_layer(x=x, weight=w, y=y, grid_dim=(0, 1)),
            GridError,
            r"expected three whole numbers from 1",
        ),
        (
            lambda k, x, w, y, n: k.rmsnorm_layer(x, n, grid_dim=(8, 1, 1)),
            GridError,
            r"grid_dim=\(8, 1, 1\), expected axes that divide dimensions it may split: R=4: leave",
        ),
        (
            lambda k, x, w, y, n: k.linear_layer(x=x, weight=w, y=y, block_dim=(64, 1, 1)),
            GridError,
            r"block_dim=\(64, 1, 1\), expected \(\d+, 1, 1\)",
        ),
        (
            lambda k, x, w, y, n: k.silu_mul_layer(input=x, grid_dim=(3, 1, 1)),
            GridError,
            r"x has 8 columns, which are 3 groups of 2, expected a multiple of 6",
        ),
        (
            lambda k, x, w, y, n: k.silu_mul_layer(
                input=k.linear_layer(x=x, weight=k.shuffle_tensors([w, w], 0, 3, "ww")), grid_dim=(2, 1, 1)
            ),
            GridError,
            r"tensor_\d+, which was written in 3 groups, expected \(3, y, z\)",
        ),
        (
            lambda k, x, w, y, n: k.silu_mul_layer(
                input=k.linear_layer(x=x, weight=k.fuse_tensors([w] * 4, 0, 3, "four"))
            ),
            LayerError,
            r"holds \(6, 6, 6, 6\) columns of its parts, expected \(12, 12\)",
        ),
        (
            lambda k, x, w, y, n: k.linear_layer(x=x, weight=n, y=y),
            TaskError,
            r"linear: weight has shape \(8,\), expected 2 dimensions: weight\[N, K\]",
        ),
        (
            lambda k, x, w, y, n: k.linear_layer(x=x, weight=w, y=x),
            TaskError,
            r"linear: y has N=8, but N=6 was bound by weight",
        ),
        (
            lambda k, x, w, y, n: k.linear_layer(x=x, weight=w, y=k.new_tensor((4, 6))),
            LayerError,
            r"linear_layer: tensor_\d+ is torch.bfloat16 \[4, 6\], expected torch.float32 \[4, 6\]",
        ),
        (
            lambda k, x, w, y, n: k.linear_layer(x=x, wight=w),
            TaskAttributeError,
            r"linear_layer: .*expected \(\*, x, weight, bias, y, .*\) or \(input, weight, output, .*, \*, bias",
        ),
        (
            lambda k, x, w, y, n: k.linear_layer(x, w, y, n),
            GridError,
            r"linear_layer: grid_dim=GlobalTensor.*, expected three whole numbers from 1",
        ),
        (
            lambda k, x, w, y, n: k.splitk_linear_layer(x, w, y, (6, 3, 1)),
            GridError,
            r"splitk_linear_layer: grid_dim=\(6, 3, 1\), expected axes that divide dimensions .*: R=4, K=8, N=6",
        ),
        (
            lambda k, x, w, y, n: k.splitk_linear_layer(x, w, accumulate=True),
            LayerError,
            "splitk_linear_layer: accumulate=True adds to output: give one that holds a value",
        ),
        (
            lambda k, x, w, y, n: k.linear_layer(x=x, weight=w, gamma=n),
            TaskAttributeError,
            r"linear_layer: got an unexpected keyword argument 'gamma'; expected .*weight.* or .*input",
        ),
        (lambda k, x, w, y, n: k.linear_layer(x=x), TaskAttributeError, "missing a required argument: 'weight'"),
        (
            lambda k, x, w, y, n: k.linear_layer(x=torch.ones(4, 8), weight=w),
            LayerError,
            "x is a torch.Tensor: attach_input the tensor first",
        ),
        (
            lambda k, x, w, y, n: PersistentKernel().linear_layer(x=x, weight=w),
            LayerError,
            "x=x belongs to another PersistentKernel",
        ),
        (
            lambda k, x, w, y, n: k.linear_layer(x=k.new_tensor((4, 8), dtype=torch.float32, name="late"), weight=w),
            LayerError,
            "x=late is read before a layer has written it",
        ),
        (
            lambda k, x, w, y, n: k.identity_layer(x, k.fuse_tensors([w, w], 0, 1, "both")),
            LayerError,
            "both is made of w, w: write those",
        ),
        (
            lambda k, x, w, y, n: k.linear_layer(
                x=x, weight=w, y=k.attach_input(torch.zeros(6).expand(4, 6), "expanded")
            ),
            LayerError,
            "expanded is written and has elements that share memory",
        ),
        (
            lambda k, x, w, y, n: k.kv_write_layer(
                cache=k.fuse_tensors([k.attach_input(torch.zeros(1, 2, 4, 8), "c")] * 2, 1, 1, "caches"),
                new=k.attach_input(torch.zeros(1, 4, 8), "new"),
                slot=k.attach_input(torch.zeros(1, dtype=torch.int64), "slot"),
            ),
            LayerError,
            "kv_write_layer: caches is made of c, c: write those",
        ),
        (
            lambda k, x, w, y, n: k.rmsnorm_layer(k.attach_input(torch.ones(4, 8).int(), "i"), n),
            LayerError,
            r"rmsnorm_layer: x=i is torch.int32, expected a floating dtype: attach i.to\(torch.float32\)",
        ),
        (lambda k, x, w, y, n: k.attach_input(torch.ones(1), "x"), LayerError, "there is a tensor 'x' already"),
        (lambda k, x, w, y, n: k.attach_input([1.0], "list"), LayerError, r"list: expected a torch.Tensor, got a list"),
        (lambda k, x, w, y, n: k.attach_input(torch.ones(1, device="meta"), "m"), LayerError, "got one on meta"),
        (lambda k, x, w, y, n: k.new_tensor((2, 3), strides=(1, 2)), LayerError, "contiguous .*: leave them out"),
        (lambda k, x, w, y, n: k.new_tensor((2,), io_category="nvshmem_tensor"), LayerError, "expected 'cuda_tensor'"),
        (lambda k, x, w, y, n: k.fuse_tensors([], 0, 1, "f"), LayerError, "expected at least one tensor"),
        (lambda k, x, w, y, n: k.fuse_tensors([w, w], 2, 1, "f"), LayerError, "dimension 2, expected 0 to 1"),
        (lambda k, x, w, y, n: k.fuse_tensors([w, w], 0, 4, "f"), LayerError, "4, expected a divisor of w's 6"),
        (lambda k, x, w, y, n: k.fuse_tensors([w, n], 0, 1, "f"), LayerError, r"n is torch.float32 \[8\], expected"),
        (lambda k, x, w, y, n: k.shuffle_tensors([w, x], 0, 1, "f"), LayerError, "fuse_tensors takes several"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_named(build, error, match):
    _fails(build, error, match)
