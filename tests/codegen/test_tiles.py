"""Linears of many rows, which warpgroups multiply: what kernels compute in the emulator, and how they compile."""

from __future__ import annotations

import pytest
import torch

import torch_mpk.tasks  # noqa: F401  declares the tasks
from tests.codegen.emulated_calls import allocate, reference, relative_error, tensors
from tests.codegen.test_emulated import check_decoder
from tests.schedule.decoder_graph import Builder, decoder
from tests.thinned import thinned
from torch_mpk import _C
from torch_mpk.errors import UnsupportedError
from torch_mpk.jit import compile_cuda
from torch_mpk.testing.emulator import SMEM_BYTES, emulate


def feed_forward(rows: int, hidden: int, ffn: int, dtype: str = "bfloat16", *, last_rows: int = 0) -> _C.TBGraph:
    """Linears one after the other with a bias; two side by side, of which each point is a product; one that adds a
    residual; and one of the first ``last_rows``, as a model's head is."""
    b = Builder()
    x = b.buffer("input", "x", dtype, [rows, hidden])

    def weight(name: str, *shape: int) -> _C.Tensor:
        return b.buffer("input", name, dtype, list(shape))

    norm = b.buffer("workspace", "norm", dtype, [rows, hidden])
    b.node("rms_norm", [("x", x), ("weight", weight("norm", hidden))], norm, {"eps": 1e-6, "style": "llama"})
    for name, size in (("q", hidden), ("k", hidden // 2 + 8)):
        operands = [("x", norm), ("weight", weight(name, size, hidden)), ("bias", weight(f"{name}.bias", size))]
        b.node("linear", operands, b.buffer("output", name, dtype, [rows, size]))
    made = []
    for name in ("gate", "up"):
        y = b.buffer("workspace", name, dtype, [rows, ffn])
        made.append(b.node("linear", [("x", norm), ("weight", weight(name, ffn, hidden))], y))
    product = b.pointwise("mul", made, b.buffer("workspace", "product", dtype, [rows, ffn]))
    down = b.buffer("workspace", "down", dtype, [rows, hidden])
    b.node("linear", [("x", product), ("weight", weight("down", hidden, ffn))], down)
    y = b.pointwise("add", [down, x], b.buffer("output", "y", dtype, [rows, hidden]))
    if last_rows:
        last = _C.Tensor(y.buffer, dtype, [last_rows, hidden], [hidden, 1])
        head = b.buffer("output", "head", dtype, [last_rows, 300])
        b.node("linear", [("x", last), ("weight", weight("head", 300, hidden))], head)
    return b.graph


def random_inputs(graph: _C.TBGraph) -> list[torch.Tensor]:
    inputs = [allocate(t) for t in tensors(graph, "input")]
    for x in inputs:
        x.copy_(torch.randn(x.shape) / (x.shape[-1] ** 0.5 if x.dim() > 1 else 1))
    return inputs


@pytest.mark.parametrize(
    ("rows", "hidden", "ffn", "dtype", "last_rows"),
    thinned([(66, 128, 192, "bfloat16", 1), (130, 192, 64, "float16", 0), (300, 64, 448, "bfloat16", 65)], 1),
)
def test_many_rows_as_their_reference(rows: int, hidden: int, ffn: int, dtype: str, last_rows: int) -> None:
    graph = feed_forward(rows, hidden, ffn, dtype, last_rows=last_rows)
    kernel = emulate(graph, polled=True)
    assert kernel.schedule.warps.moves_registers
    x_rows = [job.cut.shape.x_rows for phase in kernel.schedule.phases for job in phase.jobs if job.cut.shape]
    assert x_rows[-1] == min(-(-(last_rows or rows) // 8) * 8, 128), "more rows of x come than there are"
    assert "LinearTiles" in kernel.program.source
    assert "LinearRows" not in kernel.program.source
    torch.manual_seed(rows)
    inputs = random_inputs(graph)
    _, wanted = reference(graph, inputs)
    first = None
    for seed, order in enumerate(("forward", "shuffled")):
        outputs = [allocate(t) for t in tensors(graph, "output")]
        kernel.launch(inputs, outputs, seed=seed, order=order, jitter=seed)
        for got, want in zip(outputs, wanted, strict=True):
            assert relative_error(got, want) < 1e-2
        first = first or outputs
        assert all(map(torch.equal, outputs, first)), "the same call gave other bits"
    inputs[0][1:] = torch.randn(rows - 1, hidden)  # what stands beside a row does not change its bits
    others = [allocate(t) for t in tensors(graph, "output")]
    kernel.launch(inputs, others)
    assert all(torch.equal(other[0], own[0]) for other, own in zip(others, first, strict=True))
    assert not any(torch.equal(other[1:], own[1:]) for other, own in zip(others, first, strict=True) if len(own) > 1)


# Workers, the weight's shape, and the rows of it that a tile has, which so many workers share.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("workers", "weight_shape", "tile_rows", "split"),
    [
        (5, (64, 3072), 64, 2),
        (16, (64, 3072), 32, 4),
        (12, (96, 6144), 96, 6),
        (16, (64, 9216), 64, 8),
    ],
)
def test_few_tiles_are_cut_among_workers_whose_sums_meet_in_order(
    workers: int, weight_shape: tuple[int, int], tile_rows: int, split: int
) -> None:
    columns, hidden = weight_shape
    b = Builder()
    x, weight, residual = (
        b.buffer("input", name, "bfloat16", list(shape))
        for name, shape in {"x": (130, hidden), "weight": weight_shape, "residual": (130, columns)}.items()
    )
    y = b.node("linear", [("x", x), ("weight", weight)], b.buffer("workspace", "y", "bfloat16", [130, columns]))
    b.pointwise("add", [y, residual], b.buffer("output", "sum", "bfloat16", [130, columns]))
    kernel = emulate(b.graph, workers=workers, polled=True)
    [cut] = [job.cut for phase in kernel.schedule.phases for job in phase.jobs if job.cut.shape]
    assert (cut.shape.tile_rows, cut.fields["split"]) == (tile_rows, split)
    torch.manual_seed(0)
    inputs = random_inputs(b.graph)
    _, (want,) = reference(b.graph, inputs)
    made = []
    for seed, order in enumerate(("forward", "reverse", "shuffled")):
        for _ in range(2):  # the second must not take what the first has left
            [output] = outputs = [allocate(t) for t in tensors(b.graph, "output")]
            kernel.launch(inputs, outputs, seed=seed, order=order, jitter=7 * seed)
            assert relative_error(output, want) < 1e-2
            made.append(output)
    assert all(torch.equal(made[0], other) for other in made[1:])


@pytest.mark.slow
def test_many_rows_compile_without_local_memory() -> None:
    schedule = _C.make_schedule(feed_forward(2048, 4096, 12288), _C.Target("cuda", 90, 132, SMEM_BYTES, True, True))
    resources = compile_cuda(_C.generate_cuda(schedule).source, 90).resources
    assert resources.warnings == ()
    assert resources.registers <= schedule.warps.registers
    assert max(resources.stack_bytes, resources.spill_store_bytes) == 0


@pytest.mark.parametrize(("dtype", "hidden"), [("float32", 640), ("bfloat16", 600)])
def test_what_does_not_come_in_boxes_is_refused_by_name(dtype: str, hidden: int) -> None:
    target = _C.Target("cuda", 90, 3, SMEM_BYTES, True, True)
    with pytest.raises(UnsupportedError, match="16-bit elements"):
        _C.generate_cuda(_C.make_schedule(feed_forward(70, hidden, 64, dtype), target))


def test_a_decoder_of_many_rows_whose_keys_come_in_entries_of_one_warp() -> None:
    """More tiles of keys than the ring holds."""
    sizes = {"hidden": 128, "heads": 2, "groups": 1, "head_dim": 64, "ffn": 128, "vocab": 64, "layers": 1}
    kernel = emulate(decoder(batch=66, length=260, **sizes), workers=2, polled=True)
    assert kernel.schedule.warps.all_read_entries
    check_decoder(kernel, [260 - i for i in range(66)], 259, 2e-2)
