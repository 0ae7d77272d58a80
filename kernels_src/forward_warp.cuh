// Forward for many short rows: a warp has a row to itself and meets no other, so that rows overlap freely and what is
// done once a row is done by one warp.
//
// Each lane copies its own vectors to shared memory ahead of itself (cp.async: no registers are held by what is on its
// way) and reads back only those, so nothing is shared and nothing waits but for its own copies. The warp stands in for
// the four of a group: a state for each of their parts of a tile. Leaves and merge are those of the other kernels:
// same bits.
// Rows must be aligned to 16 bytes.
#pragma once
#include "forward.cuh"

// Resident blocks a multiprocessor that the register budget is set for. float64 and Blackwell code need more registers.
#if __CUDA_ARCH__ >= 1000
template <class T>
constexpr int kWarpBlocks = 3;
#else
template <class T>
constexpr int kWarpBlocks = sizeof(typename T::Bits) == 8 ? 3 : 5;
#endif

// What is on its way to a warp: a whole tile, one copy group for each part.
template <class T>
using WarpTile = Vec16[kGroupWarps][kVectors<T>][kWarp];

template <class T, bool kEntropy>
struct WarpScan {
  using Acc = typename T::Acc;
  using State = SoftmaxState<Acc>;
  const RowReader<T>& reader;
  WarpTile<T>& ring;
  Leaves<Acc>& leaves;
  Acc scale;
  State state[kGroupWarps];
  // This lane's first vector of the tile to fetch next, and how many of the row's whole vectors there are from it on.
  const Vec16* source;
  i32 left;

  // This lane's j-th vector of a part of a tile is so many behind its first one of the tile.
  static __device__ constexpr int offset(int part, int j) { return part * kWarp + j * kGroup; }

  __device__ __forceinline__ Vec16& copied(int part, int j) const { return ring[part][j][threadIdx.x % kWarp]; }

  __device__ __forceinline__ void fetch(int part) const {
#pragma unroll
    for (int j = 0; j < kVectors<T>; ++j)
      if (offset(part, j) < left) copy_async(&copied(part, j), source + offset(part, j));
    copy_async_commit();
  }

  __device__ __forceinline__ void advance() {
    source += kTileBytes<T> / 16;
    left -= kTileBytes<T> / 16;
  }

  __device__ __forceinline__ void add_whole_tile() {
#pragma unroll
    for (int part = 0; part < kGroupWarps; ++part) {
      copy_async_wait<kGroupWarps - 1>();
      Vec16 v[kVectors<T>];
#pragma unroll
      for (int j = 0; j < kVectors<T>; ++j) v[j] = copied(part, j);
      fetch(part);
      state[part].template add<T, kEntropy>(v, scale);
    }
    advance();
  }

  // The row's last tile, if it is not a whole one. The states take turns in state[0].
  __device__ __forceinline__ void add_last_tile(u32 tile) {
    copy_async_wait<0>();
    const u32 tail = reader.vocab_size / T::kVec * T::kVec;
#pragma unroll 1
    for (int part = 0; part < kGroupWarps; ++part) {
      const u32 first = tile * kTileColumns<T> + part * kWarp * T::kVec;
      if (first < reader.vocab_size) {
        const int count = (reader.vocab_size - first + kGroup * T::kVec - 1) / (kGroup * T::kVec);
        Vec16 v[kVectors<T>];
#pragma unroll
        for (int j = 0; j < kVectors<T>; ++j) {
          const u32 c = first + threadIdx.x % kWarp * T::kVec + j * kGroup * T::kVec;
          v[j] = c + T::kVec <= reader.vocab_size ? copied(part, j) : reader.nothing();
          if (c == tail && tail < reader.vocab_size) v[j] = reader.load_elements(tail);
        }
        state[0].template add<T, kEntropy>(v, scale, count);
      }
      const State first_state = state[0];
#pragma unroll
      for (int i = 0; i + 1 < kGroupWarps; ++i) state[i] = state[i + 1];
      state[kGroupWarps - 1] = first_state;
    }
  }

  __device__ __forceinline__ void end_segment(u32 segment) {
#pragma unroll
    for (int part = 0; part < kGroupWarps; ++part) {
      state[part].template reduce_warp<kEntropy>(scale);
      if (threadIdx.x % kWarp == 0) leaves.put(segment * kGroupWarps + part, state[part]);
      state[part] = State::empty();
    }
  }

  __device__ __forceinline__ void run(const Segmentation& seg) {
    source = reinterpret_cast<const Vec16*>(reader.row) + threadIdx.x % kWarp;
    left = static_cast<i32>(reader.vocab_size / T::kVec) - static_cast<i32>(threadIdx.x % kWarp);
#pragma unroll
    for (int part = 0; part < kGroupWarps; ++part) {
      state[part] = State::empty();
      fetch(part);
    }
    advance();
    u32 tile = 0;
#pragma unroll 1
    for (u32 segment = 0; segment < seg.segments; ++segment) {
      const u32 end = min((segment + 1) * seg.tiles_per_segment, seg.tiles);
#pragma unroll 1
      for (; tile < end; ++tile) {
        if ((tile + 1) * kTileColumns<T> <= reader.vocab_size) add_whole_tile();
        else add_last_tile(tile);
      }
      end_segment(segment);
    }
  }
};

template <class T>
__device__ __forceinline__ void forward_row_per_warp(const LogpParams& p) {
  using Acc = typename T::Acc;
  __shared__ WarpTile<T> rings[kGroupWarps];
  __shared__ Leaves<Acc> leaves[kGroupWarps];
  const u32 warp = threadIdx.x / kWarp;
  const u32 row = blockIdx.x * kGroupWarps + warp;
  if (row >= p.num_rows) return;
  const RowIndex at(row, p.inner_rows);
  if (!is_active(p, row, at)) {
    if (threadIdx.x % kWarp == 0) write_skipped_row<Acc>(p, row);
    return;
  }
  const RowReader<T> reader(row_start<T>(p, at), p.vocab_size);
  const Acc inv_t = inverse_temperature<Acc>(p, at);
  const Acc scale = Math<Acc>::scale(inv_t);
  const Segmentation seg(p.vocab_size, kTileColumns<T>);
  TargetLogit<T> target;
  target.prefetch(p, at);
  if (p.entropy != nullptr) WarpScan<T, true>{reader, rings[warp], leaves[warp], scale}.run(seg);
  else WarpScan<T, false>{reader, rings[warp], leaves[warp], scale}.run(seg);
  __syncwarp();
  write_row<T>(p, row, at, merge_leaves(p, leaves[warp], seg, scale), target, inv_t);
}
