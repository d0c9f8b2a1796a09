// What a persistent kernel needs beyond mbarrier.cuh: bulk copies that report to barriers (sm_90), barriers of some of a
// CTA's warps, and a clock.
#pragma once

#include "mbarrier.cuh"

namespace tinyvllm {

// By the thread that initialised barriers or wrote shared memory, before copies use them.
__device__ __forceinline__ void fence_for_copies() {
  publish_barriers();
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// ---- Bulk copies from global to shared memory; addresses and size are multiples of 16 ----

__device__ __forceinline__ void bulk_copy(void* shared, const void* global, uint32_t bytes, uint64_t* barrier,
                                          uint64_t policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(
          shared_address(shared)),
      "l"(global), "r"(bytes), "r"(shared_address(barrier)), "l"(policy)
      : "memory");
}

// ---- Barrier `number` (1 to 15) of num_threads threads, whole warps, that all call this ----

__device__ __forceinline__ void named_barrier(int number, int num_threads) {
  asm volatile("barrier.sync %0, %1;" ::"r"(number), "r"(num_threads) : "memory");
}

// threadIdx.x anew: what depends on the known one is kept in registers through a long kernel.
__device__ __forceinline__ int thread_index() {
  int index;
  asm volatile("mov.u32 %0, %tid.x;" : "=r"(index));
  return index;
}

// Of this SM.
__device__ __forceinline__ int64_t cycles() {
  int64_t count;
  asm volatile("mov.u64 %0, %clock64;" : "=l"(count));
  return count;
}

__device__ __forceinline__ uint64_t nanoseconds() {
  uint64_t time;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(time));
  return time;
}

}  // namespace tinyvllm
