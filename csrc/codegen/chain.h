// Row tasks applied one after the other to a row in shared memory, the first reading memory: jobs of their own, and
// prologues of stream tasks.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "context.h"

namespace mpk::codegen {

struct Chain {
  std::vector<const Node*> tasks;
  const Tensor* source;  // of the first
};

// Why no chain has the row task; nothing where one may.
std::optional<std::string> refuses_row_task(const Node& task);

// The chain that makes an operand of a node: found by following it back through the nodes of `prologue`.
Chain find_chain(const KernelContext& context, const std::vector<int>& prologue, const Node& node,
                 const Tensor& operand);

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
  bool is_there = false;           // the row stands in shared memory, and is not brought
};
ChainCode emit_chain(KernelContext& context, Refs& refs, const Node& node, const Chain& chain,
                     const ChainOptions& options);

// A row task of a chain, as what writes its part of it sees it.
struct RowPlace {
  KernelContext& context;
  Refs& refs;
  const Node& task;
  const ChainOptions& options;
  int64_t size;  // of the rows, which stay as long as they are, and of one dtype
  DType dtype;
  bool vectorized;  // rows are read and written several elements at a time, if the task can do so, too

  // Whether an operand is known before the phase's events.
  bool known(const Tensor& t) const { return context.known_before(t.buffer, options.phase); }
};

// What a chain is told of a row task.
struct RowCode {
  std::string traits = "";  // members of the struct V that its class gets, besides T and kSize
  std::string row = "row";  // expression of the number that its class gets
  bool vectorized = true;   // rows may still be read and written several elements at a time
  bool early = true;        // what its class reads as it is made is known before the phase's events
  bool polls = false;       // its class has apply_to_polled
};

// Throws Unsupported naming the node when it cannot be generated.
using RowEmitter = RowCode (*)(const RowPlace& place);

// For static initialisers of an emitter's file; returns true.
bool add_row_emitter(const std::string& task, RowEmitter emitter);

}  // namespace mpk::codegen
