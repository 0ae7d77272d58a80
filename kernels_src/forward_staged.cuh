// Forward for short rows, and for many that are a little longer: one group brings a whole row to shared memory at once
// (cp.async), each thread the vectors it will use, and reduces it from there. Nothing goes around in a ring, so registers
// are fewer and more rows are on their way than in any other kernel.
//
// Longer rows are taken in pieces of that size, one after the other. Leaves and merge are those of the other kernels:
// same bits. Rows must be aligned.
#pragma once
#include "forward.cuh"

constexpr int kStagedTiles = 2;  // a piece; what a segment of a short row has at most

// Resident blocks a multiprocessor that the register budget is set for: with fewer of either it is slower. Blackwell
// code needs more registers, and before Hopper there is shared memory for one less.
constexpr int kStagedBlocks = __CUDA_ARCH__ >= 1000 ? 6 : __CUDA_ARCH__ < 900 ? 9 : 10;

template <class T>
struct StagedPiece {
  Vec16 vectors[kStagedTiles][kVectors<T>][kGroup];
};

template <class T>
struct StagedSource {
  static constexpr u32 kStep = kGroup * T::kVec;

  const RowReader<T>& reader;
  const Segmentation& seg;
  const u32 place;  // in shared memory: this thread's first vector

  // Takes all segments of the row.
  __device__ __forceinline__ StagedSource(const RowReader<T>& reader, const Segmentation& seg, u32, u32)
      : reader(reader), seg(seg), place(shared_address(&piece().vectors[0][0][threadIdx.x])) {}

  __device__ __forceinline__ void start() const { fetch(0); }

  template <bool kEntropy, class Put>
  __device__ __forceinline__ void scan(typename T::Acc scale, Put put) const {
    using State = SoftmaxState<typename T::Acc>;
    State state = State::empty();
    u32 segment = 0, tile = 0;
#pragma unroll 1
    while (true) {
      const u32 end = seg.begin(segment + 1);
      add<kEntropy>(state, tile, end, scale);
      tile = min(tile + kStagedTiles, end);
      if (tile == end) {
        state.template reduce_warp<kEntropy>(scale);
        put(leaf_index(segment++), state);
        state = State::empty();
      }
      if (tile == seg.tiles) return;
      copy_async_wait<0>();  // a tile behind the segment's end may be on its way to where the next ones go
      fetch(tile * kTileColumns<T>);
    }
  }

 private:
  static __device__ __forceinline__ StagedPiece<T>& piece() {
    __shared__ StagedPiece<T> piece;
    return piece;
  }

  // Asks for this thread's vectors of a piece. Of what does not lie inside the row, the vector at its end and -inf behind
  // it are put there directly.
  __device__ __forceinline__ void fetch(u32 first_column) const {
    const u32 c = first_column + threadIdx.x * T::kVec;
    const auto* source = reinterpret_cast<const Vec16*>(reader.row + c);
#pragma unroll
    for (int tile = 0; tile < kStagedTiles; ++tile) {
#pragma unroll
      for (int j = 0; j < kVectors<T>; ++j) {
        const int ahead = (tile * kVectors<T> + j) * kGroup;
        if (c + (ahead + 1) * T::kVec <= reader.vocab_size) copy_async_past_l1(place + ahead * 16, source + ahead);
        else store_shared(place + ahead * 16, reader.nothing().w);
      }
      copy_async_commit();
    }
    const u32 end = reader.vocab_size / T::kVec * T::kVec, behind = end - first_column;
    if (end < reader.vocab_size && behind < kStagedTiles * kTileColumns<T> && behind / T::kVec % kGroup == threadIdx.x)
      store_shared(place + behind / kStep * kGroup * 16, reader.load_elements(end).w);
  }

  // Adds the piece's tiles, the first of which is tile `first`, up to tile `end`.
  template <bool kEntropy>
  __device__ __forceinline__ void add(SoftmaxState<typename T::Acc>& state, u32 first, u32 end,
                                      typename T::Acc scale) const {
#pragma unroll
    for (int i = 0; i < kStagedTiles; ++i) {
      if (first + i >= end) break;
      Vec16 v[kVectors<T>];
      if (i == 0) copy_async_wait<kStagedTiles - 1>();
      else copy_async_wait<0>();
#pragma unroll
      for (int j = 0; j < kVectors<T>; ++j) load_shared(place + (i * kVectors<T> + j) * kGroup * 16, v[j].w);
      const u32 columns = reader.vocab_size - (first + i) * kTileColumns<T>;
      if (columns >= kTileColumns<T>) state.template add<T, kEntropy>(v, scale);
      else state.template add<T, kEntropy>(v, scale, (columns + kStep - 1) / kStep);
    }
  }
};
