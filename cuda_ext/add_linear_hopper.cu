// residual[m, n] += sum_k x[m, k] * weight[n, k], rounded once, for 1 to 128 rows m; with a norm behind it also
// scaled[m, n] = residual[m, n] * norm[n], and sums[m] += the squares of residual[m, :], see norm_sums.cuh.
// x [M, K], weight [N, K], norm [N], residual and scaled [M, N] of one 16-bit dtype; contiguous.
// Grid: as linear_hopper, but a cluster has one unit of 128 features only. A CTA fetches its part of the residual as soon
//   as the kernel before has ended, and adds up the squares of its features of a row before it adds them to sums.
// Traffic: 2 N K bytes of weights, bound by bandwidth; the ring fills while the previous kernel runs.
// Limits: bf16 or fp16; K and N multiples of 8; compute capability 9.0.
#include "linear_hopper_split.cuh"
#include "norm_sums.cuh"

#pragma nv_diag_suppress 177  // unused: elsewhere than on sm_90a the kernel is empty

namespace tinyvllm {
namespace {

constexpr int kSliceFloats = 8 * kSlicePitch;
constexpr int kSliceBytes = kConsumerWarps * kSliceFloats * 4;
constexpr int kOldBytes = kConsumers * 8;             // of the residual, for a piece: four features of a row a thread
constexpr int kSquareBytes = kConsumerWarps * 8 * 4;  // of a piece

struct Target {
  void *residual, *scaled;
  int64_t *sums, *other_sums;
  const void* norm;
};

// Shared memory that a CTA needs beyond its ring: slices, and for each piece the residual and the squares of each warp.
template <int kRows>
int stage_bytes(const Layout& layout) {
  return kSliceBytes + ceil_div(kRows / 8, layout.splits) * (kOldBytes + kSquareBytes);
}

// Adds to four features of a row; their residual is old, the norm's weights of them norm. Returns the sum of their squares.
template <typename T>
__device__ __forceinline__ float add_to_residual(const Target& target, int64_t at, float4 more, uint2 old, uint2 norm) {
  const float2 low = unpack2<T>(old.x), high = unpack2<T>(old.y);
  const uint2 sum = make_uint2(pack2<T>(low.x + more.x, low.y + more.y), pack2<T>(high.x + more.z, high.y + more.w));
  *reinterpret_cast<uint2*>(static_cast<T*>(target.residual) + at) = sum;
  if (target.scaled == nullptr) return 0.0f;
  *reinterpret_cast<uint2*>(static_cast<T*>(target.scaled) + at) =
      make_uint2(multiply2<T>(sum.x, norm.x), multiply2<T>(sum.y, norm.y));
  const float2 a = unpack2<T>(sum.x), b = unpack2<T>(sum.y);
  return a.x * a.x + a.y * a.y + b.x * b.x + b.y * b.y;
}

template <typename T, int kRows>
__device__ __forceinline__ void run_add(const Target& target, const CUtensorMap& x_map, const CUtensorMap& weight_map,
                                        const Work& work) {
  extern __shared__ __align__(kTileAlignment) uint8_t shared[];
  const uint32_t base = shared_address(shared);
  const Ring<kRows> ring{base, base + work.barriers_at, work.num_slots};
  const Part part(work);
  const int warp = threadIdx.x / kWarpSize;
  const int lane = threadIdx.x % kWarpSize;
  const int first_feature = part.first_unit * kUnitRows + 16 * warp;
  float* slice = reinterpret_cast<float*>(shared + work.stage_at) + warp * kSliceFloats;
  uint8_t* olds = shared + work.stage_at + kSliceBytes;                           // [piece, warp, row, 16 features]
  float* squares = reinterpret_cast<float*>(olds + part.own_pieces * kOldBytes);  // [piece, row, warp]
  uint8_t* old = olds + warp * (kOldBytes / kConsumerWarps);
  uint2 norm{};  // the weights of the thread's four features

  const auto prepare = [&] {
    if (target.other_sums != nullptr && blockIdx.x == 0 && threadIdx.x < work.num_rows) {
      target.other_sums[threadIdx.x] = 0;
    }
    const int feature = first_feature + lane % 2 * 8;
    for (int i = 0; lane < 16 && i < part.own_pieces; ++i) {
      const int row = first_row_of(i, work, part) + lane / 2;
      const int64_t at = static_cast<int64_t>(part.first_row + row) * work.out_features + feature;
      copy16_async(old + i * kOldBytes + lane * 16, static_cast<const T*>(target.residual) + at,
                   row < part.num_rows && feature < work.out_features);
    }
    copy_commit();
    const int of_slice = first_feature + lane % 4 * 4;
    if (target.scaled != nullptr && of_slice < work.out_features) {
      norm = *reinterpret_cast<const uint2*>(static_cast<const T*>(target.norm) + of_slice);
    }
  };

  multiply_units<T, kRows>(ring, x_map, weight_map, work, part, prepare, [&](int, const float (&sums)[kRows / 2]) {
    if (work.layout.cluster_size() == 1) named_barrier(1, kConsumers);  // all warps have read the ring
    copy_wait<0>();
    exchange<kRows>(sums, ring, shared, work, part, [&](int i, float4 sum) {
      put_in_slice(slice, 0, sum, false);
      __syncwarp();
      const int row = first_row_of(i, work, part) + lane / 4;
      const int feature = first_feature + lane % 4 * 4;
      float square = 0.0f;
      if (row < part.num_rows && feature < work.out_features) {
        const float4 more = *reinterpret_cast<const float4*>(slice + lane / 4 * kSlicePitch + lane % 4 * 4);
        const uint2 before = *reinterpret_cast<const uint2*>(old + i * kOldBytes + lane * 8);
        const int64_t at = static_cast<int64_t>(part.first_row + row) * work.out_features + feature;
        square = add_to_residual<T>(target, at, more, before, norm);
      }
      square = warp_sum<4>(square);
      if (lane % 4 == 0) squares[(8 * i + lane / 4) * kConsumerWarps + warp] = square;
      __syncwarp();
    });
    if (target.scaled == nullptr) return;
    named_barrier(1, kConsumers);
    const int row = first_row_of(threadIdx.x / 8, work, part) + threadIdx.x % 8;
    if (row >= part.num_rows) return;
    const float4* of_row = reinterpret_cast<const float4*>(squares) + 2 * threadIdx.x;
    const float4 sum = sum_of_parts(of_row, 2, 1);
    add_squares(target.sums + part.first_row + row, (sum.x + sum.y) + (sum.z + sum.w));
  });
}

template <typename T, int kRows>
__global__ __launch_bounds__(kThreads, 1) void add_linear_hopper_kernel(
    const __grid_constant__ Target target, const __grid_constant__ CUtensorMap x_map,
    const __grid_constant__ CUtensorMap weight_map, const __grid_constant__ Work work) {
  if constexpr (kHopperCode) run_add<T, kRows>(target, x_map, weight_map, work);
}

}  // namespace

cudaError_t add_linear_hopper(void* residual, void* scaled, int64_t* sums, int64_t* other_sums, const void* x,
                              const void* weight, const void* norm, int num_rows, int out_features, int in_features,
                              Dtype dtype, cudaStream_t stream) {
  const bool supported = is_supported(x, weight, num_rows, out_features, in_features) &&
                         can_add(residual, scaled, sums, norm, out_features);
  if (!supported) return cudaErrorInvalidValue;
  const Target target{residual, scaled, sums, other_sums, norm};
  return dispatch_hopper(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    Work work = plan_work(num_rows, out_features, in_features, false);
    Layout& layout = work.layout;
    return dispatch_rows<16, 32, 64, 96, 128>(ceil_div(num_rows, layout.halves), [&](auto rows) {
      constexpr int kRows = decltype(rows)::value;
      const auto kernel = add_linear_hopper_kernel<T, kRows>;
      const cudaError_t error = choose_splits(&layout, kernel);
      if (error != cudaSuccess) return error;
      layout.num_clusters = layout.num_units;
      return launch_products<kRows>(kernel, x, weight, work, stage_bytes<kRows>(layout), in_features, stream, target);
    });
  });
}

}  // namespace tinyvllm
