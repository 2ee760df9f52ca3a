// The registry of task kinds. It is filled from the declarations in torch_mpk/tasks (and from user packages);
// everything that needs a list of tasks derives it from here.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace mpk {

// What the scheduler may do with a task.
enum class Role : uint8_t {
  kPointwise,  // a Program per point; fuses as an epilogue of the phase that makes its input
  kReduce,     // a Program per point, reduced over the last domain dimension
  kRow,        // each output row depends on the same row of the first operand; fuses as a prologue, takes epilogues
  kStream,  // streams large operands through the loader's ring; has a phase of its own, takes prologues and epilogues
  kTile,    // cut along named dimensions into tiles that depend on each other in nothing; has a phase of its own
};

struct OperandSpec {
  std::string name;
  std::vector<std::string> dims;  // named ("B", "K") or literal ("1") sizes; "..." stands first for any number of them
  bool optional = false;
  bool is_read = true;
  bool is_write = false;

  // For stream tasks, and for the streamed operand of a tile task:
  bool is_loaded = false;   // the loader reads it, ahead of its phase
  bool is_staged = false;   // consumers stage its rows in shared memory, and may poll them
  bool is_whole = false;    // each worker stages all of it
  bool is_boxed = false;    // where warpgroups compute, the loader copies it as boxes, and nobody stages it
  bool takes_rows = false;  // every worker that stages it may recompute row tasks in front of it

  bool has_leading() const { return !dims.empty() && dims.front() == "..."; }
};

struct TaskDef {
  std::string name;
  Role role;
  std::vector<OperandSpec> operands;  // inputs, then outputs, as declared
  std::vector<std::string> attrs;     // required attributes, by name
  // Device code: a file below include/ ("torch_mpk/device/tasks/linear.cuh") or, for a user's task, an absolute path.
  std::string header;                                 // empty: none
  std::map<int, std::string> headers;                 // replace it, by architecture
  std::vector<std::pair<std::string, int64_t>> tile;  // kTile: the dimensions that are cut, and a tile's size in each

  std::string stream;    // kTile: the operand that is streamed through the ring; empty: none
  std::string cpu_body;  // kTile: C++ code for the CPU, an absolute path; empty: none

  // kStream: the operand that nodes of one job share. Pointwise tasks may then take results as they are made. Empty: a
  // node is a job of its own, without an epilogue.
  std::string joined_by = "";
  // kStream: the operand whose rows are the job's tiles, which workers may draw; empty: the result's rows are.
  std::string tiled_by = "";
  bool hands_over = false;  // kStream: results may be polled
  // kRow: it multiplies an element by a factor of its column and one of its row, which follows from the row's sum of
  // squares.
  bool scales_rows = false;
  // kTile: a warp can compute any tile, to the same bits as a larger group, and without shared memory. So a job that
  // makes whole rows may end with its tiles (`Kernel::ends_with_tiles`).
  bool behind_rows = false;

  // Whether the loader, which runs ahead of the phase, reads an operand.
  bool streams() const { return role == Role::kStream || !stream.empty(); }

  const OperandSpec* find(const std::string& operand) const;  // nullptr: there is none

  // The device code for a device: for its own compute capability, for the one that kernels are generated for, or for
  // all; empty: none.
  const std::string& header_for(int device_arch, int arch) const {
    for (int each : {device_arch, arch})
      if (const auto found = headers.find(each); found != headers.end()) return found->second;
    return header;
  }
};

class TaskRegistry {
 public:
  static TaskRegistry& global();
  const TaskDef& add(TaskDef def);                    // throws on a different definition of the same name
  const TaskDef& get(const std::string& name) const;  // throws std::invalid_argument listing the known names
  const TaskDef* find(const std::string& name) const;
  std::vector<std::string> names() const;

 private:
  std::map<std::string, std::unique_ptr<TaskDef>> defs_;
};

}  // namespace mpk
