"""The hand-written declarations of the CUDA driver interface against those of cuda.h."""

import subprocess
from pathlib import Path

from torch_mpk.jit.headers import find_cuda_headers, include_dir


def test_declarations_match_cuda_h():
    headers = find_cuda_headers((13, 0))
    assert headers, "CUDA's headers are needed here: install a CUDA toolkit, or pip install nvidia-cuda-runtime"
    source = Path(__file__).with_name("driver_abi.cpp")
    command = ["g++", "-std=c++20", "-fsyntax-only", f"-I{include_dir()}", f"-I{headers}", source]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
