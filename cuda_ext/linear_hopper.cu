// out[m, n] = factor[m] sum_k x[m, k] * weight[n, k] for 1 to 128 rows m; gated: n < N, silu(that of n) * (that of N + n).
// factor[m] = 1, or ends the norm of row m (norm_sums.cuh).
// x [M, K], weight [N, K] (gated [2 N, K]) of one 16-bit dtype, out [M, N] of that dtype or fp32; contiguous.
// Grid: a CTA takes units of 128 rows of weight (gated: 64 and the 64 that go with them), two warpgroups 64 each, as
//   out^T = weight x^T by wgmma; tile copies run ahead through a ring. When there are few units, a cluster splits K.
// Traffic: 2 N K bytes of weights, bound by bandwidth; the ring fills while the previous kernel runs.
// Limits: bf16 or fp16; in_features, and gated out_features, multiples of 8; compute capability 9.0.
#include "linear_hopper_out.cuh"

#pragma nv_diag_suppress 177  // unused: elsewhere than on sm_90a the kernel is empty

namespace tinyvllm {
namespace {

template <typename T, int kRows>
__device__ __forceinline__ void run_linear(void* out, const RowScale& scale, const CUtensorMap& x_map,
                                           const CUtensorMap& weight_map, const Work& work) {
  extern __shared__ __align__(kTileAlignment) uint8_t shared[];
  const uint32_t base = shared_address(shared);
  const Ring<kRows> ring{base, base + work.barriers_at, work.num_slots};
  const Part part(work);
  uint8_t* stage = shared + work.stage_at;
  float* slices = reinterpret_cast<float*>(stage);
  float* factors = reinterpret_cast<float*>(shared + work.barriers_at) - kRows;
  const auto prepare = [&] {
    const int row = threadIdx.x;
    if (row < part.num_rows) factors[row] = scale.of(part.first_row + row);
    named_barrier(1, kConsumers);
  };
  multiply_units<T, kRows>(ring, x_map, weight_map, work, part, prepare, [&](int unit, const float (&sums)[kRows / 2]) {
    const int feature = unit * work.unit_features();
    if (work.layout.splits > 1) {
      exchange_and_store<T, kRows>(out, sums, ring, shared, slices, factors, feature, work, part);
    } else if (work.gated) {
      store_gated_unit<T, kRows>(out, sums, stage, factors, feature, work, part);
    } else {
      store_unit<T, kRows>(out, sums, slices, factors, feature, work, part);
    }
  });
}

template <typename T, int kRows>
__global__ __launch_bounds__(kThreads, 1) void linear_hopper_kernel(
    void* out, const __grid_constant__ RowScale scale, const __grid_constant__ CUtensorMap x_map,
    const __grid_constant__ CUtensorMap weight_map, const __grid_constant__ Work work) {
  if constexpr (kHopperCode) run_linear<T, kRows>(out, scale, x_map, weight_map, work);
}

cudaError_t start(void* out, const void* x, const void* weight, const RowScale& scale, int num_rows, int out_features,
                  int in_features, bool gated, Dtype dtype, Dtype out_dtype, cudaStream_t stream) {
  const bool supported = is_supported(x, weight, num_rows, out_features, in_features) &&
                         (!gated || out_features % 8 == 0) && (out_dtype == dtype || out_dtype == Dtype::kF32) &&
                         is_aligned16(out);
  if (!supported) return cudaErrorInvalidValue;
  return dispatch_hopper(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    Work work = plan_work(num_rows, out_features, in_features, gated);
    work.float_out = out_dtype == Dtype::kF32;
    return dispatch_rows<16, 32, 64, 96, 128>(ceil_div(num_rows, work.layout.halves), [&](auto rows) {
      constexpr int kRows = decltype(rows)::value;
      const auto kernel = linear_hopper_kernel<T, kRows>;
      const cudaError_t error = choose_splits(&work.layout, kernel);
      if (error != cudaSuccess) return error;
      return launch_products<kRows>(kernel, x, weight, work, stage_bytes<kRows>(work), in_features, stream, out, scale);
    });
  });
}

}  // namespace

cudaError_t linear_hopper(void* out, const void* x, const void* weight, const int64_t* sums, int num_rows,
                          int out_features, int in_features, float eps, Dtype dtype, Dtype out_dtype,
                          cudaStream_t stream) {
  return start(out, x, weight, RowScale(sums, in_features, eps), num_rows, out_features, in_features, false, dtype,
               out_dtype, stream);
}

cudaError_t gated_linear_hopper(void* out, const void* x, const void* weight, const int64_t* sums, int num_rows,
                                int out_features, int in_features, float eps, Dtype dtype, cudaStream_t stream) {
  return start(out, x, weight, RowScale(sums, in_features, eps), num_rows, out_features, in_features, true, dtype,
               dtype, stream);
}

}  // namespace tinyvllm
