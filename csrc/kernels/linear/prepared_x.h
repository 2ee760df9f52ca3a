// Rewrites in which a node prepares x for linears of quantised weights: all that read one x share what it makes, until
// something writes x. And the nodes that do.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "../../schedule/rewrite.h"

namespace mpk {

// A matrix [R, K] as blocks [R, K / columns, columns].
Tensor in_blocks(Tensor matrix, int64_t columns);

// Adds the node that quantises rows of the matrix x, in blocks of so many columns, to `numbers` and `scales`.
void add_quantise_rows(TBGraph& made, const Tensor& x, const std::optional<Tensor>& scale, const Tensor& numbers,
                       const Tensor& scales, int64_t columns, const std::string& label);

// An x[R, K], and its scale if one is given, with what a node makes of them: a matrix, and a number for each block of
// columns.
struct PreparedX {
  Tensor x;
  std::optional<Tensor> scale;
  int64_t columns;  // of a block
  Tensor matrix, of_blocks;
};

class PreparesX {
 public:
  // Nothing if no node has changed.
  std::optional<TBGraph> run();
  virtual ~PreparesX() = default;

 protected:
  explicit PreparesX(const TBGraph& graph) : graph_(graph) {}

  virtual bool takes(const Node& node) const = 0;
  // The x of a node, without what is made of it.
  virtual PreparedX input_of(const Node& node) const = 0;
  // Makes buffers for an x, and adds the node that fills them. `name` is that of the buffer of x.
  virtual void prepare(PreparedX& x, const std::string& name, const std::string& label) = 0;
  // Adds what takes the node's place.
  virtual void add_reader(const Node& node, const PreparedX& x) = 0;

  const TBGraph& graph_;
  TBGraph result_;

 private:
  const PreparedX& prepared(const Node& node);

  std::vector<PreparedX> made_;
};

}  // namespace mpk
