// Forward for short rows, and for many that are a little longer: one group brings a whole row to shared memory at once
// (cp.async), each thread the vectors it will use, and reduces it from there. Nothing goes around in a ring, so registers
// are fewer and more rows are on their way than in any other kernel.
//
// Longer rows are taken in pieces of that size, one after the other. Leaves and merge are those of the other kernels:
// same bits. Rows must be aligned.
#pragma once
#include "forward.cuh"

constexpr int kStagedTiles = 2;  // a piece; what a segment has at least

// Resident blocks a multiprocessor that the register budget is set for: with fewer of either it is slower. float64 and
// Blackwell code need more registers.
#if __CUDA_ARCH__ >= 1000
template <class T>
constexpr int kStagedBlocks = sizeof(typename T::Bits) == 8 ? 4 : 6;
#else
template <class T>
constexpr int kStagedBlocks = sizeof(typename T::Bits) == 8 ? 5 : 10;
#endif

template <class T>
struct StagedPiece {
  Vec16 vectors[kStagedTiles][kVectors<T>][kGroup];
};

template <class T>
struct StagedRow {
  static constexpr u32 kStep = kGroup * T::kVec;

  const RowReader<T>& reader;
  const u32 place;  // in shared memory: this thread's first vector

  __device__ __forceinline__ StagedRow(const RowReader<T>& reader, StagedPiece<T>& piece)
      : reader(reader), place(shared_address(&piece.vectors[0][0][threadIdx.x])) {}

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

template <class T, bool kEntropy, class Put>
__device__ __forceinline__ void scan_staged(const StagedRow<T>& row, const Segmentation& seg, typename T::Acc scale,
                                            Put put) {
  using State = SoftmaxState<typename T::Acc>;
  State state = State::empty();
  u32 segment = 0, tile = 0;
#pragma unroll 1
  while (true) {
    const u32 end = min((segment + 1) * seg.tiles_per_segment, seg.tiles);
    row.template add<kEntropy>(state, tile, end, scale);
    tile = min(tile + kStagedTiles, end);
    if (tile == end) {
      state.template reduce_warp<kEntropy>(scale);
      put(segment++, state);
      state = State::empty();
    }
    if (tile == seg.tiles) return;
    copy_async_wait<0>();  // a tile behind the segment's end may be on its way to where the next ones go
    row.fetch(tile * kTileColumns<T>);
  }
}

template <class T>
__device__ __forceinline__ void forward_row_staged(const LogpParams& p) {
  using Acc = typename T::Acc;
  __shared__ StagedPiece<T> piece;
  __shared__ Leaves<Acc> leaves;
  const u32 index = blockIdx.x;
  const RowIndex at(index, p.inner_rows);
  if (!is_active(p, index, at)) {
    if (threadIdx.x == 0) write_skipped_row<Acc>(p, index);
    return;
  }
  const RowReader<T> reader(row_start<T>(p, at), p.vocab_size);
  const StagedRow<T> row(reader, piece);
  row.fetch(0);
  const Acc scale = Math<Acc>::scale(inverse_temperature<Acc>(p, at));
  const Segmentation seg(p.vocab_size, kTileColumns<T>);
  Target<T> target{};
  if (threadIdx.x < kWarp) target = Target<T>::of_lane(p, at);
  const auto put = [&](u32 segment, const SoftmaxState<Acc>& state) {
    if (threadIdx.x % kWarp == 0) leaves.put(leaf_index(segment), state);
  };
  if (p.entropy != nullptr) scan_staged<T, true>(row, seg, scale, put);
  else scan_staged<T, false>(row, seg, scale, put);
  __syncthreads();
  if (threadIdx.x < kWarp) finish_row<T>(p, block_index_again(), leaves, seg, scale, target);
}
