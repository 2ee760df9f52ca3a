"""What tests, benchmarks and examples share, and checks of a task and a kernel. Nothing in torch_mpk imports it."""

from torch_mpk.testing.check import check_task
from torch_mpk.testing.check_kernel import check_kernel

__all__ = ["check_kernel", "check_task"]
