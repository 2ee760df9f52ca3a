"""Experts as gpt-oss has them, emulated: weights stored as [E, K, N], interleaved gates, and biases; two jobs."""

from __future__ import annotations

from typing import Any, get_args

import pytest
import torch

from tests.codegen.model_graphs import graph_of_a_prompt
from tests.codegen.test_expert_runs import fresh, in_place, kernels, lowered_call
from tests.cpu.test_experts import chosen_ids
from tests.schedule.taken_apart import Parts
from tests.thinned import thinned
from torch_mpk import _C
from torch_mpk.jit import compile_cuda
from torch_mpk.testing.emulator import EmulatedKernel, Order, emulate

BOXES, INTERLEAVED = "expert_linear.boxes", "expert_linear.interleaved"
SUMMED = "expert_linear.summed_columns"
H200 = _C.Target("cuda", 90, 132, 232448)


def product(x: torch.Tensor, ids: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return torch.ops.mpk.expert_linear(x, ids, None, weight) + bias[ids.clamp(0, bias.shape[0] - 1)]


def activation(y: torch.Tensor) -> torch.Tensor:
    gate, up = y[..., ::2].clamp(max=7), y[..., 1::2].clamp(-7, 7)
    return (up + 1) * (gate * torch.sigmoid(1.702 * gate))


def experts(x, ids, weights, gate_up, gate_up_bias, down, down_bias, residual):
    each = x.unsqueeze(1).expand(-1, ids.shape[1], -1)
    y = product(activation(product(each, ids, gate_up, gate_up_bias)), ids, down, down_bias)
    return (y * weights.unsqueeze(-1)).sum(1) + residual


def exact(x, ids, weights, gate_up, gate_up_bias, down, down_bias, residual):
    """In float64, but rounded where products are; an id of no expert has no product, but the nearest one's bias."""
    valid, of = ((ids >= 0) & (ids < len(down))).unsqueeze(-1), ids.clamp(0, len(down) - 1)
    y = torch.einsum("rckn,rk->rcn", gate_up.double()[of], x.double()).to(x.dtype) * valid + gate_up_bias[of]
    y = torch.einsum("rckn,rck->rcn", down.double()[of], activation(y).double()).to(x.dtype) * valid + down_bias[of]
    return (y * weights.unsqueeze(-1)).double().sum(1) + residual.double()


def operands(
    rows: int, choices: int, num: int, width: int, inner: int, *, chosen: str = "random", dtype=torch.bfloat16
) -> list[torch.Tensor]:
    ids = chosen_ids(rows, choices, num, chosen if chosen in ("one", "last") else "random")
    if chosen == "none":
        ids.view(-1)[::2] = torch.tensor([-1, num])[torch.randint(2, ids.view(-1)[::2].shape)]
    if chosen == "nobody":
        ids[:] = num
    shapes = [(num, width, 2 * inner), (num, 2 * inner), (num, inner, width), (num, width), (rows, width)]
    drawn = [torch.randn(shape) / (shape[1] ** 0.5 if len(shape) == 3 else 1) for shape in shapes]
    made = [torch.randn(rows, width), ids, torch.rand(rows, choices), *drawn]
    return in_place([t.to(dtype) if t.is_floating_point() else t for t in made])


# Rows, choices, experts, width, experts' width, and workers: tiles for more workers than there are, and for fewer;
# more experts than warps; more pairs of one than a group, and than a warp has sums for.
CASES = [
    ((1, 4, 16, 128, 192), 30),
    ((20, 2, 30, 192, 64), 4),
    ((40, 2, 3, 64, 128), 7),
    ((64, 4, 4, 64, 96), 132),
    ((3, 1, 2, 320, 32), 5),
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.slow)], ids=str)
@pytest.mark.parametrize(("sizes", "workers"), thinned(CASES, 0, 2), ids=str)
def test_experts(sizes: tuple[int, ...], workers: int, dtype: torch.dtype) -> None:
    kernel: EmulatedKernel | None = None
    for chosen in ("random", "one", "last", "none", "nobody"):
        given = operands(*sizes, chosen=chosen, dtype=dtype)
        lowered = lowered_call(experts, given)
        kernel = kernel or emulate(lowered.graph, workers=workers)
        assert kernels(kernel.schedule) == [INTERLEAVED, SUMMED]
        [made] = fresh(lowered)
        kernel.launch(given, [made], order="shuffled", jitter=3)
        torch.testing.assert_close(made.double(), exact(*given), rtol=2e-2, atol=3e-2)


@pytest.mark.parametrize(("rows", "num"), thinned([(5, 4), (20, 3), (40, 2)], 0))
def test_bits(rows: int, num: int) -> None:
    """The same for the same inputs, in whatever order workers and threads run; a row's, whatever the others are."""
    given = operands(rows, 2, num, 64, 64)
    lowered = lowered_call(experts, given)
    kernel = emulate(lowered.graph, workers=6)
    assert kernels(kernel.schedule) == [INTERLEAVED, SUMMED]

    def launch(number: int) -> torch.Tensor:
        [made], orders = fresh(lowered), get_args(Order)
        kernel.launch(given, [made], seed=number, order=orders[number % len(orders)], jitter=number % 4)
        return made

    first = launch(0)
    assert all(torch.equal(launch(number), first) for number in range(1, 5))
    x, ids = given[:2]
    for others in (torch.randint(num, ids.shape), ids[:1].expand_as(ids).clone()):
        x[1:], ids[1:] = torch.randn(x[1:].shape).to(x.dtype), others[1:]
        assert torch.equal(launch(5)[0], first[0])


def halves(x, ids, weight):
    gate, up = torch.ops.mpk.expert_linear(x, ids, None, weight).chunk(2, dim=-1)
    return torch.relu(gate) * up


def turned(x, ids, weight):
    y = torch.ops.mpk.expert_linear(x, ids, None, weight)
    return torch.relu(y[..., 1::2]) - y[..., ::2]


def shifted(x, ids, weight):
    """The last points would be behind a pair's results."""
    y = torch.ops.mpk.expert_linear(x, ids, None, weight)
    return y[..., :-2:2] * y[..., 2::2]


def plain(x, ids, weight):
    y = torch.ops.mpk.expert_linear(x, ids, weight)
    return torch.relu(y[..., ::2]) * y[..., 1::2]


@pytest.mark.parametrize(
    ("form", "names"),
    [
        (turned, [INTERLEAVED]),
        (plain, [INTERLEAVED]),
        pytest.param(halves, [BOXES, "pointwise"], marks=pytest.mark.slow),
        pytest.param(shifted, [BOXES, "pointwise"], marks=pytest.mark.slow),
    ],
)
def test_forms_of_activations(form, names: list[str]) -> None:
    """Whichever factor comes first, weights stored in either way; and those that are no neighbours."""
    shape = (5, 128, 64) if form is plain else (5, 64, 128)
    given = in_place([torch.randn(9, 2, 64).bfloat16(), chosen_ids(9, 2, 5, "random"), torch.randn(shape).bfloat16()])
    lowered = lowered_call(form, given)
    kernel = emulate(lowered.graph, workers=5)
    assert kernels(kernel.schedule) == names
    [made] = fresh(lowered)
    kernel.launch(given, [made], order="shuffled", jitter=2)
    torch.testing.assert_close(made, form(*given), rtol=2e-2, atol=0.5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "dtype"), [((2, 2, 4, 64, 64), torch.float32), ((2, 2, 4, 40, 24), torch.bfloat16)], ids=str
)
def test_others_have_phases_of_their_own(sizes: tuple[int, ...], dtype: torch.dtype) -> None:
    given = operands(*sizes, dtype=dtype)
    lowered = lowered_call(experts, given)
    kernel = emulate(lowered.graph, workers=4)
    assert not {INTERLEAVED, SUMMED} & {*kernels(kernel.schedule)}
    [made] = fresh(lowered)
    kernel.launch(given, [made], order="shuffled", jitter=2)
    torch.testing.assert_close(made.double(), exact(*given), rtol=2e-2, atol=3e-2)


def test_a_launch_without_some_products_is_given_up() -> None:
    """Workers that would sum them wait for words that nobody writes. The next launch is right."""
    given = operands(3, 2, 4, 128, 64)
    lowered = lowered_call(experts, given)
    kernel = emulate(lowered.graph, workers=4)
    [made] = fresh(lowered)
    kernel.fault.place, kernel.fault.cta = given[5][given[1][0, 0]].data_ptr(), 2**32 - 1  # down, of any worker
    kernel.launch(given, [made], watchdog_ns=5 * 10**8)
    assert kernel.host_abort[0] == 1
    assert made.isnan().all()
    kernel.repair()
    kernel.launch(given, [made])
    torch.testing.assert_close(made.double(), exact(*given), rtol=2e-2, atol=3e-2)


# Values in the place of a cut's fields.
BROKEN = {
    "too few words": (SUMMED, {"scratch": {"bytes": 30704, "offset": 0}}, r"leave 30720 bytes .* has 30704 bytes"),
    "no words": (SUMMED, {"scratch": None}, r"leave 30720 bytes .* has 0 bytes"),
    "no lists": (SUMMED, {"staged_bytes": 0}, r"it stages \d+ bytes in 0"),
    "tiles of whole sums": (
        SUMMED,
        {"kernel": "expert_linear.summed", "scratch": None, "staged_bytes": 1 << 16},
        "what follows is not the sum over choices of each row's products",
    ),
    "halves": (
        INTERLEAVED,
        {"kernel": "expert_linear.gated"},
        "what follows takes other results than two of each pair and point",
    ),
}


@pytest.mark.parametrize(("kernel", "changes", "message"), BROKEN.values(), ids=BROKEN)
def test_the_validator_refuses(kernel: str, changes: dict[str, Any], message: str) -> None:
    parts = Parts.of(_C.make_schedule(lowered_call(experts, operands(5, 4, 8, 384, 64)).graph, H200))
    _C.validate(parts.build())
    [job] = (job for job in parts.jobs("run") if job["run"] == kernel)
    job["cut"].update(changes)
    job["run"] = job["cut"]["kernel"]
    with pytest.raises(RuntimeError, match="unsound schedule: expert_linear.*" + message):
        _C.validate(parts.build())


@pytest.mark.parametrize("rows", thinned([1, 8, 32, 64], 0))
def test_a_layer_of_gpt_oss_has_two_phases_of_experts(rows: int) -> None:
    schedule = _C.make_schedule(graph_of_a_prompt("gpt-oss-20b", rows, 1, positions=1024), H200)
    _C.validate(schedule)
    nodes = schedule.graph.nodes
    phases = [p for p, phase in enumerate(schedule.phases) for job in phase.jobs if "expert" in job.cut.kernel]
    assert [name for name in kernels(schedule) if "expert" in name] == [INTERLEAVED, SUMMED]
    assert phases[1] == phases[0] + 1
    behind = [nodes[n].label for phase in schedule.phases[phases[1] + 1 :] for job in phase.jobs for n in job.body]
    assert not any("mlp" in label for label in behind)


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 16, 64])
def test_compiles_without_spills(rows: int) -> None:
    """With the sizes of gpt-oss-20b, but for the number of experts."""
    num, size = 8, 2880
    x, chosen = torch.zeros(rows, size).bfloat16(), torch.zeros(rows, 4).bfloat16()
    given = [x, torch.zeros(rows, 4, dtype=torch.int64), chosen]
    given += [torch.zeros(shape).bfloat16() for shape in ((num, size, 2 * size), (num, 2 * size))]
    given += [torch.zeros(shape).bfloat16() for shape in ((num, size, size), (num, size))]
    schedule = _C.make_schedule(lowered_call(experts, [*given, x.clone()]).graph, H200)
    assert kernels(schedule) == [INTERLEAVED, SUMMED]
    resources = compile_cuda(_C.generate_cuda(schedule).source, 90).resources
    assert resources.warnings == ()
    assert resources.spill_store_bytes == 0


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 8, 33, 64])
@pytest.mark.parametrize("chosen", ["random", "one", "none"])
def test_experts_on_a_gpu(rows: int, chosen: str) -> None:
    """Twice, with other experts: nothing of a launch stays behind."""
    step = torch.compile(experts, backend="mpk", fullgraph=True)
    for _ in range(2):
        given = [t.cuda() for t in operands(rows, 4, 16, 1024, 512, chosen=chosen)]
        y = step(*given)
        # A product between 4 and 8 may be rounded to its other neighbour.
        torch.testing.assert_close(y.double(), exact(*given), rtol=2e-2, atol=4e-2)
        assert torch.equal(step(*given), y)
