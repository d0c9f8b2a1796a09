// out[m, n] = sum_k x[m, k] * weight[n, k], or that added to out and rounded once, for 129 to 256 rows, few features and
// K so short that there is nothing to gain from splitting it.
// x [M, K], weight [N, K], out [M, N] of one 16-bit dtype; contiguous.
// Mapping: as linear_wide.cuh has it: a CTA has one tile of 64 tokens by 64 or 96 features and one warpgroup; two CTAs
//   share the weights.
// Traffic: 2 M N K flop, bound by what shared memory takes in and gives to the tensor cores.
// Limits: bf16 or fp16; K and N multiples of 8; compute capability 9.0.
#include "linear_wide.cuh"

#pragma nv_diag_suppress 177  // unused: elsewhere than on sm_90a the kernel is empty

namespace tinyvllm {
namespace wide {
namespace {

constexpr int kTokens = 64;
constexpr int kRingBytes = 200 * 1024;  // leaves room for CTAs of the next kernel

template <int columns>
using Tile = Form<true, columns, 2, kTokens>;

// A warp's sums, 16 tokens of all columns, go through shared memory, 8 bytes a thread without bank conflicts.
template <int columns>
constexpr int kPitch = columns + 8;

template <int columns>
union Shared {
  Ring<Tile<columns>, kRingBytes> ring;
  float sums[kTokens][kPitch<columns>];
};

template <typename T, bool add, int columns>
__device__ __forceinline__ void store(T* out, float (*rows)[kPitch<columns>], const Walk& tile,
                                      const float (&sums)[columns / 2]) {
  constexpr int row_pieces = columns / 8;
  constexpr int pieces = kWarpRows * row_pieces / kWarpSize;  // of 8 features, of a lane
  const int lane = threadIdx.x % kWarpSize;
  const int first_row = threadIdx.x / kWarpSize * kWarpRows;
  uint4 old[pieces];
  T* target[pieces];
#pragma unroll
  for (int i = 0; i < pieces; ++i) {
    const int piece = i * kWarpSize + lane;
    const int row = tile.token + first_row + piece / row_pieces;
    const int feature = tile.feature + piece % row_pieces * 8;
    const bool exists = row < tile.work.num_rows && feature < tile.work.num_features;
    target[i] = exists ? out + static_cast<int64_t>(row) * tile.work.num_features + feature : nullptr;
    if (add && exists) old[i] = load16(target[i]);
  }
  named_barrier(1, Tile<columns>::kMultipliers);  // all warps have read the ring
#pragma unroll
  for (int i = 0; i < columns / 2; i += 2) {
    const int row = own_row() + i / 2 % 2 * 8;
    *reinterpret_cast<float2*>(&rows[row][first_column() + i / 4 * 8]) = make_float2(sums[i], sums[i + 1]);
  }
  __syncwarp();
#pragma unroll
  for (int i = 0; i < pieces; ++i) {
    const int piece = i * kWarpSize + lane;
    const float4* from = reinterpret_cast<const float4*>(&rows[first_row + piece / row_pieces][piece % row_pieces * 8]);
    const float4 low = from[0], high = from[1];
    float values[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
    if (target[i] == nullptr) continue;
    if constexpr (add) {
      float before[8];
      unpack8<T>(old[i], before);
#pragma unroll
      for (int j = 0; j < 8; ++j) values[j] += before[j];
    }
    store16(target[i], pack8<T>(values));
  }
}

template <typename T, bool add, int columns>
__global__ __launch_bounds__(Tile<columns>::kThreads) void linear_wide_kernel(
    T* out, const __grid_constant__ CUtensorMap x_map, const __grid_constant__ CUtensorMap weight_map,
    const __grid_constant__ Work work) {
  if constexpr (kHopperCode) {
    extern __shared__ __align__(kTileAlignment) uint8_t shared_bytes[];
    auto& s = *reinterpret_cast<Shared<columns>*>(shared_bytes);
    multiply_tiles<T>(s.ring, x_map, weight_map, work, Part(work),
                      [&](const Walk& tile, const float (&sums)[columns / 2]) {
                        store<T, add, columns>(out, s.sums, tile, sums);
                      });
  }
}

// In tiles of 64 features if all of them find an SM at once.
template <bool add>
cudaError_t start(void* out, const void* x, const void* weight, int num_rows, int out_features, int in_features,
                  Dtype dtype, cudaStream_t stream) {
  if (!is_supported(x, weight, num_rows, out_features, in_features, out)) return cudaErrorInvalidValue;
  return dispatch_hopper(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    const int pairs = device_attribute(cudaDevAttrMultiProcessorCount, 2) / 2;
    const int64_t tiles = static_cast<int64_t>(ceil_div(num_rows, 2 * kTokens)) * ceil_div(out_features, 64);
    return dispatch_int<64, 96>(tiles <= pairs ? 64 : 96, [&](auto columns) {
      using F = Tile<columns()>;
      const Work work = plan_work<F>(num_rows, out_features, in_features, false);
      return launch_tiles<F, false>(linear_wide_kernel<T, add, columns()>, sizeof(Shared<columns()>), x, weight,
                                    out_features, in_features, work, stream, static_cast<T*>(out));
    });
  });
}

}  // namespace

cudaError_t add_linear_whole(void* out, const void* x, const void* weight, int num_rows, int out_features,
                             int in_features, Dtype dtype, cudaStream_t stream) {
  return start<true>(out, x, weight, num_rows, out_features, in_features, dtype, stream);
}

}  // namespace wide

cudaError_t linear_wide(void* out, const void* x, const void* weight, int num_rows, int out_features, int in_features,
                        Dtype dtype, cudaStream_t stream) {
  return wide::start<false>(out, x, weight, num_rows, out_features, in_features, dtype, stream);
}

}  // namespace tinyvllm
