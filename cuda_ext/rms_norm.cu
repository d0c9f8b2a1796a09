// out = h / sqrt(mean(h^2) + eps) * weight by rows; rms_norm: h = x; add_rms_norm: h = residual += x, rounded to dtype.
// out, x, residual [T, H], weight [H]; all contiguous.
// Grid: one CTA per row; a thread holds up to kVectors vectors of 8 elements in registers, so the row is read once.
// Traffic: 4 T H bytes (rms_norm) or 8 T H (add_rms_norm); bound by latency at decode, by bandwidth at prefill.
// Limits: bf16 or fp16; hidden_size a multiple of 8, at most 16,384.
#include "common.cuh"

namespace tinyvllm {
namespace {

constexpr int kThreads = 256;

template <typename T, int kVectors, bool kAdd>
__global__ __launch_bounds__(kThreads) void rms_norm_kernel(uint4* out, uint4* residual, const uint4* x,
                                                            const uint4* weight, int hidden_size, float eps) {
  const int row_vectors = hidden_size / 8;
  uint4 scale[kVectors];
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const int column = threadIdx.x + i * kThreads;
    scale[i] = column < row_vectors ? load16_streaming(weight + column) : make_uint4(0, 0, 0, 0);
  }
  allow_next_kernel();
  wait_for_previous_kernel();

  const int64_t row = static_cast<int64_t>(blockIdx.x) * row_vectors;
  float h[kVectors][8];
  float sum_of_squares = 0.0f;
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const int column = threadIdx.x + i * kThreads;
    if (column < row_vectors) {
      unpack8<T>(load16(x + row + column), h[i]);
      if constexpr (kAdd) {
        float before[8];
        unpack8<T>(load16(residual + row + column), before);
#pragma unroll
        for (int j = 0; j < 8; ++j) h[i][j] += before[j];
        const uint4 rounded = pack8<T>(h[i]);
        store16(residual + row + column, rounded);
        unpack8<T>(rounded, h[i]);
      }
#pragma unroll
      for (int j = 0; j < 8; ++j) sum_of_squares += h[i][j] * h[i][j];
    }
  }
  const float factor = rsqrtf(cta_sum<kThreads>(sum_of_squares) / static_cast<float>(hidden_size) + eps);
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const int column = threadIdx.x + i * kThreads;
    if (column < row_vectors) {
      float w[8];
      unpack8<T>(scale[i], w);
#pragma unroll
      for (int j = 0; j < 8; ++j) h[i][j] *= factor * w[j];
      store16(out + row + column, pack8<T>(h[i]));
    }
  }
}

template <bool kAdd>
cudaError_t launch_rms_norm(void* out, void* residual, const void* x, const void* weight, int num_tokens,
                            int hidden_size, float eps, Dtype dtype, cudaStream_t stream) {
  const bool supported = num_tokens >= 0 && hidden_size > 0 && hidden_size % 8 == 0 && is_aligned16(out) &&
                         is_aligned16(residual) && is_aligned16(x) && is_aligned16(weight);
  if (!supported) return cudaErrorInvalidValue;
  const int vectors = ceil_div(hidden_size / 8, kThreads);
  const int held = vectors <= 2 ? vectors : vectors <= 4 ? 4 : vectors <= 8 ? 8 : 0;
  return dispatch_dtype(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    return dispatch_int<1, 2, 4, 8>(held, [&](auto count) {
      if (num_tokens == 0) return cudaSuccess;
      return launch(rms_norm_kernel<T, count(), kAdd>, num_tokens, kThreads, 0, stream, static_cast<uint4*>(out),
                    static_cast<uint4*>(residual), static_cast<const uint4*>(x), static_cast<const uint4*>(weight),
                    hidden_size, eps);
    });
  });
}

}  // namespace

cudaError_t rms_norm(void* out, const void* x, const void* weight, int num_tokens, int hidden_size, float eps,
                     Dtype dtype, cudaStream_t stream) {
  return launch_rms_norm<false>(out, nullptr, x, weight, num_tokens, hidden_size, eps, dtype, stream);
}

cudaError_t add_rms_norm(void* out, void* residual, const void* x, const void* weight, int num_tokens,
                         int hidden_size, float eps, Dtype dtype, cudaStream_t stream) {
  return launch_rms_norm<true>(out, residual, x, weight, num_tokens, hidden_size, eps, dtype, stream);
}

}  // namespace tinyvllm
