"""Declaring tasks outside torch_mpk: what is refused, what becomes of a call, packages, and the command line."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from tests.tasks import plugin
from tests.tasks.every_task import TASKS
from tests.tasks.plugin.causal_conv import causal_conv
from tests.tasks.plugin.layer_norm import layer_norm
from tests.tasks.plugin.squared_relu_gate import squared_relu_gate
from tests.tasks.plugin.top_k import top_k
from tests.thinned import thinned
from torch_mpk import _C, lowering, registry
from torch_mpk.__main__ import main
from torch_mpk.builds.dump import Dump
from torch_mpk.config import Options
from torch_mpk.errors import KernelCompileError, MpkWarning, NoDerivativeError, TaskError
from torch_mpk.explain import explain
from torch_mpk.jit import compile_cuda
from torch_mpk.planning import make_plan
from torch_mpk.registry.stream_traits import StreamTraits
from torch_mpk.runtime import cpu
from torch_mpk.testing import check_task
from torch_mpk.testing.tasks import Calls, samples_of

ops = torch.ops.mpk


def declare(
    signature: str, name: str = "refused", decorator: Callable = lambda function: function, **options: object
) -> registry.Task:
    def reference(x: torch.Tensor, *, scale: float = 1) -> torch.Tensor:
        return x * scale

    reference.__name__ = name
    return registry.task(signature, **options)(decorator(reference))


@pytest.mark.parametrize(
    ("signature", "options", "message"),
    [
        ("x[R, H] -> y[R]", {"tile": "R, H"}, r"y\[R\] is written by every tile along H.*all it writes have"),
        ("x[R, H] -> y[R, H]", {"tile": "Q"}, "tiles are cut along Q, whose size no operand says"),
        ("x[R, H] -> y[R, K]", {"tile": "R, K"}, "tiles are cut along K, whose size no operand says"),
        ("x[R, H] -> y[R, H]", {"tile": {"R": 0}}, "a tile has 0 of dimension R, expected 1 or more"),
        ("x[..., H] -> y[..., H]", {"tile": {"...": 2}}, "a tile has 2 of dimension ..., expected 1$"),
        ("x[R, H] -> y[R, H]", {"role": "row", "tile": "R"}, "tile= is for tasks of role 'tile', this one's is 'row'"),
        ("x[R, H] ->", {}, "it writes nothing; give it an output, or mark what it updates"),
        ("x[R, H] -> y[R, H]", {"header": "none.cuh"}, r"'none.cuh' is not there: expected .*tests/tasks/none.cuh"),
        ("x[R, H] -> y[R, H]", {"cpu": "none.cpp"}, "'none.cpp' is not there"),
        ("x[R, Scale] -> y[R, Scale]", {}, "'scale' and 'Scale' have one name in device code, Scale: rename 'scale'"),
        ("x[R, H] -> x[R, H]", {}, "'x' and 'x' have one name"),
        ("x[R, H] -> y[R, H]", {"stream": "y"}, "stream='y', expected an operand that is read only and always there"),
        (
            "x[R, H] -> y[R, H]",
            {"tile": "R, H", "stream": "x"},
            "stream='x', expected .* last dimension is not cut",
        ),
        (
            "x[R, H] -> y[R, H]",
            {"traits": StreamTraits(loaded=("x",), staged=("x",))},
            "traits= is for tasks of role 'stream', and loaded of it for role 'tile'; this one's role is 'tile'",
        ),
        ("x[R, H] -> y[R, H]", {"scales_rows": True}, "scales_rows= is for tasks of role 'row', this one's is 'tile'"),
        (
            "x[R, H] -> y[R, H]",
            {"role": "row", "behind_rows": True},
            "behind_rows= is for tasks of role 'tile', this one's is 'row'",
        ),
        (
            "x[R, H] -> y[R, H]",
            {"role": "stream", "traits": StreamTraits(loaded=("x",), joined_by="y")},
            r"traits= names \['y'\], expected inputs",
        ),
        (
            "x[R, H] -> y[R, H]",
            {"role": "stream", "traits": StreamTraits(loaded=(), cursor="x")},
            "the cursor 'x' needs a bound",
        ),
        ("x[R, tiles] -> y[R, tiles]", {}, "'tiles' and 'their number' have one name in device code, Tiles"),
        (
            "x[R, H] -> y[R, H]",
            {"pattern": True},
            "pattern=True takes outputs, nothing updated in place, and samples",
        ),
    ],
)
def test_refused(signature: str, options: dict, message: str) -> None:
    with pytest.raises(TaskError, match=f"refused: {message}"):
        declare(signature, **options)
    assert "refused" not in _C.task_names()


@pytest.mark.parametrize(
    ("signature", "samples", "message"),
    [
        (
            "x[R, H -> y[R, H]",
            [],
            r"cannot read 'x\[R, H': a bracket is not closed; write tensors as",
        ),
        ("x[R, y[H] -> y[R]", [], r"cannot read 'x\[R, y\[H\]': a bracket is not closed"),
        ("x[R H] -> y[R]", [], r"x has a dimension 'R H', expected a name, a number or '...'"),
        ("x[R]: float3 -> y[R]", [], "x has dtype 'float3'; the dtypes are .*; did you mean 'float32'"),
        ("x[R]: nn -> y[R]", [], "x has dtype 'nn'; the dtypes are bool, uint8"),
        (
            "x[R, H] -> y[R, H]",
            [{"R": 1}],
            r"samples\[0\] does not say H of x, expected sizes, .* for H, R, x, scale: ",
        ),
        ("x[R]: int64 < V -> y[R]", [{"R": 1}], r"samples\[0\] does not say V of x"),
        (
            "x[R] -> y[R]",
            [{"R": 1}, {"R": 1, "scael": 2}],
            r"samples\[1\] has an unknown key 'scael' \(did you mean 'scale'\?\), expected .*scale",
        ),
    ],
)
def test_signatures_and_samples_that_cannot_be_read(signature: str, samples: list, message: str) -> None:
    with pytest.raises(TaskError, match=f"refused: {message}"):
        declare(signature, samples=samples)
    assert "refused" not in _C.task_names()


def test_a_wrong_rank_is_said_with_what_is_expected() -> None:
    with pytest.raises(TaskError, match=r"x has shape \(\), expected at least 1 dimension: x\[\.\.\., H\]"):
        declare("x[..., H] -> y[..., H]", "ranked_for_test")(torch.tensor(1.0))


def test_a_module_may_be_reloaded_and_an_edited_task_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    declaration = "import torch_mpk\n@torch_mpk.task('x[R] -> y[R]')\n"
    declaration += "def reloaded_for_test(x, *, times: int = 2): return x * {}\n"
    path = tmp_path / "reloaded_tasks.py"
    path.write_text(declaration.format("times"))
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module("reloaded_tasks")
    task = module.reloaded_for_test
    path.write_text("# a line more\n" + declaration.format("times"))
    assert importlib.reload(module).reloaded_for_test is task
    path.write_text(declaration.format("(times + 1)"))
    place = rf"already declared at {re.escape(str(path))}:2, otherwise than at {re.escape(str(path))}:2"
    with pytest.raises(
        TaskError, match=rf"{place}: .* another name, or restart the process \(in a notebook the kernel"
    ):
        importlib.reload(module)


def test_a_default_that_an_operator_cannot_have_is_refused() -> None:
    def refused(x: torch.Tensor, *, fill: float = float("-inf")) -> torch.Tensor:
        return x + fill

    with pytest.raises(TaskError, match="refused: attribute fill is -inf by default, expected a finite number or none"):
        registry.task("x[R, H] -> y[R, H]")(refused)
    assert "refused" not in _C.task_names()


def test_the_name_of_an_in_place_form_is_refused() -> None:
    with pytest.raises(TaskError, match="refused_: such a name is the in-place form's"):
        declare("x[R, H] -> y[R, H]", "refused_")


def test_what_the_reference_returns_is_checked() -> None:
    double = declare("x[R] -> y[R], z[R]", "two_for_test")
    with pytest.raises(TaskError, match=r"the reference returned Tensor, expected y\[R\], z\[R\]"):
        double(torch.ones(3))
    with pytest.raises(TaskError, match="there is nothing to check it with: declare samples"):
        check_task(double)


def test_an_output_of_another_dtype_than_declared_is_named():
    with_index = declare("x[R, H] -> y[R, H]: int64", "declaring_test_dtype")
    with pytest.raises(TaskError, match=r"the reference returned y as torch.float32, expected torch.int64"):
        with_index(torch.ones(2, 3))


def test_code_is_found_beside_the_file() -> None:
    folder = Path(plugin.__file__).parent
    assert layer_norm.header == layer_norm.cpu_body == str(folder / "layer_norm.cuh")
    assert causal_conv.cpu_body == str(folder / "causal_conv.cpp")
    assert squared_relu_gate.headers == {90: str(folder / "sm90" / "squared_relu_gate.cuh")}
    assert squared_relu_gate.cpu_body == ""


def test_a_task_says_whose_it_is_and_where_its_code_stands() -> None:
    def line(path: str, text: str) -> str:
        numbers = [n for n, each in enumerate(Path(path).read_text().splitlines(), 1) if text in each]
        return f"{path}:{numbers[0]}"

    folder = Path(plugin.__file__).parent
    assert registry.get("linear").is_ours
    assert not causal_conv.is_ours
    assert causal_conv.place == line(str(folder / "causal_conv.py"), "@task(")
    assert causal_conv.code("cpu") == line(causal_conv.cpu_body, "compute(")
    assert causal_conv.code("cuda", 90) == line(causal_conv.header, "compute(")
    assert squared_relu_gate.code("cuda", 90) == line(squared_relu_gate.headers[90], "compute(")
    assert squared_relu_gate.code("cuda", 80) == line(squared_relu_gate.header, "compute(")
    assert squared_relu_gate.code("cpu") == squared_relu_gate.place


def test_a_decorated_reference_has_its_code_beside_its_file() -> None:
    declared = declare("x[R, H] -> y[R, H]", "decorated_for_test", header="plugin/top_k.cuh", decorator=torch.no_grad())
    assert declared.header == str(Path(plugin.__file__).parent / "top_k.cuh")
    assert declared.place.startswith(f"{__file__}:")


def test_code_is_compiled_for_the_machine_s_instruction_set(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TORCH_MPK_CACHE_DIR", str(tmp_path))
    source = """
    extern "C" __attribute__((visibility("default"))) int width() {
    #if defined(__AVX512F__)
      return 64;
    #elif defined(__AVX2__)
      return 32;
    #else
      return 16;
    #endif
    }
    """
    for tier in _C.cpu_isas():
        monkeypatch.setenv("TORCH_MPK_CPU_ISA", tier)
        assert cpu.tile_library(source, []).width() == {"generic": 16, "avx2": 32}.get(tier, 64)


def test_without_a_host_compiler_references_run(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Calls(samples_of([layer_norm, causal_conv], torch.float32))
    device, options = torch.device("cpu"), Options()
    plan = make_plan(calls.gm, cpu.target(device, options), options, Dump(None))
    assert cpu.load(plan, device, options, Dump(None)).missing_references == []
    compiled = cpu.compile_tiles(plan.schedule.graph, Dump(None))
    assert set(compiled) == {node.id for node in plan.schedule.graph.nodes}
    monkeypatch.setenv("CXX", "/nonexistent/c++")
    with pytest.warns(
        MpkWarning, match=r"runs causal_conv, layer_norm by their references, .* no C\+\+ compiler found"
    ):
        assert cpu.compile_tiles(plan.schedule.graph, Dump(None)) == {}
    calls.check_pipeline(torch.device("cpu"))


class Model(torch.nn.Module):
    """Linears with plugin tasks between them, one of which it spells out."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(24, 80), torch.nn.Linear(40, 12)
        self.conv = torch.nn.Parameter(torch.randn(40, 4))

    def forward(self, x: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, ...]:
        gate, up = self.up(ops.layer_norm(x)).chunk(2, -1)
        mixed = ops.causal_conv(torch.relu(gate).square() * up, state, self.conv)
        return ops.top_k(self.down(mixed), count=3)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_model_is_one_megakernel(device: str) -> None:
    model, x, state = Model().to(device), torch.randn(2, 24, device=device), torch.randn(2, 40, 4, device=device)
    ours = state.clone()
    with torch.inference_mode():
        step = torch.compile(model, backend="mpk", options={"fallback": "error"})
        for _ in range(3):
            for got, want in zip(step(x, ours), model(x, state), strict=True):
                torch.testing.assert_close(got, want)
            torch.testing.assert_close(ours, state)
        report = explain(model, x, ours)
    assert (report.num_megakernels, report.num_operations) == (1, 0)


def test_a_task_without_device_code_falls_back_by_name() -> None:
    declared = declare("x[R, H] -> y[R, H]", "cpu_only_for_test", samples=[{"R": 1, "H": 3}])
    [call] = [node for node in Calls(samples_of([declared], torch.float32)).gm.graph.nodes if node.target is declared]
    assert lowering.supports(call) is None
    on_cuda = FakeTensor(FakeTensorMode(), torch.empty(1, 3, device="meta"), torch.device("cuda", 0))
    call.meta["val"] = call.args[0].meta["val"] = on_cuda
    assert "cpu_only_for_test has no device code: write cpu_only_for_test.cuh" in str(lowering.supports(call))


def all_operators(calls: list) -> list[torch.Tensor]:
    results = []
    for call in calls:
        out = getattr(ops, call.task.name)(*call.operands, **call.attrs)
        results += call.task.results(out)
    return [*results, *(t for call in calls for t in call.operands if t is not None)]


@pytest.mark.parametrize("backend", thinned(["eager", "aot_eager", "inductor"], 1))
def test_operators_under_other_backends(backend: str) -> None:
    """One of each in one graph."""
    eager, compiled = ([*{call.task: call for call in samples_of(TASKS, torch.float32)}.values()] for _ in range(2))
    for a, b in zip(eager, compiled, strict=True):
        b.operands = [None if t is None else t.clone() for t in a.operands]
    with torch.no_grad():
        expected = all_operators(eager)
        got = torch.compile(all_operators, backend=backend, fullgraph=True)(compiled)
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, equal_nan=True)


@pytest.mark.parametrize("task", TASKS, ids=repr)
def test_operators_are_exported_and_count_what_they_update(task: registry.Task) -> None:
    operands, attrs = task.sample(task.samples[0], torch.float32)

    class Call(torch.nn.Module):
        def forward(self, *operands: torch.Tensor) -> object:
            return getattr(ops, task.name)(*operands, **attrs)

    program = torch.export.export(Call(), tuple(operands))
    assert any(f"mpk.{task.name}" in str(node.target) for node in program.graph.nodes)
    before = [None if t is None else t._version for t in operands]
    Call()(*operands)
    for operand, t, version in zip(task.inputs, operands, before, strict=True):
        assert t is None or (t._version > version) == operand.is_write, operand.name


@pytest.mark.parametrize("task", [top_k, causal_conv, registry.get("linear"), registry.get("kv_write")], ids=repr)
def test_autograd_is_refused(task: registry.Task) -> None:
    for position in range(len(task.inputs)):
        operands, attrs = task.sample(task.samples[0], torch.float32)
        if operands[position] is None or not operands[position].is_floating_point():
            continue
        operands[position].requires_grad_()
        with pytest.raises(NoDerivativeError, match=rf"torch.ops.mpk.{task.name} has no derivative.*no_grad"):
            getattr(ops, task.name)(*operands, **attrs)
        with torch.no_grad():
            getattr(ops, task.name)(*operands, **attrs)


def test_packages_are_imported_and_broken_ones_named(tmp_path: Path) -> None:
    for name, content in {"fine": "import plugin.top_k", "broken": "import not_there"}.items():
        (tmp_path / f"{name}_tasks.py").write_text(content)
        info = tmp_path / f"{name}_package-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}-package\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[torch_mpk.tasks]\n{name} = {name}_tasks\n")
    script = "import torch, torch_mpk\nprint(torch.ops.mpk.top_k(torch.eye(2), count=1)[1].tolist())"
    path = os.pathsep.join([str(tmp_path), str(Path(__file__).parent)])
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=dict(os.environ, PYTHONPATH=path)
    )
    assert done.stdout == "[[0], [1]]\n", done.stderr
    expected = "the tasks 'broken' (broken_tasks) of broken-package are left out: ModuleNotFoundError: No module named"
    assert f"<string>:1: MpkWarning: {expected} 'not_there'" in done.stderr  # the user's line


@pytest.mark.slow
def test_new_task_writes_what_check_task_passes(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    main(["new-task", "fresh_for_test", "--dir", str(tmp_path)])
    main(["check-task", str(tmp_path / "fresh_for_test.py"), "--dtype", "bfloat16"])
    lines = capsys.readouterr().out.splitlines()
    assert "fresh_for_test.cuh; check them with: python -m torch_mpk check-task" in lines[0]
    assert lines[-1] == "1 tasks pass"
    for threads in (32, 352):
        assert f"fresh_for_test: device code with {threads} threads, bfloat16: 5 samples pass" in lines
    for arch in (80, 90):
        assert f"fresh_for_test: compiles for sm_{arch}" in lines
        without_gpu = f"  fresh_for_test: compiled for sm_{arch} and not run: no such GPU is here"
        assert without_gpu in lines or torch.cuda.is_available()
    for name, message in {
        "fresh_for_test": "one that no task has",
        "class": "a name such as",
        "a-b": "a name such as",
    }.items():
        with pytest.raises(SystemExit, match=message):
            main(["new-task", name, "--dir", str(tmp_path)])
    with pytest.raises(SystemExit, match="a folder that exists"):
        main(["new-task", "other", "--dir", str(tmp_path / "none")])
    with pytest.raises(SystemExit, match="a Python file that declares tasks"):
        main(["check-task", str(tmp_path / "none.py")])


def test_an_error_in_device_code_names_its_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_MPK_CACHE_DIR", str(tmp_path / "cache"))
    program = Calls(samples_of([squared_relu_gate], torch.float32)).program(80)
    header = tmp_path / "broken.cuh"
    header.write_text(Path(squared_relu_gate.header).read_text().replace("tile.N.size", "tile.M.size"))
    source = program.source.replace(squared_relu_gate.header, str(header))
    with pytest.raises(KernelCompileError, match=rf"{header}\(\d+\): error: .*no member \"M\""):
        compile_cuda(source, 80)
    text = Path(squared_relu_gate.header).read_text()
    header.write_text(text.replace("kSharedBytes = 0", "kSharedBytes = 200000"))
    room = r"task squared_relu_gate: kSharedBytes is more than the \d+ bytes that a tile may have: cut smaller tiles"
    with pytest.raises(KernelCompileError, match=room):
        compile_cuda(source, 80)


def test_an_operator_says_once_that_it_runs_the_reference(caplog: pytest.LogCaptureFixture) -> None:
    """Where a user has written code that might be expected to run there."""
    own, bare = declare("x[R] -> y[R]", "has_code_for_test", cpu="plugin/causal_conv.cpp"), "has_none_for_test"
    declare("x[R] -> y[R]", bare)
    caplog.set_level("INFO", "torch_mpk")
    for name in (own.name, own.name, bare, "silu_mul"):
        operands = [torch.ones(3)] * len(registry.get(name).inputs)
        getattr(ops, name)(*operands)
    said = [record.getMessage() for record in caplog.records if record.name == "torch_mpk.ops"]
    [line] = said
    assert line.startswith("torch.ops.mpk.has_code_for_test runs the task's reference: its code runs in models")
    assert line.endswith("and alone by torch_mpk.kernel_of")
