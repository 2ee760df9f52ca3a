// Linears of some rows of x whose warpgroups multiply lines of weights by boxes of x (linear_warpgroups.cuh).
#pragma once

#include <array>
#include <optional>
#include <string>

#include "../../schedule/kernel.h"
#include "../fields.h"
#include "linears.h"
#include "quantized_writer.h"

namespace mpk {

constexpr int64_t kWarpgroupLineBytes = 128;  // of a row of weights, that an entry of the ring has
constexpr int64_t kWarpgroupRows = kWarpgroupWarps * kWarpRows;

struct WarpgroupsFields {
  int64_t mainloop_tiles = 1;  // tiles of one mainloop
  int64_t split = 1;           // split_k: workers that share the same tiles
  int64_t stages = 2;          // of x, that are in shared memory together
  int64_t stage_columns = 0;   // of a stage of x

  static constexpr std::array<FieldOf<WarpgroupsFields>, 4> kAll = {{
      {"mainloop_tiles", "kMainloopTiles", &WarpgroupsFields::mainloop_tiles},
      {"split", "kSplit", &WarpgroupsFields::split},
      {"stages", "kHeldStages", &WarpgroupsFields::stages},
      {"stage_columns", "kStageColumns", &WarpgroupsFields::stage_columns},
  }};
};

class WarpgroupsWriter : public BoxedWriter {
 public:
  WarpgroupsWriter(const codegen::JobPlace& place, std::string name, std::string compute, std::string header);

 protected:
  std::string write_places() override;

 private:
  void add_input() override;
  StreamRow stream_row() const override;
  std::string shape_constants() const override;
  bool reads_x() const override { return false; }

  const WarpgroupsFields own_;
  int64_t map_of_x_ = 0;
};

class WarpgroupsKernel : public Kernel {
 protected:
  // `fewest_rows`: of x.
  WarpgroupsKernel(std::string name, int64_t fewest_rows) : Kernel(std::move(name)), fewest_rows_(fewest_rows) {}

  std::optional<std::string> refuses_size(const Tensor& x) const;
  // A warpgroup's time for a line of a box, while the other one works as well.
  virtual double line_ns(const WeightFormat& format) const = 0;
  // The columns of x that have a sum, which stages have beside them; 0: there are no sums.
  virtual int64_t sum_columns(const WeightFormat&) const { return 0; }
  // Why it refuses a node's format, beside that of x.
  virtual std::optional<std::string> refuses_format(const Node& node) const = 0;

  std::optional<std::string> refuses(const Schedule& schedule, const Job& job) const override;
  // It leaves that to others: it takes no x that is polled.
  int64_t polled_elements(const Schedule&, const Job&, const Tensor&) const override { return 0; }
  std::vector<Cut> candidates(const Schedule& schedule, const Job& job) const override;
  void prove(const CutProof& proof) const override;
  bool takes_companions() const override { return true; }

 private:
  const int64_t fewest_rows_;
};

}  // namespace mpk
