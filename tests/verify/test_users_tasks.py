"""What a user's task gets wrong is told of that task: which output, where its code stands, what it writes outside."""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from torch_mpk import registry
from torch_mpk.config import Options
from torch_mpk.errors import StrayWriteError, TaskVerificationError
from torch_mpk.registry.calls import Call
from torch_mpk.verify.guarded_memory import GuardedCall, way_of

_CODE = """#pragma once
#include "torch_mpk/cpu/tile.h"

namespace mpk::tasks::{name} {{

template <class V>
inline constexpr int kSharedBytes = {shared_bytes};

template <class V, class Threads, class X, class T, class I>
void compute(Threads&, const typename V::Tile&, [[maybe_unused]] uint8_t* shared, {state}const X* x, T* total,
             I* where) {{
  float sum = 0;
  int best = 0;
  for (int i = 0; i < V::kH; i++) {{
    sum += to_float(x[i]);
    if (to_float(x[i]) > to_float(x[best])) best = i;
  }}
  total[0] = cast<T>(sum);
  where[0] = best;
  {wrong}
}}

}}  // namespace
"""
_DECLARATION = """import torch
from torch_mpk import task


@task("{state}x[R, H] -> total[R, 1], where[R, 1]", tile="R", samples=[{sample}])
def {name}({state_parameter}x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x.sum(-1, keepdim=True), x.argmax(-1, keepdim=True)
"""
_numbers = itertools.count()


@pytest.fixture
def declare(tmp_path):
    """Declares a task of two outputs whose C++ code does something else at the end; ``state`` is updated in place."""

    def make(wrong: str, has_state: bool = False, shared_bytes: int = 0) -> registry.Task:
        name = f"totals_for_test_{next(_numbers)}"
        state = "T* state, " if has_state else ""
        code = _CODE.format(name=name, wrong=wrong, state=state, shared_bytes=shared_bytes)
        (tmp_path / f"{name}.cpp").write_text(code)
        parameter = "state: torch.Tensor, " if has_state else ""
        signature, sample = ("state[R, S]!, ", {"R": 3, "H": 8, "S": 5}) if has_state else ("", {"R": 3, "H": 8})
        text = _DECLARATION.format(name=name, state=signature, state_parameter=parameter, sample=sample)
        (tmp_path / f"{name}.py").write_text(text)
        sys.path.insert(0, str(tmp_path))
        try:
            __import__(name)
        finally:
            sys.path.remove(str(tmp_path))
        return registry.get(name)

    return make


def call(declared: registry.Task, dtype: torch.dtype = torch.float32, **options: object) -> object:
    """A model with that task between linears."""

    def model(x, w, *state):
        total, where = getattr(torch.ops.mpk, declared.name)(*state, F.linear(x, w))
        return F.linear(total.expand(-1, 8).contiguous(), w), where

    has_state = declared.is_mutating
    args = [torch.randn(3, 8, dtype=dtype), torch.eye(8, dtype=dtype)]
    args += [torch.zeros(3, 5, dtype=dtype)] if has_state else []
    with torch.inference_mode():
        return torch.compile(model, backend="mpk", options={"fallback": "error", "verify": 1} | options)(*args)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("wrong", "output", "kind"),
    [
        ("total[0] = cast<T>(sum + 1.0f);", "total", None),
        ("where[0] = V::kH - 1 - best;", "where", "torch.int64"),
    ],
)
def test_a_wrong_output_is_named_as_the_users(wrong, output, kind, dtype, declare):
    declared = declare(wrong)
    code = re.escape(declared.code("cpu"))
    culprit = rf"{declared.name} \(mpk.{declared.name}\) from .*test_users_tasks.py:\d+.*, the task declared at "
    difference = rf"{re.escape(declared.place)}, by its C\+\+ code at {code}: "
    result = rf"(.*; )?{output} \({kind or dtype}\[3, 1\]\) is .* in eager .* Its code or its reference is wrong"
    with pytest.raises(TaskVerificationError, match=culprit + difference + result) as error:
        call(declared, dtype)
    assert "bug of torch_mpk" not in str(error.value)


def test_what_is_wrongly_updated_is_named(declare):
    declared = declare("state[0] = cast<T>(3.0f);", has_state=True)
    what = r"state \(torch.float32\[3, 5\]\), which is updated, is 3 at \[0, 0\], in eager 0"
    with pytest.raises(TaskVerificationError, match=f"{declared.name}.*: {what}"):
        call(declared)


def test_right_ones_pass(declare):
    total, where = call(declare(""))
    assert total.shape == (3, 8)
    assert where.shape == (3, 1)
    call(declare("", has_state=True))


@pytest.mark.parametrize(
    ("wrong", "output", "where"),
    [
        ("total[1] = cast<T>(0.0f);", r"total (torch.float32[3, 1])", "up to 4 bytes after its last element"),
        ("total[-1] = cast<T>(0.0f);", r"total (torch.float32[3, 1])", "from 4 bytes before its first element on"),
        ("for (int i = 1; i < 4000; i++) where[i] = 7;", "where (torch.int64[3, 1])", "up to 31992 bytes after its"),
        ("state[5] = cast<T>(1.0f);", "state (torch.float32[3, 5])", "up to 4 bytes after its last element"),
    ],
)
def test_writing_outside_of_an_output_is_named(wrong, output, where, declare):
    declared = declare(wrong, has_state="state" in wrong)
    message = f"task {declared.name} ({declared.place}): its C++ code at {declared.code('cpu')} writes outside of "
    with pytest.raises(StrayWriteError, match=re.escape(f"{message}{output}, {where}")):
        call(declared)


def test_writing_outside_of_shared_memory_is_named(declare):
    declared = declare("for (int i = 0; i < 200; i++) shared[i] = 1;")
    with pytest.raises(
        StrayWriteError, match=rf"task {declared.name} .* outside of shared, of which kSharedBytes says"
    ):
        call(declared)
    call(declare("for (int i = 0; i < 64; i++) shared[i] = 1;", shared_bytes=64))


def test_writing_between_the_rows_of_what_is_updated_is_named(declare):
    declared = declare("state[5] = cast<T>(1.0f);", has_state=True)
    operands = [torch.zeros(3, 9)[:, :5], torch.randn(3, 8)]
    guarded = GuardedCall(Call(declared, operands, {}), torch.device("cpu"), Options())
    with pytest.raises(StrayWriteError, match=r"writes outside of state .*(after its last element|between its rows)"):
        guarded.check(operands)
    assert not operands[0].any()


def test_the_way_that_is_named_is_the_one_that_runs(declare):
    declared = declare("total[0] = cast<T>(1.0f);")
    for dtype, runs in ((torch.float32, "C\\+\\+ code at .*\\.cpp:"), (torch.float64, "reference at .*\\.py:")):
        assert re.match(runs, way_of(declared, [dtype], torch.device("cpu"), Options()))


@pytest.mark.slow
def test_the_process_goes_on_where_the_heap_would_be_corrupted(declare, tmp_path):
    declared = declare("for (int i = 1; i < 9000; i++) total[i] = cast<T>(1.0f);")
    script = f"""
import sys
sys.path.insert(0, {str(tmp_path)!r})
import torch, torch_mpk, {declared.name}
def model(x, w):
    return torch.ops.mpk.{declared.name}(torch.nn.functional.linear(x, w))
step = torch.compile(model, backend="mpk", options={{"fallback": "error", "verify": True}})
with torch.inference_mode():
    try:
        step(torch.randn(3, 8), torch.eye(8))
    except torch_mpk.errors.StrayWriteError as error:
        print("named:", error)
"""
    (tmp_path / "script.py").write_text(script)
    done = subprocess.run([sys.executable, str(tmp_path / "script.py")], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert f"named: task {declared.name} ({Path(tmp_path)}" in done.stdout


def test_a_task_that_gives_something_else_every_time_is_suspected(declare):
    declared = declare("static int calls = 0; total[0] = cast<T>(sum + (calls++ < 6 ? 1.0f : 0.0f));")
    with pytest.raises(
        TaskVerificationError, match=rf"not the same every time, perhaps for the code of {declared.name}"
    ):
        call(declared, num_threads=1)
