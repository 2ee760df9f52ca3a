"""A task in a kernel of its own, against its reference, and what ``bench-task`` prints of such kernels."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor

from tests.tasks.plugin.causal_conv import causal_conv
from tests.tasks.plugin.layer_norm import layer_norm
from tests.tasks.plugin.top_k import top_k
from torch_mpk import kernel_of, registry, task_kernel, tasks
from torch_mpk.__main__ import main
from torch_mpk.errors import MpkWarning, NoDerivativeError, SharedMemoryError, TaskAttributeError, TaskError
from torch_mpk.registry import Task
from torch_mpk.testing.bench import bench_task

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("task", [layer_norm, causal_conv, top_k, registry.get("linear")], ids=repr)
def test_it_computes_what_the_reference_does(task: Task, device: str) -> None:
    kernel = kernel_of(task)
    for sample in (*task.samples[:2], task.samples[0]):  # other sizes in between
        operands, attrs = task.sample(sample, torch.float32, device)
        ours = [None if t is None else t.clone() for t in operands]
        got, want = kernel(*ours, **attrs), task(*operands, **attrs)
        assert type(got) is type(want)
        torch.testing.assert_close(got, want)
        for spec, a, b in zip(task.inputs, ours, operands, strict=True):
            if spec.is_write:
                torch.testing.assert_close(a, b, msg=spec.name)


def test_absent_operands_and_attributes_have_their_defaults() -> None:
    x, weight = torch.randn(2, 8), torch.randn(4, 8)
    torch.testing.assert_close(kernel_of(tasks.linear.linear)(x, weight), x @ weight.T)


def test_so_many_builds_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task_kernel, "MOST_BUILDS", 2)
    kernel, weight = kernel_of(registry.get("linear")), torch.randn(4, 8)
    builds = []
    build = task_kernel.build_segment
    monkeypatch.setattr(task_kernel, "build_segment", lambda gm, *args: builds.append(gm) or build(gm, *args))
    for rows in (1, 2, 3, 2, 3, 1):
        x = torch.randn(rows, 8)
        torch.testing.assert_close(kernel(x, weight), x @ weight.T)
    assert len(builds) == 4


def test_what_does_not_fit_is_refused() -> None:
    norm, conv = kernel_of(layer_norm), kernel_of(causal_conv)
    with pytest.raises(TaskError, match=r"layer_norm: no operand was given \(signature: x"):
        norm()
    with pytest.raises(TaskAttributeError, match=r"layer_norm: unknown attribute \['epsilon'\]; it takes"):
        norm(torch.ones(2, 3), epsilon=1.0)
    with pytest.raises(NoDerivativeError, match="the kernel of layer_norm has no derivative"):
        norm(torch.ones(2, 3, requires_grad=True))
    operands, attrs = causal_conv.sample(causal_conv.samples[0], torch.float32)
    [written] = [i for i, spec in enumerate(causal_conv.inputs) if spec.is_write]
    last = len(operands) - 1
    operands[last] = torch.as_strided(operands[written], operands[last].shape, operands[last].stride())
    with pytest.raises(SharedMemoryError, match="state and weight share memory"):
        conv(*operands, **attrs)


@pytest.mark.parametrize("device", DEVICES)
def test_an_operator_without_a_kernel_of_pytorch_s_runs_its_own(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    task = registry.get("paged_attention")
    assert task.alone == "kernel"
    pages = torch.randn(20, 2, 16, 2, 32, device=device)  # keys and values side by side
    table = torch.randperm(20, device=device)[:12].view(3, 4).int()
    length = torch.tensor([40, 0, 17], dtype=torch.int32, device=device)
    q, k = torch.randn(3, 4, 32, device=device), torch.randn(3, 2, 32, device=device)
    expected_pages = pages.clone()
    expected = task(q, k, k, *expected_pages.unbind(1), table, length, scale=0.2)
    reference = task.reference

    def without_values(*operands: torch.Tensor, **attrs: float) -> torch.Tensor:
        assert all(t is None or isinstance(t, FakeTensor) for t in operands), "pages are too many to be copied"
        return reference(*operands, **attrs)

    monkeypatch.setattr(task, "reference", without_values)
    for _ in range(2):
        got = torch.ops.mpk.paged_attention(q, k, k, *pages.unbind(1), table, length, scale=0.2)
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)  # a GPU's exponential is its own
        assert torch.equal(pages, expected_pages)
        pages[table[0, 2], 0, 7] = 0.0  # what the step writes


def test_an_operator_whose_kernel_does_not_take_the_operands_runs_the_reference() -> None:
    task = registry.get("paged_attention")
    pages = torch.randn(4, 2, 2, 16)
    q, table, length = (
        torch.randn(2, 4, 16),
        torch.tensor([[0, 1], [2, 3]], dtype=torch.int32),
        torch.tensor([4, 3]).int(),
    )
    expected = task(q, None, None, pages.clone(), pages, table, length, scale=0.2)
    with pytest.warns(
        MpkWarning, match=r"torch.ops.mpk.paged_attention runs the task's reference: k_pages and v_pages"
    ):
        got = torch.ops.mpk.paged_attention(q, None, None, pages, pages, table, length, scale=0.2)
    torch.testing.assert_close(got, expected)


DECLARATION = """
import torch
from torch_mpk import task

@task("x[R, H] -> y[R, H]", samples=[{{"R": 2, "H": 5}}, {{"R": 1, "H": 3, "scale": 2.0}}], cpu="{name}.cpp")
def {name}(x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
    return x * scale
"""

CODE = """
#include "torch_mpk/cpu/tile.h"
namespace mpk::tasks::{name} {{
template <class V>
inline constexpr int kSharedBytes = 0;
template <class V, class Threads, class T>
void compute(Threads& threads, const typename V::Tile& tile, uint8_t* shared, const T* x, T* y) {{
  for (int i = threads.rank; i < V::kH; i += Threads::kSize) y[i] = cast<T>(to_float(x[i]) * {factor});
}}
}}
"""


def written(folder: Path, name: str, factor: str) -> str:
    (folder / f"{name}.cpp").write_text(CODE.format(name=name, factor=factor))
    path = folder / f"{name}.py"
    path.write_text(DECLARATION.format(name=name))
    return str(path)


def without_inductor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which takes some seconds a sample."""
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)


def test_bench_task_prints_times_and_ratios(
    tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_inductor(monkeypatch)
    path = written(tmp_path, "right_for_test", "float(V::kScale)")
    main(["bench-task", path, "--dtype", "float32", "--device", "cpu", "--rounds", "2"])
    first, header, *lines = capsys.readouterr().out.splitlines()
    assert first == "float32 on cpu: medians in milliseconds, and as multiples of ours"
    assert header.split() == ["ours", "eager", "(/ours)", "Inductor", "(/ours)", "sample"]
    number, ratio = r"\d+\.\d{4}", r"\(\d+\.\d\dx\)"
    for i, line in enumerate(lines):
        row = rf" *{number} +{number} {ratio} +{number} {ratio} +right_for_test, sample {i} "
        assert re.match(row, line), line
    assert len(lines) == 2


def test_bench_task_refuses_code_that_differs(
    tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_inductor(monkeypatch)
    path = written(tmp_path, "wrong_for_test", "1.0f")
    with pytest.raises(SystemExit, match=r"^failed:\n.*wrong_for_test.py: task wrong_for_test, sample 1 .*: .*y: "):
        main(["bench-task", path, "--dtype", "float32", "--device", "cpu", "--rounds", "2"])
    assert re.search(r"- +\d+\.\d{4} +\d.*wrong_for_test, sample 1 .*; ours: ", capsys.readouterr().out)


def test_bench_task_says_what_it_cannot_time(tmp_path: Path) -> None:
    empty, bare = tmp_path / "none_for_test.py", tmp_path / "bare_for_test.py"
    empty.write_text("")
    with pytest.raises(SystemExit, match="it declares no tasks, expected functions with @torch_mpk.task") as caught:
        main(["bench-task", str(empty)])
    assert isinstance(caught.value.code, str)  # which is printed, and the status is 1
    bare.write_text("import torch_mpk\n@torch_mpk.task('x[R] -> y[R]')\ndef bare_for_test(x): return x\n")
    with pytest.raises(SystemExit, match="bare_for_test: there is nothing to time it with: declare samples"):
        main(["bench-task", str(bare)])


@pytest.mark.slow
def test_bench_task_times_inductor(capsys: pytest.CaptureFixture) -> None:
    with torch.inference_mode():
        timed = [*bench_task(layer_norm, torch.float32, torch.device("cpu"), rounds=2)]
    assert all({*each.milliseconds} == {"ours", "eager", "Inductor"} for each in timed)
