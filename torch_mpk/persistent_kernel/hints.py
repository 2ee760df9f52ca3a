"""What Mirage's programs tell its runtime and means nothing to this one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch_mpk.warn_once import warn

_SCHEDULERS = "the schedule is decided when a kernel is compiled"
_PROFILE = "torch_mpk.profile shows what a kernel compiled with options={'profile': True} does"
_HERE = {  # what there is instead
    "mode": "a call runs the program once",
    "world_size": "a program runs on one device",
    "mpi_rank": "a program runs on the device of its tensors",
    "num_local_schedulers": _SCHEDULERS,
    "num_remote_schedulers": _SCHEDULERS,
    "profiler_tensor": _PROFILE,
    "trace_name": _PROFILE,
    "spec_decode_config": "a call runs the program once, as it is",
    "use_cutlass_kernel": "a linear layer has one implementation",
    "eos_token_id": "a call runs the program once",
}


def announce_hints(given: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
    """Say of each argument that has no effect that it has none, unless it is what is done anyway."""
    for name, instead in _HERE.items():
        value = given[name]
        if value is not defaults[name] and value != defaults[name]:
            shown = repr(value) if isinstance(value, (int, str)) else "..."
            warn(f"PersistentKernel({name}={shown}) has no effect: {instead}")
