// Logits straight from global memory into registers: one block (one group) a row, or one cluster of 8 blocks a row.
//
// OnlineScan reads the row once. TwoPassScan reads it twice (the second time partly from L2) and takes
// every exponent from the row's maximum. Both give one leaf per warp and segment.
#pragma once
#include "forward.cuh"

template <class T, bool kAligned, bool kEntropy>
struct OnlineScan {
  using Acc = typename T::Acc;

  __device__ __forceinline__ OnlineScan(const RowReader<T>&, const Segmentation&) {}

  __device__ __forceinline__ SoftmaxState<Acc> segment(const RowReader<T>& reader, u32 first, u32 last,
                                                       Acc scale) const {
    SoftmaxState<Acc> state = SoftmaxState<Acc>::empty();
    visit_tiles<T, kAligned>(reader, first, last, [&](const auto& v) {
      state.template add<T, kEntropy>(v, scale);
    });
    state.template reduce_warp<kEntropy>(scale);
    return state;
  }
};

template <class T, bool kAligned, bool kEntropy>
struct TwoPassScan {
  using Acc = typename T::Acc;
  Acc top;

  __device__ __forceinline__ TwoPassScan(const RowReader<T>& reader, const Segmentation& seg)
      : top(-Math<Acc>::infinity()) {
    __shared__ Acc warp_top[kGroupWarps];
    visit_tiles<T, kAligned>(reader, 0, seg.tiles, [&](const auto& v) { top = Math<Acc>::max(top, T::top(v)); });
    top = SoftmaxState<Acc>::warp_max(top);
    if (threadIdx.x % kWarp == 0) warp_top[threadIdx.x / kWarp] = top;
    __syncthreads();
    top = SoftmaxState<Acc>::warp_max(warp_top[threadIdx.x % kGroupWarps]);
  }

  __device__ __forceinline__ SoftmaxState<Acc> segment(const RowReader<T>& reader, u32 first, u32 last,
                                                       Acc scale) const {
    const Acc ref = SoftmaxState<Acc>::reference(top);
    SoftmaxState<Acc> state = {top, Acc(0), Acc(0)};
    visit_tiles<T, kAligned>(reader, first, last, [&](const auto& v) {
      state.template add_from<T, kEntropy>(v, ref, scale);
    });
    state.s = SoftmaxState<Acc>::warp_sum(state.s);
    if constexpr (kEntropy) state.u = SoftmaxState<Acc>::warp_sum(state.u);
    return state;
  }
};

// Scans segments [first, last) and hands each leaf to put(segment, state), on every lane.
template <class Scan, class T, class Put>
__device__ __forceinline__ void scan_segments(const RowReader<T>& reader, const Segmentation& seg, u32 first,
                                              u32 last, typename T::Acc scale, Put put) {
  const Scan scan(reader, seg);
  for (u32 s = first; s < last; ++s) {
    const u32 begin = s * seg.tiles_per_segment;
    put(s, scan.segment(reader, begin, min(begin + seg.tiles_per_segment, seg.tiles), scale));
  }
}

// The same with alignment and entropy turned into compile-time facts, once a row.
template <template <class, bool, bool> class Scan, class T, class Put>
__device__ __forceinline__ void scan_segments(const RowReader<T>& reader, const Segmentation& seg, u32 first,
                                              u32 last, typename T::Acc scale, bool entropy, Put put) {
  if (reader.shift == 0) {
    if (entropy) scan_segments<Scan<T, true, true>>(reader, seg, first, last, scale, put);
    else scan_segments<Scan<T, true, false>>(reader, seg, first, last, scale, put);
  } else {
    if (entropy) scan_segments<Scan<T, false, true>>(reader, seg, first, last, scale, put);
    else scan_segments<Scan<T, false, false>>(reader, seg, first, last, scale, put);
  }
}

template <template <class, bool, bool> class Scan, class T>
__device__ __forceinline__ void forward_row_per_block(const LogpParams& p) {
  using Acc = typename T::Acc;
  __shared__ Leaves<Acc> leaves;
  const u32 row = blockIdx.x;
  const RowIndex at(row, p.inner_rows);
  if (!is_active(p, row, at)) {
    if (threadIdx.x == 0) write_skipped_row<Acc>(p, row);
    return;
  }
  const RowReader<T> reader(row_start<T>(p, at), p.vocab_size);
  const Acc inv_t = inverse_temperature<Acc>(p, at);
  const Acc scale = Math<Acc>::scale(inv_t);
  const Segmentation seg(p.vocab_size, kTileColumns<T>);
  const bool writer = threadIdx.x < kWarp;
  TargetLogit<T> target;
  if (writer) target.prefetch(p, at);
  scan_segments<Scan>(reader, seg, 0, seg.segments, scale, p.entropy != nullptr,
                      [&](u32 s, const SoftmaxState<Acc>& state) {
                        if (threadIdx.x % kWarp == 0) leaves.put(leaf_index(s), state);
                      });
  __syncthreads();
  if (writer) write_row<T>(p, row, at, merge_leaves(p, leaves, seg, scale), target, inv_t);
}

#if __CUDA_ARCH__ >= 900
// For few rows: the groups of a cluster take one segment of the row each and put their leaves into block
// 0's shared memory. Same leaves, same merge, same bits as one block a row.
constexpr int kClusterBlocks = 8;
constexpr int kClusterThreads = kMaxSegments / kClusterBlocks * kGroup;

template <class T>
__device__ __forceinline__ void forward_row_per_cluster(const LogpParams& p) {
  using Acc = typename T::Acc;
  __shared__ Leaves<Acc> leaves;
  const u32 row = blockIdx.x / kClusterBlocks;
  const u32 rank = cluster_rank();
  const RowIndex at(row, p.inner_rows);
  if (!is_active(p, row, at)) {
    if (rank == 0 && threadIdx.x == 0) write_skipped_row<Acc>(p, row);
    return;
  }
  // Block 0 must be running before anyone writes into it; the wait comes after the scan.
  cluster_arrive();
  const RowReader<T> reader(row_start<T>(p, at), p.vocab_size);
  const Acc inv_t = inverse_temperature<Acc>(p, at);
  const Acc scale = Math<Acc>::scale(inv_t);
  const Segmentation seg(p.vocab_size, kTileColumns<T>);
  const bool writer = rank == 0 && threadIdx.x < kWarp;
  TargetLogit<T> target;
  if (writer) target.prefetch(p, at);
  const u32 mine = threadIdx.x / kGroup * kClusterBlocks + rank;
  SoftmaxState<Acc> leaf = SoftmaxState<Acc>::empty();
  if (mine < seg.segments)
    scan_segments<OnlineScan>(reader, seg, mine, mine + 1, scale, p.entropy != nullptr,
                              [&](u32, const SoftmaxState<Acc>& state) { leaf = state; });
  cluster_wait();
  if (mine < seg.segments && threadIdx.x % kWarp == 0) leaves.put_remote(0, leaf_index(mine), leaf);
  cluster_arrive();
  if (!writer) return;
  cluster_wait();
  write_row<T>(p, row, at, merge_leaves(p, leaves, seg, scale), target, inv_t);
}
#endif
