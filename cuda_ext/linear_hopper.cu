// out[m, n] = sum_k x[m, k] * weight[n, k] for 1 to 128 rows m; gated: n < N, silu(sum of row n) * (sum of row N + n).
// x [M, K], weight [N, K] (gated [2 N, K]) of one 16-bit dtype, out [M, N] of that dtype or fp32; contiguous.
// Grid: a CTA takes units of 128 rows of weight (gated: 64 and the 64 that go with them), two warpgroups 64 each, as
//   out^T = weight x^T by wgmma; tile copies run ahead through a ring. When there are few units, a cluster splits K.
// Traffic: 2 N K bytes of weights, bound by bandwidth; the ring fills while the previous kernel runs.
// Limits: bf16 or fp16; in_features, and gated out_features, multiples of 8; compute capability 9.0.
#include "linear_hopper_out.cuh"

#pragma nv_diag_suppress 177  // unused: elsewhere than on sm_90a the kernel is empty

namespace tinyvllm {
namespace {

constexpr int kMaxClusterSize = 8;  // the largest that every device takes
// Two CTAs share their weights from so many rows on, for up to so many chunks: they exchange half of the sums, but stream
// the weights slower. us of qkv, o and down of Llama-3.2-1B at 128 rows: 9.5, 7.9, 14.9 alone, 9.3, 6.8, 17.1 in pairs; at
// 64: 6.1, 5.8, 11.8 alone, 6.7, 5.8, 13.5 in pairs.
constexpr int kPairRows = 97;
constexpr int kPairChunks = 64;

template <typename T, int kRows>
__device__ __forceinline__ void run_linear(void* out, const CUtensorMap& x_map, const CUtensorMap& weight_map,
                                           const Work& work) {
  extern __shared__ __align__(kTileAlignment) uint8_t shared[];
  const uint32_t base = shared_address(shared);
  const Ring<kRows> ring{base, base + work.barriers_at, work.num_slots};
  const Part part(work);
  uint8_t* stage = shared + work.stage_at;
  float* slices = reinterpret_cast<float*>(stage);
  multiply_units<T, kRows>(ring, x_map, weight_map, work, part, [&](int unit, const float (&sums)[kRows / 2]) {
    const int feature = unit * work.unit_features();
    if (work.layout.splits > 1) {
      exchange_and_store<T, kRows>(out, sums, ring, shared, slices, feature, work, part);
    } else if (work.gated) {
      store_gated_unit<T, kRows>(out, sums, stage, feature, work, part);
    } else {
      store_unit<T, kRows>(out, sums, slices, feature, work, part);
    }
  });
}

template <typename T, int kRows>
__global__ __launch_bounds__(kThreads, 1) void linear_hopper_kernel(
    void* out, const __grid_constant__ CUtensorMap x_map, const __grid_constant__ CUtensorMap weight_map,
    const __grid_constant__ Work work) {
  if constexpr (kHopperCode) run_linear<T, kRows>(out, x_map, weight_map, work);
}

// As many splits as there are SMs for, if all clusters can run at once.
template <typename Kernel>
cudaError_t choose_splits(Layout* layout, Kernel kernel) {
  const int num_sms = device_attribute(cudaDevAttrMultiProcessorCount, 1);
  layout->num_clusters = layout->num_units < num_sms ? layout->num_units : num_sms;
  const int for_sms = num_sms / layout->num_clusters;
  int splits = (for_sms < kMaxClusterSize ? for_sms : kMaxClusterSize) / layout->halves;
  splits = splits < layout->num_chunks ? splits : layout->num_chunks;
  for (; splits > 1; --splits) {
    int resident = 0;
    const cudaError_t error = max_clusters(&resident, kernel, kThreads, splits * layout->halves, shared_limit());
    if (error != cudaSuccess) return error;
    if (resident >= layout->num_clusters) break;
  }
  layout->splits = splits;
  return cudaSuccess;
}

template <typename T, int kRows>
cudaError_t launch_linear(void* out, const void* x, const void* weight, Work work, int in_features,
                          cudaStream_t stream) {
  cudaError_t error = choose_splits(&work.layout, linear_hopper_kernel<T, kRows>);
  if (error != cudaSuccess) return error;
  const int ring_bytes = place_ring<kRows>(&work, stage_bytes<kRows>(work));
  const int exchange_bytes = work.layout.splits * ceil_div(kRows / 8, work.layout.splits) * kPieceBytes;
  work.stage_at = work.layout.splits > 1 && exchange_bytes > ring_bytes ? exchange_bytes : ring_bytes;
  work.barriers_at = work.stage_at + stage_bytes<kRows>(work);
  CUtensorMap x_map, weight_map;
  error = describe_operands<kRows>(&x_map, &weight_map, x, weight, work, in_features);
  if (error != cudaSuccess) return error;
  const int cluster_size = work.layout.cluster_size();
  return launch_clusters(linear_hopper_kernel<T, kRows>, work.layout.num_clusters * cluster_size, kThreads,
                         cluster_size, work.barriers_at + Ring<kRows>::barrier_bytes(work.num_slots), stream, out,
                         x_map, weight_map, work);
}

cudaError_t start(void* out, const void* x, const void* weight, int num_rows, int out_features, int in_features,
                  bool gated, Dtype dtype, Dtype out_dtype, cudaStream_t stream) {
  const bool supported = is_supported(x, weight, num_rows, out_features, in_features) &&
                         (!gated || out_features % 8 == 0) && (out_dtype == dtype || out_dtype == Dtype::kF32) &&
                         is_aligned16(out);
  if (!supported) return cudaErrorInvalidValue;
  return dispatch_hopper(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    Work work{};
    work.num_rows = num_rows;
    work.out_features = out_features;
    work.gated = gated;
    work.float_out = out_dtype == Dtype::kF32;
    Layout& layout = work.layout;
    layout.num_units = ceil_div(out_features, work.unit_features());
    layout.num_chunks = ceil_div(in_features, kTileColumns);
    const bool has_room = 2 * layout.num_units <= device_attribute(cudaDevAttrMultiProcessorCount, 1);
    layout.halves = has_room && num_rows >= kPairRows && layout.num_chunks <= kPairChunks ? 2 : 1;
    return dispatch_rows<16, 32, 64, 96, 128>(ceil_div(num_rows, layout.halves), [&](auto rows) {
      return launch_linear<T, decltype(rows)::value>(out, x, weight, work, in_features, stream);
    });
  });
}

}  // namespace

cudaError_t linear_hopper(void* out, const void* x, const void* weight, int num_rows, int out_features,
                          int in_features, Dtype dtype, Dtype out_dtype, cudaStream_t stream) {
  return start(out, x, weight, num_rows, out_features, in_features, false, dtype, out_dtype, stream);
}

cudaError_t gated_linear_hopper(void* out, const void* x, const void* weight, int num_rows, int out_features,
                                int in_features, Dtype dtype, cudaStream_t stream) {
  return start(out, x, weight, num_rows, out_features, in_features, true, dtype, dtype, stream);
}

}  // namespace tinyvllm
