"""Times everything between torch.compile and the end of the first step, by stage: in a first process, and in a second.

    python benchmarks/compile_time.py [--model qwen3-8b]

Both processes share an empty cache directory. The first captures, schedules and compiles; the second finds the build.
Without a GPU, kernels are compiled for an H200 and not launched, and tensors lie in memory that nothing touches.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from typing import Any

import torch
from host_cost import simulated_gpu, uninitialised_step

from torch_mpk import timing
from torch_mpk.testing.models import CONFIGS


@torch.inference_mode()
def measure(model_name: str) -> dict[str, Any]:
    """Seconds by stage, of this process."""
    is_cuda = torch.cuda.is_available()
    if not is_cuda:
        simulated_gpu.install(compile_kernels=True)
    model, arguments = uninitialised_step(model_name, "cuda" if is_cuda else "cpu")
    start = time.perf_counter()
    torch.compile(model, backend="mpk", options={"fallback": "error"}, fullgraph=True)(**arguments)
    if is_cuda:
        torch.cuda.synchronize()
    total = time.perf_counter() - start
    (build,) = timing.recent
    return {"Dynamo and the first step": total - build.seconds} | build.stages | {"all but Dynamo": build.seconds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=sorted(CONFIGS), default="qwen3-8b")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(measure(args.model)))
        return
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {"TORCH_MPK_CACHE_DIR": folder}
        command = [sys.executable, __file__, "--model", args.model, "--child"]
        runs = []
        for _ in range(2):
            output = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True).stdout
            runs.append(json.loads(output.splitlines()[-1]))
    print(f"| {args.model} | first process, s | second process, s |\n|---|---|---|")
    for stage in runs[0]:
        print("|", stage, *(f"| {run[stage]:.2f}" if stage in run else "| –" for run in runs), "|")


if __name__ == "__main__":
    main()
