// What Hopper adds, for sm_90a only: copies of matrix tiles by the tensor memory accelerator (TMA) that report to
// barriers in shared memory, and clusters of CTAs that read each other's shared memory; wgmma.cuh has the products of a
// warpgroup. Facts from the PTX ISA 8.0 and newer, chapters "mbarrier" and "cp.async.bulk.tensor".
//
// A tile in shared memory is rows of 128 bytes (64 elements of K), its start a multiple of 1024 bytes; the copy stores
// the 16-byte piece p of row r at piece p ^ (r % 8) of that row ("128-byte swizzle"), and wgmma reads it so.
//
// Use these functions only under `if constexpr (kHopperCode)`. Shared memory is addressed by 32-bit numbers.
#pragma once

#include <cuda.h>

#include <limits>

#include "mbarrier.cuh"

namespace tinyvllm {

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
constexpr bool kHopperCode = true;
#else
constexpr bool kHopperCode = false;
#endif

constexpr int kTileColumns = 64;      // elements of K
constexpr int kTileRowBytes = 128;
constexpr int kTileAlignment = 1024;
constexpr int kWarpgroup = 128;       // threads

// ---- Copies of tiles from a matrix in global memory, described by a map (a __grid_constant__ parameter) ----

// What this thread has seen of global memory is there for its tile copies too.
__device__ __forceinline__ void fence_tile_copies() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

// The tile that starts at (row, column); what lies outside of the matrix is zero. All bytes count at the barrier.
__device__ __forceinline__ void copy_tile(uint32_t shared, const CUtensorMap& map, int row, int column,
                                          uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(
          shared),
      "l"(&map), "r"(column), "r"(row), "r"(barrier)
      : "memory");
}

__device__ __forceinline__ void copy_tile(uint32_t shared, const CUtensorMap& map, int row, int column,
                                          uint32_t barrier, uint64_t cache_policy) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint [%0], "
      "[%1, {%2, %3}], [%4], %5;" ::"r"(shared),
      "l"(&map), "r"(column), "r"(row), "r"(barrier), "l"(cache_policy)
      : "memory");
}

// The same for every CTA of the cluster whose rank is a bit of `ranks`: to this address and barrier in each of them.
__device__ __forceinline__ void copy_tile_to(uint16_t ranks, uint32_t shared, const CUtensorMap& map, int row,
                                             int column, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster [%0], "
      "[%1, {%2, %3}], [%4], %5;" ::"r"(shared),
      "l"(&map), "r"(column), "r"(row), "r"(barrier), "h"(ranks)
      : "memory");
}

// A tile from a map by describe_weights. If paired, `group` counts the pairs of 8 rows and row is 0, else group is 0.
__device__ __forceinline__ void copy_weight_tile(uint32_t shared, const CUtensorMap& map, int row, int group,
                                                 int column, uint32_t barrier, uint64_t cache_policy) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint [%0], "
      "[%1, {%2, %3, %4, %5}], [%6], %7;" ::"r"(shared),
      "l"(&map), "r"(column), "r"(row), "r"(0), "r"(group), "r"(barrier), "l"(cache_policy)
      : "memory");
}

// The same for several CTAs, as by copy_tile_to.
__device__ __forceinline__ void copy_weight_tile_to(uint16_t ranks, uint32_t shared, const CUtensorMap& map, int row,
                                                    int group, int column, uint32_t barrier, uint64_t cache_policy) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster"
      ".L2::cache_hint [%0], [%1, {%2, %3, %4, %5}], [%6], %7, %8;" ::"r"(shared),
      "l"(&map), "r"(column), "r"(row), "r"(0), "r"(group), "r"(barrier), "h"(ranks), "l"(cache_policy)
      : "memory");
}

// From shared memory to the matrix, but for what lies outside of it. The thread that starts stores also waits for them.
__device__ __forceinline__ void store_tile(const CUtensorMap& map, int row, int column, uint32_t shared) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%1, %2}], [%3];" ::"l"(&map),
               "r"(column), "r"(row), "r"(shared)
               : "memory");
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// Until shared memory has been read by all but the newest `pending` stores.
template <int pending>
__device__ __forceinline__ void wait_for_stores() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(pending) : "memory");
}

// What this thread has written to shared memory is seen by wgmma and tile copies behind the next barrier.
__device__ __forceinline__ void publish_to_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Four 8x8 matrices of 16-bit elements, as load_matrices() loads them.
__device__ __forceinline__ void store_matrices(uint32_t shared_row, const uint32_t (&words)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared_row), "r"(words[0]),
               "r"(words[1]), "r"(words[2]), "r"(words[3])
               : "memory");
}

// Two 8x8 matrices of 16-bit elements, transposed: lane l gives elements (l / 4, 2 * (l % 4)) and the next one of each,
// and they become column l / 4 of the rows whose addresses lanes 0 to 7 and 8 to 15 give.
__device__ __forceinline__ void store_matrices_transposed(uint32_t shared_row, uint32_t first, uint32_t second) {
  asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(shared_row), "r"(first),
               "r"(second)
               : "memory");
}

// True in one lane of a warp that is all here. (The compiler knows that, as it would not of `lane == 0`: the operands of
// a tile copy lie in registers of the warp, and it would loop over the lanes.)
__device__ __forceinline__ bool elected() {
  uint32_t result;
  asm volatile(
      "{.reg .pred one;\n"
      "elect.sync _|one, 0xffffffff;\n"
      "selp.u32 %0, 1, 0, one;}"
      : "=r"(result));
  return result != 0;
}

// ---- Clusters. Every thread of every CTA of the cluster arrives, and later waits, the same number of times ----
//
// No arrival here is a release: one that reaches beyond the CTA is a MEMBAR, which waits for all bulk copies in flight. At
// each slot of a ring it took half of the bandwidth. So what a CTA shows others goes by store16_async or by tile copies,
// whose barriers tell of it; publish_barriers() is for those barriers.

__device__ __forceinline__ void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}

__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

__device__ __forceinline__ void cluster_barrier() {
  cluster_arrive();
  cluster_wait();
}

// What is at this address of the calling CTA, in the CTA of this rank.
__device__ __forceinline__ uint32_t address_in(uint32_t shared, int rank) {
  uint32_t remote;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(shared), "r"(rank));
  return remote;
}

// At a barrier of any CTA of the cluster (address_in), which must not have ended.
__device__ __forceinline__ void arrive_at(uint32_t barrier) {
  asm volatile("mbarrier.arrive.relaxed.cluster.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Stores 16 bytes in another CTA, and reports them to a barrier there.
__device__ __forceinline__ void store16_async(uint32_t address, float4 v, uint32_t barrier) {
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(address),
      "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w), "r"(barrier)
      : "memory");
}

// The sum of `count` values that lie `stride` apart, in their order: what CTAs that split K have stored here. `parts` goes
// behind them.
__device__ __forceinline__ float4 sum_of_parts(const float4*& parts, int count, int stride) {
  float4 sum = *parts;
  parts += stride;
  for (int i = 1; i < count; ++i, parts += stride) {
    const float4 more = *parts;
    sum.x += more.x;
    sum.y += more.y;
    sum.z += more.z;
    sum.w += more.w;
  }
  return sum;
}

// Barrier 1 to 15 of the CTA, for some of its threads.
__device__ __forceinline__ void named_barrier(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// ---- Host ----

// Whether tile copies can read rows of such operands.
inline bool can_copy_tiles(const void* x, const void* weight, int out_features, int in_features) {
  return out_features > 0 && out_features <= std::numeric_limits<int>::max() / 4 && in_features > 0 &&
         in_features % 8 == 0 && is_aligned16(x) && is_aligned16(weight);
}

// dispatch_dtype where there are such cards' instructions.
template <typename Function>
cudaError_t dispatch_hopper(Dtype dtype, const Function& function) {
  return dispatch_dtype(dtype, [&](auto type) {
    if (device_attribute(cudaDevAttrComputeCapabilityMajor, 0) != 9) return cudaErrorNotSupported;
    return function(type);
  });
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

// Describes a tensor of 16-bit elements, its innermost dimension first, for copies of boxes 64 elements wide; strides are
// in bytes, of all dimensions but the innermost.
template <int kDims>
cudaError_t describe_tensor(CUtensorMap* map, const void* tensor, const cuuint64_t (&sizes)[kDims],
                            const cuuint64_t (&strides)[kDims - 1], const cuuint32_t (&box)[kDims]) {
  using Encode = decltype(&cuTensorMapEncodeTiled);
  void* encode = nullptr;
  cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
  const cudaError_t error =
      cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &encode, 12000, cudaEnableDefault, &found);
  if (error != cudaSuccess) return error;
  if (found != cudaDriverEntryPointSuccess) return cudaErrorNotSupported;
  cuuint32_t steps[kDims];
  for (cuuint32_t& step : steps) step = 1;
  const CUresult result = reinterpret_cast<Encode>(encode)(
      map, CU_TENSOR_MAP_DATA_TYPE_UINT16, kDims, const_cast<void*>(tensor), sizes, strides, box, steps,
      CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
      CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

// A row-major matrix, for copies of tiles of box_rows (at most 256) x 64 elements.
inline cudaError_t describe_matrix(CUtensorMap* map, const void* matrix, int rows, int columns, int box_rows) {
  const cuuint64_t width = static_cast<cuuint64_t>(columns);
  return describe_tensor<2>(map, matrix, {width, static_cast<cuuint64_t>(rows)}, {2 * width},
                            {kTileColumns, static_cast<cuuint32_t>(box_rows)});
}

// Weights [rows, columns] for copy_weight_tile. If paired, rows is a multiple of 16, and a tile takes turns: 8 rows of the
// first half (a group), the 8 rows of the second half that go with them, the next group, ...
inline cudaError_t describe_weights(CUtensorMap* map, const void* matrix, int rows, int columns, bool paired,
                                    int box_rows) {
  const cuuint64_t width = static_cast<cuuint64_t>(columns);
  const cuuint64_t count = static_cast<cuuint64_t>(rows);
  const cuuint32_t box = static_cast<cuuint32_t>(box_rows);
  if (!paired) {
    return describe_tensor<4>(map, matrix, {width, count, 1, 1}, {2 * width, 2 * width, 2 * width},
                              {kTileColumns, box, 1, 1});
  }
  return describe_tensor<4>(map, matrix, {width, 8, 2, count / 16}, {2 * width, count * width, 16 * width},
                            {kTileColumns, 8, 2, box / 16});
}

}  // namespace tinyvllm
