#include "torch_mpk/cpu/tile.h"

namespace mpk::tasks::causal_conv {

template <class V>
inline constexpr int kSharedBytes = 0;

template <class V, class Threads, class T>
void compute(Threads&, const typename V::Tile& tile, uint8_t*, const T* x, T* state, const T* weight, T* y) {
  for (int64_t c = 0; c < tile.C.size; c++, state += V::State::stride(1), weight += V::Weight::stride(0)) {
    std::memmove(state, state + 1, (V::kK - 1) * sizeof(T));
    state[V::kK - 1] = x[c];
    float sum = 0;
    for (int k = 0; k < V::kK; k++) sum += to_float(state[k]) * to_float(weight[k]);
    y[c] = cast<T>(sum);
  }
}

}  // namespace mpk::tasks::causal_conv
