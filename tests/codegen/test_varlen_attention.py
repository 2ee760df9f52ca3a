"""Attention of ragged sequences, as its device code computes it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import pytest
import torch

import torch_mpk.tasks  # noqa: F401  declares the tasks
from tests.cpu.test_varlen_attention import NAMES, alone, operands_of
from tests.schedule.decoder_graph import Builder
from tests.thinned import thinned
from torch_mpk import _C, registry
from torch_mpk.errors import UnsupportedError
from torch_mpk.jit import compile_cuda
from torch_mpk.task_kernel import kernel_of
from torch_mpk.tasks.varlen_attention import varlen_attention
from torch_mpk.testing.emulator import SMEM_BYTES, EmulatedKernel, aligned, emulate

HOPPER = _C.Target("cuda", 90, 132, SMEM_BYTES, True, True)


@dataclass(frozen=True)
class Case:
    """One call: of each sequence its new tokens, and what the cache has of it. As an engine pads them, there are tokens
    behind the last, sequences of no tokens, and a list that is longer than what is read."""

    tokens: tuple[int, ...]
    cached: tuple[int, ...]
    heads: int = 4
    groups: int = 2
    size: int = 128
    padding: int = 0
    window: int = 0
    dtype: str = "bfloat16"
    more_sequences: int = 0
    is_split: bool = False  # the cache's rows stand between other layers'
    value_size: int = 0  # where it differs from that of keys
    softcap: float = 0.0
    has_sinks: bool = False

    def operands(self) -> dict[str, torch.Tensor]:
        sizes = self.heads, self.groups, self.size, self.padding
        made = operands_of([*self.tokens], [*self.cached], *sizes, getattr(torch, self.dtype))
        for name in ("cu_seq_lens_q", "cu_seq_lens_k"):
            made[name] = torch.cat((made[name], made[name][-1:].repeat(self.more_sequences)))
        if self.value_size:
            for name in ("v_new", "v_cache"):
                made[name] = torch.randn(*made[name].shape[:2], self.value_size).to(made[name].dtype)
        if self.has_sinks:
            made["sinks"] = torch.randn(self.heads).to(made["q"].dtype) + 1
        return made

    @property
    def y_shape(self) -> list[int]:
        return [sum(self.tokens) + self.padding, self.heads, self.value_size or self.size]

    def like(self, other: Case) -> dict[str, torch.Tensor]:
        """This one's operands, for a kernel of ``other``'s sizes."""
        made = self.operands()
        wanted = other.operands()
        assert len(made["q"]) == len(wanted["q"])
        for name in ("k_cache", "v_cache", "read_index"):
            missing = len(wanted[name]) - len(made[name])
            assert missing >= 0
            made[name] = torch.cat((made[name], wanted[name][:missing]))
        for name in ("cu_seq_lens_q", "cu_seq_lens_k"):
            made[name] = torch.cat((made[name], made[name][-1:].repeat(len(wanted[name]) - len(made[name]))))
        return made

    def graph(self) -> _C.TBGraph:
        b = Builder()
        rows = []
        for name, t in self.operands().items():
            dtype, shape, strides = str(t.dtype).removeprefix("torch."), [*t.shape], [*t.stride()]
            buffer = b.buffer("input", name, dtype, [2 * shape[0], *shape[1:]] if self.splits(name) else shape)
            if self.splits(name):
                strides[0] *= 2
            rows.append((name, _C.Tensor(buffer.buffer, dtype, shape, strides), True, False))
        y = b.buffer("output", "y", self.dtype, self.y_shape)
        b.graph.add_node("varlen_attention", [*rows, ("y", y, False, True)], self.attrs, None, "")
        return b.graph

    def splits(self, name: str) -> bool:
        return self.is_split and name in ("k_cache", "v_cache")

    def in_memory(self, operands: dict[str, torch.Tensor]) -> list[torch.Tensor]:
        """Where accesses beyond the operands are noticed; between a layer's rows stands what nobody reads."""
        made = []
        for name, t in operands.items():
            shape = (2 * len(t), *t.shape[1:]) if self.splits(name) else t.shape
            memory = aligned(torch.Size(shape).numel() * t.itemsize, 0xFF).view(t.dtype).view(shape)
            (memory[: 2 * len(t) : 2] if self.splits(name) else memory).copy_(t)
            made.append(memory)
        return made

    @property
    def attrs(self) -> dict[str, float]:
        return {"scale": self.size**-0.5, "window": self.window, "softcap": self.softcap}


def call(kernel: EmulatedKernel, case: Case, operands: dict[str, torch.Tensor], **kwargs) -> torch.Tensor:
    dtype = operands["q"].dtype
    y = aligned(torch.Size(case.y_shape).numel() * dtype.itemsize, 0xFF).view(dtype).view(case.y_shape)
    kernel.launch(case.in_memory(operands), [y], watchdog_ns=20 * 10**9, **kwargs)
    assert kernel.host_abort.sum() == 0
    return y


def assert_right(case: Case, operands: dict[str, torch.Tensor], got: torch.Tensor) -> None:
    """As near to what float64 gives as the same in float32, rounded as the kernel rounds."""
    wide = [t.double() if t is not None and t.is_floating_point() else t for t in map(operands.get, NAMES)]
    exact = varlen_attention(*wide, **case.attrs)
    unit = torch.finfo(got.dtype).eps
    assert (got - exact).norm() <= 0.75 * unit * exact.norm()
    assert (got - exact).abs().max() <= 2 * unit * exact.abs().max() + unit
    end = int(operands["cu_seq_lens_q"][-1])
    assert not got[end:].any()


CASES = [
    Case((70, 1, 0, 40, 1), (0, 130, 20, 65, 0), padding=17, more_sequences=3),
    Case((1,) * 37, tuple(range(0, 370, 10)), heads=8, groups=2, size=64, padding=91, dtype="float16"),
    Case((130,), (200,), heads=6, groups=2, window=50, is_split=True),
    Case((33, 90, 5), (300, 0, 129), heads=3, groups=3, size=64, window=1, dtype="float16"),
    Case((), (), padding=128, more_sequences=4),
    Case((20, 3), (140, 255), heads=14, groups=2, size=64, padding=9, window=64),
    Case((9, 2), (40, 0), heads=130, groups=1, size=64),
    Case((128, 64), (0, 128), heads=16, groups=8, is_split=True, more_sequences=40),
    Case((70, 1, 40), (0, 130, 65), size=64, padding=5, softcap=1.5, has_sinks=True),
    Case((9, 2), (140, 0), size=128, window=50, has_sinks=True, dtype="float16"),
    Case((40, 3), (70, 20), size=72, value_size=40, padding=5, softcap=2.0, has_sinks=True, is_split=True),
    Case((20, 1), (0, 100), size=192, value_size=128, padding=3),
    Case((20, 150), (30, 0), size=256, heads=2, groups=1, window=64, has_sinks=True),
    *(Case((20, 3), (40, 7), size=size, heads=2, groups=1, dtype="float16") for size in (8, 80, 96, 112, 160, 192)),
]


@pytest.mark.parametrize("case", thinned(CASES, 2, 10), ids=str)
def test_it_is_right_in_any_order(case: Case) -> None:
    torch.manual_seed(0)
    kernel, operands = emulate(case.graph(), polled=True), case.operands()
    made = []
    for seed, order in enumerate(("forward", "reverse", "shuffled")):
        made.append(call(kernel, case, operands, seed=seed, order=order, jitter=seed))
    assert all(torch.equal(made[0].view(torch.int16), other.view(torch.int16)) for other in made[1:])
    assert_right(case, operands, made[0])


@pytest.mark.parametrize("window", thinned([0, 60], 1))
def test_one_kernel_for_requests_that_come_go_and_grow(window: int) -> None:
    largest = Case((100, 28, 40), (150, 170, 90), heads=4, groups=2, size=64, window=window, more_sequences=9)
    kernel = emulate(largest.graph(), polled=True)
    for seed in range(6):
        torch.manual_seed(seed)
        rng = torch.Generator().manual_seed(seed)
        tokens, left = [], 168 - seed
        for _ in range(12):
            tokens.append(min(left, int(torch.randint(0, (2, 60, 168)[seed % 3], (), generator=rng))))
            left -= tokens[-1]
        cached = [int(n) for n in torch.randint(0, 30, (12,), generator=rng)]
        case = replace(largest, tokens=tuple(tokens), cached=tuple(cached), padding=168 - sum(tokens), more_sequences=0)
        operands = case.like(largest)
        assert_right(case, operands, call(kernel, largest, operands, seed=seed))


@pytest.mark.parametrize("case", thinned([CASES[0], CASES[5]]), ids=str)
def test_a_sequence_has_the_bits_that_it_has_alone(case: Case) -> None:
    torch.manual_seed(0)
    operands = case.operands()
    whole = call(emulate(case.graph(), polled=True), case, operands)
    for i, (begin, end) in enumerate(pairwise(accumulate(case.tokens, initial=0))):
        if begin == end:
            continue
        own = replace(case, tokens=(end - begin,), cached=(case.cached[i],), padding=0, more_sequences=0)
        of_one = alone(operands, i)
        fitting = own.operands()
        for name in ("k_cache", "v_cache"):  # of the size that the kernel is for
            rows = of_one["read_index"][: case.cached[i]]
            fitting[name][: len(rows)] = operands[name][rows]
        fitting["read_index"][: case.cached[i]] = torch.arange(case.cached[i])
        fitting |= {name: of_one[name] for name in ("q", "k_new", "v_new")}
        assert torch.equal(call(emulate(own.graph(), polled=True), own, fitting), whole[begin:end])


def test_what_no_sequence_sees_may_be_anything() -> None:
    case = CASES[2]
    operands = case.operands()
    kernel = emulate(case.graph(), polled=True)
    wanted = call(kernel, case, operands)
    unseen = torch.ones(len(operands["k_cache"]), dtype=torch.bool)
    unseen[operands["read_index"][:200]] = False
    for name in ("k_cache", "v_cache"):
        operands[name][unseen] = torch.nan
    assert torch.equal(call(kernel, case, operands), wanted)
    assert wanted.isfinite().all()


def test_a_sequence_that_is_not_finite_is_so_alone() -> None:
    case = CASES[0]
    operands = case.operands()
    kernel = emulate(case.graph(), polled=True)
    wanted = call(kernel, case, operands)
    operands["v_new"][70] = torch.nan  # the second sequence's token
    got = call(kernel, case, operands)
    assert got[70].isnan().all()
    assert torch.equal(got[:70], wanted[:70])
    assert torch.equal(got[71:], wanted[71:])


def test_bounds_that_make_no_sense_read_and_write_nothing_beyond() -> None:
    case = CASES[0]
    kernel, operands = emulate(case.graph(), polled=True), case.operands()
    for seed in range(4):
        torch.manual_seed(seed)
        for name in ("cu_seq_lens_q", "cu_seq_lens_k"):
            operands[name] = torch.randint(-(2**31), 2**31 - 1, operands[name].shape).int()
            if seed % 2:
                operands[name] %= 300
        call(kernel, case, operands)


def test_a_launch_sees_what_it_has_written_itself() -> None:
    """Queries, new keys and values and the bounds come from a phase before."""
    case = CASES[0]
    b = Builder()
    kinds = {n: str(t.dtype).removeprefix("torch.") for n, t in case.operands().items()}
    shapes = {n: [*t.shape] for n, t in case.operands().items()}
    given = {n: b.buffer("input", n, kinds[n], shapes[n]) for n in kinds}
    made = dict(given)
    for name in ("q", "k_new", "v_new", "cu_seq_lens_q", "read_index"):
        added = b.buffer("input", f"{name}.added", kinds[name], shapes[name])
        made[name] = b.buffer("workspace", f"{name}.sum", kinds[name], shapes[name])
        b.pointwise("add", [given[name], added], made[name], name)
    y = b.buffer("workspace", "y", case.dtype, shapes["q"])
    rows = [(name, of, True, False) for name, of in made.items()]
    b.graph.add_node("varlen_attention", [*rows, ("y", y, False, True)], case.attrs, None, "")
    b.pointwise("neg", [y], b.buffer("output", "negative", case.dtype, shapes["q"]))
    kernel = emulate(b.graph, polled=True)
    [waits] = [job.loader_waits for p in kernel.schedule.phases for job in p.jobs if "positions" in job.cut.fields]
    assert waits
    for seed in range(2):
        torch.manual_seed(seed)
        operands = case.operands()
        zeros = [torch.zeros_like(operands[n]) for n in ("q", "k_new", "v_new", "cu_seq_lens_q", "read_index")]
        got = torch.empty_like(operands["q"])
        memory = [aligned(t.nbytes, 0).view(t.dtype).view(t.shape).copy_(t) for t in [*operands.values(), *zeros]]
        kernel.launch(memory, [got], seed=seed, jitter=seed, watchdog_ns=20 * 10**9)
        assert kernel.host_abort.sum() == 0
        assert_right(case, operands, -got)


@pytest.mark.slow
def test_more_workers_than_units_and_fewer() -> None:
    case = CASES[0]
    operands = case.operands()
    made = [call(emulate(case.graph(), workers=n), case, operands, jitter=n) for n in (1, 20)]
    assert torch.equal(*made)
    assert_right(case, operands, made[0])


@pytest.mark.gpu
@pytest.mark.parametrize(
    "case", [*CASES, Case((700, *[1] * 20), (30, *range(0, 8000, 400)), heads=16, groups=8, padding=8)], ids=str
)
def test_it_is_right_on_a_gpu(case: Case) -> None:
    torch.manual_seed(0)
    operands = case.operands()
    given = {name: t.cuda() for name, t in operands.items()}
    for name in filter(case.splits, given):
        given[name] = torch.stack((given[name], torch.full_like(given[name], torch.nan)), 1)[:, 0]
    kernel = kernel_of(registry.get("varlen_attention"))
    made = [kernel(*map(given.get, NAMES), **case.attrs) for _ in range(3)]
    assert all(torch.equal(made[0].view(torch.int16), other.view(torch.int16)) for other in made[1:])
    assert_right(case, operands, made[0].cpu())  # racecheck would follow each access of eager kernels


@pytest.mark.parametrize(
    ("size", "window", "more"),
    thinned(
        [
            (128, 0, {}),
            (128, 4096, {"dtype": "float16"}),
            (64, 512, {}),
            *((size, 0, {}) for size in (72, 80, 96, 112, 160, 256)),
            (192, 0, {"value_size": 128}),
            (192, 4096, {"softcap": 30.0, "has_sinks": True}),
            (256, 4096, {"softcap": 50.0}),
            (64, 128, {"has_sinks": True}),
        ],
        1,
    ),
)
def test_it_compiles_and_keeps_little_in_local_memory(size: int, window: int, more: dict) -> None:
    case = Case((1000,), (5000,), 16, 8, size, padding=1048, window=window, more_sequences=63, **more)
    schedule = _C.make_schedule(case.graph(), HOPPER)
    _C.validate(schedule)
    resources = compile_cuda(_C.generate_cuda(schedule).source, 90).resources
    assert resources.warnings == ()
    assert resources.registers <= schedule.warps.registers
    most = 16 if case.size <= 128 else 32  # bytes: some of what a thread knows of the launch, while it is at the job
    assert resources.stack_bytes <= most


@pytest.mark.parametrize(
    ("changed", "arch", "message"),
    [
        ({"dtype": "float32"}, 90, "q is float32, and tensor cores take bfloat16 and float16 alone"),
        ({"size": 84}, 90, "the head size must be a multiple of 8 up to 256, got 84"),
        ({}, 80, "it needs products of warpgroups, which compute capability 9.0 has, and code for 8.0 has not"),
        ({}, 120, "it needs products of warpgroups, which .* has, and code for 12.0 has not"),
    ],
)
def test_what_there_is_no_code_for_says_so(changed: dict, arch: int, message: str) -> None:
    case = replace(CASES[0], **changed)
    schedule = _C.make_schedule(case.graph(), _C.Target("cuda", arch, 132, SMEM_BYTES, True, True))
    _C.validate(schedule)
    with pytest.raises(UnsupportedError, match=f"varlen_attention.*{message}"):
        _C.generate_cuda(schedule)
