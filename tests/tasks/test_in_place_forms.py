"""``torch.ops.mpk.<task>_``: a task whose result takes its first operand's place."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.tasks.every_task import TASKS
from torch_mpk import registry
from torch_mpk.errors import NoDerivativeError
from torch_mpk.ops import has_in_place_form
from torch_mpk.testing.tasks import copies

ops = torch.ops.mpk
FORMS = [task for task in TASKS if has_in_place_form(task)]
SAMPLES = [pytest.param(task, sample, id=f"{task.name}-{i}") for task in FORMS for i, sample in enumerate(task.samples)]


def test_tasks_of_elements_and_rows_have_one() -> None:
    assert {"rms_norm", "rope", "silu_mul", "gelu_mul", "softmax"} <= {task.name for task in FORMS}
    for name in ("linear", "argmax", "embedding", "attention", "kv_write", "paged_decode"):
        assert not hasattr(ops, f"{name}_"), name


@pytest.mark.parametrize(("task", "sample"), SAMPLES)
def test_operator(task: registry.Task, sample: dict) -> None:
    operands, attrs = task.sample(sample, torch.float32)
    torch.library.opcheck(getattr(ops, f"{task.name}_").default, tuple(operands), attrs)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(("task", "sample"), SAMPLES)
def test_it_writes_its_first_operand_alone(task: registry.Task, sample: dict, device: str) -> None:
    operands, attrs = task.sample(sample, torch.float32, device)
    eye = torch.eye(operands[0].shape[-1], device=device)

    def step(first: torch.Tensor, *others: torch.Tensor | None) -> torch.Tensor:
        before = F.linear(first, eye)
        assert getattr(ops, f"{task.name}_")(first, *others, **attrs) is None
        return before - first

    with torch.no_grad():
        wanted = task(*copies(operands), **attrs)
        for run in (step, torch.compile(step, backend="mpk", options={"fallback": "error"})):
            given = copies(operands)
            versions = [None if t is None else t._version for t in given]
            difference = run(*given)
            torch.testing.assert_close(given[0], wanted)
            torch.testing.assert_close(difference, operands[0] - wanted)
            for i, (t, before, version) in enumerate(zip(given, operands, versions, strict=True)):
                assert i == 0 or t is None or torch.equal(t, before)
                assert run is not step or t is None or (t._version > version) == (i == 0)


def test_autograd_is_refused() -> None:
    with pytest.raises(NoDerivativeError, match=r"torch.ops.mpk.silu_mul_ has no derivative"):
        ops.silu_mul_(torch.ones(2), torch.ones(2, requires_grad=True))
