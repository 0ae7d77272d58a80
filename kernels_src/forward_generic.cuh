// One block a row, of one group or several, or a cluster of blocks a row: what a group does to its run of segments is a
// source, of which there are four.
//
// OnlineSource reads aligned rows once, straight from global memory into registers.
// RingSource reads rows once, through a ring in shared memory; those at any alignment too.
// StagedSource (forward_staged.cuh) reads aligned rows once, a whole piece through shared memory at a time.
// TwoPassSource reads the row twice (the second time partly from L2) and takes every exponent from the row's maximum.
// All give one leaf per warp and segment.
#pragma once
#include "forward_ring.cuh"

template <class T, bool kEntropy>
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
    FirstTile<T, kAligned> ahead;
    ahead.load(reader, 0);
    visit_tiles(reader, 0, seg.tiles, ahead, [&](u32, const auto& v) { top = Math<Acc>::max(top, T::top(v)); });
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

// Scans segments [first, last) and hands each leaf to put(leaf, state), on every lane.
template <class Scan, bool kAligned, class T, class Put>
__device__ __forceinline__ void scan_segments(const RowReader<T>& reader, const Segmentation& seg, u32 first,
                                              u32 last, typename T::Acc scale, const FirstTile<T, kAligned>& ahead,
                                              Put put) {
  const Scan scan(reader, seg);
  auto state = scan.start();
  u32 segment = first;
  visit_tiles(reader, seg.begin(first), seg.begin(last), ahead, [&](u32 tile, const auto& v) {
    scan.add(state, v, scale);
    if (tile + 1 != seg.begin(segment + 1)) return;
    scan.reduce(state, scale);
    put(leaf_index(segment++), state);
    state = scan.start();
  });
}

// A source is made before its row is known to count, and starts when that is known. An eager one asks for logits before:
// that saves one latency of three, and reads in vain where the row does not count: for few rows, where latency is all
// there is. Its scan hands the leaves of segments [first, last) to put(leaf, state), on every lane.
template <class T, bool kEager>
struct OnlineSource {
  const RowReader<T>& reader;
  const Segmentation& seg;
  const u32 first, last;
  FirstTile<T, true> ahead;

  __device__ __forceinline__ OnlineSource(const RowReader<T>& reader, const Segmentation& seg, u32 first, u32 last)
      : reader(reader), seg(seg), first(first), last(last) {
    if (kEager) load();
  }

  __device__ __forceinline__ void start() {
    if (!kEager) load();
  }

  template <bool kEntropy, class Put>
  __device__ __forceinline__ void scan(typename T::Acc scale, Put put) {
    scan_segments<OnlineScan<T, kEntropy>, true>(reader, seg, first, last, scale, ahead, put);
  }

 private:
  __device__ __forceinline__ void load() {
    if (seg.has(first)) ahead.load(reader, seg.begin(first));
  }
};

template <class T, bool kAligned, bool kEager>
struct RingSource {
  static constexpr int kDepth = 2;
  using Ring = RowRing<T, kGroupWarps, kDepth>;

  const Segmentation& seg;
  const u32 first, last;
  RingFeed<T, kGroupWarps, kDepth, kAligned> feed;

  __device__ __forceinline__ RingSource(const RowReader<T>& reader, const Segmentation& seg, u32 first, u32 last)
      : seg(seg), first(first), last(last), feed(reader, ring(), seg.begin(first), seg.begin(last)) {
    if (kEager) fetch();
  }

  __device__ __forceinline__ void start() {
    if (!kEager) fetch();
  }

  template <bool kEntropy, class Put>
  __device__ __forceinline__ void scan(typename T::Acc scale, Put put) {
    RingScan<T, kGroupWarps, kDepth, kAligned, kEntropy> scan(feed, seg, scale);
    scan.run(first, last, put);
  }

 private:
  // One for each group of the block, whose shared_memory in kernels.toml they are.
  static __device__ __forceinline__ Ring& ring() {
    extern __shared__ __align__(16) u8 rings[];
    return reinterpret_cast<Ring*>(rings)[threadIdx.x / kGroup];
  }

  __device__ __forceinline__ void fetch() {
    if (seg.has(first)) feed.start(seg.begin(first));
  }
};

template <class T>
struct TwoPassSource {
  const RowReader<T>& reader;
  const Segmentation& seg;
  const u32 first, last;

  __device__ __forceinline__ TwoPassSource(const RowReader<T>& reader, const Segmentation& seg, u32 first, u32 last)
      : reader(reader), seg(seg), first(first), last(last) {}

  __device__ __forceinline__ void start() {}

  template <bool kEntropy, class Put>
  __device__ __forceinline__ void scan(typename T::Acc scale, Put put) {
    if (reader.shift == 0) scan<true, kEntropy>(scale, put);
    else scan<false, kEntropy>(scale, put);
  }

 private:
  template <bool kAligned, bool kEntropy, class Put>
  __device__ __forceinline__ void scan(typename T::Acc scale, Put put) {
    FirstTile<T, kAligned> ahead;
    ahead.load(reader, seg.begin(first));
    scan_segments<TwoPassScan<T, kAligned, kEntropy>, kAligned>(reader, seg, first, last, scale, ahead, put);
  }
};

// As the kernels name them.
template <class T>
using Lazy = OnlineSource<T, false>;
template <class T>
using Eager = OnlineSource<T, true>;
template <class T>
using LazyRing = RingSource<T, true, false>;
template <class T>
using EagerRing = RingSource<T, true, true>;
template <class T>
using LazyShiftedRing = RingSource<T, false, false>;
template <class T>
using EagerShiftedRing = RingSource<T, false, true>;

template <class Source, class Acc, class Put>
__device__ __forceinline__ void scan(const LogpParams& p, Source& source, Acc scale, Put put) {
  if (p.entropy != nullptr) source.template scan<true>(scale, put);
  else source.template scan<false>(scale, put);
}

// Ends a row that does not count. What its source asked for comes before its shared memory goes.
template <class Acc>
__device__ __forceinline__ void skip_row(const LogpParams& p, u32 row, bool writer) {
  if (writer) write_skipped_row<Acc>(p, row);
  copy_async_wait<0>();
}

// One group takes all segments of the row in turn, several an equal run each. Not so with TwoPassSource, whose threads
// meet on the way. The row's first id is asked for once: it says whether the row counts, and which logit is its target.
template <template <class> class Source, class T, int kGroups>
__device__ __forceinline__ void forward_row_per_block(const LogpParams& p) {
  using Acc = typename T::Acc;
  __shared__ Leaves<Acc> leaves;
  const u32 row = blockIdx.x;
  const RowIndex at(row, p.inner_rows);
  const RowReader<T> reader(row_start<T>(p, at), p.vocab_size);
  const Segmentation seg(p.vocab_size, kTileColumns<T>);
  const u32 group = kGroups == 1 ? 0 : threadIdx.x / kGroup;
  const u32 first = group * seg.each<kGroups>();
  Source<T> source(reader, seg, first, first + seg.each<kGroups>());
  const LoadedId first_id(p, at, 0);
  const Acc scale = Math<Acc>::scale(inverse_temperature<Acc>(p, at));
  if (!is_active(p, row, at, first_id)) return skip_row<Acc>(p, row, threadIdx.x == 0);
  source.start();
  const bool writer = threadIdx.x < kWarp;
  Target<T> target{};
  if (writer) target = Target<T>::of_lane(p, at, first_id);
  if (seg.has(first))
    scan(p, source, scale, [&](int leaf, const SoftmaxState<Acc>& state) {
      if (threadIdx.x % kWarp == 0) leaves.put(leaf, state);
    });
  const RowEnd<T> end(p, block_index_again());
  __syncthreads();
  if (writer) end.write(p, merge_leaves(p, leaves, seg, scale), target);
}

#if __CUDA_ARCH__ >= 900
// A cluster of kBlocks blocks shares a row. Each of their groups takes an equal run of segments and puts its leaves into
// block 0's shared memory. Same leaves, same merge, same bits as one block a row.
template <template <class> class Source, class T, int kBlocks, int kGroups>
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
  Source<T> source(reader, seg, first, first + seg.each<kBlocks * kGroups>());
  const LoadedId first_id(p, at, 0);
  // Before the temperature is looked up: behind that branch the compiler does it in a loop, which racecheck misreads.
  if (rank == 0 && threadIdx.x == 0) {
    mbarrier_init(&leaves_arrived, 1);
    fence_mbarrier_init();
  }
  const Acc scale = Math<Acc>::scale(inverse_temperature<Acc>(p, at));
  // Block 0 must be running before anyone writes into it; the wait comes before the first write.
  cluster_arrive();
  if (!is_active(p, row, at, first_id)) {
    cluster_wait();
    return skip_row<Acc>(p, row, rank == 0 && threadIdx.x == 0);
  }
  source.start();
  const bool writer = rank == 0 && threadIdx.x < kWarp;
  Target<T> target{};
  if (writer) target = Target<T>::of_lane(p, at, first_id);
  bool waited = false;
  if (seg.has(first))
    scan(p, source, scale, [&](int leaf, const SoftmaxState<Acc>& state) {
      if (!waited) cluster_wait();
      waited = true;
      if (threadIdx.x % kWarp == 0) leaves.put_remote(0, leaf, state, &leaves_arrived);
    });
  if (!waited) cluster_wait();
  if (!writer) return;
  const RowEnd<T> end(p, block_index_again() / kBlocks);
  const u32 leaf_bytes = seg.count() * kGroupWarps * Leaves<Acc>::kLeafBytes;
  if (threadIdx.x == 0) mbarrier_expect_tx(&leaves_arrived, leaf_bytes);
  mbarrier_wait_cluster(&leaves_arrived, 0);
  end.write(p, merge_leaves(p, leaves, seg, scale), target);
}
#endif
