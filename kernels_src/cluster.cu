// Forward for few rows: a cluster of blocks shares one row (compute capability 9.0 and later).
#include "forward_generic.cuh"

// Resident groups a multiprocessor. float64 and Blackwell code need more registers.
#if __CUDA_ARCH__ >= 1000
template <class T>
constexpr int kClusterGroups = 4;
#else
template <class T>
constexpr int kClusterGroups = sizeof(typename T::Bits) == 8 ? 4 : 6;
#endif

#define LOGP_KERNEL(T, suffix, name, Source, blocks, groups)                                                  \
  extern "C" __global__ void __cluster_dims__(blocks)                                                        \
      __launch_bounds__(groups * kGroup, kClusterGroups<T> / groups)                                         \
          logp_forward_cluster##blocks##x##groups##name##_##suffix(const __grid_constant__ LogpParams p) {   \
    forward_row_per_cluster<Source, T, blocks, groups>(p);                                                   \
  }
#define LOGP_KERNELS(T, suffix)                             \
  LOGP_KERNEL(T, suffix, , EagerSource, 8, 2)               \
  LOGP_KERNEL(T, suffix, , EagerSource, 4, 2)               \
  LOGP_KERNEL(T, suffix, , EagerSource, 2, 2)               \
  LOGP_KERNEL(T, suffix, , EagerSource, 2, 1)               \
  LOGP_KERNEL(T, suffix, _shifted, ShiftedSource, 8, 2)     \
  LOGP_KERNEL(T, suffix, _shifted, ShiftedSource, 4, 2)     \
  LOGP_KERNEL(T, suffix, _shifted, ShiftedSource, 2, 2)

LOGP_KERNELS(BF16, bf16)
LOGP_KERNELS(F16, f16)
LOGP_KERNELS(F32, f32)
LOGP_KERNELS(F64, f64)
