"""Code with a copy engine and without products of warpgroups, in as little shared memory as consumers' GPUs have."""

from __future__ import annotations

import pytest
import torch

from tests.codegen.test_emulated import check_decoder
from tests.schedule.decoder_graph import decoder
from tests.thinned import thinned
from torch_mpk import _C
from torch_mpk.testing.emulator import EmulatedKernel, emulate

CONSUMERS = _C.arch_of(120)
QWEN3 = {"heads": 16, "groups": 8, "head_dim": 128, "length": 1024, "vocab": 151936, "layers": 2}


def schedule(batch: int, workers: int, hidden: int = 1024, ffn: int = 3072) -> _C.Schedule:
    graph = decoder(batch=batch, hidden=hidden, ffn=ffn, **QWEN3)
    made = _C.make_schedule(graph, _C.Target("cuda", 120, workers, CONSUMERS.smem_bytes, True, True))
    _C.validate(made)
    return made


@pytest.mark.parametrize("workers", [82, CONSUMERS.num_sms])
@pytest.mark.parametrize("sizes", [{}, {"hidden": 4096, "ffn": 12288}], ids=str)
def test_every_number_of_rows_fits_little_shared_memory(sizes: dict[str, int], workers: int) -> None:
    """Beside sums, what is staged whole, and polled, is as much as leaves a ring; stages of x are narrower."""
    widths = {}
    for batch in (1, 2, 3, 8, 10, 12, 16, 17, 18, 24, 32, 33, 48, 56, 64):
        made = schedule(batch, workers, **sizes)
        assert not made.warps.moves_registers
        assert "multiply_blocks" not in _C.generate_cuda(made).source
        cuts = [job.cut for phase in made.phases for job in phase.jobs if job.cut.shape]
        in_stages = [cut for cut in cuts if "stages" in cut.input]
        assert batch == 1 or all(cut.kernel == "linear.rows" and not cut.fields["by_warpgroups"] for cut in cuts)
        widths[batch] = {cut.shape.chunk_bytes for cut in in_stages}
    assert widths[64] == {128}
    assert max(widths[12 if sizes else 16]) > 128


def check(kernel: EmulatedKernel, batch: int) -> None:
    assert not kernel.schedule.warps.moves_registers
    torch.manual_seed(batch)
    check_decoder(kernel, [5] * (batch - 2) + [0, 40][2 - min(batch, 2) :], 39, 2e-2)


@pytest.mark.parametrize(
    ("arch", "batch", "ffn", "workers"),
    thinned(
        [
            *((120, batch, 512, 3) for batch in (1, 2, 8, 33, 64)),
            (120, 20, 2048, 9),  # stages of x, more than half of shared memory
            (100, 64, 1024, 3),
        ],
        0,
    ),
)
def test_a_decoder_without_warpgroups(arch: int, batch: int, ffn: int, workers: int) -> None:
    sizes = {"hidden": 512, "heads": 4, "groups": 2, "head_dim": 32, "length": 40, "layers": 1}
    smem_bytes = _C.arch_of(arch).smem_bytes
    graph = decoder(batch=batch, ffn=ffn, **sizes)
    check(emulate(graph, arch=arch, workers=workers, smem_bytes=smem_bytes, polled=True), batch)
