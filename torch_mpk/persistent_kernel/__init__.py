"""The layer-by-layer API: ``PersistentKernel`` over the task graph that the backend runs models with."""

from torch_mpk.persistent_kernel.kernel import PersistentKernel, get_configurations_from_gpu
from torch_mpk.persistent_kernel.tb_graph import TBGraph
from torch_mpk.persistent_kernel.tensor import GlobalTensor

__all__ = ["GlobalTensor", "PersistentKernel", "TBGraph", "get_configurations_from_gpu"]
