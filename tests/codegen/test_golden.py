"""What is generated, to be read: a change of a kernel is a change of this file. ``EXPECTTEST_ACCEPT=1 pytest`` writes it.

A variant that resembles one before it is shown as what differs (see ``resembling``).
"""

import difflib
import re

import expecttest
import torch

from tests.schedule.decoder_graph import decoder
from tests.schedule.replay import describe
from torch_mpk import _C
from torch_mpk.calls import Call
from torch_mpk.registry import tasks
from torch_mpk.testing.tasks import Calls

VARIANT = re.compile(r"^struct (\w+) \{\n(.*?)^\};\n", re.MULTILINE | re.DOTALL)


def resembling(source: str) -> str:
    """The source, in which a variant that has most of its lines, in order, from one before it is only what differs."""
    known: dict[str, list[str]] = {}

    def shorten(match: re.Match[str]) -> str:
        name, lines = match[1], match[2].splitlines()
        closest = max(known, key=lambda other: ratio(known[other], lines), default="")
        like = known.get(closest, [])
        known[name] = lines
        if ratio(like, lines) < 0.75:
            return match[0]
        changes = [line for line in difflib.unified_diff(like, lines, n=0, lineterm="") if line[0] in "+-"][2:]
        return "\n".join([f"struct {name} as {closest}, but", *changes, ""])

    return VARIANT.sub(shorten, source)


def ratio(before: list[str], after: list[str]) -> float:
    return difflib.SequenceMatcher(None, before, after, autojunk=False).ratio() if before else 0.0


def variants(name: str) -> str:
    """Of a job of the task's first sample, in bfloat16, and how they are called."""
    [task] = [task for task in tasks() if task.name == name]
    operands, attrs = task.sample(task.samples[0], torch.bfloat16)
    source = Calls([Call(task, operands, attrs)]).program(90).source
    calls = re.findall(r"^ +case \d+: return (.*)\n", source, re.MULTILINE)
    begin, end = source.index("using namespace mpk;"), source.index("constexpr int larger")
    return "".join(match[0] for match in VARIANT.finditer(source[begin:end])) + "".join(f"{call}\n" for call in calls)


class TestDecoder(expecttest.TestCase):
    """Two layers with polled vectors on four workers, of sizes that fill neither warps nor slots."""

    def setUp(self) -> None:
        super().setUp()
        self.schedule = _C.make_schedule(decoder(layers=2), _C.Target("cuda", 90, 4, 232448, polled=True))

    def test_schedule(self) -> None:
        self.assertExpectedInline(
            "\n".join([*describe(self.schedule.to_json(), self.schedule.graph), ""]),
            """\
target: device cuda, arch 90, workers 4, smem_bytes 232448, fuse True
workspace_bytes: 8704
polled_bytes: 3584
warps: consumers 11, loaders 1, threads 384, registers 168, max_slots 28, slot_bytes 8192, full_arrivals 1, empty_arrivals 1
phase 0, which waits for nothing
  44 static tiles
    prologue: 0 rms_norm layers.0.input_norm
    body: 1 linear layers.0.q, 2 linear layers.0.k, 3 linear layers.0.v
    kernel: linear.vector
    cost_ns: 200
    shape: tile_rows 3, parts 1, chunk_parts 1, row_bytes 128, chunk_bytes 128, entries 1, run 1, in_flight 9, shares_entries True
    input: whole
    staged_bytes: 128
    others: {'kernel': 'linear.direct', 'cost_ns': 2400}, {'kernel': 'linear.rows', 'refusal': 'x has 1 rows, expected 2 to 64'}, {'kernel': 'linear.tiles', 'refusal': "the launch's warps do not multiply together, for few rows of x"}
    unstored: layers.0.input_norm
phase 1, which waits for nothing
  1 static tiles
    prologue: 4 rms_norm layers.0.q_norm, 5 rms_norm layers.0.k_norm, 6 rope layers.0.q_rope, 7 rope layers.0.k_rope
    body: 8 attention layers.0.attention
    kernel: attention.split_kv
    cost_ns: 40
    staged_bytes: 28272
    scratch: bytes 4352, offset 0
    fields: heads 2, few_heads 2, positions 16, split_tiles 0, few_splits 1, splits 4, result_bytes 544, overlaps 0
    unstored: layers.0.q_norm, layers.0.k_norm, layers.0.q_rope, layers.0.k_rope
phase 2, which waits for nothing
  32 static tiles
    body: 9 linear layers.0.o
    epilogue: 10 pointwise layers.0.residual
    kernel: linear.vector
    cost_ns: 200
    shape: tile_rows 2, parts 1, chunk_parts 1, row_bytes 128, chunk_bytes 128, entries 1, run 1, in_flight 9, shares_entries True
    input: whole
    staged_bytes: 128
    others: {'kernel': 'linear.direct', 'cost_ns': 1600}, {'kernel': 'linear.rows', 'refusal': 'x has 1 rows, expected 2 to 64'}, {'kernel': 'linear.tiles', 'refusal': "the launch's warps do not multiply together, for few rows of x"}
    unstored: layers.0.o
phase 3, which waits for nothing
  32 static tiles
    prologue: 11 rms_norm layers.0.post_norm
    body: 12 linear layers.0.gate, 13 linear layers.0.up
    epilogue: 14 pointwise layers.0.act
    kernel: linear.vector
    cost_ns: 400
    shape: tile_rows 3, parts 2, chunk_parts 1, row_bytes 128, chunk_bytes 128, entries 2, run 1, in_flight 9, shares_entries False
    input: whole
    staged_bytes: 480
    others: {'kernel': 'linear.direct', 'cost_ns': 4000}, {'kernel': 'linear.rows', 'refusal': 'x has 1 rows, expected 2 to 64'}, {'kernel': 'linear.tiles', 'refusal': "the launch's warps do not multiply together, for few rows of x"}
    unstored: layers.0.post_norm, layers.0.gate, layers.0.up
phase 4, which waits for nothing
  32 static tiles
    body: 15 linear layers.0.down
    epilogue: 16 pointwise layers.0.output
    kernel: linear.vector
    cost_ns: 200
    shape: tile_rows 2, parts 1, chunk_parts 1, row_bytes 192, chunk_bytes 192, entries 1, run 1, in_flight 9, shares_entries True
    input: whole
    staged_bytes: 192
    others: {'kernel': 'linear.direct', 'cost_ns': 1600}, {'kernel': 'linear.rows', 'refusal': 'x has 1 rows, expected 2 to 64'}, {'kernel': 'linear.tiles', 'refusal': "the launch's warps do not multiply together, for few rows of x"}
    unstored: layers.0.down
phase 5, which waits for nothing
  44 static tiles
    prologue: 17 rms_norm layers.1.input_norm
    body: 18 linear layers.1.q, 19 linear layers.1.k, 20 linear layers.1.v
    kernel: linear.vector
    cost_ns: 200
    shape: tile_rows 3, parts 1, chunk_parts 1, row_bytes 128, chunk_bytes 128, entries 1, run 1, in_flight 9, shares_entries True
    input: whole
    staged_bytes: 128
    others: {'kernel': 'linear.direct', 'cost_ns': 2400}, {'kernel': 'linear.rows', 'refusal': 'x has 1 rows, expected 2 to 64'}, {'kernel': 'linear.tiles', 'refusal': "the launch's warps do not multiply together, for few rows of x"}
    unstored: layers.1.input_norm
phase 6, which waits for nothing
  1 static tiles
    prologue: 21 rms_norm layers.1.q_norm, 22 rms_norm layers.1.k_norm, 23 rope layers.1.q_rope, 24 rope layers.1.k_rope
    body: 25 attention layers.1.attention
    kernel: attention.split_kv
    cost_ns: 40
    staged_bytes: 28272
    scratch: bytes 4352, offset 4352
    fields: heads 2, few_heads 2, positions 16, split_tiles 0, few_splits 1, splits 4, result_bytes 544, overlaps 0
    unstored: layers.1.q_norm, layers.1.k_norm, layers.1.q_rope, layers.1.k_rope
phase 7, which waits for nothing
  32 static tiles
    body: 26 linear layers.1.o
    epilogue: 27 pointwise layers.1.residual
    kernel: linear.vector
    cost_ns: 200
    shape: tile_rows 2, parts 1, chunk_parts 1, row_bytes 128, chunk_bytes 128, entries 1, run 1, in_flight 9, shares_entries True
    input: whole
    staged_bytes: 128
    others: {'kernel': 'linear.direct', 'cost_ns': 1600}, {'kernel': 'linear.rows', 'refusal': 'x has 1 rows, expected 2 to 64'}, {'kernel': 'linear.tiles', 'refusal': "the launch's warps do not multiply together, for few rows of x"}
    unstored: layers.1.o
phase 8, which waits for nothing
  32 static tiles
    prologue: 28 rms_norm layers.1.post_norm
    body: 29 linear layers.1.gate, 30 linear layers.1.up
    epilogue: 31 pointwise layers.1.act
    kernel: linear.vector
    cost_ns: 400
    shape: tile_rows 3, parts 2, chunk_parts 1, row_bytes 128, chunk_bytes 128, entries 2, run 1, in_flight 9, shares_entries False
    input: whole
    staged_bytes: 480
    others: {'kernel': 'linear.direct', 'cost_ns': 4000}, {'kernel': 'linear.rows', 'refusal': 'x has 1 rows, expected 2 to 64'}, {'kernel': 'linear.tiles', 'refusal': "the launch's warps do not multiply together, for few rows of x"}
    unstored: layers.1.post_norm, layers.1.gate, layers.1.up
phase 9, which waits for nothing
  32 static tiles
    body: 32 linear layers.1.down
    epilogue: 33 pointwise layers.1.output
    kernel: linear.vector
    cost_ns: 200
    shape: tile_rows 2, parts 1, chunk_parts 1, row_bytes 192, chunk_bytes 192, entries 1, run 1, in_flight 9, shares_entries True
    input: whole
    staged_bytes: 192
    others: {'kernel': 'linear.direct', 'cost_ns': 1600}, {'kernel': 'linear.rows', 'refusal': 'x has 1 rows, expected 2 to 64'}, {'kernel': 'linear.tiles', 'refusal': "the launch's warps do not multiply together, for few rows of x"}
    unstored: layers.1.down
phase 10, which waits for [9]
  34 static tiles
    prologue: 34 rms_norm norm
    body: 35 linear head
    kernel: linear.vector
    cost_ns: 200
    shape: tile_rows 3, parts 1, chunk_parts 1, row_bytes 128, chunk_bytes 128, entries 1, run 1, in_flight 9, shares_entries True
    input: whole
    staged_bytes: 128
    others: {'kernel': 'linear.direct', 'cost_ns': 2400}, {'kernel': 'linear.rows', 'refusal': 'x has 1 rows, expected 2 to 64'}, {'kernel': 'linear.tiles', 'refusal': "the launch's warps do not multiply together, for few rows of x"}
    unstored: norm
  1 static tiles
    body: 36 pointwise counters
    kernel: pointwise
workspace:
polled:
  0: layers.0.q
  256: layers.0.k
  512: layers.0.v
  768: layers.0.attended
  1024: layers.0.residual
  1280: layers.0.act
  1536: layers.0.output
  1792: layers.1.q
  2048: layers.1.k
  2304: layers.1.v
  2560: layers.1.attended
  2816: layers.1.residual
  3072: layers.1.act
  3328: layers.1.output
""",
        )

    def test_source(self) -> None:
        self.assertExpectedInline(
            resembling(_C.generate_cuda(self.schedule).source),
            """\
// Generated by torch_mpk from a schedule of 11 phases.
#define MPK_CONSUMER_WARPS 11
#define MPK_LOADER_WARPS 1
#include "torch_mpk/device/megakernel.cuh"
#include "torch_mpk/device/points.cuh"
#include "torch_mpk/device/tasks/attention.cuh"
#include "torch_mpk/device/tasks/linear.cuh"
#include "torch_mpk/device/tasks/rms_norm.cuh"
#include "torch_mpk/device/tasks/rope.cuh"

namespace torch_mpk_kernel_parts {

using namespace mpk;

struct Linear0 {
  using T = __nv_bfloat16;
  static constexpr int kBatch = 1;
  static constexpr int kSize = 64;
  static constexpr int kSegments = 3;
  static constexpr int kParts = 1;
  static constexpr int kTileRows = 3;
  static constexpr int kChunkParts = 1;
  static constexpr int kChunkSize = 64;
  static constexpr uint32_t kNumTiles = 44;
  static constexpr bool kStaged = true;
  static constexpr bool kRowTasks = true;
  static constexpr bool kClaimed = false;
  static constexpr bool kSharesLoop = true;
  static MPK_DEVICE uint32_t first_tile(int i) {
    return i == 0 ? 0u : i == 1 ? 22u : 33u;
  }
  static MPK_DEVICE uint32_t num_rows(int i) {
    return i == 0 ? 64u : i == 1 ? 32u : 32u;
  }
  struct Task0 {
    using T = __nv_bfloat16;
    static constexpr int kSize = 64;
    using Weight = __nv_bfloat16;
    static constexpr float kEps = 1e-06f;
    static constexpr rms_norm::Style kStyle = rms_norm::Style::kLlama;
    static constexpr bool kHasWeight = true, kVectorized = false;
    static MPK_DEVICE const Weight* weight(const Job& job) { return job.pointer<const Weight>(4); }
  };
  template <class Group>
  struct Chain {
    static_assert(RowTask<rms_norm::Task<Task0, Group>, Group, __nv_bfloat16>);
    rms_norm::Task<Task0, Group> task0;
    MPK_DEVICE Chain(const Group& group, const Job& job, uint32_t row) : task0(group, job, row) {}
    MPK_DEVICE void fetch(Group& group, const Job& job, uint32_t row, __nv_bfloat16* data) {
      copy_row<__nv_bfloat16, 64, false>(group, data, job.pointer<const __nv_bfloat16>(3) + 0);
    }
    MPK_DEVICE void apply(Group& group, const Job& job, uint32_t row, __nv_bfloat16* data) {
      group.sync();
      task0.apply(group, data);
    }
    MPK_DEVICE void bring(Group& group, const Job& job, uint32_t row, __nv_bfloat16* data) {
      copy_row<__nv_bfloat16, 64, false>(group, data, job.pointer<const __nv_bfloat16>(3) + 0);
      group.sync();
      task0.apply(group, data);
    }
  };
  static constexpr int kPitchX = 64;
  static MPK_DEVICE const T* x(const Job& job) {
    return nullptr;
  }
  static constexpr bool kEarly = true;
  static constexpr bool kHasExtra = false;
  struct Extra {
  };
  static MPK_DEVICE Extra preload(const Job& job, int segment, int r, uint32_t n) {
    Extra extra{};
    return extra;
  }
  template <class C>
  static MPK_DEVICE void finish(C& c, const Job& job, int segment, int r, uint32_t n, const float (&results)[kParts], const Extra& extra) {
    if (segment == 0) {
    const T y0 = cast<T>(results[0]);
    store_element(job.pointer<uint16_t>(5) + (int64_t(r) * 64 + n), y0);
    }
    if (segment == 1) {
    const T y1 = cast<T>(results[0]);
    store_element(job.pointer<uint16_t>(6) + (int64_t(r) * 32 + n), y1);
    }
    if (segment == 2) {
    const T y2 = cast<T>(results[0]);
    store_element(job.pointer<uint16_t>(7) + (int64_t(r) * 32 + n), y2);
    }
  }
};

struct Attention1 {
  using T = __nv_bfloat16;
  static constexpr int kBatch = 1;
  static constexpr int kGroups = 2;
  static constexpr int kPasses = 1;
  static constexpr int kHeads = 2;
  static constexpr int kFewHeads = 2;
  static constexpr int kTilePositions = 16;
  static constexpr int kPieceTiles = 0;
  static constexpr int kFewPieces = 1;
  static constexpr int kPieces = 4;
  static constexpr int kPartialBytes = 544;
  static constexpr bool kOverlaps = false;
  static constexpr int kSize = 16;
  static constexpr int kValueSize = 16;
  static constexpr int kLength = 40;
  static constexpr int kWorkers = 4;
  static MPK_DEVICE int64_t limit(const Job& job, uint32_t b) {
    return job.pointer<const int64_t>(1)[int64_t(b) * 1];
  }
  static MPK_DEVICE uint8_t* partials(const Job& job) {
    return job.pointer<uint8_t>(0);
  }
  static constexpr bool kHasNew = true;
  static constexpr float kScale = 0.25f;
  static constexpr float kSoftCap = 0.0f;
  static constexpr bool kZeroWithoutKeys = true;
  static constexpr bool kHasMask = false;
  static constexpr bool kHasSinks = false;
  static constexpr uint32_t kPitchK = 32, kPitchV = 32;
  static MPK_DEVICE int64_t slot(const Job& job) {
    return *job.pointer<const int64_t>(2);
  }
  static MPK_DEVICE T* k_cache(const Job& job, uint32_t b, uint32_t g) {
    return job.pointer<__nv_bfloat16>(3) + int64_t(b) * 1280 + int64_t(g) * 640;
  }
  static MPK_DEVICE T* v_cache(const Job& job, uint32_t b, uint32_t g) {
    return job.pointer<__nv_bfloat16>(4) + int64_t(b) * 1280 + int64_t(g) * 640;
  }
  static constexpr bool kPolled = true;
  static MPK_DEVICE uint16_t* y(const Job& job, uint32_t b, uint32_t h) {
    return job.pointer<uint16_t>(5) + int64_t(b) * 64 + int64_t(h) * 16;
  }
  static constexpr uint32_t kRefsQ = 6;
  struct RowsQ {
  struct Task0 {
    using T = __nv_bfloat16;
    static constexpr int kSize = 16;
    using Weight = __nv_bfloat16;
    static constexpr float kEps = 1e-06f;
    static constexpr rms_norm::Style kStyle = rms_norm::Style::kLlama;
    static constexpr bool kHasWeight = true, kVectorized = true;
    static MPK_DEVICE const Weight* weight(const Job& job) { return job.pointer<const Weight>(1); }
  };
  struct Task1 {
    using T = __nv_bfloat16;
    static constexpr int kSize = 16;
    static MPK_DEVICE const T* cos(const Job& job, uint32_t row) { return job.pointer<const __nv_bfloat16>(2) + 0; }
    static MPK_DEVICE const T* sin(const Job& job, uint32_t row) { return job.pointer<const __nv_bfloat16>(3) + 0; }
    static constexpr bool kVectorized = true, kAlignedTables = false;
  };
  template <class Group>
  struct Chain {
    static_assert(RowTask<rms_norm::Task<Task0, Group>, Group, __nv_bfloat16>);
    rms_norm::Task<Task0, Group> task0;
    static_assert(RowTask<rope::Task<Task1, Group>, Group, __nv_bfloat16>);
    rope::Task<Task1, Group> task1;
    MPK_DEVICE Chain(const Group& group, const Job& job, uint32_t row, uint32_t batch_row) : task0(group, job, row), task1(group, job, batch_row) {}
    MPK_DEVICE void fetch(Group& group, const Job& job, uint32_t row, __nv_bfloat16* data) {
      copy_polled_row<__nv_bfloat16, 16, true>(group, data, job.pointer<const uint16_t>(0) + int64_t((row)) * 16);
    }
    MPK_DEVICE void apply(Group& group, const Job& job, uint32_t row, __nv_bfloat16* data) {
      task0.apply(group, data);
      group.sync();
      task1.apply(group, data);
    }
    MPK_DEVICE void bring(Group& group, const Job& job, uint32_t row, __nv_bfloat16* data) {
      task0.apply_to_polled(group, data, job.pointer<const uint16_t>(0) + int64_t((row)) * 16);
      group.sync();
      task1.apply(group, data);
    }
  };
  };
  static constexpr uint32_t kRefsK = 10;
  using RowsK = RowsQ;
  static constexpr uint32_t kRefsV = 14;
  struct RowsV {
  template <class Group>
  struct Chain {
    MPK_DEVICE Chain(const Group& group, const Job& job, uint32_t row, uint32_t batch_row) {}
    MPK_DEVICE void fetch(Group& group, const Job& job, uint32_t row, __nv_bfloat16* data) {
      copy_polled_row<__nv_bfloat16, 16, true>(group, data, job.pointer<const uint16_t>(0) + int64_t((row)) * 16);
    }
    MPK_DEVICE void apply(Group& group, const Job& job, uint32_t row, __nv_bfloat16* data) {
    }
    MPK_DEVICE void bring(Group& group, const Job& job, uint32_t row, __nv_bfloat16* data) {
      copy_polled_row<__nv_bfloat16, 16, true>(group, data, job.pointer<const uint16_t>(0) + int64_t((row)) * 16);
    }
  };
  };
  static constexpr bool kOneChain = true;
  static constexpr bool kEarly = true;
};

struct Linear2 {
  using T = __nv_bfloat16;
  static constexpr int kBatch = 1;
  static constexpr int kSize = 64;
  static constexpr int kSegments = 1;
  static constexpr int kParts = 1;
  static constexpr int kTileRows = 2;
  static constexpr int kChunkParts = 1;
  static constexpr int kChunkSize = 64;
  static constexpr uint32_t kNumTiles = 32;
  static constexpr bool kStaged = true;
  static constexpr bool kRowTasks = false;
  static constexpr bool kClaimed = false;
  static constexpr bool kSharesLoop = true;
  static MPK_DEVICE uint32_t first_tile(int i) {
    return 0u;
  }
  static MPK_DEVICE uint32_t num_rows(int i) {
    return 64u;
  }
  template <class Group>
  struct Chain {
    MPK_DEVICE Chain(const Group& group, const Job& job, uint32_t row) {}
    MPK_DEVICE void fetch(Group& group, const Job& job, uint32_t row, __nv_bfloat16* data) {
      copy_polled_row<__nv_bfloat16, 64, true>(group, data, job.pointer<const uint16_t>(1) + 0);
    }
    MPK_DEVICE void apply(Group& group, const Job& job, uint32_t row, __nv_bfloat16* data) {
    }
    MPK_DEVICE void bring(Group& group, const Job& job, uint32_t row, __nv_bfloat16* data) {
      copy_polled_row<__nv_bfloat16, 64, true>(group, data, job.pointer<const uint16_t>(1) + 0);
    }
  };
  static constexpr int kPitchX = 64;
  static MPK_DEVICE const T* x(const Job& job) {
    return nullptr;
  }
  static constexpr bool kEarly = true;
  static constexpr bool kHasExtra = true;
  struct Extra {
    uint32_t e0_v0;
  };
  static MPK_DEVICE Extra preload(const Job& job, int segment, int r, uint32_t n) {
    Extra extra{};
    const int32_t point = r * 64 + n;
    const int32_t e0_i1 = point;
    extra.e0_v0 = to_word(load_constant(job.pointer<const __nv_bfloat16>(2) + (e0_i1)));
    return extra;
  }
  template <class C>
  static MPK_DEVICE void finish(C& c, const Job& job, int segment, int r, uint32_t n, const float (&results)[kParts], const Extra& extra) {
    const T y0 = cast<T>(results[0]);
    const int32_t point = r * 64 + n;
    const int32_t e0_i1 = point;
    const __nv_bfloat16 e0_v0 = cast<__nv_bfloat16>(from_word<__nv_bfloat16>(extra.e0_v0));
    const __nv_bfloat16 e0_v1 = cast<__nv_bfloat16>(y0);
    const __nv_bfloat16 e0_v2 = cast<__nv_bfloat16>(ops::add<float>(cast<float>(e0_v0), cast<float>(e0_v1)));
    const __nv_bfloat16 e0_s3 = cast<__nv_bfloat16>(e0_v2);
    store_element(job.pointer<uint16_t>(3) + (e0_i1), e0_s3);
  }
};

struct Linear3 {
  using T = __nv_bfloat16;
  static constexpr int kBatch = 1;
  static constexpr int kSize = 64;
  static constexpr int kSegments = 1;
  static constexpr int kParts = 2;
  static constexpr int kTileRows = 3;
  static constexpr int kChunkParts = 1;
  static constexpr int kChunkSize = 64;
  static constexpr uint32_t kNumTiles = 32;
  static constexpr bool kStaged = true;
  static constexpr bool kRowTasks = true;
  static constexpr bool kClaimed = false;
  static constexpr bool kSharesLoop = false;
  static MPK_DEVICE uint32_t first_tile(int i) {
    return 0u;
  }
  static MPK_DEVICE uint32_t num_rows(int i) {
    return 96u;
  }
  struct Task0 {
    using T = __nv_bfloat16;
    static constexpr int kSize = 64;
    using Weight = __nv_bfloat16;
    static constexpr float kEps = 1e-06f;
    static constexpr rms_norm::Style kStyle = rms_norm::Style::kLlama;
    static constexpr bool kHasWeight = true, kVectorized = true;
    static MPK_DEVICE const Weight* weight(const Job& job) { return job.pointer<const Weight>(3); }
  };
  template <class Group>
  struct Chain {
    static_assert(RowTask<rms_norm::Task<Task0, Group>, Group, __nv_bfloat16>);
    rms_norm::Task<Task0, Group> task0;
    MPK_DEVICE Chain(const Group& group, const Job& job, uint32_t row) : task0(group, job, row) {}
    MPK_DEVICE void fetch(Group& group, const Job& job, uint32_t row, __nv_bfloat16* data) {
      copy_polled_row<__nv_bfloat16, 64, true>(group, data, job.pointer<const uint16_t>(2) + 0);
    }
    MPK_DEVICE void apply(Group& group, const Job& job, uint32_t row, __nv_bfloat16* data) {
      task0.apply(group, data);
    }
    MPK_DEVICE void bring(Group& group, const Job& job, uint32_t row, __nv_bfloat16* data) {
      task0.apply_to_polled(group, data, job.pointer<const uint16_t>(2) + 0);
    }
  };
  static constexpr int kPitchX = 64;
  static MPK_DEVICE const T* x(const Job& job) {
    return nullptr;
  }
  static constexpr bool kEarly = true;
  static constexpr bool kHasExtra = false;
  struct Extra {
  };
  static MPK_DEVICE Extra preload(const Job& job, int segment, int r, uint32_t n) {
    Extra extra{};
    return extra;
  }
  template <class C>
  static MPK_DEVICE void finish(C& c, const Job& job, int segment, int r, uint32_t n, const float (&results)[kParts], const Extra& extra) {
    const T y0 = cast<T>(results[0]);
    const T y1 = cast<T>(results[1]);
    const int32_t point = r * 96 + n;
    const int32_t e0_i1 = point;
    const __nv_bfloat16 e0_v0 = cast<__nv_bfloat16>(y0);
    const __nv_bfloat16 e0_v1 = cast<__nv_bfloat16>(y1);
    const __nv_bfloat16 e0_v2 = cast<__nv_bfloat16>(ops::mul<float>(cast<float>(e0_v0), cast<float>(e0_v1)));
    const __nv_bfloat16 e0_s3 = cast<__nv_bfloat16>(e0_v2);
    store_element(job.pointer<uint16_t>(4) + (e0_i1), e0_s3);
  }
};

struct Linear4 as Linear2, but
-  static constexpr int kSize = 64;
+  static constexpr int kSize = 96;
-  static constexpr int kChunkSize = 64;
+  static constexpr int kChunkSize = 96;
-      copy_polled_row<__nv_bfloat16, 64, true>(group, data, job.pointer<const uint16_t>(1) + 0);
+      copy_polled_row<__nv_bfloat16, 96, true>(group, data, job.pointer<const uint16_t>(1) + 0);
-      copy_polled_row<__nv_bfloat16, 64, true>(group, data, job.pointer<const uint16_t>(1) + 0);
+      copy_polled_row<__nv_bfloat16, 96, true>(group, data, job.pointer<const uint16_t>(1) + 0);
-  static constexpr int kPitchX = 64;
+  static constexpr int kPitchX = 96;
-    extra.e0_v0 = to_word(load_constant(job.pointer<const __nv_bfloat16>(2) + (e0_i1)));
+    extra.e0_v0 = ptx::load_relaxed_gpu(job.pointer<const uint16_t>(2) + (e0_i1));
-    const __nv_bfloat16 e0_v0 = cast<__nv_bfloat16>(from_word<__nv_bfloat16>(extra.e0_v0));
+    const __nv_bfloat16 e0_v0 = cast<__nv_bfloat16>(element_of<__nv_bfloat16>(c, extra.e0_v0, job.pointer<const uint16_t>(2) + (e0_i1)));

struct Linear5 as Linear0, but
-    static constexpr bool kHasWeight = true, kVectorized = false;
+    static constexpr bool kHasWeight = true, kVectorized = true;
-      copy_row<__nv_bfloat16, 64, false>(group, data, job.pointer<const __nv_bfloat16>(3) + 0);
+      copy_polled_row<__nv_bfloat16, 64, true>(group, data, job.pointer<const uint16_t>(3) + 0);
-      group.sync();
-      copy_row<__nv_bfloat16, 64, false>(group, data, job.pointer<const __nv_bfloat16>(3) + 0);
-      group.sync();
-      task0.apply(group, data);
+      task0.apply_to_polled(group, data, job.pointer<const uint16_t>(3) + 0);

struct Linear6 as Linear2, but
-    extra.e0_v0 = to_word(load_constant(job.pointer<const __nv_bfloat16>(2) + (e0_i1)));
+    extra.e0_v0 = ptx::load_relaxed_gpu(job.pointer<const uint16_t>(2) + (e0_i1));
-    const __nv_bfloat16 e0_v0 = cast<__nv_bfloat16>(from_word<__nv_bfloat16>(extra.e0_v0));
+    const __nv_bfloat16 e0_v0 = cast<__nv_bfloat16>(element_of<__nv_bfloat16>(c, extra.e0_v0, job.pointer<const uint16_t>(2) + (e0_i1)));

struct Linear7 as Linear3, but
-  static constexpr int kParts = 2;
+  static constexpr int kParts = 1;
-  static constexpr uint32_t kNumTiles = 32;
+  static constexpr uint32_t kNumTiles = 34;
-  static constexpr bool kSharesLoop = false;
+  static constexpr bool kSharesLoop = true;
-    return 96u;
+    return 100u;
-    static MPK_DEVICE const Weight* weight(const Job& job) { return job.pointer<const Weight>(3); }
+    static MPK_DEVICE const Weight* weight(const Job& job) { return job.pointer<const Weight>(2); }
-      copy_polled_row<__nv_bfloat16, 64, true>(group, data, job.pointer<const uint16_t>(2) + 0);
+      copy_polled_row<__nv_bfloat16, 64, true>(group, data, job.pointer<const uint16_t>(1) + 0);
-      task0.apply_to_polled(group, data, job.pointer<const uint16_t>(2) + 0);
+      task0.apply_to_polled(group, data, job.pointer<const uint16_t>(1) + 0);
-    const T y1 = cast<T>(results[1]);
-    const int32_t point = r * 96 + n;
-    const int32_t e0_i1 = point;
-    const __nv_bfloat16 e0_v0 = cast<__nv_bfloat16>(y0);
-    const __nv_bfloat16 e0_v1 = cast<__nv_bfloat16>(y1);
-    const __nv_bfloat16 e0_v2 = cast<__nv_bfloat16>(ops::mul<float>(cast<float>(e0_v0), cast<float>(e0_v1)));
-    const __nv_bfloat16 e0_s3 = cast<__nv_bfloat16>(e0_v2);
-    store_element(job.pointer<uint16_t>(4) + (e0_i1), e0_s3);
+    job.pointer<__nv_bfloat16>(3)[int64_t(r) * 100 + n] = y0;

struct Points8 {
  using Index = int32_t;
  static constexpr Index kPoints = 1;
  static MPK_DEVICE void point(const Job& job, Index point) {
    const int64_t v0 = static_cast<int64_t>(1LL);
    const int64_t v1 = cast<int64_t>(*(job.pointer<const int64_t>(0) + (0)));
    const int64_t v2 = cast<int64_t>(ops::add<int64_t>(cast<int64_t>(v1), cast<int64_t>(v0)));
    const int64_t s3 = cast<int64_t>(v2);
    job.pointer<int64_t>(1)[0] = s3;
    const int64_t v4 = cast<int64_t>(*(job.pointer<const int64_t>(2) + (0)));
    const int64_t v5 = cast<int64_t>(ops::add<int64_t>(cast<int64_t>(v4), cast<int64_t>(v0)));
    const int64_t s6 = cast<int64_t>(v5);
    job.pointer<int64_t>(3)[0] = s6;
  }
};

constexpr int larger(int a, int b) { return a > b ? a : b; }
constexpr int round_up(int v) { return (v + 127) / 128 * 128; }

struct Linears {
  using T = Linear0::T;
  static constexpr uint32_t kRowCounts = 12;
  static MPK_DEVICE bool has(const Job& job) { return job.variant == 0 || job.variant == 2 || job.variant == 4 || job.variant == 5 || job.variant == 6 || job.variant == 7; }
  static MPK_DEVICE bool has_extra(const Job& job) { return job.variant == 2 || job.variant == 4 || job.variant == 6; }
  union Extra {
    uint32_t none;
    Linear0::Extra of_Linear0;
    Linear2::Extra of_Linear2;
    Linear4::Extra of_Linear4;
    Linear5::Extra of_Linear5;
    Linear6::Extra of_Linear6;
    Linear7::Extra of_Linear7;
  };
  template <class C>
  static MPK_DEVICE bool prepare(C& c, const Job& job) {
    if (job.variant < 5u) {
    if (job.variant < 2u) {
    return linear::prepare<Linear0>(c, job);
    } else {
    if (job.variant < 4u) {
    return linear::prepare<Linear2>(c, job);
    } else {
    return linear::prepare<Linear4>(c, job);
    }
    }
    } else {
    if (job.variant < 6u) {
    return linear::prepare<Linear5>(c, job);
    } else {
    if (job.variant < 7u) {
    return linear::prepare<Linear6>(c, job);
    } else {
    return linear::prepare<Linear7>(c, job);
    }
    }
    }
  }
  static MPK_DEVICE Extra preload(const Job& job, int segment, uint32_t n) {
    Extra extra{};
    if (job.variant < 4u) {
    extra.of_Linear2 = Linear2::preload(job, segment, 0, n);
    } else {
    if (job.variant < 6u) {
    extra.of_Linear4 = Linear4::preload(job, segment, 0, n);
    } else {
    extra.of_Linear6 = Linear6::preload(job, segment, 0, n);
    }
    }
    return extra;
  }
  template <class C>
  static MPK_DEVICE void finish(C& c, const Job& job, int segment, uint32_t n, const float (&values)[4],
                                const Extra& extra) {
    if (job.variant < 5u) {
    if (job.variant < 2u) {
    linear::finish_row<Linear0>(c, job, segment, n, values, extra.of_Linear0);
    } else {
    if (job.variant < 4u) {
    linear::finish_row<Linear2>(c, job, segment, n, values, extra.of_Linear2);
    } else {
    linear::finish_row<Linear4>(c, job, segment, n, values, extra.of_Linear4);
    }
    }
    } else {
    if (job.variant < 6u) {
    linear::finish_row<Linear5>(c, job, segment, n, values, extra.of_Linear5);
    } else {
    if (job.variant < 7u) {
    linear::finish_row<Linear6>(c, job, segment, n, values, extra.of_Linear6);
    } else {
    linear::finish_row<Linear7>(c, job, segment, n, values, extra.of_Linear7);
    }
    }
    }
  }
};

struct Kernel {
  static constexpr int kFullArrivals = 1;
  static constexpr int kEmptyArrivals = 1;
  static constexpr int kNumRows = 11;
  static constexpr int kNumPhases = 11;
  static constexpr int kNumWorkers = 4;
  static constexpr int kNumOutputs = 1;
  static constexpr int64_t kEventsOffset = 32;
  static constexpr int64_t kTicketsOffset = 384;
  static constexpr int64_t kStallsOffset = 736;
  static constexpr int64_t kStampsOffset = 0;
  static constexpr int64_t kOutputsOffset = 2288;
  static constexpr int64_t kPolledOffset = 8704;
  static constexpr int64_t kPolledBytes = 3584;
  static constexpr int kRowBytes = 208;
  static constexpr int kRowsOffset = sizeof(Shared);
  static constexpr int kStagedOffset = round_up(kRowsOffset + kPhasesAhead * kRowBytes);
  static constexpr int kStagedBytes = larger(larger(larger(larger(larger(larger(larger(larger(256,
      linear::Shape<Linear0>::kStagedBytes),
      attention::Shape<Attention1>::kStagedBytes),
      linear::Shape<Linear2>::kStagedBytes),
      linear::Shape<Linear3>::kStagedBytes),
      linear::Shape<Linear4>::kStagedBytes),
      linear::Shape<Linear5>::kStagedBytes),
      linear::Shape<Linear6>::kStagedBytes),
      linear::Shape<Linear7>::kStagedBytes);
  static constexpr bool kHasBoxes = false;
  static constexpr bool kHasWindows = false;
  static constexpr int kRingOffset = kStagedOffset + round_up(kStagedBytes);
  static constexpr int kSlotBytes = 8192;
  static constexpr int kFittingSlots = (232448 - kRingOffset) / kSlotBytes;
  static constexpr int kSlots = kFittingSlots < 28 ? kFittingSlots : 28;
  static_assert(kSlots >= kFewestSlots, "no shared memory is left for the ring");
  static_assert(kStagedBytes <= 28272, "a job stages more than the schedule says");

  template <class C>
  static MPK_DEVICE void compute(C& c, const Job& job) {
    if (Linears::has(job)) return linear::compute_shared<Linears>(c, job);
    switch (job.variant) {
      case 1: return attention::compute<Attention1>(c, job);
      case 3: return linear::compute<Linear3>(c, job);
      case 8: return run_points<Points8>(c, job);
    }
  }

  template <class L>
  static MPK_DEVICE void load(L& l, const Job& job) {
    switch (job.variant) {
      case 1: return attention::load<Attention1>(l, job);
      default: break;
    }
  }
};

struct LaunchBlock {
  LaunchParams params;
  void* pointers[35];
};

}  // namespace torch_mpk_kernel_parts

extern "C" __global__ void __launch_bounds__(mpk::kThreads, 1) torch_mpk_kernel(const __grid_constant__ torch_mpk_kernel_parts::LaunchBlock block) {
  mpk::run<torch_mpk_kernel_parts::Kernel>(block.params, block.pointers);
}
""",
        )


class TestTasks(expecttest.TestCase):
    """The variants that a task becomes when it stands alone."""

    def test_every_task_is_here(self) -> None:
        own = {task.name for task in tasks() if task.__module__.startswith("torch_mpk.")}
        own -= {"prefill_attention", "varlen_attention"}  # which take heads of 64 and 128 alone
        assert {name.removeprefix("test_") for name in dir(self) if name.startswith("test_")} == {
            *own,
            "every_task_is_here",
        }

    def test_all_gather(self) -> None:
        self.assertExpectedInline(variants("all_gather"), """""")

    def test_all_reduce(self) -> None:
        self.assertExpectedInline(variants("all_reduce"), """""")

    def test_quantized_linear(self) -> None:
        self.assertExpectedInline(
            variants("quantized_linear"),
            """\
struct QuantizedRows0 {
  using T = __nv_bfloat16;
  static constexpr int kBatch = 1;
  static constexpr int kSize = 256;
  static constexpr int kSegments = 1;
  static constexpr int kParts = 1;
  static constexpr int kBoxRows = 8;
  static constexpr int kPassTiles = 1;
  static constexpr int kWindowSize = 256;
  static constexpr int kTurnTiles = 1;
  static constexpr int kSplit = 1;
  static constexpr bool kByWarpgroups = false;
  static constexpr bool kBoxesOfX = false;
  static constexpr int kXRows = 1;
  static constexpr int kWorkerTiles = 1;
  static MPK_DEVICE const void* map_of_x(const Job& job) {
    return nullptr;
  }
  static constexpr int kChunkSize = 256;
  static constexpr uint32_t kNumTiles = 24;
  static constexpr bool kStaged = true;
  static constexpr bool kRowTasks = false;
  static constexpr bool kClaimed = false;
  static constexpr bool kSharesLoop = false;
  static MPK_DEVICE uint32_t first_tile(int i) {
    return 0u;
  }
  static MPK_DEVICE uint32_t num_rows(int i) {
    return 192u;
  }
  template <class Group>
  struct Chain {
    MPK_DEVICE Chain(const Group& group, const Job& job, uint32_t row) {}
    MPK_DEVICE void fetch(Group& group, const Job& job, uint32_t row, __nv_bfloat16* data) {
      copy_row<__nv_bfloat16, 256, false>(group, data, job.pointer<const __nv_bfloat16>(1) + 0);
    }
    MPK_DEVICE void apply(Group& group, const Job& job, uint32_t row, __nv_bfloat16* data) {
    }
    MPK_DEVICE void bring(Group& group, const Job& job, uint32_t row, __nv_bfloat16* data) {
      copy_row<__nv_bfloat16, 256, false>(group, data, job.pointer<const __nv_bfloat16>(1) + 0);
    }
  };
  static constexpr bool kIsE4M3 = true;
  static constexpr bool kScalesByRow = false;
  static constexpr int kScaleColumns = 128;
  static constexpr int kXScaleColumns = 128;
  static constexpr bool kGivenXScale = false;
  static MPK_DEVICE float x_scale(const Job& job) {
    return 0.0f;
  }
  using Scale = float;
  static MPK_DEVICE const Scale* scale(const Job& job, int i) {
    return job.pointer<const float>(2);
  }
  static MPK_DEVICE int64_t scale_pitch(int i) {
    return 2;
  }
  static MPK_DEVICE uint32_t scale_rows(int i) {
    return 128u;
  }
  static constexpr int kPitchX = 256;
  static MPK_DEVICE const uint16_t* x(const Job& job) {
    return nullptr;
  }
  static constexpr bool kEarly = true;
  static constexpr bool kHasExtra = false;
  struct Extra {
  };
  static MPK_DEVICE Extra preload(const Job& job, int segment, int r, uint32_t n) {
    Extra extra{};
    return extra;
  }
  template <class C>
  static MPK_DEVICE void finish(C& c, const Job& job, int segment, int r, uint32_t n, const float (&results)[kParts], const Extra& extra) {
    const T y0 = cast<T>(results[0]);
    job.pointer<__nv_bfloat16>(3)[int64_t(r) * 192 + n] = y0;
  }
  static constexpr bool kEndsWithNorm = false;
  static constexpr bool kScalesRows = false;
};
linear::compute_quantized_rows<QuantizedRows0>(c, job);
""",
        )

    def test_expert_linear(self) -> None:
        self.assertExpectedInline(
            variants("expert_linear"),
            """\
struct Experts0 {
  using T = __nv_bfloat16;
  static constexpr int kPairs = 2;
  static constexpr int kChoices = 2;
  static constexpr int kExperts = 4;
  static constexpr int kRows = 48;
  static constexpr int kSize = 64;
  static constexpr int kXRow = 128;
  static constexpr int kXChoice = 64;
  static constexpr int kIdsRow = 2;
  static constexpr int kIdsChoice = 1;
  static constexpr int64_t kExpertPitch = 3072, kRowPitch = 64;
  static constexpr int kYRow = 96;
  static constexpr int kYChoice = 48;
  static MPK_DEVICE const __nv_bfloat16* x(const Job& job) {
    return job.pointer<const __nv_bfloat16>(3);
  }
  static MPK_DEVICE const int64_t* ids(const Job& job) {
    return job.pointer<const int64_t>(2);
  }
  static MPK_DEVICE const __nv_bfloat16* weight(const Job& job) {
    return job.pointer<const __nv_bfloat16>(1);
  }
  static MPK_DEVICE __nv_bfloat16* y(const Job& job) {
    return job.pointer<__nv_bfloat16>(0);
  }
  static MPK_DEVICE const void* map(const Job& job) {
    return job.pointer<const void>(4);
  }
};
experts::compute_boxes<Experts0>(c, job);
experts::load_boxes<Experts0>(l, job);
""",
        )

    def test_topk(self) -> None:
        self.assertExpectedInline(
            variants("topk"),
            """\
struct Tile0 {
  static constexpr uint32_t kTiles = 1;
  static constexpr int64_t kLeading = 1;
  static constexpr int64_t kN = 64;
  static constexpr int64_t kK = 1;
  static constexpr int64_t kNum = 1;
  struct X {
    using T = __nv_bfloat16;
    static constexpr bool kPresent = true;
    static constexpr int kAlignment = 2;
    static constexpr int64_t stride([[maybe_unused]] int d) { return 1; }
  };
  struct Values {
    using T = __nv_bfloat16;
    static constexpr bool kPresent = true;
    static constexpr int kAlignment = 16;
    static constexpr int64_t stride([[maybe_unused]] int d) { return 1; }
  };
  struct Ids {
    using T = int64_t;
    static constexpr bool kPresent = true;
    static constexpr int kAlignment = 16;
    static constexpr int64_t stride([[maybe_unused]] int d) { return 1; }
  };
  static constexpr int kTileBytes = 128;  // of the largest slice
  struct Tile {
    mpk::Range Leading;
    mpk::Range N;
    mpk::Range K;
  };
  static MPK_DEVICE Tile at([[maybe_unused]] uint32_t number) {
    Tile tile;
    tile.K = {0, 0, 1};
    tile.N = {0, 0, 64};
    tile.Leading = {0, 0, 1};
    return tile;
  }
  template <class V_>
  static constexpr int shared_bytes() {
    static_assert(tasks::topk::kSharedBytes<V_> <= 98304,
                  "task topk: kSharedBytes is more than the 98304 bytes that a tile may have: cut smaller tiles");
    return tasks::topk::kSharedBytes<V_>;
  }
  template <class V_, class Threads_>
  static MPK_DEVICE void compute(Threads_& threads, const mpk::Job& job, uint32_t number, uint8_t* shared) {
    const Tile tile = at(number);
    tasks::topk::compute<V_>(threads, tile, shared,
        job.pointer<const __nv_bfloat16>(0) + 0,
        job.pointer<__nv_bfloat16>(1) + 0,
        job.pointer<int64_t>(2) + 0);
  }
};
run_tiles<Tile0>(c, job);
""",
        )

    def test_argmax(self) -> None:
        self.assertExpectedInline(
            variants("argmax"),
            """\
struct Reduce0 {
  using Index = int32_t;
  using Op = reduce::ArgMax<float>;
  static constexpr int64_t kOuter = 1, kInner = 100;
  struct Extra {
    uint32_t v0;
  };
  static MPK_DEVICE Extra preload(const Job& job, Index outer, Index inner) {
    Extra extra{};
    extra.v0 = to_word(load_constant(job.pointer<const __nv_bfloat16>(0) + (inner)));
    return extra;
  }
  static MPK_DEVICE float value(const Job& job, Index outer, Index inner, const Extra& extra) {
    const __nv_bfloat16 v0 = cast<__nv_bfloat16>(from_word<__nv_bfloat16>(extra.v0));
    return cast<float>(v0);
  }
  template <class R>
  static MPK_DEVICE void finish(const Job& job, Index outer, R result) {
    job.pointer<int64_t>(1)[0] = cast<int64_t>(result);
  }
  static constexpr int kPieces = 1;
};
run_reduce<Reduce0>(c, job);
""",
        )

    def test_attention(self) -> None:
        self.assertExpectedInline(
            variants("attention"),
            """\
struct Attention0 {
  using T = __nv_bfloat16;
  static constexpr int kBatch = 1;
  static constexpr int kGroups = 2;
  static constexpr int kPasses = 1;
  static constexpr int kHeads = 2;
  static constexpr int kFewHeads = 2;
  static constexpr int kTilePositions = 16;
  static constexpr int kPieceTiles = 0;
  static constexpr int kFewPieces = 1;
  static constexpr int kPieces = 132;
  static constexpr int kPartialBytes = 544;
  static constexpr bool kOverlaps = false;
  static constexpr int kSize = 16;
  static constexpr int kValueSize = 16;
  static constexpr int kLength = 24;
  static constexpr int kWorkers = 132;
  static MPK_DEVICE int64_t limit(const Job& job, uint32_t b) {
    return job.pointer<const int64_t>(1)[int64_t(b) * 1];
  }
  static MPK_DEVICE uint8_t* partials(const Job& job) {
    return job.pointer<uint8_t>(0);
  }
  static constexpr bool kHasNew = true;
  static constexpr float kScale = 0.25f;
  static constexpr float kSoftCap = 0.0f;
  static constexpr bool kZeroWithoutKeys = true;
  static constexpr bool kHasMask = false;
  static constexpr bool kHasSinks = false;
  static constexpr uint32_t kPitchK = 32, kPitchV = 32;
  static MPK_DEVICE int64_t slot(const Job& job) {
    return *job.pointer<const int64_t>(2);
  }
  static MPK_DEVICE T* k_cache(const Job& job, uint32_t b, uint32_t g) {
    return job.pointer<__nv_bfloat16>(3) + int64_t(b) * 768 + int64_t(g) * 384;
  }
  static MPK_DEVICE T* v_cache(const Job& job, uint32_t b, uint32_t g) {
    return job.pointer<__nv_bfloat16>(4) + int64_t(b) * 768 + int64_t(g) * 384;
  }
  static constexpr bool kPolled = false;
  static MPK_DEVICE T* y(const Job& job, uint32_t b, uint32_t h) {
    return job.pointer<__nv_bfloat16>(5) + int64_t(b) * 64 + int64_t(h) * 16;
  }
  static constexpr uint32_t kRefsQ = 6;
  struct RowsQ {
  template <class Group>
  struct Chain {
    MPK_DEVICE Chain(const Group& group, const Job& job, uint32_t row, uint32_t batch_row) {}
    MPK_DEVICE void fetch(Group& group, const Job& job, uint32_t row, __nv_bfloat16* data) {
      copy_row<__nv_bfloat16, 16, false>(group, data, job.pointer<const __nv_bfloat16>(0) + int64_t((row)) * 16);
    }
    MPK_DEVICE void apply(Group& group, const Job& job, uint32_t row, __nv_bfloat16* data) {
    }
    MPK_DEVICE void bring(Group& group, const Job& job, uint32_t row, __nv_bfloat16* data) {
      copy_row<__nv_bfloat16, 16, false>(group, data, job.pointer<const __nv_bfloat16>(0) + int64_t((row)) * 16);
    }
  };
  };
  static constexpr uint32_t kRefsK = 7;
  using RowsK = RowsQ;
  static constexpr uint32_t kRefsV = 8;
  using RowsV = RowsQ;
  static constexpr bool kOneChain = true;
  static constexpr bool kEarly = true;
};
attention::compute<Attention0>(c, job);
attention::load<Attention0>(l, job);
""",
        )

    def test_nth_largest(self) -> None:
        self.assertExpectedInline(
            variants("nth_largest"),
            """\
struct Tile0 {
  static constexpr uint32_t kTiles = 1;
  static constexpr int64_t kLeading = 1;
  static constexpr int64_t kN = 100;
  struct X {
    using T = __nv_bfloat16;
    static constexpr bool kPresent = true;
    static constexpr int kAlignment = 2;
    static constexpr int64_t stride([[maybe_unused]] int d) { return 1; }
  };
  struct N {
    using T = int64_t;
    static constexpr bool kPresent = true;
    static constexpr int kAlignment = 8;
    static constexpr int64_t stride([[maybe_unused]] int d) { return 0; }
  };
  struct Peaks {
    using T = __nv_bfloat16;
    static constexpr bool kPresent = false;
    static constexpr int kAlignment = 16;
    static constexpr int64_t stride([[maybe_unused]] int d) { return 0; }
  };
  struct Y {
    using T = __nv_bfloat16;
    static constexpr bool kPresent = true;
    static constexpr int kAlignment = 16;
    static constexpr int64_t stride([[maybe_unused]] int d) { return 0; }
  };
  static constexpr int kTileBytes = 200;  // of the largest slice
  struct Tile {
    mpk::Range Leading;
    mpk::Range N;
  };
  static MPK_DEVICE Tile at([[maybe_unused]] uint32_t number) {
    Tile tile;
    tile.N = {0, 0, 100};
    tile.Leading = {0, 0, 1};
    return tile;
  }
  template <class V_>
  static constexpr int shared_bytes() {
    static_assert(tasks::nth_largest::kSharedBytes<V_> <= 98304,
                  "task nth_largest: kSharedBytes is more than the 98304 bytes that a tile may have: cut smaller tiles");
    return tasks::nth_largest::kSharedBytes<V_>;
  }
  template <class V_, class Threads_>
  static MPK_DEVICE void compute(Threads_& threads, const mpk::Job& job, uint32_t number, uint8_t* shared) {
    const Tile tile = at(number);
    tasks::nth_largest::compute<V_>(threads, tile, shared,
        job.pointer<const __nv_bfloat16>(0) + 0,
        job.pointer<const int64_t>(1) + 0,
        static_cast<const typename Peaks::T*>(nullptr),
        job.pointer<__nv_bfloat16>(2) + 0);
  }
};
run_tiles<Tile0>(c, job);
""",
        )

    def test_nucleus(self) -> None:
        self.assertExpectedInline(
            variants("nucleus"),
            """\
struct Tile0 {
  static constexpr uint32_t kTiles = 1;
  static constexpr int64_t kLeading = 1;
  static constexpr int64_t kN = 100;
  struct X {
    using T = __nv_bfloat16;
    static constexpr bool kPresent = true;
    static constexpr int kAlignment = 2;
    static constexpr int64_t stride([[maybe_unused]] int d) { return 1; }
  };
  struct Rest {
    using T = float;
    static constexpr bool kPresent = true;
    static constexpr int kAlignment = 4;
    static constexpr int64_t stride([[maybe_unused]] int d) { return 0; }
  };
  struct Peaks {
    using T = __nv_bfloat16;
    static constexpr bool kPresent = false;
    static constexpr int kAlignment = 16;
    static constexpr int64_t stride([[maybe_unused]] int d) { return 0; }
  };
  struct Sums {
    using T = __nv_bfloat16;
    static constexpr bool kPresent = false;
    static constexpr int kAlignment = 16;
    static constexpr int64_t stride([[maybe_unused]] int d) { return 0; }
  };
  struct Least {
    using T = __nv_bfloat16;
    static constexpr bool kPresent = true;
    static constexpr int kAlignment = 16;
    static constexpr int64_t stride([[maybe_unused]] int d) { return 0; }
  };
  struct First {
    using T = int64_t;
    static constexpr bool kPresent = true;
    static constexpr int kAlignment = 16;
    static constexpr int64_t stride([[maybe_unused]] int d) { return 0; }
  };
  static constexpr int kTileBytes = 200;  // of the largest slice
  struct Tile {
    mpk::Range Leading;
    mpk::Range N;
  };
  static MPK_DEVICE Tile at([[maybe_unused]] uint32_t number) {
    Tile tile;
    tile.N = {0, 0, 100};
    tile.Leading = {0, 0, 1};
    return tile;
  }
  template <class V_>
  static constexpr int shared_bytes() {
    static_assert(tasks::nucleus::kSharedBytes<V_> <= 98304,
                  "task nucleus: kSharedBytes is more than the 98304 bytes that a tile may have: cut smaller tiles");
    return tasks::nucleus::kSharedBytes<V_>;
  }
  template <class V_, class Threads_>
  static MPK_DEVICE void compute(Threads_& threads, const mpk::Job& job, uint32_t number, uint8_t* shared) {
    const Tile tile = at(number);
    tasks::nucleus::compute<V_>(threads, tile, shared,
        job.pointer<const __nv_bfloat16>(0) + 0,
        job.pointer<const float>(1) + 0,
        static_cast<const typename Peaks::T*>(nullptr),
        static_cast<const typename Sums::T*>(nullptr),
        job.pointer<__nv_bfloat16>(2) + 0,
        job.pointer<int64_t>(3) + 0);
  }
};
run_tiles<Tile0>(c, job);
""",
        )

    def test_paged_attention(self) -> None:
        self.assertExpectedInline(
            variants("paged_attention"),
            """\
struct PagedAttention0 {
  using T = __nv_bfloat16;
  static constexpr int kBatch = 1;
  static constexpr int kGroups = 2;
  static constexpr int kPasses = 1;
  static constexpr int kHeads = 2;
  static constexpr int kFewHeads = 2;
  static constexpr int kTilePositions = 16;
  static constexpr int kPieceTiles = 0;
  static constexpr int kFewPieces = 1;
  static constexpr int kPieces = 132;
  static constexpr int kPartialBytes = 544;
  static constexpr bool kOverlaps = false;
  static constexpr int kSize = 16;
  static constexpr int kValueSize = 16;
  static constexpr int kLength = 12;
  static constexpr int kWorkers = 132;
  static MPK_DEVICE int64_t limit(const Job& job, uint32_t b) {
    return job.pointer<const int32_t>(1)[int64_t(b) * 1];
  }
  static MPK_DEVICE uint8_t* partials(const Job& job) {
    return job.pointer<uint8_t>(0);
  }
  static constexpr bool kHasNew = true;
  static constexpr float kScale = 0.25f;
  static constexpr float kSoftCap = 0.0f;
  static constexpr bool kZeroWithoutKeys = true;
  static constexpr bool kHasMask = false;
  static constexpr bool kHasSinks = false;
  static constexpr uint32_t kPitchK = 64, kPitchV = 64;
  static constexpr bool kInBoxes = false;
  static constexpr int kPageSize = 3;
  static MPK_DEVICE int32_t num_pages(const Job& job) {
    return job.number(3);
  }
  static MPK_DEVICE const int32_t* page_at(const Job& job, uint32_t b, uint32_t m) {
    return job.pointer<const int32_t>(2) + int64_t(b) * 4 + int64_t(m) * 1;
  }
  static MPK_DEVICE T* k_pages(const Job& job, int32_t page, uint32_t g) {
    return job.pointer<__nv_bfloat16>(4) + int64_t(page) * 96 + int64_t(g) * 16;
  }
  static MPK_DEVICE T* v_pages(const Job& job, int32_t page, uint32_t g) {
    return job.pointer<__nv_bfloat16>(5) + int64_t(page) * 96 + int64_t(g) * 16;
  }
  static constexpr bool kPolled = false;
  static MPK_DEVICE T* y(const Job& job, uint32_t b, uint32_t h) {
    return job.pointer<__nv_bfloat16>(6) + int64_t(b) * 64 + int64_t(h) * 16;
  }
  static constexpr uint32_t kRefsQ = 7;
  struct RowsQ {
  template <class Group>
  struct Chain {
    MPK_DEVICE Chain(const Group& group, const Job& job, uint32_t row, uint32_t batch_row) {}
    MPK_DEVICE void fetch(Group& group, const Job& job, uint32_t row, __nv_bfloat16* data) {
      copy_row<__nv_bfloat16, 16, false>(group, data, job.pointer<const __nv_bfloat16>(0) + int64_t((row)) * 16);
    }
    MPK_DEVICE void apply(Group& group, const Job& job, uint32_t row, __nv_bfloat16* data) {
    }
    MPK_DEVICE void bring(Group& group, const Job& job, uint32_t row, __nv_bfloat16* data) {
      copy_row<__nv_bfloat16, 16, false>(group, data, job.pointer<const __nv_bfloat16>(0) + int64_t((row)) * 16);
    }
  };
  };
  static constexpr uint32_t kRefsK = 8;
  using RowsK = RowsQ;
  static constexpr uint32_t kRefsV = 9;
  using RowsV = RowsQ;
  static constexpr bool kOneChain = true;
  static constexpr bool kEarly = true;
};
attention::compute<PagedAttention0>(c, job);
attention::load<PagedAttention0>(l, job);
""",
        )

    def test_embedding(self) -> None:
        self.assertExpectedInline(
            variants("embedding"),
            """\
struct Points0 {
  using Index = int32_t;
  static constexpr Index kPoints = 16;
  static MPK_DEVICE void point(const Job& job, Index point) {
    const int32_t i0 = point;
    const int64_t v0 = static_cast<int64_t>(20LL);
    const int64_t v1 = cast<int64_t>(load_constant(job.pointer<const int64_t>(0) + (0)));
    const bool v2 = cast<bool>(ops::lt<int64_t>(cast<int64_t>(v1), cast<int64_t>(v0)));
    const int64_t v3 = static_cast<int64_t>(0LL);
    const bool v4 = cast<bool>(ops::ge<int64_t>(cast<int64_t>(v1), cast<int64_t>(v3)));
    const bool v5 = cast<bool>(ops::logical_and<bool>(cast<bool>(v4), cast<bool>(v2)));
    const int64_t v6 = static_cast<int64_t>(16LL);
    const int64_t v7 = cast<int64_t>(ops::mul<int64_t>(cast<int64_t>(v1), cast<int64_t>(v6)));
    const __nv_bfloat16 v8 = cast<bool>(v5) ? cast<__nv_bfloat16>(load_constant(job.pointer<const __nv_bfloat16>(1) + (i0 + v7))) : cast<__nv_bfloat16>(0);
    const __nv_bfloat16 s9 = cast<__nv_bfloat16>(v8);
    job.pointer<__nv_bfloat16>(2)[i0] = s9;
  }
};
run_points<Points0>(c, job);
""",
        )

    def test_gelu_mul(self) -> None:
        self.assertExpectedInline(
            variants("gelu_mul"),
            """\
struct Points0 {
  using Index = int32_t;
  static constexpr Index kPoints = 96;
  static MPK_DEVICE void point(const Job& job, Index point) {
    const int32_t i0 = point;
    const __nv_bfloat16 v0 = cast<__nv_bfloat16>(load_constant(job.pointer<const __nv_bfloat16>(0) + (i0)));
    const __nv_bfloat16 v1 = cast<__nv_bfloat16>(load_constant(job.pointer<const __nv_bfloat16>(1) + (i0)));
    const __nv_bfloat16 v2 = cast<__nv_bfloat16>(ops::gelu_tanh<float>(cast<float>(v1)));
    const __nv_bfloat16 v3 = cast<__nv_bfloat16>(ops::mul<float>(cast<float>(v2), cast<float>(v0)));
    const __nv_bfloat16 s4 = cast<__nv_bfloat16>(v3);
    job.pointer<__nv_bfloat16>(2)[i0] = s4;
  }
};
run_points<Points0>(c, job);
""",
        )

    def test_kv_write(self) -> None:
        self.assertExpectedInline(
            variants("kv_write"),
            """\
struct Points0 {
  using Index = int32_t;
  static constexpr Index kPoints = 32;
  static MPK_DEVICE void point(const Job& job, Index point) {
    const int32_t i1 = (point) % 16;
    const int32_t i0 = (point) / 16;
    const int64_t v0 = static_cast<int64_t>(8LL);
    const int64_t v1 = static_cast<int64_t>(7LL);
    const int64_t v2 = static_cast<int64_t>(0LL);
    const int64_t v3 = cast<int64_t>(load_constant(job.pointer<const int64_t>(0) + (0)));
    const int64_t v4 = cast<int64_t>(ops::maximum<int64_t>(cast<int64_t>(v3), cast<int64_t>(v2)));
    const int64_t v5 = cast<int64_t>(ops::minimum<int64_t>(cast<int64_t>(v4), cast<int64_t>(v1)));
    const bool v6 = cast<bool>(ops::lt<int64_t>(cast<int64_t>(v5), cast<int64_t>(v0)));
    const bool v7 = cast<bool>(ops::ge<int64_t>(cast<int64_t>(v5), cast<int64_t>(v2)));
    const bool v8 = cast<bool>(ops::logical_and<bool>(cast<bool>(v7), cast<bool>(v6)));
    const int64_t v9 = static_cast<int64_t>(16LL);
    const int64_t v10 = cast<int64_t>(ops::mul<int64_t>(cast<int64_t>(v5), cast<int64_t>(v9)));
    const __nv_bfloat16 v11 = cast<bool>(v8) ? cast<__nv_bfloat16>(*(job.pointer<const __nv_bfloat16>(1) + (i0 * 128 + i1 + v10))) : cast<__nv_bfloat16>(0);
    const __nv_bfloat16 v12 = cast<__nv_bfloat16>(load_constant(job.pointer<const __nv_bfloat16>(2) + (i0 * 16 + i1)));
    const bool v13 = cast<bool>(ops::eq<int64_t>(cast<int64_t>(v5), cast<int64_t>(v3)));
    const __nv_bfloat16 v14 = cast<bool>(v13) ? cast<__nv_bfloat16>(v12) : cast<__nv_bfloat16>(v11);
    const __nv_bfloat16 s15 = cast<__nv_bfloat16>(v14);
    store_if(cast<bool>(v8), job.pointer<__nv_bfloat16>(3) + (i0 * 128 + i1 + v10), s15);
  }
};
run_points<Points0>(c, job);
""",
        )

    def test_linear(self) -> None:
        self.assertExpectedInline(
            variants("linear"),
            """\
struct Linear0 {
  using T = __nv_bfloat16;
  static constexpr int kBatch = 1;
  static constexpr int kSize = 256;
  static constexpr int kSegments = 1;
  static constexpr int kParts = 1;
  static constexpr int kTileRows = 1;
  static constexpr int kChunkParts = 1;
  static constexpr int kChunkSize = 256;
  static constexpr uint32_t kNumTiles = 192;
  static constexpr bool kStaged = true;
  static constexpr bool kRowTasks = false;
  static constexpr bool kClaimed = false;
  static constexpr bool kSharesLoop = true;
  static MPK_DEVICE uint32_t first_tile(int i) {
    return 0u;
  }
  static MPK_DEVICE uint32_t num_rows(int i) {
    return 192u;
  }
  template <class Group>
  struct Chain {
    MPK_DEVICE Chain(const Group& group, const Job& job, uint32_t row) {}
    MPK_DEVICE void fetch(Group& group, const Job& job, uint32_t row, __nv_bfloat16* data) {
      copy_row<__nv_bfloat16, 256, false>(group, data, job.pointer<const __nv_bfloat16>(1) + 0);
    }
    MPK_DEVICE void apply(Group& group, const Job& job, uint32_t row, __nv_bfloat16* data) {
    }
    MPK_DEVICE void bring(Group& group, const Job& job, uint32_t row, __nv_bfloat16* data) {
      copy_row<__nv_bfloat16, 256, false>(group, data, job.pointer<const __nv_bfloat16>(1) + 0);
    }
  };
  static constexpr int kPitchX = 256;
  static MPK_DEVICE const T* x(const Job& job) {
    return nullptr;
  }
  static constexpr bool kEarly = true;
  static constexpr bool kHasExtra = false;
  struct Extra {
  };
  static MPK_DEVICE Extra preload(const Job& job, int segment, int r, uint32_t n) {
    Extra extra{};
    return extra;
  }
  template <class C>
  static MPK_DEVICE void finish(C& c, const Job& job, int segment, int r, uint32_t n, const float (&results)[kParts], const Extra& extra) {
    const T y0 = cast<T>(results[0]);
    job.pointer<__nv_bfloat16>(2)[int64_t(r) * 192 + n] = y0;
  }
};
linear::compute<Linear0>(c, job);
""",
        )

    def test_paged_decode(self) -> None:
        self.assertExpectedInline(
            variants("paged_decode"),
            """\
struct Tile0 {
  static constexpr uint32_t kTiles = 2;
  static constexpr int64_t kN = 1;
  static constexpr int64_t kG = 2;
  static constexpr int64_t kR = 2;
  static constexpr int64_t kD = 16;
  static constexpr int64_t kP = 5;
  static constexpr int64_t kS = 16;
  static constexpr int64_t kM = 3;
  static constexpr double kScale = 0.25;
  struct Q {
    using T = __nv_bfloat16;
    static constexpr bool kPresent = true;
    static constexpr int kAlignment = 2;
    static constexpr int64_t stride([[maybe_unused]] int d) { return d == 0 ? 64 : d == 1 ? 32 : d == 2 ? 16 : 1; }
  };
  struct KCache {
    using T = __nv_bfloat16;
    static constexpr bool kPresent = true;
    static constexpr int kAlignment = 2;
    static constexpr int64_t stride([[maybe_unused]] int d) { return d == 0 ? 512 : d == 1 ? 32 : d == 2 ? 16 : 1; }
  };
  struct VCache {
    using T = __nv_bfloat16;
    static constexpr bool kPresent = true;
    static constexpr int kAlignment = 2;
    static constexpr int64_t stride([[maybe_unused]] int d) { return d == 0 ? 512 : d == 1 ? 32 : d == 2 ? 16 : 1; }
  };
  struct Pages {
    using T = int32_t;
    static constexpr bool kPresent = true;
    static constexpr int kAlignment = 4;
    static constexpr int64_t stride([[maybe_unused]] int d) { return 1; }
  };
  struct First {
    using T = int64_t;
    static constexpr bool kPresent = true;
    static constexpr int kAlignment = 8;
    static constexpr int64_t stride([[maybe_unused]] int d) { return 1; }
  };
  struct Limit {
    using T = int64_t;
    static constexpr bool kPresent = true;
    static constexpr int kAlignment = 8;
    static constexpr int64_t stride([[maybe_unused]] int d) { return 1; }
  };
  struct Y {
    using T = __nv_bfloat16;
    static constexpr bool kPresent = true;
    static constexpr int kAlignment = 16;
    static constexpr int64_t stride([[maybe_unused]] int d) { return d == 0 ? 64 : d == 1 ? 32 : d == 2 ? 16 : 1; }
  };
  static constexpr int kTileBytes = 2560;  // of the largest slice
  struct Tile {
    mpk::Range N;
    mpk::Range G;
    mpk::Range R;
    mpk::Range D;
    mpk::Range P;
    mpk::Range S;
    mpk::Range M;
  };
  static MPK_DEVICE Tile at([[maybe_unused]] uint32_t number) {
    Tile tile;
    tile.M = {0, 0, 3};
    tile.S = {0, 0, 16};
    tile.P = {0, 0, 5};
    tile.D = {0, 0, 16};
    tile.R = {0, 0, 2};
    tile.G = range(number % 2u, 1, 2);
    number /= 2u;
    tile.N = {0, 0, 1};
    return tile;
  }
  template <class V_>
  static constexpr int shared_bytes() {
    static_assert(tasks::paged_decode::kSharedBytes<V_> <= 98304,
                  "task paged_decode: kSharedBytes is more than the 98304 bytes that a tile may have: cut smaller tiles");
    return tasks::paged_decode::kSharedBytes<V_>;
  }
  template <class V_, class Threads_>
  static MPK_DEVICE void compute(Threads_& threads, const mpk::Job& job, uint32_t number, uint8_t* shared) {
    const Tile tile = at(number);
    tasks::paged_decode::compute<V_>(threads, tile, shared,
        job.pointer<const __nv_bfloat16>(0) + tile.G.begin * 32,
        job.pointer<const __nv_bfloat16>(1) + tile.G.begin * 16,
        job.pointer<const __nv_bfloat16>(2) + tile.G.begin * 16,
        job.pointer<const int32_t>(3),
        job.pointer<const int64_t>(4),
        job.pointer<const int64_t>(5),
        job.pointer<__nv_bfloat16>(6) + tile.G.begin * 32);
  }
};
run_tiles<Tile0>(c, job);
""",
        )

    def test_paged_kv_write(self) -> None:
        self.assertExpectedInline(
            variants("paged_kv_write"),
            """\
struct Tile0 {
  static constexpr uint32_t kTiles = 2;
  static constexpr int64_t kP = 5;
  static constexpr int64_t kS = 4;
  static constexpr int64_t kG = 2;
  static constexpr int64_t kD = 16;
  static constexpr int64_t kN = 1;
  struct Cache {
    using T = __nv_bfloat16;
    static constexpr bool kPresent = true;
    static constexpr int kAlignment = 2;
    static constexpr int64_t stride([[maybe_unused]] int d) { return d == 0 ? 128 : d == 1 ? 32 : d == 2 ? 16 : 1; }
  };
  struct New {
    using T = __nv_bfloat16;
    static constexpr bool kPresent = true;
    static constexpr int kAlignment = 2;
    static constexpr int64_t stride([[maybe_unused]] int d) { return d == 0 ? 32 : d == 1 ? 16 : 1; }
  };
  struct Slot {
    using T = int64_t;
    static constexpr bool kPresent = true;
    static constexpr int kAlignment = 8;
    static constexpr int64_t stride([[maybe_unused]] int d) { return 1; }
  };
  static constexpr int kTileBytes = 640;  // of the largest slice
  struct Tile {
    mpk::Range P;
    mpk::Range S;
    mpk::Range G;
    mpk::Range D;
    mpk::Range N;
  };
  static MPK_DEVICE Tile at([[maybe_unused]] uint32_t number) {
    Tile tile;
    tile.N = {0, 0, 1};
    tile.D = {0, 0, 16};
    tile.G = range(number % 2u, 1, 2);
    number /= 2u;
    tile.S = {0, 0, 4};
    tile.P = {0, 0, 5};
    return tile;
  }
  template <class V_>
  static constexpr int shared_bytes() {
    static_assert(tasks::paged_kv_write::kSharedBytes<V_> <= 98304,
                  "task paged_kv_write: kSharedBytes is more than the 98304 bytes that a tile may have: cut smaller tiles");
    return tasks::paged_kv_write::kSharedBytes<V_>;
  }
  template <class V_, class Threads_>
  static MPK_DEVICE void compute(Threads_& threads, const mpk::Job& job, uint32_t number, uint8_t* shared) {
    const Tile tile = at(number);
    tasks::paged_kv_write::compute<V_>(threads, tile, shared,
        job.pointer<__nv_bfloat16>(0) + tile.G.begin * 16,
        job.pointer<const __nv_bfloat16>(1) + tile.G.begin * 16,
        job.pointer<const int64_t>(2));
  }
};
run_tiles<Tile0>(c, job);
""",
        )

    def test_rms_norm(self) -> None:
        self.assertExpectedInline(
            variants("rms_norm"),
            """\
struct Row0 {
  using T = __nv_bfloat16;
  static constexpr int kRows = 1;
  static constexpr int kAtOnce = 1;
  static constexpr int kSize = 256;
  struct Task0 {
    using T = __nv_bfloat16;
    static constexpr int kSize = 256;
    using Weight = __nv_bfloat16;
    static constexpr float kEps = 1e-06f;
    static constexpr rms_norm::Style kStyle = rms_norm::Style::kLlama;
    static constexpr bool kHasWeight = true, kVectorized = false;
    static MPK_DEVICE const Weight* weight(const Job& job) { return job.pointer<const Weight>(1); }
  };
  template <class Group>
  struct Chain {
    static_assert(RowTask<rms_norm::Task<Task0, Group>, Group, __nv_bfloat16>);
    rms_norm::Task<Task0, Group> task0;
    MPK_DEVICE Chain(const Group& group, const Job& job, uint32_t row) : task0(group, job, row) {}
    MPK_DEVICE void fetch(Group& group, const Job& job, uint32_t row, __nv_bfloat16* data) {
      copy_row<__nv_bfloat16, 256, false>(group, data, job.pointer<const __nv_bfloat16>(0) + 0);
    }
    MPK_DEVICE void apply(Group& group, const Job& job, uint32_t row, __nv_bfloat16* data) {
      group.sync();
      task0.apply(group, data);
      group.sync();
      copy_row<__nv_bfloat16, 256, false>(group, job.pointer<__nv_bfloat16>(2) + 0, data);
    }
    MPK_DEVICE void bring(Group& group, const Job& job, uint32_t row, __nv_bfloat16* data) {
      copy_row<__nv_bfloat16, 256, false>(group, data, job.pointer<const __nv_bfloat16>(0) + 0);
      group.sync();
      task0.apply(group, data);
      group.sync();
      copy_row<__nv_bfloat16, 256, false>(group, job.pointer<__nv_bfloat16>(2) + 0, data);
    }
  };
};
run_rows<Row0>(c, job);
""",
        )

    def test_rope(self) -> None:
        self.assertExpectedInline(
            variants("rope"),
            """\
struct Row0 {
  using T = __nv_bfloat16;
  static constexpr int kRows = 4;
  static constexpr int kAtOnce = 1;
  static constexpr int kSize = 16;
  struct Task0 {
    using T = __nv_bfloat16;
    static constexpr int kSize = 16;
    static MPK_DEVICE const T* cos(const Job& job, uint32_t row) { return job.pointer<const __nv_bfloat16>(1) + 0; }
    static MPK_DEVICE const T* sin(const Job& job, uint32_t row) { return job.pointer<const __nv_bfloat16>(2) + 0; }
    static constexpr bool kVectorized = false, kAlignedTables = false;
  };
  template <class Group>
  struct Chain {
    static_assert(RowTask<rope::Task<Task0, Group>, Group, __nv_bfloat16>);
    rope::Task<Task0, Group> task0;
    MPK_DEVICE Chain(const Group& group, const Job& job, uint32_t row) : task0(group, job, row / 4) {}
    MPK_DEVICE void fetch(Group& group, const Job& job, uint32_t row, __nv_bfloat16* data) {
      copy_row<__nv_bfloat16, 16, false>(group, data, job.pointer<const __nv_bfloat16>(0) + int64_t((row)) * 16);
    }
    MPK_DEVICE void apply(Group& group, const Job& job, uint32_t row, __nv_bfloat16* data) {
      group.sync();
      task0.apply(group, data);
      group.sync();
      copy_row<__nv_bfloat16, 16, false>(group, job.pointer<__nv_bfloat16>(3) + int64_t((row)) * 16, data);
    }
    MPK_DEVICE void bring(Group& group, const Job& job, uint32_t row, __nv_bfloat16* data) {
      copy_row<__nv_bfloat16, 16, false>(group, data, job.pointer<const __nv_bfloat16>(0) + int64_t((row)) * 16);
      group.sync();
      task0.apply(group, data);
      group.sync();
      copy_row<__nv_bfloat16, 16, false>(group, job.pointer<__nv_bfloat16>(3) + int64_t((row)) * 16, data);
    }
  };
};
run_rows<Row0>(c, job);
""",
        )

    def test_silu_mul(self) -> None:
        self.assertExpectedInline(
            variants("silu_mul"),
            """\
struct Points0 {
  using Index = int32_t;
  static constexpr Index kPoints = 96;
  static MPK_DEVICE void point(const Job& job, Index point) {
    const int32_t i0 = point;
    const __nv_bfloat16 v0 = cast<__nv_bfloat16>(load_constant(job.pointer<const __nv_bfloat16>(0) + (i0)));
    const __nv_bfloat16 v1 = cast<__nv_bfloat16>(load_constant(job.pointer<const __nv_bfloat16>(1) + (i0)));
    const __nv_bfloat16 v2 = cast<__nv_bfloat16>(ops::silu<float>(cast<float>(v1)));
    const __nv_bfloat16 v3 = cast<__nv_bfloat16>(ops::mul<float>(cast<float>(v2), cast<float>(v0)));
    const __nv_bfloat16 s4 = cast<__nv_bfloat16>(v3);
    job.pointer<__nv_bfloat16>(2)[i0] = s4;
  }
};
run_points<Points0>(c, job);
""",
        )

    def test_softmax(self) -> None:
        self.assertExpectedInline(
            variants("softmax"),
            """\
struct Reduce0 {
  using Index = int32_t;
  using Op = reduce::AMax<float>;
  static constexpr int64_t kOuter = 1, kInner = 100;
  struct Extra {
    uint32_t v0;
  };
  static MPK_DEVICE Extra preload(const Job& job, Index outer, Index inner) {
    Extra extra{};
    extra.v0 = to_word(load_constant(job.pointer<const __nv_bfloat16>(0) + (inner)));
    return extra;
  }
  static MPK_DEVICE float value(const Job& job, Index outer, Index inner, const Extra& extra) {
    const __nv_bfloat16 v0 = cast<__nv_bfloat16>(from_word<__nv_bfloat16>(extra.v0));
    const float v1 = cast<float>(v0);
    return cast<float>(v1);
  }
  template <class R>
  static MPK_DEVICE void finish(const Job& job, Index outer, R result) {
    job.pointer<float>(1)[0] = cast<float>(result);
  }
  static constexpr int kPieces = 1;
};
struct Reduce1 {
  using Index = int32_t;
  using Op = reduce::Sum<float>;
  static constexpr int64_t kOuter = 1, kInner = 100;
  struct Extra {
    uint32_t v0;
    uint32_t v1;
  };
  static MPK_DEVICE Extra preload(const Job& job, Index outer, Index inner) {
    Extra extra{};
    extra.v0 = to_word(*(job.pointer<const float>(0) + (0)));
    extra.v1 = to_word(load_constant(job.pointer<const __nv_bfloat16>(1) + (inner)));
    return extra;
  }
  static MPK_DEVICE float value(const Job& job, Index outer, Index inner, const Extra& extra) {
    const float v0 = cast<float>(from_word<float>(extra.v0));
    const __nv_bfloat16 v1 = cast<__nv_bfloat16>(from_word<__nv_bfloat16>(extra.v1));
    const float v2 = cast<float>(v1);
    const float v3 = cast<float>(ops::sub<float>(cast<float>(v2), cast<float>(v0)));
    const float v4 = cast<float>(ops::exp<float>(cast<float>(v3)));
    return cast<float>(v4);
  }
  template <class R>
  static MPK_DEVICE void finish(const Job& job, Index outer, R result) {
    job.pointer<float>(2)[0] = cast<float>(result);
  }
  static constexpr int kPieces = 1;
};
struct Points2 {
  using Index = int32_t;
  static constexpr Index kPoints = 100;
  static MPK_DEVICE void point(const Job& job, Index point) {
    const int32_t i0 = point;
    const float v0 = cast<float>(*(job.pointer<const float>(0) + (0)));
    const float v1 = cast<float>(*(job.pointer<const float>(1) + (0)));
    const __nv_bfloat16 v2 = cast<__nv_bfloat16>(load_constant(job.pointer<const __nv_bfloat16>(2) + (i0)));
    const float v3 = cast<float>(v2);
    const float v4 = cast<float>(ops::sub<float>(cast<float>(v3), cast<float>(v1)));
    const float v5 = cast<float>(ops::exp<float>(cast<float>(v4)));
    const __nv_bfloat16 v6 = cast<__nv_bfloat16>(ops::div<float>(cast<float>(v5), cast<float>(v0)));
    const __nv_bfloat16 s7 = cast<__nv_bfloat16>(v6);
    job.pointer<__nv_bfloat16>(3)[i0] = s7;
  }
};
run_reduce<Reduce0>(c, job);
run_reduce<Reduce1>(c, job);
run_points<Points2>(c, job);
""",
        )
