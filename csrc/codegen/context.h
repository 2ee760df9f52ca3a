// The state of a whole kernel while its jobs are written, and the references in their table rows.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "torch_mpk/codegen/cuda.h"
#include "torch_mpk/kernel_api.h"
#include "torch_mpk/schedule/schedule.h"

namespace mpk::codegen {

struct MPK_KERNEL_API KernelContext {
  const Schedule& schedule;
  int num_inputs = 0, num_outputs = 0, num_scalars = 0;
  std::vector<bool> written;         // per buffer: whether a node of this launch writes it
  std::vector<int> input_alignment;  // of every input's pointer, raised as jobs need it
  std::vector<MatrixMap> maps;       // of matrices that are copied as boxes, added by their jobs
  bool has_swizzle = false;          // some are swizzled, which the ring must be aligned for

  explicit KernelContext(const Schedule& schedule);
  // Whether a phase's reads of the buffer are visible before it awaits its events.
  bool known_before(int buffer, int phase) const;
  bool polled(int buffer) const { return schedule.polled[buffer]; }
  const TBGraph& graph() const { return schedule.graph; }
  const Node& node(int id) const { return schedule.graph.nodes()[id]; }

  // Whether 16-byte accesses to the tensor's rows are aligned. That requires an input's pointer to be aligned, unless
  // it is an activation, which may have any address.
  bool aligned_rows(const Tensor& t, bool is_activation);

 private:
  std::vector<std::vector<int>> phases_of_;  // per node: the phases that run it
};

// References to memory, numbered in the order of use.
class MPK_KERNEL_API Refs {
 public:
  Refs(KernelContext& context, std::vector<uint64_t>& refs) : context_(context), refs_(refs) {}
  std::string pointer(const Node& node, const Tensor& t,
                      bool writable = false);  // "job.template pointer<const float>(3)"
  // A number below 2^31 in which kernels of equal code may differ: "job.number(3)".
  std::string number(int64_t value);
  // A place in the workspace beside its buffers.
  std::string workspace(int64_t offset, const std::string& type = "uint8_t");
  // Adds the map of a matrix that is streamed as boxes. Nodes that read the same boxes share it.
  int add_map(const Node& node, const Tensor& t, int64_t box_rows, int64_t box_columns,
              MapLayout layout = kMapOfBlocks);
  int add(const Node& node, const Tensor& t);

 private:
  struct Place {
    uint32_t index;  // see make_ref
    int64_t offset;
  };
  Place place_of(const Node& node, const Tensor& t) const;
  int add_raw(uint32_t index, uint64_t offset);

  KernelContext& context_;
  std::vector<uint64_t>& refs_;
};

}  // namespace mpk::codegen
