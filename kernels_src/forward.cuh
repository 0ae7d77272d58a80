// Forward: logp[r, k] = logits[r, ids[r, k]] / T - logsumexp(logits[r, :] / T), with the row's
// maximum, log-sum and entropy where asked for. Reads V elements a row, writes a few numbers.
//
// The order of every reduction is a function of V and the dtype, never of the number of rows, the
// address, or how many blocks share a row:
//   vector   16 bytes of consecutive columns
//   tile     128 threads x 4 vectors (8 KiB; 2 vectors for float64): thread t takes vectors t, t + 128, ...
//   segment  1, 2, 4, 8 or 16 a row, as few as leave none with more than 2 tiles if 16 do: each of the 128 threads, a
//            group, runs an online softmax over its columns, then each warp reduces to one state, a "leaf"
//   row      one warp merges the row's leaves (segments x 4) in a fixed order
// So one group can do all segments in turn, or each group of a cluster one of them, and the bits agree.
#pragma once
#include "reader.cuh"
#include "row.cuh"
#include "softmax_state.cuh"
#include "target.cuh"

constexpr int kGroup = 128;  // threads that work on one segment together
constexpr int kGroupWarps = kGroup / kWarp;
// Vectors per thread and tile. Double-precision exp is long code: fewer copies of it.
template <class T>
constexpr int kVectors = sizeof(typename T::Bits) == 8 ? 2 : 4;
template <class T>
constexpr u32 kTileBytes = kGroup * kVectors<T> * 16;
constexpr int kLogMaxSegments = 4;
constexpr int kMaxSegments = 1 << kLogMaxSegments;
constexpr int kMaxLeaves = kMaxSegments * kGroupWarps;

template <class T>
constexpr u32 kTileColumns = kGroup * kVectors<T> * T::kVec;

// A power of two, so that however many groups share a row, those that get any tiles get the same number, give or take
// one; and nothing divides: that would stand between the start of a kernel and its first load.
struct Segmentation {
  u32 tiles, log_count;

  __device__ __forceinline__ Segmentation(u32 vocab_size, u32 tile_columns) {
    tiles = (vocab_size + tile_columns - 1) / tile_columns;
    log_count = min(32 - __clz((tiles - 1) / 2), kLogMaxSegments);
  }

  // Its first tile; of the one behind the last, how many tiles there are.
  __device__ __forceinline__ u32 begin(u32 segment) const { return segment * tiles >> log_count; }

  __device__ __forceinline__ bool has(u32 segment) const { return begin(segment) < tiles; }

  __device__ __forceinline__ u32 count() const { return has(0) ? 1u << log_count : 0; }

  // How many consecutive segments each of kShares takes, if there is one for it.
  template <u32 kShares>
  __device__ __forceinline__ u32 each() const { return max((1u << log_count) / kShares, 1u); }
};

template <class Acc>
struct Leaves {
  Acc m[kMaxLeaves], s[kMaxLeaves], u[kMaxLeaves];

  __device__ __forceinline__ void put(int i, const SoftmaxState<Acc>& x) {
    m[i] = x.m;
    s[i] = x.s;
    u[i] = x.u;
  }
  __device__ __forceinline__ SoftmaxState<Acc> get(int i) const { return {m[i], s[i], u[i]}; }

#if __CUDA_ARCH__ >= 900
  static constexpr u32 kLeafBytes = 3 * sizeof(Acc);

  // put, into the same variable of another block of the cluster, whose barrier counts kLeafBytes
  __device__ __forceinline__ void put_remote(u32 rank, int i, const SoftmaxState<Acc>& x, const u64* bar) {
    const u32 counter = shared_address_of_rank(bar, rank);
    store_remote(shared_address_of_rank(m + i, rank), x.m, counter);
    store_remote(shared_address_of_rank(s + i, rank), x.s, counter);
    store_remote(shared_address_of_rank(u + i, rank), x.u, counter);
  }
#endif
};

// Where the leaf of this thread's warp goes, for a segment.
__device__ __forceinline__ int leaf_index(u32 segment) {
  return segment * kGroupWarps + threadIdx.x % kGroup / kWarp;
}

template <bool kEntropy, class Acc>
__device__ __forceinline__ SoftmaxState<Acc> merge_leaves(const Leaves<Acc>& leaves, const Segmentation& seg,
                                                          Acc scale) {
  static_assert(kMaxLeaves == 2 * kWarp, "a lane has at most two leaves");
  // A row of one segment has few leaves, which the lanes then hold over and over.
  const u32 lane = threadIdx.x % kWarp, leaf = seg.has(1) ? lane : lane % kGroupWarps;
  SoftmaxState<Acc> state = SoftmaxState<Acc>::empty();
  if (seg.has(leaf / kGroupWarps)) state = leaves.get(leaf);
  if (seg.has((lane + kWarp) / kGroupWarps)) state.template merge<kEntropy>(leaves.get(lane + kWarp), scale);
  if (seg.has(1)) state.template reduce_warp<kEntropy>(scale);
  else state.template reduce_warp<kEntropy, kGroupWarps>(scale);
  return state;
}

// The row's state from its leaves; called by one whole warp.
template <class Acc>
__device__ __forceinline__ SoftmaxState<Acc> merge_leaves(const LogpParams& p, const Leaves<Acc>& leaves,
                                                          const Segmentation& seg, Acc scale) {
  return p.entropy != nullptr ? merge_leaves<true>(leaves, seg, scale) : merge_leaves<false>(leaves, seg, scale);
}

template <class Acc>
__device__ __forceinline__ void store_statistic(void* out, u32 row, Acc value) {
  if (out != nullptr) static_cast<Acc*>(out)[row] = value;
}

// What the end of a row that was read takes besides its leaves. It is looked up before they are there, so that nothing
// waits for it then; and anew, by a number that comes from block_index_again, so that nothing of it is held during the scan.
template <class T>
struct RowEnd {
  using Acc = typename T::Acc;

  const u32 row;
  const RowIndex at;
  const Acc inv_t;

  __device__ __forceinline__ RowEnd(const LogpParams& p, u32 row)
      : row(row), at(row, p.inner_rows), inv_t(inverse_temperature<Acc>(p, at)) {}

  // Writes all results; called by one whole warp.
  __device__ __forceinline__ void write(const LogpParams& p, const SoftmaxState<Acc>& state,
                                        const Target<T>& mine) const {
    const int lane = threadIdx.x % kWarp;
    const Acc log_sum = state.log_sum();
    if (lane == 0) {
      store_statistic(p.row_max, row, p.row_max_is_raw ? state.m : state.m * inv_t);
      store_statistic(p.log_sum, row, log_sum);
      if (p.entropy != nullptr) store_statistic(p.entropy, row, state.entropy());
    }
    if (p.num_ids == 1) {  // the usual case, without what several need
      if (lane == 0) store_as(p.logp, row, p.logp_dtype, mine.logp(p, state.m, log_sum, inv_t));
      return;
    }
    const i64 first = static_cast<i64>(row) * p.num_ids;
#pragma unroll 1
    for (u32 k = lane; k < p.num_ids; k += kWarp) {
      const Target<T> target = k < kWarp ? mine : Target<T>::of(p, at, token_id(p, at, k));
      store_as(p.logp, first + k, p.logp_dtype, target.logp(p, state.m, log_sum, inv_t));
    }
  }
};

// Writes the zeros of a row that was left out, for a shard those of an empty sum; called by one thread.
template <class Acc>
__device__ __forceinline__ void write_skipped_row(const LogpParams& p, u32 row) {
  store_statistic(p.row_max, row, Acc(0));
  store_statistic(p.log_sum, row, p.is_shard ? -Math<Acc>::infinity() : Acc(0));
  store_statistic(p.entropy, row, Acc(0));
  const i64 first = static_cast<i64>(row) * p.num_ids;
#pragma unroll 1
  for (u32 k = 0; k < p.num_ids; ++k) store_as(p.logp, first + k, p.logp_dtype, no_target<Acc>(p));
}

// This thread's vectors of a tile.
template <class T, bool kAligned>
__device__ __forceinline__ void load_tile(const RowReader<T>& reader, u32 tile, Vec16 (&v)[kVectors<T>]) {
  constexpr u32 kColumns = kTileColumns<T>, kStep = kGroup * T::kVec;
  const u32 c = tile * kColumns + threadIdx.x % kGroup * T::kVec;
  if (reader.template has_tile<kAligned>(tile * kColumns, kColumns)) reader.template load<kAligned>(v, c, kStep);
  else reader.template load_guarded<kAligned>(v, c, kStep);
}

// Where registers allow, a thread holds the vectors of the next tile while it works on one.
template <class T, bool kAligned>
constexpr bool kHoldsNext = kAligned && sizeof(typename T::Bits) < 8;

// This thread's vectors of the first tile it visits.
template <class T, bool kAligned>
struct FirstTile {
  Vec16 v[kVectors<T>];

  __device__ __forceinline__ void load(const RowReader<T>& reader, u32 tile) {
    if constexpr (kHoldsNext<T, kAligned>) load_tile<T, kAligned>(reader, tile, v);
  }
};

// Calls visit(tile, v) with this thread's vectors of each tile in [first, last), in order. The first ones are loaded.
template <class T, bool kAligned, class Visit>
__device__ __forceinline__ void visit_tiles(const RowReader<T>& reader, u32 first, u32 last,
                                            const FirstTile<T, kAligned>& ahead, Visit visit) {
  Vec16 v[kVectors<T>];
  if constexpr (kHoldsNext<T, kAligned>) {
    Vec16 next[kVectors<T>];
#pragma unroll
    for (int j = 0; j < kVectors<T>; ++j) next[j] = ahead.v[j];
#pragma unroll 1
    for (u32 tile = first; tile < last; ++tile) {
#pragma unroll
      for (int j = 0; j < kVectors<T>; ++j) v[j] = next[j];
      if (tile + 1 < last) load_tile<T, kAligned>(reader, tile + 1, next);
      visit(tile, v);
    }
  } else {
#pragma unroll 1
    for (u32 tile = first; tile < last; ++tile) {
      load_tile<T, kAligned>(reader, tile, v);
      visit(tile, v);
    }
  }
}
