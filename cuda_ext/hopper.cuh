// What Hopper adds, for sm_90a only: copies of matrix tiles by the tensor memory accelerator (TMA) that report to
// barriers in shared memory, clusters of CTAs that read each other's shared memory, and matrix products of a warpgroup
// (wgmma). Facts from the PTX ISA 8.0 and newer, chapters "mbarrier", "cp.async.bulk.tensor" and "wgmma".
//
// A tile in shared memory is rows of 128 bytes (64 elements of K), its start a multiple of 1024 bytes; the copy stores
// the 16-byte piece p of row r at piece p ^ (r % 8) of that row ("128-byte swizzle"), and wgmma reads it so.
//
// Use these functions only under `if constexpr (kHopperCode)`. Shared memory is addressed by 32-bit numbers.
#pragma once

#include <cuda.h>

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

// Barrier 1 to 15 of the CTA, for some of its threads.
__device__ __forceinline__ void named_barrier(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// ---- Matrix products: d[64, n] += a[64, 16] * b[n, 16]^T, all tiles with K contiguous ----

// A tile for wgmma: its address in units of 16 bytes, 1024 bytes from 8 rows to the next 8, 128-byte swizzle. Adding
// 2 goes to the next 16 elements of K, adding 8 to the next row.
__host__ __device__ constexpr uint64_t tile_descriptor(uint32_t shared) {
  return static_cast<uint64_t>((shared & 0x3ffff) >> 4) | static_cast<uint64_t>(1024 >> 4) << 32 |
         static_cast<uint64_t>(1) << 62;
}

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Until at most `pending` of the committed groups are incomplete.
template <int pending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(pending) : "memory");
}

#define REGISTERS_8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define REGISTERS_16 REGISTERS_8 ", " "%8, %9, %10, %11, %12, %13, %14, %15"
#define REGISTERS_32 REGISTERS_16 ", " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define REGISTERS_64 REGISTERS_32 ", " \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, " \
  "%53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define REGISTERS_128 REGISTERS_64 ", " \
  "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83, %84, " \
  "%85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, %96, %97, %98, %99, %100, %101, %102, %103, %104, " \
  "%105, %106, %107, %108, %109, %110, %111, %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, " \
  "%122, %123, %124, %125, %126, %127"
#define REGISTERS_80 REGISTERS_64 ", " \
  "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79"
#define REGISTERS_96 REGISTERS_80 ", " \
  "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define REGISTERS_112 REGISTERS_96 ", " \
  "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111"
#define OPERANDS_4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define OPERANDS_8(i) OPERANDS_4(i), OPERANDS_4(i + 4)
#define OPERANDS_16(i) OPERANDS_8(i), OPERANDS_8(i + 8)
#define OPERANDS_32(i) OPERANDS_16(i), OPERANDS_16(i + 16)
#define OPERANDS_64(i) OPERANDS_32(i), OPERANDS_32(i + 32)
#define OPERANDS_80(i) OPERANDS_64(i), OPERANDS_16(i + 64)
#define OPERANDS_96(i) OPERANDS_64(i), OPERANDS_32(i + 64)
#define OPERANDS_112(i) OPERANDS_96(i), OPERANDS_16(i + 96)
#define OPERANDS_128(i) OPERANDS_64(i), OPERANDS_64(i + 64)
#define WGMMA(type, n, count, a_operand, b_operand, more_operand)                                              \
  asm volatile("{.reg .pred more; setp.ne.b32 more, " more_operand ", 0;\n"                                    \
               "wgmma.mma_async.sync.aligned.m64n" n "k16.f32." type "." type " {" REGISTERS_##count "}, "    \
               a_operand ", " b_operand ", more, 1, 1, 0, 0;}"                                                \
               : OPERANDS_##count(0)                                                                          \
               : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)))
#define WGMMA_OF_TYPE(n, count, a_operand, b_operand, more_operand)   \
  if constexpr (std::is_same_v<T, __half>) {                          \
    WGMMA("f16", n, count, a_operand, b_operand, more_operand);       \
  } else {                                                            \
    WGMMA("bf16", n, count, a_operand, b_operand, more_operand);      \
  }

// Thread t of the warpgroup holds of d, with w = t / 32, g = t % 32 / 4, q = t % 4: element 4 j + i is row
// 16 w + g + 8 (i / 2), column 8 j + 2 q + i % 2. n is a multiple of 16; one instruction takes up to 256 columns.
// If not `accumulate`, d = a * b^T.
template <typename T, int n>
__device__ __forceinline__ void wgmma(float* d, uint64_t a, uint64_t b, bool accumulate = true) {
  constexpr int part = n >= 256 ? 256 : n > 128 && n % 32 == 0 ? n : n >= 128 ? 128 : n >= 64 ? 64 : n >= 32 ? 32 : 16;
  if constexpr (part == 256) {
    WGMMA_OF_TYPE("256", 128, "%128", "%129", "%130")
  } else if constexpr (part == 224) {
    WGMMA_OF_TYPE("224", 112, "%112", "%113", "%114")
  } else if constexpr (part == 192) {
    WGMMA_OF_TYPE("192", 96, "%96", "%97", "%98")
  } else if constexpr (part == 160) {
    WGMMA_OF_TYPE("160", 80, "%80", "%81", "%82")
  } else if constexpr (part == 128) {
    WGMMA_OF_TYPE("128", 64, "%64", "%65", "%66")
  } else if constexpr (part == 64) {
    WGMMA_OF_TYPE("64", 32, "%32", "%33", "%34")
  } else if constexpr (part == 32) {
    WGMMA_OF_TYPE("32", 16, "%16", "%17", "%18")
  } else {
    WGMMA_OF_TYPE("16", 8, "%8", "%9", "%10")
  }
  if constexpr (n > part) wgmma<T, n - part>(d + part / 2, a, b + part * kTileRowBytes / 16, accumulate);
}

#undef REGISTERS_8
#undef REGISTERS_16
#undef REGISTERS_32
#undef REGISTERS_64
#undef REGISTERS_80
#undef REGISTERS_96
#undef REGISTERS_112
#undef REGISTERS_128
#undef OPERANDS_4
#undef OPERANDS_8
#undef OPERANDS_16
#undef OPERANDS_32
#undef OPERANDS_64
#undef OPERANDS_80
#undef OPERANDS_96
#undef OPERANDS_112
#undef OPERANDS_128
#undef WGMMA
#undef WGMMA_OF_TYPE

// Behind the wait for the last products and before d is read: keeps the compiler from reading it earlier.
template <int count>
__device__ __forceinline__ void settle(float (&d)[count]) {
#pragma unroll
  for (int i = 0; i < count; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// ---- Host ----

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
