// Logits straight from global memory into registers: one block a row, of one group or several, or a cluster
// of blocks a row.
//
// OnlineScan reads the row once. TwoPassScan reads it twice (the second time partly from L2) and takes
// every exponent from the row's maximum. Both give one leaf per warp and segment.
#pragma once
#include "forward.cuh"

template <class T, bool kAligned, bool kEntropy>
struct OnlineScan {
  using State = SoftmaxState<typename T::Acc>;

  __device__ __forceinline__ OnlineScan(const RowReader<T>&, const Segmentation&) {}
  __device__ __forceinline__ State start() const { return State::empty(); }

  __device__ __forceinline__ void add(State& state, const Vec16 (&v)[kVectors<T>], typename T::Acc scale) const {
    state.template add<T, kEntropy>(v, scale);
  }
  __device__ __forceinline__ void reduce(State& state, typename T::Acc scale) const {
    state.template reduce_warp<kEntropy>(scale);
  }
};

template <class T, bool kAligned, bool kEntropy>
struct TwoPassScan {
  using Acc = typename T::Acc;
  using State = SoftmaxState<Acc>;
  Acc top;

  __device__ __forceinline__ TwoPassScan(const RowReader<T>& reader, const Segmentation& seg)
      : top(-Math<Acc>::infinity()) {
    __shared__ Acc warp_top[kGroupWarps];
    visit_tiles<T, kAligned>(reader, 0, seg.tiles, FirstTile<T, false>(reader, seg, 0),
                             [&](u32, const auto& v) { top = Math<Acc>::max(top, T::top(v)); });
    top = State::warp_max(top);
    if (threadIdx.x % kWarp == 0) warp_top[threadIdx.x / kWarp] = top;
    __syncthreads();
    top = State::warp_max(warp_top[threadIdx.x % kGroupWarps]);
  }

  __device__ __forceinline__ State start() const { return {top, Acc(0), Acc(0)}; }

  __device__ __forceinline__ void add(State& state, const Vec16 (&v)[kVectors<T>], Acc scale) const {
    state.template add_from<T, kEntropy>(v, State::reference(top), scale);
  }
  __device__ __forceinline__ void reduce(State& state, Acc) const {
    state.s = State::warp_sum(state.s);
    if constexpr (kEntropy) state.u = State::warp_sum(state.u);
  }
};

// Scans segments [first, last) and hands each leaf to put(segment, state), on every lane.
template <class Scan, bool kAligned, class T, class Ahead, class Put>
__device__ __forceinline__ void scan_segments(const RowReader<T>& reader, const Segmentation& seg, u32 first,
                                              u32 last, typename T::Acc scale, const Ahead& ahead, Put put) {
  const Scan scan(reader, seg);
  auto state = scan.start();
  u32 segment = first;
  const u32 begin = first * seg.tiles_per_segment, end = min(last * seg.tiles_per_segment, seg.tiles);
  visit_tiles<T, kAligned>(reader, begin, end, ahead, [&](u32 tile, const auto& v) {
    scan.add(state, v, scale);
    if (tile + 1 != end && tile + 1 != (segment + 1) * seg.tiles_per_segment) return;
    scan.reduce(state, scale);
    put(segment++, state);
    state = scan.start();
  });
}

// The same with alignment, unless it is known, and entropy turned into compile-time facts, once a row.
template <template <class, bool, bool> class Scan, bool kIsAligned, class T, class Ahead, class Put>
__device__ __forceinline__ void scan_segments(const RowReader<T>& reader, const Segmentation& seg, u32 first,
                                              u32 last, typename T::Acc scale, bool entropy,
                                              const Ahead& ahead, Put put) {
  if (kIsAligned || reader.shift == 0) {
    if (entropy) scan_segments<Scan<T, true, true>, true>(reader, seg, first, last, scale, ahead, put);
    else scan_segments<Scan<T, true, false>, true>(reader, seg, first, last, scale, ahead, put);
  } else {
    if (entropy) scan_segments<Scan<T, false, true>, false>(reader, seg, first, last, scale, ahead, put);
    else scan_segments<Scan<T, false, false>, false>(reader, seg, first, last, scale, ahead, put);
  }
}

// One group takes all segments of the row in turn, several (a wide block, for few rows) an equal run each. Not so with
// TwoPassScan, whose threads meet on the way. kIsAligned: all rows are.
template <template <class, bool, bool> class Scan, class T, int kGroups, bool kIsAligned>
__device__ __forceinline__ void forward_row_per_block(const LogpParams& p) {
  using Acc = typename T::Acc;
  __shared__ Leaves<Acc> leaves;
  const u32 row = blockIdx.x;
  const RowIndex at(row, p.inner_rows);
  const RowReader<T> reader(row_start<T>(p, at), p.vocab_size);
  const Segmentation seg(p.vocab_size, kTileColumns<T>);
  const u32 group = kGroups == 1 ? 0 : threadIdx.x / kGroup;
  const u32 first = group * seg.each<kGroups>();
  const FirstTile<T, (kGroups > 1)> ahead(reader, seg, first);
  if (!is_active(p, row, at)) {
    if (threadIdx.x == 0) write_skipped_row<Acc>(p, row);
    return;
  }
  const Acc scale = Math<Acc>::scale(inverse_temperature<Acc>(p, at));
  const bool writer = threadIdx.x < kWarp;
  Target<T> target{};
  if (writer) target = Target<T>::of_lane(p, at);
  if (seg.has(first))
    scan_segments<Scan, kIsAligned>(reader, seg, first, first + seg.each<kGroups>(), scale, p.entropy != nullptr, ahead,
                                    [&](u32 s, const SoftmaxState<Acc>& state) {
                                      if (threadIdx.x % kWarp == 0) leaves.put(leaf_index(s), state);
                                    });
  __syncthreads();
  if (writer) finish_row<T>(p, block_index_again(), leaves, seg, scale, target);
}

#if __CUDA_ARCH__ >= 900
// For few rows: a cluster of kBlocks blocks shares a row. Each of their groups takes an equal run of segments
// and puts its leaves into block 0's shared memory. Same leaves, same merge, same bits as one block a row.
template <class T, int kBlocks, int kGroups, bool kIsAligned>
__device__ __forceinline__ void forward_row_per_cluster(const LogpParams& p) {
  using Acc = typename T::Acc;
  __shared__ Leaves<Acc> leaves;
  __shared__ u64 leaves_arrived;
  const u32 row = blockIdx.x / kBlocks;
  const u32 rank = cluster_rank();
  const RowIndex at(row, p.inner_rows);
  const RowReader<T> reader(row_start<T>(p, at), p.vocab_size);
  const Segmentation seg(p.vocab_size, kTileColumns<T>);
  const u32 first = (threadIdx.x / kGroup * kBlocks + rank) * seg.each<kBlocks * kGroups>();
  const FirstTile<T, true> ahead(reader, seg, first);
  if (!is_active(p, row, at)) {
    if (rank == 0 && threadIdx.x == 0) write_skipped_row<Acc>(p, row);
    return;
  }
  if (rank == 0 && threadIdx.x == 0) {
    mbarrier_init(&leaves_arrived, 1);
    fence_mbarrier_init();
  }
  // Block 0 must be running before anyone writes into it; the wait comes before the first write.
  cluster_arrive();
  const Acc scale = Math<Acc>::scale(inverse_temperature<Acc>(p, at));
  const bool writer = rank == 0 && threadIdx.x < kWarp;
  Target<T> target{};
  if (writer) target = Target<T>::of_lane(p, at);
  bool waited = false;
  if (seg.has(first))
    scan_segments<OnlineScan, kIsAligned>(reader, seg, first, first + seg.each<kBlocks * kGroups>(), scale,
                                          p.entropy != nullptr, ahead, [&](u32 s, const SoftmaxState<Acc>& state) {
                                            if (!waited) cluster_wait();
                                            waited = true;
                                            if (threadIdx.x % kWarp == 0)
                                              leaves.put_remote(0, leaf_index(s), state, &leaves_arrived);
                                          });
  if (!waited) cluster_wait();
  if (!writer) return;
  const u32 leaf_bytes = seg.count() * kGroupWarps * Leaves<Acc>::kLeafBytes;
  if (threadIdx.x == 0) mbarrier_expect_tx(&leaves_arrived, leaf_bytes);
  mbarrier_wait_cluster(&leaves_arrived, 0);
  finish_row<T>(p, block_index_again() / kBlocks, leaves, seg, scale, target);
}
#endif
