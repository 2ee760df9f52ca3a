"""Which module generates, loads and launches for a kind of device."""

from __future__ import annotations

import importlib
from typing import Any

import torch

from torch_mpk.config import Options, env

DEFAULT_WATCHDOG_SECONDS = 10.0
BACKENDS = {"cuda": "torch_mpk.runtime.cuda", "cpu": "torch_mpk.runtime.cpu"}  # cuda needs the JIT: imported when used


def backend_of(device: torch.device) -> Any:
    """A module with ``target``, ``generate``, ``load``, ``current_stream``, ``synchronize`` and ``keep``."""
    return importlib.import_module(BACKENDS[device.type])


def watchdog_seconds(options: Options) -> float:
    """How long a launch may go without progress; 0 is for ever."""
    settings = (options.watchdog_seconds, env.watchdog_seconds, DEFAULT_WATCHDOG_SECONDS)
    return next(seconds for seconds in settings if seconds is not None)
