// The common code of linears of many rows of x: warpgroups multiply tiles of rows of x by weight rows, all copied as
// boxes (linear_tiles.cuh).
#pragma once

#include <array>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "../../schedule/kernel.h"
#include "../fields.h"
#include "linears.h"
#include "writer.h"

namespace mpk {

constexpr int64_t kFewestTileRows = 65;  // rows of x that no other kernel takes

struct TilesFields {
  int64_t split = 1;  // split_k: each worker takes an equal part of a tile's entries, and finishes a share of it

  static constexpr std::array<FieldOf<TilesFields>, 1> kAll = {{{"split", "kSplit", &TilesFields::split}}};
};

struct TilesCut : TileShape, TilesFields {};

class TilesCutter {
 public:
  // `widths`: of a tile's results. `row`: the elements of the longest row of the row tasks behind; a worker must have
  // whole rows.
  TilesCutter(const Linears& job, std::vector<int64_t> widths, int64_t row = 1)
      : job_(job), widths_(std::move(widths)), row_(row) {}

  // The fastest cut; nothing if no tile takes as many parts.
  std::optional<TilesCut> best() const;
  int64_t x_tiles() const { return (job_.batch + kTileXRows - 1) / kTileXRows; }
  int64_t count(const TileShape& shape) const { return x_tiles() * job_.tiles(shape.tile_rows); }
  double cycles(const TilesCut& c) const;
  double cycles_of_rows(int64_t rows) const;

 private:
  static constexpr int64_t kMostSplit = 16, kWidestSplit = 128;

  TilesCut of_columns(int64_t columns) const;
  bool can_be_split(const TilesCut& c) const;
  bool has_whole_rows(const TilesCut& c) const { return c.tile_rows / c.split % row_ == 0; }

  const Linears& job_;
  const std::vector<int64_t> widths_;
  const int64_t row_;
};

class TilesWriter : public codegen::LinearWriter {
 public:
  explicit TilesWriter(const codegen::JobPlace& place, std::string name = "LinearTiles",
                       std::string compute = "linear::compute_tiles",
                       std::string header = "torch_mpk/device/tasks/linear_tiles.cuh");

 protected:
  std::string write_places() override;

 private:
  void add_weight(const Node& node, const Tensor& weight) override;
  void add_input() override;
  std::string shape_constants() const override;
  bool reads_x() const override { return false; }

  const TilesFields own_;
};

// What such kernels have in common: their cuts, and the proof of these.
class TilesKernel : public Kernel {
 protected:
  using Kernel::Kernel;

  // The columns of a tile's results to choose from.
  virtual std::vector<int64_t> widths(const Schedule&, const Job&) const = 0;
  // Why it refuses the matrices of a job, or what they are scaled by.
  virtual std::optional<std::string> refuses_matrices(const Schedule&, const Job&) const = 0;

  std::optional<std::string> refuses(const Schedule& schedule, const Job& job) const override;
  bool ends_with_rows(const Schedule& schedule, const Job& job) const override;
  std::vector<Cut> candidates(const Schedule& schedule, const Job& job) const override;
  void prove(const CutProof& proof) const override;
  bool takes_companions() const override { return true; }

 private:
  static void prove_rows_behind(const CutProof& proof, const TileShape& s, const TilesFields& own);
};

// x and weights may be what the launch makes: the loader awaits it.
inline bool can_load_tiles(const Schedule& schedule, const Job& job) {
  return can_be_boxed(Linears::input(schedule, job)) &&
         all_weights(schedule, job, [&](const Tensor& t) { return can_load_made_boxes(schedule.graph, t); });
}

}  // namespace mpk
