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
  // Warpgroups that the consumers are, where they multiply together and all of them read every entry; 0: each warp
  // computes for itself.
  int warpgroups = 0;

  int threads() const { return threads_of(consumers, loaders, warpgroups); }
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
  // The runs of a tile are dealt out to the warps, and their sums meet in shared memory; otherwise a warp has whole
  // tiles.
  bool shares_entries = false;
  // Nonzero: entries are boxes, which the copy engine brings by a map of their matrix, and a worker takes so many tiles
  // at a time: chunk after chunk, of each the boxes of all of them.
  int64_t pass_tiles = 0;
  // Nonzero: of so many rows of x a tile has the products with its rows of weights, and an entry also their chunk, all
  // in boxes of 64 columns. Tiles of all rows of x follow each other, then those with the next rows of weights.
  int64_t x_rows = 0;
  // Of boxes: workers that share the same tiles. Each has an equal part of the chunks, and so needs that part of x
  // alone; their sums meet in the workspace (Job::pieces).
  int64_t split = 1;
  // Nonzero: warpgroups multiply the boxes of a pass with windows of x that have so many bytes of a row, as a box or as
  // several.
  int64_t window_bytes = 0;
  // Nonzero: of a pass the sums of so many tiles at a time stand in shared memory, a box of each warpgroup.
  int64_t turn_tiles = 0;

  bool has_boxes() const { return pass_tiles > 0 || x_rows > 0; }
  int64_t rows_in_entry() const { return chunk_parts * tile_rows + x_rows; }
  int64_t chunks() const { return (row_bytes + chunk_bytes - 1) / chunk_bytes; }  // of a row
  int64_t entries() const { return parts / chunk_parts * chunks(); }              // of a tile
  int64_t entry_bytes() const { return rows_in_entry() * chunk_bytes; }
};

// Pieces that the work on a few rows is cut into, so that all workers have some. Their results meet in the workspace,
// where the worker of a row's last piece polls those of the others.
struct Pieces {
  int64_t count = 0;         // of all rows, at most
  int64_t of_row = 0;        // of each; 0: as lengths at run time give, see kv_row_length
  int64_t results = 1;       // rows of results that a piece works on together,
  int64_t few_results = 1;   // and where more pieces give more workers some
  int64_t result_bytes = 0;  // of each before they are put together
  int64_t offset = -1;       // of all of them, in the workspace
  int64_t tiles = 0;         // of each at most; 0: as lengths at run time give
  int64_t few_of_row = 1;    // of each as far as it is long enough, see kv_own_count
  bool overlap = false;      // of a worker's pieces some warps stage the next while the others compute
  int64_t positions = 0;     // of keys, that a tile has; 0: pieces are of something else

  int64_t bytes() const { return count * results * result_bytes; }
};

// How attention of many positions is cut. Of `heads` heads that share keys the rows of queries stand side by side, for
// all positions of a sequence; a worker takes so many rows at a time, and an entry of the ring holds all that is loaded
// of so many positions of keys. Where the rows are not enough for all warps, warps share the keys. With `ends`,
// sequences have lengths that are known at run time alone, and keys come row by row: so many tiles may not be full.
struct QueryTiles {
  int64_t heads = 1, rows = 0, positions = 0, ends = 0;

  // Of so many tokens of ragged sequences, for heads that share keys.
  int64_t ragged_tiles(int64_t tokens) const { return tokens * heads / rows + (ends < tokens ? ends : tokens); }
};

// What a job leaves where it ends with a norm: of each of its rows so many sums of squares, each of some elements that
// one worker has made. Readers of the norm add them up.
struct RowSums {
  int64_t count = 0;    // of a row
  int64_t offset = -1;  // of all of them, in the workspace
};

// Nodes that one worker executes back to back on its share of the tiles.
struct Job {
  std::vector<int> prologue;  // row tasks recomputed by every worker; their results stay in shared memory
  std::vector<int> body;      // one node, or several of one task and one input (their rows form one space)
  // Pointwise tasks on the body's output elements, inlined: each on those of one node, unless one combines several. Of
  // many rows there may be row tasks in front of them, of rows that tiles hold whole. And the last may be a norm of
  // rows that the job makes (`row_sums`): what it stores lacks the factor of the row, by which its readers multiply
  // their results instead.
  std::vector<int> epilogue;
  int64_t num_tiles = 1;
  Assignment assignment = Assignment::kStatic;
  Tickets tickets{};               // of claimed tiles
  std::optional<TileShape> shape;  // of tiles of matrices that come through the ring without code of the job
  bool is_staged = false;          // its whole input is brought to shared memory, not read where it is
  int64_t staged_bytes = 0;        // of shared memory, at most: that and what else its code keeps there
  std::optional<Pieces> pieces;
  std::optional<RowSums> row_sums;  // of the norm that it ends with
  std::optional<QueryTiles> queries;
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
  int64_t workspace_bytes = 0, polled_bytes = 0;  // the first with what pieces leave there
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
