"""Generated kernels compile for the device without the assembler giving anything up."""

from __future__ import annotations

import itertools
import re

import pytest
import torch
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

import torch_mpk.tasks  # noqa: F401  declares the tasks
from tests.codegen.model_graphs import graph_of, graph_of_a_prompt
from tests.codegen.programs_graph import programs_and_reductions
from tests.ranks import step as step_of_ranks
from tests.schedule.decoder_graph import Builder, decoder
from tests.thinned import thinned
from torch_mpk import _C
from torch_mpk.errors import CompileError, UnsupportedError
from torch_mpk.generation.sampling import first_to_ring
from torch_mpk.jit import compile_cuda
from torch_mpk.jit.report import Resources
from torch_mpk.testing.tiny import Decoding, random_ids, tiny_model

QWEN3_06B = {"hidden": 1024, "heads": 16, "groups": 8, "head_dim": 128, "ffn": 3072, "length": 1024, "vocab": 151936}
QWEN3_8B = QWEN3_06B | {"hidden": 4096, "heads": 32, "ffn": 12288}
DECODERS = {
    "qwen3-0.6b": QWEN3_06B,
    "qwen3-8b": QWEN3_8B,
    "heads of 256": QWEN3_06B | {"heads": 8, "groups": 1, "head_dim": 256},
    "8 heads a group": QWEN3_06B | {"heads": 32, "groups": 4},
}
# Bytes of a thread's local memory. The cosine of the rotary table keeps an array there, for angles that do not occur.
COSINE_BYTES = 32
# What a thread knows of the launch, while the tiles' results fill its registers: a word or two, a few times a phase. An
# array among those results, or a result itself, is more.
PROMPT_BYTES = 64
SMEM_BYTES = {90: 232448, 80: 166912}


def compiled(graph: _C.TBGraph, arch: int) -> Resources:
    """Compilers' output is kept by content: where no kernel has changed since the last run, nothing is compiled."""
    schedule = _C.make_schedule(graph, _C.Target("cuda", arch, 132, SMEM_BYTES[arch], polled=True))
    program = _C.generate_cuda(schedule)
    assert program.num_threads == 384
    resources = compile_cuda(program.source, arch).resources
    assert resources.warnings == ()
    assert resources.registers <= schedule.warps.registers
    return resources


@pytest.mark.parametrize(
    ("decoder_name", "arch", "batch"),
    thinned(
        [
            *(("qwen3-0.6b", arch, 1) for arch in (90, 80)),
            ("heads of 256", 90, 1),
            ("8 heads a group", 90, 1),
            *(("qwen3-8b", 90, batch) for batch in (1, 4, 16, 64)),  # the batches between have pages, below
        ],
        0,
    ),
)
def test_a_decoder_keeps_nothing_in_local_memory(decoder_name: str, arch: int, batch: int) -> None:
    """Neither spilled registers nor arrays that the compiler could not split: their stores take memory bandwidth."""
    resources = compiled(decoder(batch=batch, **DECODERS[decoder_name]), arch)
    assert resources.stack_bytes == resources.spill_store_bytes == 0


@pytest.mark.slow
@pytest.mark.parametrize(("batch", "page_size"), [(1, 256), (2, 16), (8, 24), (32, 256), (64, 16)])
def test_a_decoder_over_pages_keeps_nothing_in_local_memory(batch: int, page_size: int) -> None:
    resources = compiled(decoder(batch=batch, page_size=page_size, **QWEN3_8B), 90)
    most = 32 if batch == 64 else 0  # sums of attention's values beside what 64 rows of linears keep: eight words
    assert max(resources.stack_bytes, resources.spill_store_bytes) <= most


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "batch", "length", "is_bucket"),
    [
        *itertools.product(("qwen3-0.6b", "qwen3-8b"), (1,), (128, 512), (False,)),
        ("qwen3-0.6b", 3, 128, False),
        ("qwen3-0.6b", 1, 512, True),
        ("qwen3-8b", 3, 128, True),
    ],
)
def test_a_prompt_keeps_next_to_nothing_in_local_memory(name: str, batch: int, length: int, is_bucket: bool) -> None:
    """Nor does the assembler serialise the warpgroups' products."""
    graph = graph_of_a_prompt(name, batch, length, is_bucket)
    assert {"prefill_attention", "linear"} <= {node.task for node in graph.nodes}
    resources = compiled(graph, 90)
    assert resources.stack_bytes <= COSINE_BYTES + PROMPT_BYTES
    assert max(resources.spill_store_bytes, resources.spill_load_bytes) <= PROMPT_BYTES


@pytest.mark.slow
def test_a_step_of_many_rows_keeps_next_to_nothing_in_local_memory() -> None:
    """Its linears take the most registers, beside calls for angles, norms and waits."""
    resources = compiled(graph_of_a_prompt("qwen3-8b", 64, 1, positions=1024), 90)
    assert resources.stack_bytes <= COSINE_BYTES + 16  # three words that a thread knows of the launch
    assert max(resources.spill_store_bytes, resources.spill_load_bytes) <= 16


@pytest.mark.parametrize("arch", thinned([90, 80]))
def test_what_draws_tokens_takes_no_other_jobs_registers(arch: int) -> None:
    """A consumer that its tasks got a reference to would stand in memory for the whole launch, some 160 bytes of it."""
    warpers = TemperatureLogitsWarper(0.6), TopKLogitsWarper(20), TopPLogitsWarper(0.95)

    def draw(logits: torch.Tensor, times: torch.Tensor) -> torch.Tensor:
        for warper in warpers:
            logits = warper(None, logits)
        return first_to_ring(logits, times)

    graph = graph_of(draw, lambda run: run(torch.randn(2, 151936), torch.empty(2, 151936).exponential_()))
    assert {"nth_largest", "nucleus"} <= {node.task for node in graph.nodes}
    resources = compiled(graph, arch)
    assert resources.stack_bytes <= 24  # what it keeps there while these run
    assert resources.spill_store_bytes == 0


@pytest.mark.parametrize("arch", thinned([90, 80], 1))
def test_nvrtc_compiles_a_decoder_as_well(monkeypatch: pytest.MonkeyPatch, arch: int) -> None:
    monkeypatch.setenv("TORCH_MPK_COMPILER", "nvrtc")
    compiled(decoder(**QWEN3_06B), arch)


@pytest.mark.slow
def test_exchanges_between_ranks_keep_nothing_in_local_memory() -> None:
    """Sums behind products, and logits that are gathered."""
    [inputs, _] = step_of_ranks.inputs_of(2, 4, torch.bfloat16)
    resources = compiled(step_of_ranks.graph_of(inputs, 2), 90)
    assert resources.stack_bytes == resources.spill_store_bytes == 0


def graph_of_a_step(arch: str, attention: str, dtype: torch.dtype, batch: int, mask: str) -> _C.TBGraph:
    model = tiny_model(arch, attention=attention, dtype=dtype, num_layers=1)
    with torch.inference_mode():
        decoding = Decoding(model, random_ids(batch, 5), mask=mask)
    return graph_of(model, lambda run: decoding.step(run, random_ids(batch, 1)))


STEPS = [("qwen3", "sdpa", torch.float16, 16, "4d"), ("llama", "eager", torch.float32, 3, "2d")]


@pytest.mark.parametrize(("step", "arch"), thinned(itertools.product(STEPS, [90, 80])), ids=str)
def test_steps_of_other_dtypes_and_with_masks_compile(step: tuple, arch: int) -> None:
    compiled(graph_of_a_step(*step), arch)


@pytest.mark.slow
def test_programs_and_reductions_compile() -> None:
    compiled(programs_and_reductions(), 90)


@pytest.mark.slow
def test_a_kernel_for_racecheck_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVCC_APPEND_FLAGS", "-DMPK_RACECHECK")
    compiled(decoder(), 90)


@pytest.mark.slow
def test_advancing_many_counters_takes_few_registers() -> None:
    """A step advances one for each layer; with all their addresses at hand it would take more than all else."""

    def registers(num_counters: int) -> int:
        b = Builder()
        b.increment([b.buffer("input", f"length{i}", "int64", [1]) for i in range(num_counters)])
        return compiled(b.graph, 90).registers

    assert registers(48) <= registers(4) + 8


def test_depth_adds_table_rows_only() -> None:
    target = _C.Target("cuda", 90, 132, SMEM_BYTES[90])
    shallow, deep = (_C.generate_cuda(_C.make_schedule(decoder(layers=n, **QWEN3_06B), target)) for n in (3, 12))
    assert deep.source.count("struct ") == shallow.source.count("struct ")
    assert deep.num_phases - shallow.num_phases == 9 * 5
    rows = []
    for program in (shallow, deep):
        number, length = (int(re.search(rf"{name} = (\d+);", program.source)[1]) for name in ("kNumRows", "kRowBytes"))
        assert len(program.table) == number * length + 24  # and what an aborted launch fills
        assert length <= 240
        rows.append(number)
    assert rows[1] - rows[0] == 9 * 5 + 1  # the last phase's counters take a second one


@pytest.mark.parametrize(
    ("member", "header", "concept"),
    thinned(
        [
            ("int kTileRows =", "linear_shape.cuh", "concept Sizes"),
            ("uint32_t num_rows(", "linear_shared.cuh", "static_assert(Variant<V, C>)"),
            ("int kFewHeads =", "attention_shape.cuh", "concept Sizes"),
            ("int64_t slot(", "attention.cuh", "static_assert(Sizes<V> && Places<V>)"),
            ("float kEps =", "rms_norm.cuh", "concept Traits"),
        ],
        0,
        3,
        4,
    ),
)
def test_the_compiler_names_the_concept_that_a_variant_lacks(member: str, header: str, concept: str) -> None:
    source = _C.generate_cuda(_C.make_schedule(decoder(layers=1), _C.Target("cuda", 90, 132, SMEM_BYTES[90]))).source
    assert member in source
    with pytest.raises(CompileError) as refused:
        compile_cuda(source.replace(member, f"{member[:-1].rstrip()}_{member[-1]}"), 90)
    message = str(refused.value)
    assert header in message
    assert concept in message


def test_a_stream_task_without_a_kernel_is_named() -> None:
    operands = [("x", ["R", "K"], False, True, False), ("y", ["R", "K"], False, False, True)]
    _C.register_task("codegen_test_copy", "stream", operands, [], "")
    b = Builder()
    x, y = (b.buffer(kind, name, "bfloat16", [1, 64]) for kind, name in (("input", "x"), ("output", "y")))
    b.node("codegen_test_copy", [("x", x)], y, label="here")
    with pytest.raises(UnsupportedError, match=r"codegen_test_copy \(here\): this task has no CUDA code"):
        _C.generate_cuda(_C.make_schedule(b.graph, _C.Target("cuda", 90, 132, SMEM_BYTES[90])))


def linears(sizes: dict[str, tuple[int, int]]) -> _C.TBGraph:
    """Of x with these numbers of rows and columns, by name."""
    b = Builder()
    for name, (rows, columns) in sizes.items():
        x, weight = (
            b.buffer("input", name + of, "bfloat16", [n, columns]) for of, n in ((".x", rows), (".weight", 128))
        )
        y = b.buffer("output", f"{name}.y", "bfloat16", [rows, 128])
        b.node("linear", [("x", x), ("weight", weight)], y, label=name)
    return b.graph


def test_what_cannot_be_generated_is_named() -> None:
    target = _C.Target("cuda", 90, 132, SMEM_BYTES[90])
    with pytest.raises(
        RuntimeError,
        match=r"linear \(layers.0.down\): x has 65 rows, expected at most 16, or weights of at most 512 rows .*"
        "more than 64 rows, x and the weights need 16-bit elements",
    ):
        _C.generate_cuda(_C.make_schedule(decoder(batch=65, ffn=96, hidden=1024), target))
    _C.generate_cuda(_C.make_schedule(decoder(batch=17, dtype="float32"), target))
    _C.generate_cuda(_C.make_schedule(decoder(batch=65, ffn=128), target))
    _C.generate_cuda(_C.make_schedule(linears({"wide": (65, 64), "narrow": (1, 40)}), target))
    with pytest.raises(
        RuntimeError, match=r"attention \(layers.0.attention\): the head size must be a multiple of 8 up to 256"
    ):
        _C.generate_cuda(_C.make_schedule(decoder(head_dim=20), target))
    with pytest.raises(RuntimeError, match="for device .cpu., expected cuda"):
        _C.generate_cuda(_C.make_schedule(decoder(), _C.Target("cpu")))
