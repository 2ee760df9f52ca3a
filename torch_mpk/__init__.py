"""torch_mpk runs a whole model forward as one persistent GPU kernel: ``torch.compile(model, backend="mpk")``."""

from torch_mpk import jit, ops, plugins, tasks  # declares torch.ops.mpk and the tasks behind it
from torch_mpk.capture import substitutes
from torch_mpk.errors import MegakernelTimeout, MpkError, MpkWarning, UnsupportedError, VerificationError
from torch_mpk.explain import Report, explain
from torch_mpk.generate import generate
from torch_mpk.persistent_kernel import GlobalTensor, PersistentKernel, TBGraph, get_configurations_from_gpu
from torch_mpk.precompile import precompile
from torch_mpk.profile import KernelTimes, Profile, TaskTimes, profile
from torch_mpk.quantize import quantize
from torch_mpk.registry import task
from torch_mpk.runtime import synchronize
from torch_mpk.task_kernel import kernel_of

__version__ = "0.1.0"  # pyproject.toml reads it from here

__all__ = [
    "GlobalTensor",
    "KernelTimes",
    "MegakernelTimeout",
    "MpkError",
    "MpkWarning",
    "PersistentKernel",
    "Profile",
    "Report",
    "TBGraph",
    "TaskTimes",
    "UnsupportedError",
    "VerificationError",
    "explain",
    "generate",
    "get_configurations_from_gpu",
    "jit",
    "kernel_of",
    "ops",
    "precompile",
    "profile",
    "quantize",
    "synchronize",
    "task",
    "tasks",
]

substitutes.install()
plugins.load()  # last: they import this package
