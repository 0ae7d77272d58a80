// Thin wrappers of single PTX instructions; no algorithm here.
#pragma once
#include "params.cuh"

__device__ __forceinline__ float ex2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float half_bits_to_float(u32 bits) {
  float y;
  asm("{ .reg .b16 h; cvt.u16.u32 h, %1; cvt.f32.f16 %0, h; }" : "=f"(y) : "r"(bits));
  return y;
}

// lo in the low half of the word, as memory order wants it
__device__ __forceinline__ u32 pack_bf16x2(float lo, float hi) {
  u32 y;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(hi), "f"(lo));
  return y;
}

__device__ __forceinline__ u32 pack_f16x2(float lo, float hi) {
  u32 y;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(hi), "f"(lo));
  return y;
}

// Both halves at once; NaN loses against a number, as in fmaxf.
__device__ __forceinline__ u32 max_bf16x2(u32 a, u32 b) {
  u32 y;
  asm("max.bf16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
  return y;
}

__device__ __forceinline__ u32 max_f16x2(u32 a, u32 b) {
  u32 y;
  asm("max.f16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
  return y;
}

// The largest of a warp's numbers, none of which is NaN: as integers of the same order, in one instruction.
__device__ __forceinline__ float reduce_max(float x) {
  const auto ordered = [](i32 bits) { return bits ^ (bits >> 31 & 0x7fffffff); };  // its own inverse
  return __int_as_float(ordered(__reduce_max_sync(~0u, ordered(__float_as_int(x)))));
}

// x, of which the assembler does not know that it is the same for all threads. What it knows to be so it takes to a
// uniform register, and for a loaded value it waits on the way there.
__device__ __forceinline__ u32 not_uniform(u32 x) {
  u32 lane;
  asm("mov.u32 %0, %%laneid;" : "=r"(lane));
  return x + (lane >> 5);
}

// blockIdx.x, asked for anew: what is computed from it is not the same to the compiler as what was computed before, and
// holds no registers in between.
__device__ __forceinline__ u32 block_index_again() {
  u32 i;
  asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(i));
  return i;
}

__device__ __forceinline__ u32 shared_address(const void* p) {
  return static_cast<u32>(__cvta_generic_to_shared(p));
}

// 16 bytes from and to shared memory.
__device__ __forceinline__ void load_shared(u32 address, u32 (&w)[4]) {
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3])
               : "r"(address)
               : "memory");
}

__device__ __forceinline__ void store_shared(u32 address, const u32 (&w)[4]) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(w[0]), "r"(w[1]), "r"(w[2]), "r"(w[3])
               : "memory");
}

// 16 bytes from global to shared memory, in the background; both addresses are multiples of 16. Through L1 (.ca): it
// measured up to 8 % faster than past it.
__device__ __forceinline__ void copy_async(u32 dst, const void* src) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 16;" ::"r"(dst), "l"(__cvta_generic_to_global(src)) : "memory");
}

// The same past L1 (.cg), 128 bytes at once from memory to L2: 1 to 4 % faster where a row comes whole, slower in a ring.
__device__ __forceinline__ void copy_async_past_l1(u32 dst, const void* src) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(dst), "l"(__cvta_generic_to_global(src))
               : "memory");
}

// Makes a group of this thread's copies since the last group.
__device__ __forceinline__ void copy_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most kPending of this thread's groups, the latest, are under way.
template <int kPending>
__device__ __forceinline__ void copy_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

#if __CUDA_ARCH__ >= 900

__device__ __forceinline__ void mbarrier_init(u64* bar, u32 count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(bar)), "r"(count)
               : "memory");
}

// Makes initialised barriers visible to the copy engine (the async proxy).
__device__ __forceinline__ void fence_mbarrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void mbarrier_expect_tx(u64* bar, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(bar)),
               "r"(bytes)
               : "memory");
}

__device__ __forceinline__ void mbarrier_arrive(u64* bar) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(bar)) : "memory");
}

__device__ __forceinline__ void mbarrier_wait(u64* bar, u32 parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n"
      "}" ::"r"(shared_address(bar)),
      "r"(parity)
      : "memory");
}

// As mbarrier_wait, where other blocks of the cluster wrote what is waited for.
__device__ __forceinline__ void mbarrier_wait_cluster(u64* bar, u32 parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n"
      "}" ::"r"(shared_address(bar)),
      "r"(parity)
      : "memory");
}

// Global to shared; address and size are multiples of 16 bytes.
__device__ __forceinline__ void bulk_copy(void* dst, const void* src, u32 bytes, u64* bar) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
          shared_address(dst)),
      "l"(__cvta_generic_to_global(src)), "r"(bytes), "r"(shared_address(bar))
      : "memory");
}

__device__ __forceinline__ u32 cluster_rank() {
  u32 r;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(r));
  return r;
}

// Releases nothing: what others wait for is barriers, which fence_mbarrier_init has released already.
__device__ __forceinline__ void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}

__device__ __forceinline__ void cluster_wait() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// The address, in the cluster's shared window, of the same variable in another block of the cluster.
__device__ __forceinline__ u32 shared_address_of_rank(const void* p, u32 rank) {
  u32 a;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(a) : "r"(shared_address(p)), "r"(rank));
  return a;
}

// Stores into another block's shared memory and counts the bytes on a barrier that lies there.
__device__ __forceinline__ void store_remote(u32 address, float v, u32 bar) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(address),
               "r"(__float_as_uint(v)), "r"(bar)
               : "memory");
}

__device__ __forceinline__ void store_remote(u32 address, double v, u32 bar) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.b64 [%0], %1, [%2];" ::"r"(address),
               "l"(__double_as_longlong(v)), "r"(bar)
               : "memory");
}
#endif
