"""What tests, benchmarks and examples share, and a check for who writes a task. Nothing in torch_mpk imports it."""

from torch_mpk.testing.check import check_task

__all__ = ["check_task"]
