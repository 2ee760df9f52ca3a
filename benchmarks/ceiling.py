"""How fast this GPU streams memory: what a decode step, which reads every weight once, is measured against.

python benchmarks/ceiling.py
"""

import json
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import torch


def torch_sum_tb_per_s() -> float:
    """The rate at which torch.sum reads 4 GiB: the median of ten runs."""
    data = torch.ones(1 << 30, dtype=torch.float32, device="cuda")
    times = []
    for _ in range(13):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        data.sum()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return data.nbytes / statistics.median(times[3:]) / 1e9


def bulk_copies() -> dict[str, float]:
    """What ceiling.cu measures: ``tb_per_s`` and ``event_round_trip_us``. Needs nvcc, and Hopper or newer."""
    major, minor = torch.cuda.get_device_capability()
    suffix = "a" if major == 9 else ""
    target = f"arch=compute_{major}{minor}{suffix},code=sm_{major}{minor}{suffix}"
    source = Path(__file__).with_name("ceiling.cu")
    with tempfile.TemporaryDirectory() as folder:
        program = str(Path(folder, "ceiling"))
        command = ["nvcc", "-O3", "-std=c++17", "-gencode", target, str(source), "-o", program]
        subprocess.run(command, check=True, timeout=120, capture_output=True, text=True)
        result = subprocess.run([program], check=True, timeout=120, capture_output=True, text=True)
    return json.loads(result.stdout)


def measure_ceiling() -> dict[str, float | str]:
    """``tb_per_s`` and how it was measured (``method``), with torch.sum's rate beside it."""
    by_sum = torch_sum_tb_per_s()
    torch.cuda.empty_cache()
    if torch.cuda.get_device_capability() >= (9, 0) and shutil.which("nvcc"):
        try:
            return {"method": "bulk copies", "torch_sum_tb_per_s": by_sum, **bulk_copies()}
        except subprocess.SubprocessError as error:
            print(f"ceiling.cu failed, torch.sum instead: {error}\n{getattr(error, 'stderr', '')}", file=sys.stderr)
    return {"method": "torch.sum", "torch_sum_tb_per_s": by_sum, "tb_per_s": by_sum}


if __name__ == "__main__":
    print(json.dumps(measure_ceiling(), indent=2))
