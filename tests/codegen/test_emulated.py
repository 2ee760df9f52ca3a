"""What generated kernels compute, run thread by thread on the CPU, against the tasks' references."""

from __future__ import annotations

import functools

import pytest
import torch

import torch_mpk.tasks  # noqa: F401  declares the tasks
from tests.codegen.emulated_calls import allocate, decoder_inputs, reference, relative_error, tensors
from tests.codegen.programs_graph import long_reductions, programs_and_reductions
from tests.schedule.decoder_graph import Builder, decoder
from tests.schedule.taken_apart import Parts
from tests.thinned import thinned
from torch_mpk import _C
from torch_mpk.testing import reference_vm
from torch_mpk.testing.emulator import SMEM_BYTES, EmulatedKernel, emulate, emulate_schedule


def check_decoder(kernel: EmulatedKernel, limits: list[int], slot: int, tolerance: float) -> list[torch.Tensor]:
    """Two launches in a row, the second with random delays; returns what the first left behind."""
    graph = kernel.schedule.graph
    inputs = decoder_inputs(graph, limits, slot)
    first = None
    for jitter in (0, 7):
        wanted_inputs, wanted = reference(graph, inputs)
        given = [x.clone() for x in inputs]
        outputs = [allocate(t) for t in tensors(graph, "output")]
        kernel.launch(inputs, outputs, seed=jitter, jitter=jitter)
        for got, want in zip([*outputs, *inputs], [*wanted, *wanted_inputs], strict=True):
            if got.dtype == torch.int64:
                assert torch.equal(got, want)
            else:
                assert relative_error(got, want) < tolerance
        results = [x.clone() for x in [*outputs, *inputs]]
        if first is not None:
            assert all(map(torch.equal, results, first)), "the same call gave other bits"
        first = first or results
        for x, before in zip(inputs, given, strict=True):
            x.copy_(before)
    assert kernel.host_abort.sum() == 0
    return first


def add_input(b: Builder, inputs: list[torch.Tensor], name: str, value: torch.Tensor) -> tuple[str, _C.Tensor]:
    inputs.append(value)
    return name, b.buffer("input", name, str(value.dtype).removeprefix("torch."), list(value.shape))


@pytest.mark.slow
def test_decoder_in_bf16_and_its_fusions_bit_by_bit() -> None:
    # No rows of a multiple of 64: sums of boxes depend on what else is in their job.
    sizes = {"batch": 3, "hidden": 72, "heads": 6, "groups": 2, "head_dim": 40, "ffn": 200, "length": 520}
    sizes |= {"vocab": 8000, "computed_tables": True}
    left_behind = []
    for fuse, polled in ((True, True), (True, False), (False, False)):
        kernel = emulate(decoder(**sizes), fuse=fuse, polled=polled)
        assert any(kernel.schedule.polled) == polled
        if fuse:
            jobs = [job for phase in kernel.schedule.phases for job in phase.jobs]
            assert any(job.assignment == "claimed" for job in jobs)
            assert any(len(job.prologue) > 2 for job in jobs)
            assert any(job.epilogue for job in jobs)
        torch.manual_seed(1)
        left_behind.append(check_decoder(kernel, [0, 133, 520], 132, 2e-2))
    assert all(torch.equal(*pair) for other in left_behind[1:] for pair in zip(left_behind[0], other, strict=True))


def test_launches_poll_what_they_made_themselves() -> None:
    """Each with other inputs, one of them with NaN; three places would be needed to meet an older launch's elements."""
    kernel = emulate(decoder(), polled=True)
    graph = kernel.schedule.graph
    for launch in range(5):
        torch.manual_seed(launch)
        inputs = decoder_inputs(graph, [40], 5)
        if launch == 2:
            next(x for x in inputs if x.dtype == torch.bfloat16)[:] = torch.nan
        wanted_inputs, wanted = reference(graph, inputs)
        outputs = [allocate(t) for t in tensors(graph, "output")]
        kernel.launch(inputs, outputs, seed=launch, jitter=launch, watchdog_ns=20 * 10**9)
        assert kernel.host_abort.sum() == 0
        for got, want in zip([*outputs, *inputs], [*wanted, *wanted_inputs], strict=True):
            assert torch.equal(got.isnan(), want.isnan())
            assert launch == 2 or relative_error(got, want) < 2e-2
    halves = kernel.polled.view(2, -1)
    assert halves[4 % 2].any()
    assert not halves[5 % 2].any(), "the next launch finds its elements absent"


@pytest.mark.parametrize(
    ("hidden", "ffn", "slot"),
    thinned([(2560, 9728, 10240), (3072, 8192, 12288), (4096, 12288, 8192), (896, 4864, 8192)], 1, 2, 3),
)
def test_rows_fill_the_slots_of_the_ring(hidden: int, ffn: int, slot: int) -> None:
    sizes = {"heads": 2, "groups": 1, "head_dim": 32, "layers": 1}
    graph = decoder(hidden=hidden, ffn=ffn, vocab=32064, **sizes)
    schedule = _C.make_schedule(graph, _C.Target("cuda", 90, 132, SMEM_BYTES, True, True))
    assert f"kSlotBytes = {slot};" in _C.generate_cuda(schedule, False).source
    if slot == 10240:
        kernel = emulate(decoder(hidden=hidden, ffn=1280, **sizes), polled=True)
        assert f"kSlotBytes = {slot};" in kernel.program.source
        check_decoder(kernel, [40], 39, 2e-2)


def test_tiles_fill_slots_where_the_ring_does_not_hold_all_of_a_workers() -> None:
    """Rows of q, k and v, 46 for each worker, of half a slot."""
    graph = decoder(hidden=2560, ffn=9728, vocab=32064, heads=32, groups=8, head_dim=128, layers=1)
    schedule = _C.make_schedule(graph, _C.Target("cuda", 90, 132, SMEM_BYTES, True, True))
    source = _C.generate_cuda(schedule, False).source
    structs = [part for part in source.split("\nstruct Linear")[1:] if " kSize = 2560;" in part]
    assert len(structs) == 3  # q, k and v; gate and up; the LM head
    assert all(" kTileRows = 2;" in part and " kChunkSize = 2560;" in part for part in structs)


@pytest.mark.parametrize(
    ("heads", "groups", "head_dim", "limit"),
    thinned([(2, 2, 128, 40), (4, 1, 80, 39), (14, 2, 64, 17), (10, 1, 256, 33)], 1),
)
def test_heads_of_a_group_by_number_and_size(heads: int, groups: int, head_dim: int, limit: int) -> None:
    """Tensor cores take four heads at a time, lanes 2 to 8 elements, and 10 heads take five passes; four heads are
    shared out two by two among three workers, seven are not."""
    sizes = {"heads": heads, "groups": groups, "head_dim": head_dim, "layers": 1, "computed_tables": True}
    kernel = emulate(decoder(**sizes), polled=True)
    torch.manual_seed(heads)
    check_decoder(kernel, [limit], limit - 1, 2e-2)


@pytest.mark.parametrize(
    ("groups", "workers", "dtype", "limits"),
    thinned(
        [
            (1, 16, "bfloat16", [2800, 30, 2800]),  # 16 splits, 1 and, not for the first time, 16
            (2, 6, "bfloat16", [450, 300]),  # 3 and 2
            (1, 6, "bfloat16", [2000]),  # 6, of several tiles a warp
            (2, 3, "bfloat16", [300]),  # 1, of several tiles a warp
            (1, 4, "float32", [600, 300]),
        ],
        1,
    ),
)
def test_decoder_with_caches_cut_into_splits(groups: int, workers: int, dtype: str, limits: list[int]) -> None:
    sizes = {"heads": 4, "groups": groups, "head_dim": 64, "ffn": 96, "length": max(limits), "layers": 1}
    is_short = dtype == "bfloat16"
    kernel = emulate(decoder(dtype=dtype, **sizes), workers=workers, polled=is_short)
    for limit in limits:
        torch.manual_seed(limit)
        check_decoder(kernel, [limit], limit - 1, 2e-2 if is_short else 1e-5)


@pytest.mark.slow
def test_a_ring_that_holds_fewer_tiles_than_there_are_warps() -> None:
    sizes = {"heads": 4, "groups": 1, "head_dim": 128, "length": 400, "layers": 1, "dtype": "float32"}
    kernel = emulate(decoder(**sizes), smem_bytes=100 << 10)  # 12 slots; a tile takes two
    check_decoder(kernel, [400], 399, 1e-5)


def test_more_rows_than_lanes_in_a_ring_of_as_many_slots_as_warps() -> None:
    """The loader fills two slots together: the last of all stays empty while every warp waits for its first tile."""
    rows = 34
    sizes = {"batch": rows, "heads": 2, "groups": 1, "head_dim": 128, "ffn": 128, "length": 200, "layers": 1}
    kernel = emulate(decoder(**sizes), smem_bytes=124 << 10)
    torch.manual_seed(0)
    check_decoder(kernel, [200, 0, *torch.randint(201, (rows - 2,)).tolist()], 199, 2e-2)


def test_other_warps_are_the_schedules_choice() -> None:
    """Fewer consumers with more registers each: device code has no number of its own."""
    graph = decoder(layers=1, batch=2, heads=4, groups=2, head_dim=32, ffn=96, length=100)
    parts = Parts.of(_C.make_schedule(graph, _C.Target("cuda", 90, 3, SMEM_BYTES, True, True)))
    parts.warps |= {"consumers": 7, "registers": 255}
    kernel = emulate_schedule(parts.build())
    assert kernel.program.num_threads == 256
    check_decoder(kernel, [100, 7], 6, 2e-2)


@pytest.mark.parametrize(("rows", "workers"), thinned([(5, 3), (5, 12), (40, 12)], 1))
def test_a_rows_bits_depend_on_no_other_row(rows: int, workers: int) -> None:
    b = Builder()
    shapes = {"q": [rows, 2, 16], "k_cache": [rows, 1, 480, 16], "v_cache": [rows, 1, 480, 16]}
    operands = [(name, b.buffer("input", name, "bfloat16", shape)) for name, shape in shapes.items()]
    operands.append(("limit", b.buffer("input", "limit", "int64", [rows])))
    y = b.buffer("output", "y", "bfloat16", [rows, 2, 16])
    b.node("attention", operands, y, {"scale": 0.25, "style": "sdpa"})
    kernel = emulate(b.graph, workers=workers)
    [[job]] = [phase.jobs for phase in kernel.schedule.phases]
    assert job.cut.fields["overlaps"] == (rows > workers)
    inputs = [torch.randn(shape, dtype=torch.bfloat16) for shape in shapes.values()]
    before, output = None, torch.empty(rows, 2, 16, dtype=torch.bfloat16)
    for others in (333, 0, 7, 480):
        limit = torch.full([rows], others)
        limit[2] = 333
        kernel.launch([*inputs, limit], [output.fill_(torch.nan)], seed=others)
        _, (want,) = reference(b.graph, [*inputs, limit])
        assert relative_error(output, want) < 1e-2
        assert before is None or torch.equal(output[2], before)
        before = output[2].clone()


@pytest.mark.parametrize("dtype", thinned(["bfloat16", "float16"], 0))
def test_heads_of_any_size_that_share_a_key(dtype: str) -> None:
    """As attention's values are read and multiplied in batches: one launch of heads of 8 to 136 elements, of which one
    to eight share a key, workers with a split each and with several."""
    b, inputs = Builder(), []
    given = functools.partial(add_input, b, inputs)
    values = getattr(torch, dtype)
    for heads, size, rows in [(1, 8, 2), (3, 24, 9), (8, 64, 2), (2, 72, 9), (5, 80, 2), (4, 128, 9), (7, 136, 2)]:
        operands = [given("q", torch.randn(rows, heads, size, dtype=values))]
        operands += [given(name, torch.randn(rows, 1, 90, size, dtype=values)) for name in ("k_cache", "v_cache")]
        operands += [given("limit", torch.tensor([90, 37, *range(1, 90, 13)])[:rows])]
        y = b.buffer("output", "y", dtype, [rows, heads, size])
        b.node("attention", operands, y, {"scale": size**-0.5, "style": "sdpa"})
    kernel = emulate(b.graph, workers=6)
    overlaps = [job.cut.fields["overlaps"] for phase in kernel.schedule.phases for job in phase.jobs]
    assert set(overlaps) == {False, True}
    _, wanted = reference(b.graph, inputs)
    given_inputs = [allocate(t).copy_(x) for t, x in zip(tensors(b.graph, "input"), inputs, strict=True)]
    outputs = [allocate(t) for t in tensors(b.graph, "output")]
    kernel.launch(given_inputs, outputs)
    for got, want in zip(outputs, wanted, strict=True):
        assert relative_error(got, want) < 5e-3


@pytest.mark.slow
def test_a_batch_whose_rows_are_cut_differently() -> None:
    """A worker has several splits, and may have several of one group."""
    sizes = {"batch": 4, "heads": 4, "groups": 2, "head_dim": 64, "length": 2400, "layers": 1}
    kernel = emulate(decoder(**sizes), workers=3, polled=True)
    check_decoder(kernel, [2400, 16, 0, 500], 15, 2e-2)


@pytest.mark.parametrize("style", thinned(["sdpa", "eager"], 0))
def test_heads_without_a_key_give_what_their_form_gives(style: str) -> None:
    """One launch of two attentions, one whose cache is shared by all workers, with a float and a bool mask."""
    b = Builder()
    inputs, batch, heads = [], 2, 4
    given = functools.partial(add_input, b, inputs)
    for length in (24, 700):
        keep = torch.rand(batch, heads, length) < 0.5
        keep[0, 1] = False
        added = torch.zeros(batch, heads, length).masked_fill(~keep, -torch.inf)
        added[1, 0, length // 2] = torch.nan
        for mask in (added, keep):
            operands = [given("q", torch.randn(batch, heads, 16))]
            operands += [given(name, torch.randn(batch, 2, length, 16)) for name in ("k_cache", "v_cache")]
            operands += [given("mask", mask), given("limit", torch.tensor([length, 0 if mask is keep else length]))]
            y = b.buffer("output", "y", "float32", [batch, heads, 16])
            b.node("attention", operands, y, {"scale": 0.25, "style": style})
    kernel = emulate(b.graph)
    _, wanted = reference(b.graph, inputs)
    given_inputs = [allocate(t).copy_(x) for t, x in zip(tensors(b.graph, "input"), inputs, strict=True)]
    outputs = [allocate(t) for t in tensors(b.graph, "output")]
    kernel.launch(given_inputs, outputs)
    for is_bool, got, want in zip((False, True) * 2, outputs, wanted, strict=True):
        empty = [want[0, 1], want[1]] if is_bool else [want[0, 1]]
        assert all(head.isnan().all() if style == "eager" else not head.any() for head in empty)
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5, equal_nan=True)


SLOT_OUTSIDE = {"batch": 2, "heads": 6, "groups": 2, "head_dim": 80, "length": 300}
ROWS_OFF_16_BYTES = {"hidden": 70, "heads": 16, "groups": 1, "head_dim": 256, "ffn": 130, "length": 200}


@pytest.mark.parametrize(
    ("arch", "sizes", "limits", "slot"),
    thinned([(80, SLOT_OUTSIDE, [300, 7], 300), (90, ROWS_OFF_16_BYTES, [150], 3)], 1),
)
def test_decoder_in_fp32(arch: int, sizes: dict, limits: list[int], slot: int) -> None:
    kernel = emulate(decoder(layers=1, dtype="float32", **sizes), arch=arch)
    check_decoder(kernel, limits, slot, 1e-5)


@pytest.mark.slow
def test_entries_of_a_tile_for_several_warps_bit_by_bit() -> None:
    """Rows of the down projection are longer than a slot; rows of gate and up fill one each."""
    sizes = {"hidden": 2056, "heads": 2, "groups": 1, "ffn": 4360, "length": 40, "layers": 1}
    left_behind = []
    for fuse in (True, False):
        kernel = emulate(decoder(**sizes), fuse=fuse, workers=2)
        torch.manual_seed(1)
        left_behind.append(check_decoder(kernel, [33], 32, 2e-2))
    assert all(map(torch.equal, *left_behind))


@pytest.mark.parametrize(
    ("size", "workers", "smem_bytes", "assignment"),
    thinned(
        [
            (3000, 3, 30 << 10, "claimed"),  # two slots: fewer than the entries that the loader fills at once elsewhere
            (9000, 3, SMEM_BYTES, "claimed"),  # rows of three chunks
            (9000, 40, SMEM_BYTES, "static"),
        ],
        0,
    ),
)
def test_one_linear(size: int, workers: int, smem_bytes: int, assignment: str) -> None:
    b = Builder()
    names = {"x": [1, size], "weight": [200, size]}
    operands = [(name, b.buffer("input", name, "bfloat16", shape)) for name, shape in names.items()]
    b.node("linear", operands, b.buffer("output", "y", "bfloat16", [1, 200]))
    kernel = emulate(b.graph, workers=workers, smem_bytes=smem_bytes)
    [[job]] = [phase.jobs for phase in kernel.schedule.phases]
    assert job.assignment == assignment
    inputs = [torch.randn(shape, dtype=torch.bfloat16) for shape in names.values()]
    _, (want,) = reference(b.graph, inputs)
    for seed in range(3):
        outputs = [allocate(t) for t in tensors(b.graph, "output")]
        kernel.launch(inputs, outputs, seed=seed, jitter=seed)
        assert relative_error(outputs[0], want) < 1e-2


@pytest.mark.parametrize(
    ("rows", "size", "out", "dtype", "workers", "smem_bytes"),
    thinned(
        [
            (2, 1024, 200, "bfloat16", 3, SMEM_BYTES),  # half of the last box is beyond the matrix
            (8, 64, 9, "float16", 3, SMEM_BYTES),  # one box, of which a part is beyond the columns
            (33, 1024, 300, "float16", 3, SMEM_BYTES),  # windows of boxes of 16 rows
            (16, 4096, 77, "bfloat16", 3, SMEM_BYTES),  # windows of boxes of 8 rows
            (32, 4096, 100, "bfloat16", 9, SMEM_BYTES),  # four workers share the columns of tiles, and one has none
            (24, 6144, 40, "float16", 3, SMEM_BYTES),  # two workers do; rows that are not there
            (64, 576, 1300, "bfloat16", 2, 196 << 10),  # a last window that is shorter, several passes, few slots
            (16, 2048, 1600, "bfloat16", 2, SMEM_BYTES),  # several passes
            (40, 2048, 570, "bfloat16", 2, SMEM_BYTES),  # two blocks together, but for the last warp
        ],
        2,
    ),
)
def test_a_linear_with_several_rows_on_tensor_cores(rows, size, out, dtype, workers, smem_bytes) -> None:
    b = Builder()
    names = {"x": [rows, size], "weight": [out, size], "bias": [out]}
    operands = [(name, b.buffer("input", name, dtype, shape)) for name, shape in names.items()]
    b.node("linear", operands, b.buffer("output", "y", dtype, [rows, out]))
    kernel = emulate(b.graph, workers=workers, smem_bytes=smem_bytes)
    assert kernel.program.maps == [[1, 0, out, size, 2 * size, *((8, min(size, 512)) if rows <= 16 else (16, 256)), 0]]
    inputs = [torch.randn(shape, dtype=getattr(torch, dtype)) for shape in names.values()]
    _, (want,) = reference(b.graph, inputs)
    made = []
    for seed, order in enumerate(("forward", "reverse", "shuffled")):
        outputs = [allocate(t) for t in tensors(b.graph, "output")]
        kernel.launch(inputs, outputs, seed=seed, order=order, jitter=seed)
        assert relative_error(outputs[0], want) < 1e-2
        made += outputs
    assert all(torch.equal(made[0], other) for other in made[1:])
    inputs[0][1:] = torch.randn(rows - 1, size)  # what stands beside a row does not change its bits
    kernel.launch(inputs, outputs)
    assert torch.equal(outputs[0][0], made[0][0])
    assert not torch.equal(outputs[0][1:], made[0][1:])
    unaligned = torch.empty(rows * size + 1, dtype=inputs[0].dtype)[1:].view(rows, size).copy_(inputs[0])
    kernel.launch([unaligned, *inputs[1:]], outputs)
    assert torch.equal(outputs[0][0], made[0][0])


@pytest.mark.parametrize(
    ("batch", "hidden", "ffn"),
    thinned([(2, 1408, 192), (4, 2304, 192), (8, 128, 192), (20, 128, 192), (64, 128, 4096), (20, 128, 2624)]),
)
def test_a_decoder_of_several_rows_and_its_fusions(batch: int, hidden: int, ffn: int) -> None:
    sizes = {"batch": batch, "hidden": hidden, "heads": 4, "groups": 2, "head_dim": 32, "ffn": ffn, "length": 40}
    for polled in (True, False):
        kernel = emulate(decoder(**sizes), workers=5, polled=polled)
        assert "LinearRows" in kernel.program.source
        fields = [job.cut.fields for phase in kernel.schedule.phases for job in phase.jobs if job.cut.shape]
        assert any(each["split"] > 1 for each in fields) == (ffn == 4096)
        assert ("kBoxesOfX = true" in kernel.program.source) == (ffn > 192)  # windows onto what a phase has made
        torch.manual_seed(1)
        check_decoder(kernel, [5] * (batch - 2) + [0, 40], 39, 2e-2)


@pytest.mark.parametrize(("ffn", "workers"), thinned([(2048, 9), (3072, 5)]))
def test_workers_that_share_tiles_poll_their_columns(ffn: int, workers: int) -> None:
    sizes = {"batch": 32, "hidden": 128, "heads": 4, "groups": 2, "head_dim": 32, "ffn": ffn, "length": 40, "layers": 2}
    kernel = emulate(decoder(**sizes), workers=workers, polled=True)
    cuts = [job.cut for phase in kernel.schedule.phases for job in phase.jobs if job.cut.shape]
    assert [(cut.input, cut.shape.row_bytes) for cut in cuts if cut.fields["split"] == 4] == [("columns", 2 * ffn)] * 2
    torch.manual_seed(1)
    check_decoder(kernel, [5] * 30 + [0, 40], 39, 2e-2)


@pytest.mark.parametrize(
    ("batch", "ffn", "workers", "shapes"),
    thinned(
        [
            (64, 640, 2, {(64, 2, 1), (64, 2, 2), (56, 1, 1)}),  # passes with fewer boxes; sums of two boxes at a time
            (61, 192, 9, {(32, 1, 1), (24, 1, 1), (24, 1, 2)}),  # both warpgroups at one box; rows that are not there
        ],
    ),
)
def test_warpgroups_multiply_what_a_phase_has_made(
    batch: int, ffn: int, workers: int, shapes: set[tuple[int, int, int]]
) -> None:
    sizes = {"batch": batch, "hidden": 1024, "heads": 4, "groups": 2, "head_dim": 32, "ffn": ffn, "length": 40}
    kernel = emulate(decoder(**sizes), workers=workers)
    cuts = [job.cut for phase in kernel.schedule.phases for job in phase.jobs if job.cut.shape]
    found = [(cut.shape, cut.fields) for cut in cuts if cut.fields["by_warpgroups"]]
    assert {(shape.tile_rows, fields["mainloop_tiles"], shape.parts) for shape, fields in found} == shapes
    assert kernel.schedule.warps.empty_arrivals == 4
    torch.manual_seed(1)
    check_decoder(kernel, [5] * (batch - 2) + [0, 40], 39, 2e-2)


@pytest.mark.parametrize(
    ("batch", "hidden", "ffn", "workers"),
    thinned(
        [
            (64, 1024, 512, 8),  # by warpgroups
            (48, 1536, 320, 5),  # sums of a row are no multiple of four
            (20, 3072, 128, 2),  # several passes, of which a worker has fewer; no whole eights of rows in a stage of x
            (64, 1024, 4096, 21),  # workers share tiles, and one has none
        ],
    ),
)
def test_norms_end_the_jobs_that_make_their_rows(batch: int, hidden: int, ffn: int, workers: int) -> None:
    sizes = {"heads": 4, "groups": 2, "head_dim": 32, "length": 40, "layers": 1}
    kernel = emulate(decoder(batch=batch, hidden=hidden, ffn=ffn, **sizes), workers=workers, polled=True)
    assert kernel.program.source.count("kEndsWithNorm = true") == kernel.program.source.count("kScalesRows = true") == 2
    splits = {job.cut.fields["split"] for phase in kernel.schedule.phases for job in phase.jobs if job.cut.row_sums}
    assert (max(splits) > 1) == (ffn == 4096)
    torch.manual_seed(1)
    check_decoder(kernel, [5] * (batch - 2) + [0, 40], 39, 2e-2)


@pytest.mark.parametrize("seed", range(4))
def test_readers_wait_for_what_they_poll_in_the_reference_vm(seed: int) -> None:
    schedule = _C.make_schedule(decoder(), _C.Target("cuda", 90, 3, SMEM_BYTES, True, True))
    assert any(phase > 0 and not p.waits for phase, p in enumerate(schedule.phases))
    inputs = decoder_inputs(schedule.graph, [40], 5)
    wanted = reference(schedule.graph, inputs)
    outputs = [allocate(t) for t in tensors(schedule.graph, "output")]
    reference_vm.run(schedule, inputs, outputs, seed=seed)
    assert all(map(torch.equal, [*inputs, *outputs], [*wanted[0], *wanted[1]]))


WINDOWS = {"batch": 64, "hidden": 1024, "heads": 4, "groups": 2, "head_dim": 32, "ffn": 512, "length": 40, "layers": 1}


@pytest.mark.slow
@pytest.mark.parametrize(("arch", "sizes"), [(90, {"vocab": 8000}), (80, {"vocab": 8000}), (90, WINDOWS)])
def test_a_kernel_for_racecheck_hands_over_by_barriers_bit_by_bit(arch: int, sizes: dict[str, int]) -> None:
    left_behind = []
    for racecheck in (True, False):
        kernel = emulate(decoder(**sizes), arch=arch, racecheck=racecheck)
        jobs = [job for phase in kernel.schedule.phases for job in phase.jobs]
        assert any(job.assignment == "claimed" or job.cut.fields.get("by_warpgroups") for job in jobs)
        torch.manual_seed(1)
        left_behind.append(check_decoder(kernel, [40] * sizes.get("batch", 1), 5, 2e-2))
    assert all(map(torch.equal, *left_behind))


@pytest.mark.parametrize(
    ("rows", "size", "workers"), thinned([(1, 9000, 5), (2, 5001, 5), (1, 90000, 40), (3, 2500, 2)], 0)
)
def test_long_rows_are_split(rows: int, size: int, workers: int) -> None:
    graph = long_reductions(rows, size)
    kernel = emulate(graph, workers=workers)
    assert ("partials(" in kernel.program.source) == (rows < workers)
    x, counts = (allocate(t) for t in tensors(graph, "input"))
    for launch in range(3):
        torch.manual_seed(launch)
        x.copy_(torch.randn(rows, size))
        counts.copy_(torch.randint(-(2**40), 2**40, (rows, size)))
        x[0, 4000 % size] = x[0, 17] = 9.0  # a tie
        counts[-1, 4000 % size] = counts[-1, size - 1] = -(2**41)
        x[-1, size - 3] = torch.nan if launch == 1 else 0.0
        _, wanted = reference(graph, [x, counts])
        outputs = [allocate(t) for t in tensors(graph, "output")]
        kernel.launch([x, counts], outputs, seed=launch, jitter=launch, watchdog_ns=20 * 10**9)
        assert kernel.host_abort.sum() == 0
        for got, want in zip(outputs, wanted, strict=True):
            tolerance = 1e-4 if got.dtype == torch.float32 else 0
            torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance / 100, equal_nan=True)


def test_programs_and_reductions() -> None:
    graph = programs_and_reductions()
    kernel = emulate(graph)
    inputs = [allocate(t) for t in tensors(graph, "input")]
    for t, values in zip(inputs, (torch.randn(4, 6), torch.tensor([3, 0, 9, 1, 2]), torch.randn(4, 1500), 41)):
        t.copy_(torch.as_tensor(values))
    inputs[0][2, 3] = inputs[2][2, 500] = float("nan")
    inputs[2][1, 1234] = inputs[2][1, 77] = 9.0  # a tie
    wanted_inputs, wanted = reference(graph, inputs, [4])
    outputs = [allocate(t) for t in tensors(graph, "output")]
    kernel.launch(inputs, outputs, [4])
    for got, want in zip([*outputs, *inputs], [*wanted, *wanted_inputs], strict=True):
        tolerance = {torch.bfloat16: 1e-2, torch.float32: 1e-5}.get(got.dtype, 0)
        torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance, equal_nan=True)
