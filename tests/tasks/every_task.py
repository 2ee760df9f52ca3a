"""The tasks that have samples: torch_mpk's and the plugin's. Those that tests declare are theirs alone."""

import plugin  # noqa: F401  declares tasks
import pytest

from torch_mpk import registry

TASKS = [t for t in registry.tasks() if t.samples and t.__module__.startswith(("torch_mpk.", "plugin."))]
SAMPLES = [pytest.param(t, sample, id=f"{t.name}-{i}") for t in TASKS for i, sample in enumerate(t.samples)]
