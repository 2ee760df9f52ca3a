"""Stage 8, runtime: executables and the callables around them."""

from torch_mpk.runtime.program import Program, synchronize

__all__ = ["Program", "synchronize"]
