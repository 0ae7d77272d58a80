// Forward through shared memory: a few warps share a row, and each lane copies the vectors it will use ahead of itself
// (cp.async), so that what is on its way holds no registers and no warp waits for another before the row's end.
//
// Each of kWarps warps takes its parts of every tile: one warp stands in for the four of a group, four take one part
// each. Leaves and merge are those of the other kernels: same bits.
// Rows at any alignment: the ring holds the aligned granules that the vectors lie in, one more for each 32, and vectors
// are shifted into place on their way to registers.
#pragma once
#include "forward.cuh"

// Resident groups a multiprocessor that the register budget is set for. Rows that are not aligned, wider types and
// Blackwell code need more registers; before Hopper there is shared memory for one less.
template <class T>
constexpr int kRingGroups = __CUDA_ARCH__ >= 1000 || sizeof(typename T::Bits) == 8 ? 5
                            : sizeof(typename T::Bits) == 4                        ? 7
                            : __CUDA_ARCH__ < 900                                  ? 8
                                                                                   : 9;
template <class T>
constexpr int kShiftedRingGroups = kRingGroups<T> < 8 ? kRingGroups<T> : 8;
constexpr int kWarpRowGroups = __CUDA_ARCH__ >= 1000 ? 3 : 5;

template <class T, int kWarps, int kDepth>
struct RowRing {
  static constexpr int kParts = kGroupWarps / kWarps;  // of a tile, for each warp
  static constexpr int kSlots = kDepth * kParts;

  Vec16 granules[kWarps][kSlots][kVectors<T>][kWarp + 1];
};

// Brings one warp's parts of the tiles [begin, end) of a row to shared memory, kDepth tiles ahead.
template <class T, int kWarps, int kDepth, bool kAligned>
struct RingFeed {
  using Ring = RowRing<T, kWarps, kDepth>;
  static constexpr int kParts = Ring::kParts;
  static constexpr u32 kTileGranules = kTileBytes<T> / 16;
  static constexpr u32 kRowBytes = (kWarp + 1) * 16, kSlotBytes = kVectors<T> * kRowBytes;

  const RowReader<T>& reader;
  const u32 place;     // in shared memory: where this lane's first granule of slot 0 is
  const char* source;  // in global memory: this lane's first granule of the next tile to fetch
  i32 left;            // granules of the row from that one on
  u32 slot;            // of the next tile to read, part 0; the next parts follow

  // Vectors that are shifted reach into one granule more than there are of them.
  __device__ __forceinline__ RingFeed(const RowReader<T>& reader, Ring& ring, u32 begin, u32 end)
      : reader(reader), place(shared_address(&ring.granules[warp()][0][0][lane()])),
        source(reader.granule(0)), left(min(reader.granules(), end * kTileGranules + !kAligned)), slot(0) {
    const u32 first = begin * kTileGranules + warp() * kParts * kWarp + lane();
    source += first * 16;
    left -= first;
  }

  static __device__ __forceinline__ u32 lane() { return threadIdx.x % kWarp; }
  static __device__ __forceinline__ u32 warp() { return threadIdx.x / kWarp % kWarps; }

  // Asks for the first tiles.
  __device__ __forceinline__ void start(u32 begin) {
#pragma unroll
    for (int d = 0; d < kDepth; ++d) {
#pragma unroll
      for (int part = 0; part < kParts; ++part)
        fetch(d * kParts + part, part, d + part == 0 && begin + warp() + lane() == 0);
      advance();
    }
  }

  // This lane's vectors of a part of the next tile; their place is then filled anew.
  __device__ __forceinline__ void next(int part, Vec16 (&v)[kVectors<T>]) const {
    copy_async_wait<Ring::kSlots - 1>();
    read(slot + part, v);
    fetch(slot + part, part);
  }

  __device__ __forceinline__ void pass() {
    advance();
    slot = slot + kParts == Ring::kSlots ? 0 : slot + kParts;
  }

 private:
  // Asks for a part of a tile. A row that is not aligned has its first granule in common with what lies before it.
  __device__ __forceinline__ void fetch(u32 slot, int part, bool is_first = false) const {
    const u32 to = place + slot * kSlotBytes;
#pragma unroll
    for (int j = 0; j < kVectors<T>; ++j) {
      const int ahead = j * kGroup + part * kWarp;
      if (ahead < left && !(!kAligned && is_first && j == 0)) copy_async(to + j * kRowBytes, source + ahead * 16);
    }
    if constexpr (!kAligned) {
      // The granule behind a warp's 32 is fetched by a lane for each row of vectors.
      const int ahead = lane() * (kGroup - 1) + kWarp + part * kWarp;
      const u32 behind = to + lane() * (kRowBytes - 16) + kWarp * 16;
      if (lane() < kVectors<T> && ahead < left) copy_async(behind, source + ahead * 16);
    }
    copy_async_commit();
  }

  __device__ __forceinline__ void advance() {
    source += kTileBytes<T>;
    left -= kTileGranules;
  }

  __device__ __forceinline__ void read(u32 slot, Vec16 (&v)[kVectors<T>]) const {
    const u32 from = place + slot * kSlotBytes;
    if constexpr (kAligned) {
#pragma unroll
      for (int j = 0; j < kVectors<T>; ++j) load_shared(from + j * kRowBytes, v[j].w);
    } else {
      __syncwarp();
      reader.realign(v, [&](int j, Vec16 (&pair)[2]) {
#pragma unroll
        for (int i = 0; i < 2; ++i) load_shared(from + j * kRowBytes + i * 16, pair[i].w);
      });
      __syncwarp();
    }
  }
};

template <class T, int kWarps, int kDepth, bool kAligned, bool kEntropy>
struct RingScan {
  using Acc = typename T::Acc;
  using State = SoftmaxState<Acc>;
  using Feed = RingFeed<T, kWarps, kDepth, kAligned>;
  static constexpr int kParts = Feed::kParts;

  Feed feed;  // a copy: behind a reference it would cost registers
  const Segmentation& seg;
  const Acc scale;
  State state[kParts];

  __device__ __forceinline__ RingScan(const Feed& feed, const Segmentation& seg, Acc scale)
      : feed(feed), seg(seg), scale(scale) {
#pragma unroll
    for (int part = 0; part < kParts; ++part) state[part] = State::empty();
  }

  __device__ __forceinline__ void add_whole_tile() {
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      Vec16 v[kVectors<T>];
      feed.next(part, v);
      state[part].template add<T, kEntropy>(v, scale);
    }
  }

  // A tile at an end of the row: some vectors do not lie inside. The states take turns in state[0].
  __device__ __forceinline__ void add_end_tile(u32 tile) {
    const RowReader<T>& reader = feed.reader;
#pragma unroll 1
    for (int part = 0; part < kParts; ++part) {
      constexpr u32 kStep = kGroup * T::kVec;
      const u32 first = tile * kTileColumns<T> + (Feed::warp() * kParts + part) * kWarp * T::kVec;
      const u32 c = first + Feed::lane() * T::kVec;
      const Vec16 at_end = reader.template load_end<kAligned, kVectors<T>>(c, kStep);
      Vec16 v[kVectors<T>];
      feed.next(part, v);
      reader.template put_ends<kAligned>(at_end, v, c, kStep);
      if (first < reader.vocab_size)
        state[0].template add<T, kEntropy>(v, scale, (reader.vocab_size - first + kStep - 1) / kStep);
      const State first_state = state[0];
#pragma unroll
      for (int i = 0; i + 1 < kParts; ++i) state[i] = state[i + 1];
      state[kParts - 1] = first_state;
    }
  }

  // Segments [first, last) of a feed that has started. Calls put(leaf, state) on every lane.
  template <class Put>
  __device__ __forceinline__ void run(u32 first, u32 last, Put put) {
    u32 tile = seg.begin(first);
#pragma unroll 1
    for (u32 segment = first; segment < last; ++segment) {
      const u32 end = seg.begin(segment + 1);
#pragma unroll 1
      for (; tile < end; ++tile) {
        if (feed.reader.template has_tile<kAligned>(tile * kTileColumns<T>, kTileColumns<T>)) add_whole_tile();
        else add_end_tile(tile);
        feed.pass();
      }
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        state[part].template reduce_warp<kEntropy>(scale);
        put(segment * kGroupWarps + Feed::warp() * kParts + part, state[part]);
        state[part] = State::empty();
      }
    }
  }
};

// Many and very short rows: a warp each.
template <class T, bool kAligned, bool kEntropy, class Put>
__device__ __forceinline__ void scan_row_by_warp(const RowReader<T>& reader, const Segmentation& seg,
                                                 RowRing<T, 1, 1>& ring, typename T::Acc scale, Put put) {
  RingFeed<T, 1, 1, kAligned> feed(reader, ring, 0, seg.tiles);
  feed.start(0);
  RingScan<T, 1, 1, kAligned, kEntropy>(feed, seg, scale).run(0, seg.count(), put);
}

template <class T>
__device__ __forceinline__ void forward_row_per_warp(const LogpParams& p) {
  using Acc = typename T::Acc;
  __shared__ RowRing<T, 1, 1> rings[kGroupWarps];
  __shared__ Leaves<Acc> leaves[kGroupWarps];
  const u32 warp = threadIdx.x / kWarp, row = blockIdx.x * kGroupWarps + warp;
  if (row >= p.num_rows) return;
  const RowIndex at(row, p.inner_rows);
  const LoadedId first_id(p, at, 0);
  if (!is_active(p, row, at, first_id)) {
    if (threadIdx.x % kWarp == 0) write_skipped_row<Acc>(p, row);
    return;
  }
  const RowReader<T> reader(row_start<T>(p, at), p.vocab_size);
  const Acc scale = Math<Acc>::scale(inverse_temperature<Acc>(p, at));
  const Segmentation seg(p.vocab_size, kTileColumns<T>);
  const Target<T> target = Target<T>::of_lane(p, at, first_id);
  const auto put = [&](int leaf, const SoftmaxState<Acc>& state) {
    if (threadIdx.x % kWarp == 0) leaves[warp].put(leaf, state);
  };
  auto& ring = rings[warp];
  if (reader.shift == 0) {
    if (p.entropy != nullptr) scan_row_by_warp<T, true, true>(reader, seg, ring, scale, put);
    else scan_row_by_warp<T, true, false>(reader, seg, ring, scale, put);
  } else {
    if (p.entropy != nullptr) scan_row_by_warp<T, false, true>(reader, seg, ring, scale, put);
    else scan_row_by_warp<T, false, false>(reader, seg, ring, scale, put);
  }
  const RowEnd<T> end(p, block_index_again() * kGroupWarps + warp);
  __syncwarp();
  end.write(p, merge_leaves(p, leaves[warp], seg, scale), target);
}
