"""``from torch_mpk.mpk.persistent_kernel import PersistentKernel``: Mirage's import, with one word changed."""

from torch_mpk.persistent_kernel import GlobalTensor, PersistentKernel, TBGraph, get_configurations_from_gpu

__all__ = ["GlobalTensor", "PersistentKernel", "TBGraph", "get_configurations_from_gpu"]
