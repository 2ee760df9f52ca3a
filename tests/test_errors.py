"""Every error can be met, says what to do, and is listed in docs/errors.md."""

import pickle
import re
from pathlib import Path

import pytest
import torch
from torch._dynamo import lookup_backend

from torch_mpk import _C, errors, registry
from torch_mpk.capture.graph import capture
from torch_mpk.config import Options
from torch_mpk.dispatch import admission
from torch_mpk.generate import generate
from torch_mpk.jit import headers
from torch_mpk.tasks.rms_norm import rms_norm

ROOT = Path(__file__).parents[1]
ALL = list(errors.errors())


@pytest.mark.parametrize("error", ALL, ids=lambda error: error.__name__)
def test_each_is_described_and_raised_by_a_test(error):
    assert error.__doc__
    is_base = any(other.__base__ is error for other in ALL)
    assert error.remedy or is_base
    tests = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    assert is_base or re.search(rf"raises\(\s*(errors\.)?{error.__name__}\b", tests)


def compile_strictly(function, *inputs, **options):
    """What the backend raises, without the wrapping that torch.compile adds."""
    strict = {"fallback": "error"} | options
    return lookup_backend("mpk")(torch.fx.symbolic_trace(function), list(inputs), options=strict)


def test_options():
    with pytest.raises(errors.OptionError, match="mode: expected one of default, .*, got 'fats'"):
        Options.parse("fats", None)
    with pytest.raises(errors.UnknownOptionError, match=r"unknown option 'fallbak' \(did you mean 'fallback'\?\)"):
        Options.parse(None, {"fallbak": "eager"})


def test_graphs_that_are_not_ours():
    x = torch.eye(4)
    with torch.no_grad(), pytest.raises(errors.UnsupportedError, match="linalg_inv"):
        compile_strictly(lambda x: (torch.linalg.inv(x),), x)
    with pytest.raises(errors.GradModeError, match=r"torch\.inference_mode\(\) or torch\.no_grad\(\)"):
        compile_strictly(lambda x: x + 1, x.clone().requires_grad_())
    with (
        torch.autocast("cpu"),
        pytest.raises(errors.AutocastError, match="enabled for cpu: load the model in the"),
    ):
        compile_strictly(lambda x: x + 1, x)
    with pytest.raises(errors.SeveralDevicesError, match=r"several devices \(cpu, meta\): put model and inputs on one"):
        compile_strictly(lambda x, y: x + y, x, x.to("meta"))
    with pytest.raises(errors.GrowingCacheError, match="past_key_values grows with every call"):
        compile_strictly(lambda past_key_values, k: (torch.cat([past_key_values, k]),), x, x)
    with pytest.raises(errors.SharedMemoryError, match="share memory, and one of them is written in place: clone one"):
        compile_strictly(lambda x, y: (x.add_(1), y * 2), x[:3], x[1:])


def test_a_prompt_is_declined_but_no_error_unless_asked_for():
    def function(q, k, v):
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    inputs = [torch.randn(1, 2, 5, 8) for _ in range(3)]
    with pytest.raises(errors.PrefillDeclined, match=r"a step over 5 positions \(prefill\), where max_positions is 1"):
        admission.check_graph(capture(torch.fx.symbolic_trace(function), inputs), max_positions=1)
    with pytest.raises(errors.PrefillDeclined):
        compile_strictly(function, *inputs, max_positions=1)
    with torch.no_grad():
        step = torch.compile(function, backend="mpk", options={"max_positions": 1})
        assert torch.equal(step(*inputs), function(*inputs))


def test_what_should_not_happen(monkeypatch):
    def broken(*args):
        raise RuntimeError("unsound schedule: phase 3 waits for itself")

    monkeypatch.setattr("torch_mpk.backend.pipeline.apply", broken)
    with (
        torch.no_grad(),
        pytest.raises(errors.InternalError, match="RuntimeError: unsound schedule.* please report"),
    ):
        compile_strictly(lambda x: x @ x, torch.eye(4))
    with torch.no_grad(), pytest.warns(errors.MpkWarning, match="RuntimeError: unsound schedule"):
        run = lookup_backend("mpk")(torch.fx.symbolic_trace(lambda x: x @ x), [torch.eye(4)])
        assert torch.equal(run(torch.eye(4)), torch.eye(4))


def test_arguments_of_generate():
    with pytest.raises(errors.ArgumentError, match="max_new_tokens: expected at least 1, got 0"):
        generate(torch.nn.Linear(1, 1), torch.ones(1, 1, dtype=torch.int64), 0)


def test_tasks():
    with pytest.raises(errors.TaskError, match=r"rms_norm: weight has H=3, but H=4 was bound by x \(signature"):
        rms_norm(torch.ones(2, 4), torch.ones(3), eps=1e-6, style="llama")
    with pytest.raises(errors.TaskAttributeError, match="rms_norm: unknown attribute"):
        rms_norm(torch.ones(2, 4), torch.ones(4), eps=1e-6, style="llama", epsilon=1)
    with pytest.raises(errors.UnknownTaskError, match="^no task is named 'rms_nrom'; declared are: .*rms_norm"):
        registry.get("rms_nrom")


def test_a_sparse_tensor_is_no_operand_of_a_task():
    x, weight = torch.ones(1, 4), torch.ones(4)
    torch.ops.mpk.rms_norm(x, weight, eps=1e-5, style="llama")  # from here on a call of these shapes is known
    with pytest.raises(errors.TaskError, match=r"rms_norm: x has layout torch.sparse_coo, expected .* to_dense\(\)"):
        torch.ops.mpk.rms_norm(x.to_sparse(), weight, eps=1e-5, style="llama")


def test_an_incomplete_installation(monkeypatch, tmp_path):
    monkeypatch.setattr(headers, "__file__", str(tmp_path / "torch_mpk" / "jit" / "headers.py"))
    with pytest.raises(errors.InstallationError, match="abi/launch.h not found in .*reinstall torch_mpk"):
        headers.include_dir()


def test_no_device():
    with pytest.raises(errors.LaunchError):
        _C.device_info(99)


def test_errors_can_be_pickled():
    error = errors.UnsupportedError("it is odd", "sin", "model.py:3 in forward")
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), str(copy)) == (errors.UnsupportedError, "sin from model.py:3 in forward: it is odd")
    assert (copy.reason, copy.node) == ("it is odd", "sin")
    timeout = pickle.loads(pickle.dumps(errors.MegakernelTimeout("stuck")))
    assert str(timeout) == "stuck"
