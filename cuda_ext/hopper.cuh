// What kernels for sm_90a share: mbarriers, tensor copies (TMA), warpgroup matrix products (wgmma), register budgets.
// Facts from the PTX ISA, "Asynchronous warpgroup-level matrix instructions" and "Asynchronous copy". The instructions
// assemble only for sm_90a: a kernel that uses them has its body under `#ifdef __CUDA_ARCH_FEAT_SM90_ALL`.
//
// Tiles. A panel is any number of rows of 64 16-bit elements (128 bytes) that starts at a multiple of 1024 bytes;
// 16-byte chunk c of row r lies at chunk c ^ (r % 8). So a tensor copy writes it (128-byte swizzle), and so wgmma reads
// it. Rows that are longer than 64 elements are several panels.
#pragma once

#include <cuda.h>

#include "common.cuh"

namespace tinyvllm {

constexpr int kWarpgroup = 128;   // threads
constexpr int kPanelColumns = 64;  // elements of a panel's row

// The offset, in elements, of 16-byte chunk `chunk` of row `row` in a panel.
__device__ __forceinline__ int panel_offset(int row, int chunk) {
  return row * kPanelColumns + (chunk ^ (row & 7)) * 8;
}

// ---- Barriers ----

// One thread prepares a barrier whose phase ends after `arrivals` arrivals and all bytes expected with them; then
// publish_barriers(), then __syncthreads().
__device__ __forceinline__ void init_barrier(uint64_t* barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
}

__device__ __forceinline__ void publish_barriers() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void arrive(uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}

// Arrives, and makes the phase wait for that many bytes of tensor copies too.
__device__ __forceinline__ void arrive_expecting(uint64_t* barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
               : "memory");
}

// Waits for the end of the phase of this parity: 0 for the first, then 1, 0, ... Of a fresh barrier, 1 is over.
__device__ __forceinline__ void wait_barrier(uint64_t* barrier, int parity) {
  uint32_t done = 0;
  while (!done) {
    asm volatile(
        "{.reg .pred done;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%1], %2;\n"
        "selp.u32 %0, 1, 0, done;}"
        : "=r"(done)
        : "r"(shared_address(barrier)), "r"(parity)
        : "memory");
  }
}

// Named barrier `id`, 1 to 15: waits until num_threads have called this or signal_threads().
__device__ __forceinline__ void sync_threads(int id, int num_threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(num_threads) : "memory");
}

__device__ __forceinline__ void signal_threads(int id, int num_threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(num_threads) : "memory");
}

// What this thread has written to shared memory is seen by wgmma and tensor copies behind the next barrier.
__device__ __forceinline__ void publish_to_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// All threads of a warpgroup set the number of registers they own, a multiple of 8.
template <int registers>
__device__ __forceinline__ void give_up_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(registers));
}

template <int registers>
__device__ __forceinline__ void claim_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(registers));
}

// ---- Tensor copies ----

__device__ __forceinline__ void prefetch_map(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// True in one lane of a warp that is all here. (The compiler knows that, as it would not of `lane == 0`: a tensor copy's
// operands lie in registers of the warp, and it would loop over the lanes.)
__device__ __forceinline__ bool elected() {
  uint32_t result;
  asm volatile(
      "{.reg .pred one;\n"
      "elect.sync _|one, 0xffffffff;\n"
      "selp.u32 %0, 1, 0, one;}"
      : "=r"(result));
  return result != 0;
}

// One thread starts the copy of the map's box at element (x, y, z) into a panel; the barrier is told of its bytes.
__device__ __forceinline__ void copy_box(void* panel, const CUtensorMap* map, int x, int y, int z, uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%2, %3, %4}], [%5];" ::"r"(shared_address(panel)),
      "l"(map), "r"(x), "r"(y), "r"(z), "r"(shared_address(barrier))
      : "memory");
}

// Host: the map of a contiguous array [depth, rows, columns] of 16-bit elements, in boxes of 64 columns and box_rows rows.
inline cudaError_t make_map(CUtensorMap* map, const void* array, uint64_t depth, uint64_t rows, uint64_t columns,
                            uint32_t box_rows) {
  using Encode = decltype(&cuTensorMapEncodeTiled);
  static const Encode encode = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult status{};
    const cudaError_t error =
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &status);
    return error == cudaSuccess && status == cudaDriverEntryPointSuccess ? reinterpret_cast<Encode>(function) : nullptr;
  }();
  if (encode == nullptr) return cudaErrorNotSupported;
  const cuuint64_t sizes[] = {columns, rows, depth};
  const cuuint64_t strides[] = {columns * 2, rows * columns * 2};  // bytes, of all but the first dimension
  const cuuint32_t box[] = {kPanelColumns, box_rows, 1};
  const cuuint32_t steps[] = {1, 1, 1};
  const CUresult result = encode(map, CU_TENSOR_MAP_DATA_TYPE_UINT16, 3, const_cast<void*>(array), sizes, strides, box,
                                 steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                                 CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

// ---- Matrix products of a warpgroup ----
//
// d[64, n] += a[64, 16] * b[16, n], asynchronous: after begin_products() several of them, then commit_products(). Until
// wait_products() says that they are done, their registers are left alone. Row 16 w + lane / 4 of d belongs to warp w of
// the warpgroup: the lane has columns 2 (lane % 4) + {0, 1} + 8 j in d[4 j] and d[4 j + 1], and those of the row 8 below
// in d[4 j + 2] and d[4 j + 3]. In registers, a is like two such groups of 8 columns, packed in pairs: a[0] of the row,
// a[1] of the row 8 below, a[2] and a[3] the same of the next 8 columns.

// Where wgmma finds the first 16 columns of a panel, as `a` or `b` with k along its rows; the next 16 are at + 2. Or the
// first 16 rows of a panel, as `b` with n along its rows; the next 16 are at + 128, and the columns from 64 on lie
// panel_bytes further.
__device__ __forceinline__ uint64_t operand(const void* panel, int panel_bytes = 16) {
  constexpr uint64_t eight_rows = 1024, swizzle_128 = 1;
  return (shared_address(panel) & 0x3ffff) >> 4 | static_cast<uint64_t>(panel_bytes >> 4) << 16 |
         (eight_rows >> 4) << 32 | swizzle_128 << 62;
}

__device__ __forceinline__ void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void commit_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Waits until at most `pending` of the committed groups are not done.
template <int pending>
__device__ __forceinline__ void wait_products() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(pending) : "memory");
}

// Keeps the compiler from moving uses of registers that products read or write across this point.
template <int count>
__device__ __forceinline__ void pin(float (&registers)[count]) {
#pragma unroll
  for (int i = 0; i < count; ++i) asm volatile("" : "+f"(registers[i])::"memory");
}

template <int count>
__device__ __forceinline__ void pin(uint32_t (&registers)[count]) {
#pragma unroll
  for (int i = 0; i < count; ++i) asm volatile("" : "+r"(registers[i])::"memory");
}

template <typename T>
struct WgmmaType;
template <>
struct WgmmaType<__nv_bfloat16> {
  static constexpr char name[] = ".bf16";
};
template <>
struct WgmmaType<__half> {
  static constexpr char name[] = ".f16";
};

// a and b in shared memory, k along the rows of both; `accumulate` false: d = a * b.
template <typename T>
__device__ __forceinline__ void multiply(float (&d)[64], uint64_t a, uint64_t b, bool accumulate) {
  asm volatile(
      "{.reg .pred more; setp.ne.b32 more, %66, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32%67%67 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, "
      "%21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, "
      "%40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, "
      "%59, %60, %61, %62, %63}, "
      "%64, %65, more, 1, 1, 0, 0;}"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]),
        "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]),
        "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]),
        "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), "+f"(d[32]),
        "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]),
        "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), "+f"(d[48]),
        "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]), "+f"(d[56]),
        "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
      : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)), "C"(WgmmaType<T>::name));
}

// a in registers, b in shared memory with n along its rows.
template <typename T>
__device__ __forceinline__ void multiply(float (&d)[32], const uint32_t* a, uint64_t b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n64k16.f32%37%37 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, "
      "%21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
      "{%32, %33, %34, %35}, %36, 1, 1, 1, 1;"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]),
        "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]),
        "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]),
        "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "C"(WgmmaType<T>::name));
}

template <typename T>
__device__ __forceinline__ void multiply(float (&d)[64], const uint32_t* a, uint64_t b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n128k16.f32%69%69 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, "
      "%21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, "
      "%40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, "
      "%59, %60, %61, %62, %63}, "
      "{%64, %65, %66, %67}, %68, 1, 1, 1, 1;"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]),
        "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]),
        "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]),
        "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), "+f"(d[32]),
        "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]),
        "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), "+f"(d[48]),
        "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]), "+f"(d[56]),
        "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "C"(WgmmaType<T>::name));
}

}  // namespace tinyvllm
