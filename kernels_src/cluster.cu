// Forward for few rows: a cluster of 8 blocks shares one row (compute capability 9.0 and later).
#include "forward_generic.cuh"

#define LOGP_KERNELS(T, suffix)                                                                            \
  extern "C" __global__ void __cluster_dims__(kClusterBlocks) __launch_bounds__(kClusterThreads, 2)        \
      logp_forward_cluster_##suffix(const __grid_constant__ LogpParams p) {                                \
    forward_row_per_cluster<T>(p);                                                                         \
  }

LOGP_KERNELS(BF16, bf16)
LOGP_KERNELS(F16, f16)
LOGP_KERNELS(F32, f32)
LOGP_KERNELS(F64, f64)
