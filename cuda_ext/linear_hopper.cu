// out[m, n] = sum_k x[m, k] * weight[n, k] for 1 to 256 rows m; gated: n < N, silu(sum of row n) * (sum of row N + n).
// x [M, K], weight [N, K] (gated [2 N, K]) of one 16-bit dtype, out [M, N] of that dtype or fp32; contiguous.
// Grid: a CTA takes units of 128 features (gated: 64 and the 64 that go with them), two warpgroups 64 each, as out^T =
//   weight x^T by wgmma; tile copies run ahead through a ring. When there are few units, the CTAs of a cluster split K.
// Traffic: 2 N K bytes of weights, bound by bandwidth up to 128 rows; the ring fills while the previous kernel runs.
// Limits: bf16 or fp16; in_features a multiple of 8; compute capability 9.0.
#include <limits>

#include "linear_hopper.cuh"

#pragma nv_diag_suppress 177  // unused: elsewhere than on sm_90a the kernel is empty

namespace tinyvllm {
namespace {

// Of one CTA: its chunks of K, its first unit, and from one unit to the next.
struct Part {
  int first_chunk, end_chunk, first_unit, unit_stride;
};

template <int kRows>
__device__ __forceinline__ void copy_weights(const Ring<kRows>& ring, const CUtensorMap& map, const Layout& layout,
                                             const Part& part) {
  const uint64_t policy = evict_first_policy();
  const int in_flight = ring.num_slots < kWeightsInFlight ? ring.num_slots : kWeightsInFlight;
  Turn turn, landed;
  int issued = 0;
  for (int unit = part.first_unit; unit < layout.num_units; unit += part.unit_stride) {
    const int row = unit * layout.unit_features;
    for (int chunk = part.first_chunk; chunk < part.end_chunk; ++chunk) {
      wait_barrier(ring.empty(turn.slot), turn.parity ^ 1);
      if (issued++ >= in_flight) {
        wait_barrier(ring.weights_full(landed.slot), landed.parity);
        landed.advance(ring.num_slots);
      }
      const uint32_t full = ring.weights_full(turn.slot);
      const int column = chunk * kTileColumns;
      arrive_expecting(full, 2 * kWeightTileBytes);
      copy_tile(ring.weights(turn.slot, 0), map, row, column, full, policy);
      copy_tile(ring.weights(turn.slot, 1), map, row + layout.second_row, column, full, policy);
      turn.advance(ring.num_slots);
    }
  }
}

template <int kRows>
__device__ __forceinline__ void copy_x(const Ring<kRows>& ring, const CUtensorMap& map, const Layout& layout,
                                       const Part& part) {
  Turn turn;
  for (int unit = part.first_unit; unit < layout.num_units; unit += part.unit_stride) {
    for (int chunk = part.first_chunk; chunk < part.end_chunk; ++chunk) {
      wait_barrier(ring.empty(turn.slot), turn.parity ^ 1);
      arrive_expecting(ring.x_full(turn.slot), Ring<kRows>::kXBytes);
      copy_tile(ring.x(turn.slot), map, 0, chunk * kTileColumns, ring.x_full(turn.slot));
      turn.advance(ring.num_slots);
    }
  }
}

// The warpgroup's sums of one unit.
template <typename T, int kRows>
__device__ __forceinline__ void multiply_unit(float (&sums)[kRows / 2], const Ring<kRows>& ring, Turn& turn,
                                              const Part& part) {
  const int group = threadIdx.x / kWarpgroup;
  const bool leads = threadIdx.x % kWarpSize == 0;
  int previous = -1;
  for (int chunk = part.first_chunk; chunk < part.end_chunk; ++chunk) {
    wait_barrier(ring.weights_full(turn.slot), turn.parity);
    wait_barrier(ring.x_full(turn.slot), turn.parity);
    const uint64_t a = tile_descriptor(ring.weights(turn.slot, group));
    const uint64_t b = tile_descriptor(ring.x(turn.slot));
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < kTileColumns / 16; ++k) wgmma<T, kRows>(sums, a + 2 * k, b + 2 * k);
    wgmma_commit();
    wgmma_wait<1>();  // the slot before is read
    if (leads && previous >= 0) arrive(ring.empty(previous));
    previous = turn.slot;
    turn.advance(ring.num_slots);
  }
  wgmma_wait<0>();
  settle(sums);
  if (leads) arrive(ring.empty(previous));
}

template <typename T, int kRows>
__device__ __forceinline__ void run_linear(void* out, const CUtensorMap& x_map, const CUtensorMap& weight_map,
                                           const Work& work) {
  extern __shared__ __align__(kTileAlignment) uint8_t shared[];
  const Layout& layout = work.layout;
  const uint32_t base = shared_address(shared);
  const Ring<kRows> ring{base, base + work.barriers_at, work.num_slots};
  const int cta = blockIdx.x;
  const int split = cta % layout.splits;
  const int num_ctas = gridDim.x;
  const Part part{layout.first_chunk(split), layout.first_chunk(split + 1), cta / layout.splits,
                  num_ctas / layout.splits};
  const int warp = threadIdx.x / kWarpSize;
  const bool leads = threadIdx.x % kWarpSize == 0;

  if (threadIdx.x == 0) {
    for (int slot = 0; slot < ring.num_slots; ++slot) {
      init_barrier(ring.weights_full(slot), 1);
      init_barrier(ring.x_full(slot), 1);
      init_barrier(ring.empty(slot), kConsumerWarps);
    }
    publish_barriers();
  }
  __syncthreads();
  allow_next_kernel();

  if (warp == kWeightWarp) {
    if (leads) copy_weights(ring, weight_map, layout, part);
    __syncwarp();
    wait_for_previous_kernel();
  } else if (warp > kWeightWarp) {
    wait_for_previous_kernel();
    fence_tile_copies();
    if (leads) copy_x(ring, x_map, layout, part);
    __syncwarp();
  } else {
    wait_for_previous_kernel();
    Turn turn;
    for (int unit = part.first_unit; unit < layout.num_units; unit += part.unit_stride) {
      float sums[kRows / 2] = {};
      multiply_unit<T, kRows>(sums, ring, turn, part);
      if (layout.splits == 1) {
        store_unit<T, kRows>(out, sums, reinterpret_cast<float*>(shared + work.slices_at), unit * layout.unit_features,
                             work);
      } else {
        named_barrier(1, kConsumers);  // the ring, in whose place the partial sums go, has been read by both warpgroups
        write_partials<kRows>(reinterpret_cast<float*>(shared), sums);
      }
    }
  }

  if (layout.splits > 1) {
    cluster_arrive();
    cluster_wait();
    if (warp < kConsumerWarps) {
      reduce_partials<T>(out, base, part.first_unit * layout.unit_features, split, work);
    }
    cluster_arrive_relaxed();
    cluster_wait();  // the others have read this CTA's shared memory
  }
}

template <typename T, int kRows>
__global__ __launch_bounds__(kThreads, 1) void linear_hopper_kernel(
    void* out, const __grid_constant__ CUtensorMap x_map, const __grid_constant__ CUtensorMap weight_map,
    const __grid_constant__ Work work) {
  if constexpr (kHopperCode) run_linear<T, kRows>(out, x_map, weight_map, work);
}

// How many clusters of this size can be resident at once.
template <typename... Parameters>
cudaError_t max_clusters(int* count, void (*kernel)(Parameters...), int threads, int cluster_size, int shared_bytes) {
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
  if (error != cudaSuccess) return error;
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim = {static_cast<unsigned>(cluster_size), 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = cluster_size;
  config.blockDim = threads;
  config.dynamicSmemBytes = shared_bytes;
  config.attrs = &attribute;
  config.numAttrs = 1;
  return cudaOccupancyMaxActiveClusters(count, kernel, &config);
}

int shared_limit() { return device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, 0); }

// As many splits as there are SMs for, if all clusters can run at once.
template <typename Kernel>
cudaError_t plan_layout(Layout* layout, Kernel kernel, const Work& work, int in_features) {
  const int num_sms = device_attribute(cudaDevAttrMultiProcessorCount, 1);
  layout->unit_features = work.gated ? kGroupFeatures : kUnitFeatures;
  layout->num_units = ceil_div(work.out_features, layout->unit_features);
  layout->num_chunks = ceil_div(in_features, kTileColumns);
  layout->second_row = work.gated ? work.out_features : kGroupFeatures;
  const int num_clusters = layout->num_units < num_sms ? layout->num_units : num_sms;
  int splits = num_sms / num_clusters;
  splits = splits < kMaxSplits ? splits : kMaxSplits;
  splits = splits < layout->num_chunks ? splits : layout->num_chunks;
  for (; splits > 1; --splits) {
    int resident = 0;
    const cudaError_t error = max_clusters(&resident, kernel, kThreads, splits, shared_limit());
    if (error != cudaSuccess) return error;
    if (resident >= num_clusters) break;
  }
  layout->splits = splits;
  layout->num_ctas = num_clusters * splits;
  return cudaSuccess;
}

template <typename T, int kRows>
cudaError_t launch_linear(void* out, const void* x, const void* weight, Work work, int in_features,
                          cudaStream_t stream) {
  Layout& layout = work.layout;
  const cudaError_t error = plan_layout(&layout, linear_hopper_kernel<T, kRows>, work, in_features);
  if (error != cudaSuccess) return error;
  const int partial_bytes = layout.splits > 1 ? kRows * kPartialPitch * 4 : 0;
  const int slice_bytes = layout.splits > 1 ? 0 : kConsumerWarps * kSliceFloats * 4;
  const int units_per_cta = ceil_div(layout.num_units, layout.num_ctas / layout.splits);
  const int useful = ceil_div(layout.num_chunks, layout.splits) * units_per_cta;
  work.num_slots = (shared_limit() - slice_bytes - 3 * 8 * kMaxSlots) / Ring<kRows>::kSlotBytes;
  work.num_slots = work.num_slots < useful ? work.num_slots : useful;
  work.num_slots = work.num_slots < kMaxSlots ? work.num_slots : kMaxSlots;
  const int ring_bytes = work.num_slots * Ring<kRows>::kSlotBytes;
  work.slices_at = ring_bytes > partial_bytes ? ring_bytes : partial_bytes;
  work.barriers_at = work.slices_at + slice_bytes;

  CUtensorMap x_map, weight_map;
  const int weight_rows = work.gated ? 2 * work.out_features : work.out_features;
  cudaError_t described = describe_matrix(&x_map, x, work.num_rows, in_features, kRows);
  if (described == cudaSuccess) {
    described = describe_matrix(&weight_map, weight, weight_rows, in_features, kGroupFeatures);
  }
  if (described != cudaSuccess) return described;
  return launch_clusters(linear_hopper_kernel<T, kRows>, layout.num_ctas, kThreads, layout.splits,
                         work.barriers_at + 3 * 8 * work.num_slots, stream, out, x_map, weight_map, work);
}

// Calls launch_linear with num_rows rounded up to one of these.
template <typename T, int kRows, int... kMore, typename... Arguments>
cudaError_t launch_rows(int num_rows, const Arguments&... arguments) {
  if constexpr (sizeof...(kMore) > 0) {
    if (num_rows > kRows) return launch_rows<T, kMore...>(num_rows, arguments...);
  }
  return launch_linear<T, kRows>(arguments...);
}

cudaError_t start(void* out, const void* x, const void* weight, int num_rows, int out_features, int in_features,
                  bool gated, Dtype dtype, Dtype out_dtype, cudaStream_t stream) {
  const bool supported = num_rows >= 1 && num_rows <= kMaxRows && out_features > 0 &&
                         out_features <= std::numeric_limits<int>::max() / 4 && in_features > 0 &&
                         in_features % 8 == 0 && (out_dtype == dtype || out_dtype == Dtype::kF32) &&
                         is_aligned16(out) && is_aligned16(x) && is_aligned16(weight);
  if (!supported) return cudaErrorInvalidValue;
  return dispatch_dtype(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    if (device_attribute(cudaDevAttrComputeCapabilityMajor, 0) != 9) return cudaErrorNotSupported;
    Work work{};
    work.num_rows = num_rows;
    work.out_features = out_features;
    work.gated = gated;
    work.float_out = out_dtype == Dtype::kF32;
    return launch_rows<T, 16, 32, 64, 96, 128, 192, 256>(num_rows, out, x, weight, work, in_features, stream);
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
