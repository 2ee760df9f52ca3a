"""What a device's memory delivers."""

from __future__ import annotations

import time

import torch

from torch_mpk import _C

_PROBE_BYTES = 2**26


def bytes_per_second(device: torch.device, num_threads: int) -> float | None:
    """By its data sheet on CUDA; on the CPU measured, with that many threads; None where unknown."""
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        clock_khz = getattr(properties, "memory_clock_rate", 0)
        bits = getattr(properties, "memory_bus_width", 0)
        return 2 * 1e3 * clock_khz * bits / 8 or None
    if device.type != "cpu":
        return None
    probe = torch.ones(_PROBE_BYTES, dtype=torch.uint8)
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        _C.cpu_read_words(probe.data_ptr(), _PROBE_BYTES // 8, num_threads)
        seconds.append(time.perf_counter() - start)
    return _PROBE_BYTES / min(seconds)
