// out[t, i] = silu(gate) * up, silu(g) = g / (1 + exp(-g)), gate = gate_up[t, i], up = gate_up[t, I + i].
// out [T, I], gate_up [T, 2 I]; contiguous.
// Grid: (token, slice of 2048 elements); a thread takes 8 elements.
// Traffic: 6 T I bytes; bound by latency at decode, by bandwidth at prefill.
// Limits: bf16 or fp16; intermediate_size a multiple of 8.
#include "common.cuh"

namespace tinyvllm {
namespace {

constexpr int kThreads = 256;

template <typename T>
__global__ __launch_bounds__(kThreads) void silu_mul_kernel(uint4* out, const uint4* gate_up, int row_vectors) {
  allow_next_kernel();
  wait_for_previous_kernel();
  const int column = blockIdx.y * kThreads + threadIdx.x;
  if (column >= row_vectors) return;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * row_vectors;
  float gate[8], up[8];
  unpack8<T>(load16(gate_up + 2 * row + column), gate);
  unpack8<T>(load16(gate_up + 2 * row + row_vectors + column), up);
#pragma unroll
  for (int i = 0; i < 8; ++i) gate[i] = silu(gate[i]) * up[i];
  store16(out + row + column, pack8<T>(gate));
}

}  // namespace

cudaError_t silu_mul(void* out, const void* gate_up, int num_tokens, int intermediate_size, Dtype dtype,
                     cudaStream_t stream) {
  const bool supported = num_tokens >= 0 && intermediate_size > 0 && intermediate_size % 8 == 0 && is_aligned16(out) &&
                         is_aligned16(gate_up);
  if (!supported) return cudaErrorInvalidValue;
  return dispatch_dtype(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    if (num_tokens == 0) return cudaSuccess;
    const int row_vectors = intermediate_size / 8;
    return launch(silu_mul_kernel<T>, dim3(num_tokens, ceil_div(row_vectors, kThreads)), kThreads, 0, stream,
                  static_cast<uint4*>(out), static_cast<const uint4*>(gate_up), row_vectors);
  });
}

}  // namespace tinyvllm
