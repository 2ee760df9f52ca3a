// Row tasks applied in sequence to a row in shared memory, of which the first reads memory. They are jobs of their own,
// or prologues of stream tasks.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "context.h"

namespace mpk::codegen {

struct Chain {
  std::vector<const Node*> tasks;
  const Tensor* source;  // of the first task
};

// Why no chain has the row task; nothing where one may.
std::optional<std::string> refuses_row_task(const Node& task);

// The chain that makes an operand of a node: found by following it back through the nodes of `prologue`.
Chain find_chain(const KernelContext& context, const std::vector<int>& prologue, const Node& node,
                 const Tensor& operand);

// The chain's class (see row.cuh), with its tasks' traits.
struct ChainCode {
  std::string text, fetch;  // `fetch`: the part of `text` that fetches the row
  bool vectorized = true;
  bool early = true;  // the constructor's operands are known before the phase's events
  std::vector<std::string> headers;
};

struct ChainOptions {
  int phase;
  const Tensor* target = nullptr;  // where the row is also stored
  bool batch_row = false;          // the batch row is a parameter, not computed from the row
  bool is_there = false;           // the row is in shared memory already
};
ChainCode emit_chain(KernelContext& context, Refs& refs, const Node& node, const Chain& chain,
                     const ChainOptions& options);

// A row task of a chain, as its emitter sees it.
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

// The result of a row task's emitter.
struct RowCode {
  std::string traits = "";  // members of its class's struct V, besides T and kSize
  std::string row = "row";  // expression of the row number that its class gets
  bool vectorized = true;   // rows may still be read and written several elements at a time
  bool early = true;        // its constructor's operands are known before the phase's events
  bool polls = false;       // its class has apply_to_polled
};

// Throws Unsupported naming the node when it cannot be generated.
using RowEmitter = RowCode (*)(const RowPlace& place);

// For static initialisers of an emitter's file; returns true.
bool add_row_emitter(const std::string& task, RowEmitter emitter);

}  // namespace mpk::codegen
