// The read-only table: how jobs that share code differ.
//
// It starts with rows of Kernel::kRowBytes, one per phase or, where a phase has many jobs, several; then one
// OutputRow per output.
#pragma once

#include "torch_mpk/abi/layout.h"
#include "torch_mpk/abi/partition.h"
#include "torch_mpk/abi/sizes.h"

namespace mpk {

// At most two accesses of each lane of the loader warp. A kernel's rows are as long as its phases need; short rows
// leave more room for the ring.
inline constexpr int kMaxRowBytes = 2 * 32 * kAccessBytes;

inline constexpr uint32_t kWorkspaceIndex = 0xffff, kControlIndex = 0xfffe, kPolledIndex = 0xfffd, kMapsIndex = 0xfffc,
                          kNumberIndex = 0xfffb;

// What the end of a phase signals; nothing if nobody awaits its event.
enum Signal : uint32_t {
  kReleases = 1,   // a phase awaits this one's event, and sees all its writes
  kPublishes = 2,  // the copy engine, too, must see its writes
};

// Jobs of a phase: PhaseRow, uint32_t waits[num_waits] padded to kAccessBytes, then the jobs.
struct PhaseRow {
  uint32_t num_jobs;
  uint32_t num_waits;  // phases whose events come before this phase's computation; in the phase's first row. None: what
                       // it reads of earlier phases is polled, or known
  uint32_t last;       // nonzero: the phase ends with this row
  uint32_t signal;     // see Signal
};

// A job: JobRow, uint64_t refs[num_refs], uint64_t loader_waits[num_loader_waits], and, if there are any, StreamRow and
// MatrixRow matrices[num_matrices]; padded to kAccessBytes.
struct JobRow {
  uint32_t variant;   // index of the code
  uint32_t rotation;  // worker w acts as worker (w + rotation) mod num_workers, which spreads small jobs
  uint16_t bytes;     // of this row
  uint16_t num_refs;
  uint16_t num_loader_waits;
  uint16_t num_matrices;
};

// How matrices are streamed through the ring. A tile is `tile_rows` rows of each of `parts` matrices with equally many
// rows. It takes `entries` entries. An entry holds a chunk of those rows, side by side, of `chunk_parts` of the parts:
// all chunks of the first parts, then those of the next.
//
// Where `chunk_parts` is 0, matrices are streamed as boxes, in the copy engine's swizzle, in a BoxOrder. `entries` is
// then split_k, see shared_span.
struct Stream {
  uint32_t tile_rows, parts, chunk_parts;
  uint32_t row_bytes, chunk_bytes;  // of one matrix, multiples of kAccessBytes; a row's last chunk may be shorter
  uint32_t chunks;                  // of a row
  uint32_t entries;                 // parts / chunk_parts * chunks; with boxes: split_k
  uint32_t by_chunks, by_entries;   // their inverses, see quotient
  uint32_t in_flight;               // see entries_in_flight
  uint32_t rotates;                 // with boxes: 1 if each worker begins with another chunk, else 0
  uint32_t box_order;               // with boxes: a BoxOrder
};

// How the boxes of a pass of StreamRow::run tiles follow each other.
enum BoxOrder : uint32_t {
  kByChunks,  // chunk after chunk, and for each chunk the boxes of all parts of all tiles
  kByRows,    // all chunks of a box, then those of the next
  kJoined,    // chunk after chunk, where the boxes of a tile's parts share an entry, one behind the other
};

struct MatrixRow {
  uint32_t pitch;                 // bytes from row to row
  uint32_t num_rows;              // a tile's rows beyond it are not copied
  uint32_t first_tile, end_tile;  // tiles are numbered through all matrices of a job
};

// Matrices that the loader streams without code of the job, `parts` at a time. The job's first references are their
// addresses, or those of their maps.
struct StreamRow {
  Stream stream;
  Tickets tickets;  // drawn at run time; none: tiles are assigned statically
  uint32_t run;     // entries that a warp takes one after the other, where those of a tile are dealt out to warps; or
                    // tiles of a pass of boxes
};

// A reference: which of the call's pointers (or workspace, control block, polled vectors, maps), and a byte offset from
// it. The loader resolves references when it copies a row to shared memory. With kNumberIndex the offset is a plain
// number for the code, which may differ between kernels of equal code.
inline constexpr int kRefOffsetBits = 48;
MPK_HOST_DEVICE constexpr uint64_t make_ref(uint32_t index, uint64_t byte_offset) {
  return (uint64_t(index) << kRefOffsetBits) | byte_offset;
}
MPK_HOST_DEVICE constexpr uint32_t ref_index(uint64_t ref) { return static_cast<uint32_t>(ref >> kRefOffsetBits); }
MPK_HOST_DEVICE constexpr uint64_t ref_offset(uint64_t ref) { return ref & ((uint64_t(1) << kRefOffsetBits) - 1); }

// A float output, filled with NaN when a launch is aborted.
struct OutputRow {
  uint64_t bytes;
  uint32_t index;    // among the call's pointers
  uint32_t element;  // bytes of one element
  uint64_t nan;      // its bits
};

static_assert(sizeof(PhaseRow) == kAccessBytes && sizeof(JobRow) == kAccessBytes);  // references behind it are aligned
static_assert(MPK_STANDS_AT(JobRow, bytes, 8) && MPK_STANDS_AT(JobRow, num_matrices, 14));
static_assert(sizeof(Stream) == 48 && sizeof(Tickets) == 12 && sizeof(StreamRow) == 64 && sizeof(MatrixRow) == 16);
static_assert(alignof(StreamRow) == 4 && alignof(MatrixRow) == 4);  // they stand behind 8-byte words
static_assert(sizeof(OutputRow) == 24 && MPK_STANDS_AT(OutputRow, nan, 16) && alignof(OutputRow) == 8);
static_assert(ref_index(make_ref(kPolledIndex, 40)) == kPolledIndex && ref_offset(make_ref(kPolledIndex, 40)) == 40);

}  // namespace mpk
