"""The tasks that have samples: torch_mpk's and the plugin's. Those that tests declare are theirs alone."""

import pytest

from tests.tasks import plugin  # noqa: F401  declares tasks
from torch_mpk import registry

TASKS = [t for t in registry.tasks() if t.samples and (t.is_ours or t.__module__.startswith("tests.tasks.plugin."))]
# Two take no float32 there: tests/codegen/test_prefill_attention.py and test_varlen_attention.py have them. Beside one,
# whose warps multiply together, quantised linears of few rows are refused, and another takes the sums of x alone:
# tests/codegen/test_quantized.py has them.
_ELSEWHERE = ("prefill_attention", "varlen_attention", "e4m3_linear", "ordered_linear")
ON_CUDA = [t for t in TASKS if t.name not in _ELSEWHERE]
SAMPLES = [pytest.param(t, sample, id=f"{t.name}-{i}") for t in TASKS for i, sample in enumerate(t.samples)]
FIRST_OF_EACH = [i for i, case in enumerate(SAMPLES) if case.id.endswith("-0")]
