// Forward for few rows: a cluster of 8 blocks shares one row (compute capability 9.0 and later).
#include "forward_generic.cuh"

#if __CUDA_ARCH__ >= 1000  // Blackwell code needs more registers
constexpr int kClusterBound = 2;
#else
constexpr int kClusterBound = 3;
#endif

#define LOGP_KERNELS(T, suffix)                                                                            \
  extern "C" __global__ void __cluster_dims__(kClusterBlocks) __launch_bounds__(kClusterThreads, kClusterBound)        \
      logp_forward_cluster_##suffix(const __grid_constant__ LogpParams p) {                                \
    forward_row_per_cluster<T>(p);                                                                         \
  }

LOGP_KERNELS(BF16, bf16)
LOGP_KERNELS(F16, f16)
LOGP_KERNELS(F32, f32)
LOGP_KERNELS(F64, f64)
