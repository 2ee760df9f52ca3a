"""Attention of many positions, as its device code computes it."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import pytest
import torch
from transformers import StaticCache

import torch_mpk.tasks  # noqa: F401  declares the tasks
from tests.codegen.emulated_calls import allocate, reference, relative_error, tensors
from tests.codegen.model_graphs import graph_of
from tests.schedule.decoder_graph import Builder
from tests.thinned import thinned
from torch_mpk import _C, registry
from torch_mpk.errors import UnsupportedError
from torch_mpk.jit import compile_cuda
from torch_mpk.task_kernel import kernel_of
from torch_mpk.tasks.attention import capped, softmax_beside
from torch_mpk.testing.emulator import SMEM_BYTES, EmulatedKernel, aligned, emulate
from torch_mpk.testing.tiny import random_ids, tiny_model


@dataclass(frozen=True)
class Case:
    """One call. Positions of sequence b see what stands before it in the cache, ``past[b]``, and what is new up to
    themselves; without a past, all positions."""

    heads: int
    groups: int
    size: int
    positions: int
    length: int
    past: tuple[int, ...] = (0,)
    batch: int = 1
    dtype: str = "bfloat16"
    mask: str = ""  # its dtype
    shared_mask: bool = False  # by all heads
    style: str = "sdpa"
    layout: str = "cache"  # of keys and values
    workers: int = 3  # with more, warps share the keys of their rows
    value_size: int = 0  # where it differs from that of keys
    softcap: float = 0.0
    has_sinks: bool = False

    @property
    def limited(self) -> bool:
        return bool(self.past)

    def shapes(self) -> dict[str, tuple[str, list[int]]]:
        """The operands in memory."""
        keys = [self.batch, self.groups, self.length, self.size]
        if self.layout == "positions first":
            keys = [self.batch, self.length, self.groups, self.size]
        if self.layout == "part of a cache":
            keys[2] += 3
        shapes = {"q": (self.dtype, [self.batch, self.positions, self.heads, self.size])}
        shapes |= {"k": (self.dtype, keys), "v": (self.dtype, [*keys[:3], self.value_size or self.size])}
        if self.mask:
            heads = 1 if self.shared_mask else self.heads
            shapes["mask"] = (self.mask, [self.batch, heads, self.positions, self.length])
        if self.limited:
            shapes["limit"] = ("int64", [self.batch, self.positions])
        if self.has_sinks:
            shapes["sinks"] = (self.dtype, [self.heads])
        return shapes

    @property
    def y(self) -> tuple[str, list[int]]:
        return self.dtype, [self.batch, self.positions, self.heads, self.value_size or self.size]

    @property
    def attrs(self) -> dict[str, float | str]:
        return {"scale": self.size**-0.5, "style": self.style, "softcap": self.softcap}

    def view(self, name: str, t: _C.Tensor) -> _C.Tensor:
        """The operand, of a buffer's tensor."""
        if name in ("k", "v") and self.layout != "cache":
            b, first, second, d = t.strides
            strides = [b, second, first, d] if self.layout == "positions first" else t.strides
            return _C.Tensor(t.buffer, t.dtype, [self.batch, self.groups, self.length, t.shape[3]], strides)
        if name == "mask" and self.shared_mask:
            b, _, s, position = t.strides
            shape = [self.batch, self.heads, self.positions, self.length]
            return _C.Tensor(t.buffer, t.dtype, shape, [b, 0, s, position])
        return t

    def graph(self) -> _C.TBGraph:
        b = Builder()
        operands = [(n, self.view(n, b.buffer("input", n, *of))) for n, of in self.shapes().items()]
        b.node("prefill_attention", operands, b.buffer("output", "y", *self.y), self.attrs)
        return b.graph

    def inputs(self) -> dict[str, torch.Tensor]:
        made = {n: empty(*of) for n, of in self.shapes().items()}
        for name, x in made.items():
            if name == "limit":
                x.copy_(torch.tensor(self.past)[:, None] + torch.arange(1, self.positions + 1))
            elif name == "mask":
                keep = torch.rand(x.shape) < 0.6
                keep[..., 0] = True
                x.copy_(keep if self.mask == "bool" else torch.randn(x.shape).masked_fill(~keep, -torch.inf))
            else:
                x.copy_(torch.randn(x.shape))
        return made

    def exact(self, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        """In float64."""
        q, k, v = (inputs[name].double() for name in ("q", "k", "v"))
        if self.layout == "positions first":
            k, v = k.transpose(1, 2), v.transpose(1, 2)
        k, v = (t[:, :, : self.length].repeat_interleave(self.heads // self.groups, 1) for t in (k, v))
        scores = capped(torch.einsum("bshd,bhld->bhsl", q, k) * self.size**-0.5, self.softcap)
        if self.mask:
            mask = inputs["mask"]
            scores = scores.masked_fill(~mask, -torch.inf) if self.mask == "bool" else scores + mask
        if self.limited:
            hidden = torch.arange(self.length) >= inputs["limit"][:, None, :, None]
            scores, v = scores.masked_fill(hidden, -torch.inf), v.nan_to_num()
        weights = softmax_beside(scores, inputs["sinks"][:, None] if self.has_sinks else None, torch.float64)
        if self.style == "sdpa":
            weights = weights.nan_to_num()
        return torch.einsum("bhsl,bhld->bshd", weights, v)


def empty(dtype: str, shape: list[int]) -> torch.Tensor:
    of = getattr(torch, dtype)
    return aligned(torch.Size(shape).numel() * of.itemsize, 0xFF).view(of).view(shape)


def call(kernel: EmulatedKernel, case: Case, inputs: dict[str, torch.Tensor], **kwargs) -> torch.Tensor:
    y = empty(*case.y)
    kernel.launch([*inputs.values()], [y], watchdog_ns=20 * 10**9, **kwargs)
    assert kernel.host_abort.sum() == 0
    return y


def assert_right(case: Case, inputs: dict[str, torch.Tensor], got: torch.Tensor) -> None:
    """As near to what is exact as the reference is, which rounds scores and weights as well."""
    exact = case.exact(inputs)
    _, (want,) = reference(case.graph(), [*inputs.values()])
    assert torch.equal(got.isnan(), want.isnan())
    assert torch.equal(got.isnan(), exact.isnan())
    got, want, exact = (t.nan_to_num() for t in (got, want, exact))
    unit = torch.finfo(got.dtype).eps
    assert relative_error(got, exact) <= max(relative_error(want, exact), unit / 2)
    assert (got - exact).abs().max() <= 2 * (want - exact).abs().max() + 2 * unit


CASES = [
    Case(heads=4, groups=2, size=128, positions=70, length=100),  # neither rows nor positions fill tiles
    Case(heads=6, groups=2, size=64, positions=33, length=300, past=(200, 5), batch=2, dtype="float16", style="eager"),
    Case(heads=4, groups=4, size=128, positions=20, length=90, past=(60,), mask="bool", shared_mask=True),
    Case(heads=3, groups=3, size=64, positions=40, length=200, past=(), layout="positions first"),
    Case(heads=2, groups=1, size=64, positions=9, length=1, past=(0, 0, 0), batch=3, dtype="float16"),
    Case(heads=14, groups=2, size=64, positions=21, length=70, past=(30, 0), batch=2, mask="float32", style="eager"),
    Case(heads=8, groups=1, size=128, positions=40, length=500, past=(450,), layout="part of a cache"),
    Case(heads=2, groups=2, size=128, positions=130, length=130, dtype="float16", layout="positions first"),
    Case(heads=130, groups=1, size=64, positions=3, length=80, past=(70,), mask="bfloat16"),
    Case(heads=4, groups=2, size=128, positions=20, length=90, past=(), mask="bool", dtype="float16", batch=2),
    Case(heads=1, groups=1, size=128, positions=200, length=300, past=(60,), workers=8),  # four warps of eight
    Case(heads=2, groups=1, size=64, positions=150, length=400, past=(0,), mask="bool", dtype="float16", workers=8),
    Case(heads=4, groups=2, size=64, positions=40, length=100, past=(30,), softcap=1.5, has_sinks=True),
    Case(
        heads=4,
        groups=2,
        size=128,
        positions=20,
        length=90,
        mask="bool",
        softcap=2.0,
        has_sinks=True,
        batch=2,
        past=(),
        style="eager",
    ),
    Case(heads=4, groups=2, size=80, positions=40, length=100, past=(30,), layout="positions first"),
    Case(heads=4, groups=2, size=192, value_size=128, positions=20, length=90, past=(60,)),
    Case(heads=2, groups=1, size=256, positions=150, length=200, past=(40,), softcap=2.0, workers=8),
    Case(heads=2, groups=2, size=72, value_size=40, positions=20, length=90, mask="bool", has_sinks=True),
    *(Case(heads=2, groups=1, size=size, positions=20, length=70, dtype="float16") for size in (8, 96, 112, 160, 192)),
    Case(heads=2, groups=1, size=256, positions=20, length=70, mask="float32", past=()),
]


@pytest.mark.parametrize("case", thinned(CASES, 16, 17), ids=str)
def test_it_is_as_near_as_the_reference_in_any_order(case: Case) -> None:
    torch.manual_seed(0)
    kernel, inputs = emulate(case.graph(), workers=case.workers, polled=True), case.inputs()
    made = []
    for seed, order in enumerate(("forward", "reverse", "shuffled")):
        made.append(call(kernel, case, inputs, seed=seed, order=order, jitter=seed))
    assert all(torch.equal(made[0].view(torch.int16), other.view(torch.int16)) for other in made[1:])
    assert_right(case, inputs, made[0])


@pytest.mark.parametrize("case", thinned([CASES[i] for i in (0, 1, 2, 5, 10, 11)], 2), ids=str)
def test_random_limits_and_masks(case: Case) -> None:
    """One kernel: rows without any key, some behind the cache's end, sequences of any length, windows, padding."""
    kernel = emulate(case.graph(), workers=case.workers, polled=True)
    places = torch.arange(case.length)
    for seed in range(8):
        torch.manual_seed(seed)
        inputs = case.inputs()
        limit = inputs["limit"]
        if seed % 2:
            limit.copy_(torch.randint(-3, case.length + 5, limit.shape))
        limit[:, seed % case.positions] = (0, -(2**40), case.length, 2**40)[seed % 4]
        if "mask" in inputs:
            mask = inputs["mask"]
            window = places >= limit[:, None, :, None] - 1 - 3 * seed
            padding = places >= torch.randint(case.length // 2, (case.batch, 1, 1, 1))
            keep = (torch.rand(mask.shape) < 0.5, window, padding)[seed % 3].expand(mask.shape).clone()
            keep[:, :, -1] = False
            mask.copy_(keep if case.mask == "bool" else mask.float().nan_to_num().masked_fill(~keep, -torch.inf))
        assert_right(case, inputs, call(kernel, case, inputs, seed=seed))


@pytest.mark.parametrize("case", thinned([CASES[0], CASES[2], CASES[10]], 2), ids=str)
def test_a_rows_bits_are_its_own(case: Case) -> None:
    torch.manual_seed(0)
    kernel, inputs = emulate(case.graph(), workers=case.workers, polled=True), case.inputs()
    before = call(kernel, case, inputs)
    for position in (0, 7, case.positions - 1):
        others = torch.arange(case.positions) != position
        changed = {name: x.clone() for name, x in inputs.items()}
        changed["q"][:, others] = torch.randn_like(changed["q"][:, others]) * 3
        changed["limit"][:, others] = torch.randint(case.length + 1, (case.batch, case.positions - 1))
        if "mask" in changed:
            changed["mask"][:, :, others] = torch.rand(changed["mask"][:, :, others].shape) < 0.5
        after = call(kernel, case, changed)
        assert torch.equal(after[:, position], before[:, position])
        assert not torch.equal(after[:, others], before[:, others])


def test_what_nobody_sees_may_be_anything() -> None:
    """Of an empty cache, and of the next group where a tile reaches beyond its own."""
    case = Case(heads=4, groups=2, size=128, positions=20, length=90)
    kernel, inputs = emulate(case.graph(), polled=True), case.inputs()
    wanted = call(kernel, case, inputs)
    for value in (torch.nan, torch.inf):
        for name in ("k", "v"):
            inputs[name][:, :, 20:] = value
        assert torch.equal(call(kernel, case, inputs), wanted)
    assert wanted.isfinite().all()


def test_what_somebody_sees_is_not_hidden() -> None:
    case = Case(heads=4, groups=2, size=128, positions=20, length=90)
    kernel, inputs = emulate(case.graph(), polled=True), case.inputs()
    inputs["v"][0, 1, 4, 7] = torch.nan
    inputs["q"][0, 12, 0, 3] = torch.nan
    got = call(kernel, case, inputs)
    assert got[0, 4:, 2:, 7].isnan().all()
    assert got[0, 12, 0].isnan().all()
    got[0, :, 2:, 7] = got[0, 12, 0] = 0
    assert not got[0, :4].isnan().any()


def test_scores_far_apart_and_alike() -> None:
    """A maximum that grows late, by little or by much, and scores whose exponentials are out of range."""
    case = Case(heads=4, groups=2, size=128, positions=70, length=100)
    kernel = emulate(case.graph(), polled=True)
    for seed, scale in enumerate((0.0, 1e-3, 3.0, 30.0)):
        torch.manual_seed(seed)
        inputs = case.inputs()
        inputs["q"].mul_(scale)
        inputs["k"].mul_(torch.linspace(0, 2, case.length)[:, None])
        assert_right(case, inputs, call(kernel, case, inputs))


@pytest.mark.parametrize("scale", thinned([-0.1, 0.0], 0))
def test_any_scale(scale: float) -> None:
    """The largest score is not always that of the largest product."""
    case = Case(heads=2, groups=2, size=64, positions=20, length=90)
    b = Builder()
    operands = [(n, b.buffer("input", n, *of)) for n, of in case.shapes().items()]
    b.node(
        "prefill_attention", operands, b.buffer("output", "y", *case.shapes()["q"]), {"scale": scale, "style": "sdpa"}
    )
    inputs = case.inputs()
    _, (want,) = reference(b.graph, [*inputs.values()])
    assert relative_error(call(emulate(b.graph), case, inputs), want) < 1e-2


def test_a_launch_sees_what_it_has_written_itself() -> None:
    """The loader waits for the caches, the bounds of positions come from a phase before, and so do queries."""
    case = Case(heads=4, groups=2, size=64, positions=40, length=100)
    b, shapes = Builder(), case.shapes()
    added = {n: b.buffer("input", f"{n}.added", *shapes[n]) for n in ("q", "k", "v", "limit")}
    given = {n: b.buffer("input", n, *shapes[n]) for n in ("q", "k", "v", "limit")}
    kinds = {"q": "workspace", "k": "input", "v": "input", "limit": "workspace"}
    made = {n: b.buffer(kind, f"{n}.sum", *shapes[n]) for n, kind in kinds.items()}
    for name in given:
        b.pointwise("add", [given[name], added[name]], made[name], name)
    y = b.buffer("workspace", "y", *shapes["q"])
    b.node("prefill_attention", [*made.items()], y, {"scale": 0.125, "style": "sdpa"})
    b.pointwise("neg", [y], b.buffer("output", "negative", *shapes["q"]))
    kernel = emulate(b.graph, polled=True)
    [waits] = [job.loader_waits for p in kernel.schedule.phases for job in p.jobs if "positions" in job.cut.fields]
    assert waits
    for seed in range(3):
        torch.manual_seed(seed)
        zeros = {n: torch.zeros_like(x) for n, x in case.inputs().items()}
        inputs = case.inputs()
        memory = [*zeros.values(), *inputs.values(), *(empty(*shapes[n]) for n in ("k", "v"))]
        got = empty(*shapes["q"])
        kernel.launch(memory, [got], seed=seed, jitter=seed, watchdog_ns=20 * 10**9)
        assert kernel.host_abort.sum() == 0
        assert_right(case, inputs, -got)


@pytest.mark.slow
def test_more_workers_than_units_and_fewer() -> None:
    case = Case(heads=4, groups=2, size=64, positions=130, length=130, batch=2, past=(0, 0))
    inputs = case.inputs()
    made = [call(emulate(case.graph(), workers=n), case, inputs, jitter=n) for n in (1, 19, 20)]
    assert torch.equal(made[0], made[1])
    assert_right(case, inputs, made[0])
    assert_right(case, inputs, made[2])  # enough workers for warps to share keys


QWEN3_06B = Case(heads=16, groups=8, size=128, positions=2048, length=2048)


@pytest.mark.gpu
@pytest.mark.parametrize("case", [*CASES, QWEN3_06B], ids=str)
def test_it_is_as_near_as_the_reference_on_a_gpu(case: Case) -> None:
    torch.manual_seed(0)
    inputs = case.inputs()
    given = {name: x.cuda() for name, x in inputs.items()}
    for name in ("k", "v"):
        cache = given[name].transpose(1, 2) if case.layout == "positions first" else given[name]
        given[name] = cache[:, :, : case.length]
    if "mask" in given:
        given["mask"] = given["mask"].expand(-1, case.heads, -1, -1)
    operands = [given.get(name) for name in ("q", "k", "v", "mask", "limit", "sinks")]
    kernel = kernel_of(registry.get("prefill_attention"))
    made = [kernel(*operands, **case.attrs).cpu() for _ in range(3)]
    assert all(torch.equal(made[0].view(torch.int16), other.view(torch.int16)) for other in made[1:])
    assert_right(case, inputs, made[0])


@pytest.mark.parametrize(
    ("size", "mask", "more"),
    thinned(
        [
            *product((128, 64), ("", "bool"), ({}, {"dtype": "float16"})),
            *product((72, 80, 96, 112, 160, 256), ("", "bool"), ({},)),
            (192, "", {"value_size": 128}),
            (192, "", {"softcap": 30.0, "has_sinks": True}),
            (256, "", {"softcap": 50.0}),
            (64, "", {"has_sinks": True}),
        ],
        2,
    ),
)
def test_it_compiles_and_keeps_nothing_in_local_memory(size: int, mask: str, more: dict) -> None:
    case = Case(16, 8, size, positions=2048, length=4096, mask=mask, shared_mask=True, **more)
    schedule = _C.make_schedule(case.graph(), _C.Target("cuda", 90, 132, SMEM_BYTES, True, True))
    _C.validate(schedule)
    program = _C.generate_cuda(schedule)
    resources = compile_cuda(program.source, 90).resources
    assert resources.warnings == ()
    assert resources.registers <= schedule.warps.registers
    most = 16 if case.size <= 128 else 32  # bytes: some of what a thread knows of the launch, while it is at the job
    assert resources.stack_bytes <= most


@pytest.mark.parametrize(("batch", "attention"), thinned([(1, "sdpa"), (2, "eager")]))
def test_a_models_prompt(batch: int, attention: str) -> None:
    """All of a layer in one launch, an empty cache's slots included, on inputs of its own."""
    torch.manual_seed(0)
    model = tiny_model("qwen3", attention=attention, dtype=torch.bfloat16, num_layers=1, head_dim=64)
    kwargs = {"past_key_values": StaticCache(config=model.config, max_cache_len=150)}
    if batch > 1:
        kwargs["attention_mask"] = (torch.arange(80) >= torch.tensor([[0], [7]])).long()
    graph = graph_of(model, lambda run: run(input_ids=random_ids(batch, 80), **kwargs))
    kernel = emulate(graph, polled=True)
    assert "PrefillAttention" in kernel.program.source
    inputs = [allocate(t) for t in tensors(graph, "input")]
    for x in inputs:
        if x.dtype != torch.int64:
            x.copy_(torch.randn(x.shape) / (x.shape[-1] ** 0.5 if x.dim() > 1 else 1))
        elif x.shape == (batch, 80):  # tokens, or which of them are there
            x.copy_(torch.arange(80) % 50 > 6 if batch > 1 else torch.arange(80) % 50)
        else:
            x.zero_()  # counters
    wanted_inputs, wanted = reference(graph, inputs)
    outputs = [allocate(t) for t in tensors(graph, "output")]
    kernel.launch(inputs, outputs, jitter=1, watchdog_ns=60 * 10**9)
    assert kernel.host_abort.sum() == 0
    for got, want in zip([*outputs, *inputs], [*wanted, *wanted_inputs], strict=True):
        if got.is_floating_point() and want.any():
            assert relative_error(got, want) < 2e-2
        else:
            assert torch.equal(got, want)


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
    case = Case(**{"heads": 4, "groups": 2, "size": 64, "positions": 20, "length": 40} | changed)
    schedule = _C.make_schedule(case.graph(), _C.Target("cuda", arch, 132, SMEM_BYTES, True, True))
    _C.validate(schedule)
    with pytest.raises(UnsupportedError, match=f"prefill_attention.*{message}"):
        _C.generate_cuda(schedule)
