"""Which module generates, loads and launches for a kind of device."""

from __future__ import annotations

import importlib
from typing import Any

import torch

BACKENDS = {"cuda": "torch_mpk.runtime.cuda", "cpu": "torch_mpk.runtime.cpu"}  # cuda needs the JIT: imported when used


def backend_of(device: torch.device) -> Any:
    """A module with ``target``, ``generate``, ``load``, ``current_stream`` and ``synchronize``."""
    return importlib.import_module(BACKENDS[device.type])
