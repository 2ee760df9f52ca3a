"""Stage 8, runtime: plans are loaded and called."""

from torch_mpk.runtime.segment import synchronize

__all__ = ["synchronize"]
