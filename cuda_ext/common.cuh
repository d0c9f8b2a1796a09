// What several kernels share: 16-byte accesses, conversions, reductions, tensor cores, asynchronous copies,
// programmatic dependent launch, and host-side dispatch. Everything here builds for sm_80 and newer.
//
// Rules for every kernel that goes through launch():
//   * Every thread calls wait_for_previous_kernel() before it first reads what an earlier kernel wrote, before it first
//     writes global memory, and in any case before it exits (a grid that never waits could finish before its
//     predecessor, and its successor would then start too early). Only weights may be read before that call
//     (attention_decode reads more; launch.h says what makes that right).
//   * allow_next_kernel() may be called at any point, even before the wait: it only permits the next grid to start and
//     to prefetch its weights; that grid's own wait still waits for the end of this one.
//   * What an earlier kernel wrote is read with plain loads (load16), never with load16_streaming, __ldg or through
//     `const __restrict__`: the non-coherent path assumes data that stays constant while the kernel runs.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "launch.h"

namespace tinyvllm {

constexpr int kWarpSize = 32;
constexpr unsigned kAllLanes = 0xffffffffu;

template <typename Integer>
__host__ __device__ constexpr Integer ceil_div(Integer a, Integer b) {
  return (a + b - 1) / b;
}

// ---- Programmatic dependent launch (no-ops before sm_90) ----

__device__ __forceinline__ void wait_for_previous_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

__device__ __forceinline__ void allow_next_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// ---- 16-byte and 4-byte accesses; the address is a multiple of their size ----

__device__ __forceinline__ uint4 load16(const void* address) { return *static_cast<const uint4*>(address); }

__device__ __forceinline__ void store16(void* address, uint4 value) { *static_cast<uint4*>(address) = value; }

__device__ __forceinline__ uint32_t load4(const void* address) { return *static_cast<const uint32_t*>(address); }

__device__ __forceinline__ void store4(void* address, uint32_t value) { *static_cast<uint32_t*>(address) = value; }

// For weights, which are read once per kernel: does not displace anything in L1.
__device__ __forceinline__ uint4 load16_streaming(const void* address) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(address));
  return v;
}

// ---- Conversions; T is __nv_bfloat16, __half or float ----

template <typename T>
__device__ __forceinline__ float to_float(T value) {
  if constexpr (std::is_same_v<T, float>) {
    return value;
  } else if constexpr (std::is_same_v<T, __half>) {
    return __half2float(value);
  } else {
    return __bfloat162float(value);
  }
}

// Rounds to nearest even.
template <typename T>
__device__ __forceinline__ T from_float(float value) {
  if constexpr (std::is_same_v<T, float>) {
    return value;
  } else if constexpr (std::is_same_v<T, __half>) {
    return __float2half_rn(value);
  } else {
    return __float2bfloat16_rn(value);
  }
}

// The two elements of a 32-bit word, the lower address first.
template <typename T>
__device__ __forceinline__ float2 unpack2(uint32_t word) {
  if constexpr (std::is_same_v<T, __half>) {
    return __half22float2(*reinterpret_cast<const __half2*>(&word));
  } else {
    static_assert(std::is_same_v<T, __nv_bfloat16>);
    return make_float2(__uint_as_float(word << 16), __uint_as_float(word & 0xffff0000u));
  }
}

template <typename T>
__device__ __forceinline__ uint32_t pack2(float first, float second) {
  if constexpr (std::is_same_v<T, __half>) {
    const __half2 pair = __floats2half2_rn(first, second);
    return *reinterpret_cast<const uint32_t*>(&pair);
  } else {
    static_assert(std::is_same_v<T, __nv_bfloat16>);
    const __nv_bfloat162 pair = __floats2bfloat162_rn(first, second);
    return *reinterpret_cast<const uint32_t*>(&pair);
  }
}

// Of pairs.
template <typename T>
__device__ __forceinline__ uint32_t multiply2(uint32_t a, uint32_t b) {
  using Pair = std::conditional_t<std::is_same_v<T, __half>, __half2, __nv_bfloat162>;
  const Pair product = __hmul2(*reinterpret_cast<const Pair*>(&a), *reinterpret_cast<const Pair*>(&b));
  return *reinterpret_cast<const uint32_t*>(&product);
}

template <typename T>
__device__ __forceinline__ void unpack8(uint4 vector, float (&values)[8]) {
  const uint32_t words[4] = {vector.x, vector.y, vector.z, vector.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 pair = unpack2<T>(words[i]);
    values[2 * i] = pair.x;
    values[2 * i + 1] = pair.y;
  }
}

template <typename T>
__device__ __forceinline__ uint4 pack8(const float (&values)[8]) {
  return make_uint4(pack2<T>(values[0], values[1]), pack2<T>(values[2], values[3]), pack2<T>(values[4], values[5]),
                    pack2<T>(values[6], values[7]));
}

// 1 / (1 + 2^exponent), in few instructions: what is not a normal number counts as 0.
__device__ __forceinline__ float inverse_of_power(float exponent) {
  float power, inverse;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(exponent));
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(1.0f + power));
  return inverse;
}

constexpr float kSiluExponent = -1.442695041f;  // -1 / ln 2

// value / (1 + exp(-value)).
__device__ __forceinline__ float silu(float value) { return value * inverse_of_power(value * kSiluExponent); }

// ---- Reductions; the order is fixed, and every participating thread gets the result ----

// Over each aligned group of `width` lanes. All lanes of the warp take part.
template <int width = kWarpSize>
__device__ __forceinline__ float warp_sum(float value) {
#pragma unroll
  for (int offset = width / 2; offset > 0; offset /= 2) value += __shfl_xor_sync(kAllLanes, value, offset);
  return value;
}

template <int width = kWarpSize>
__device__ __forceinline__ float warp_max(float value) {
#pragma unroll
  for (int offset = width / 2; offset > 0; offset /= 2) value = fmaxf(value, __shfl_xor_sync(kAllLanes, value, offset));
  return value;
}

// Over the CTA of num_threads threads, all of which call it. May be called repeatedly.
template <int num_threads>
__device__ __forceinline__ float cta_sum(float value) {
  constexpr int num_warps = num_threads / kWarpSize;
  static_assert(num_threads % kWarpSize == 0 && num_warps <= kWarpSize);
  __shared__ float partial[num_warps];
  value = warp_sum(value);
  __syncthreads();  // the readers of the previous call are done
  if (threadIdx.x % kWarpSize == 0) partial[threadIdx.x / kWarpSize] = value;
  __syncthreads();
  float total = partial[0];
#pragma unroll
  for (int i = 1; i < num_warps; ++i) total += partial[i];
  return total;
}

// ---- Shared memory, asynchronous copies, tensor cores (all sm_80) ----

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// Copies 16 bytes from global to shared memory past L1; `valid` false writes zeros and reads nothing.
__device__ __forceinline__ void copy16_async(void* shared, const void* global, bool valid = true) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(shared)), "l"(global),
               "r"(valid ? 16 : 0)
               : "memory");
}

// Closes the group of copies issued so far by this thread.
__device__ __forceinline__ void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most `pending` of this thread's newest groups are incomplete; other threads need a barrier after it.
template <int pending>
__device__ __forceinline__ void copy_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory");
}

// Four 8x8 matrices of 16-bit elements; lane l gives the address of row l % 8 of matrix l / 8. Lane l receives elements
// (l / 4, 2 * (l % 4)) and the next one of each matrix.
__device__ __forceinline__ void load_matrices(uint32_t (&out)[4], const void* shared_row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
               : "r"(shared_address(shared_row))
               : "memory");
}

// The same with every matrix transposed.
__device__ __forceinline__ void load_matrices_transposed(uint32_t (&out)[4], const void* shared_row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
               : "r"(shared_address(shared_row))
               : "memory");
}

// c[16, 8] += a[16, 16] * b[16, 8], fp32 accumulation. With g = lane / 4 and q = 2 * (lane % 4):
//   a[0] = rows g, columns q, q+1; a[1] = row g+8; a[2] = row g, columns q+8, q+9; a[3] = row g+8, the same columns;
//   b[0] = rows q, q+1 of column g; b[1] = rows q+8, q+9; c[0], c[1] = row g, columns q, q+1; c[2], c[3] = row g+8.
template <typename T>
__device__ __forceinline__ void mma_16x8x16(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  if constexpr (std::is_same_v<T, __half>) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  } else {
    static_assert(std::is_same_v<T, __nv_bfloat16>);
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  }
}

// ---- Host side: dispatch and launch ----

template <typename T>
struct Type {
  using type = T;
};

// Calls function(Type<T>{}) for a 16-bit dtype: [&](auto t) { using T = typename decltype(t)::type; ... }.
template <typename Function>
cudaError_t dispatch_dtype(Dtype dtype, Function&& function) {
  switch (dtype) {
    case Dtype::kBF16:
      return function(Type<__nv_bfloat16>{});
    case Dtype::kF16:
      return function(Type<__half>{});
    default:
      return cudaErrorInvalidValue;
  }
}

// Calls function(std::integral_constant<int, v>{}) for the v of `choices` that equals value; [&](auto v) { f<v()>... }.
template <int... choices, typename Function>
cudaError_t dispatch_int(int value, Function&& function) {
  cudaError_t result = cudaErrorInvalidValue;
  (void)((value == choices ? (result = function(std::integral_constant<int, choices>{}), true) : false) || ...);
  return result;
}

template <typename Function>
cudaError_t dispatch_head_dim(int head_dim, Function&& function) {
  return dispatch_int<64, 128>(head_dim, function);
}

inline bool is_aligned16(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % 16 == 0; }

// An attribute of the current device, for example cudaDevAttrMultiProcessorCount; `fallback` without a device.
inline int device_attribute(cudaDeviceAttr attribute, int fallback) {
  int device = 0;
  int value = fallback;
  if (cudaGetDevice(&device) != cudaSuccess || cudaDeviceGetAttribute(&value, attribute, device) != cudaSuccess) {
    (void)cudaGetLastError();  // the launch itself reports what is wrong
    return fallback;
  }
  return value;
}

inline bool is_captured(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  return cudaStreamIsCapturing(stream, &status) == cudaSuccess && status == cudaStreamCaptureStatusActive;
}

// Launches kernel(arguments...) in clusters of cluster_size CTAs (1 before sm_90). In a captured graph on sm_90 and newer
// the kernel may start before its predecessor has ended (an eager launch may not: the predecessor could be the one that
// writes the weights), and every kernel asks for the same split of L1 and shared memory, because an SM must be idle to
// change it.
template <typename... Parameters, typename... Arguments>
cudaError_t launch_clusters(void (*kernel)(Parameters...), dim3 grid, dim3 cta, int cluster_size, size_t shared_bytes,
                            cudaStream_t stream, const Arguments&... arguments) {
  if (shared_bytes > 32 * 1024) {  // more than 48 KB must be asked for, and a kernel's static memory counts as well
    const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                                   static_cast<int>(shared_bytes));
    if (error != cudaSuccess) return error;
  }
  cudaLaunchAttribute attributes[3] = {};
  unsigned count = 0;
  if (cluster_size > 1) {
    attributes[count].id = cudaLaunchAttributeClusterDimension;
    attributes[count++].val.clusterDim = {static_cast<unsigned>(cluster_size), 1, 1};
  }
  if (is_captured(stream) && device_attribute(cudaDevAttrComputeCapabilityMajor, 0) >= 9) {
    attributes[count].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[count++].val.programmaticStreamSerializationAllowed = 1;
    attributes[count].id = cudaLaunchAttributePreferredSharedMemoryCarveout;
    attributes[count++].val.sharedMemCarveout = cudaSharedmemCarveoutMaxShared;
  }
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = cta;
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = count;
  return cudaLaunchKernelEx(&config, kernel, static_cast<Parameters>(arguments)...);
}

template <typename... Parameters, typename... Arguments>
cudaError_t launch(void (*kernel)(Parameters...), dim3 grid, dim3 cta, size_t shared_bytes, cudaStream_t stream,
                   const Arguments&... arguments) {
  return launch_clusters(kernel, grid, cta, 1, shared_bytes, stream, arguments...);
}

}  // namespace tinyvllm
