// Schedule: which nodes run together, in which order, where their intermediates live. Decided at compile time by a pure
// function of (TBGraph, Target) and proven by `validate` before anything is built.
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
  int arch = 0;            // the generation that code is for, an Arch's number; 0 on the CPU
  int num_workers = 1;     // multiprocessors, or CPU threads
  int64_t smem_bytes = 0;  // shared memory one CTA may use; 0 on the CPU
  bool fuse = true;        // false: every node is a job of its own (the CPU; the oracle of every fusion)
  bool polled = false;     // small vectors are polled instead of awaited by their maker's event (see Schedule::polled)
  // The device's own compute capability, for which tasks may have code: 103 where `arch` is 100.
  int device_arch = 0;
};

// The warps of a CTA, and the ring through which loaders stream what consumers compute with. None on the CPU.
struct WarpLayout {
  int consumers = 0, loaders = 0;
  int registers = 0;       // that a thread may have
  int max_slots = 0;       // of the ring; it has as many as shared memory has room for
  int64_t slot_bytes = 0;  // of each
  // That make a slot full, and empty again.
  int full_arrivals = 0, empty_arrivals = 0;
  // What the kernels of the launch demand of all (see Demands in csrc/schedule/kernel.h):
  bool moves_registers = false;  // the consumers are warpgroups, to which the loader's hands registers
  bool all_read_entries =
      false;                     // all consumers read every entry of the ring; otherwise each entry is of one job's few
  bool loads_inputs = false;     // the loader brings the common inputs of jobs in boxes, where consumers staged them
  bool hands_over_rows = false;  // rows are many: jobs hand them over behind events, take row tasks, and poll nothing

  int threads() const { return threads_of(consumers, loaders, moves_registers); }
};

enum class Assignment : uint8_t { kStatic, kClaimed };

// How matrices come through the ring. A tile is some rows of each of `parts` matrices; it takes several entries of the
// ring, each a slot with a chunk of those rows, side by side, of `chunk_parts` of the parts.
struct TileShape {
  int64_t tile_rows = 1;
  int64_t parts = 1;  // matrices of equally many rows whose rows are combined; 1: they follow each other
  int64_t chunk_parts = 1;
  int64_t row_bytes = 0, chunk_bytes = 0;  // of one matrix; the last chunk of a row may be shorter
  int64_t run = 1;                         // entries of a tile that one warp takes one after the other
  int64_t in_flight = 1;                   // entries that the loader has under way
  int64_t readers = 1;                     // warps that read an entry, each of which releases its slot
  // The runs of a tile are dealt out to the warps, and their sums meet in shared memory; otherwise a warp has whole
  // tiles.
  bool shares_entries = false;
  bool is_boxed = false;  // entries are boxes, which the copy engine brings by a map of their matrix
  // Nonzero: a tile multiplies its rows of weights with so many rows of x, and an entry holds their chunk, too, all in
  // boxes of 64 columns. Tiles of all rows of x follow each other, then those with the next rows of weights.
  int64_t x_rows = 0;

  int64_t rows_in_entry() const { return chunk_parts * tile_rows + x_rows; }
  int64_t chunks() const { return (row_bytes + chunk_bytes - 1) / chunk_bytes; }  // of a row
  int64_t entries() const { return parts / chunk_parts * chunks(); }              // of a tile
  int64_t entry_bytes() const { return rows_in_entry() * chunk_bytes; }
};

// How the operand that the nodes of a body have in common comes to shared memory.
enum class Input : uint8_t {
  kInPlace,    // it does not: consumers read it where it is
  kWhole,      // every worker stages all of it before it computes
  kColumns,    // of the workers that share tiles, each stages the columns that it multiplies
  kStages,     // consumers copy a few columns at a time, while others compute
  kBoxStages,  // the same, as boxes that the copy engine brings
  kEntries,    // the loader brings it, in the ring
};

// What the workers of a job leave in the workspace for each other.
struct Scratch {
  int64_t bytes = 0;
  int64_t offset = -1;
};

// What a job leaves where it ends with a norm: of each of its rows so many sums of squares, each of some elements that
// one worker has made. Readers of the norm add them up.
struct RowSums {
  int64_t count = 0;    // of a row
  int64_t offset = -1;  // of all of them, in the workspace
};

// A number that the job's kernel alone knows, see csrc/kernels/fields.h.
struct Field {
  std::string name;
  int64_t value = 0;
};

// How a kernel does a job on a GPU. The validator proves for every kernel what stands here by name, and leaves `fields`
// to the kernel.
struct Cut {
  std::string kernel;  // empty: no kernel takes the job, and code generation says why
  double cost_ns = 0;  // what the job takes, as the kernel expects
  int64_t num_tiles = 1;
  std::optional<TileShape> shape;  // of tiles of matrices that come through the ring without code of the job
  Input input = Input::kInPlace;
  int64_t staged_bytes = 0;  // of shared memory, at most: what it stages there and what else its code keeps there
  std::optional<Scratch> scratch;
  std::optional<RowSums> row_sums;  // of the norm that it ends with
  std::vector<Field> fields;

  bool is_staged() const { return input == Input::kWhole || input == Input::kColumns; }
};

// Another kernel that a job might have had.
struct Alternative {
  std::string kernel;
  double cost_ns = 0;   // if it takes the job
  std::string refusal;  // why it does not; empty: it does
};

// Nodes that one worker executes back to back on its share of the tiles.
struct Job {
  std::vector<int> prologue;  // row tasks recomputed by every worker; their results stay in shared memory
  std::vector<int> body;      // one node, or several of one task and one input (their rows form one space), or a run
  // The kernel that found the run: nodes that depend on each other, in program order, between which it passes values on
  // by itself. Empty: no node of the body depends on another.
  std::string run;
  // Pointwise tasks on the body's output elements, inlined: each on those of one node, unless one combines several. Of
  // many rows there may be row tasks in front of them, of rows that tiles hold whole. And the last may be a norm of
  // rows that the job makes (`Cut::row_sums`): what it stores lacks the factor of the row, by which its readers
  // multiply their results instead.
  std::vector<int> epilogue;
  Cut cut;
  std::vector<Alternative> others;  // kernels that the cut's was chosen from, the next best first
  Assignment assignment = Assignment::kStatic;
  Tickets tickets{};              // of claimed tiles
  std::vector<int> loader_waits;  // phases whose event the loader awaits before it loads for this job; usually none
  std::vector<int> unstored;      // buffers that exist only inside this job: never written to memory
};

// A phase begins when the events it waits for are complete: every worker has then finished those phases and all before
// them. A phase that waits for none begins when its polled operands arrive.
struct Phase {
  std::vector<Job> jobs;  // mutually independent
  std::vector<int> waits;
};

struct Schedule {
  TBGraph graph;
  Target target;
  std::vector<Phase> phases;                      // event i belongs to phase i and expects `num_workers` signals
  std::vector<int64_t> workspace_offsets;         // per buffer, bytes; -1 for inputs, outputs and unstored buffers
  int64_t workspace_bytes = 0, polled_bytes = 0;  // the first with what jobs leave there
  // Per buffer: readers poll its elements themselves, so that no worker waits for the slowest one's fence. Polled
  // buffers share no bytes: they stand in a workspace of their own, of polled_bytes, in which a launch finds every
  // element absent and writes it once.
  std::vector<bool> polled;
  WarpLayout warps;

  std::string to_json() const;
};

// The nodes that a phase's jobs are there for, in one line.
std::string phase_name(const Schedule& schedule, const Phase& phase);

// The memory that its nodes touch, each view once: of caches all positions, since lengths are known at run time only.
int64_t phase_bytes(const Schedule& schedule, const Phase& phase);

Schedule make_schedule(const TBGraph& graph, const Target& target);

// Throws std::runtime_error naming phase, node and buffer when a schedule is unsound: a node missing or run twice, a
// cyclic or forward wait, a last phase (where counters advance) that does not wait for the one before it, a read that
// no write happens before (nor is it polled), a write that does not happen after an earlier read or write of the
// same bytes, jobs of one phase that depend on each other, or workspace reused while it is still needed.
void validate(const Schedule& schedule);

}  // namespace mpk
