// What kernels with one warp that copies for others share, on sm_90 and newer: barriers in shared memory that copies
// report to, the cache policy for what is read once, and registers moved from one warpgroup to another.
// Shared memory is addressed by 32-bit numbers (shared_address). Facts from the PTX ISA, chapters "mbarrier" and
// "setmaxnreg".
#pragma once

#include "common.cuh"

namespace tinyvllm {

// ---- Barriers (mbarrier). A phase ends when all arrivals and all announced bytes have come; parities 0, 1, 0, ... ----

__device__ __forceinline__ void init_barrier(uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// After init_barrier, before another thread, CTA or copy uses the barrier; a CTA or cluster barrier must follow.
__device__ __forceinline__ void publish_barriers() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void arrive_expecting(uint32_t barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// Whether the phase of this parity has ended; waits a little for it. On a fresh barrier parity 1 counts as ended.
__device__ __forceinline__ bool has_ended(uint32_t barrier, uint32_t parity) {
  uint32_t done;
  asm volatile(
      "{\n.reg .pred done;\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%1], %2;\n"
      "selp.u32 %0, 1, 0, done;\n}"
      : "=r"(done)
      : "r"(barrier), "r"(parity)
      : "memory");
  return done != 0;
}

// Returns once it has.
__device__ __forceinline__ void wait_barrier(uint32_t barrier, uint32_t parity) {
  while (!has_ended(barrier, parity)) {
  }
}

// A slot of a ring of tiles and the parity of its current use.
struct Turn {
  int slot = 0;
  uint32_t parity = 0;

  __device__ void advance(int slots) {
    if (++slot == slots) {
      slot = 0;
      parity ^= 1;
    }
  }
};

// For what is read once.
__device__ __forceinline__ uint64_t evict_first_policy() {
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

// ---- Registers per thread of the calling warpgroup, all of which calls it; a multiple of 8, the CTA has a cap at entry ----

template <int registers>
__device__ __forceinline__ void claim_registers() {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(registers));
#endif
}

template <int registers>
__device__ __forceinline__ void give_up_registers() {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(registers));
#endif
}

}  // namespace tinyvllm
