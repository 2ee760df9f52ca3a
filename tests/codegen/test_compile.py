"""Generated kernels compile for the device without the assembler giving anything up, within a budget of spills."""

from __future__ import annotations

import pytest
from decoder_graph import decoder

import torch_mpk.tasks  # noqa: F401  declares the tasks
from torch_mpk import _C
from torch_mpk.jit.compile import compile_cuda

QWEN3_06B = {"hidden": 1024, "heads": 16, "groups": 8, "head_dim": 128, "ffn": 3072, "length": 1024, "vocab": 151936}
SMEM_BYTES = {90: 232448, 80: 166912}


@pytest.mark.parametrize(
    ("arch", "batch", "spill_budget"),
    [(90, 1, 64), (90, 8, 256), (80, 1, 64)],
)
def test_a_decoder_compiles(arch: int, batch: int, spill_budget: int) -> None:
    graph = decoder(batch=batch, **QWEN3_06B)
    schedule = _C.make_schedule(graph, _C.Target("cuda", arch, 132, SMEM_BYTES[arch]))
    program = _C.generate_cuda(schedule)
    resources = compile_cuda(program.source, arch).resources
    assert resources.warnings == ()
    assert resources.registers <= 128  # 416 threads share 65,536, in units of 128 threads
    assert resources.spill_store_bytes <= spill_budget
    assert program.num_threads == 416


def test_depth_adds_table_rows_only() -> None:
    target = _C.Target("cuda", 90, 132, SMEM_BYTES[90])
    shallow, deep = (_C.generate_cuda(_C.make_schedule(decoder(layers=n, **QWEN3_06B), target)) for n in (3, 12))
    assert deep.source.count("struct ") == shallow.source.count("struct ")
    assert deep.num_phases - shallow.num_phases == 9 * 5
    assert len(deep.table) - len(shallow.table) == 9 * 5 * 512


def test_what_cannot_be_generated_is_named() -> None:
    target = _C.Target("cuda", 90, 132, SMEM_BYTES[90])
    with pytest.raises(RuntimeError, match=r"linear \(layers.0.q\): x has 17 rows, at most 16 are supported"):
        _C.generate_cuda(_C.make_schedule(decoder(batch=17), target))
    with pytest.raises(
        RuntimeError, match=r"attention \(layers.0.attention\): the head size must be a multiple of 8 up to 256"
    ):
        _C.generate_cuda(_C.make_schedule(decoder(head_dim=20), target))
    with pytest.raises(RuntimeError, match="expected cuda with compute capability 8.0 or newer"):
        _C.generate_cuda(_C.make_schedule(decoder(), _C.Target("cpu")))
