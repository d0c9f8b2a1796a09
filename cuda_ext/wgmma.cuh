// Matrix products of a warpgroup by wgmma, for sm_90a only, of tiles as hopper.cuh has them. Facts from the PTX ISA 8.0 and
// newer, chapter "wgmma".
#pragma once

#include "hopper.cuh"

namespace tinyvllm {

// ---- d[64, n] += a[64, 16] * b[n, 16]^T, all tiles with K contiguous ----

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
#define REGISTERS_48 REGISTERS_32 ", " \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
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
#define OPERANDS_48(i) OPERANDS_32(i), OPERANDS_16(i + 32)
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
  constexpr int part = n >= 256 ? 256 : n >= 32 ? n / 32 * 32 : 16;
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
  } else if constexpr (part == 96) {
    WGMMA_OF_TYPE("96", 48, "%48", "%49", "%50")
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
#undef REGISTERS_48
#undef REGISTERS_64
#undef REGISTERS_80
#undef REGISTERS_96
#undef REGISTERS_112
#undef REGISTERS_128
#undef OPERANDS_4
#undef OPERANDS_8
#undef OPERANDS_16
#undef OPERANDS_32
#undef OPERANDS_48
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

}  // namespace tinyvllm
