// CUDA graphs keep alive all that their launches refer to.
#pragma once

#include <memory>

#include "torch_mpk/runtime/driver.h"

namespace mpk {

// Has a graph, what it is instantiated to, and copies of both refer to an object until they are destroyed and their
// launches have ended. Throws cu::Error.
void keep_for(const cu::Driver& driver, cu::Graph graph, std::shared_ptr<void> object);

// Drops the references of graphs that are gone. What this frees may wait for the device, so it is nothing for a thread
// that captures a graph, or holds a lock.
void drop_released() noexcept;

}  // namespace mpk
