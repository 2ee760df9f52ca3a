// Writing the code of one job. A job becomes the body of a struct (its "variant") that holds everything static, and the
// list of references to memory that its row of the table carries; jobs with equal bodies share code.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "torch_mpk/device/table.h"
#include "torch_mpk/schedule/schedule.h"

namespace mpk::codegen {

// What is known of the whole kernel.
struct Plan {
  const Schedule& schedule;
  int num_inputs = 0, num_outputs = 0, num_scalars = 0;
  std::vector<bool> written;         // per buffer: by some node of this launch
  std::vector<int> input_alignment;  // of every input's pointer, raised as jobs need it
  int64_t workspace_bytes = 0;       // the schedule's and what tasks need besides
  int64_t slot_bytes = 0;            // of the ring

  struct Scratch {
    int phase;  // the last that uses it
    int64_t offset, bytes;
  };
  std::vector<Scratch> scratch;  // attention's partial results

  std::vector<std::vector<int>> phases_of;  // per node: the phases that run it

  explicit Plan(const Schedule& schedule);
  // Whether everything of phase `a` is visible to phase `b` once that has awaited its events.
  bool happens_before(int a, int b) const;
  // Whether what a phase reads of the buffer is visible before it awaits its events.
  bool known_before(int buffer, int phase) const;
  bool polled(int buffer) const { return schedule.polled[buffer]; }
  const TBGraph& graph() const { return schedule.graph; }
  const Node& node(int id) const { return schedule.graph.nodes()[id]; }
};

struct JobCode {
  std::string kind;               // the variant's name, but for its number: "Linear"
  std::string compute;            // the consumers' function, called with (c, job)
  std::string load = "";          // the loader's, for what the table does not say; empty: nothing
  std::string staged_bytes = "";  // expression of the shared memory staged, <V> standing for the variant; empty: none
  std::string body = "";          // of the variant's struct
  std::vector<std::string> headers = {};
  std::vector<uint64_t> refs = {};
  StreamRow stream = {};  // of `matrices`
  std::vector<MatrixRow> matrices = {};
  bool has_extra = false;          // linears: a tile's results need something besides, which is fetched early
  std::string shared_loop = "";    // linears: the element type with whose others it shares a loop; empty: none
  uint32_t num_small_workers = 0;  // nonzero: so few workers suffice, and the next job may begin with another one
};

// How large the ring's slots are: what the rows of the schedule's weights fill best.
int64_t choose_slot_bytes(const Schedule& schedule);

// Throws Unsupported naming the node when it cannot be generated.
JobCode emit_job(Plan& plan, int phase, const Job& job, bool may_claim);
JobCode emit_tile(Plan& plan, const Node& node);  // of role kTile

[[noreturn]] void fail(const Node& node, const std::string& why);

// ---- shared by the writers

std::string str(int64_t v);
std::string float_literal(double v);
std::string double_literal(double v);
inline const char* cuda_type(DType t) { return info(t).cuda_type; }

// An access pattern up to the rank it is written in: sizes and strides without unit dimensions, mergeable ones merged.
struct Pattern {
  int64_t offset = 0;
  std::vector<std::pair<int64_t, int64_t>> dims;
  bool operator==(const Pattern&) const = default;
};
Pattern pattern(const std::vector<int64_t>& sizes, const std::vector<int64_t>& strides, int64_t offset);
inline Pattern pattern(const Tensor& t) { return pattern(t.shape, t.strides, t.offset); }

// The element offset of row number `row` (an expression) among a tensor's leading dimensions.
std::string row_offset(const Tensor& t, const std::string& row);

// Whether 16-byte accesses to rows of the tensor are aligned; an input's pointer is then demanded to be, unless it is
// an activation, which may come from anywhere.
bool aligned_rows(Plan& plan, const Tensor& t, bool is_activation);

// Whether the bytes of a row, and from row to row, fit the 32 bits that the loader has for them.
bool has_short_rows(const Tensor& t);

// References to memory, numbered in the order of use.
class Refs {
 public:
  Refs(const Plan& plan, std::vector<uint64_t>& refs) : plan_(plan), refs_(refs) {}
  std::string pointer(const Node& node, const Tensor& t,
                      bool writable = false);  // "job.template pointer<const float>(3)"
  int add(const Node& node, const Tensor& t);
  int add_raw(uint32_t index, uint64_t offset);

 private:
  const Plan& plan_;
  std::vector<uint64_t>& refs_;
};

// Values that exist only inside a job: an access that matches takes the variable instead of memory.
struct LocalValue {
  int buffer;
  Pattern where;
  std::string variable;
  DType dtype;
};

struct ProgramCode {
  std::string preload_fields, preload;  // members and statements for loads that can be issued early
  std::string body;
  std::string result;  // variable of the last instruction's value
};

struct ProgramOptions {
  std::string prefix = "";  // of variables
  std::string index_type = "int32_t";
  std::string point = "";    // expression of the point's number in the domain, row-major
  std::string inner = "";    // nonempty: the index in the last dimension; `point` numbers the others
  bool early_loads = false;  // put unconditional loads into `preload`, as fields of `extra`
  std::vector<LocalValue>* locals = nullptr;
  const std::vector<int>* unstored = nullptr;
};

// The statement that stores a value at an index (an expression) of an operand.
std::string emit_store(const Plan& plan, Refs& refs, const Node& node, const Tensor& t, const std::string& index,
                       const std::string& value);

ProgramCode emit_program(const Plan& plan, Refs& refs, const Node& node, const ProgramOptions& options);

// Row tasks applied one after the other to a row in shared memory, the first reading memory. Found by following
// `operand` back through the nodes of `prologue`.
struct Chain {
  std::vector<const Node*> tasks;
  const Tensor* source;  // of the first
};
Chain find_chain(const Plan& plan, const std::vector<int>& prologue, const Node& node, const Tensor& operand);

// The class of the chain (see row.cuh) with the traits of its tasks.
struct ChainCode {
  std::string text, fetch;  // `fetch`: the part of `text` that fetches the row
  bool vectorized = true;
  bool early = true;  // what the constructor reads is known before the phase's events
  std::vector<std::string> headers;
};

struct ChainOptions {
  int phase;
  const Tensor* target = nullptr;  // where the row is stored besides
  bool batch_row = false;          // the row of the batch is given, not computed from the row
};
ChainCode emit_chain(Plan& plan, Refs& refs, const Node& node, const Chain& chain, const ChainOptions& options);

}  // namespace mpk::codegen
