// Hopper forward: logits come to shared memory by the bulk copy engine, rows overlap.
//
// A block is one group of consumer warps, one producer warp and one finisher warp. The producer streams
// the tiles of one row after another through a ring of stages, one tile each, so the next row's tiles are in flight
// while this row is being reduced. The consumers leave a row's leaves in shared memory and go on at once;
// the finisher, which has fetched the row's id and logit meanwhile, merges and writes.
// Blocks are persistent: block b takes rows b, b + gridDim.x, ...
// The 1-D bulk copy (cp.async.bulk) needs no tensor map, takes any row stride, and asks for 16-byte
// aligned rows. The tail of a row that does not fill 16 bytes is read by its thread directly.
// Leaves and merge are those of the generic kernel: same bits.
#pragma once
#include "forward.cuh"

constexpr int kStages = 2;
constexpr int kLeafSets = 2;  // rows that may wait for the finisher
constexpr int kTmaThreads = kGroup + 2 * kWarp;

// Resident blocks a multiprocessor: more consumers beat deeper rings. float64 needs more registers.
template <class T>
constexpr int kTmaBlocks = sizeof(typename T::Bits) == 8 ? 3 : 5;

// A ring of buffers between warps: full and empty barriers for each, and where one warp stands in it.
template <int kSize>
struct Ring {
  u64 full[kSize];
  u64 empty[kSize];

  __device__ __forceinline__ void init(u32 fillers, u32 emptiers) {
    for (int i = 0; i < kSize; ++i) {
      mbarrier_init(&full[i], fillers);
      mbarrier_init(&empty[i], emptiers);
    }
  }
};

template <int kSize>
struct RingCursor {
  Ring<kSize>& ring;
  u32 at = 0, parity = 0;

  __device__ __forceinline__ explicit RingCursor(Ring<kSize>& r) : ring(r) {}
  __device__ __forceinline__ void wait_full() { mbarrier_wait(&ring.full[at], parity); }
  __device__ __forceinline__ void wait_empty() { mbarrier_wait(&ring.empty[at], parity ^ 1); }
  __device__ __forceinline__ void arrive(u64 (&barriers)[kSize]) { mbarrier_arrive(&barriers[at]); }
  __device__ __forceinline__ void advance() {
    if (++at == kSize) {
      at = 0;
      parity ^= 1;
    }
  }
};

template <class Acc>
struct TmaShared {
  Ring<kStages> tiles;      // filled by the copy engine, emptied by the consumer warps
  Ring<kLeafSets> rows;     // filled by the consumer warps, emptied by the finisher
  Leaves<Acc> leaves[kLeafSets];
};

// Calls visit(row, lane) for this block's active rows in order. A warp looks 32 rows ahead at once, so the latency
// of the ids is paid once in 32 rows: before, each lane calls look(row, active) for its own row of the 32.
template <class Look, class Visit>
__device__ __forceinline__ void for_each_row(const LogpParams& p, Look look, Visit visit) {
  const u32 step = gridDim.x;
  for (u32 base = blockIdx.x; base < p.num_rows; base += kWarp * step) {
    const u32 mine = base + (threadIdx.x % kWarp) * step;
    const bool exists = mine < p.num_rows;
    const RowIndex at(mine, p.inner_rows);
    const bool active = exists && is_active(p, mine, at, LoadedId(p, at, 0));
    if (exists) look(mine, active);
    for (u32 left = __ballot_sync(~0u, active); left != 0; left &= left - 1) {
      const u32 lane = __ffs(left) - 1;
      visit(base + lane * step, lane);
    }
  }
}

template <class T>
__device__ __forceinline__ void produce(const LogpParams& p, Ring<kStages>& ring, char* stages) {
  const u32 tiles = Segmentation(p.vocab_size, kTileColumns<T>).tiles;
  const i64 row_bytes = (static_cast<i64>(p.vocab_size) * static_cast<i64>(sizeof(typename T::Bits))) & ~15ll;
  RingCursor<kStages> stage(ring);
  for_each_row(
      p, [](u32, bool) {},
      [&](u32 row, u32) {
        const char* source = reinterpret_cast<const char*>(row_start<T>(p, RowIndex(row, p.inner_rows)));
        for (u32 tile = 0; tile < tiles; ++tile) {
          const i64 begin = static_cast<i64>(tile) * kTileBytes<T>;
          const i64 left = row_bytes - begin;
          const u32 bytes = left < kTileBytes<T> ? static_cast<u32>(left) : kTileBytes<T>;
          stage.wait_empty();
          if (threadIdx.x % kWarp == 0) {
            u64* full = &ring.full[stage.at];
            mbarrier_expect_tx(full, bytes);
            if (bytes > 0) bulk_copy(stages + stage.at * kTileBytes<T>, source + begin, bytes, full);
          }
          stage.advance();
        }
      });
}

template <class T, bool kEntropy>
__device__ __forceinline__ SoftmaxState<typename T::Acc> consume_segment(const LogpParams& p, u32 row,
                                                                         RingCursor<kStages>& stage,
                                                                         const char* stages, u32 first,
                                                                         u32 last, typename T::Acc scale) {
  using Acc = typename T::Acc;
  SoftmaxState<Acc> state = SoftmaxState<Acc>::empty();
#pragma unroll 1
  for (u32 tile = first; tile < last; ++tile) {
    const u32 begin = tile * kTileColumns<T>;
    const Vec16* source = reinterpret_cast<const Vec16*>(stages + stage.at * kTileBytes<T>) + threadIdx.x;
    Vec16 v[kVectors<T>];
    stage.wait_full();
    if (begin + kTileColumns<T> <= p.vocab_size) {
#pragma unroll
      for (int j = 0; j < kVectors<T>; ++j) v[j] = source[j * kGroup];
    } else {
      const RowReader<T> reader(row_start<T>(p, RowIndex(row, p.inner_rows)), p.vocab_size);
      const u32 tail = reader.vocab_size / T::kVec * T::kVec;
      const bool mine = tail < reader.vocab_size && tail / T::kVec % kGroup == threadIdx.x;
      const Vec16 at_tail = mine ? reader.load_elements(tail) : reader.nothing();
#pragma unroll
      for (int j = 0; j < kVectors<T>; ++j) {
        const u32 c = begin + (j * kGroup + threadIdx.x) * T::kVec;
        v[j] = c + T::kVec <= reader.vocab_size ? source[j * kGroup] : c == tail ? at_tail : reader.nothing();
      }
    }
    stage.arrive(stage.ring.empty);
    stage.advance();
    state.template add<T, kEntropy>(v, scale);
  }
  state.template reduce_warp<kEntropy>(scale);
  return state;
}

template <class T, bool kEntropy>
__device__ __forceinline__ void consume(const LogpParams& p, TmaShared<typename T::Acc>& shared,
                                        const char* stages) {
  using Acc = typename T::Acc;
  const Segmentation seg(p.vocab_size, kTileColumns<T>);
  RingCursor<kStages> stage(shared.tiles);
  RingCursor<kLeafSets> set(shared.rows);
  for_each_row(
      p, [](u32, bool) {},
      [&](u32 row, u32) {
        const Acc scale = Math<Acc>::scale(inverse_temperature<Acc>(p, RowIndex(row, p.inner_rows)));
        set.wait_empty();
        for (u32 s = 0; seg.has(s); ++s) {
          const u32 begin = seg.begin(s), end = seg.begin(s + 1);
          const auto leaf = consume_segment<T, kEntropy>(p, row, stage, stages, begin, end, scale);
          if (threadIdx.x % kWarp == 0) shared.leaves[set.at].put(leaf_index(s), leaf);
        }
        set.arrive(shared.rows.full);
        set.advance();
      });
}

template <class T>
__device__ __forceinline__ void finish(const LogpParams& p, TmaShared<typename T::Acc>& shared) {
  using Acc = typename T::Acc;
  const Segmentation seg(p.vocab_size, kTileColumns<T>);
  RingCursor<kLeafSets> set(shared.rows);
  // With one id a row, the logits at the ids of 32 rows at once: of short rows, one after the other would be late.
  const bool ahead = p.num_ids == 1;
  Target<T> mine{};
  for_each_row(
      p,
      [&](u32 row, bool active) {
        if (!active) write_skipped_row<Acc>(p, row);
        else if (ahead) {
          const RowIndex at(row, p.inner_rows);
          mine = Target<T>::of(p, at, token_id(p, at, 0));
        }
      },
      [&](u32 row, u32 lane) {
        const RowEnd<T> end(p, row);
        const Target<T> target =
            ahead ? mine.of_other_lane(lane) : Target<T>::of_lane(p, end.at, LoadedId(p, end.at, 0));
        set.wait_full();
        const auto state = merge_leaves(p, shared.leaves[set.at], seg, Math<Acc>::scale(end.inv_t));
        set.arrive(shared.rows.empty);
        set.advance();
        end.write(p, state, target);
      });
}

template <class T>
__device__ __forceinline__ void forward_tma(const LogpParams& p) {
  extern __shared__ __align__(128) char stages[];
  __shared__ TmaShared<typename T::Acc> shared;
  if (threadIdx.x == 0) {
    shared.tiles.init(1, kGroup);
    shared.rows.init(kGroup, kWarp);
    fence_mbarrier_init();
  }
  __syncthreads();
  if (threadIdx.x >= kGroup + kWarp) finish<T>(p, shared);
  else if (threadIdx.x >= kGroup) produce<T>(p, shared.tiles, stages);
  else if (p.entropy != nullptr) consume<T, true>(p, shared, stages);
  else consume<T, false>(p, shared, stages);
}
