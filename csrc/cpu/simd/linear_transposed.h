// Matrix times few vectors, with the matrix stored by columns: y[r, n] = sum_k x[r, k] * weight[k, n].
//
// The order of an output element's sum depends only on K: neither on what is computed beside it nor on the thread.
#pragma once

constexpr int kDepthAtOnce = 8;              // rows of weight that are read side by side
constexpr int64_t kTransposedColumns = 256;  // whose sums fit the L1 cache

// Adds kDepth rows of weight to the sums of `columns` columns. x: [rows][x_pitch], its columns k to k + kDepth.
template <class T, int kDepth>
MPK_INLINE void add_depth(const uint8_t* weight, int64_t weight_stride, int64_t columns, const float* x,
                          int64_t x_pitch, int rows, float* sums) {
  for (int64_t c = 0; c < columns; c += kLanes) {
    vf w[kDepth];
    for (int i = 0; i < kDepth; i++) {
      const T* from = reinterpret_cast<const T*>(weight + i * weight_stride) + c;
      w[i] = columns - c >= kLanes ? load_vec(from) : load_vec_partial(from, columns - c);
    }
    for (int r = 0; r < rows; r++) {
      float* to = sums + r * kTransposedColumns + c;
      vf sum = load_vec(to);
      for (int i = 0; i < kDepth; i++) sum = vec_fma(w[i], vf{} + x[r * x_pitch + i], sum);
      *reinterpret_cast<vf_unaligned*>(to) = sum;
    }
  }
}

template <class T>
void linear_transposed(const LinearArgs& a) {
  float* x = reinterpret_cast<float*>(a.scratch);
  alignas(64) float sums[kLinearRowBlock * kTransposedColumns];
  for (int64_t first = 0; first < a.num_rows; first += kLinearRowBlock) {
    const int rows = static_cast<int>(a.num_rows - first < kLinearRowBlock ? a.num_rows - first : kLinearRowBlock);
    for (int r = 0; r < rows; r++) {
      const T* row = reinterpret_cast<const T*>(a.x + (first + r) * a.x_stride);
      for (int64_t k = 0; k < a.k; k++) x[r * a.k + k] = from_storage(row[k]);
    }
    for (int64_t n = a.begin; n < a.end; n += kTransposedColumns) {
      const int64_t columns = a.end - n < kTransposedColumns ? a.end - n : kTransposedColumns;
      const uint8_t* weight = a.weight + n * static_cast<int64_t>(sizeof(T));
      __builtin_memset(sums, 0, sizeof(sums));
      int64_t k = 0;
      for (; k + kDepthAtOnce <= a.k; k += kDepthAtOnce)
        add_depth<T, kDepthAtOnce>(weight + k * a.weight_stride, a.weight_stride, columns, x + k, a.k, rows, sums);
      for (; k < a.k; k++)
        add_depth<T, 1>(weight + k * a.weight_stride, a.weight_stride, columns, x + k, a.k, rows, sums);
      for (int r = 0; r < rows; r++) {
        T* y = reinterpret_cast<T*>(a.y + (first + r) * a.y_stride) + n;
        for (int64_t c = 0; c < columns; c++) to_storage(sums[r * kTransposedColumns + c], y + c);
      }
    }
  }
}

void linear_transposed_f64(const LinearArgs& a) {
  for (int64_t r = 0; r < a.num_rows; r++) {
    const double* x = reinterpret_cast<const double*>(a.x + r * a.x_stride);
    double* y = reinterpret_cast<double*>(a.y + r * a.y_stride);
    for (int64_t n = a.begin; n < a.end; n++) y[n] = 0;
    for (int64_t k = 0; k < a.k; k++) {
      const double* w = reinterpret_cast<const double*>(a.weight + k * a.weight_stride);
      for (int64_t n = a.begin; n < a.end; n++) y[n] += x[k] * w[n];
    }
  }
}
