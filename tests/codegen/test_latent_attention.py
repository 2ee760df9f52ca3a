"""Attention over cached latents, as its device code on tensor cores computes it."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

import torch_mpk.tasks  # noqa: F401  declares the tasks
from tests.codegen.emulated_calls import allocate, relative_error, tensors
from tests.schedule.decoder_graph import Builder
from tests.thinned import thinned
from torch_mpk import _C, registry
from torch_mpk.jit import compile_cuda
from torch_mpk.task_kernel import kernel_of
from torch_mpk.tasks.latent_attention import latent_attention
from torch_mpk.testing.emulator import SMEM_BYTES, Order, aligned, emulate

KERNEL = "latent_attention.split_kv"


@dataclass(frozen=True)
class Case:
    limits: tuple[int, ...]  # of the rows; beyond the length: all positions
    heads: int = 16
    size: int = 64
    rope: int = 16
    length: int = 150
    dtype: str = "bfloat16"
    mask: str = ""  # its dtype
    workers: int = 3
    smem_bytes: int = SMEM_BYTES
    arch: int = 90

    def graph(self) -> _C.TBGraph:
        b, rows = Builder(), len(self.limits)
        operands = [
            (name, b.buffer("input", name, self.dtype, shape))
            for name, shape in {
                "q": [rows, self.heads, self.size],
                "q_rope": [rows, self.heads, self.rope],
                "latent": [rows, 1, self.length, self.size],
                "rope": [rows, 1, self.length, self.rope],
            }.items()
        ]
        if self.mask:
            operands.append(("mask", b.buffer("input", "mask", self.mask, [rows, self.heads, self.length])))
        operands.append(("limit", b.buffer("input", "limit", "int64", [rows])))
        y = b.buffer("output", "y", self.dtype, [rows, self.heads, self.size])
        b.node("latent_attention", operands, y, {"scale": self.scale})
        return b.graph

    @property
    def scale(self) -> float:
        return (self.size + self.rope) ** -0.5

    def schedule(self) -> _C.Schedule:
        return _C.make_schedule(self.graph(), _C.Target("cuda", self.arch, self.workers, self.smem_bytes))

    def inputs(self) -> list[torch.Tensor]:
        made = [allocate(t) for t in tensors(self.graph(), "input")]
        for x in made:
            if x.dtype == torch.int64:
                x.copy_(torch.tensor(self.limits))
            elif x.dtype == torch.bool:
                x.copy_(torch.rand(x.shape) < 0.6)
                x[0, 1] = False  # a head without a key
            else:
                x.copy_(torch.randn(x.shape))
        for row, limit in enumerate(self.limits):  # a free slot of a cache may hold anything
            made[2][row, :, limit:], made[3][row, :, limit:] = torch.nan, torch.inf
        return made

    def exact(self, inputs: list[torch.Tensor]) -> torch.Tensor:
        wide = [t.double() if t.is_floating_point() else t for t in inputs]
        mask = wide[4] if self.mask else None
        return latent_attention.reference(*wide[:4], mask, wide[-1], scale=self.scale)


CASES = {
    "one row, many splits": Case((513,), length=700, workers=10),
    "one row, few positions": Case((5,), size=128),
    "three rows": Case((150, 1, 77), mask="bool"),
    "eight rows": Case((70, 200, 64, 65, 3, 16, 0, 9), heads=20, length=80, dtype="float16"),
    "more rows than workers": Case(tuple(range(1, 64, 2)), length=64, workers=5),
    "20 heads, one row": Case((150,), heads=20, mask="float32", workers=5),
    "sizes of DeepSeek": Case((300,), size=512, rope=64, length=320, workers=4),
    "sizes of DeepSeek, three rows": Case((100, 320, 40), heads=20, size=512, rope=64, length=320, workers=7),
    "little shared memory": Case((130,), size=512, rope=64, smem_bytes=100 << 10),
    "an odd number of steps": Case((130, 20), size=192, rope=16, smem_bytes=100 << 10),
    "sm_80": Case((130, 20), heads=3, arch=80, smem_bytes=166912),
}


@pytest.mark.parametrize(
    ("name", "order"),
    [
        *thinned([(name, "shuffled") for name in CASES], 0, 3),
        *thinned([(name, order) for name in CASES for order in ("forward", "reverse")]),
    ],
)
def test_results(name: str, order: Order) -> None:
    case = CASES[name]
    kernel = emulate_case(case, racecheck=False)
    inputs = case.inputs()
    expected = case.exact(inputs)
    results = []
    for seed in range(2):  # the second finds the words of the first
        y = aligned(expected.numel() * 2, 0xFF).view(getattr(torch, case.dtype)).view(expected.shape)
        kernel.launch(inputs, [y], order=order, jitter=3, seed=seed)
        results.append(y)
    assert relative_error(results[0], expected) < (4e-3 if case.dtype == "bfloat16" else 1e-3)
    assert torch.equal(*results)


def emulate_case(case: Case, racecheck: bool):
    [[job]] = [phase.jobs for phase in case.schedule().phases]
    assert job.cut.kernel == KERNEL
    return emulate(case.graph(), workers=case.workers, arch=case.arch, smem_bytes=case.smem_bytes, racecheck=racecheck)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["one row, many splits", "three rows"])
def test_no_thread_reads_what_another_still_writes(name: str) -> None:
    case = CASES[name]
    kernel, inputs = emulate_case(case, racecheck=True), case.inputs()
    expected = case.exact(inputs)
    y = aligned(expected.numel() * 2, 0xFF).view(getattr(torch, case.dtype)).view(expected.shape)
    kernel.launch(inputs, [y], order="shuffled", jitter=3)
    assert relative_error(y, expected) < 4e-3


def test_a_row_does_not_depend_on_the_others() -> None:
    case = Case((150, 130, 90), workers=4)
    kernel, inputs = emulate_case(case, racecheck=False), case.inputs()
    results = []
    for others in (90, 3):
        inputs[-1][2] = others
        y = aligned(3 * 16 * 64 * 2).view(torch.bfloat16).view(3, 16, 64)
        kernel.launch(inputs, [y])
        results.append(y[:2].clone())
    assert torch.equal(*results)


REFUSED = {
    "float32": (Case((5,), dtype="float32"), "q is float32, and tensor cores take"),
    "size": (Case((5,), size=96), "latents must have a multiple of 64 elements up to 512, got 96"),
    "too wide": (Case((5,), size=576), "up to 512, got 576"),
    "rope": (Case((5,), rope=24), "rotated keys must have a multiple of 16 elements up to 128, got 24"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_left_to_the_plain_function(name: str) -> None:
    case, why = REFUSED[name]
    [[job]] = [phase.jobs for phase in case.schedule().phases]
    assert job.cut.kernel == "tile"
    assert any(why in other.refusal for other in job.others if other.kernel == KERNEL)


@pytest.mark.parametrize(
    ("arch", "rows"),
    thinned([(arch, rows) for arch in (90, 80) for rows in (1, 8, 32)], 0),
)
def test_it_compiles_without_spills(arch: int, rows: int) -> None:
    smem_bytes = {90: SMEM_BYTES, 80: 166912}[arch]
    case = Case((1024,) * rows, size=512, rope=64, length=1024, workers=132, smem_bytes=smem_bytes, arch=arch)
    resources = compile_cuda(_C.generate_cuda(case.schedule()).source, arch).resources
    assert resources.warnings == ()
    assert resources.stack_bytes == resources.spill_store_bytes == 0


@pytest.mark.gpu
@pytest.mark.parametrize(
    "case",
    [
        *(case for case in CASES.values() if case.arch == 90),
        Case((513,), size=512, rope=64, length=1024),
        Case((8000,), heads=128, size=512, rope=64, length=8192),
        Case(tuple(range(1, 1024, 32)), size=512, rope=64, length=1024, mask="bool"),
    ],
    ids=str,
)
def test_it_is_right_on_a_gpu(case: Case) -> None:
    torch.manual_seed(0)
    inputs = case.inputs()
    given = [t.cuda() for t in inputs]
    kernel = kernel_of(registry.get("latent_attention"))
    mask = given[4] if case.mask else None
    made = [kernel(*given[:4], mask, given[-1], scale=case.scale) for _ in range(3)]
    assert all(torch.equal(made[0].view(torch.int16), other.view(torch.int16)) for other in made[1:])
    assert relative_error(made[0].cpu(), case.exact(inputs)) < 1e-2
