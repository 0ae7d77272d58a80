// The kernels that run on every architecture: the forwards by how many threads share a row, and the backward.
#include "backward.cuh"
#include "forward_generic.cuh"
#include "forward_staged.cuh"
#include "row_mask.cuh"

constexpr int kWideGroups = 4;  // with 8 the registers do not suffice
// Small blocks come and go without leaving gaps in the stream of reads and writes.
using Steady = BackwardShape<64, 4, false>;
using Eager = BackwardShape<128, 2, true>;
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
constexpr int kEagerBlocks = sizeof(typename T::Bits) == 8 ? 4 : sizeof(typename T::Bits) == 4 ? 6 : 8;

#define LOGP_KERNELS(T, suffix)                                                                      \
  extern "C" __global__ void __launch_bounds__(kGroup, kForwardBlocks<T>)                            \
      logp_forward_online_##suffix(const __grid_constant__ LogpParams p) {                           \
    forward_row_per_block<LazySource, T, 1>(p);                                                      \
  }                                                                                                  \
  extern "C" __global__ void __launch_bounds__(kWideGroups * kGroup, 1)                              \
      logp_forward_wide_##suffix(const __grid_constant__ LogpParams p) {                             \
    forward_row_per_block<EagerSource, T, kWideGroups>(p);                                           \
  }                                                                                                  \
  extern "C" __global__ void __launch_bounds__(kWideGroups * kGroup, 1)                              \
      logp_forward_wide_shifted_##suffix(const __grid_constant__ LogpParams p) {                     \
    forward_row_per_block<ShiftedSource, T, kWideGroups>(p);                                         \
  }                                                                                                  \
  extern "C" __global__ void __launch_bounds__(kGroup, kRingBlocks<T, 1>)                            \
      logp_forward_ring1_##suffix(const __grid_constant__ LogpParams p) {                            \
    forward_row_ring<T, 1, 1>(p);                                                                    \
  }                                                                                                  \
  extern "C" __global__ void __launch_bounds__(kGroup, kRingBlocks<T, 4>)                            \
      logp_forward_ring4_##suffix(const __grid_constant__ LogpParams p) {                            \
    forward_row_ring<T, 4, 2>(p);                                                                    \
  }                                                                                                  \
  extern "C" __global__ void __launch_bounds__(kGroup, kStagedBlocks<T>)                             \
      logp_forward_staged_##suffix(const __grid_constant__ LogpParams p) {                           \
    forward_row_staged<T>(p);                                                                        \
  }                                                                                                  \
  extern "C" __global__ void __launch_bounds__(kGroup, 4)                                            \
      logp_forward_two_pass_##suffix(const __grid_constant__ LogpParams p) {                         \
    forward_row_per_block<TwoPassSource, T, 1>(p);                                                   \
  }                                                                                                  \
  extern "C" __global__ void __launch_bounds__(Eager::kThreads, kEagerBlocks<T>)                     \
      logp_backward_eager_##suffix(const __grid_constant__ LogpParams p) {                           \
    backward_block<T, Eager>(p);                                                                     \
  }                                                                                                  \
  extern "C" __global__ void __launch_bounds__(Steady::kThreads, kBackwardBlocks<T>)                 \
      logp_backward_##suffix(const __grid_constant__ LogpParams p) {                                 \
    backward_block<T, Steady>(p);                                                                    \
  }

LOGP_KERNELS(BF16, bf16)
LOGP_KERNELS(F16, f16)
LOGP_KERNELS(F32, f32)
LOGP_KERNELS(F64, f64)

extern "C" __global__ void row_mask_scatter(const __grid_constant__ RowMaskParams p) { scatter_row_mask(p); }
