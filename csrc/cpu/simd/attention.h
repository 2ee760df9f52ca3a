// One tile of the online softmax of a decode step: a few query heads share the rows of one key head.
#pragma once

MPK_INLINE int64_t padded_dim(int64_t dim) { return (dim + kHeadDimPad - 1) / kHeadDimPad * kHeadDimPad; }

// Adds up the products of one key row, or of a part of it, and kHeads queries.
template <class T, int kHeads>
MPK_INLINE void multiply_row(const T* k, const float* q, int64_t q_stride, int64_t head_dim, vf (&acc)[kHeads]) {
  int64_t d = 0;
  for (; d + kLanes <= head_dim; d += kLanes) {
    const vf row = load_vec(k + d);
    for (int h = 0; h < kHeads; h++) acc[h] = vec_fma(row, load_vec(q + h * q_stride + d), acc[h]);
  }
  if (d < head_dim) {
    const vf row = load_vec_partial(k + d, head_dim - d);
    for (int h = 0; h < kHeads; h++) acc[h] = vec_fma(row, load_vec(q + h * q_stride + d), acc[h]);
  }
}

// Dot products of the key row of a position with kHeads queries, from head `first` on.
template <class T, int kHeads>
MPK_INLINE void score_row(const AttentionTileArgs& a, int first, int64_t position, float* out) {
  const int64_t q_stride = padded_dim(a.head_dim), rest_stride = padded_dim(a.rest_dim);
  const float *q = static_cast<const float*>(a.q), *q_rest = static_cast<const float*>(a.q_rest);
  vf acc[kHeads];
  for (int h = 0; h < kHeads; h++) acc[h] = vf{};
  multiply_row<T, kHeads>(reinterpret_cast<const T*>(a.k + position * a.k_stride), q + first * q_stride, q_stride,
                          a.head_dim, acc);
  if (a.rest_dim > 0)
    multiply_row<T, kHeads>(reinterpret_cast<const T*>(a.k_rest + position * a.k_rest_stride),
                            q_rest + first * rest_stride, rest_stride, a.rest_dim, acc);
  for (int h = 0; h < kHeads; h++) out[h * kAttentionTile] = sum_lanes(acc[h]);
}

// Adds the tile's values, weighted by the probabilities, to kHeads accumulators.
template <class T, int kHeads>
MPK_INLINE void add_values(const AttentionTileArgs& a, const float* p, float* acc, int64_t acc_stride) {
  for (int64_t d = 0; d < a.value_dim; d += kLanes) {
    vf sum[kHeads];
    for (int h = 0; h < kHeads; h++) sum[h] = load_vec(acc + h * acc_stride + d);
    const bool whole = d + kLanes <= a.value_dim;
    for (int i = 0; i < a.num_positions; i++) {
      const T* v = reinterpret_cast<const T*>(a.v + a.positions[i] * a.v_stride) + d;
      const vf row = whole ? load_vec(v) : load_vec_partial(v, a.value_dim - d);
      for (int h = 0; h < kHeads; h++) {
        const float weight = p[h * kAttentionTile + i];
        sum[h] = vec_fma(row, vf{} + weight, sum[h]);
      }
    }
    for (int h = 0; h < kHeads; h++) *reinterpret_cast<vf_unaligned*>(acc + h * acc_stride + d) = sum[h];
  }
}

// Keeps scores between -softcap and softcap.
template <class C>
MPK_INLINE void cap_scores(C* scores, int n, double softcap) {
  const C cap = static_cast<C>(softcap), inverse = static_cast<C>(1 / softcap);
  for (int i = 0; i < n; i++) scores[i] = cap * math::tanh(scores[i] * inverse);
}

// Adds a score without a value to a sum of exponentials above `max`. Returns the factor for the results so far.
template <class C>
MPK_INLINE C add_sink(C sink, C max, C& sum) {
  const C top = sink > max ? sink : max, base = top == -std::numeric_limits<C>::infinity() ? C(0) : top;
  const C kept = math::exp(max - base);
  sum = sum * kept + math::exp(sink - base);
  return kept;
}

// Scales, masks and exponentiates one head's scores; returns the factor its accumulator must be scaled by.
template <class C>
MPK_INLINE C softmax_step(const AttentionTileArgs& a, int head, C* scores) {
  C* max = static_cast<C*>(a.max) + head;
  C* sum = static_cast<C*>(a.sum) + head;
  const C* mask = a.mask == nullptr ? nullptr : static_cast<const C*>(a.mask) + head * kAttentionTile;
  C new_max = *max;
  if (a.softcap > 0) {
    for (int i = 0; i < a.num_positions; i++) scores[i] *= static_cast<C>(a.scale);
    cap_scores(scores, a.num_positions, a.softcap);
  }
  const C scale = a.softcap > 0 ? C(1) : static_cast<C>(a.scale);
  for (int i = 0; i < a.num_positions; i++) {
    scores[i] = scores[i] * scale + (mask == nullptr ? C(0) : mask[i]);
    new_max = (scores[i] != scores[i] || scores[i] > new_max) ? scores[i] : new_max;
  }
  if (new_max == -std::numeric_limits<C>::infinity()) {
    for (int i = 0; i < a.num_positions; i++) scores[i] = 0;
    return 1;
  }
  C lanes[16] = {};
  for (int i = 0; i < a.num_positions; i++) scores[i] = math::exp(scores[i] - new_max);
  for (int i = 0; i < a.num_positions; i++) lanes[i % 16] += scores[i];
  C total = 0;
  for (C lane : lanes) total += lane;
  const C factor = math::exp(*max - new_max);
  *sum = *sum * factor + total;
  *max = new_max;
  return factor;
}

constexpr int kHeadsPerPass = 4;

template <class T, int kHeads>
void attention_pass(const AttentionTileArgs& a, int first) {
  const int64_t stride = padded_dim(a.value_dim);
  float* scores = static_cast<float*>(a.scores) + first * kAttentionTile;
  float* acc = static_cast<float*>(a.acc) + first * stride;
  for (int i = 0; i < a.num_positions; i++) {
    const uint8_t* v = a.v + a.positions[i] * a.v_stride;
    for (int64_t byte = 0; byte < a.value_dim * static_cast<int64_t>(sizeof(T)); byte += 64)
      __builtin_prefetch(v + byte);
    score_row<T, kHeads>(a, first, a.positions[i], scores + i);
  }
  for (int h = 0; h < kHeads; h++) {
    const float factor = softmax_step<float>(a, first + h, scores + h * kAttentionTile);
    for (int64_t d = 0; d < stride; d++) acc[h * stride + d] *= factor;
  }
  add_values<T, kHeads>(a, scores, acc, stride);
}

template <class T>
void attention_tile(const AttentionTileArgs& a) {
  static_assert(kHeadDimPad % kLanes == 0);
  for (int first = 0; first < a.num_heads; first += kHeadsPerPass) {
    switch (a.num_heads - first) {
      case 1:
        attention_pass<T, 1>(a, first);
        break;
      case 2:
        attention_pass<T, 2>(a, first);
        break;
      case 3:
        attention_pass<T, 3>(a, first);
        break;
      default:
        attention_pass<T, kHeadsPerPass>(a, first);
    }
  }
}

void attention_tile_f64(const AttentionTileArgs& a) {
  const int64_t stride = padded_dim(a.value_dim);
  for (int h = 0; h < a.num_heads; h++) {
    const double* q = static_cast<const double*>(a.q) + h * padded_dim(a.head_dim);
    const double* q_rest = static_cast<const double*>(a.q_rest) + h * padded_dim(a.rest_dim);
    double* scores = static_cast<double*>(a.scores) + h * kAttentionTile;
    double* acc = static_cast<double*>(a.acc) + h * stride;
    for (int i = 0; i < a.num_positions; i++) {
      const double* k = reinterpret_cast<const double*>(a.k + a.positions[i] * a.k_stride);
      scores[i] = 0;
      for (int64_t d = 0; d < a.head_dim; d++) scores[i] += q[d] * k[d];
      const double* k_rest = reinterpret_cast<const double*>(a.k_rest + a.positions[i] * a.k_rest_stride);
      for (int64_t d = 0; d < a.rest_dim; d++) scores[i] += q_rest[d] * k_rest[d];
    }
    const double factor = softmax_step<double>(a, h, scores);
    for (int64_t d = 0; d < a.value_dim; d++) acc[d] *= factor;
    for (int i = 0; i < a.num_positions; i++) {
      const double* v = reinterpret_cast<const double*>(a.v + a.positions[i] * a.v_stride);
      for (int64_t d = 0; d < a.value_dim; d++) acc[d] += scores[i] * v[d];
    }
  }
}
