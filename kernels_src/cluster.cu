// Forwards in which a cluster of blocks shares a row (compute capability 9.0 and later): for few rows; and, those that
// are lazy, for long ones that are a few times as many as are there at once.
#include "forward_generic.cuh"
#include "usual.cuh"

// Resident groups a multiprocessor that the register budget is set for. Blackwell code needs more registers.
constexpr int kClusterGroups = __CUDA_ARCH__ >= 1000 ? 4 : 6;

#define LOGP_KERNEL(T, suffix, name, Source, blocks, groups, resident, params)                           \
  extern "C" __global__ void __cluster_dims__(blocks) __launch_bounds__(groups * kGroup, resident / groups)\
      logp_forward_cluster##blocks##x##groups##name##_##suffix(const __grid_constant__ LogpParams p) {   \
    forward_row_per_cluster<Source, T, blocks, groups>(params);                                          \
  }
// And once more for usual calls.
#define LOGP_KERNEL_TWICE(T, suffix, name, Source, blocks, groups, resident)                             \
  LOGP_KERNEL(T, suffix, name, Source, blocks, groups, resident, p)                                      \
  LOGP_KERNEL(T, suffix, name##_usual, Source, blocks, groups, resident, usual(p))
#define LOGP_KERNELS(T, suffix)                                                                          \
  LOGP_KERNEL_TWICE(T, suffix, , Eager, 8, 2, kClusterGroups)                                            \
  LOGP_KERNEL_TWICE(T, suffix, _ring, EagerRing, 8, 2, kClusterGroups)                                   \
  LOGP_KERNEL_TWICE(T, suffix, , Eager, 4, 2, kClusterGroups)                                            \
  LOGP_KERNEL(T, suffix, , Eager, 2, 2, kClusterGroups, p)                                               \
  LOGP_KERNEL(T, suffix, _ring, EagerRing, 2, 1, kClusterGroups, p)                                      \
  LOGP_KERNEL(T, suffix, _lazy, LazyRing, 2, 1, kRingGroups<T>, p)                                       \
  LOGP_KERNEL(T, suffix, _lazy, LazyRing, 2, 2, kRingGroups<T>, p)                                       \
  LOGP_KERNEL_TWICE(T, suffix, _shifted, EagerShiftedRing, 8, 2, kClusterGroups)                         \
  LOGP_KERNEL_TWICE(T, suffix, _shifted, EagerShiftedRing, 4, 2, kClusterGroups)                         \
  LOGP_KERNEL(T, suffix, _shifted, EagerShiftedRing, 2, 2, kClusterGroups, p)

LOGP_KERNELS(BF16, bf16)
LOGP_KERNELS(F16, f16)
LOGP_KERNELS(F32, f32)
