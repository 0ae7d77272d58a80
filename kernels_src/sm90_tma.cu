// The Hopper forward, one symbol a dtype.
#include "sm90_tma.cuh"

#define LOGP_KERNELS(T, suffix)                                                              \
  extern "C" __global__ void __launch_bounds__(kTmaThreads, kTmaBlocks<T>)              \
      logp_forward_tma_##suffix(const __grid_constant__ LogpParams p) {                      \
    forward_tma<T>(p);                                                                       \
  }

LOGP_KERNELS(BF16, bf16)
LOGP_KERNELS(F16, f16)
LOGP_KERNELS(F32, f32)
LOGP_KERNELS(F64, f64)
