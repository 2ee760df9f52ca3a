// Schedule: which nodes run together, in which order, and where their intermediates live. A pure function of (TBGraph,
// Target) decides it at compile time, and `validate` proves it before anything is built.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "torch_mpk/abi/partition.h"
#include "torch_mpk/abi/sizes.h"
#include "torch_mpk/graph/tb_graph.h"

namespace mpk {

struct Target {
  std::string device;      // "cuda" or "cpu"
  int arch = 0;            // the generation of GPUs, an Arch's number; 0 on the CPU
  int num_workers = 1;     // multiprocessors, or CPU threads
  int64_t smem_bytes = 0;  // shared memory one CTA may use; 0 on the CPU
  bool fuse = true;        // false: every node is a job of its own (the CPU; the oracle of every fusion)
  bool polled = false;     // readers poll small vectors, and await no event (see Schedule::polled)
  // The device's own compute capability, which tasks may have code for: 103 where `arch` is 100.
  int device_arch = 0;
};

// The warps of a CTA, and the ring through which loaders stream operands to consumers. None on the CPU.
struct WarpLayout {
  int consumers = 0, loaders = 0;
  int registers = 0;       // of a thread, at most
  int max_slots = 0;       // of the ring, at most; shared memory may have room for fewer
  int64_t slot_bytes = 0;  // of a slot
  // Arrivals after which a slot is full, and empty again.
  int full_arrivals = 0, empty_arrivals = 0;
  // The launch's kernels demand these (see Demands in csrc/schedule/kernel.h):
  bool moves_registers = false;   // consumers are warpgroups, which take registers from the loader's
  bool all_read_entries = false;  // all consumers read every ring entry; otherwise each entry has few readers
  bool loads_inputs = false;      // the loader copies jobs' common inputs as boxes, where consumers staged them
  bool hands_over_rows = false;  // rows are many: jobs pass them on behind events, end with row tasks, and poll nothing

  int threads() const { return threads_of(consumers, loaders, moves_registers); }
};

enum class Assignment : uint8_t { kStatic, kClaimed };

// How matrices are streamed through the ring. A tile is some rows of each of `parts` matrices. It takes several ring
// entries. An entry is a slot with a chunk of those rows, side by side, of `chunk_parts` of the parts.
struct TileShape {
  int64_t tile_rows = 1;
  int64_t parts = 1;  // matrices whose rows are combined; 1: they follow each other
  int64_t chunk_parts = 1;
  int64_t row_bytes = 0, chunk_bytes = 0;  // of one matrix; a row's last chunk may be shorter
  int64_t run = 1;                         // a tile's entries that one warp takes in sequence
  int64_t in_flight = 1;                   // entries that the loader has in flight
  int64_t readers = 1;                     // warps that read an entry and release its slot
  // Whether warps share a tile's runs, and combine their sums in shared memory; otherwise a warp has whole tiles.
  bool shares_entries = false;
  bool is_boxed = false;  // entries are boxes, which the copy engine copies by a tensor map
  // Nonzero: a tile multiplies its weight rows with so many rows of x, whose chunk is in the same entry, all in boxes
  // of 64 columns, of which weights may have fewer bytes than x. Tiles of all rows of x follow each other, then those
  // with the next weight rows.
  int64_t x_rows = 0;

  int64_t rows_in_entry() const { return chunk_parts * tile_rows + x_rows; }
  // Whether an entry has a box of each part, and the kernel has no loader of its own.
  bool joins_boxes() const { return is_boxed && x_rows == 0 && chunk_parts > 1; }
  int64_t chunks() const { return (row_bytes + chunk_bytes - 1) / chunk_bytes; }  // of a row
  int64_t entries() const { return parts / chunk_parts * chunks(); }              // of a tile
  int64_t entry_bytes() const { return rows_in_entry() * chunk_bytes; }
};

// How consumers get the operand that the body's nodes share.
enum class Input : uint8_t {
  kInPlace,    // consumers read it in place
  kWhole,      // every worker stages all of it before it computes
  kColumns,    // workers that share tiles each stage the columns that they multiply
  kStages,     // producer warps copy a few columns at a time while others compute
  kBoxStages,  // the same, as boxes of the copy engine
  kEntries,    // the loader copies it to the ring
};

// Workspace in which a job's workers leave data for each other.
struct Scratch {
  int64_t bytes = 0;
  int64_t offset = -1;
};

// A job that ends with a norm leaves `count` sums of squares for each of its rows, each of some elements that one
// worker made. Readers of the norm add them up.
struct RowSums {
  int64_t count = 0;    // of a row
  int64_t offset = -1;  // of all sums, in the workspace
};

// A number that the job's kernel alone knows, see csrc/kernels/fields.h.
struct Field {
  std::string name;
  int64_t value = 0;
};

// How a kernel computes a job on a GPU. The validator proves the named members for every kernel, and leaves `fields` to
// the kernel.
struct Cut {
  std::string kernel;  // empty: no kernel accepts the job, and code generation says why
  double cost_ns = 0;  // the kernel's estimate
  int64_t num_tiles = 1;
  std::optional<TileShape> shape;  // of matrices that are streamed without code of the job
  Input input = Input::kInPlace;
  int64_t staged_bytes = 0;  // the most shared memory that it stages, or keeps otherwise
  std::optional<Scratch> scratch;
  std::optional<RowSums> row_sums;  // of the norm at its end
  std::vector<Field> fields;

  bool is_staged() const { return input == Input::kWhole || input == Input::kColumns; }
};

// Another kernel that the job could have had.
struct Alternative {
  std::string kernel;
  double cost_ns = 0;   // if it accepts the job
  std::string refusal;  // why it refuses; empty: it accepts
};

// Nodes that one worker executes back to back on its share of the tiles.
struct Job {
  std::vector<int> prologue;  // row tasks recomputed by every worker; their results stay in shared memory
  std::vector<int> body;      // one node, or several of one task and one input (their rows form one space), or a run
  // The kernel that found the run: dependent nodes, in program order, between which it passes values by itself. Empty:
  // no node of the body depends on another.
  std::string run;
  // Pointwise tasks on the body's output elements, inlined: each takes one node's results, unless it combines several.
  // If rows are many, row tasks may precede them, on rows that tiles hold as a whole. The last may be a norm of the
  // job's rows (`Cut::row_sums`): it stores results without the row's factor, and readers multiply by it. Tile tasks of
  // whole rows that a kernel makes are computed for each row (`Kernel::ends_with_tiles`).
  std::vector<int> epilogue;
  Cut cut;
  std::vector<Alternative> others;  // the other kernels to choose from, the next best first
  Assignment assignment = Assignment::kStatic;
  Tickets tickets{};              // of claimed tiles
  std::vector<int> loader_waits;  // phases whose event the loader awaits before it loads; usually none
  std::vector<int> unstored;      // buffers that exist inside this job alone: never written to memory
};

// A phase begins when its awaited events are complete: every worker has then finished those phases and all before them.
// A phase that awaits none begins when its polled operands arrive.
struct Phase {
  std::vector<Job> jobs;  // mutually independent
  std::vector<int> waits;
};

struct Schedule {
  TBGraph graph;
  Target target;
  std::vector<Phase> phases;                      // event i belongs to phase i and expects `num_workers` signals
  std::vector<int64_t> workspace_offsets;         // per buffer, bytes; -1 for inputs, outputs and unstored buffers
  int64_t workspace_bytes = 0, polled_bytes = 0;  // workspace_bytes: with scratch
  // Per buffer: whether readers poll its elements, so that no worker waits for the slowest worker's fence. Polled
  // buffers share no bytes. They stand in a workspace of their own, of polled_bytes, in which a launch finds every
  // element absent and writes it once.
  std::vector<bool> polled;
  WarpLayout warps;

  std::string to_json() const;
};

// The nodes that a phase's jobs are there for, in one line.
std::string phase_name(const Schedule& schedule, const Phase& phase);

// The memory that its nodes touch, each view once. Caches count with all positions, since lengths are known at run time
// only.
int64_t phase_bytes(const Schedule& schedule, const Phase& phase);

Schedule make_schedule(const TBGraph& graph, const Target& target);

// Throws std::runtime_error naming phase, node and buffer when a schedule is unsound: a node missing or run twice, a
// cyclic or forward wait, a last phase (where counters advance) that does not wait for the one before it, a read that
// no write happens before (nor is it polled), a write that does not happen after an earlier read or write of the
// same bytes, jobs of one phase that depend on each other, or workspace reused while it is still needed.
void validate(const Schedule& schedule);

}  // namespace mpk
