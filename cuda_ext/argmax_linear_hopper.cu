// sampled[m] = the n with the largest sum_k x[m, k] * weight[n, k], the lowest of equal ones; so the logits stay inside.
// As in sample.cu, -1 where a sum is NaN or the largest is infinite.
// x [M, K], weight [N, K] of one 16-bit dtype, contiguous; M up to 256, above 128 by argmax_linear_wide.cu.
// ranks uint64 [M] holds each row's best so far.
// Grid: as linear_hopper, without clusters: a CTA takes units of 128 features and keeps the best of each row in registers.
// Traffic: 2 N K bytes of weights, bound by bandwidth; then a kernel of one thread a row turns ranks into tokens.
// Limits: bf16 or fp16; in_features a multiple of 8; compute capability 9.0.
#include "argmax.cuh"
#include "linear_hopper.cuh"

#pragma nv_diag_suppress 177  // unused: elsewhere than on sm_90a the kernel is empty

namespace tinyvllm {
namespace {

template <typename T, int kRows>
__device__ __forceinline__ void run_argmax(Rank* ranks, const CUtensorMap& x_map, const CUtensorMap& weight_map,
                                           const Work& work) {
  extern __shared__ __align__(kTileAlignment) uint8_t shared[];
  const uint32_t base = shared_address(shared);
  const Ring<kRows> ring{base, base + work.barriers_at, work.num_slots};
  const int warp = threadIdx.x / kWarpSize;
  const int g = threadIdx.x % kWarpSize / 4;
  const int q = threadIdx.x % 4;
  float best[kRows / 4];  // of rows 8 j + 2 q and the next one, at 2 j
  int token[kRows / 4];
#pragma unroll
  for (int i = 0; i < kRows / 4; ++i) {
    best[i] = -INFINITY;
    token[i] = 0;
  }
  const auto keep_best = [&](int unit, const float (&sums)[kRows / 2]) {
#pragma unroll
    for (int upper = 0; upper < 2; ++upper) {
      const int feature = unit * kUnitRows + 16 * warp + 8 * upper + g;
      if (feature >= work.out_features) break;
#pragma unroll
      for (int i = 0; i < kRows / 4; ++i) {
        const float logit = sums[i / 2 * 4 + 2 * upper + i % 2];
        token[i] = logit > best[i] ? feature : token[i];
        best[i] = max_or_nan(best[i], logit);
      }
    }
  };
  multiply_units<T, kRows>(ring, x_map, weight_map, work, Part(work), [] {}, keep_best);
  if (warp >= kConsumerWarps) return;
  Rank* of_warps = reinterpret_cast<Rank*>(shared + work.stage_at);
#pragma unroll
  for (int i = 0; i < kRows / 4; ++i) {
    const Rank rank = max_rank_of_lanes<4, kWarpSize>(rank_of(best[i], token[i]));
    if (g == 0) of_warps[warp * kRows + i / 2 * 8 + 2 * q + i % 2] = rank;
  }
  named_barrier(1, kConsumers);
  if (threadIdx.x < work.num_rows) {
    Rank rank = 0;
#pragma unroll
    for (int w = 0; w < kConsumerWarps; ++w) rank = max_rank(rank, of_warps[w * kRows + threadIdx.x]);
    atomicMax(ranks + threadIdx.x, rank);
  }
}

template <typename T, int kRows>
__global__ __launch_bounds__(kThreads, 1) void argmax_linear_hopper_kernel(
    Rank* ranks, const __grid_constant__ CUtensorMap x_map, const __grid_constant__ CUtensorMap weight_map,
    const __grid_constant__ Work work) {
  if constexpr (kHopperCode) run_argmax<T, kRows>(ranks, x_map, weight_map, work);
}

__global__ void take_best_kernel(int32_t* sampled, int32_t* last_tokens, Rank* ranks, const int32_t* rows,
                                 int num_rows) {
  allow_next_kernel();
  wait_for_previous_kernel();
  const int i = threadIdx.x;
  if (i >= num_rows) return;
  const int row = rows[i];
  const int token = row >= 0 ? token_of_rank(ranks[i]) : -1;
  ranks[i] = 0;
  sampled[i] = token;
  if (row >= 0) last_tokens[row] = max(token, 0);
}

template <typename T, int kRows>
cudaError_t launch_argmax(Rank* ranks, const void* x, const void* weight, Work work, int in_features,
                          cudaStream_t stream) {
  const int stage_bytes = kConsumerWarps * kRows * static_cast<int>(sizeof(Rank));
  work.stage_at = place_ring<kRows>(&work, stage_bytes);
  work.barriers_at = work.stage_at + stage_bytes;
  CUtensorMap x_map, weight_map;
  const cudaError_t error = describe_operands<kRows>(&x_map, &weight_map, x, weight, work, in_features);
  if (error != cudaSuccess) return error;
  return launch(argmax_linear_hopper_kernel<T, kRows>, work.layout.num_clusters, kThreads,
                work.barriers_at + Ring<kRows>::barrier_bytes(work.num_slots), stream, ranks, x_map, weight_map, work);
}

cudaError_t find_best(Rank* ranks, const void* x, const void* weight, int num_rows, int out_features, int in_features,
                      Dtype dtype, cudaStream_t stream) {
  if (!is_supported(x, weight, num_rows, out_features, in_features)) return cudaErrorInvalidValue;
  Work work{};
  work.num_rows = num_rows;
  work.out_features = out_features;
  Layout& layout = work.layout;
  layout.splits = layout.halves = 1;
  layout.num_units = ceil_div(out_features, kUnitRows);
  layout.num_chunks = ceil_div(in_features, kTileColumns);
  const int num_sms = device_attribute(cudaDevAttrMultiProcessorCount, 1);
  layout.num_clusters = layout.num_units < num_sms ? layout.num_units : num_sms;
  return dispatch_hopper(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    return dispatch_rows<16, 32, 64, 96, 128>(num_rows, [&](auto row_count) {
      return launch_argmax<T, decltype(row_count)::value>(ranks, x, weight, work, in_features, stream);
    });
  });
}

}  // namespace

cudaError_t argmax_linear_hopper(int32_t* sampled, int32_t* last_tokens, int64_t* ranks, const void* x,
                                 const void* weight, const int32_t* rows, int num_rows, int out_features,
                                 int in_features, Dtype dtype, cudaStream_t stream) {
  Rank* best = reinterpret_cast<Rank*>(ranks);
  const auto find = num_rows > kMaxRows ? find_best_wide : find_best;
  const cudaError_t error = find(best, x, weight, num_rows, out_features, in_features, dtype, stream);
  if (error != cudaSuccess) return error;
  return launch(take_best_kernel, 1, ceil_div(num_rows, kWarpSize) * kWarpSize, 0, stream, sampled, last_tokens, best,
                rows, num_rows);
}

}  // namespace tinyvllm
