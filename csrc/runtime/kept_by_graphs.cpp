#include "torch_mpk/runtime/kept_by_graphs.h"

#include <atomic>
#include <utility>

namespace mpk {
namespace {

struct Reference {
  std::shared_ptr<void> object;
  Reference* next = nullptr;
};

std::atomic<Reference*> released{nullptr};

// The driver calls it, on a thread of its own that may call no CUDA and should wait for nothing, so it frees nothing.
void release(void* pointer) {
  auto* reference = static_cast<Reference*>(pointer);
  reference->next = released.load(std::memory_order_relaxed);
  while (!released.compare_exchange_weak(reference->next, reference, std::memory_order_release,
                                         std::memory_order_relaxed)) {
  }
}

}  // namespace

void keep_for(const cu::Driver& driver, cu::Graph graph, std::shared_ptr<void> object) {
  auto reference = std::make_unique<Reference>(Reference{std::move(object)});
  cu::UserObject handle = nullptr;
  driver.check(driver.user_object_create(&handle, reference.get(), &release, 1, cu::kUserObjectNoDestructorSync),
               "cuUserObjectCreate");
  (void)reference.release();  // is the driver's now
  const cu::Result retained = driver.graph_retain_user_object(graph, handle, 1, cu::kGraphUserObjectMove);
  if (retained != 0) driver.user_object_release(handle, 1);
  driver.check(retained, "cuGraphRetainUserObject");
}

void drop_released() noexcept {
  if (!released.load(std::memory_order_relaxed)) return;
  Reference* next = released.exchange(nullptr, std::memory_order_acquire);
  while (next) delete std::exchange(next, next->next);
}

}  // namespace mpk
