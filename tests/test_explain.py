"""``torch_mpk.explain`` says what runs where and why, and leaves everything as it was."""

import os
import re
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

from tests.schedule.decoder_graph import decoder
from torch_mpk import _C, explain, task
from torch_mpk.__main__ import main
from torch_mpk.errors import OptionError
from torch_mpk.explain import Graph, Part, Report, kernels_of
from torch_mpk.testing.tiny import Decoding, random_ids, tiny_model


def test_a_step_of_a_model_is_one_megakernel_and_changes_nothing():
    model = tiny_model(num_layers=1)
    decoding = Decoding(model, random_ids(1, 5))
    state = [tensor.clone() for tensor in decoding.state()]
    report = explain(model, input_ids=random_ids(1, 1), past_key_values=decoding.cache, arch="sm_90a")
    assert all(map(torch.equal, decoding.state(), state))

    assert (report.num_megakernels, report.num_operations) == (1, 0)
    assert [report.share(what) for what in ("flops", "num_bytes", "num_operations")] == [1, 1, 1]
    (part,) = report.parts
    weights = sum(weight.numel() for weight in model.parameters()) - model.get_input_embeddings().weight.numel()
    matrices = sum(weight.numel() for weight in model.parameters() if weight.dim() == 2) - 96 * 64
    attention = 2 * 2 * 4 * 32 * 16  # products, multiply and add, heads, positions, head size
    assert 2 * matrices + attention <= part.flops < 1.01 * (2 * matrices + attention)  # and the angles of rope
    caches = 2 * 2 * 32 * 16 * 2  # keys and values, heads, positions, head size, bytes
    assert 2 * weights + caches < part.num_bytes < 1.01 * (2 * weights + caches)
    calls = {"linear": 8, "rms_norm": 5, "rope": 2, "embedding": 1, "attention": 1, "silu_mul": 1}
    assert part.tasks == calls
    assert report.measured_us > 0
    assert report.floor_us > 0
    assert report.estimated_us is None  # the constants are a GPU's
    assert part.kernels == {} and "linear.vector" in part.elsewhere.kernels  # none on a CPU, and those of an H200
    assert "__global__" in part.elsewhere.source and "cp.async.bulk" not in part.elsewhere.source
    text = str(report)
    assert re.search(r"\n    sm_90a: \d+ lines of CUDA; jobs: 1 by attention.split_kv, .* by linear.vector", text)
    assert "a call is 1 megakernel\n" in text
    counts = ", ".join(f"{count} {name}" for name, count in part.tasks.items())
    others = part.num_operations - sum(calls.values())
    assert f"\n    tasks: {counts}, and {others} other operations\n" in text
    assert "in megakernels: 100.0% of FLOPs" in text
    assert "phases in each of 1 layers" in text
    assert "compile time: dynamo " in text
    assert "lowering " in text


def test_phases_are_of_one_module():
    """Of the last one, where elementwise operations of several became one node."""
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.SiLU(), torch.nn.Tanh(), torch.nn.Linear(8, 8))
    (part,) = explain(model, torch.randn(1, 8)).parts
    assert part.phases == ["0", "2", "3"]


def test_random_numbers_go_on_as_if_it_had_not_been_called():
    def function(x, w):
        return F.linear(x, w) + torch.rand_like(x)

    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    explain(function, torch.randn(8, 8, generator=torch.Generator()), torch.ones(8, 8))
    assert torch.equal(torch.rand(3), expected)


class Counting(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(8, 32), torch.nn.Linear(32, 8)
        self.register_buffer("calls", torch.zeros(8))

    def forward(self, x, seen):
        self.calls.add_(1)
        seen.append(x)
        y = self.down(torch.linalg.inv(self.up(x) @ self.up(x).T + torch.eye(4)) @ self.up(x))
        return y + self.calls


def test_what_falls_back_is_listed_with_its_place_and_reason():
    model, seen = Counting(), []
    report = explain(torch.compile(model, backend="mpk"), torch.randn(4, 8), seen, options={"min_segment_nodes": 1})
    assert not model.calls.any()
    assert not seen
    assert [part.is_megakernel for part in report.parts] == [True, False, True]
    assert [part.tasks for part in report.parts] == [{"linear": 3}, {}, {"linear": 2}]
    assert report.num_megakernels == 2
    assert 0 < report.share("flops") <= 1
    assert 0 < report.share("num_operations") < 1
    text = str(report)
    left = report.parts[1].num_operations
    assert 0 < left == report.num_operations < 5
    assert f"a call is 2 megakernels and {left} operation" in text
    assert f"segment_1: fallback, {left} operation" in text
    assert "falls back: linalg_inv from " in text
    assert "test_explain.py:" in text
    assert "is not supported" in text


def test_it_says_why_a_tasks_own_pattern_is_not_taken():
    @task("x[..., H] -> y[..., H]", pattern=True, samples=[{"...": (2,), "H": 8}])
    def almost_for_test(x: torch.Tensor, *, shift: float = 0.5) -> torch.Tensor:
        return torch.asinh(x * 3 + shift).cumsum(-1)

    @task("x[..., H] -> y[..., H]", pattern=True, samples=[{"...": (2,), "H": 8}])
    def unusable_for_test(x: torch.Tensor) -> torch.Tensor:
        return x.clone().asinh_()

    def model(x, w, factor):
        return torch.asinh(F.linear(x, w) * factor + 1.5).cumsum(-1)

    def patterns_in(report):  # of these two: other tests declare tasks, too
        names = tuple(f"the pattern of {task.name} " for task in (almost_for_test, unusable_for_test))
        return [line.strip() for line in str(report).splitlines() if line.strip().startswith(names)]

    other = explain(model, torch.randn(4, 8), torch.randn(8, 8), 2)
    almost, unusable = patterns_in(other)
    assert other.num_megakernels == 1
    assert re.fullmatch(
        r"the pattern of almost_for_test \(.*test_explain.py:\d+\) is not taken at cumsum from .*explain.py:\d+ in "
        r"model: other of mul \(aten.mul.Tensor\) is 2, in its reference 3",
        almost,
    )
    assert re.fullmatch(
        r"the pattern of unusable_for_test \(.*:\d+\) is not used: its reference writes in place", unusable
    )
    assert patterns_in(explain(model, torch.randn(4, 8), torch.randn(8, 8), 3)) == [unusable]


def test_graphs_that_are_not_ours_count_as_such():
    def function(x, w):
        y = F.linear(x, w)
        torch._dynamo.graph_break()
        return torch.linalg.inv(y)

    report = explain(function, torch.eye(4), torch.eye(4))
    assert len(report.graphs) == 2
    assert report.graphs[0].why is None
    assert report.graphs[1].why.startswith("linalg_inv")
    assert report.measured_us is None
    assert "graph 1: not ours, because linalg_inv" in str(report)
    assert report.share("num_operations") < 1


@pytest.mark.slow
def test_prefill_is_left_to_pytorch_as_intended():
    model = tiny_model(num_layers=1)
    assert explain(model, input_ids=random_ids(1, 5), use_cache=False).num_megakernels == 1
    report = explain(model, input_ids=random_ids(1, 5), use_cache=False, options={"max_positions": 1})
    assert report.num_megakernels == 0
    assert report.share("flops") == 0
    assert report.parts[0].flops > 0
    assert "a step over 5 positions (prefill), where max_positions is 1" in str(report)
    assert "as intended" in str(report)


def test_an_architecture_that_does_not_take_the_call_says_why():
    report = explain(torch.nn.Linear(8, 8).double(), torch.ones(1, 8, dtype=torch.float64), arch="sm_90a")
    (part,) = report.parts
    assert part.is_megakernel and part.elsewhere.source == ""
    assert "float64" in part.elsewhere.why
    assert f"\n    sm_90a: not ours, because {part.elsewhere.why}" in str(report)


def test_wrong_options_are_an_error():
    with pytest.raises(OptionError, match="expected 'sm_80' or 'sm_90a'"):
        explain(torch.sin, torch.ones(1), arch="sm_90")
    with pytest.raises(OptionError, match="unknown option 'verfy'"):
        explain(torch.sin, torch.ones(1), options={"verfy": 1})


def test_the_command_line_explains_a_configuration(tmp_path, capsys):
    tiny_model(num_layers=1).config.save_pretrained(tmp_path)
    shape = ["--batch", "2", "--length", "16", "--dtype", "bfloat16", "--device", "cpu"]
    main(["explain", str(tmp_path), *shape, "--arch", "sm_100a", "--cuda", str(tmp_path / "step.cu")])
    assert "torch_mpk on cpu: a call is 1 megakernel" in capsys.readouterr().out
    assert "__global__" in (tmp_path / "step.cu").read_text()


@pytest.mark.slow
def test_torch_logs_shows_the_stages():
    call = "torch.compile(torch.nn.Linear(8, 8), backend='mpk')(torch.ones(1, 8))"
    script = f"import torch\nwith torch.no_grad(): {call}"
    environment = os.environ | {"TORCH_LOGS": "torch_mpk"}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment, timeout=200)
    assert done.returncode == 0, done.stderr
    assert re.search(r"a graph took .* s \(.*capture .* patterns .* partition .* lowering .* schedule ", done.stderr)
    assert "a graph of 1 operations is 1 megakernel(s); 0 operations fall back" in done.stderr


def test_kernels_of_jobs_that_might_have_had_others() -> None:
    """As on a GPU, without one: what ``explain`` says of a schedule's jobs."""
    schedule = _C.make_schedule(decoder(layers=1), _C.Target("cuda", 90, 132, 232448, polled=True))
    kernels = kernels_of([job for phase in schedule.phases for job in phase.jobs])
    vector = kernels["linear.vector"]
    assert vector.num_jobs == 5 and list(vector.next_best) == ["linear.direct"]
    assert 0 < vector.us < vector.next_best["linear.direct"]
    assert kernels["attention.split_kv"].next_best == {}
    graph = Graph([Part("segment", True, 1, 0, 0, kernels=kernels)], [], None, {}, None)
    text = str(Report([graph], torch.device("cuda"), None))
    assert re.search(r"    5 jobs by linear\.vector, expected to take .* us; next best: linear\.direct .* us\n", text)
