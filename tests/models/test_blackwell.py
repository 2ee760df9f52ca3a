"""Code for consumers' GPUs, without products of warpgroups, on a part of a GPU that is here."""

import json

import pytest
import torch

from tests.models.stepping import compiled, run_both
from torch_mpk import _C
from torch_mpk.config import Options
from torch_mpk.runtime import cuda
from torch_mpk.testing.tiny import tiny_model

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda", 0)
NUM_WORKERS = 82  # of the smallest chip with so much shared memory that is met often, an RTX 3090


@pytest.fixture
def consumers_gpu(monkeypatch: pytest.MonkeyPatch) -> _C.Target:
    """What everything is scheduled for: code for 12.0, which this device compiles and runs."""
    arch, capability = _C.arch_of(120), _C.device_info(0).arch
    if not _C.can_run(capability, arch):
        pytest.skip("this GPU has no copy engine")

    def target(device: torch.device, options: Options) -> _C.Target:
        return _C.Target("cuda", arch.number, NUM_WORKERS, arch.smem_bytes, options.fuse, True, capability)

    monkeypatch.setattr(cuda, "target", target)
    return target(DEVICE, Options())


@pytest.mark.parametrize("batch", [1, 2, 8, 33, 64])
@pytest.mark.parametrize("name", ["qwen3", "llama"])
def test_decode_steps_as_a_consumers_gpu_takes_them(batch, name, consumers_gpu, tmp_path, monkeypatch):
    """Of rows that are staged whole, and of some that come in stages, in less shared memory than they would take."""
    monkeypatch.setenv("TORCH_MPK_DUMP", str(tmp_path))
    sizes = {"hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16, "num_key_value_heads": 8}
    model = tiny_model(name, device=DEVICE, head_dim=64, initializer_range=0.02, **sizes)
    run_both(model, compiled(model), batch=batch, mask="none")
    schedules = list(tmp_path.rglob("5.schedule.json"))
    assert schedules
    for path in schedules:
        schedule = json.loads(path.read_text())
        target = schedule["target"]
        assert (target["arch"], target["workers"], target["smem_bytes"]) == (120, NUM_WORKERS, 99 << 10)
        assert "moves_registers" not in schedule["warps"]
        source = path.with_name("6.kernel.cu").read_text()
        assert ("#define MPK_ARCH 1200\n" in source) == (consumers_gpu.device_arch != 120)
        jobs = [job for phase in schedule["phases"] for job in phase["jobs"]]
        in_boxes = [job for job in jobs if job["shape"] and "is_boxed" in job["shape"]]
        assert bool(in_boxes) == (batch > 1)
        assert any("stages" in (job["input"] or "") for job in in_boxes) == (batch > 8)
