// out[t, :] = weight[token_ids[t], :]; an id outside [0, vocab_size) gives a zero row.
// out [T, H], weight [V, H], token_ids int32 [T]; all contiguous.
// Grid: one CTA per token; its threads copy the row in 16-byte pieces.
// Traffic: 4 T H bytes (each row read and written once); bound by latency at decode, by bandwidth at prefill.
// Limits: bf16 or fp16; hidden_size a multiple of 8.
#include "common.cuh"

namespace tinyvllm {
namespace {

constexpr int kMaxThreads = 256;

// Rows are copied bit by bit, so the kernel knows vectors of 16 bytes only.
__global__ void embedding_kernel(uint4* out, const uint4* weight, const int32_t* token_ids, int row_vectors,
                                 int vocab_size) {
  wait_for_previous_kernel();
  allow_next_kernel();  // not earlier: attention_decode relies on it, see launch.h
  const int token = blockIdx.x;
  const int id = token_ids[token];
  const bool valid = id >= 0 && id < vocab_size;
  const uint4* source = weight + static_cast<int64_t>(valid ? id : 0) * row_vectors;
  uint4* target = out + static_cast<int64_t>(token) * row_vectors;
  for (int i = threadIdx.x; i < row_vectors; i += blockDim.x) {
    target[i] = valid ? load16_streaming(source + i) : make_uint4(0, 0, 0, 0);
  }
}

}  // namespace

cudaError_t embedding(void* out, const void* weight, const int32_t* token_ids, int num_tokens, int hidden_size,
                      int vocab_size, Dtype dtype, cudaStream_t stream) {
  const bool supported = (dtype == Dtype::kBF16 || dtype == Dtype::kF16) && num_tokens >= 0 && vocab_size > 0 &&
                         hidden_size > 0 && hidden_size % 8 == 0 && is_aligned16(out) && is_aligned16(weight);
  if (!supported) return cudaErrorInvalidValue;
  if (num_tokens == 0) return cudaSuccess;
  const int row_vectors = hidden_size / 8;
  const int threads = row_vectors < kMaxThreads ? ceil_div(row_vectors, kWarpSize) * kWarpSize : kMaxThreads;
  return launch(embedding_kernel, num_tokens, threads, 0, stream, static_cast<uint4*>(out),
                static_cast<const uint4*>(weight), token_ids, row_vectors, vocab_size);
}

}  // namespace tinyvllm
