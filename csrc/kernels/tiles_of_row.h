// Tile tasks at the end of a job whose node makes whole rows, as quantise_rows is behind norms and attention: the warps
// that have made a row compute its tiles from shared memory.
#pragma once

#include <optional>

#include "../codegen/job_code.h"

namespace mpk {

// A tile task's node, cut into tiles of one row each of what `maker` makes, which find that row in shared memory.
struct TilesOfRow {
  TaskDef def;
  Node node;

  // Nothing if it cannot be cut so. Its tiles are then numbered row by row.
  static std::optional<TilesOfRow> find(const Node& maker, const Node& tiles);
};

// Whether the tile tasks in its epilogue all take rows of its only node, for Kernel::ends_with_tiles.
bool ends_with_tiles_of_rows(const Schedule& schedule, const Job& job);

// The members that `HasTiles` asks of a variant, see row.cuh; nothing if there are none.
std::string emit_tiles_of_rows(const codegen::JobPlace& place, codegen::Refs& refs, codegen::JobCode& code);

}  // namespace mpk
