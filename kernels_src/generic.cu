// The kernels that run on every architecture: the forwards by how many threads share a row, and the backward.
#include "backward.cuh"
#include "forward_generic.cuh"
#include "forward_staged.cuh"
#include "row_mask.cuh"
#include "usual.cuh"

constexpr int kWideGroups = 4;  // with 8 the registers do not suffice
// Resident blocks a multiprocessor that the register budget is set for: 8 have 64 KiB in flight. Blackwell code needs
// more registers.
constexpr int kForwardBlocks = __CUDA_ARCH__ >= 1000 ? 5 : 8;
// Small blocks come and go without leaving gaps in the stream of reads and writes.
using SteadyShape = BackwardShape<64, 4, false>;
using EagerShape = BackwardShape<128, 2, true>;
// Resident blocks a multiprocessor that the register budget is set for. float64 needs more registers, and on all
// architectures but 9.0 the compiler does for float32.
#if __CUDA_ARCH__ == 900
constexpr int kBackwardBlocksF32 = 14;
#else
constexpr int kBackwardBlocksF32 = 12;
#endif
template <class T>
constexpr int kBackwardBlocks =
    sizeof(typename T::Bits) == 8 ? 8 : sizeof(typename T::Bits) == 4 ? kBackwardBlocksF32 : 14;
template <class T>
constexpr int kEagerBlocks = sizeof(typename T::Bits) == 4 ? 6 : 8;

// A forward whose blocks take a row each.
#define LOGP_FORWARD(T, suffix, name, Source, groups, resident, params)                             \
  extern "C" __global__ void __launch_bounds__(groups * kGroup, resident / groups)                  \
      logp_forward_##name##_##suffix(const __grid_constant__ LogpParams p) {                        \
    forward_row_per_block<Source, T, groups>(params);                                               \
  }

#define LOGP_BACKWARD(T, suffix, name, Shape, resident, params)                                     \
  extern "C" __global__ void __launch_bounds__(Shape::kThreads, resident)                           \
      logp_##name##_##suffix(const __grid_constant__ LogpParams p) {                                \
    backward_block<T, Shape>(params);                                                               \
  }

// What no row is too long, too many or not aligned for.
#define LOGP_KERNELS(T, suffix)                                                                     \
  LOGP_FORWARD(T, suffix, ring4, LazyRing, 1, kRingGroups<T>, p)                                    \
  LOGP_FORWARD(T, suffix, ring4_shifted, LazyShiftedRing, 1, kShiftedRingGroups<T>, p)              \
  LOGP_FORWARD(T, suffix, two_pass, TwoPassSource, 1, 4, p)                                         \
  LOGP_BACKWARD(T, suffix, backward, SteadyShape, kBackwardBlocks<T>, p)

// What is faster for some; not float64, which is there to check the others with.
#define LOGP_FASTER_KERNELS(T, suffix)                                                              \
  LOGP_FORWARD(T, suffix, online, Lazy, 1, kForwardBlocks, p)                                       \
  LOGP_FORWARD(T, suffix, wide, Eager, kWideGroups, kWideGroups, p)                                 \
  LOGP_FORWARD(T, suffix, wide_usual, Eager, kWideGroups, kWideGroups, usual(p))                    \
  LOGP_FORWARD(T, suffix, wide_shifted, EagerShiftedRing, kWideGroups, kWideGroups, p)              \
  LOGP_FORWARD(T, suffix, wide_shifted_usual, EagerShiftedRing, kWideGroups, kWideGroups, usual(p)) \
  LOGP_FORWARD(T, suffix, ring8_shifted, LazyShiftedRing, 2, kShiftedRingGroups<T>, p)              \
  LOGP_FORWARD(T, suffix, staged, StagedSource, 1, kStagedBlocks, p)                                \
  extern "C" __global__ void __launch_bounds__(kGroup, kWarpRowGroups)                              \
      logp_forward_ring1_##suffix(const __grid_constant__ LogpParams p) {                           \
    forward_row_per_warp<T>(p);                                                                     \
  }                                                                                                 \
  LOGP_BACKWARD(T, suffix, backward_eager, EagerShape, kEagerBlocks<T>, p)                          \
  LOGP_BACKWARD(T, suffix, backward_eager_usual, EagerShape, kEagerBlocks<T>, usual(p))

LOGP_KERNELS(BF16, bf16)
LOGP_KERNELS(F16, f16)
LOGP_KERNELS(F32, f32)
LOGP_KERNELS(F64, f64)
LOGP_FASTER_KERNELS(BF16, bf16)
LOGP_FASTER_KERNELS(F16, f16)
LOGP_FASTER_KERNELS(F32, f32)

extern "C" __global__ void row_mask_scatter(const __grid_constant__ RowMaskParams p) { scatter_row_mask(p); }
